"""Ensembles: members alone and together, exactness on a linear model, chains that stay chains."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from pyro.nn import PyroModule, PyroParam, PyroSample
from test_map import Normed
from torch.distributions import constraints

import pbnn
from pbnn.errors import FitError
from pbnn.infer import ensemble

QUIET = {"progress": False}
MEMBERS = 300


def test_ensemble_of_one_is_its_member_and_others_leave_it_alone(toy, unchanged):
    options = {"steps": 30, "seed": 5, "batch_size": 7, **QUIET}
    model = Toy()
    with unchanged(model):
        one, three = (pbnn.fit_ensemble(model, *toy, members=m, **options) for m in (1, 3))
    alone = pbnn.fit_map(model, *toy, **options)
    for name, value in alone.draws.items():
        assert torch.equal(value, one.draws[name])
        # Products over several lanes are summed in another order.
        torch.testing.assert_close(three.draws[name][:, :1], value, rtol=1e-4, atol=1e-5)
    assert (three.chains, three.draws_per_chain, three.markov) == (1, 3, False)
    assert three.method == "ensemble"
    assert three.history["log_joint"].shape == (30, 3)
    weights = three.draws["fc1.weight"][0]
    assert not torch.allclose(weights[0], weights[1])


def test_many_members_are_trained_in_groups_with_the_same_result(monkeypatch):
    x, y = linear_data(20, 2)
    options = {"members": 3, "steps": 10, "batch_size": 7, "perturb": "randomised", **QUIET}
    together = pbnn.fit_ensemble(Linear(2), x, y, **options)
    monkeypatch.setattr(ensemble, "_LANE_VALUES", 1)
    apart = pbnn.fit_ensemble(Linear(2), x, y, **options)
    assert (together.provenance["members_at_once"], apart.provenance["members_at_once"]) == (3, 1)
    torch.testing.assert_close(apart.draws["w"], together.draws["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("perturb", ["randomised", "anchored"])
def test_members_of_a_linear_model_have_the_exact_moments(perturb):
    x, y = linear_data(20, 3)
    model = Linear(3, prior=0.7)
    posterior = pbnn.fit_ensemble(
        model, x, y, members=MEMBERS, perturb=perturb, steps=300, lr=0.1, dtype=torch.float64,
        **QUIET,
    )  # fmt: skip
    mean, covariance = model.exact(x, y)
    if perturb == "anchored":  # only the prior's noise is passed on
        covariance = covariance @ covariance / 0.7**2
    w = posterior.draws["w"][0]
    # In whitened coordinates the mean has error 1/sqrt(M), entries of the covariance sqrt(2/M) on
    # the diagonal and 1/sqrt(M) beside it.
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (w - mean).T, upper=False
    ).T
    assert white.mean(0).abs().max() < 4 / math.sqrt(MEMBERS)
    off = torch.cov(white.T) - torch.eye(3)
    assert off.abs().max() < 4 * math.sqrt(2 / MEMBERS)
    sites = ["w", "y"] if perturb == "randomised" else ["w"]
    assert posterior.provenance["perturbed"] == sites


def test_constants_and_batch_statistics_are_those_of_each_member():
    x = torch.randn(30, 2)
    posterior = pbnn.fit_ensemble(Normed(), x, x[:, 0], members=2, steps=5, **QUIET)
    assert {"norm2.weight", "norm2.running_mean"} <= set(posterior.per_draw)
    assert posterior.constants["norm2.weight"].shape == (1, 2, 4)


class Constants(Linear):
    """Noise scale and shift are constants, the one of them constrained."""

    def __init__(self):
        super().__init__(2)
        self.noise = PyroParam(torch.tensor(0.7), constraint=constraints.positive)
        self.shift = torch.nn.Parameter(torch.tensor(0.0))

    def forward(self, x, y=None):
        f = x @ self.w + self.shift
        noise = self.noise
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, noise), obs=y)
        return f


def test_each_member_predicts_with_its_own_constants():
    x, y = linear_data(20, 2)
    options = {"members": 2, "steps": 7, "lr": 0.1, "batch_size": 5, "perturb": "randomised"}
    posterior = pbnn.fit_ensemble(Constants(), x, y, **options, **QUIET)
    assert set(posterior.per_draw) == {"noise_unconstrained", "shift"}
    found = pbnn.log_likelihood(Constants(), posterior, x, y)
    for member in range(2):
        c = {name: value[0, member] for name, value in posterior.constants.items()}
        w = posterior.draws["w"][0, member]
        noise = dist.Normal(x @ w + c["shift"], c["noise_unconstrained"].exp())
        expected = noise.log_prob(y)
        torch.testing.assert_close(found[0, member], expected)
        lp = expected.sum() + dist.Normal(0.0, 1.0).log_prob(w).sum()
        torch.testing.assert_close(posterior.stats["lp"][0, member], lp)


class Trunk(PyroModule):
    """A layer of constants under one with a prior."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = torch.nn.Linear(2, 3), Linear(3)

    def forward(self, x, y=None):
        return self.head(torch.tanh(self.trunk(x)), y)


