"""Rows from loaders, draws on disk, the prior predictive, and Monte Carlo errors of predictions."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from model_cases import Linear, Toy, prior_posterior
from torch.utils.data import DataLoader, TensorDataset

from pbnn import log_likelihood, predict, predictive, prior_predictive, sample_prior
from pbnn.data import Units
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.calibration import log_predictive_density
from pbnn.infer.posterior import Posterior
from pbnn.prediction import function_draws
from pbnn.prediction.monte_carlo import MonteCarlo


@pytest.fixture
def drawn(toy):
    return prior_posterior(Toy(), *toy, draws=25, chains=4, markov=True)


def normal_draws(w, chains=1, markov=False):
    shape = (chains, -1, *w.shape[1:])
    count = len(w) // chains
    stats = {"lp": torch.zeros(chains, count)}
    return Posterior(
        draws={"w": w.reshape(shape)}, stats=stats, method="given", markov=markov, seconds=0.0
    )


# Loaders.


class Keyed(Toy):
    """The toy, whose x is a dict."""

    def network(self, x):
        return super().network(x["a"])

    def forward(self, x, y=None):
        f, sigma = self.network(x), self.sigma
        with pyro.plate("data", f.shape[0]):
            pyro.sample("y", dist.Normal(f, sigma), obs=y)
        return f


@pytest.mark.parametrize("kind", ["DataLoader", "list of x", "tuples", "generator", "dicts"])
def test_rows_from_a_loader_are_the_rows_at_once(kind, drawn, toy):
    x, y = toy
    blocks = {
        "DataLoader": DataLoader(TensorDataset(x, y), batch_size=7),
        "list of x": list(x.split(7)),
        "tuples": [(part,) for part in x.split(7)],
        "generator": iter(x.split(7)),
        "dicts": [{"a": part} for part in x.split(7)],
    }[kind]
    model, whole = (Keyed(), {"a": x}) if kind == "dicts" else (Toy(), x)
    found, expected = predict(model, drawn, blocks), predict(model, drawn, whole)
    for name in ("mean", "epistemic_scale", "aleatoric_scale"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert (found.log_predictive_density is not None) == (kind == "DataLoader")


def test_every_reader_takes_a_loader(drawn, toy, tmp_path):
    x, y = toy
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    for call in (function_draws, lambda *a: predictive(*a)["f"]):
        torch.testing.assert_close(call(Toy(), drawn, loader), call(Toy(), drawn, x))
    expected = log_likelihood(Toy(), drawn, x, y)
    torch.testing.assert_close(log_likelihood(Toy(), drawn, loader), expected)
    on_disk = log_likelihood(Toy(), drawn, loader, out=tmp_path / "scores.nc")
    torch.testing.assert_close(on_disk, expected)


def test_loaders_that_do_not_fit_are_refused(drawn, toy, tmp_path):
    x, y = toy
    with pytest.raises(DataError, match="x is a loader, so y goes with it"):
        predict(Toy(), drawn, [x], y)
    with pytest.raises(DataError, match="the loader gave x alone"):
        log_likelihood(Toy(), drawn, [x])
    with pytest.raises(DataError, match="the loader gave 3 parts"):
        predict(Toy(), drawn, [(x, y, y)])
    with pytest.raises(DataError, match="a loader that gave no rows"):
        predict(Toy(), drawn, iter([]))
    with pytest.raises(DataError, match="gone through twice"):
        predictive(Toy(), drawn, iter([x]), out=tmp_path / "draws.nc")
    assert list(tmp_path.iterdir()) == []


def test_lists_of_numbers_are_rows(drawn, toy):
    x, _ = toy
    torch.testing.assert_close(
        predict(Toy(), drawn, x.tolist()).mean, predict(Toy(), drawn, x).mean
    )


# Draws on disk.


@pytest.mark.parametrize("rows", [30, 0])
def test_draws_on_disk_are_those_in_memory(drawn, toy, tmp_path, rows):
    x = toy[0][:rows]
    held = predictive(Toy(), drawn, x)
    mapped = predictive(Toy(), drawn, x, out=tmp_path / "draws.nc")
    for name, value in held.items():
        assert torch.equal(mapped[name], value)
    assert [path.name for path in tmp_path.iterdir()] == ["draws.nc"]
    with xr.open_groups(tmp_path / "draws.nc", engine="h5netcdf")["/predictions"] as group:
        assert dict(group.sizes) == {"chain": 4, "draw": 25, "pred_id": rows}
        np.testing.assert_array_equal(group["f"].values, held["f"].numpy())


def test_nothing_is_left_of_a_file_that_failed(drawn, toy, tmp_path):
    x, y = toy
    bad = [(x, y), (x[:, :1], y)]
    with pytest.raises(ModelError, match="cannot predict for x of shape"):
        log_likelihood(Toy(), drawn, bad, out=tmp_path / "scores.nc")
    assert list(tmp_path.iterdir()) == []


# Several observed sites.


def two_sites(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = x @ w
    with pyro.plate("data", x.shape[0]):
        pyro.sample("a/mean", dist.Normal(f, 1.0), obs=None if y is None else y["a/mean"])
        pyro.sample("count", dist.Poisson(f.exp()), obs=None if y is None else y["count"])
    return f


def test_likelihood_by_site(toy, tmp_path):
    x, _ = toy
    y = {"a/mean": torch.randn(30), "count": torch.arange(30.0)}
    posterior = normal_draws(torch.randn(6, 2))
    parts = log_likelihood(two_sites, posterior, x, y, by_site=True)
    f = posterior.flat()["w"] @ x.T
    torch.testing.assert_close(parts["a/mean"][0], dist.Normal(f, 1.0).log_prob(y["a/mean"]))
    torch.testing.assert_close(parts["count"][0], dist.Poisson(f.exp()).log_prob(y["count"]))
    total = log_likelihood(two_sites, posterior, x, y)
    torch.testing.assert_close(total, parts["a/mean"] + parts["count"])
    units = Units(np.array(0.0), np.array(4.0))
    scaled = log_likelihood(two_sites, posterior, x, y, by_site=True, units=units)
    torch.testing.assert_close(scaled["a/mean"], parts["a/mean"] - math.log(4))
    mapped = log_likelihood(two_sites, posterior, x, y, by_site=True, out=tmp_path / "scores.nc")
    assert set(mapped) == set(parts)
    torch.testing.assert_close(mapped["count"], parts["count"])


# The prior.


def test_prior_draws_have_the_priors_moments(toy, unchanged):
    x, _ = toy
    model = Linear(2, noise=0.5, prior=2.0)
    with unchanged(model):
        prior = sample_prior(model, x, draws=4000, seed=3)
    w = prior.draws["w"]
    assert w.shape == (1, 4000, 2)
    assert not prior.markov
    assert bool((w.mean((0, 1)).abs() < 4 * 2.0 / 4000**0.5).all())
    assert bool((w.std((0, 1)) / 2.0 - 1).abs().max() < 4 / 8000**0.5)
    torch.testing.assert_close(prior.stats["lp"], dist.Normal(0.0, 2.0).log_prob(w).sum(-1))
    again = sample_prior(model, x, draws=4000, seed=3)
    assert torch.equal(w, again.draws["w"])


def test_prior_lp_counts_the_jacobian(toy):
    prior = sample_prior(Toy(), toy[0], draws=5)
    d = {name: value[0] for name, value in prior.draws.items()}
    by_hand = dist.HalfNormal(1.0).log_prob(d["sigma"]) + d["sigma"].log()
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        by_hand = by_hand + dist.Normal(0.0, 1.0).log_prob(d[name]).flatten(1).sum(1)
    torch.testing.assert_close(prior.stats["lp"][0], by_hand)


def test_prior_predictive_is_exact_for_a_linear_model(toy, unchanged):
    """y ~ N(0, scale² |x|² + noise²): variance within 5 of its standard errors, √(2 / S)."""
    x, _ = toy
    model = Linear(2, noise=0.5, prior=2.0)
    with unchanged(model):
        found = prior_predictive(model, x, draws=4000)
    assert found["y"].shape == found["f"].shape == (1, 4000, 30)
    exact = 4.0 * x.square().sum(1) + 0.25
    assert bool((found["y"][0].var(0) / exact - 1).abs().max() < 5 * (2 / 4000) ** 0.5)
    w = sample_prior(model, x, draws=4000).draws["w"]
    torch.testing.assert_close(found["f"], w @ x.T)
    loader = prior_predictive(model, list(x.split(7)), draws=4000)
    torch.testing.assert_close(loader["f"], found["f"])


def test_deterministic_sites_of_the_prior(toy):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.deterministic("contrast", w[0] - w[1])
        f = pyro.deterministic("line", x @ w)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f

    prior = sample_prior(model, toy[0], draws=10)
    w = prior.draws["w"]
    assert set(prior.draws) == {"w"}
    assert set(prior.deterministic) == {"contrast"}
    torch.testing.assert_close(prior.deterministic["contrast"], w[..., 0] - w[..., 1])


def test_priors_that_cannot_be_sampled_are_refused(toy):
    def flat(x, y=None):
        w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        return x @ w

    with pytest.raises(ModelError, match="the prior cannot be sampled"):
        prior_predictive(flat, toy[0])
    with pytest.raises(DataError, match="draws is 0; expected 1 or more"):
        sample_prior(Toy(), toy[0], draws=0)


# Log predictive density.


def test_log_predictive_density_beside_the_moments(drawn, toy):
    x, y = toy
    found = predict(Toy(), drawn, x, y)
    expected = log_predictive_density(log_likelihood(Toy(), drawn, x, y))
    torch.testing.assert_close(found.log_predictive_density, expected, rtol=1e-5, atol=1e-5)
    units = Units(np.array(10.0), np.array(4.0))
    scaled = predict(Toy(), drawn, x, y, units=units)
    torch.testing.assert_close(
        scaled.log_predictive_density, found.log_predictive_density - math.log(4)
    )
    torch.testing.assert_close(scaled.mcse["mean"], 4 * found.mcse["mean"])
    assert "log_predictive_density" in found.to_frame()
    assert "mean_mcse" in found.to_frame(mcse=True)


def test_density_of_a_mixture_not_its_mean():  # fault 33, in prediction
    """Two draws with densities 0.1 and 0.9: log 0.5."""
    w = torch.tensor([[0.1, 0.9], [0.9, 0.1]]).log()
    found = predict(two_classes, normal_draws(w), torch.ones(1, 1), torch.tensor([0]))
    assert found.log_predictive_density.item() == pytest.approx(math.log(0.5), abs=1e-6)


def two_classes(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = x * w
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Categorical(logits=f), obs=y)
    return f


# Monte Carlo errors: against the spread of 300 repetitions, whose own error is 1 / √600 = 4%.


REPETITIONS, DRAWS = 300, 400


def autoregressive(shape, correlation, generator):
    """Return stationary N(0, 1) chains `(chain, draw, …)`."""
    z = torch.randn(shape, generator=generator)
    for t in range(1, shape[1]):
        z[:, t] = correlation * z[:, t - 1] + (1 - correlation**2) ** 0.5 * z[:, t]
    return z


@pytest.mark.parametrize(("correlation", "markov"), [(0.0, False), (0.0, True), (0.6, True)])
def test_errors_are_the_spread_of_repetitions(correlation, markov):
    """Batch means of √100 = 10 draws miss 6% of the error at correlation 0.6; 20% in all."""
    generator = torch.Generator().manual_seed(0)
    z = autoregressive((4, DRAWS // 4, REPETITIONS), correlation, generator)
    values = z.flatten(0, 1).double() + 1.0
    monte_carlo = MonteCarlo(4, DRAWS // 4, markov=markov)
    squares = (values - values.mean(0)).square()
    found = {
        "mean": (values.mean(0), monte_carlo.error(values)),
        "scale": monte_carlo.root_mean(squares),
        "log mean exp": monte_carlo.log_mean_exp(-0.5 * (values - 1.0).square()),
        "median": monte_carlo.quantiles(values[..., None], [0.5])[0],
        "tail": monte_carlo.quantiles(values[..., None], [0.1])[0],
    }
    for name, (estimates, errors) in found.items():
        ratio = float(errors.square().mean().sqrt() / estimates.std())
        assert ratio == pytest.approx(1.0, abs=0.2), name


def test_quantiles_are_numpys():
    values = torch.randn(101, 3, 2)
    for p in (0.0, 0.05, 0.5, 1.0):
        ((found, error),) = MonteCarlo(1, 101, markov=False).quantiles(values[..., None], [p])
        np.testing.assert_allclose(found, np.quantile(values.numpy(), p, axis=0), rtol=1e-6)
        assert bool(error.isnan().all()) == (p in (0.0, 1.0))


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_few_draws_have_large_errors_or_none(draws):
    values = torch.randn(draws, 5)
    error = MonteCarlo(1, draws, markov=True).error(values)
    assert bool(error.isnan().all()) == (draws == 1)
    assert not MonteCarlo(1, 4, markov=False).root_mean(torch.zeros(4, 2))[1].any()


def test_errors_of_classes_are_the_spread_of_repetitions():
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list] = {"probabilities": [], "entropy": [], "mutual_information": []}
    errors: dict[str, list] = {name: [] for name in found}
    x = torch.ones(1, 1)
    for _ in range(60):
        w = torch.randn(DRAWS, 2, generator=generator)
        prediction = predict(two_classes, normal_draws(w), x)
        for name in found:
            found[name].append(getattr(prediction, name).flatten()[0])
            errors[name].append(prediction.mcse[name].flatten()[0])
    # Against 60 repetitions (9%): three of their errors.
    # Entropy is flat at even odds, so that its error is of second order.
    for name in ("probabilities", "mutual_information"):
        ratio = float(torch.stack(errors[name]).mean() / torch.stack(found[name]).std())
        assert ratio == pytest.approx(1.0, abs=0.27), name
    assert float(torch.stack(errors["entropy"]).mean()) < 5e-3


def test_a_model_without_input_or_parameters_has_a_prior():
    def model(x, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        pyro.sample("y", dist.Normal(mean, torch.ones(3)).to_event(1), obs=y)
        return mean

    mean = sample_prior(model, None, draws=4000, seed=3).draws["mean"]
    assert mean.shape == (1, 4000)
    # The standard error of a standard deviation over n draws is scale / sqrt(2 n).
    assert abs(float(mean.std()) - 2.0) < 4 * 2.0 / (2 * 4000) ** 0.5


def test_quantiles_of_one_draw_are_those_of_its_distribution():
    x = torch.randn(5, 2)
    point = prior_posterior(Toy(), x, torch.zeros(5), draws=1)
    f = function_draws(Toy(), point, x).reshape(5)
    scale = point.draws["sigma"].reshape(())
    found = predict(Toy(), point, x, quantiles=(0.05, 0.5))
    # The standard error of a quantile of 1,000 values is sqrt(p (1 - p) / 1000) / density.
    low, middle = found.quantiles.values()
    assert ((low - (f - 1.645 * scale)).abs() < 4 * 0.067 * scale).all()
    assert ((middle - f).abs() < 4 * 0.04 * scale).all()
    assert found.mcse["q0.5"].isnan().all()
