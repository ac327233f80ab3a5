"""Power-scaling against the conjugate posterior in closed form and ArviZ; what the table says."""

import dataclasses

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data, prior_posterior
from pyro import poutine

from pbnn import fit_svi
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.power_scaling import cumulative_js, power_scaled
from pbnn.evaluate.sensitivity import HELD_OUT, sensitivity
from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.infer.posterior import Posterior

DRAWS = 2000
POWER = 1.25


def exact(model, x, y, *, prior=1.0, likelihood=1.0):
    """Return mean and covariance of a linear model's power-scaled posterior."""
    scaled = Linear(x.shape[1], noise=model.noise / likelihood**0.5, prior=model.prior / prior**0.5)
    return scaled.exact(x, y)


def drawn(mean, covariance, draws=DRAWS):
    torch.manual_seed(1)
    w = dist.MultivariateNormal(mean, covariance).sample((1, draws)).float()
    return Posterior(
        draws={"w": w}, stats={"lp": torch.zeros(1, draws)}, method="nuts", markov=True, seconds=0.0
    )


class MaskedLinear(Linear):
    """The same, for y with missing values."""

    def forward(self, x, y=None):
        f = x @ self.w
        seen = torch.ones(len(x), dtype=torch.bool) if y is None else ~y.isnan()
        with pyro.plate("data", x.shape[0]), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f


@pytest.fixture(scope="module")
def problem():
    """One weight that the data say little about: the prior N(0, 1) is as strong as they are."""
    x, y = linear_data(4, 1, noise=1.0)
    model = Linear(1, noise=1.0)
    return model, x, y, drawn(*model.exact(x, y))


def test_means_are_those_of_the_closed_form(problem):
    """Within 4 Monte Carlo errors of a mean over weighted draws."""
    model, x, y, posterior = problem
    inputs = torch.tensor([[1.0], [-2.0]])
    held = (inputs, torch.tensor([0.5, 0.0]))
    found = sensitivity(model, posterior, x, y, inputs=inputs, held_out=held, power=POWER)
    names = ["E[y] at input 0", "E[y] at input 1", "w", HELD_OUT]
    assert list(found.table.index) == list(found.means.index) == names
    for (component, alpha), k in found.khat.items():
        mean, covariance = exact(model, x, y, **{component: alpha})
        scale = float(covariance[0, 0]) ** 0.5
        assert k < 0.7
        # Weights of powers 0.8 and 1.25 leave over half of the draws' effective number.
        error = scale / (DRAWS / 2) ** 0.5
        moved = found.means[component, alpha]
        assert moved["w"] == pytest.approx(float(mean), abs=4 * error)
        assert moved["E[y] at input 1"] == pytest.approx(-2 * moved["w"], rel=1e-5)
        predictive = dist.Normal(inputs[:, 0] * mean, (1 + inputs[:, 0] ** 2 * scale**2) ** 0.5)
        density = float(predictive.log_prob(held[1]).mean())
        assert moved[HELD_OUT] == pytest.approx(density, abs=0.02)
    assert found.table.loc["w", "verdict"].startswith("moves with")
    assert "w: " in str(found)


@pytest.mark.skipif(not hasattr(az, "psens"), reason="ArviZ 1.x has it under another name")
def test_sensitivity_is_arvizs(problem):
    model, x, y, posterior = problem
    found = sensitivity(model, posterior, x, y, power=POWER)
    w = posterior.draws["w"]
    data = az.from_dict(
        posterior={"w": w[..., 0].numpy()},
        log_likelihood={"y": dist.Normal(w @ x.T, 1.0).log_prob(y).numpy()},
    )
    prior = dist.Normal(0.0, 1.0).log_prob(w[..., 0]).numpy()
    data.add_groups(log_prior={"w": prior}, warn_on_custom_groups=False)
    for component in ("prior", "likelihood"):
        expected = az.psens(data, component=component, delta=POWER - 1)["w"].item()
        assert found.table.loc["w", component] == pytest.approx(expected, rel=1e-3)


