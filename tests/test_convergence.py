"""Convergence is judged where it matters, on f(x), and never passes for want of numbers."""

from dataclasses import replace

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, prior_posterior

from pbnn.errors import ModelError
from pbnn.evaluate.convergence import check_convergence, probe_rows
from pbnn.infer.posterior import Posterior


@pytest.fixture(scope="module")
def independent():
    """Four chains of 400 independent draws of the toy's prior."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.randn(30)
    return x, prior_posterior(Toy(), x, y, draws=400, chains=4, markov=True)


def test_independent_draws_converge(independent):
    x, posterior = independent
    found = check_convergence(Toy(), posterior, x)
    assert found.verdict == "converged"
    assert found.rhat.shape == found.ess.shape == (30,)
    assert set(found.rhat_scalars) == {"lp", "sigma"}
    assert set(found.ess_scalars) == {"lp", "sigma"}
    assert min(found.ess_scalars.values()) > 800
    assert str(found).startswith("converged: 4 chains of 400 draws; ")
    assert "worst input" in str(found)


def test_r_hat_and_ess_are_arvizs_of_the_function(independent):
    x, posterior = independent
    found = check_convergence(Toy(), posterior, x[:3])
    d = posterior.draws
    hidden = torch.tanh(x[:3] @ d["fc1.weight"].mT + d["fc1.bias"][:, :, None])
    f = ((hidden @ d["fc2.weight"].mT).squeeze(-1) + d["fc2.bias"]).double().numpy()
    rhat = [float(az.rhat(f[:, :, i])) for i in range(3)]
    ess = [float(az.ess(f[:, :, i], method="bulk")) for i in range(3)]
    np.testing.assert_allclose(found.rhat, rhat, rtol=1e-5)
    np.testing.assert_allclose(found.ess, ess, rtol=1e-4)


def test_permuted_units_are_the_same_function(independent):  # fault 31
    x, posterior = independent
    order = torch.tensor([3, 0, 4, 1, 2])
    offsets = 3.0 * torch.arange(5.0)  # units that can be told apart
    first = {name: value[:1] for name, value in posterior.draws.items()}
    first["fc1.bias"] = first["fc1.bias"] + offsets
    second = {
        "fc1.weight": first["fc1.weight"][:, :, order],
        "fc1.bias": first["fc1.bias"][:, :, order],
        "fc2.weight": first["fc2.weight"][..., order],
        "fc2.bias": first["fc2.bias"],
        "sigma": first["sigma"],
    }
    both = replace(
        posterior,
        draws={name: torch.cat([first[name], second[name]]) for name in first},
        stats={"lp": posterior.stats["lp"][:1].expand(2, -1)},
    )
    found = check_convergence(Toy(), both, x)
    assert float(found.rhat.max()) < 1.01
    assert found.rhat_scalars["lp"] < 1.01
    assert float(az.rhat(both.draws["fc1.bias"][..., 0].double().numpy())) > 1.5


@pytest.mark.parametrize("draws", [20, 3, 1])
def test_a_few_draws_have_not_converged(independent, draws):  # fault 32
    x, posterior = independent
    found = check_convergence(Toy(), posterior.select(draws=slice(draws)), x)
    assert found.verdict != "converged"
    assert str(found).startswith("not converged")


def test_one_chain_has_not_converged(independent):
    x, posterior = independent
    found = check_convergence(Toy(), posterior.select(chains=[0]), x)
    assert found.verdict == "not converged"
    assert bool(np.isnan(found.rhat).all())


def test_chains_apart_have_not_converged(independent):
    x, posterior = independent
    bias = posterior.draws["fc2.bias"] + torch.arange(4.0)[:, None, None]
    found = check_convergence(
        Toy(), replace(posterior, draws={**posterior.draws, "fc2.bias": bias}), x
    )
    assert found.verdict == "not converged"
    sigma = posterior.draws["sigma"] * (1 + torch.arange(4.0))[:, None]
    scalar = check_convergence(
        Toy(), replace(posterior, draws={**posterior.draws, "sigma": sigma}), x
    )
    assert float(scalar.rhat.max()) < 1.05  # f alone would pass
    assert scalar.verdict == "not converged"


def test_constant_and_not_finite_functions_have_not_converged(independent):
    x, posterior = independent
    zero = {name: torch.zeros_like(value) for name, value in posterior.draws.items()}
    zero["sigma"] = posterior.draws["sigma"]
    found = check_convergence(Toy(), replace(posterior, draws=zero), x)
    assert found.verdict == "not converged"
    assert "R-hat nan" in str(found)
    broken = {**posterior.draws, "fc2.bias": posterior.draws["fc2.bias"].clone()}
    broken["fc2.bias"][2, 7] = torch.nan
    found = check_convergence(Toy(), replace(posterior, draws=broken), x)
    assert found.verdict == "not converged"


def test_usable_is_not_converged(independent):
    """Slow chains: R-hat below 1.05, but too few effective draws."""
    x, posterior = independent
    mean = torch.tensor(1 / 3).sqrt()
    smooth = {}
    for name, value in posterior.draws.items():
        walk = value.clone()
        for t in range(1, value.shape[1]):  # a moving average: lag-1 correlation of one half
            walk[:, t] = mean * (value[:, t] + value[:, t - 1] + value[:, max(t - 2, 0)])
        smooth[name] = walk
    found = check_convergence(Toy(), replace(posterior, draws=smooth).select(draws=slice(200)), x)
    assert found.verdict == "usable"
    assert str(found).startswith("not converged, but usable: ")


def test_weights_are_marked_as_not_comparable(independent):  # fault 31
    x, posterior = independent
    found = check_convergence(Toy(), posterior, x[:2])
    assert found.not_comparable == ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    words = "not comparable between chains: fc1.weight, fc1.bias, fc2.weight, fc2.bias"
    assert words in str(found)
    assert found.bfmi.size == 0
    assert found.cautions == ()


def test_divergences_and_saturated_trees_are_counted(independent):
    x, posterior = independent
    flags = torch.zeros(4, 400, dtype=torch.bool)
    flags[0, :3] = True
    stats = {**posterior.stats, "diverging": flags, "reached_max_treedepth": ~flags}
    found = check_convergence(Toy(), replace(posterior, stats=stats), x[:2])
    assert (found.divergences, found.saturated) == (3, 1597)
    assert "; 3 divergences, 1597 saturated trees; " in str(found)
    assert str(found).endswith(
        "caution: 3 of 1600 draws diverged, 1597 of 1600 trees reached the maximum depth"
    )


def test_fraction_of_missing_information_is_arvizs(independent):
    """Energies that drift: the changes are small beside the spread."""
    x, posterior = independent
    steps = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    steps[0] = steps[0].cumsum(0)
    found = check_convergence(
        Toy(), replace(posterior, stats={**posterior.stats, "energy": steps}), x[:2]
    )
    by_arviz = az.bfmi(steps.double().numpy())
    np.testing.assert_allclose(found.bfmi, by_arviz, rtol=5e-3)  # it divides by n - 1 somewhere
    assert found.bfmi[0] < 0.3 < found.bfmi[1:].min()
    (caution,) = found.cautions
    assert caution.startswith("E-BFMI is 0.0")
    still = replace(posterior, stats={**posterior.stats, "energy": torch.zeros(4, 400)})
    assert "E-BFMI is nan" in str(check_convergence(Toy(), still, x[:2]))


def test_independent_draws_of_a_guide_have_no_r_hat(independent):
    x, posterior = independent
    with pytest.raises(ModelError, match="R-hat does not apply to them"):
        check_convergence(Toy(), replace(posterior, markov=False), x)


def outputs(build):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        f = x @ w + shift
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", build(f), obs=y)
        return f

    return model


@pytest.mark.parametrize(
    ("build", "verdict"),
    [
        (lambda f: dist.Categorical(logits=f), "converged"),
        (lambda f: dist.Normal(f, 1.0).to_event(1), "not converged"),
        (lambda f: dist.Bernoulli(logits=f).to_event(1), "not converged"),
    ],
)
def test_a_shift_of_all_outputs_matters_unless_they_are_logits_of_a_softmax(build, verdict):
    shift = torch.randn(4, 400, 1) + 5.0 * torch.arange(4.0)[:, None, None]
    posterior = Posterior(
        draws={"w": torch.randn(4, 400, 2, 2), "shift": shift},
        stats={"lp": torch.randn(4, 400)},
        method="nuts",
        markov=True,
        seconds=0.0,
    )
    found = check_convergence(outputs(build), posterior, torch.randn(10, 2))
    assert found.verdict == verdict


def test_probe_rows_are_evenly_spaced():
    assert probe_rows(torch.arange(7)).tolist() == list(range(7))
    assert probe_rows(torch.arange(1001)).tolist()[::99] == [0, 1000]
    found = probe_rows({"a": torch.arange(500), "b": torch.zeros(500, 3)}, 6)
    assert found["a"].tolist() == [0, 100, 200, 299, 399, 499]
    assert found["b"].shape == (6, 3)
