"""Plots: the numbers they draw, the text they write, and that they leave pyplot alone.

Needs no torch: it runs as it is under ArviZ 0.23 and under ArviZ 1.x.
"""

import itertools
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from pbnn import plots
from pbnn.errors import DataError
from pbnn.inference_data import build, read_netcdf, write_netcdf
from pbnn.plots.figures import grid

CHAINS, DRAWS, ROWS = 2, 200, 80


def inference_data(*, noise=1.0, seed=0):
    """Calibrated predictive draws of y = x + N(0, 1), or draws of `noise` times that scale."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 2))
    grid = np.stack([np.linspace(-2, 2, 25)[::-1], np.zeros(25)], 1)
    shift = 0.1 * rng.normal(size=(CHAINS, DRAWS, 1))
    y = x[:, 0] + rng.normal(size=ROWS)
    groups = {
        "posterior": {"f": x[:, 0] + shift},
        "posterior_predictive": {
            "y": x[:, 0] + shift + noise * rng.normal(size=(CHAINS, DRAWS, ROWS))
        },
        "predictions": {"f": grid[:, 0] + shift},
        "observed_data": {"y": y},
        "constant_data": {"x": x},
        "predictions_constant_data": {"x": grid},
    }
    dims = {
        "y": ["obs_id"],
        "posterior/f": ["obs_id"],
        "predictions/f": ["pred_id"],
        "constant_data/x": ["obs_id", "feature"],
        "predictions_constant_data/x": ["pred_id", "feature"],
    }
    return build(groups, dims=dims, coords={"feature": ["age", "bmi"]})


@pytest.fixture
def data(tmp_path):
    """Inference data as they come from a file."""
    return read_netcdf(write_netcdf(inference_data(), tmp_path / "fit.nc"))


def arrays(data):
    draws = np.asarray(data["posterior_predictive"]["y"]).reshape(-1, ROWS)
    return draws, np.asarray(data["observed_data"]["y"])


def every_plot(data):
    rng = np.random.default_rng(1)
    scales = np.exp(rng.normal(size=50))
    p = rng.dirichlet([0.3, 0.3, 0.3], size=150_000)
    steps = np.arange(1000.0)
    likelihood = -500 - 5000 * np.exp(-steps / 50)
    history = {"elbo": likelihood - 90, "expected_log_likelihood": likelihood, "kl": 0 * steps + 90}
    other = plots.plot_calibration(data, label="NUTS")
    return {
        "predicted": plots.plot_predicted_against_observed(data, units="mm"),
        "calibration": plots.plot_calibration(inference_data(noise=0.5), label="normal", ax=other),
        "pit": plots.plot_pit(data),
        "reliability": plots.plot_reliability(p, rng.integers(0, 3, 150_000)),
        "scales": plots.plot_scales(scales, {"normal": 0.5 * scales, "low rank": 0.9 * scales}),
        "band": plots.plot_band(data, units="mm"),
        "elbo": plots.plot_elbo(history),
        "spectrum": plots.plot_spectrum({"normal": scales, "kronecker": scales**3}),
        "predictive": plots.plot_posterior_predictive(dict.fromkeys("abcd", data), units="mm")[0],
    }


def tick_labels(axis):
    """Labels of the ticks within the limits; the others exist, and are never drawn."""
    low, high = sorted(axis.get_view_interval())
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        if low <= tick.get_loc() <= high:
            yield tick.label1


def texts(figure):
    for ax in figure.axes:
        yield from (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)
        yield from (*tick_labels(ax.xaxis), *tick_labels(ax.yaxis))
        if legend := ax.get_legend():
            yield from legend.get_texts()
    for legend in figure.legends:
        yield from legend.get_texts()


def inner(box):
    """The box of the letters: a text's own is taller than them, by about a fifth on each side."""
    rotated = box.height > box.width
    return box.padded(-0.2 * box.width if rotated else 0, 0 if rotated else -0.2 * box.height)


def test_no_text_overlaps_or_leaves_the_page(data):
    for name, ax in every_plot(data).items():
        figure = ax.get_figure()
        figure.canvas.draw()
        shown = [t for t in texts(figure) if t.get_visible() and t.get_text()]
        boxes = [(text.get_text(), inner(text.get_window_extent())) for text in shown]
        page = figure.bbox
        for text, box in boxes:
            assert page.x0 <= box.x0 < box.x1 <= page.x1, (name, text)
            assert page.y0 <= box.y0 < box.y1 <= page.y1, (name, text)
        for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
            assert not box_a.overlaps(box_b), (name, a, b)


