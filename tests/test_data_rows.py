"""pbnn.data: new rows for prediction, by a preprocessor fresh from its saved form."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from pbnn.data import Preprocessor, prepare, read_features
from pbnn.errors import DataError, FileError, PbnnWarning

TRAINING = "id,age,city,smoker,zip,flat,y\n" + "".join(
    f"k{i},{20 + i * i},{'Oslo' if i % 3 else 'Rome'},{i % 2 == 0},0{i % 2},7,{i * i / 7}\n"
    for i in range(20)
)
COLUMNS = "age,city,smoker,zip,flat\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "training.csv"
    path.write_text(TRAINING)
    return path


@pytest.fixture
def data(path):
    return prepare(path, "y", target_kind="real", drop=["id"], categorical=["zip"])


@pytest.fixture
def new_rows(tmp_path):
    def write(text):
        path = tmp_path / "new.csv"
        path.write_text(text)
        return path

    return write


def saved(preprocessor):
    """The preprocessor after a journey through the text of a JSON file."""
    return Preprocessor.from_json(json.loads(json.dumps(preprocessor.to_json(), allow_nan=False)))


def whole(data):
    """x of all rows, in the order of the table."""
    order = np.argsort(np.concatenate([data.train_rows, data.test_rows]))
    return np.concatenate([data.x_train, data.x_test])[order]


def test_saved_preprocessor_gives_the_same_bits(data, path):
    again = saved(data.preprocessor)
    assert again.to_json() == data.preprocessor.to_json()
    with pytest.warns(PbnnWarning, match="the target 'y' in the rows is not used"):
        x, frame = read_features(path, again)
    np.testing.assert_array_equal(x, whole(data))
    assert len(frame) == 20
    alone = [again.transform(frame.drop(columns="y").iloc[[row]]) for row in range(20)]
    np.testing.assert_array_equal(np.concatenate(alone), x)


def test_columns_in_any_order(data, path, new_rows):
    rows = [line.split(",") for line in path.read_text().splitlines()]
    order = [4, 1, 5, 3, 2]
    text = "".join(",".join(row[i] for i in order) + "\n" for row in rows)
    x, frame = read_features(new_rows(text), data.preprocessor)
    np.testing.assert_array_equal(x, whole(data))
    assert list(frame.columns) == ["zip", "age", "flat", "smoker", "city"]


@pytest.mark.parametrize("rows", ["", "\n"])
def test_no_rows(data, new_rows, rows):
    x, frame = read_features(new_rows(COLUMNS + rows), data.preprocessor)
    assert x.shape == (0, 7)
    assert x.dtype == np.float64
    assert len(frame) == 0


def test_one_row_and_other_ways_to_write_true(data, new_rows):
    for word, value in [("true", 1), ("False", 0), ("1", 1), ("0.0", 0)]:
        row = f"30,Rome,{word},01,7\n"
        x, _ = read_features(new_rows(COLUMNS + row), data.preprocessor)
        np.testing.assert_array_equal(x[0, 1:], [0, 1, value, 0, 1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,city,smoker,zip\n1,Rome,1,00\n", "column 'flat' is missing"),
        ("Age,city,smoker,zip,flat\n1,Rome,1,00,7\n", "column 'age' is missing"),
        ("age,city,smoker,zip,flat,w\n1,Rome,1,00,7,3\n", "'w' was not there in training"),
        ("age,age,smoker,zip,flat\n1,Rome,1,00,7\n", "more than one column named 'age'"),
        (COLUMNS + "1,Paris,1,00,7\n", "'city' has the category 'Paris' in line 2,"),
        (COLUMNS + "1,Rome,1,00,7\n1,Rome,1,0,7\n", "'zip' has the category '0' in line 3,"),
        (COLUMNS + "abc,Rome,1,00,7\n", "'age' has 'abc' in line 2, where a number"),
        (COLUMNS + "1,Rome,true,00,7\n1,Rome,yes,00,7\n", "'smoker' has 'yes' in line 3, where tr"),
        (COLUMNS + "1,Rome,2,00,7\n", "'smoker' has '2' in line 2"),
        (COLUMNS + "1,Rome,1,00,\n", r"missing values in 'flat' \(1: line 2\)"),
        (COLUMNS + "inf,Rome,1,00,7\n", "'age' is infinite in line 2"),
        ("", "is empty"),
    ],
)
def test_new_rows_refused(data, new_rows, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read_features(new_rows(text), data.preprocessor)
    assert "\n" not in str(caught.value)


def test_text_that_looks_like_numbers_stays_text(new_rows):
    frame = pd.DataFrame({"c": ["01", "NA", "true"] * 4, "y": np.arange(12.0)})
    fitted = prepare(frame, "y", target_kind="real", test_fraction=0).preprocessor
    x, _ = read_features(new_rows("c\n01\nNA\n"), fitted)
    np.testing.assert_array_equal(x, [[1, 0, 0], [0, 1, 0]])


def test_filled_rows_are_said(path, new_rows):
    data = prepare(path, "y", target_kind="real", drop=["id"], impute=True)
    with pytest.warns(PbnnWarning, match=r"most frequent value in 'age' \(1: line 2\)"):
        x, _ = read_features(new_rows(COLUMNS + ",Rome,1,0,7\n"), saved(data.preprocessor))
    assert x[0, 0] == 0


def test_transform_of_a_frame_without_warnings(data):
    frame = pd.DataFrame(
        {"age": [30], "city": ["Oslo"], "smoker": [True], "zip": ["00"], "flat": [7], "id": [0]}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data.preprocessor.transform(frame).shape == (1, 7)
    with pytest.raises(DataError, match="the fit was on a table"):
        data.preprocessor.transform(np.ones((1, 7)))


@pytest.mark.parametrize("change", [{"format": 99}, {"target": {}}, {"columns": [{"name": "a"}]}])
def test_saved_form_is_checked(data, change):
    with pytest.raises(FileError, match="the saved preprocessor"):
        Preprocessor.from_json({**data.preprocessor.to_json(), **change})
