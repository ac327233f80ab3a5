"""A posterior as the next prior: the same Gaussian, whatever its blocks."""

import re
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import MultivariateNormal

from pbnn.errors import ModelError
from pbnn.front_door import bind
from pbnn.infer.guides import approximation, draw_guide, make_guide
from pbnn.model import isolated
from pbnn.priors import from_posterior, normal, place_priors

DRAWS = 400


class Model(PyroModule):
    """A linear model with one or more outputs, and a noise scale where `noise` is None."""

    def __init__(self, in_features=3, outputs=1, noise=0.5):
        super().__init__()
        self.fc = nn.Linear(in_features, outputs)
        place_priors(self, {"*": normal()})
        self.noise = PyroSample(dist.HalfNormal(1.0)) if noise is None else noise

    def forward(self, x, y=None):
        f = self.fc(x).squeeze(-1)
        noise = self.noise
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, noise).to_event(f.ndim - 1), obs=y)
        return f


def gaussian(blocks, shapes, **tensors):
    """Return a posterior that is a Gaussian, in the form in which fits record it."""
    described = [{"sites": sites, "rows": rows, "prefix": ""} for sites, rows in blocks]
    sites = [[name, list(shape)] for name, shape in shapes.items()]
    known = {"family": "any", "sites": sites, "blocks": described, "tensors": tensors}
    return SimpleNamespace(draws={}, approximation=known)


def log_prior(model, values):
    """Return the log prior density at float64 values, without the data's."""
    y = torch.zeros(len(X), 2) if model.fc.out_features == 2 else torch.zeros(len(X))
    nodes = bind(model, X, y, dtype=torch.float64).run(values).nodes
    return sum(nodes[name]["fn"].log_prob(value).sum() for name, value in values.items())


def root(size, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size, size, generator=generator).double()
    return torch.linalg.cholesky(a @ a.mT + torch.eye(size).double())


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
SHAPES = {"fc.weight": (2, 3), "fc.bias": (2,)}


def test_independent_normals_stay_so_and_a_constrained_site_keeps_its_support():
    shapes = {"fc.weight": (1, 3), "fc.bias": (1,), "noise": ()}
    loc, scale = torch.randn(5).double(), torch.rand(5).double() + 0.1
    posterior = gaussian([(list(shapes), [])], shapes, loc=loc, scale=scale)
    model = Model(noise=None).double()
    place_priors(model, from_posterior(posterior))
    values = {
        "fc.weight": torch.randn(1, 3).double(),
        "fc.bias": torch.randn(1).double(),
        "noise": torch.tensor(0.7).double(),
    }
    z = torch.cat([values["fc.weight"][0], values["fc.bias"], values["noise"].log()[None]])
    expected = dist.Normal(loc, scale).log_prob(z).sum() - values["noise"].log()
    assert log_prior(model, values).item() == pytest.approx(expected.item())
    sites = {site.name: site for site in bind(model, X, X[:, 0]).sites}
    assert sites["noise"].support == "positive"
    assert sites["fc.weight"].prior == "Normal"
    again = place_priors(model, from_posterior(posterior))._pyro_samples["noise"]
    assert again.support == dist.HalfNormal(1.0).support


def test_diagonal_plus_low_rank_is_normals_given_a_shared_factor():
    loc, scale, factor = torch.randn(8), torch.rand(8) + 0.1, torch.randn(8, 2)
    names = list(SHAPES)
    posterior = gaussian([(names, [])], SHAPES, loc=loc, scale=scale, factor=factor)
    model = place_priors(Model(outputs=2), from_posterior(posterior))
    site = "posterior_factor_0"

    def means(u):
        with poutine.condition(data={site: u}):
            nodes = poutine.trace(model).get_trace(X.float()).nodes
        fns = [nodes[name]["fn"].base_dist for name in names]
        assert isinstance(fns[0], dist.Normal)
        assert nodes[site]["fn"].base_dist.stddev.unique().tolist() == [1.0]
        flat = [torch.cat([f.flatten() for f in part]) for part in
                ([fn.loc for fn in fns], [fn.scale for fn in fns])]  # fmt: skip
        return flat

    (first, spread), units = means(torch.zeros(2)), [means(e)[0] for e in torch.eye(2)]
    loadings = torch.stack(units, 1) - first[:, None]
    found = spread.square().diag() + loadings @ loadings.mT
    s = scale.diag()
    assert torch.allclose(found, s @ (torch.eye(8) + factor @ factor.mT) @ s, atol=1e-6)
    assert torch.allclose(first, loc, atol=1e-6)


