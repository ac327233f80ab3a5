"""Subspace inference: densities in closed form on a linear model, the plane, what it refuses."""

import dataclasses

import arviz as az
import numpy as np
import pytest
import torch
from model_cases import Linear, Toy, linear_data, prior_posterior, set_priors
from pyro.nn import PyroModule
from torch import nn

import pbnn
from pbnn.errors import FitError, ModelError
from pbnn.infer.subspace import sweep_subspace

NOISE, PRIOR = 0.5, 2.0
SHORT = {"draws": 15, "inner": {"chains": 2, "warmup": 10, "max_tree_depth": 4}}
OPTIONS = {"compile": False, "progress": False}
ORIGIN = torch.tensor([0.5, -0.5, 1.0, 0.0]).double()

pytestmark = pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")


@pytest.fixture(scope="module")
def problem():
    x, y = linear_data(30, 4, NOISE, correlation=0.5)
    return Linear(4, NOISE, PRIOR), x.double(), y.double()


def fit_plane(problem, **options):
    given = {"start": {"w": ORIGIN}, "basis": "random", "rank": 2, "seed": 1}
    return pbnn.fit_subspace(*problem, **given, **OPTIONS, **options)


def z_and_plane(posterior):
    tensors = posterior.approximation["tensors"]
    return posterior.deterministic["subspace"], tensors["basis"], tensors["origin"]


def gaussian(precision, mean, z):
    return -0.5 * ((z - mean) @ precision * (z - mean)).sum(-1)


def slice_of(model, x, y, basis):
    """Return precision and mean of z on the slice through the model's posterior."""
    mean, covariance = model.exact(x, y)
    inner = torch.linalg.inv(covariance)
    precision = basis.T @ inner @ basis
    return precision, torch.linalg.solve(precision, basis.T @ inner @ (mean - ORIGIN))


def test_nuts_on_the_slice_of_a_linear_model_has_its_moments(problem):
    posterior = fit_plane(problem, draws=150, inner={"chains": 2, "warmup": 70})
    z, basis, _ = z_and_plane(posterior)
    precision, mean = slice_of(*problem, basis)
    covariance = torch.linalg.inv(precision)
    assert posterior.markov
    # Four Monte Carlo errors, with the effective sample sizes that ArviZ measures.
    values = (z - mean).numpy()
    for i in range(2):
        error = np.sqrt(float(covariance[i, i]) / az.ess(values[..., i]))
        assert abs(values[..., i].mean()) < 4 * error
        for j in range(i + 1):
            product = values[..., i] * values[..., j]
            error = product.std() / np.sqrt(az.ess(product))
            assert abs(product.mean() - float(covariance[i, j])) < 4 * error


def test_densities_are_those_of_the_formulas(problem):
    model, x, y = problem
    options = {"density": "z_prior", "temperature": 5.0, "prior_scale": 0.3}
    for posterior in (fit_plane(problem, **SHORT), fit_plane(problem, **SHORT, **options)):
        z, basis, _ = z_and_plane(posterior)
        precision, mean = slice_of(model, x, y, basis)
        if posterior.provenance["options"]["density"] == "z_prior":
            design = x @ basis
            likelihood = design.T @ design / (5.0 * NOISE**2)
            right = design.T @ (y - x @ ORIGIN) / (5.0 * NOISE**2)
            precision = likelihood + torch.eye(2) / 0.3**2
            mean = torch.linalg.solve(precision, right)
            assert posterior.provenance["options"]["temperature"] == 5.0
        rest = posterior.stats["lp"] - gaussian(precision, mean, z)
        torch.testing.assert_close(rest, rest[:1, :1].expand_as(rest))


def test_draws_lie_in_the_plane_and_predict(problem):
    posterior, again = (fit_plane(problem, **SHORT) for _ in range(2))
    assert torch.equal(posterior.draws["w"], again.draws["w"])
    z, basis, origin = z_and_plane(posterior)
    torch.testing.assert_close(posterior.draws["w"], origin + z @ basis.T)
    assert torch.equal(origin, ORIGIN)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2).double())
    f = pbnn.predictive(problem[0], posterior, problem[1])["f"]
    torch.testing.assert_close(f, posterior.draws["w"] @ problem[1].T)


