"""Export of real fits: both roads give files alike, and right against values by hand."""

import subprocess
import sys
import warnings
from pathlib import Path

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import prior_posterior
from pyro import poutine

import pbnn
from pbnn.data import Units
from pbnn.errors import ConvergenceWarning
from pbnn.inference_data import group, groups, read_netcdf, to_inference_data, write_netcdf

# What ArviZ 0.23 itself calls in the newest matplotlib.
pytestmark = pytest.mark.filterwarnings("ignore:Passing a dict or None as alias:DeprecationWarning")
MODEL = Path(__file__).parents[1] / "models" / "regression.py"
FITS = {
    "svi": lambda model, x, y: pbnn.fit_svi(
        model, x, y, guide="normal", steps=200, draws=50, progress=False
    ),
    "nuts": lambda model, x, y: pbnn.fit_nuts(
        model, x, y, chains=2, warmup=60, draws=40, max_tree_depth=4, compile=False, progress=False
    ),
}


@pytest.fixture(scope="module")
def toy():
    """The data of the list of faults, and a small network for them."""
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    y = x[:, 0] - x[:, 1] + 0.1 * torch.randn(30)
    return pbnn.load_model(MODEL, in_features=2, hidden=5), x, y


@pytest.fixture(scope="module")
def fits(toy):
    """A short fit by each road; what is exported is at test here, not whether it converged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return {name: fit(*toy) for name, fit in FITS.items()}


@pytest.fixture(scope="module", params=list(FITS))
def exported(request, toy, fits, tmp_path_factory):
    model, x, y = toy
    data = to_inference_data(fits[request.param], model=model, x=x, y=y, x_new=x[:7])
    path = tmp_path_factory.mktemp("roads") / f"{request.param}.nc"
    return fits[request.param], read_netcdf(write_netcdf(data, path))


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # of prior draws
@pytest.mark.parametrize("asked", [True, np.array([2, 4, 6])], ids=["all rows", "some"])
def test_rows_without_observation_have_no_log_likelihood(asked, toy):
    """ArviZ would count them as certain; the file says how many it leaves out."""

    def masked(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = x @ w
        with pyro.plate("data", x.shape[0]), poutine.mask(mask=y is None or ~y.isnan()):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    _, x, y = toy
    gaps = y.masked_fill(torch.arange(30) == 4, torch.nan)
    posterior = prior_posterior(masked, x, gaps, draws=50, chains=2, markov=True)
    data = to_inference_data(posterior, model=masked, x=x, y=gaps, log_likelihood=asked)
    found = group(data, "log_likelihood")
    rows = [i for i in (range(30) if asked is True else asked) if i != 4]
    assert found["obs_id"].values.tolist() == rows
    assert found.attrs["pbnn_rows_without_observation"] == 1
    assert np.isfinite(found["y"].values).all()
    assert group(data, "observed_data").sizes["obs_id"] == 30
    if asked is True:
        kept = torch.arange(30) != 4
        whole = to_inference_data(posterior, model=masked, x=x[kept], y=y[kept])
        assert az.loo(data).elpd_loo == pytest.approx(az.loo(whole).elpd_loo, rel=1e-5)


def log_normal(value, loc, scale):
    z = (value - loc) / scale
    return -0.5 * z**2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def by_hand(posterior, chain, draw, x, y):
    """f, row-wise log-likelihood and log prior of one draw of the network, in float64."""
    site = {k: v[chain, draw].double().numpy() for k, v in posterior.draws.items()}
    x, y = x.double().numpy(), y.double().numpy()
    hidden = np.tanh(x @ site["layers.0.weight"].T + site["layers.0.bias"])
    f = (hidden @ site["layers.1.weight"].T + site["layers.1.bias"])[:, 0]
    prior = (
        log_normal(site["layers.0.weight"], 0, 2**-0.5).sum()
        + log_normal(site["layers.1.weight"], 0, 5**-0.5).sum()
        + log_normal(site["layers.0.bias"], 0, 1).sum()
        + log_normal(site["layers.1.bias"], 0, 1).sum()
        + np.log(2)
        + log_normal(site["scale"], 0, 1)
    )
    return f, log_normal(y, f, site["scale"]), prior, site["scale"]


def test_log_likelihood_f_and_lp_equal_a_hand_loop(exported, toy):  # faults 24 and 26
    posterior, data = exported
    _, x, y = toy
    scores = group(data, "log_likelihood")["y"].values
    output = group(data, "posterior")["f"].values
    lp = group(data, "sample_stats")["lp"].values
    assert scores.shape == (posterior.chains, posterior.draws_per_chain, 30)
    for chain in range(posterior.chains):
        for draw in range(0, posterior.draws_per_chain, 5):
            f, rows, prior, scale = by_hand(posterior, chain, draw, x, y)
            # float32 against float64: 1e-5 of the numbers that enter, z^2 and log(scale).
            np.testing.assert_allclose(output[chain, draw], f, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(scores[chain, draw], rows, rtol=1e-5, atol=1e-5)
            # The density of log(scale), so with the Jacobian of exp.
            by_sum = rows.sum() + prior + np.log(scale)
            np.testing.assert_allclose(lp[chain, draw], by_sum, rtol=1e-5, atol=1e-4)


def test_both_roads_have_the_same_names_and_dims(fits, toy):  # faults 19 and 25
    model, x, y = toy
    layouts = []
    for posterior in fits.values():
        data = to_inference_data(posterior, model=model, x=x, y=y, x_new=x[:7])
        layouts.append(
            {
                f"{name}/{key}": variable.dims
                for name, dataset in groups(data).items()
                if name != "sample_stats"
                for key, variable in dataset.data_vars.items()
            }
        )
    assert layouts[0] == layouts[1]
    assert "predictions/y" in layouts[0]


def test_sample_stats(exported):  # fault 26
    posterior, data = exported
    stats = group(data, "sample_stats")
    if not posterior.markov:
        assert set(stats.data_vars) == {"lp", "log_q"}
        assert stats.sizes["chain"] == 1
        return
    expected = {"lp", "energy", "acceptance_rate", "step_size", "tree_depth", "n_steps"}
    assert expected | {"diverging"} <= set(stats.data_vars)
    assert stats["diverging"].dtype == bool
    # Energy is kinetic energy less lp, and kinetic energy is positive.
    assert (stats["energy"] + stats["lp"] > 0).all()
    assert np.isfinite(np.asarray(az.bfmi(data))).all()
    az.plot_energy(data)


def test_summary_and_marks(exported):
    posterior, data = exported
    summary = az.summary(data, var_names=["scale", "f"])
    assert len(summary) == 31
    assert summary["r_hat"].isna().all() == (not posterior.markov)
    assert data.attrs["pbnn_markov"] == posterior.markov


@pytest.mark.parametrize("road", list(FITS))
def test_deterministic_sites_are_exported(road):  # fault 21
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.deterministic("contrast", w[0] - w[1])
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f

    torch.manual_seed(0)
    x = torch.randn(20, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        posterior = FITS[road](model, x, x[:, 0])
    sites = group(to_inference_data(posterior), "posterior")
    assert sites["contrast"].dims == ("chain", "draw")
    w = sites["w"].values
    np.testing.assert_allclose(
        sites["contrast"].values, w[..., 0] - w[..., 1], rtol=1e-5, atol=1e-6
    )


def test_units_reach_every_group(fits, toy):
    model, x, y = toy
    units = Units(loc=np.asarray(150.0), scale=np.asarray(50.0))
    plain = to_inference_data(fits["svi"], model=model, x=x, y=y)
    scaled = to_inference_data(fits["svi"], model=model, x=x, y=y, units=units)
    for name, key in (("observed_data", "y"), ("posterior", "f"), ("posterior_predictive", "y")):
        np.testing.assert_allclose(
            group(scaled, name)[key].values, 150 + 50 * group(plain, name)[key].values, rtol=1e-5
        )
    np.testing.assert_allclose(
        group(scaled, "log_likelihood")["y"].values,
        group(plain, "log_likelihood")["y"].values - np.log(50.0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_prior_groups_from_a_number_of_draws(fits, toy):
    model, x, y = toy
    data = to_inference_data(fits["nuts"], model=model, x=x, y=y, prior=60, seed=5)
    prior = group(data, "prior")
    assert dict(prior.sizes)["draw"] == 60
    assert set(prior.data_vars) == set(group(data, "posterior").data_vars)
    drawn = pbnn.sample_prior(model, x, draws=60, seed=5)
    np.testing.assert_array_equal(prior["scale"].values, drawn.draws["scale"].numpy())
    expected = pbnn.prior_predictive(model, x, draws=60, seed=5)
    np.testing.assert_array_equal(prior["f"].values, expected["f"].numpy())
    np.testing.assert_array_equal(
        group(data, "prior_predictive")["y"].values, expected["y"].numpy()
    )
    az.plot_ppc(data, group="prior", num_pp_samples=20)


def test_several_observed_sites():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("first", dist.Normal(f, 0.5), obs=None if y is None else y["first"])
            pyro.sample("count", dist.Poisson(f.exp()), obs=None if y is None else y["count"])
        return f

    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    y = {"first": x[:, 0], "count": torch.arange(20.0) % 3}
    posterior = pbnn.sample_prior(model, x, draws=50)
    data = to_inference_data(posterior, model=model, x=x, y=y)
    f = posterior.draws["w"][0] @ x.T
    scores = group(data, "log_likelihood")
    by_hand = {"first": dist.Normal(f, 0.5), "count": dist.Poisson(f.exp())}
    for name, fn in by_hand.items():
        expected = fn.log_prob(y[name]).numpy()
        np.testing.assert_allclose(scores[name].values[0], expected, rtol=1e-4, atol=1e-5)
    assert set(group(data, "posterior_predictive").data_vars) == set(by_hand)


def test_subset_of_rows_equals_those_rows(fits, toy):
    model, x, y = toy
    whole = to_inference_data(fits["nuts"], model=model, x=x, y=y, predictive_draws=0)
    rows = np.array([29, 0, 7])
    some = to_inference_data(
        fits["nuts"], model=model, x=x, y=y, predictive_draws=0, log_likelihood=rows
    )
    np.testing.assert_allclose(
        group(some, "log_likelihood")["y"].values,
        group(whole, "log_likelihood")["y"].sel(obs_id=rows).values,
        rtol=1e-5,
        atol=1e-5,
    )


def test_same_seed_same_predictive_draws(fits, toy):
    model, x, y = toy
    before = torch.random.get_rng_state()

    def draws(seed):
        data = to_inference_data(fits["svi"], model=model, x=x, y=y, seed=seed, predictive_draws=2)
        return group(data, "posterior_predictive")["y"].values

    np.testing.assert_array_equal(draws(1), draws(1))
    assert not np.array_equal(draws(1), draws(2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_large_data_stay_within_a_gigabyte():
    """Fault 27: 4,000 draws × 50,000 rows; likelihood of some rows, predictions of some draws."""
    code = """
import resource, sys
import numpy as np, torch, pbnn
from pbnn.inference_data import group, to_inference_data
torch.manual_seed(0)
model = pbnn.load_model(sys.argv[1], in_features=2, hidden=5)
shapes = {"layers.0.weight": (5, 2), "layers.0.bias": (5,), "layers.1.weight": (1, 5),
          "layers.1.bias": (1,), "scale": ()}
draws = {k: torch.randn(4, 1000, *s).abs() for k, s in shapes.items()}
posterior = pbnn.Posterior(draws=draws, stats={"lp": torch.zeros(4, 1000)}, method="nuts",
                           markov=True, seconds=0.0)
x, y = torch.randn(50_000, 2), torch.randn(50_000)
data = to_inference_data(posterior, model=model, x=x, y=y, log_likelihood=np.arange(0, 50_000, 100),
                         predictive_draws=2)
assert group(data, "log_likelihood")["y"].shape == (4, 1000, 500)
assert group(data, "posterior_predictive")["y"].shape == (4, 2, 50_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, MODEL],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 1e9