def test_text_is_legible_on_a_slide(data):
    for name, ax in every_plot(data).items():
        assert ax.title.get_fontsize() >= 14, name
        assert ax.xaxis.label.get_fontsize() >= 14, name
        assert ax.get_xlabel(), name
        assert ax.get_ylabel(), name
        assert ax.get_title(), name


def test_units_stand_in_the_labels(data):
    assert plots.plot_predicted_against_observed(data, units="mm").get_xlabel() == "observed [mm]"
    assert plots.plot_band(data, units="mm").get_ylabel() == "f(x) [mm]"
    assert plots.plot_band(data).get_ylabel() == "f(x)"


def test_axes_given_are_the_axes_returned(data):
    scales = np.ones(5)
    history = dict.fromkeys(("elbo", "expected_log_likelihood", "kl"), np.arange(9.0))
    calls = [
        lambda ax: plots.plot_predicted_against_observed(data, ax=ax),
        lambda ax: plots.plot_calibration(data, ax=ax),
        lambda ax: plots.plot_pit(data, ax=ax),
        lambda ax: plots.plot_reliability([0.2, 0.9], [0, 1], ax=ax),
        lambda ax: plots.plot_scales(scales, {"a": scales}, ax=ax),
        lambda ax: plots.plot_band(data, ax=ax),
        lambda ax: plots.plot_elbo(history, ax=ax),
        lambda ax: plots.plot_spectrum({"a": scales}, ax=ax),
        lambda ax: plots.plot_posterior_predictive({"a": data}, axes=[ax])[0],
    ]
    for call in calls:
        ax = Figure().subplots()
        assert call(ax) is ax


def test_pyplot_is_left_alone():
    code = """
import sys
sys.path.insert(0, "tests")
import matplotlib as mpl
from test_plots import every_plot, inference_data
before = dict(mpl.rcParams)
every_plot(inference_data())
assert dict(mpl.rcParams) == before
pyplot = sys.modules.get("matplotlib.pyplot")
assert pyplot is None or not pyplot.get_fignums()
"""
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=root, timeout=120)


def test_predicted_against_observed_counts_the_covered(data):
    draws, y = arrays(data)
    low, high = np.quantile(draws, [0.1, 0.9], axis=0)
    covered = int(((low <= y) & (y <= high)).sum())
    ax = plots.plot_predicted_against_observed(data, level=0.8)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [f"y in its interval: {covered}", f"y outside its interval: {ROWS - covered}"]
    assert "80% interval" in ax.get_ylabel()
    points = np.concatenate([line.get_xydata() for line in ax.lines[1:]])
    np.testing.assert_allclose(
        points[np.argsort(points[:, 0])],
        np.stack([y, draws.mean(0)], 1)[np.argsort(y)],
    )
    same = plots.plot_predicted_against_observed(draws.reshape(CHAINS, DRAWS, ROWS), y)
    assert same.get_title() == plots.plot_predicted_against_observed(data).get_title()


def test_calibration_is_the_coverage_of_central_intervals(data):
    draws, y = arrays(data)
    line = plots.plot_calibration(data).lines[-1]
    nominal, coverage = line.get_data()
    for level in (0.2, 0.5, 0.9):
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
        by_hand = ((low <= y) & (y <= high)).mean()
        place = np.argmin(abs(nominal - level))
        # Quantiles interpolate between draws: a row at the edge may fall either way.
        assert coverage[place] == pytest.approx(by_hand, abs=1.01 / ROWS)
    assert coverage[0] <= 2 / ROWS
    assert coverage[-1] == 1.0