def test_a_guide_serves_the_plane_as_well(problem):
    posterior = fit_plane(problem, guide="normal", inner={"steps": 20}, draws=10)
    z, basis, _ = z_and_plane(posterior)
    assert not posterior.markov
    assert posterior.method == "subspace svi"
    assert posterior.stats["log_q_subspace"].shape == (1, 10)
    with pytest.raises(ModelError, match="none of a guide"):
        pbnn.svi_report(posterior, *problem)
    rest = posterior.stats["lp"] - gaussian(*slice_of(*problem, basis), z)
    torch.testing.assert_close(rest, rest[:, :1].expand_as(rest))


def test_principal_axes_are_those_of_the_snapshots(problem):
    snapshots = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).double()
    # As `fit_swag` would return them.
    path = dataclasses.replace(prior_posterior(*problem), history={"snapshots": snapshots})
    found = sweep_subspace(*problem, start=path, ranks=(1, 3), seed=1, **SHORT, **OPTIONS)
    _, basis, origin = z_and_plane(found[3])
    torch.testing.assert_close(origin, snapshots.mean(0))
    # Four snapshots span three dimensions: P Pᵀ is then their whole covariance.
    torch.testing.assert_close(basis @ basis.T, snapshots.T.cov())
    torch.testing.assert_close(z_and_plane(found[1])[1], basis[:, :1])
    with pytest.raises(FitError, match="rank=4 with 4 snapshots"):
        pbnn.fit_subspace(*problem, start=path, rank=4, **SHORT, **OPTIONS)


class Normed(Toy):
    """With BatchNorm, and a constant."""

    def __init__(self):
        super().__init__(hidden=4)
        self.norm = PyroModule[nn.BatchNorm1d](4)
        set_priors(self.norm)
        self.shift = nn.Parameter(torch.zeros(()))

    def network(self, x):
        return self.fc2(torch.tanh(self.norm(self.fc1(x)))).squeeze(-1) + self.shift


def test_plane_from_snapshots_of_a_network_with_constants_and_buffers(toy, unchanged):
    model = Normed()
    with unchanged(model):
        first = pbnn.fit_subspace(
            model, *toy, rank=2, snapshots=4, steps=15, seed=3, **SHORT, **OPTIONS
        )
    assert first.draws["sigma"].shape == (2, 15)
    assert bool((first.draws["sigma"] > 0).all())
    assert first.per_draw == ("shift",)
    assert first.constants["shift"].shape == (2, 15)
    assert first.buffers["norm.running_mean"].shape == (4,)
    # At temperature 1 the density of z is the model's own: likelihood, priors and Jacobian.
    likelihood = pbnn.log_likelihood(model, first, *toy).sum(-1)
    log_normal = torch.distributions.Normal(0.0, 1.0).log_prob
    weights = [v for k, v in first.draws.items() if k != "sigma"]
    prior = sum(log_normal(v).flatten(2).sum(-1) for v in weights)
    sigma = first.draws["sigma"]
    prior = prior + torch.distributions.HalfNormal(1.0).log_prob(sigma) + sigma.log()
    torch.testing.assert_close(first.stats["lp"], likelihood + prior, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": "prior"}, "density='prior'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"prior_scale": 2.0}, "prior_scale"),
        ({"basis": "pcs"}, "basis='pcs'"),
        ({"basis": torch.eye(3)}, "basis has 3 values"),
        ({"basis": torch.eye(4)}, r"basis has shape \(4, 4\)"),
        ({"rank": 5}, "rank=5"),
        ({"start": {"v": ORIGIN}}, "'w'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_options_out_of_range_are_named(problem, options, said):
    given = {"start": {"w": ORIGIN}, "basis": "random", "rank": 2, **options}
    with pytest.raises(FitError, match=said):
        pbnn.fit_subspace(*problem, **given, **SHORT, **OPTIONS)
