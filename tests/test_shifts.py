"""Rows unlike the training rows: what is held out, what is moved, and that nothing leaks."""

import numpy as np
import pandas as pd
import pytest

from pbnn.data import Preprocessor, Rows, prepare, read_table
from pbnn.data.shifts import hold_out_classes, hold_out_gap, shift, shift_series
from pbnn.data.tables import Table
from pbnn.errors import DataError


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "a": 10.0 + 3.0 * rng.normal(size=60),
            "b": rng.normal(size=60),
            "same": 1.0,
            "city": np.where(np.arange(60) % 2, "Oslo", "Rome"),
            "kind": np.repeat(["x", "y", "z"], 20),
        }
    )


def arrays(images):
    y = pd.DataFrame({"y": np.arange(len(images)) % 2})
    return Table("images", images, y, Rows.counted(len(images)))


def fitted(table, kind="class"):
    return Preprocessor.fit(table, np.arange(len(table)), target_kind=kind)


def test_a_held_out_class_is_gone_and_keeps_its_rows(frame):
    inside, outside = hold_out_classes(read_table(frame, "kind"), ["z"])
    assert set(inside.target["kind"]) == {"x", "y"}
    assert set(outside.target["kind"]) == {"z"}
    assert outside.rows.numbers.tolist() == list(range(41, 61))
    assert prepare(inside, target_kind="class").preprocessor.classes == ["x", "y"]


def test_classes_may_be_numbers():
    inside, outside = hold_out_classes(read_table("digits"), [8, "9"])
    assert (len(inside), len(outside)) == (1443, 354)


def test_a_gap_is_the_middle_third_by_default(frame):
    inside, outside = hold_out_gap(read_table(frame, "kind"), "a")
    assert (len(inside), len(outside)) == (40, 20)
    ends = outside.features["a"].min(), outside.features["a"].max()
    assert not inside.features["a"].between(*ends).any()
    images = arrays(np.arange(12.0).reshape(6, 2))
    assert len(hold_out_gap(images, 0, (0.9, 1.0))[1]) == 1


def test_no_statistic_comes_from_what_is_held_out_or_tested(frame):
    """Values outside the training rows change; every bit of what is fitted from them stays."""

    def encoded(table):
        data = prepare(table, target_kind="class", seed=3)
        return data, data.preprocessor.to_json()

    inside, outside = hold_out_classes(read_table(frame, "kind"), ["z"])
    first, statistics = encoded(inside)
    altered = frame.copy()
    altered.loc[altered["kind"] == "z", ["a", "b"]] = 1e6
    held, _ = hold_out_classes(read_table(altered, "kind"), ["z"])
    test = held.rows.numbers[first.test_rows] - 1
    altered.loc[test, ["a", "b"]] = -1e6
    altered.loc[test, "city"] = "Rome"
    second, again = encoded(hold_out_classes(read_table(altered, "kind"), ["z"])[0])
    assert again == statistics
    np.testing.assert_array_equal(second.x_train, first.x_train)
    # The same comparison does see a leak: statistics of all rows are others.
    whole = Preprocessor.fit(inside, np.arange(len(inside)), target_kind="class").to_json()
    assert whole["columns"] != statistics["columns"]
    # And rows move by training scales only, whatever the other rows are.
    rows = outside.features
    alone = shift(rows.iloc[:3], first.preprocessor, "columns", 2, seed=1)
    beside = shift(rows, first.preprocessor, "columns", 2, seed=1)
    pd.testing.assert_frame_equal(alone, beside.iloc[:3])


def test_severity_0_is_the_rows_as_they_are(frame):
    table = read_table(frame, "kind")
    preprocessor = fitted(table)
    series = shift_series(table.features, preprocessor, "noise")
    assert list(series) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(series[0], preprocessor.transform(table.features))


def test_noise_is_half_a_training_scale_a_step_and_one_pattern(frame):
    table = read_table(pd.concat([frame] * 100, ignore_index=True), "kind")
    series = shift_series(table.features, fitted(table), "noise", seed=4)
    moved = series[4] - series[0]
    # 6,000 values: the scale of their scale is 2 / sqrt(12,000) = 0.018; four of those.
    np.testing.assert_allclose(moved[:, :2].std(0), 2.0, atol=0.075)
    np.testing.assert_allclose(series[2] - series[0], moved / 2, atol=1e-12)
    assert (moved[:, 2:] == 0).all(), "constant columns and categories stay"


def test_columns_move_together_by_training_scales(frame):
    table = read_table(frame, "kind")
    moved = shift(table.features, fitted(table), "columns", 3, seed=0)
    steps = [(moved[c] - frame[c]).round(9).unique() for c in ("a", "b")]
    assert all(len(step) == 1 for step in steps)
    sizes = [abs(step[0]) / frame[c].std(ddof=0) for step, c in zip(steps, "ab", strict=True)]
    np.testing.assert_allclose(sorted(sizes), [0.0, 1.5], atol=1e-6)


def test_images_turn_by_15_degrees_a_step():
    images = np.zeros((2, 1, 9, 9))
    images[:, 0, 4, :] = 1.0
    table = arrays(images)
    turned = shift(table.features, fitted(table), "rotation", 6)
    upright = images.transpose(0, 1, 3, 2)
    np.testing.assert_allclose(turned, upright, atol=1e-9)
    flat = arrays(images.reshape(2, 81))
    as_columns = shift(flat.features, fitted(flat), "rotation", 6, image=(9, 9))
    np.testing.assert_allclose(as_columns, upright.reshape(2, 81), atol=1e-9)


def test_channels_move_by_their_own_scales():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 2, 4, 4)) * np.array([1.0, 5.0])[:, None, None]
    table = arrays(images)
    moved = shift(images, fitted(table), "noise", 2, seed=0) - images
    # 128 values a channel: four standard errors of their scale are 4 / sqrt(256) = 25%.
    np.testing.assert_allclose(moved.std((0, 2, 3)), images.std((0, 2, 3)), rtol=0.25)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda t, p: hold_out_classes(t, ["w"]), "'w'"),
        (lambda t, p: hold_out_classes(t, []), "none"),
        (lambda t, p: hold_out_classes(t, ["x", "y"]), "fewer than two"),
        (lambda t, p: hold_out_gap(t, "nope"), "nope"),
        (lambda t, p: hold_out_gap(t, "city"), "numeric"),
        (lambda t, p: hold_out_gap(t, "same"), "all rows"),
        (lambda t, p: hold_out_gap(t, "a", (0.5, 0.2)), "rising"),
        (lambda t, p: shift(t.features, p, "blur", 1), "blur"),
        (lambda t, p: shift(t.features, p, "noise", -1), "severity -1"),
        (lambda t, p: shift(t.features, p, "rotation", 1), "no images"),
        (lambda t, p: shift(t.features[["city"]], p, "noise", 1), "'a'"),
    ],
)
def test_what_cannot_be_made_is_named(call, named, frame):
    table = read_table(frame, "kind")
    with pytest.raises(DataError, match=named):
        call(table, fitted(table))