def test_calibration_names_each_fit_and_draws_one_band(data):
    ax = plots.plot_calibration(data, label="NUTS")
    plots.plot_calibration(inference_data(noise=0.5), label="normal", ax=ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [f"95% band, {ROWS} rows", "NUTS", "normal"]
    assert len({line.get_color() for line in ax.lines}) == 3
    exact, narrow = (line.get_ydata()[50] for line in ax.lines[1:])
    assert narrow < exact


def test_pit_counts_every_row_and_halves_ties():
    draws = np.tile(np.arange(4.0)[:, None], (1, 3))
    ax = plots.plot_pit(draws, [-1.0, 3.0, 9.0], bins=8)
    heights = [bar.get_height() for bar in ax.patches if bar.get_height() and bar.get_width() < 0.2]
    # No draw is below -1: 0. Three are below 3 and one ties: 3.5 / 4. All are below 9: 1.
    assert sum(heights) == 3
    assert heights[0] == 1
    assert heights[-1] == 2


def test_reliability_keeps_confidence_one_and_skips_empty_bins():
    right = [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    ax = plots.plot_reliability(np.ones(10), right)
    curve = ax.lines[-1]
    np.testing.assert_allclose(curve.get_xydata(), [[1.0, 0.7]])
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["10", "rows"]
    # Wilson's 95% interval of 7 in 10.
    (segment,) = ax.collections[0].get_segments()
    np.testing.assert_allclose(segment[:, 1], [0.3968, 0.8922], atol=1e-4)


def test_reliability_bins_by_hand():
    p = np.array([[0.55, 0.45], [0.58, 0.42], [0.1, 0.9], [0.05, 0.95], [0.08, 0.92]])
    y = np.array([0, 1, 1, 1, 0])
    curve = plots.plot_reliability(p, y).lines[-1]
    np.testing.assert_allclose(curve.get_xydata(), [[0.565, 0.5], [(0.9 + 0.95 + 0.92) / 3, 2 / 3]])


def test_scales_say_the_median_ratio():
    scales = np.array([1.0, 2.0, 4.0])
    many = {str(k): scales / k for k in range(1, 8)}
    ax = plots.plot_scales(scales, many, units="kW")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[1] == "2: median ratio 0.50"
    assert len(labels) == 7
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_band_runs_over_the_new_inputs_in_order(data):
    ax = plots.plot_band(data, feature="age")
    mean = ax.lines[0]
    assert (np.diff(mean.get_xdata()) > 0).all()
    assert ax.get_xlabel() == "age"
    f = np.asarray(data["predictions"]["f"]).reshape(-1, 25)
    np.testing.assert_allclose(mean.get_ydata(), f.mean(0)[::-1])
    x = np.asarray(data["constant_data"]["x"])[:, 0]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), x)


def test_legend_of_a_band_covers_nothing(data):
    ax = plots.plot_band(data)
    figure = ax.get_figure()
    figure.canvas.draw()
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(ax.get_window_extent())
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["90% of f(x)", "50% of f(x)", "mean of f(x)", "data"]
    panels = grid(2)
    for panel in panels:
        plots.plot_band(data, legend=False, ax=panel)
    plots.legend_below(panels)
    shared = panels[0].get_figure()
    shared.canvas.draw()
    assert [text.get_text() for text in shared.legends[0].get_texts()] == words
    for panel in panels:
        assert not shared.legends[0].get_window_extent().overlaps(panel.get_window_extent())


def test_scales_of_f_from_files(data):
    other = inference_data(seed=3)
    ax = plots.plot_scales(data, {"other": other, "same": data})
    f, g = (np.asarray(d["predictions"]["f"]).reshape(-1, 25).std(0) for d in (data, other))
    np.testing.assert_allclose(ax.lines[1].get_xydata(), np.stack([f, g], 1))
    assert "same: median ratio 1.00" in [t.get_text() for t in ax.get_legend().get_texts()]
    plain = build({"posterior": {"f": np.random.default_rng(0).normal(size=(1, 9, 5))}})
    assert len(plots.plot_scales(plain, {"a": plain}).lines[1].get_xdata()) == 5


def test_reliability_counts_the_draws_of_a_file(tmp_path):
    draws = np.array([[[0, 1, 2, 2], [0, 1, 2, 0], [0, 1, 1, 2], [1, 1, 2, 2]]])
    y = np.array([0, 1, 1, 2])
    groups = {"posterior_predictive": {"y": draws}, "observed_data": {"y": y}}
    built = build(groups, dims={"y": ["obs_id"]})
    read = read_netcdf(write_netcdf(built, tmp_path / "classes.nc"))
    counted = plots.plot_reliability(read).lines[-1].get_xydata()
    p = np.array([[0.75, 0.25, 0], [0, 1, 0], [0, 0.25, 0.75], [0.25, 0, 0.75]])
    np.testing.assert_allclose(counted, plots.plot_reliability(p, y).lines[-1].get_xydata())


def test_band_from_arrays():
    f = np.stack([np.zeros(3), np.ones(3)])
    ax = plots.plot_band(f, [2.0, 0.0, 1.0], points=([0.0], [0.5]), levels=[0.5])
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 0.5], [1, 0.5], [2, 0.5]])
    assert len(ax.collections) == 1


