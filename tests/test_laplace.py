"""Laplace by laplace-torch: exact where it must be, what is held, what is refused, and its absence.

All but the last test need the extra `laplace`.
"""

import importlib.util
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pbnn
from pbnn.errors import FitError

OPTIONS = {"compile": False, "progress": False}
PRIOR, NOISE = 2.0, 0.5

needs_laplace = pytest.mark.skipif(
    importlib.util.find_spec("laplace") is None, reason="laplace-torch is not installed"
)


class Layer(PyroModule):
    """One linear layer, and y by an observation model that a test chooses."""

    def __init__(self, outputs=1, observe=None, prior=None):
        super().__init__()
        self.fc = PyroModule[nn.Linear](3, outputs, bias=False)
        prior = prior or dist.Normal(0.0, PRIOR)
        self.fc.weight = PyroSample(prior.expand([outputs, 3]).to_event(2))
        self.observe = observe or (lambda f: dist.Normal(f, NOISE))

    def forward(self, x, y=None):
        f = self.fc(x)
        f = f.squeeze(-1) if f.shape[-1] == 1 else f
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", self.observe(f), obs=y)
        return f


@pytest.fixture(scope="module")
def data():
    x, y = linear_data(40, 3, NOISE, correlation=0.6)
    return x.double(), y.double()


@needs_laplace
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("layers", ["all", "last"])
def test_linear_model_has_its_exact_posterior(data, structure, layers):
    mean, covariance = Linear(3, NOISE, PRIOR).exact(*data)
    posterior = pbnn.fit_laplace(
        Layer(), *data, start={"fc.weight": mean[None]}, structure=structure, layers=layers,
        draws=50, batch_size=16, dtype=torch.float64, **OPTIONS,
    )  # fmt: skip
    w = posterior.draws["fc.weight"][0, :, 0]
    if structure == "diag":  # the precision's diagonal: not the covariance's
        covariance = torch.linalg.inv(torch.linalg.inv(covariance).diag().diag())
    exact = torch.distributions.MultivariateNormal(mean, covariance)
    torch.testing.assert_close(posterior.stats["log_q"][0], exact.log_prob(w))
    if structure != "diag":  # log joint and exact posterior differ by the evidence alone
        rest = posterior.stats["lp"] - posterior.stats["log_q"]
        torch.testing.assert_close(rest, rest[:, :1].expand_as(rest))
    white = torch.linalg.solve_triangular(exact.scale_tril, (w - mean).T, upper=False)
    # The squares of 150 standard Normal values: 4 standard errors.
    assert abs(float(white.square().mean()) - 1) < 4 * (2 / 150) ** 0.5


@needs_laplace
def test_classes_have_the_curvature_of_the_softmax(data):
    x, _ = data
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    model = Layer(3, lambda f: dist.Categorical(logits=f))
    at = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()
    posterior = pbnn.fit_laplace(
        model, x, y, start={"fc.weight": at}, structure="full", draws=20, dtype=torch.float64,
        **OPTIONS,
    )  # fmt: skip
    p = (x @ at.T).softmax(-1)
    curvature = p.diag_embed() - p[:, :, None] * p[:, None]
    precision = torch.einsum("nij,na,nb->iajb", curvature, x, x).reshape(9, 9)
    precision = precision + torch.eye(9) / PRIOR**2
    exact = torch.distributions.MultivariateNormal(at.flatten(), precision_matrix=precision)
    drawn = posterior.draws["fc.weight"][0].flatten(1)
    torch.testing.assert_close(posterior.stats["log_q"][0], exact.log_prob(drawn))


@needs_laplace
def test_outputs_with_scales_of_their_own_are_weighed_by_them(data):
    x, y = data
    scales = torch.tensor([0.2, 1.5]).double()
    model = Layer(2, lambda f: dist.Normal(f, scales).to_event(1))
    posterior = pbnn.fit_laplace(
        model, x, torch.stack([y, -y], 1), start={"fc.weight": torch.zeros(2, 3).double()},
        structure="full", draws=20, dtype=torch.float64, **OPTIONS,
    )  # fmt: skip
    log_q = torch.zeros(20).double()
    for k in range(2):
        precision = x.T @ x / scales[k] ** 2 + torch.eye(3) / PRIOR**2
        exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), None, precision)
        log_q += exact.log_prob(posterior.draws["fc.weight"][0, :, k])
    torch.testing.assert_close(posterior.stats["log_q"][0], log_q)


@needs_laplace
@pytest.mark.parametrize(
    ("layers", "held"), [("all", {"sigma"}), ("last", {"fc1.weight", "fc1.bias", "sigma"})]
)
def test_what_the_approximation_leaves_out_is_held_at_the_map(toy, unchanged, layers, held):
    model = Toy()
    with unchanged(model):
        first, again = (
            pbnn.fit_laplace(model, *toy, steps=50, layers=layers, draws=30, seed=4, **OPTIONS)
            for _ in range(2)
        )
    assert set(first.provenance["held"]) == held
    assert "log_q" not in first.stats
    for name, value in first.draws.items():
        assert torch.equal(value, again.draws[name])
        assert bool((value == value[:, :1]).all()) == (name in held)
    assert pbnn.predict(model, first, toy[0]).mean.isfinite().all()


@needs_laplace
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Layer(prior=dist.Laplace(0.0, 1.0)), "Laplace prior.*use fit_svi"),
        (Layer(prior=dist.Normal(0.0, torch.tensor([1.0, 2.0, 3.0]))), "structure='diag'"),
        (Layer(observe=lambda f: dist.StudentT(4.0, f, NOISE)), "'y' is StudentT"),
        (Layer(observe=lambda f: dist.Normal(f, f.exp())), "'y' is Normal with other"),
        (Layer(observe=lambda f: dist.Normal(2 * f, 1.0)), "'y' is Normal with other"),
        (Linear(3), "'w' .*PyroSample|another structure"),
    ],
    ids=["prior", "scales", "likelihood", "heteroscedastic", "location", "no layer"],
)
def test_what_cannot_be_approximated_is_refused(data, model, said):
    x, y = (v.float() for v in data)
    with pytest.raises(FitError, match=said):
        pbnn.fit_laplace(model, x, y, steps=2, draws=2, **OPTIONS)


def test_without_the_library_the_extra_is_named(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(FitError, match=r"pip install 'pbnn\[laplace\]'"):
        pbnn.fit_laplace(Layer(), *data, **OPTIONS)
    with pytest.raises(FitError, match="structure='dense'"):
        pbnn.fit_laplace(Layer(), *data, structure="dense", **OPTIONS)
