"""Every road × every guide × every model file keeps the same contract."""

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pbnn
from pbnn.errors import ConvergenceWarning
from pbnn.front_door import target_kind
from pbnn.inference_data import groups

# One for each kind of y; tests/test_models.py has the others.
MODELS = [
    Path(__file__).parents[1] / "models" / f"{name}.py"
    for name in ("classification", "heteroscedastic", "regression")
]
ROADS = ["normal", "lowrank", "kronecker", "nuts"]
# Roads that are walked on one model only.
OTHERS = {
    "map": {"steps": 5},
    "swag": {"steps": 5, "snapshots": 3, "every": 1, "draws": 4},
    "ensemble": {"members": 3, "steps": 5, "perturb": "randomised"},
}
# Each model and each road, where the two have nothing to do with each other.
PAIRS = [
    (MODELS[0], "lowrank"),
    (MODELS[1], "kronecker"),
    (MODELS[1], "nuts"),
    (MODELS[2], "normal"),
]
ROWS = 20


def problem(path):
    """Return a model with small options and data of the kind that it observes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 3, generator=generator)
    model = pbnn.load_model(path, in_features=3, hidden=4)
    y = {
        "real": x[:, 0] - x[:, 1],
        "class": (x[:, 0] > 0).long(),
        "count": x[:, 0].abs().round(),
        "positive": x[:, 0].abs() + 0.1,
    }[target_kind(model, x)]
    return model, x, y


@functools.cache
def fitted(path, road, **options):
    """Return a fit; the tests share those that they only read."""
    return fit(road, *problem(path), **options)


def fit(road, model, x, y, **options):
    with warnings.catch_warnings():
        # Five steps do not converge, and say so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        if road == "nuts":
            sizes = {"chains": 2, "warmup": 5, "draws": 5, "max_tree_depth": 4}
            return pbnn.fit_nuts(model, x, y, compile=False, progress=False, **sizes, **options)
        return pbnn.fit_svi(model, x, y, guide=road, steps=5, draws=10, progress=False, **options)


@pytest.fixture(params=MODELS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(params=ROADS)
def road(request):
    return request.param


def test_road_ends_in_a_posterior_of_the_same_shape(path, road, tmp_path):
    model, x, y = problem(path)
    posterior = fitted(path, road, seed=3)

    table = pbnn.check_model(model, x, y).set_index("site")
    latent = table[table["kind"] == "latent"]
    chains, draws = (2, 5) if road == "nuts" else (1, 10)
    assert list(posterior.draws) == list(latent.index)
    for name, value in posterior.draws.items():
        assert value.shape == (chains, draws, *latent.loc[name, "shape"])
        assert value.isfinite().all()
    expected = {"lp"} | ({"diverging", "energy"} if road == "nuts" else {"log_q"})
    assert expected <= set(posterior.stats)
    for value in posterior.stats.values():
        assert value.shape == (chains, draws)
    assert posterior.markov == (road == "nuts")
    assert posterior.provenance["observed"] == ["y"]
    assert posterior.provenance["model"]["sha256"] == model.pbnn_source["sha256"]

    loaded = pbnn.Posterior.load(posterior.save(tmp_path / "fit.pt"))
    first, second = (
        pbnn.predict(model, p, x).to_frame().to_numpy(dtype=float) for p in (posterior, loaded)
    )
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
    assert pbnn.log_likelihood(model, loaded, x, y).shape == (chains, draws, ROWS)


@pytest.mark.parametrize(("path", "road"), PAIRS, indirect=True)
def test_same_seed_gives_the_same_bits_and_another_seed_does_not(path, road, unchanged):
    first, other = fitted(path, road, seed=3), fitted(path, road, seed=4)
    model, x, y = problem(path)
    with unchanged(model):
        again = fit(road, model, x, y, seed=3)
    for name in first.draws:
        assert torch.equal(first.draws[name], again.draws[name])
    assert any(not torch.equal(first.draws[name], other.draws[name]) for name in first.draws)


def test_export_has_every_group_that_applies(path, road):
    model, x, y = problem(path)
    posterior = fitted(path, road, seed=3)
    data = pbnn.to_inference_data(posterior, model=model, x=x, y=y, x_new=x[:3])
    assert set(groups(data)) >= {
        "posterior",
        "sample_stats",
        "log_likelihood",
        "posterior_predictive",
        "observed_data",
        "constant_data",
        "predictions",
    }


@pytest.mark.parametrize(("path", "road"), PAIRS, indirect=True)
def test_one_dtype_throughout(path, road):
    for options, dtype in (({"seed": 3}, torch.float32), ({"dtype": torch.float64}, torch.float64)):
        posterior = fitted(path, road, **options)
        floating = [*posterior.draws.values(), posterior.stats["lp"]]
        assert {value.dtype for value in floating} == {dtype}


@pytest.mark.parametrize("other", OTHERS)
def test_other_road_keeps_the_contract(other, tmp_path, unchanged):
    model, x, y = problem(MODELS[-1])
    options = {"seed": 3, "compile": False, "progress": False, **OTHERS[other]}
    with unchanged(model):
        posterior, again = (getattr(pbnn, f"fit_{other}")(model, x, y, **options) for _ in range(2))
    table = pbnn.check_model(model, x, y).set_index("site")
    latent = table[table["kind"] == "latent"]
    assert list(posterior.draws) == list(latent.index)
    lead = (posterior.chains, posterior.draws_per_chain)
    for name, value in posterior.draws.items():
        assert value.shape == (*lead, *latent.loc[name, "shape"])
        assert value.dtype == torch.float32
        assert value.isfinite().all()
        assert torch.equal(value, again.draws[name])
    assert {value.shape for value in posterior.stats.values()} == {lead}
    assert posterior.stats["lp"].isfinite().all()
    assert posterior.provenance["observed"] == ["y"]
    assert posterior.provenance["model"]["sha256"] == model.pbnn_source["sha256"]
    loaded = pbnn.Posterior.load(posterior.save(tmp_path / "fit.pt"))
    first, second = (
        pbnn.predict(model, p, x).to_frame().to_numpy(dtype=float) for p in (posterior, loaded)
    )
    np.testing.assert_array_equal(first, second)
    data = pbnn.to_inference_data(loaded, model=model, x=x, y=y)
    assert {"posterior", "sample_stats", "log_likelihood"} <= set(groups(data))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_draws_that_load_on_a_cpu(path, road, tmp_path):
    model, x, y = problem(path)
    posterior = fit(road, model, x, y, device="cuda")
    assert posterior.provenance["device"].startswith("cuda")
    assert {value.device.type for value in posterior.draws.values()} == {"cpu"}
    loaded = pbnn.Posterior.load(posterior.save(tmp_path / "fit.pt"))
    on_cpu = pbnn.predict(model, loaded, x).to_frame().to_numpy(dtype=float)
    on_gpu = pbnn.predict(model, loaded, x, quantiles=(), device="cuda").to_frame()
    shared = [c for c in on_gpu.columns if c != "prediction"]
    columns = pbnn.predict(model, loaded, x).to_frame()[shared].to_numpy(dtype=float)
    np.testing.assert_allclose(on_gpu[shared].to_numpy(dtype=float), columns, rtol=1e-3, atol=1e-4)
    assert np.isfinite(on_cpu).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("other", OTHERS)
def test_other_road_on_cuda_gives_draws_on_the_cpu(other):
    model, x, y = problem(MODELS[-1])
    options = {"device": "cuda", "compile": False, "progress": False, **OTHERS[other]}
    posterior = getattr(pbnn, f"fit_{other}")(model, x, y, **options)
    assert posterior.provenance["device"].startswith("cuda")
    assert {value.device.type for value in posterior.draws.values()} == {"cpu"}
    assert pbnn.log_likelihood(model, posterior, x, y).isfinite().all()
