"""Export to ArviZ. This file needs no torch: it runs as it is under ArviZ 0.23 and under ArviZ 1.x.

The posteriors are exact: independent draws of a linear regression with known noise, or of a small
network's shapes, held as NumPy arrays in the form of a `Posterior`.
"""

import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path

import arviz as az
import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from pbnn.errors import DataError, FileError
from pbnn.inference_data import (
    build,
    group,
    groups,
    read_netcdf,
    to_inference_data,
    write_netcdf,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

ARVIZ1 = int(az.__version__.split(".")[0]) >= 1
OTHER_PYTHON = os.environ.get("PBNN_ARVIZ1_PYTHON")
# What ArviZ 0.23 itself calls in the newest pandas and matplotlib.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The inplace keyword:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Passing a dict or None as alias:DeprecationWarning"),
]
NOISE, PRIOR = 0.5, 2.0


@dataclass
class Fake:
    """A `Posterior` of NumPy arrays."""

    draws: dict
    stats: dict
    deterministic: dict = field(default_factory=dict)
    method: str = "nuts"
    markov: bool = True
    seconds: float = 1.5
    provenance: dict = field(default_factory=lambda: {"seed": 3, "versions": {"numpy": "2"}})
    warmup: "Fake | None" = None

    def select(self, *, draws=None):
        kept = {
            name: {key: value[:, draws] for key, value in getattr(self, name).items()}
            for name in ("draws", "stats", "deterministic")
        }
        return replace(self, **kept) if draws is not None else self


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2))
    return x, x @ [1.0, -1.0] + NOISE * rng.normal(size=30)


def linear_posterior(x, y, *, chains=4, draws=500, shrink=1.0, markov=True):
    """Exact draws of the weights of y ~ N(x w, NOISE), w ~ N(0, PRIOR); spread times `shrink`."""
    rng = np.random.default_rng(1)
    covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(x.shape[1]) / PRIOR**2)
    mean = covariance @ x.T @ y / NOISE**2
    z = rng.normal(size=(chains, draws, x.shape[1]))
    w = mean + shrink * z @ np.linalg.cholesky(covariance).T
    lp = -0.5 * (z**2).sum(-1)
    energy = -lp + rng.gamma(1.0, size=lp.shape)
    stats = {
        "lp": lp,
        "energy": energy,
        "diverging": rng.random(lp.shape) < 0.01,
        "tree_depth": np.full(lp.shape, 3),
    }
    if not markov:
        stats = {"lp": lp, "log_q": lp + 0.1}
    return Fake(
        draws={"layers.0.weight": w[:, :, None, :].astype(np.float32)},
        stats=stats,
        deterministic={"slope_sum": w.sum(-1)},
        method="nuts" if markov else "svi",
        markov=markov,
    )


def output(posterior, x):
    return np.einsum("cdoi,ni->cdn", posterior.draws["layers.0.weight"], np.asarray(x))


@pytest.fixture
def engine(monkeypatch):
    """`pbnn.prediction` for the linear model, in NumPy; it records how it was called."""
    calls = []

    def predictive(model, posterior, x, *, units=None, seed=0, device=None, progress=False):
        calls.append((posterior.method, seed))
        f = output(posterior, x)
        rng = np.random.default_rng(seed)
        return {"y": f + NOISE * rng.normal(size=f.shape), "f": f}

    def log_likelihood(model, posterior, x, y, *, by_site, units=None, device=None, progress=False):
        assert by_site
        z = (y - output(posterior, x)) / NOISE
        return {"y": -0.5 * z**2 - np.log(NOISE) - 0.5 * np.log(2 * np.pi)}

    stub = types.ModuleType("pbnn.prediction")
    stub.predictive, stub.log_likelihood, stub.calls = predictive, log_likelihood, calls
    monkeypatch.setitem(sys.modules, "pbnn.prediction", stub)
    return stub


def exact_loo(x, y):
    """Leave-one-out log predictive density of the linear model, row by row in closed form."""
    total = 0.0
    for i in range(len(y)):
        rest, target = np.delete(x, i, 0), np.delete(y, i)
        covariance = np.linalg.inv(rest.T @ rest / NOISE**2 + np.eye(x.shape[1]) / PRIOR**2)
        mean = x[i] @ covariance @ rest.T @ target / NOISE**2
        variance = x[i] @ covariance @ x[i] + NOISE**2
        total += -0.5 * np.log(2 * np.pi * variance) - 0.5 * (y[i] - mean) ** 2 / variance
    return total