def test_what_data_decide_stands():
    x, y = linear_data(400, 2, noise=0.5)
    model = Linear(2)
    found = sensitivity(model, drawn(*model.exact(x, y)), x, y, sites=["w"])
    assert list(found.table.index) == ["w[0]", "w[1]"]
    assert found.table["verdict"].str.startswith("stands").all()
    assert (found.table["prior"] < 0.05).all()


def test_untrusted_weights_are_not_known_until_refitted():
    """Forty weights at their prior: k is high at a power of 8, and the closed form a refit."""
    x, y = linear_data(20, 40, noise=1.0)
    model = Linear(40, noise=1.0)
    posterior = drawn(*model.exact(x, y), draws=400)
    options = {"inputs": x[:1], "sites": [], "power": 8.0}
    unknown = sensitivity(model, posterior, x, y, **options)
    assert max(unknown.khat.values()) > 0.7
    assert "pass refit=" in unknown.table["verdict"].item()
    assert unknown.table["prior"].isna().all()
    w = torch.ones(40)
    log_prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
    seen = []

    def refit(scaled):
        """Read the power off the density of the model, and draw from its exact posterior."""
        density = Density(bind(scaled, x, y), chains=0).site_log_densities(w)
        seen.append(density["w"] / float(log_prior))
        likelihood = density["y"] / float(dist.Normal(x @ w, 1.0).log_prob(y).sum())
        powers = {"prior": seen[-1], "likelihood": likelihood}
        return drawn(*exact(model, x, y, **powers), draws=400)

    found = sensitivity(model, posterior, x, y, refit=refit, **{**options, "priors": ["w"]})
    assert seen[:2] == pytest.approx([0.125, 8.0], rel=1e-5)
    assert np.isnan(found.khat["prior", 8.0])
    mean, covariance = exact(model, x, y, prior=8.0)
    error = float(x[0].double() @ covariance @ x[0].double()) ** 0.5 / 400**0.5
    moved = found.means["prior", 8.0].item()
    assert moved == pytest.approx(float(x[0].double() @ mean), abs=4 * error)


def test_network_by_default(toy):
    """Its site of one value, E[y] and the held-out density, one line each."""
    posterior = prior_posterior(Toy(), *toy, draws=200)
    held = (toy[0][:5], toy[1][:5])
    found = sensitivity(Toy(), posterior, *toy, inputs=toy[0][:2], held_out=held, power=1.01)
    names = ["E[y] at input 0", "E[y] at input 1", "fc2.bias", "sigma", HELD_OUT]
    assert list(found.table.index) == names
    assert str(found).count("\n") == 4


def test_power_scaled_model_has_the_scaled_density(toy):
    """Its log joint is the sum of its parts times their powers; samples and names stay."""
    model = Toy()
    plain = Density(bind(model, *toy), chains=0)
    raised = power_scaled(model, prior=2.0, likelihood=0.5, priors=["fc1.*"])
    scaled = Density(bind(raised, *toy), chains=0)
    z = 0.3 * torch.randn(plain.dim)
    before, after = plain.site_log_densities(z), scaled.site_log_densities(z)
    assert list(before) == list(after)
    powers = {"fc1.weight": 2.0, "fc1.bias": 2.0, "y": 0.5}
    for name, term in before.items():
        assert after[name] == pytest.approx(powers.get(name, 1.0) * term, rel=1e-5)
    assert float(scaled.log_density(z)) == pytest.approx(sum(after.values()), rel=1e-5)