def test_members_draw_their_constants_anew(toy):
    posterior = pbnn.fit_ensemble(Trunk(), *toy, members=2, steps=1, lr=1e-6, **QUIET)
    weights = posterior.constants["trunk.weight"][0]
    assert (weights[0] - weights[1]).abs().max() > 0.01


def test_svi_members_are_one_chain_of_the_draws_of_all(toy):
    options = {"steps": 5, "draws": 4, "seed": 2, **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # five steps do not converge, and say so
        both = pbnn.fit_ensemble(Toy(), *toy, members=2, member="svi", **options)
        alone = pbnn.fit_svi(Toy(), *toy, **options)
    assert (both.chains, both.draws_per_chain, both.markov) == (1, 8, False)
    assert set(both.stats) == {"lp"}
    for name, value in alone.draws.items():
        assert torch.equal(both.draws[name][:, :4], value)
        assert not torch.equal(both.draws[name][:, 4:], value)


def test_nuts_members_stay_chains_that_start_at_their_modes():
    x, y = linear_data(20, 2)
    options = {"steps": 200, "lr": 0.1, "warmup": 0, "draws": 2, "max_tree_depth": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pbnn.fit_ensemble(
            Linear(2), x, y, members=2, member="nuts", compile=False, **options, **QUIET
        )
    assert (posterior.chains, posterior.draws_per_chain, posterior.markov) == (2, 2, True)
    assert "diverging" in posterior.stats
    # Without warm-up, the first of two draws is one trajectory from the mode.
    mean, covariance = Linear(2).exact(x, y)
    away = (posterior.draws["w"][:, 0] - mean) / covariance.diagonal().sqrt()
    assert away.abs().max() < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members=0; expected a whole number of at least 1"),
        ({"member": "hmc"}, "member='hmc'; expected one of 'map', 'svi', 'nuts'"),
        ({"perturb": "bootstrap"}, "perturb='bootstrap'; expected one of"),
        ({"member": "svi", "perturb": "anchored"}, "perturb='anchored' is for MAP members"),
        ({"draws": 5}, "members of 'map' take no option 'draws'; they take average"),
        ({"member": "nuts", "guide": "normal"}, "members of 'nuts' take no option 'guide'"),
        ({"members": 2, "lr": 1e30, "steps": 3}, "not finite at step 1 in member 0 (site"),
    ],
)
def test_what_does_not_fit_is_refused(toy, options, message):
    with pytest.raises(FitError) as caught:
        pbnn.fit_ensemble(Toy(), *toy, **QUIET, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_perturbations_that_the_model_has_no_place_for_are_refused(toy):
    class Classes(PyroModule):
        def __init__(self):
            super().__init__()
            self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            self.s = PyroSample(dist.HalfNormal(1.0))

        def forward(self, x, y=None):
            f = x @ self.w * self.s
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
            return f

    x, y = toy
    y = (y > 0).float()
    with pytest.raises(FitError, match="needs Normal noise, and site 'y' has none"):
        pbnn.fit_ensemble(Classes(), x, y, perturb="randomised", **QUIET)
    with pytest.raises(FitError, match=r"'norm1\.weight' is learned with each member"):
        pbnn.fit_ensemble(Normed(), x, y, member="nuts", **QUIET)