def elpd(result):
    return result.elpd if ARVIZ1 else result.elpd_loo


def test_container_is_the_one_of_the_installed_arviz(data, engine):
    x, y = data
    idata = to_inference_data(linear_posterior(x, y), model="linear", x=x, y=y, x_new=x[:7])
    assert isinstance(idata, xr.DataTree if ARVIZ1 else az.InferenceData)
    assert list(groups(idata)) == [
        "posterior",
        "posterior_predictive",
        "predictions",
        "log_likelihood",
        "sample_stats",
        "observed_data",
        "constant_data",
        "predictions_constant_data",
    ]
    posterior = group(idata, "posterior")
    assert posterior["layers.0.weight"].dims == ("chain", "draw", "layers.0_out", "layers.0_in")
    assert posterior["slope_sum"].dims == ("chain", "draw")
    assert posterior["f"].dims == ("chain", "draw", "obs_id")
    assert list(group(idata, "posterior_predictive").data_vars) == ["y"]
    assert group(idata, "log_likelihood")["y"].dims == ("chain", "draw", "obs_id")
    assert group(idata, "observed_data")["y"].dims == ("obs_id",)
    assert group(idata, "constant_data")["x"].dims == ("obs_id", "feature")
    assert group(idata, "predictions")["f"].sizes["pred_id"] == 7
    assert group(idata, "sample_stats")["diverging"].dtype == bool


def test_arviz_works_on_the_file(data, engine, tmp_path):
    x, y = data
    idata = to_inference_data(linear_posterior(x, y), model="linear", x=x, y=y)
    part = x * [1.0, 0.0]
    smaller = to_inference_data(linear_posterior(part, y), model="linear", x=part, y=y)
    read = az.from_netcdf(write_netcdf(idata, tmp_path / "nuts.nc"))
    summary = az.summary(read, var_names=["layers.0.weight", "slope_sum", "f"])
    assert len(summary) == 2 + 1 + 30
    assert "r_hat" in summary
    loo = az.loo(read)
    # Independent draws: the Monte Carlo error of an elpd summed over 30 rows from 2,000 draws is
    # below 30 * sd(log likelihood)/sqrt(2000), about 0.1 here.
    assert elpd(loo) == pytest.approx(exact_loo(x, y), abs=0.1)
    table = az.compare({"one column": smaller, "both": read})
    assert list(table.index) == ["both", "one column"]
    assert elpd(az.loo(smaller)) == pytest.approx(exact_loo(part, y), abs=0.1)
    az.plot_trace(read, var_names=["layers.0.weight", "slope_sum"])
    az.plot_energy(read)
    bfmi = az.bfmi(read)
    bfmi = np.asarray(bfmi["energy"] if ARVIZ1 else bfmi)
    energy = np.asarray(group(read, "sample_stats")["energy"])
    by_hand = np.square(np.diff(energy)).mean(1) / energy.var(1)
    np.testing.assert_allclose(bfmi, by_hand, rtol=5e-3)
    if ARVIZ1:
        az.plot_ppc_dist(read)
    else:
        az.plot_ppc(read, num_pp_samples=20)


def test_guide_draws_are_marked_and_get_no_rhat(data, engine, tmp_path):  # fault 25
    x, y = data
    guide = linear_posterior(x, y, chains=1, draws=2000, markov=False)
    path = write_netcdf(to_inference_data(guide, model="linear", x=x, y=y), tmp_path / "svi.nc")
    idata = read_netcdf(path)
    for attrs in (idata.attrs, group(idata, "posterior").attrs):
        assert attrs["pbnn_markov"] == 0
        assert attrs["pbnn_method"] == "svi"
        assert "not a Markov chain" in attrs["pbnn_rhat"]
    assert "Do not rank" in group(idata, "log_likelihood").attrs["pbnn_loo"]
    assert np.isnan(group_of(az.rhat(idata))["slope_sum"])
    assert {"lp", "log_q"} == set(group(idata, "sample_stats").data_vars)
    assert elpd(az.loo(idata)) == pytest.approx(exact_loo(x, y), abs=0.1)


def test_loo_of_a_collapsed_guide_is_why_the_mark_is_there(data, engine):  # fault 24
    x, y = data
    narrow = linear_posterior(x, y, chains=1, draws=2000, shrink=0.1, markov=False)
    idata = to_inference_data(narrow, model="linear", x=x, y=y)
    assert elpd(az.loo(idata)) > exact_loo(x, y)
    assert "too narrow" in group(idata, "log_likelihood").attrs["pbnn_loo"]