def test_elbo_ends_where_the_history_ends():
    steps = np.arange(2000.0)
    likelihood = np.where(steps < 10, -1e9, -100.0)
    history = {"elbo": likelihood - 50, "expected_log_likelihood": likelihood, "kl": 50 + 0 * steps}
    ax = plots.plot_elbo(history)
    assert ax.get_title() == "ELBO \N{MINUS SIGN}150.0 at the end"
    assert ax.get_ylim()[0] > -200


def test_effective_rank():
    ax = plots.plot_spectrum({"flat": np.ones(7), "one": [1.0, 1e-12]})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["flat: effective rank 7.0", "one: effective rank 1.0"]
    leading = plots.plot_spectrum({"flat": np.ones(3)}, ranks={"flat": 7.0})
    assert leading.get_legend().get_texts()[0].get_text() == "flat: effective rank 7.0"


def test_posterior_predictive_panels_share_their_bins(data):
    classes = build(
        {
            "posterior_predictive": {"y": np.tile([0, 1, 2, 2], (1, 50, 1))},
            "observed_data": {"y": np.array([0, 1, 2, 2])},
        },
        dims={"y": ["obs_id"]},
    )
    (ax,) = plots.plot_posterior_predictive({"exact": classes})
    observed = ax.patches[-1].get_data()
    np.testing.assert_allclose(observed.edges, [-0.5, 0.5, 1.5, 2.5])
    np.testing.assert_allclose(observed.values, [0.25, 0.25, 0.5])
    axes = plots.plot_posterior_predictive({"a": data, "b": inference_data(noise=3.0)})
    first, second = (ax.patches[-1].get_data() for ax in axes)
    np.testing.assert_array_equal(first.edges, second.edges)
    assert [ax.get_title() for ax in axes] == ["a", "b"]


def test_save_is_whole_or_absent(tmp_path, monkeypatch):
    ax = plots.plot_spectrum({"a": [1.0]})
    path = plots.save(ax, tmp_path / "new" / "a.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert plots.save([ax], tmp_path / "a.svg").read_text().startswith("<?xml")

    def fail(self, target, **options):
        target.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.save(ax, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plot_pit(np.zeros((5, 3))), "come without y"),
        (lambda: plots.plot_pit(np.zeros(5), [1.0]), r"draws have shape \(5,\)"),
        (lambda: plots.plot_pit(np.zeros((5, 3)), [1.0]), r"y has shape \(1,\); expected \(3,\)"),
        (lambda: plots.plot_pit(inference_data(), site="z"), "has no 'z'; it has y"),
        (lambda: plots.plot_pit(inference_data(), group_name="prior"), "no group 'prior'"),
        (
            lambda: plots.plot_band(inference_data(), feature="sex"),
            "no column of x; it has age, bmi",
        ),
        (lambda: plots.plot_band(np.zeros((5, 3)), [1.0]), r"\(3,\) rows and x has shape \(1,\)"),
        (lambda: plots.plot_reliability([[3.0, -2.0]], [0]), "not logits"),
        (
            lambda: plots.plot_reliability([[0.5, 0.5]], [0, 1]),
            r"expected \(n, classes\) and \(n,\)",
        ),
        (lambda: plots.plot_reliability([0.5, 0.5]), "probabilities come without y"),
        (
            lambda: plots.plot_scales(
                build({"posterior": {"f": np.zeros((1, 2, 3, 2))}}), {"a": [1.0]}
            ),
            "f has several outputs",
        ),
        (lambda: plots.plot_scales([1.0], {"a": [1.0, 2.0]}), r"a: scales have shape \(2,\)"),
        (lambda: plots.plot_scales([1.0, 1.0], {"a": [1.0, 0.0]}), "a: 1 scales are not above 0"),
        (lambda: plots.plot_elbo({"elbo": [1.0]}), "has no expected_log_likelihood, kl"),
        (lambda: plots.plot_spectrum({"a": [1.0, -1.0]}), "a: expected positive eigenvalues"),
    ],
)
def test_misfits_are_refused(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_several_outputs_are_refused():
    draws = np.zeros((1, 4, 3, 2))
    data = build({"posterior_predictive": {"y": draws}, "observed_data": {"y": draws[0, 0]}})
    with pytest.raises(DataError, match="several outputs"):
        plots.plot_pit(data)
    assert mpl.rcParams["font.size"] != 14