def test_the_shared_factor_is_the_copys_own_in_a_fit():
    posterior = gaussian(
        [(["fc.weight", "fc.bias"], [])],
        {"fc.weight": (1, 3), "fc.bias": (1,)},
        loc=torch.zeros(4),
        scale=torch.ones(4),
        factor=torch.ones(4, 1),
    )
    model = place_priors(Model(), from_posterior(posterior))
    bound = bind(model, X, X[:, 0], dtype=torch.float64)
    values = {"posterior_factor_0": torch.full((1,), 3.0).double()}
    node = bound.run(values).nodes["fc.bias"]
    assert node["fn"].base_dist.loc.tolist() == [3.0]
    assert node["value"].dtype == torch.float64


@pytest.mark.parametrize("bias", ["homogeneous", "apart"])
def test_a_matrix_normal_is_one_over_the_weight_and_the_bias_given_it(bias):
    columns = 4 if bias == "homogeneous" else 3
    a, b, scale = root(2, 1), root(columns, 2), torch.tensor(0.3).double()
    loc = torch.randn(2, columns).double()
    tensors = {"loc": loc, "scale": scale, "row.tril": a, "column.tril": b}
    names = list(SHAPES) if bias == "homogeneous" else ["fc.weight"]
    shapes = {name: SHAPES[name] for name in names}
    model = Model(outputs=2).double()
    place_priors(model, from_posterior(gaussian([(names, [2])], shapes, **tensors)))
    weight = torch.randn(2, 3).double()
    values = {"fc.weight": weight}
    value = weight
    if bias == "homogeneous":
        values["fc.bias"] = torch.randn(2).double()
        value = torch.cat([weight, values["fc.bias"][:, None]], 1)
    dense = scale**2 * torch.kron(a @ a.mT, b @ b.mT)
    expected = MultivariateNormal(loc.flatten(), dense).log_prob(value.flatten())
    assert log_prior(model, values).item() == pytest.approx(expected.item())


def test_a_convolutions_matrix_normal_keeps_its_shape():
    conv = nn.Conv2d(2, 3, (1, 2), bias=False)
    a, b = root(3, 1).float(), root(4, 2).float()
    loc = torch.randn(3, 4)
    posterior = gaussian(
        [(["weight"], [3])],
        {"weight": (3, 2, 1, 2)},
        **{"loc": loc, "scale": torch.tensor(1.0), "row.tril": a, "column.tril": b},
    )
    prior = place_priors(conv, from_posterior(posterior))._pyro_samples["weight"]
    value = prior.sample()
    assert value.shape == (3, 2, 1, 2)
    dense = MultivariateNormal(loc.flatten(), torch.kron(a @ a.mT, b @ b.mT))
    assert prior.log_prob(value).item() == pytest.approx(
        dense.log_prob(value.flatten()).item(), rel=1e-4
    )


def test_wide_factors_of_low_rank_are_the_same_covariance():
    """A row root in the form diagonal plus low rank, and one of a single output."""
    scale, factor = torch.rand(3).double() + 0.5, torch.randn(3, 1).double()
    tensors = {
        "loc": torch.zeros(1, 3).double(),
        "scale": torch.tensor(1.0).double(),
        "row.scale": torch.tensor([2.0]).double(),
        "column.scale": scale,
        "column.factor": factor,
    }
    posterior = gaussian([(["fc.weight"], [1])], {"fc.weight": (1, 3)}, **tensors)
    model = place_priors(Model().double(), from_posterior(posterior))
    spread = scale[:, None] * factor
    dense = 4 * (scale.square().diag() + spread @ spread.mT)
    w = torch.randn(1, 3).double()
    expected = MultivariateNormal(torch.zeros(3).double(), dense).log_prob(w[0])
    assert log_prior(model, {"fc.weight": w}).item() == pytest.approx(expected.item())
    marginal = place_priors(Model().double(), from_posterior(posterior, independent=True))
    found = marginal.fc._pyro_samples["weight"].base_dist.scale
    assert torch.allclose(found[0], dense.diagonal().sqrt())