def test_a_factor_counts_as_neither_on_both_roads():
    """In plate `data` or not: the scaled density keeps it, and the weights do not see it."""

    def model(x, y=None, pull=True):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            if pull:
                pyro.factor("inside", -f.square())
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        if pull:
            pyro.factor("outside", -w.square().sum())
        return f

    x, y = linear_data(4, 1, noise=1.0)
    z = torch.tensor([0.7])
    powers = {"w": 2.0, "y": 0.5}
    before = Density(bind(model, x, y), chains=0).site_log_densities(z)
    scaled = bind(power_scaled(model, prior=2.0, likelihood=0.5), x, y)
    after = Density(scaled, chains=0).site_log_densities(z)
    assert {"inside", "outside"} < set(before)
    for name, term in before.items():
        assert after[name] == pytest.approx(powers.get(name, 1.0) * term, rel=1e-5)
    posterior = drawn(torch.tensor([0.5]), torch.tensor([[0.2]]), draws=100)
    found = sensitivity(model, posterior, x, y)
    without = sensitivity(lambda x, y=None: model(x, y, pull=False), posterior, x, y)
    np.testing.assert_allclose(found.means, without.means, rtol=1e-6)


def test_missing_rows_are_left_out(problem):
    model, x, y, posterior = problem
    more = torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([torch.nan])])
    masked = MaskedLinear(1, noise=1.0)
    inputs = {"inputs": x[:1]}
    found = sensitivity(masked, posterior, *more, held_out=more, **inputs)
    expected = sensitivity(model, posterior, x, y, held_out=(x, y), **inputs)
    np.testing.assert_allclose(found.means, expected.means, rtol=1e-6)
    assert found.table.loc["w", "likelihood"] > 0.05
    with pytest.raises(DataError, match="held_out has 1 observed rows; expected two or more"):
        sensitivity(masked, posterior, x, y, held_out=(more[0][-2:], more[1][-2:]))
    with pytest.raises(DataError, match="held_out has 1 observed rows"):
        sensitivity(model, posterior, x, y, held_out=(x[:1], y[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("powers", [{"prior": 9.0}, {"likelihood": 9.0}])
def test_refits_of_a_power_scaled_model_are_exact(powers):
    """A Normal guide on one weight is the exact power-scaled posterior, closed-form KL or not."""
    x, y = linear_data(6, 1, noise=1.0)
    model = Linear(1, noise=1.0)
    fit = fit_svi(
        power_scaled(model, **powers), x, y, steps=2500, init_scale=0.15, compile=False,
        progress=False, early_stopping=False,
    )  # fmt: skip
    mean, covariance = exact(model, x, y, **powers)
    tensors = fit.approximation["tensors"]
    assert float(tensors["loc"]) == pytest.approx(float(mean), rel=0.02)
    assert float(tensors["scale"]) == pytest.approx(float(covariance) ** 0.5, rel=0.02)


def test_cumulative_js_between_disjoint_and_equal():
    values = np.linspace(0.0, 1.0, 101)
    even = np.full(101, 1 / 101)
    assert cumulative_js(values, even, even) == pytest.approx(0.0, abs=1e-7)
    first, last = np.eye(101)[0], np.eye(101)[-1]
    assert cumulative_js(values, first, last) == pytest.approx(1.0)
    assert cumulative_js(np.zeros(101), first, last) == 0.0


def test_refusals(problem, toy):
    model, x, y, posterior = problem
    with pytest.raises(DataError, match="20 draws; expected 25"):
        sensitivity(model, posterior.select(draws=slice(20)), x, y)
    with pytest.raises(DataError, match="power is 1"):
        sensitivity(model, posterior, x, y, power=1.0)
    with pytest.raises(ModelError, match="no latent site matches 'tau'"):
        sensitivity(model, posterior, x, y, priors=["tau"])
    with pytest.raises(ModelError, match="no latent site 'v'; the posterior has"):
        sensitivity(model, posterior, x, y, sites=["v"])
    bad = dataclasses.replace(posterior, draws={"w": posterior.draws["w"].clone()})
    bad.draws["w"][0, 0] = torch.inf
    with pytest.raises(DataError, match="log prior is not finite at 1 of 2000 draws"):
        sensitivity(model, bad, x, y)
    with pytest.raises(DataError, match="nothing to conclude"):
        sensitivity(Toy(), prior_posterior(Toy(), *toy, draws=30), *toy, sites=[])
