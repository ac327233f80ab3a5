"""pbnn.data: what becomes of columns, arrays and targets, and of new rows after saving."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from pbnn.data import (
    Preprocessor,
    guess_target_kind,
    prepare,
    read_features,
    read_table,
    split_rows,
)
from pbnn.data.units import Units, location_and_scale
from pbnn.errors import DataError

TRAINING = "id,age,city,smoker,zip,flat,y\n" + "".join(
    f"k{i},{20 + i * i},{'Oslo' if i % 3 else 'Rome'},{i % 2 == 0},0{i % 2},7,{i * i / 7}\n"
    for i in range(20)
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "training.csv"
    path.write_text(TRAINING)
    return path


@pytest.fixture
def data(path):
    return prepare(path, "y", target_kind="real", drop=["id"], categorical=["zip"])


def saved(preprocessor):
    """The preprocessor after a journey through the text of a JSON file."""
    return Preprocessor.from_json(json.loads(json.dumps(preprocessor.to_json(), allow_nan=False)))


def whole(data):
    """x of all rows, in the order of the table."""
    order = np.argsort(np.concatenate([data.train_rows, data.test_rows]))
    return np.concatenate([data.x_train, data.x_test])[order]


# ---- import -------------------------------------------------------------------------------------


def test_import_is_light():
    heavy = "{'torch', 'pandas', 'sklearn', 'pyarrow', 'scipy'} & set(sys.modules)"
    code = f"import sys, pbnn.data; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_is_never_imported(path):
    code = (
        "import sys; from pbnn.data import prepare; "
        f"prepare({str(path)!r}, 'y', target_kind='real', drop=['id']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the split ----------------------------------------------------------------------------------


def test_split_is_a_partition_fixed_by_its_seed():
    train, test = split_rows(103, seed=5)
    np.testing.assert_array_equal(np.sort([*train, *test]), np.arange(103))
    assert len(test) == 21
    np.testing.assert_array_equal(train, split_rows(103, seed=5)[0])
    assert not np.array_equal(train, split_rows(103, seed=6)[0])


def test_split_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (this is the generator in question)
    split_rows(50)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_split_without_test_rows():
    train, test = split_rows(7, test_fraction=0)
    np.testing.assert_array_equal(train, np.arange(7))
    assert test.shape == (0,)
    data = prepare("iris", target_kind="class", test_fraction=0)
    assert data.x_train.shape == (150, 4)
    assert data.x_test.shape == (0, 4)
    assert data.y_test.shape == (0,)


@pytest.mark.parametrize("n", [0, 1])
def test_split_of_too_few_rows(n):
    with pytest.raises(DataError, match=f"{n} rows are too few"):
        split_rows(n)


def test_split_by_class_refused_with_one_line():
    with pytest.raises(DataError, match="cannot be split by class"):
        split_rows(10, stratify=np.arange(10))


def test_class_shares_are_kept():
    frame = pd.DataFrame({"a": np.arange(100.0), "y": ["rare"] * 10 + ["often"] * 90})
    for seed in range(5):
        data = prepare(frame, "y", target_kind="class", seed=seed)
        assert data.preprocessor.classes == ["often", "rare"]
        assert data.y_train.sum() == 8
        assert data.y_test.sum() == 2


def test_a_class_of_one_row_may_be_in_training():
    frame = pd.DataFrame({"a": np.arange(20.0), "y": ["once"] + ["p", "q"] * 9 + ["p"]})
    seeds = range(20)
    outcomes = []
    for seed in seeds:
        alone = 0 in split_rows(20, seed=seed)[1]
        if alone:
            with pytest.raises(DataError, match=r"class 'once' .* row 1, but in no training row"):
                prepare(frame, "y", target_kind="class", seed=seed)
        else:
            assert (
                "once" in prepare(frame, "y", target_kind="class", seed=seed).preprocessor.classes
            )
        outcomes.append(alone)
    assert set(outcomes) == {True, False}


# ---- statistics of the training rows only -------------------------------------------------------


@pytest.mark.parametrize("impute", [False, True])
def test_test_rows_do_not_leak_into_training_rows(path, impute):
    frame = pd.read_csv(path, dtype={"zip": str})
    options = {"target_kind": "real", "drop": ["id"], "impute": impute}
    before = prepare(frame, "y", **options)
    other = frame.copy()
    rows = before.test_rows
    other.loc[rows, "age"] = 10_000 + np.arange(len(rows))
    other.loc[rows, "city"] = "Rome"
    other.loc[rows, "smoker"] = True
    other.loc[rows, "flat"] = -1
    other.loc[rows, "y"] = 1e6
    after = prepare(other, "y", **options)
    np.testing.assert_array_equal(before.x_train, after.x_train)
    np.testing.assert_array_equal(before.y_train, after.y_train)
    assert before.preprocessor.to_json() == after.preprocessor.to_json()
    assert not np.array_equal(before.x_test, after.x_test)


def test_arrays_do_not_leak_either(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 2, 4, 4)), rng.normal(size=30)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    before = prepare(tmp_path / "a.npz", target_kind="real")
    x[before.test_rows] += 100
    np.savez(tmp_path / "b.npz", x=x, y=y)
    after = prepare(tmp_path / "b.npz", target_kind="real")
    np.testing.assert_array_equal(before.x_train, after.x_train)


# ---- columns ------------------------------------------------------------------------------------


def test_encoding_of_each_kind_of_column(data):
    fitted = data.preprocessor
    names = ["age", "city=Oslo", "city=Rome", "smoker", "zip=00", "zip=01", "flat"]
    assert fitted.feature_names == names
    assert fitted.in_features == 7
    assert fitted.input_shape == (7,)
    i, x = np.arange(20), whole(data)
    age = (20 + i * i).astype(float)
    train = age[data.train_rows]
    np.testing.assert_allclose(x[:, 0], (age - train.mean()) / train.std(), rtol=1e-12)
    np.testing.assert_array_equal(x[:, 1], i % 3 != 0)
    np.testing.assert_array_equal(x[:, 2], i % 3 == 0)
    np.testing.assert_array_equal(x[:, 3], i % 2 == 0)
    np.testing.assert_array_equal(x[:, 5], i % 2)
    np.testing.assert_array_equal(x[:, 6], 0)
    notes = "\n".join(fitted.notes)
    assert "column 'city': one-hot encoded as 'city=Oslo' and 'city=Rome'" in notes
    assert "column 'smoker': 0 for false, 1 for true" in notes
    assert "constant in the training rows, kept with scale 1: 'flat'" in notes
    assert "features: 2 of 5 columns standardised" in notes


def test_one_hot_equals_scikit_learn():
    from sklearn.preprocessing import OneHotEncoder

    cities = np.random.default_rng(0).choice(["Ulm", "Bonn", "Kiel", "Ath"], 60)
    frame = pd.DataFrame({"city": cities, "y": np.arange(60.0)})
    data = prepare(frame, "y", target_kind="real")
    encoder = OneHotEncoder(sparse_output=False).fit(frame[["city"]].iloc[data.train_rows])
    np.testing.assert_array_equal(whole(data), encoder.transform(frame[["city"]]))


def test_whole_numbers_as_categories(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("g,y\n" + "".join(f"{'3+' if i % 4 == 3 else i % 4},{i}\n" for i in range(40)))
    with pytest.raises(DataError, match=r"'g' has '3\+'.*categorical=\['g'\] \(--categorical 'g'"):
        prepare(path, "y", target_kind="real")
    data = prepare(path, "y", target_kind="real", categorical="g")
    assert data.preprocessor.feature_names == ["g=0", "g=1", "g=2", "g=3+"]
    frame = pd.DataFrame({"g": np.arange(40) % 3, "y": np.arange(40.0)})
    data = prepare(frame, "y", target_kind="real", categorical=["g"])
    assert data.preprocessor.feature_names == ["g=0", "g=1", "g=2"]
    as_floats = frame.assign(g=frame.g.astype(float)).drop(columns="y")
    np.testing.assert_array_equal(data.preprocessor.transform(as_floats), whole(data))


def test_a_category_of_the_test_rows_only_is_refused():
    frame = pd.DataFrame({"c": ["p", "q"] * 10, "y": np.arange(20.0)})
    row = int(split_rows(20)[1][0])
    frame.loc[row, "c"] = "new"
    with pytest.raises(
        DataError, match=f"'c' has the category 'new' in row {row + 1},.*'p' and 'q'"
    ):
        prepare(frame, "y", target_kind="real")


def test_imputation_uses_training_rows_and_says_so():
    n = 40
    frame = pd.DataFrame(
        {
            "a": np.arange(n) ** 2.0,
            "b": np.arange(n) % 3 == 0,
            "c": ["often", "often", "rare", "rare2"] * (n // 4),
            "y": np.arange(float(n)),
        }
    )
    train, test = split_rows(n)
    blank = frame.astype({"b": object})
    for row in (train[0], train[5], test[0]):
        blank.loc[row, ["a", "b", "c"]] = None
    data = prepare(blank, "y", target_kind="real", impute=True)
    x, known = whole(data), np.setdiff1d(train, train[[0, 5]])
    a = frame["a"].to_numpy()
    scale = a[known].std()
    for row in (train[0], train[5], test[0]):
        assert x[row, 0] == 0.0
        np.testing.assert_array_equal(x[row, 1:], [0, 1, 0, 0])
    np.testing.assert_allclose(x[known, 0], (a[known] - a[known].mean()) / scale, rtol=1e-12)
    assert any("'a' (3: rows" in note for note in data.preprocessor.notes)
    with pytest.raises(DataError, match=r"'a' \(3: rows .*'b' \(3: .*'c' \(3: "):
        prepare(blank, "y", target_kind="real")


def test_missing_targets_are_never_imputed():
    frame = pd.DataFrame({"a": np.arange(10.0), "y": [1.0, None, *range(8)]})
    with pytest.raises(DataError, match=r"'y' \(1: row 2\); targets are never filled in"):
        prepare(frame, "y", target_kind="real", impute=True)


@pytest.mark.parametrize("factor", [1e-300, 1e-200, 1.0, 1e200, 1e300])
def test_scale_survives_extreme_units(factor):
    values = np.arange(10.0)
    loc, scale, constant = location_and_scale(values * factor)
    # (10² − 1)/12 is the variance of ten equally spaced numbers.
    assert scale / factor == pytest.approx(np.sqrt(99 / 12), rel=1e-12)
    assert loc / factor == pytest.approx(4.5, rel=1e-12)
    assert not constant


def test_rounding_error_of_a_constant_is_no_information():
    loc, scale, constant = location_and_scale(np.array([0.1 + 0.2, 0.3, 0.3]))
    assert constant
    assert scale == 1.0
    assert loc == pytest.approx(0.3)
    assert location_and_scale(np.full(7, 0.1))[0] == 0.1


# ---- arrays -------------------------------------------------------------------------------------


def test_images_by_channel(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 3, 5, 4)).astype("uint8")
    x[:, 2] = 9
    np.savez(tmp_path / "a.npz", x=x, label=np.arange(40) % 2)
    data = prepare(tmp_path / "a.npz", "label", target_kind="class")
    assert data.x_train.shape == (32, 3, 5, 4)
    assert data.preprocessor.in_features == 3
    assert data.preprocessor.input_shape == (3, 5, 4)
    np.testing.assert_allclose(data.x_train.mean((0, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(data.x_train.std((0, 2, 3)), [1, 1, 0], atol=1e-12)
    assert "kept with scale 1: 'x2'" in "\n".join(data.preprocessor.notes)
    x_new, frame = read_features(tmp_path / "a.npz", saved(data.preprocessor))
    np.testing.assert_array_equal(x_new, whole(data))
    assert frame.shape == (40, 0)


def test_sequences_by_feature_and_columns_by_column(tmp_path):
    rng = np.random.default_rng(0)
    for shape, axes in [((30, 6, 2), (0, 1)), ((30, 2), (0,))]:
        x = rng.normal([3, -5], [2, 0.1], shape).astype("float32")
        np.savez(tmp_path / "a.npz", x=x, y=rng.normal(size=(30, 1)))
        data = prepare(tmp_path / "a.npz", target_kind="real")
        assert data.preprocessor.in_features == 2
        assert data.y_train.shape == (24,)
        np.testing.assert_allclose(data.x_train.mean(axes), 0, atol=1e-12)
        np.testing.assert_allclose(data.x_train.std(axes), 1, rtol=1e-12)


def test_arrays_with_missing_values(tmp_path):
    x = np.arange(20.0).reshape(10, 2)
    x[3, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(10))
    data = prepare(tmp_path / "a.npz", target_kind="real", impute=True)
    assert whole(data)[3, 1] == 0
    assert "in row 4" in data.preprocessor.notes[-1]
    np.savez(tmp_path / "b.npz", x=np.full((10, 2), np.nan), y=np.arange(10))
    with pytest.raises(DataError, match="no value in column or channel 0 and 1"):
        prepare(tmp_path / "b.npz", target_kind="real", impute=True)


def test_arrays_have_no_names(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((5, 2)), y=np.arange(5))
    for option in ({"drop": ["x0"]}, {"categorical": ["x0"]}, {"target": ["y", "z"]}):
        with pytest.raises(DataError, match=r"names|one array"):
            prepare(tmp_path / "a.npz", target_kind="real", **option)


def test_an_array_for_a_table_and_the_reverse(tmp_path, data, path):
    np.savez(tmp_path / "a.npz", x=np.eye(5)[:, :2], y=np.arange(5))
    fitted = prepare(tmp_path / "a.npz", target_kind="real").preprocessor
    with pytest.raises(DataError, match=r"pass an \.npz"):
        read_features(path, fitted)
    with pytest.raises(DataError, match="the columns 'age'"):
        read_features(tmp_path / "a.npz", data.preprocessor)
    with pytest.raises(DataError, match=r"rows of shape \(3,\); in training they had \(2,\)"):
        fitted.transform(np.ones((4, 3)))
    with pytest.raises(DataError, match="dtype"):
        fitted.transform(np.array([["a", "b"]]))
    assert fitted.transform(np.ones((0, 2))).shape == (0, 2)


# ---- targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["b", "a", "b", "c"], ["a", "b", "c"]),
        ([True, False, True, True], [False, True]),
        ([3, 1, 3, 10], [1, 3, 10]),
        ([2.0, 0.0, 2.0, 2.0], [0, 2]),
        (pd.Categorical(["v", "u", "v", "v"], categories=["v", "w", "u"]), ["u", "v"]),
    ],
)
def test_class_targets(labels, classes):
    frame = pd.DataFrame({"a": np.arange(4.0), "y": labels})
    data = prepare(frame, "y", target_kind="class", test_fraction=0)
    assert data.preprocessor.classes == classes
    assert data.preprocessor.out_features == len(classes)
    assert [type(c) for c in data.preprocessor.classes] == [type(classes[0])] * len(classes)
    np.testing.assert_array_equal(np.array(classes)[data.y_train], np.array(frame["y"]))
    again = saved(data.preprocessor)
    assert again.classes == classes
    np.testing.assert_array_equal(again.encode_target(frame["y"]), data.y_train)
    units = again.target_units
    assert (units.loc, units.scale) == (0, 1)


def test_counts_and_positive_numbers_stay_as_they_are():
    frame = pd.DataFrame({"a": np.arange(4.0), "y": [0, 3, 1, 7], "z": [0.5, 3, 1, 7]})
    for target, kind in (("y", "count"), ("z", "positive")):
        data = prepare(frame[["a", target]], target, target_kind=kind, test_fraction=0)
        np.testing.assert_array_equal(data.y_train, frame[target])
        assert data.y_train.dtype == np.float64
        assert data.preprocessor.target_units.scale == 1


def test_units_restore_what_was_standardised_and_nothing_else():
    codes = np.array([[0, 2], [1, 1]])
    restored = Units(np.zeros(()), np.ones(())).restore(codes)
    assert restored.dtype == codes.dtype
    np.testing.assert_array_equal(restored, codes)
    two = Units(np.array([1.0, -1.0]), np.array([2.0, 0.5]))
    np.testing.assert_array_equal(two.restore(codes[None]), [[[1, 0], [3, -0.5]]])


def test_guessed_kinds():
    frame = pd.DataFrame({"a": [1, 2], "t": ["p", "q"], "b": [True, False], "r": [0.5, 1]})
    kinds = {name: guess_target_kind(read_table(frame, name)) for name in "atbr"}
    assert kinds == {"a": "real", "t": "class", "b": "class", "r": "real"}


def test_encode_target_of_new_rows(data):
    units = data.preprocessor.target_units
    y = np.array([1.0, 2.0])
    np.testing.assert_array_equal(data.preprocessor.encode_target(y), (y - units.loc) / units.scale)
    with pytest.raises(DataError, match="the target has 2 columns; expected 'y'"):
        data.preprocessor.encode_target(np.ones((3, 2)))
