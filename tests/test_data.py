"""pbnn.data: what is read, what is refused and with which line, and what the arrays hold."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pbnn.data import (
    SHIPPED,
    guess_target_kind,
    prepare,
    read_table,
)
from pbnn.errors import DataError

UCI = Path(__file__).parents[2] / "shared" / "data" / "uci"


def lines(row, n=10):
    return "".join(row(i) + "\n" for i in range(n))


@pytest.fixture
def write(tmp_path):
    """Write text, bytes, a frame (Parquet) or a dict of arrays (.npz); return the path."""

    def to_file(content, name="rows.csv"):
        path = tmp_path / name
        if isinstance(content, dict):
            path = path.with_suffix(".npz")
            np.savez(path, **content)
        elif isinstance(content, pd.DataFrame):
            pytest.importorskip("pyarrow")
            path = path.with_suffix(".parquet")
            content.to_parquet(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
        return path

    return to_file


def mixed(n=20):
    r = np.arange(n)
    return pd.DataFrame(
        {
            "age": r + 20,
            "city": np.array(["Oslo", "Rome", "Bern"])[r % 3],
            "smoker": r % 2 == 0,
            "y": r * r / 7,
        }
    )


# ---- shipped sets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "shape", "classes"),
    [
        ("diabetes", "real", (442, 10), []),
        ("breast_cancer", "class", (569, 30), ["benign", "malignant"]),
        ("wine", "class", (178, 13), ["class_0", "class_1", "class_2"]),
        ("iris", "class", (150, 4), ["setosa", "versicolor", "virginica"]),
        ("digits", "class", (1797, 64), list(range(10))),
    ],
)
def test_shipped_sets(name, kind, shape, classes):
    data = prepare(name, target_kind=kind)
    assert len(data.x_train) + len(data.x_test) == shape[0]
    assert data.preprocessor.in_features == data.x_train.shape[1] == shape[1]
    assert data.preprocessor.classes == classes
    assert data.preprocessor.out_features == (len(classes) or 1)
    assert data.x_train.dtype == np.float64
    assert data.y_train.dtype == (np.int64 if classes else np.float64)
    assert guess_target_kind(read_table(name)) == kind


def test_shipped_names_are_known():
    assert set(SHIPPED) == {"diabetes", "breast_cancer", "wine", "iris", "digits"}


def test_diabetes_in_numbers_equals_scikit_learn():
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    x, y = load_diabetes(return_X_y=True)
    train, test = train_test_split(np.arange(442), test_size=0.2, random_state=3)
    data = prepare("diabetes", target_kind="real", seed=3)
    np.testing.assert_array_equal(data.train_rows, np.sort(train))
    np.testing.assert_array_equal(data.test_rows, np.sort(test))
    scaler = StandardScaler().fit(x[data.train_rows])
    # Both are the same sums in another order: some hundred roundings of 1e-16.
    np.testing.assert_allclose(data.x_test, scaler.transform(x[data.test_rows]), atol=1e-12)
    units = data.preprocessor.target_units
    assert units.loc == pytest.approx(y[data.train_rows].mean(), rel=1e-12)
    assert units.scale == pytest.approx(y[data.train_rows].std(), rel=1e-12)
    np.testing.assert_allclose(units.loc + units.scale * data.y_test, y[data.test_rows], rtol=1e-12)


@pytest.mark.skipif(not UCI.exists(), reason="the shared UCI tables are not beside this checkout")
@pytest.mark.parametrize("name", ["boston", "concrete", "energy", "yacht"])
def test_uci_tables_read_as_pandas_reads_them(name):
    frame = pd.read_csv(UCI / f"{name}.csv")
    table = read_table(UCI / f"{name}.csv", frame.columns[-1])
    pd.testing.assert_frame_equal(
        pd.concat([table.features, table.target], axis=1), frame, check_dtype=False
    )


# ---- forms of files ------------------------------------------------------------------------------

PLAIN = "a b,y\n" + lines(lambda i: f"{i},{i * i}")


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("\n", "\r").encode(),
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace("a b,y", ' "a b", "y"'),
        PLAIN.replace(",", " , ").replace("\n", " \n"),
        PLAIN.replace("3,9\n", "3,9\n\n") + "\n\n",
        PLAIN.rstrip("\n"),
    ],
    ids=["bom", "crlf", "cr", "semicolon", "tab", "quoted", "blanks", "blank lines", "no last end"],
)
def test_forms_of_delimited_text_are_one_table(write, content):
    table = read_table(write(content), "y")
    assert list(table.features.columns) == ["a b"]
    np.testing.assert_array_equal(table.features["a b"], np.arange(10))
    np.testing.assert_array_equal(table.target["y"], np.arange(10) ** 2)


def test_messages_count_lines_of_the_file(write):
    content = 'a,c,y\n1,"p\nq",2\n\n2,"p\nq",5\n3,r,1\n3,"p\nq",\n'
    with pytest.raises(DataError, match=r"misses values in 'y' \(1: line 8\)"):
        prepare(write(content), "y", target_kind="real")


def test_numbers_in_text_keep_every_bit(write):
    values = np.random.default_rng(0).normal(size=50) * 10.0 ** np.arange(-25, 25)
    frame = pd.DataFrame({"a": values, "y": values[::-1]})
    path = write(frame.to_csv(index=False, float_format="%.17g"))
    np.testing.assert_array_equal(read_table(path, "y").features["a"], values)


def test_column_names_of_an_array_written_by_pandas(write):
    path = write(pd.DataFrame(np.arange(20.0).reshape(10, 2)).to_csv(index=False))
    assert list(read_table(path, "1").features.columns) == ["0"]


def test_parquet_dtypes(write):
    n = 20
    r = np.arange(n)
    frame = pd.DataFrame(
        {
            "float32": r.astype("float32"),
            "int16": r.astype("int16"),
            "Int64": pd.array([1, 2] * 10, dtype="Int64"),
            "bool": r % 2 == 0,
            "boolean": pd.array([True, False] * 10, dtype="boolean"),
            "category": pd.Categorical(np.array(["u", "v"])[r % 2], categories=["v", "u", "w"]),
            "text": np.array(["p", "q"])[r % 2],
            "y": r.astype("float32"),
        }
    )
    data = prepare(write(frame), "y", target_kind="real")
    names = data.preprocessor.feature_names
    assert names[:5] == list(frame.columns[:5])
    assert names[5:] == ["category=u", "category=v", "text=p", "text=q"]
    x = np.vstack([data.x_train, data.x_test])[np.argsort([*data.train_rows, *data.test_rows])]
    np.testing.assert_array_equal(x[:, 3], r % 2 == 0)
    np.testing.assert_array_equal(x[:, 4], r % 2 == 0)
    np.testing.assert_array_equal(x[:, 5], r % 2 == 0)
    assert len(np.unique(x[:, 2])) == 2


def test_parquet_index(write):
    named = read_table(write(mixed().set_index("age")), "y")
    assert list(named.features.columns) == ["age", "city", "smoker"]
    filtered = mixed()[lambda f: f.smoker]
    assert list(read_table(write(filtered), "y").features.columns) == ["age", "city", "smoker"]


def test_index_of_several_levels():
    frame = mixed().rename_axis("row").set_index("age", append=True)
    assert list(read_table(frame, "y").features.columns) == ["row", "age", "city", "smoker"]
    frame.index = frame.index.set_names([None, "age"])
    assert list(read_table(frame, "y").features.columns) == ["age", "city", "smoker"]


def test_data_frame_is_a_source():
    data = prepare(mixed(), "y", target_kind="real")
    assert data.preprocessor.columns == ["age", "city", "smoker"]


def test_a_table_that_was_read_is_a_source():
    table = read_table(mixed(), "y", categorical=["age"])
    data = prepare(table, target_kind="real", drop=["age"])
    assert data.preprocessor.columns == ["city", "smoker"]
    for option in ({"target": "y"}, {"categorical": ["age"]}):
        with pytest.raises(DataError, match="was read already"):
            prepare(table, target_kind="real", **option)


def test_one_feature_and_many_outputs(write):
    path = write("a,y,z\n" + lines(lambda i: f"{i},{i * i},{-i}"))
    for target in ("z,y", ["z", "y"]):
        data = prepare(path, target, target_kind="real")
        assert data.preprocessor.target_names == ["z", "y"]
        assert data.x_train.shape == (8, 1)
        assert data.y_train.shape == (8, 2)
        units = data.preprocessor.target_units
        assert units.loc.shape == units.scale.shape == (2,)
        y = units.loc + units.scale * data.y_test
        np.testing.assert_allclose(y[:, 0], -data.test_rows, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(y[:, 1], data.test_rows**2, rtol=1e-12, atol=1e-12)


# ---- refusals: one line, with the name and the place ---------------------------------------------

REFUSED = {
    "no file": (None, "file not found"),
    "empty": ("", "empty"),
    "blank": ("\n \n", "empty"),
    "header only": ("a,y\n", "no rows"),
    "one row": ("a,y\n1,2\n", "1 rows are too few"),
    "two rows": ("a,y\n1,2\n2,3\n", "1 row for training"),
    "latin-1": ("a,y\n1,2\né,3\n".encode("latin-1"), "byte 0xe9 in line 3"),
    "utf-16": ("a,y\n1,2\n".encode("utf-16"), "not UTF-8"),
    "NUL": (b"a,y\n1,2\n\x00,3\n", "NUL byte in line 3"),
    "short row": ("a,b,y\n1,2,3\n1,2\n", "line 3 .* has 2 fields where the header has 3"),
    "long row": ("a,b,y\n1,2,3\n1,2,3,4\n", "line 3 .* has 4 fields where the header has 3"),
    "open quote": ('a,y\n1,2\n"3,4\n5,6\n', "line 3 .* cannot be read"),
    "text after quote": ('a,y\n"1"x,2\n', "line 2 .* cannot be read"),
    "duplicate": ("a,a,y\n1,2,3\n", "more than one column named 'a'"),
    "duplicate but for blanks": ("a, a,y\n1,2,3\n", "more than one column named 'a'"),
    "unnamed index": (",a,y\n0,1,2\n1,2,4\n", "column 1 .* has no name"),
    "no header": (lines(lambda i: f"{i + 0.5},{i}"), "first line .* holds numbers"),
    "unknown target": ("a,why\n1,2\n", "no column 'y'; its columns are 'a' and 'why'"),
    "target alone": ("y\n1\n2\n", "no feature column"),
    "blank line in one column": ("y\n1\n\n2\n", "line 3 .* is blank"),
    "bad number": (
        "bmi,y\n" + lines(lambda i: f"{'abc' if i == 7 else i},{i}"),
        "'bmi' has 'abc' in line 9.*categorical=",
    ),
    "decimal comma": (
        "a;y\n" + lines(lambda i: f"{i},5;{i}"),
        "'0,5' in line 2.*a point before decimals",
    ),
    "thousands": (
        "a;y\n" + lines(lambda i: f"{900 if i < 4 else '1,' + str(100 + i)};{i}"),
        "'1,104' in line 6.*nothing between thousands",
    ),
    "index that pandas wrote": ("Unnamed: 0,a,y\n0,1,2\n1,2,3\n2,4,8\n", "an index.*--drop"),
    "too many categories": (
        "c,y\n" + lines(lambda i: f"c{i % 1001},{i}", 4004),
        "'c' has 1001 categories; expected 1000",
    ),
    "bad target": ("a,y\n" + lines(lambda i: f"{i},{'abc' if i == 7 else i}"), "'y' has 'abc'"),
    "missing": (
        "a,b,y\n" + lines(lambda i: f"{'' if i == 7 else i},{'NA' if i < 4 else i},{i}"),
        r"'a' \(1: line 9\), 'b' \(4: lines 2, 3, 4 and 1 more\).*--impute",
    ),
    "missing target": (
        "a,y\n" + lines(lambda i: f"{i},{'?' if i == 2 else i}"),
        r"'y' \(1: line 4",
    ),
    "all missing": ("a,b,y\n" + lines(lambda i: f"{i},,{i}"), "'b' has no value.*--drop 'b'"),
    "infinite": ("a,y\n" + lines(lambda i: f"{'inf' if i == 2 else i},{i}"), "infinite in line 4"),
    "overflow": (
        "a,y\n" + lines(lambda i: f"{'1e400' if i == 2 else i},{i}"),
        "infinite in line 4",
    ),
    "infinite target": ("a,y\n" + lines(lambda i: f"{i},{'-inf' if i == 2 else i}"), "line 4"),
    "too wide": ("a,y\n" + lines(lambda i: f"{(-1) ** i * 1.7e308},{i}"), "'a' ranges too widely"),
    "constant target": ("a,y\n" + lines(lambda i: f"{i},3"), r"'y' is constant \(3\)"),
    "text target": ("a,y\n" + lines(lambda i: f"{i},c{i % 2}"), "'y' holds .*classification.py"),
    "true or false target": ("a,y\n" + lines(lambda i: f"{i},{i < 5}"), "classification.py"),
    "rare category": (
        "c,y\n" + lines(lambda i: f"{'rare' if i == 2 else 'often'},{i}"),
        "'c' has the category 'rare' in line 4",
    ),
    "identifiers": ("c,y\n" + lines(lambda i: f"n{i},{i}"), "'c' has 10 different.*--drop 'c'"),
    "dates": ("c,y\n" + lines(lambda i: f"2020-01-0{i},{i}"), "'c' holds dates.*--drop 'c'"),
    "same name after encoding": (
        "c,c=p,y\n" + lines(lambda i: f"{'pq'[i % 2]},{i},{i}"),
        "both become 'c=p'",
    ),
    "Parquet dates": (mixed().assign(t=pd.Timestamp("2020-01-01")), "'t' holds dates"),
    "Parquet days": (mixed().assign(t=pd.Timestamp("2020-01-01").date()), "'t' holds dates"),
    "Parquet durations": (mixed().assign(t=pd.Timedelta(1)), "'t' holds dates"),
    "Parquet lists": (mixed().assign(t=[[1, 2]] * 20), r"'t' has '\[1 2\]' in row 1"),
    "Parquet of nothing": (mixed().assign(t=None), "'t' has no value"),
    "Parquet without rows": (mixed()[:0], "no rows"),
    "no x": ({"z": np.ones((5, 2)), "y": np.arange(5)}, "no array 'x'; its arrays are 'z' and 'y'"),
    "no y": ({"x": np.ones((5, 2)), "z": np.arange(5)}, "no array 'y'"),
    "objects": ({"x": np.array([{}] * 3), "y": np.arange(3)}, "'x' .* never loaded"),
    "flat x": ({"x": np.ones(5), "y": np.arange(5)}, r"shape \(5,\); expected \(n, d\)"),
    "no columns": ({"x": np.ones((5, 0)), "y": np.arange(5)}, r"shape \(5, 0\)"),
    "complex": ({"x": np.ones((5, 1)) * 1j, "y": np.arange(5)}, "dtype complex128"),
    "deep y": ({"x": np.ones((5, 1)), "y": np.ones((5, 1, 1))}, r"'y' .* has shape \(5, 1, 1\)"),
    "unequal": ({"x": np.ones((5, 1)), "y": np.arange(6)}, "5 rows in 'x' and 6 in 'y'"),
    "arrays without rows": ({"x": np.ones((0, 1)), "y": np.ones(0)}, "without rows"),
    "NaN": ({"x": np.array([[1.0], [np.nan], [2.0]]), "y": np.arange(3)}, "'x' .* row 2.*--impute"),
    "inf": ({"x": np.array([[1.0], [np.inf], [2.0]]), "y": np.arange(3)}, "infinite in row 2"),
    "NaN in y": ({"x": np.ones((3, 1)), "y": np.array([1.0, np.nan, 2.0])}, r"'y' \(1: row 2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_that_names_the_place(write, tmp_path, case):
    content, message = REFUSED[case]
    path = tmp_path / "absent.csv" if content is None else write(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(path, "y", target_kind="real", test_fraction=0.2)
    assert "\n" not in str(caught.value)


CLASS_REFUSED = {
    "fraction": ("a,y\n" + lines(lambda i: f"{i},{i / 2}"), "'y' is 0.5 in line 3.*regression.py"),
    "rounded": ("a,y\n" + lines(lambda i: f"{i},9007199254740992{i % 2}.0"), "'y' is 9.0"),
    "one class": ("a,y\n" + lines(lambda i: f"{i},p"), "'y' is constant .'p'."),
    "missing": ("a,y\n" + lines(lambda i: f"{i},{'' if i == 3 else i % 2}"), "line 5"),
    "only in the test rows": (
        "a,y\n" + lines(lambda i: f"{i},{'new' if i == 2 else 'pq'[i % 2]}"),
        "class 'new' of target 'y' is in line 4, but in no training row",
    ),
    "mixed": (
        pd.DataFrame({"a": range(4), "y": pd.Series([1, True, 0, 1], dtype=object)}),
        "mixes",
    ),
}


@pytest.mark.parametrize("case", CLASS_REFUSED)
def test_class_targets_refused(write, case):
    content, message = CLASS_REFUSED[case]
    source = content if isinstance(content, pd.DataFrame) else write(content)
    with pytest.raises(DataError, match=message):
        prepare(source, "y", target_kind="class")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("count", [-1, 2, 3], "'y' is -1 in row 1; .*0 or more"),
        ("count", [0, 2.5, 3], "'y' is 2.5 in row 2"),
        ("positive", [1, 0, 2], "'y' is 0 in row 2; .*above 0"),
        ("count", [2, 2, 2], "constant"),
        ("ordinal", [1, 2, 3], "target_kind is 'ordinal'"),
    ],
)
def test_other_targets_refused(kind, values, message):
    frame = pd.DataFrame({"a": [1, 2, 4], "y": values})
    with pytest.raises(DataError, match=message):
        prepare(frame, "y", target_kind=kind, test_fraction=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": None}, "needs a target.*'age', 'city', 'smoker' and 'y'"),
        ({"target": "Y"}, "no column 'Y'.*did you mean 'y'"),
        ({"target": ["y", "y"]}, "twice"),
        ({"drop": ["y"]}, "'y' is the target"),
        ({"drop": ["ages"]}, "no column 'ages'.*did you mean 'age'"),
        ({"drop": ["age", "city", "smoker"]}, "no feature column"),
        ({"categorical": ["ages"]}, "no column 'ages'"),
        ({"seed": -1}, "seed is -1"),
        ({"test_fraction": 1.0}, "test fraction is 1.0"),
        ({"test_fraction": float("nan")}, "test fraction is nan"),
        ({"target": ["y", "age"], "target_kind": "class"}, "a class target is one column"),
    ],
)
def test_options_refused(options, message):
    with pytest.raises(DataError, match=message):
        prepare(mixed(), **{"target": "y", "target_kind": "real", **options})


def test_paths_that_are_no_tables(tmp_path, write):
    for path, message in [
        (tmp_path, "is a folder"),
        (write("a,y\n1,2\n", "rows.xlsx"), "is not a table"),
        (write(b"nonsense", "rows.parquet"), "cannot be read"),
        (write(b"nonsense", "rows.npz"), "cannot be read"),
        ("diabets", "file not found: 'diabets'.*'diabetes'"),
    ]:
        if str(path).endswith("parquet"):
            pytest.importorskip("pyarrow")
        with pytest.raises(DataError, match=message):
            read_table(path, "y")


def test_parquet_without_pyarrow(monkeypatch, tmp_path):
    def absent(path):
        raise ImportError("no engine")

    monkeypatch.setattr(pd, "read_parquet", absent)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="needs pyarrow to be read: pip install"):
        read_table(tmp_path / "rows.parquet", "y")


def test_unreadable_file(write, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied")

    path = write("a,y\n1,2\n")
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        read_table(path, "y")


def test_npz_cut_short(write):
    path = write({"x": np.ones((100, 3)), "y": np.arange(100)})
    raw = bytearray(path.read_bytes())
    raw[200:400] = bytes(200)
    path.write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        prepare(path, target_kind="real")


def test_damaged_text_gives_a_table_or_one_line(write):
    rng = np.random.default_rng(0)
    whole = ("a,c,y\n" + lines(lambda i: f"{i}.5,{'pq'[i % 2]},{i}", 20)).encode()
    read = 0
    for _ in range(150):
        raw = bytearray(whole)
        for place in rng.integers(0, len(raw), 3):
            raw[place] = rng.choice(list(b'\n\r,;"\t\x00\xff1pe. -'))
        try:
            data = prepare(write(bytes(raw)), "y", target_kind="real")
        except DataError:
            continue
        assert np.isfinite(data.x_train).all()
        assert np.isfinite(data.y_test).all()
        read += 1
    assert 0 < read < 150