def group_of(result):
    return result["posterior"] if "posterior" in getattr(result, "children", {}) else result


def test_file_reads_back_the_same(data, engine, tmp_path):
    x, y = data
    idata = to_inference_data(
        linear_posterior(x, y),
        model="linear",
        x=x,
        y=y,
        feature_names=["age", "größe"],
        coords={"obs_id": [f"row {i}" for i in range(30)]},
    )
    path = write_netcdf(idata, tmp_path / "new" / "nuts.nc")
    back = read_netcdf(path)
    assert [p.name for p in path.parent.iterdir()] == ["nuts.nc"]
    for name, dataset in groups(idata).items():
        xr.testing.assert_identical(dataset, group(back, name))
        for key, variable in dataset.data_vars.items():
            assert variable.dtype == group(back, name)[key].dtype
    assert back.attrs == idata.attrs
    assert back.attrs["inference_library"] == "pbnn"
    assert json.loads(back.attrs["pbnn_provenance"]) == {"seed": 3, "versions": {"numpy": "2"}}
    weight = group(back, "posterior")["layers.0.weight"]
    assert list(weight["layers.0_in"].values) == ["age", "größe"]
    assert list(group(back, "constant_data")["feature"].values) == ["age", "größe"]
    # The container read is whole in memory: the file may go, or be written again.
    path.unlink()
    assert np.isfinite(group(back, "posterior")["f"].values).all()


def test_log_likelihood_off_or_for_some_rows(data, engine):  # fault 27
    x, y = data
    posterior = linear_posterior(x, y)
    off = to_inference_data(posterior, model="linear", x=x, y=y, log_likelihood=False)
    assert "log_likelihood" not in groups(off)
    whole = to_inference_data(posterior, model="linear", x=x, y=y)
    rows = [4, 2, 29]
    some = to_inference_data(posterior, model="linear", x=x, y=y, log_likelihood=rows)
    part = group(some, "log_likelihood")["y"]
    assert list(part["obs_id"].values) == rows
    np.testing.assert_array_equal(
        part.values, group(whole, "log_likelihood")["y"].sel(obs_id=rows).values
    )
    assert np.isfinite(elpd(az.loo(some)))
    named = to_inference_data(
        posterior,
        model="linear",
        x=x,
        y=y,
        log_likelihood=rows,
        coords={"obs_id": np.arange(100, 130)},
    )
    assert list(group(named, "log_likelihood")["obs_id"].values) == [104, 102, 129]


def test_frame_gives_its_columns_and_its_rows(data, engine):
    x, y = data
    frame = pd.DataFrame(x, columns=["age", "bmi"], index=np.arange(30)[::-1])
    posterior = linear_posterior(x, y)
    named = to_inference_data(posterior, model="m", x=frame, y=y, log_likelihood=[3, 1])
    assert list(group(named, "constant_data")["feature"].values) == ["age", "bmi"]
    assert list(group(named, "posterior")["layers.0_in"].values) == ["age", "bmi"]
    whole = to_inference_data(posterior, model="m", x=x, y=y)
    np.testing.assert_array_equal(
        group(named, "log_likelihood")["y"].values,
        group(whole, "log_likelihood")["y"].sel(obs_id=[3, 1]).values,
    )


def test_log_likelihood_equals_a_loop(data, engine):  # fault 24
    x, y = data
    posterior = linear_posterior(x, y, chains=2, draws=3)
    values = group(to_inference_data(posterior, model="linear", x=x, y=y), "log_likelihood")["y"]
    assert values.shape == (2, 3, 30)
    for chain in range(2):
        for draw in range(3):
            w = posterior.draws["layers.0.weight"][chain, draw, 0]
            z = (y - x @ w) / NOISE
            by_hand = -0.5 * z**2 - np.log(NOISE * np.sqrt(2 * np.pi))
            np.testing.assert_allclose(values[chain, draw], by_hand, rtol=1e-5)


def test_fewer_predictive_draws_and_seed_reach_the_engine(data, engine):
    x, y = data
    posterior = linear_posterior(x, y)
    some = to_inference_data(posterior, model="m", x=x, y=y, predictive_draws=50, seed=9)
    assert engine.calls == [("nuts", 9)]
    assert list(group(some, "posterior_predictive")["draw"].values) == list(range(0, 500, 10))
    assert "f" not in group(some, "posterior")
    none = to_inference_data(posterior, model="m", x=x, y=y, predictive_draws=0)
    assert "posterior_predictive" not in groups(none)
    assert "log_likelihood" in groups(none)