def test_two_halves_of_the_data_one_after_the_other_are_all_of_them():
    """Conjugate regression: the exact posterior of the first half is the prior of the second."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double()
    y = x[:, 0] - x[:, 1] + 0.3
    ones = torch.cat([x, torch.ones(40, 1).double()], 1)
    prior = torch.diag(torch.tensor([3.0, 3.0, 3.0, 1.0])).double()  # 1 / scale²

    def exact(rows):
        precision = prior + ones[rows].mT @ ones[rows] / 0.25
        return torch.linalg.solve(precision, ones[rows].mT @ y[rows] / 0.25), precision

    mean, precision = exact(slice(0, 20))
    tensors = {
        "loc": mean[None],
        "scale": torch.tensor(1.0).double(),
        "row.scale": torch.ones(1).double(),
        "column.tril": torch.linalg.cholesky(torch.linalg.inv(precision)),
    }
    names = {"fc.weight": (1, 3), "fc.bias": (1,)}
    posterior = gaussian([(list(names), [1])], names, **tensors)
    model = place_priors(Model().double(), from_posterior(posterior))
    bound = bind(model, x[20:], y[20:])
    mean, precision = exact(slice(0, 40))
    whole = MultivariateNormal(mean, precision_matrix=precision)
    differences = []
    for w in torch.randn(2, 4, generator=torch.Generator().manual_seed(2)).double():
        joint = bound.run({"fc.weight": w[None, :3], "fc.bias": w[3:]}).log_prob_sum()
        differences.append(float(joint - whole.log_prob(w)))
    assert differences[0] == pytest.approx(differences[1], rel=1e-6)


def test_draws_without_a_gaussian_give_their_moments():
    draws = {
        "fc.weight": torch.randn(2, DRAWS, 1, 3) * 0.2 + 1.0,
        "fc.bias": torch.randn(2, DRAWS, 1),
        "noise": torch.randn(2, DRAWS).mul(0.3).exp(),
    }
    posterior = SimpleNamespace(draws=draws, approximation=None)
    model = place_priors(Model(noise=None), from_posterior(posterior))
    w = model.fc._pyro_samples["weight"].base_dist
    flat = draws["fc.weight"].flatten(0, 1)
    assert torch.allclose(w.loc, flat.mean(0), atol=1e-6)
    assert torch.allclose(w.scale, flat.std(0), atol=1e-6)
    z = draws["noise"].log()
    noise = model._pyro_samples["noise"].base_dist
    assert noise.scale.item() == pytest.approx(z.std().item(), rel=1e-4)
    plane = {"family": "subspace", "tensors": {"origin": torch.zeros(5), "basis": torch.eye(5)}}
    subspace = SimpleNamespace(draws=draws, approximation=plane)  # no Gaussian of the sites either
    again = place_priors(Model(noise=None), from_posterior(subspace))
    assert torch.equal(again.fc._pyro_samples["weight"].base_dist.loc, w.loc)


def test_a_second_posterior_leaves_the_first_ones_factor_out():
    names = {"posterior_factor_0": (1,), "fc.weight": (1, 3), "fc.bias": (1,)}
    tensors = {"loc": torch.randn(5), "scale": torch.ones(5), "factor": torch.randn(5, 1)}
    rules = from_posterior(gaussian([(list(names), [])], names, **tensors))
    assert list(rules) == ["fc.weight", "fc.bias"]
    model = place_priors(Model(), rules)
    assert torch.equal(model.fc.weight_prior_mean.flatten(), tensors["loc"][1:4])


def test_what_cannot_be_a_prior_is_told():
    names = {"fc.weight": (1, 3), "fc.bias": (1,)}
    dense = gaussian([(list(names), [])], names, loc=torch.zeros(4), tril=torch.eye(4))
    with pytest.raises(ModelError, match=re.escape("pass independent=True")):
        from_posterior(dense)
    place_priors(Model(), from_posterior(dense, independent=True))
    other = gaussian(
        [(["fc.bias"], [])], {"fc.bias": (2,)}, loc=torch.zeros(2), scale=torch.ones(2)
    )
    with pytest.raises(ModelError, match=re.escape("site 'fc.bias' has 2 values in the posterior")):
        place_priors(Model(), from_posterior(other))
    point = SimpleNamespace(draws={"fc.bias": torch.zeros(1, 3, 1)}, approximation=None)
    with pytest.raises(ModelError, match=re.escape("site 'fc.bias' has no spread")):
        place_priors(Model(), from_posterior(point))


@pytest.mark.parametrize("family", ["normal", "kronecker"])
def test_what_a_guide_records_becomes_a_prior_of_its_own_density(family):
    """The form is that of `approximation`; the low-rank one takes an integral, done above."""
    model = Model(noise=None)
    bound = bind(model, X, X[:, 0], dtype=torch.float64)
    with isolated(0):
        guide = make_guide(family, bound.model)
        values, log_q = draw_guide(guide, 3, (bound.x, bound.y))
        posterior = SimpleNamespace(draws={}, approximation=approximation(guide))
    place_priors(model, from_posterior(posterior))
    for i in range(3):
        row = {name: value[i] for name, value in values.items()}
        density = log_prior(model, row) + row["noise"].log()
        assert density.item() == pytest.approx(log_q[i].item())
