"""The step of SVI: one graph gives what Pyro gives, and every kind of step leads the same way."""

from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from pyro.nn import PyroParam
from torch import nn
from torch.func import grad
from torch.overrides import TorchFunctionMode

import pbnn
from pbnn.errors import FitError, PbnnWarning
from pbnn.front_door import bind
from pbnn.infer.adam import Adam
from pbnn.infer.density import Density
from pbnn.infer.eager_step import learned
from pbnn.infer.elbo import Elbo
from pbnn.infer.flat_step import FlatStep
from pbnn.infer.guides import AutoKronecker, make_guide
from pbnn.infer.guides.drawing import gaussian_blocks
from pbnn.infer.objective import Objective
from pbnn.infer.step import make_step
from pbnn.model import isolated

# One for each kind of y; tests/test_models.py has the others.
MODELS = [
    Path(__file__).parents[1] / "models" / f"{name}.py"
    for name in ("classification", "heteroscedastic", "regression")
]
GUIDES = {
    "normal": "normal",
    "lowrank": "lowrank",
    "kronecker": "kronecker",
    "layer_lowrank": "layer_lowrank",
    "patterns": {"*weight": "kronecker", "*": "full"},
    "lowrank factors": lambda m: AutoKronecker(m, factors=("lowrank", 2), bias="separate"),
    "diagonal": AutoDiagonalNormal,
    "multivariate": AutoMultivariateNormal,
}


class Fed(TorchFunctionMode):
    """Gives Normal draws from a vector, in order."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.normal_:
            size = args[0].numel()
            taken, self.noise = self.noise[:size], self.noise[size:]
            return args[0].copy_(taken.reshape(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def inside():
    with isolated(0), pyro.validation_enabled(False):
        yield


def bound_to(path, dtype=torch.float64, rows=12, **options):
    """Bind a model file to data that its likelihood can take."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator)
    model = pbnn.load_model(path, in_features=3, hidden=4, **options)
    real = (x[:, 0] - x[:, 1] + 0.1 * torch.randn(rows, generator=generator)).to(dtype)
    for y in (real, (x[:, 0] > 0).long() + (x[:, 1] > 0), (x[:, 0] > 0).to(dtype)):
        try:
            return bind(model, x, y, dtype=dtype)
        except pbnn.errors.PbnnError as error:
            found = error
    raise found


