"""The density on the unconstrained space: numbers, supports, lanes, starts."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pbnn.errors import FitError, ModelError
from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.model import isolated


def _rows(rows=12):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x[:, 0] - x[:, 1]


def supports(x, y=None):
    """Real, positive, unit interval, interval, simplex, ordered and correlation supports."""
    one = x.new_tensor(1.0)
    scale = pyro.sample("scale", dist.HalfNormal(one))
    rate = pyro.sample("rate", dist.Gamma(2 * one, one))
    share = pyro.sample("share", dist.Beta(2 * one, 3 * one))
    bound = pyro.sample("bound", dist.Uniform(-one, 2 * one))
    weights = pyro.sample("weights", dist.Dirichlet(x.new_ones(3)))
    steps = dist.TransformedDistribution(
        dist.Normal(x.new_zeros(3), 1.0).to_event(1), dist.transforms.OrderedTransform()
    )
    ordered = pyro.sample("ordered", steps)
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2 * one))
    coefficients = pyro.sample("coefficients", dist.MultivariateNormal(ordered, scale_tril=factor))
    f = x @ coefficients * rate + bound * share
    parts = dist.Categorical(weights)
    with pyro.plate("data", x.shape[0]):
        kinds = dist.Normal(f[:, None] + ordered, scale)
        pyro.sample("y", dist.MixtureSameFamily(parts, kinds), obs=y)
    return f


def hierarchical(x, y=None):
    """Plates, a scaled and a masked site, a deterministic one, a factor."""
    mu = pyro.sample("mu", dist.Normal(x.new_tensor(0.0), 1.0))
    tau = pyro.sample("tau", dist.HalfCauchy(x.new_tensor(1.0)))
    with pyro.plate("columns", x.shape[1]):
        slope = pyro.sample("slope", dist.Normal(mu, tau))
        with poutine.scale(scale=2.0), poutine.mask(mask=x[0] > -10):
            extra = pyro.sample("extra", dist.LogNormal(x.new_tensor(0.0), 1.0))
    pyro.factor("pull", -slope.square().sum())
    f = pyro.deterministic("f", x @ (slope * extra))
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)
    return f


class Normalised(PyroModule):
    """A network with BatchNorm, whose weights are parameters and whose last layer is Bayesian."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = PyroModule[nn.Linear](4, 1, bias=False)
        self.last.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))

    def forward(self, x, y=None):
        f = self.last(torch.tanh(self.norm(self.first(x)))).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


def _bound(model, x, y, dtype=torch.float64):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="site .* does not act on the data")
        return bind(model, x, y, dtype=dtype)