def test_prior_groups(data, engine):
    x, y = data
    prior = Fake(
        draws={"layers.0.weight": np.random.default_rng(2).normal(size=(1, 80, 1, 2))},
        stats={"lp": np.zeros((1, 80))},
        method="prior",
        markov=False,
    )
    idata = to_inference_data(linear_posterior(x, y), model="m", x=x, y=y, prior=prior)
    assert set(group(idata, "prior").data_vars) == {"layers.0.weight", "f"}
    assert group(idata, "prior")["layers.0.weight"].dims[2:] == ("layers.0_out", "layers.0_in")
    assert group(idata, "prior_predictive")["y"].dims == ("chain", "draw", "obs_id")
    if ARVIZ1:
        az.plot_ppc_dist(idata, group="prior_predictive")
    else:
        az.plot_ppc(idata, group="prior", num_pp_samples=20)


def test_each_observed_site_has_its_own_likelihood(data, engine, tmp_path):
    x, y = data
    posterior = linear_posterior(x, y)
    f = output(posterior, x)
    scores = {"y": -0.5 * (y - f) ** 2, "z": -2.0 * (y - f) ** 2}
    engine.predictive = lambda *args, **options: {"y": f, "z": f, "f": f}
    engine.log_likelihood = lambda *args, **options: scores
    idata = to_inference_data(posterior, model="m", x=x, y={"y": y, "z": y})
    read = read_netcdf(write_netcdf(idata, tmp_path / "two.nc"))
    assert set(group(read, "observed_data").data_vars) == {"y", "z"}
    for name, values in scores.items():
        assert group(read, "log_likelihood")[name].dims == ("chain", "draw", "obs_id")
        np.testing.assert_array_equal(group(read, "log_likelihood")[name].values, values)
    narrow, wide = (elpd(az.loo(read, var_name=name)) for name in ("y", "z"))
    assert narrow != wide
    assert np.isfinite([narrow, wide]).all()


def test_warmup_groups_on_request(data, tmp_path):
    x, y = data
    posterior = linear_posterior(x, y)
    warmup = linear_posterior(x, y, draws=80, shrink=3.0)
    idata = to_inference_data(posterior, warmup=warmup, feature_names=["a", "b"])
    read = read_netcdf(write_netcdf(idata, tmp_path / "warm.nc"))
    assert group(read, "warmup_posterior").sizes["draw"] == 80
    assert group(read, "posterior").sizes["draw"] == 500
    assert group(read, "warmup_posterior")["layers.0.weight"].dims[2:] == (
        "layers.0_out",
        "layers.0_in",
    )
    assert set(group(read, "warmup_sample_stats").data_vars) == set(warmup.stats)
    assert az.summary(read)["ess_bulk"].notna().all()


def test_prior_draws_need_a_model(data):
    x, y = data
    with pytest.raises(DataError, match="prior=10 draws from the prior of a model at x; pass"):
        to_inference_data(linear_posterior(x, y), x=x, prior=10)


def test_without_model_the_draws_alone(data):
    x, y = data
    idata = to_inference_data(linear_posterior(x, y))
    assert list(groups(idata)) == ["posterior", "sample_stats"]
    idata = to_inference_data(linear_posterior(x, y), x={"a": x, "b": x[:, 0]}, y={"u": y, "v": y})
    assert set(group(idata, "observed_data").data_vars) == {"u", "v"}
    assert group(idata, "constant_data")["a"].dims == ("obs_id", "a_feature")
    assert group(idata, "constant_data")["b"].dims == ("obs_id",)