def scrambled(guide, bound, size=0.5):
    guide(bound.x, bound.y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return guide


def objective_of(bound, guide, particles, **options):
    return Objective(bound, guide, learned(bound, guide), particles=particles, **options)


def flat(objective, parameters, noise, factor=1.0, kl_weight=1.0):
    """Return gradient and terms of the loss as a pure function."""
    vector = torch.cat([p.detach().reshape(-1) for p in parameters])
    control = vector.new_tensor([factor, kl_weight])
    data = (*objective.terms.rows(*objective.example), *objective.terms.state())
    return grad(objective.loss, has_aux=True)(vector, noise, control, *data)


def through_pyro(objective, parameters, noise, factor=1.0, kl_weight=1.0):
    """Return the same through Pyro."""
    bound = objective.bound
    elbo = Elbo(bound, objective.guide, objective.particles)
    with Fed(noise.reshape(-1)):
        terms = elbo(bound.x, bound.y, factor)
    loss = (kl_weight * terms[1] - terms[0]) / bound.rows
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([g.reshape(-1) for g in gradients]), terms.detach()


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


# The pure function against Pyro.


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_terms_and_gradient_of_pyro(path, guide, inside):
    """The same noise: only rounding (float64) may differ."""
    bound = bound_to(path)
    guide = scrambled(make_guide(GUIDES[guide], bound.model), bound)
    parameters = learned(bound, guide)
    for particles in (1, 2, 3):
        objective = objective_of(bound, guide, particles)
        noise = torch.randn(objective.noise_shape, dtype=bound.dtype)
        options = (objective, parameters, noise, 2.5, 0.3)
        same(flat(*options), through_pyro(*options))


def test_pyros_own_low_rank_guide_has_the_same_log_densities(inside):
    """Pyro draws it from other noise, so at the same draw: E log-likelihood and KL at one point."""
    bound = bound_to(MODELS[-1])
    guide = scrambled(AutoLowRankMultivariateNormal(bound.model, rank=2), bound)
    objective = objective_of(bound, guide, 1)
    noise = torch.randn(objective.noise_shape, dtype=bound.dtype)
    _, terms = flat(objective, learned(bound, guide), noise)
    block = gaussian_blocks(guide)[0]
    value, log_q = block.gaussian.transform(noise[0])
    torch.testing.assert_close(guide.get_posterior().log_prob(value), log_q)
    lp = Density(bound, compile=False).log_density(value)
    torch.testing.assert_close(terms[0] - terms[1], lp - log_q)


class Full(Toy):
    """Constants, buffers, a frozen parameter, and one with a constraint."""

    def __init__(self):
        super().__init__()
        self.norm, self.shift = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.shift.bias.requires_grad_(False)
        self.slope = PyroParam(torch.tensor(1.5), dist.constraints.positive)

    def network(self, x):
        return self.slope * super().network(self.norm(x)) + self.shift(x).squeeze(-1)


def test_constants_are_learned_too(inside):
    bound = bind(Full(), *linear_data(20, 2), dtype=torch.float64)
    guide = scrambled(make_guide("normal", bound.model), bound)
    parameters = learned(bound, guide)
    assert sum(p.numel() for p in parameters) == 2 * 22 + 2 + 2 + 2 + 1
    objective = objective_of(bound, guide, 2)
    noise = torch.randn(objective.noise_shape, dtype=bound.dtype)
    options = (objective, parameters, noise)
    found = flat(*options)
    same(found, through_pyro(*options))
    assert bool((found[0] != 0).all())


def test_missing_values_and_several_observed_sites(inside):
    class Two(Toy):
        def forward(self, x, y=None):
            f, sigma = self.network(x), self.sigma
            a, b = (None, None) if y is None else (y["a"], y["b"])
            with pyro.plate("data", x.shape[0]):
                mask = None if a is None else ~a.isnan()
                pyro.sample("a", dist.Normal(f, sigma).mask(True if mask is None else mask), obs=a)
                pyro.sample("b", dist.Poisson(f.exp()), obs=b)
            pyro.factor("outside", -f.square().mean())
            return f

    x, a = linear_data(20, 2)
    a[3] = torch.nan
    bound = bind(Two(), x, {"a": a, "b": torch.arange(20.0)}, dtype=torch.float64)
    guide = scrambled(make_guide("kronecker", bound.model), bound, 0.1)
    objective = objective_of(bound, guide, 2)
    noise = torch.randn(objective.noise_shape, dtype=bound.dtype)
    options = (objective, learned(bound, guide), noise, 3.0)
    same(flat(*options), through_pyro(*options))


# Adam.


@pytest.mark.parametrize("clip", [None, 0.5])
def test_adam_equals_torchs(clip):
    torch.manual_seed(0)
    ours, theirs = ([torch.ones(3, 2), torch.ones(4)] for _ in range(2))
    adam = Adam(ours, clip)
    leaves = [p.requires_grad_() for p in theirs]
    optimiser = torch.optim.Adam(leaves)
    for step in range(20):
        gradients = [torch.randn_like(p) * 10.0**-step for p in ours]
        lr = 0.1 / (step + 1)
        adam.step(gradients, torch.zeros(2), lr)
        for p, gradient in zip(leaves, gradients, strict=True):
            p.grad = gradient.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimiser.param_groups[0]["lr"] = lr
        optimiser.step()
    for a, b in zip(ours, leaves, strict=True):
        torch.testing.assert_close(a, b.detach())


# Steps.


def taken(step, bound, steps=20, **options):
    factor = 1.0
    terms = [step(bound.x, bound.y, factor, lr=0.01, **options) for _ in range(steps)]
    return torch.stack(terms), [p.detach().clone() for p in step.parameters]


def fresh(bound, kind="normal", **options):
    """Return a step and its guide, from the same start each time."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    step = make_step(bound, make_guide(kind, bound.model), **options)
    torch.manual_seed(1)
    return step


@pytest.mark.parametrize("options", [{}, {"clip": 0.1, "particles": 2}], ids=["plain", "clipped"])
def test_traced_compiled_and_pyros_step_go_the_same_way(inside, options):
    """A guide whose noise comes in one vector, so that all three draw the same numbers."""
    bound = bind(Linear(2), *linear_data(20, 2), dtype=torch.float64)
    results = []
    for kind, choice in {
        "traced, not compiled": {"compile": False},
        "through Pyro": {"steps": 10},
        "traced, compiled": {"compile": True},
    }.items():
        step = fresh(bound, "lowrank", **choice, **options)
        assert step.rule.startswith(f"{kind}: ")
        assert step.compiled == (choice.get("compile") is True)
        results.append(taken(step, bound, kl_weight=0.5))
    for terms, parameters in results[1:]:
        torch.testing.assert_close(terms, results[0][0], rtol=1e-7, atol=1e-7)
        for a, b in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "guide"),
    [*((MODELS[-1], guide) for guide in GUIDES), *((path, "normal") for path in MODELS[:-1])],
    ids=lambda value: getattr(value, "stem", value),
)
def test_compiled_steps_equal_traced_ones(path, guide, inside):
    """In batches, with mirrored pairs; the parameters after 20 steps, in float64."""
    bound = bound_to(path)
    results = []
    for compile in (False, True):
        options = {"compile": compile, "particles": 2, "batch_size": 6}
        step = fresh(bound, GUIDES[guide], **options)
        rows = [slice(0, 6), slice(6, 12)] * 10
        results.append([step(bound.x[r], bound.y[r], 2.0, lr=0.01) for r in rows])
        results[-1] += [p.detach().clone() for p in step.parameters]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_rule_on_compiling_counts(inside, monkeypatch):
    """Never a timing: the same counts give the same decision and the same words."""
    bound = bind(Linear(2), *linear_data(20, 2))
    asked = []
    monkeypatch.setattr(FlatStep, "compile", lambda step: asked.append(step))
    few, many = fresh(bound, steps=1000), fresh(bound, steps=10**6)
    assert few.rule.startswith("traced, not compiled: 1000 steps of a graph of ")
    assert many.rule.startswith("traced, compiled: 1000000 steps of a graph of ")
    assert asked == [many]

    def fails(step):
        raise FitError("inductor could not compile")

    monkeypatch.setattr(FlatStep, "compile", fails)
    with pytest.warns(PbnnWarning, match="could not compile; going on uncompiled"):
        step = fresh(bound, steps=10**6)
    assert step.rule == "traced, not compiled: inductor could not compile"
    with pytest.raises(FitError, match="could not compile"):
        fresh(bound, compile=True)


@pytest.mark.parametrize("steps", [10, 1000])
def test_resume_goes_on_bit_by_bit(inside, steps):
    bound = bind(Linear(2), *linear_data(20, 2))
    step = fresh(bound, steps=steps)
    taken(step, bound, 5)
    state, kept = step.state(), [p.detach().clone() for p in step.parameters]
    terms, parameters = taken(step, bound, 5)
    other = fresh(bound, steps=steps)
    with torch.no_grad():
        for p, value in zip(other.parameters, kept, strict=True):
            p.copy_(value)
    other.load(state)
    terms_again, parameters_again = taken(other, bound, 5)
    assert torch.equal(terms, terms_again)
    assert all(torch.equal(a, b) for a, b in zip(parameters, parameters_again, strict=True))


def test_batches_of_one_size(inside):
    bound = bind(Linear(2), *linear_data(20, 2), dtype=torch.float64)
    found = []
    for options in ({"compile": False}, {"steps": 1}):
        step = fresh(bound, "lowrank", batch_size=5, **options)
        rows = [slice(3, 8), slice(11, 16)] * 3
        found.append(torch.stack([step(bound.x[r], bound.y[r], 4.0, lr=0.1) for r in rows]))
    torch.testing.assert_close(*found)
    step = fresh(bound, "lowrank", batch_size=5, compile=False)
    with pytest.raises(FitError, match=r"rows of shape \(5, 2\).*got \(4, 2\)"):
        step(bound.x[:4], bound.y[:4], 5.0, lr=0.1)


# What cannot be traced.


class Reading(Toy):
    """Reads its own values, or those of its rows."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def network(self, x):
        if self.reads == "draw" and self.fc1.bias.sum() > 0:
            return super().network(x)
        if self.reads == "rows" and x.sum() > 0:
            return super().network(x)
        return -super().network(x)


@pytest.mark.parametrize("reads", ["draw", "rows"])
def test_a_model_that_reads_values_goes_through_pyro(inside, reads):
    bound = bind(Reading(reads), *linear_data(20, 2))
    options = {"batch_size": 5} if reads == "rows" else {}
    step = fresh(bound, **options)
    assert not isinstance(step, FlatStep)
    assert step.rule.startswith("through Pyro: ")
    with pytest.raises(FitError, match="compile=True, but the step cannot be traced"):
        fresh(bound, compile=True, **options)


def test_a_guide_of_no_gaussians_goes_through_pyro(inside):
    bound = bind(Linear(2), *linear_data(20, 2))
    step = fresh(bound, lambda model: AutoIAFNormal(model, hidden_dim=[4]))
    assert step.rule == "through Pyro: guide AutoIAFNormal is no product of Gaussians"
    before = [p.detach().clone() for p in step.parameters]
    terms, after = taken(step, bound, 3)
    assert terms.isfinite().all()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("steps", [10, 1000])
def test_terms_that_are_not_finite_change_nothing(inside, steps):
    class Bad(Linear):
        def forward(self, x, y=None):
            f = x @ self.w
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, self.noise / (self.w.sum() < 1e3)), obs=y)
            return f

    bound = bind(Bad(2), *linear_data(20, 2))
    step = fresh(bound, steps=steps)
    with torch.no_grad():
        step.parameters[0].fill_(1e4)
    before = [p.detach().clone() for p in step.parameters]
    terms, after = taken(step, bound, 3)
    assert not terms[:, 0].isfinite().any()
    assert step.culprit() == " (site 'y')"
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
