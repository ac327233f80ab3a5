"""The linearised variance of f(x), against dense Jacobians and against draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from guide_cases import (
    GAUSSIANS,
    Network,
    clean,  # noqa: F401
    data,
    flat_unconstrained,
    scrambled,
)
from model_cases import Linear, linear_data
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.nn import PyroModule, PyroSample

from pbnn.errors import ModelError
from pbnn.evaluate.linearised import linearised_variance
from pbnn.front_door import bind
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.guides import approximation, dense_moments, draw_guide, make_guide


def dense(bound, known):
    """Return gᵀΣg and Σ g_i² Σ_ii by row, one reverse pass for each row and output."""
    mean, covariance, names = dense_moments(known)
    shapes = {name: torch.Size(shape) for name, shape in known["sites"]}
    nodes = bound.run({}).nodes
    u = mean.clone().requires_grad_()
    parts = u.split([shapes[name].numel() for name in names])
    values = {
        name: dist.transforms.biject_to(nodes[name]["fn"].support)(part.reshape(shapes[name]))
        for name, part in zip(names, parts, strict=True)
    }
    f = bound.run(values).nodes["_RETURN"]["value"].reshape(bound.rows, -1)
    totals, diagonals = [], []
    for entry in f.flatten():
        (g,) = torch.autograd.grad(entry, u, retain_graph=True)
        totals.append(g @ covariance @ g)
        diagonals.append((g.square() * covariance.diagonal()).sum())
    return (torch.stack(values).reshape(f.shape) for values in (totals, diagonals))


@pytest.mark.filterwarnings("ignore:site 'share' does not act")
@pytest.mark.parametrize("kind", GAUSSIANS, ids=str)
def test_split_is_that_of_dense_jacobians(kind):
    rank = 2 if kind in ("lowrank", "layer_lowrank") else None
    known = approximation(scrambled(make_guide(kind, Network(), rank=rank), *data()))
    bound = bind(Network(), *data())
    found = linearised_variance(bound, GaussianCovariance(known))
    some = linearised_variance(bound, GaussianCovariance(known), torch.tensor([3, 0]))
    for value, part, expected in zip(found, some, dense(bound, known), strict=True):
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(part, expected[[3, 0]])


def test_it_is_exact_where_f_is_linear():
    """10,000 draws: the relative standard error of a variance is sqrt(2 / 10,000)."""
    x, y = linear_data(20, 3)
    guide = scrambled(make_guide(AutoMultivariateNormal, Linear(3)), x, y)
    total, diagonal = linearised_variance(
        bind(Linear(3), x, y), GaussianCovariance(approximation(guide))
    )
    draws = draw_guide(guide, 10_000, (x, y), seed=0)[0]
    spread = (flat_unconstrained(guide, draws, ["w"]) @ x.T).var(0).double()
    torch.testing.assert_close(total[:, 0], spread, rtol=4 * (2 / 10_000) ** 0.5, atol=0.0)
    assert not torch.allclose(total, diagonal, rtol=0.1)


class Loops(PyroModule):
    """A model that reads a value of its input in Python, so that rows cannot be mapped over."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))

    def forward(self, x, y=None):
        f = torch.stack([row @ self.w * (2.0 if float(row[0]) > 0 else 1.0) for row in x])
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f


def test_rows_that_cannot_be_mapped_go_one_by_one():
    known = approximation(scrambled(make_guide(AutoMultivariateNormal, Loops()), *data()))
    bound = bind(Loops(), *data())
    found = linearised_variance(bound, GaussianCovariance(known))
    for value, expected in zip(found, dense(bound, known), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_model_without_rows_is_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w.expand(x.shape[0]), 1.0).to_event(1), obs=y)

    x, y = linear_data(5, 1)
    known = approximation(scrambled(make_guide("normal", model), x, y))
    with pytest.raises(ModelError, match="no plate 'data'"):
        linearised_variance(bind(model, x, y), GaussianCovariance(known))