@pytest.mark.parametrize("kind", ["classes", "two outputs"])
def test_last_axis_of_the_output_is_named(kind, engine, tmp_path):
    rng = np.random.default_rng(4)
    f = rng.normal(size=(2, 60, 30, 3))
    if kind == "classes":
        y, draws, end = rng.integers(0, 3, 30), rng.integers(0, 3, (2, 60, 30)), "class"
    else:
        y, draws, end = rng.normal(size=(30, 3)), rng.normal(size=f.shape), "y_output"
    engine.predictive = lambda *args, **options: {"y": draws, "f": f}
    engine.log_likelihood = lambda *args, **options: {"y": -rng.random((2, 60, 30)) - 1.0}
    posterior = Fake(draws={"scale": rng.random((2, 60))}, stats={"lp": rng.random((2, 60))})
    idata = to_inference_data(
        posterior, model="m", x=rng.normal(size=(30, 4)), y=y, coords={end: ["a", "b", "c"]}
    )
    read = read_netcdf(write_netcdf(idata, tmp_path / "f.nc"))
    assert group(read, "posterior")["f"].dims == ("chain", "draw", "obs_id", end)
    assert list(group(read, "posterior")[end].values) == ["a", "b", "c"]
    assert group(read, "log_likelihood")["y"].dims == ("chain", "draw", "obs_id")
    assert np.isfinite(elpd(az.loo(read)))
    if ARVIZ1:
        az.plot_ppc_dist(read, kind="ecdf")
    else:
        az.plot_ppc(read, kind="cumulative", num_pp_samples=20)


def test_site_named_f_keeps_its_place(data, engine):
    x, y = data
    posterior = linear_posterior(x, y)
    posterior.draws["f"] = np.zeros((4, 500))
    idata = to_inference_data(posterior, model="m", x=x, y=y)
    assert group(idata, "posterior")["f"].dims == ("chain", "draw")


def test_dims_follow_the_layers():
    shapes = {
        "conv.weight": (8, 3, 5, 5),
        "conv.bias": (8,),
        "rnn.weight_ih_l0": (12, 2),
        "up.weight": (6, 7),
        "up.bias": (7,),
        "scale": (),
        "weights": (4,),
    }
    posterior = {name: np.zeros((1, 2, *shape)) for name, shape in shapes.items()}
    idata = build({"posterior": posterior}, dims={"weights": ["component"]})
    dims = {name: v.dims[2:] for name, v in group(idata, "posterior").data_vars.items()}
    assert dims == {
        "conv.weight": ("conv_out", "conv_in", "conv_kernel_0", "conv_kernel_1"),
        "conv.bias": ("conv_out",),
        "rnn.weight_ih_l0": ("rnn.weight_ih_l0_dim_0", "rnn.weight_ih_l0_dim_1"),
        "up.weight": ("up_out", "up_in"),
        # A transposed layer: its bias runs along the weight's second axis.
        "up.bias": ("up.bias_dim_0",),
        "scale": (),
        "weights": ("component",),
    }


def test_names_with_a_slash_survive_netcdf(tmp_path):
    idata = build({"posterior": {"scope/w": np.zeros((1, 4))}})
    back = read_netcdf(write_netcdf(idata, tmp_path / "s.nc"))
    assert list(group(back, "posterior").data_vars) == ["scope.w"]


def test_attributes_that_netcdf_cannot_hold(tmp_path):
    attrs = {"flag": False, "list": [1, None], "dict": {"a": True}, "none": None, "number": 2}
    idata = build({"posterior": {"w": np.zeros((1, 4))}}, attrs=attrs)
    back = read_netcdf(write_netcdf(idata, tmp_path / "a.nc"))
    expected = {"flag": 0, "list": "[1, null]", "dict": '{"a": true}', "none": "null", "number": 2}
    assert back.attrs == expected
    with pytest.raises(DataError, match="attribute 'bad' cannot be stored"):
        build({"posterior": {"w": np.zeros((1, 4))}}, attrs={"bad": object()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": {"posteriors": {}}}, "group 'posteriors' is not one of ArviZ's"),
        ({"groups": {"posterior": {"w": np.zeros(3)}}}, r"w has shape \(3,\)"),
        (
            {"groups": {"posterior": {"w": np.zeros((1, 4, 2))}}, "dims": {"w": ["a", "b"]}},
            "which dims .* do not name",
        ),
        (
            {"groups": {"posterior": {"w": np.zeros((1, 4, 2))}}, "coords": {"w_dim_0": [1]}},
            r"coords\['w_dim_0'\] has shape \(1,\); expected \(2,\)",
        ),
        (
            {"groups": {"posterior": {"w": np.zeros((1, 4, 2))}}, "coords": {"w_dim": [1, 2]}},
            r"coords\['w_dim'\] names nothing here; use chain, draw, w_dim_0",
        ),
        (
            {"groups": {"posterior": {"w": np.zeros((1, 4, 2))}}, "dims": {"v": ["a"]}},
            r"dims\['v'\] names nothing here; use w",
        ),
        (
            {
                "groups": {"posterior": {"w": np.zeros((1, 4, 2)), "v": np.zeros((1, 4, 3))}},
                "dims": {"w": ["a"], "v": ["a"]},
            },
            "v has 3 values along 'a' where another variable has 2",
        ),
        (
            {"groups": {"posterior": {"a": np.zeros((1, 4, 2))}}, "dims": {"a": ["a"]}},
            "'a' names a variable and a dim",
        ),
    ],
)
def test_misfits_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        build(**arguments)