@pytest.mark.parametrize("model", [supports, hierarchical, Toy(in_features=3)])
def test_equals_pyros_potential_with_the_sign_changed(model):
    x, y = _rows()
    bound = _bound(model, x, y)
    density = Density(bound, chains=3)
    z = density.initial_prior(3, seed=0)
    value, grad = density.value_and_grad(z)
    with isolated(0):
        _, potential, _, _ = initialize_model(bound.model, (x, y))
    for chain in range(3):
        leaf = z[chain].clone().requires_grad_()
        params = {
            site.name: leaf[site.slice].reshape(site.unconstrained_shape) for site in density.sites
        }
        expected = -potential(params)
        (slope,) = torch.autograd.grad(expected, leaf)
        # The same sums in another order, in float64.
        torch.testing.assert_close(value[chain], expected.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(grad[chain], slope, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(density.log_density(z), value, rtol=1e-11, atol=1e-11)
    by_site = density.site_log_densities(z[1])
    assert sum(by_site.values()) == pytest.approx(float(value[1]), rel=1e-11)
    assert set(by_site) == {s.name for s in bound.sites if s.kind != "deterministic"}


@pytest.mark.parametrize("model", [supports, hierarchical])
def test_gradient_equals_differences(model):
    x, y = _rows()
    density = Density(_bound(model, x, y))
    z = 0.3 * torch.randn(1, density.dim, dtype=torch.float64)
    step = 1e-5
    shift = step * torch.eye(density.dim, dtype=torch.float64)
    slope = (density.log_density(z + shift) - density.log_density(z - shift)) / (2 * step)
    # Central differences: truncation of 1e-10 third derivatives, rounding of 1e-11 |lp|; both are
    # in the hundreds here.
    torch.testing.assert_close(density.value_and_grad(z)[1][0], slope, rtol=1e-7, atol=1e-7)


def test_a_support_that_depends_on_another_site_moves_with_it():
    """a ~ U(0, 1), b ~ U(0, 1 − a): log density of (logit a, logit b / (1 − a)) by hand."""

    def model(x, y=None):
        a = pyro.sample("a", dist.Uniform(x.new_tensor(0.0), 1.0))
        b = pyro.sample("b", dist.Uniform(torch.zeros_like(a), 1 - a))
        pyro.sample("y", dist.Normal(a + b, x), obs=y)
        return a + b

    x, y = torch.tensor(0.3).double(), torch.tensor(0.7).double()
    density = Density(bind(model, x[None], y[None], dtype=torch.float64), chains=5)
    z = torch.linspace(-2, 2, 10).double().reshape(5, 2)
    value, _ = density.value_and_grad(z)
    share = z.sigmoid()
    a, b = share[:, 0], share[:, 1] * (1 - share[:, 0])
    # The width 1 − a cancels between the density of b and its Jacobian.
    jacobian = (share * (1 - share)).log().sum(1)
    error = (y - a - b) / x
    expected = -0.5 * error**2 - x.log() - 0.5 * math.log(2 * math.pi) + jacobian
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    values = density.constrain(z)
    torch.testing.assert_close(values["b"], b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(density.unconstrain(values), z, rtol=1e-10, atol=1e-10)


def test_flat_priors_add_the_jacobian_only():
    def model(x, y=None):
        scale = pyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(torch.zeros_like(x), scale), obs=y)
        return x

    y = torch.tensor([1.0, -2.0]).double()
    density = Density(bind(model, torch.zeros_like(y), y, dtype=torch.float64))
    z = torch.tensor([[0.3]]).double()
    expected = 0.3 + float(dist.Normal(0.0, math.exp(0.3)).log_prob(y).sum())
    assert float(density.value_and_grad(z)[0]) == pytest.approx(expected, rel=1e-6)
    assert density.initial_prior(2, 0).abs().max() <= 2


def test_priors_that_check_their_arguments_and_mixtures_are_mapped_too():
    """A spike-and-slab prior built with checks on: its parts keep theirs, whatever is off."""
    parts = dist.Categorical(torch.tensor([0.25, 0.75]).double(), validate_args=True)
    scales = torch.tensor([1.0, 0.1]).double()
    kinds = dist.Normal(torch.zeros(2).double(), scales, validate_args=True)
    prior = dist.MixtureSameFamily(parts, kinds, validate_args=True).expand([3]).to_event(1)

    def model(x, y=None):
        w = pyro.sample("w", prior)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        return x @ w

    x, y = _rows()
    density = Density(bind(model, x, y, dtype=torch.float64), chains=2)
    assert density.slow_because is None
    z = torch.randn(2, 3, dtype=torch.float64)
    slab, spike = (dist.Normal(z.new_tensor(0.0), s).log_prob(z) for s in (1.0, 0.1))
    both = torch.logaddexp(slab + math.log(0.25), spike + math.log(0.75)).sum(1)
    expected = both + dist.Normal(z @ x.T, 0.5).log_prob(y).sum(1)
    torch.testing.assert_close(density.value_and_grad(z)[0], expected, rtol=1e-7, atol=1e-7)


def test_deterministic_sites_and_values_have_the_shape_of_the_draws():
    x, y = _rows()
    density = Density(_bound(hierarchical, x, y))
    z = torch.randn(2, 3, density.dim, dtype=torch.float64)
    values = density.constrain(z)
    assert {name: tuple(v.shape) for name, v in values.items()} == {
        "mu": (2, 3),
        "tau": (2, 3),
        "slope": (2, 3, 3),
        "extra": (2, 3, 3),
    }
    found = density.deterministic(z)["f"]
    expected = (values["slope"] * values["extra"]) @ x.T
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(density.unconstrain(values), z, rtol=1e-10, atol=1e-10)
    with pytest.raises(
        ModelError, match=r"site 'slope': expected values of shape \(…, 3\), got no"
    ):
        density.unconstrain({name: v for name, v in values.items() if name != "slope"})


def test_a_masked_nan_is_left_out_of_value_and_gradient():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        seen = torch.ones(len(x), dtype=torch.bool) if y is None else ~y.isnan()
        with pyro.plate("data", x.shape[0]), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        return x @ w

    x, y = _rows()
    holes = torch.where(torch.arange(len(y)) % 4 == 1, torch.nan, y)
    kept = ~holes.isnan()
    z = torch.randn(2, 3, dtype=torch.float64)
    found = Density(bind(model, x, holes, dtype=torch.float64)).value_and_grad(z)
    expected = Density(bind(model, x[kept], y[kept], dtype=torch.float64)).value_and_grad(z)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_chains_do_not_touch_each_other():
    x, y = _rows()
    density = Density(_bound(Toy(in_features=3), x, y, torch.float32), chains=4)
    z = density.initial_prior(4, 0)
    value, grad = density.value_and_grad(z)
    broken = z.clone()
    broken[2] = torch.nan
    other_value, other_grad = density.value_and_grad(broken)
    keep = [0, 1, 3]
    assert torch.equal(value[keep], other_value[keep])
    assert torch.equal(grad[keep], other_grad[keep])
    assert other_value[2].isnan()


def test_a_failed_factorisation_stays_in_its_chain():
    def model(x, y=None):
        scale = pyro.sample("scale", dist.Normal(x.new_tensor(2.0), 1.0))
        covariance = scale * torch.eye(3, dtype=x.dtype)
        pyro.sample("y", dist.MultivariateNormal(x, covariance), obs=y)
        return x

    x = torch.zeros(3).double()
    bound = bind(model, x, x + 1, dtype=torch.float64)
    z = torch.tensor([[1.0], [-1.0], [2.0]]).double()
    density = Density(bound, chains=3)
    value, grad = density.value_and_grad(z)
    assert value.isfinite().tolist() == [True, False, True]
    alone = density.value_and_grad(z[:1])
    torch.testing.assert_close(value[:1], alone[0])
    torch.testing.assert_close(grad[:1], alone[1])
    assert density.log_density(z).isfinite().tolist() == [True, False, True]


def test_parameters_and_running_statistics_are_read_and_never_written(unchanged):
    x, y = _rows()
    model = Normalised()
    bound = bind(model, x.float(), y.float())
    z = torch.randn(2, 4)
    with unchanged(bound.model), unchanged(model):
        density = Density(bound, chains=2)
        first = density.value_and_grad(z)
        density.constrain(z)
        again = density.value_and_grad(z)
    assert torch.equal(first[0], again[0])
    assert density.slow_because is None
    # The tensors are inputs of the graph: another scale of the noise of the data changes the value.
    moved = [t + 1 if t.shape == y.shape else t for t in density.data_tensors]
    assert not torch.equal(density.graph(z, *moved)[0], first[0])


def test_lanes_of_data_equal_one_density_each():
    x, y = _rows()
    ys = torch.stack([y, y.flip(0), 2 * y])
    model = Normalised()
    bound = bind(model, x.float(), y.float())
    biases = torch.randn(3, 4)
    lanes = {"y": ys.float(), "constants": {"first.bias": biases}}
    density = Density(bound, lanes=lanes)
    z = torch.randn(3, 4)
    value, grad = density.value_and_grad(z)
    for lane in range(3):
        held = {**bound.constants(), "first.bias": biases[lane]}
        own = Density(bind(model, x.float(), ys[lane].float(), constants=held))
        one = own.value_and_grad(z[lane : lane + 1])
        torch.testing.assert_close(value[lane], one[0][0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad[lane], one[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(density.log_density(z), value, rtol=1e-6, atol=1e-5)
    assert density.initial_prior(3, 0).shape == (3, 4)
    with pytest.raises(ModelError, match="a first axis of 3 lanes"):
        density.value_and_grad(z[:2])
    with pytest.raises(ModelError, match=r"lanes: y has shape \(3, 4\)"):
        Density(bound, lanes={"y": ys[:, :4].float()})


def test_starts_depend_on_the_seed_and_the_chain_only():
    x, y = _rows()
    density = Density(_bound(Toy(in_features=3), x, y))
    z = density.initial_prior(3, seed=5)
    assert torch.equal(z, density.initial_prior(3, seed=5))
    assert torch.equal(z[:2], density.initial_prior(2, seed=5))
    assert not torch.equal(z, density.initial_prior(3, seed=6))
    assert not torch.equal(z[0], z[1])


def test_no_finite_start_tells_the_log_density_by_site():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_tensor(0.0), 1.0))
        pyro.factor("wall", torch.where(w.abs() < 1e-12, 0.0, w - w - torch.inf))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        return w * x

    x = torch.ones(2)
    with pytest.raises(ModelError, match="its log density is not finite"):
        Density(bind(model, x, x))

    def half(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_tensor(0.0), 1.0))
        pyro.factor("wall", (w - w) / (1 - y.sum().sign()) if y is not None else w - w)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        return w * x

    density = Density(bind(half, x, -x), lanes={"y": torch.stack([-x, x])})
    with pytest.raises(FitError, match=r"no finite start .* by site at the last one: w .*wall nan"):
        density.initial_prior(2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_is_kept_throughout(dtype):
    x, y = _rows()
    density = Density(_bound(Toy(in_features=3), x, y, dtype))
    z = density.initial_prior(2, 0)
    tensors = [z, *density.value_and_grad(z), density.log_density(z)]
    tensors += [*density.constrain(z).values(), density.unconstrain(density.constrain(z))]
    assert {t.dtype for t in tensors} == {dtype}


def test_global_state_stays_as_it_was(unchanged):
    x, y = _rows()
    with unchanged():
        density = Density(_bound(hierarchical, x, y), chains=2)
        z = density.initial_prior(2, 0)
        density.value_and_grad(z)
        density.deterministic(z)
        density.site_log_densities(z[0])


def test_a_vector_of_another_length_is_refused():
    x, y = _rows()
    density = Density(_bound(hierarchical, x, y))
    with pytest.raises(ModelError, match=r"z has shape \(2, 7\); expected \(…, 8\)"):
        density.value_and_grad(torch.zeros(2, 7).double())