def test_feature_names_that_label_nothing_are_refused(data):
    x, y = data
    with pytest.raises(DataError, match="feature_names has 3 names"):
        to_inference_data(linear_posterior(x, y), feature_names=["a", "b", "c"])


def test_interrupted_write_leaves_the_old_file(data, engine, tmp_path, monkeypatch):
    x, y = data
    idata = to_inference_data(linear_posterior(x, y), model="m", x=x, y=y)
    path = write_netcdf(idata, tmp_path / "a.nc")
    before = path.read_bytes()

    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(xr.Dataset, "to_netcdf", stop)
    with pytest.raises(KeyboardInterrupt):
        write_netcdf(idata, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.nc"]


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        read_netcdf(tmp_path / "absent.nc")
    text = tmp_path / "text.nc"
    text.write_text("not a netCDF file")
    with pytest.raises(FileError, match="not a netCDF file"):
        read_netcdf(text)
    flat = tmp_path / "flat.nc"
    xr.Dataset({"a": ("b", [1.0])}).to_netcdf(flat, engine="h5netcdf")
    with pytest.raises(FileError, match="holds no groups"):
        read_netcdf(flat)
    with pytest.raises(DataError, match="no group 'prior'; it has posterior"):
        group(build({"posterior": {"w": np.zeros((1, 4))}}), "prior")


def test_tensors_are_taken_as_they_are(data, tmp_path):
    torch = pytest.importorskip("torch", reason="this Python has no torch")
    x, y = data
    posterior = linear_posterior(x, y)
    arrays = to_inference_data(posterior, x=x, y=y, feature_names=["a", "b"])
    for name in ("draws", "deterministic", "stats"):
        values = getattr(posterior, name)
        setattr(posterior, name, {key: torch.tensor(value) for key, value in values.items()})
    idata = to_inference_data(
        posterior, x=torch.tensor(x), y=torch.tensor(y), feature_names=["a", "b"]
    )
    for name, dataset in groups(arrays).items():
        xr.testing.assert_identical(dataset, group(idata, name))


def test_pbnn_import_needs_no_torch():
    code = "import sys, pbnn.inference_data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.skipif(ARVIZ1, reason="this Python has ArviZ 1.x itself")
@pytest.mark.skipif(not OTHER_PYTHON, reason="PBNN_ARVIZ1_PYTHON names no Python with ArviZ 1.x")
def test_file_opens_under_the_next_arviz(data, engine, tmp_path):  # fault 25
    x, y = data
    idata = to_inference_data(linear_posterior(x, y), model="m", x=x, y=y, x_new=x[:7])
    path = write_netcdf(idata, tmp_path / "nuts.nc")
    guide = linear_posterior(x, y, chains=1, draws=2000, markov=False)
    other = write_netcdf(to_inference_data(guide, model="m", x=x, y=y), tmp_path / "svi.nc")
    script = Path(__file__).with_name("arviz1_check.py")
    done = subprocess.run(
        [OTHER_PYTHON, script, path, other], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["arviz"].startswith("1.")
    for name, file in (("nuts", idata), ("svi", read_netcdf(other))):
        assert report[name]["attrs"]["pbnn_markov"] == file.attrs["pbnn_markov"]
        assert report[name]["dims"] == {
            f"{key}/{variable}": list(values.dims)
            for key, dataset in groups(file).items()
            for variable, values in dataset.data_vars.items()
        }
        # Both versions smooth the same weights, with small differences in the tail fit.
        assert report[name]["elpd"] == pytest.approx(elpd(az.loo(file)), abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictive_draws": -1}, "predictive_draws=-1; expected 0"),
        ({"log_likelihood": []}, "log_likelihood=.*expected True, False, or numbers of rows"),
        ({"log_likelihood": [0, 100]}, "numbers of rows from 0 to"),
    ],
)
def test_draws_and_rows_that_are_not_there(data, engine, options, message):
    x, y = data
    with pytest.raises(DataError, match=message):
        to_inference_data(linear_posterior(x, y), model="m", x=x, y=y, **options)
