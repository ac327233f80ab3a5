"""Stochastic-gradient MCMC: its batches, its step sizes, and its moments with their known bias."""

import math

import pytest
import torch
from model_cases import Linear, Toy
from scipy.linalg import solve_discrete_lyapunov

import pbnn
from pbnn.errors import ConvergenceWarning, FitError
from pbnn.infer import sgmcmc
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.step_sizes import StepSizes

ROWS, NOISE = 24, 0.5


def mean_problem():
    """y ~ Normal(w, NOISE): a batch changes its gradient, but not its curvature."""
    y = 1.0 + NOISE * torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    return Linear(1, NOISE), torch.ones(ROWS, 1), y


def stationary_variance(precision, size, friction, batch_gradients):
    """Return the variance of θ over all steps, by a Lyapunov equation for the state (θ, v).

    The gradients of an epoch's batches are a random order of rows, cut: their covariance over the
    batches i, j of an epoch is V for i = j and −V / (batches − 1) otherwise.
    """
    drift, kept = size * precision, 1 - friction
    a = torch.tensor([[1 - drift, kept], [-drift, kept]], dtype=torch.float64)
    b = torch.ones(2, 1).double()
    count, variance = batch_gradients
    shuffled = (torch.eye(count) * count - 1).double() * variance / max(count - 1, 1)
    powers = [torch.linalg.matrix_power(a, k) for k in range(count + 1)]
    added = []  # covariance that the noise adds in the first k steps of an epoch
    for k in range(1, count + 1):
        ways = torch.cat([powers[k - 1 - j] @ b for j in range(k)], 1)
        own = size**2 * shuffled[:k, :k] + 2 * friction * size * torch.eye(k).double()
        added.append(ways @ own @ ways.T)
    start = torch.from_numpy(solve_discrete_lyapunov(powers[-1].numpy(), added[-1].numpy()))
    found = [powers[k + 1] @ start @ powers[k + 1].T + new for k, new in enumerate(added)]
    return float(torch.stack(found)[:, 0, 0].mean())


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(("algorithm", "friction"), [("sgld", 1.0), ("sghmc", 0.3)])
def test_moments_of_a_gaussian_with_the_bias_of_their_step_size(algorithm, friction, batch_size):
    model, x, y = mean_problem()
    mean, covariance = model.exact(x, y)
    precision = float(1 / covariance)
    size = 0.5 / precision
    posterior = pbnn.fit_sgmcmc(
        model, x, y, algorithm=algorithm, schedule="constant", chains=64,
        friction=None if algorithm == "sgld" else friction,
        lr=size * ROWS, steps=400, burn_in=0.25, draws=300, batch_size=batch_size, seed=3,
        dtype=torch.float64, compile=False, progress=False,
    )  # fmt: skip
    batches = 1 if batch_size is None else ROWS // batch_size
    # Variance of the sum over a batch, drawn without replacement, times rows / batch size.
    variance = 0.0
    if batch_size is not None:
        variance = batches**2 * batch_size * float(y.var()) * (1 - batch_size / ROWS) / NOISE**4
    expected = stationary_variance(precision, size, friction, (batches, variance))
    if batch_size is None:  # the docstring's formula
        biased = 1 / (precision * (1 - size * precision / (4 - 2 * friction)))
        assert expected == pytest.approx(biased, rel=1e-9)
    assert expected > 1.1 / precision  # the bias is there to be seen

    w = posterior.draws["w"][..., 0]
    # Chains are independent: four standard errors over 64 of them.
    for value, right in ((w, float(mean)), ((w - mean).square(), expected)):
        by_chain = value.mean(1)
        assert abs(float(by_chain.mean()) - right) < 4 * float(by_chain.std()) / math.sqrt(64)


@pytest.mark.filterwarnings("ignore:R-hat:pbnn.errors.ConvergenceWarning")
def test_cycles_find_the_posterior_of_a_small_step_size():
    model, x, y = mean_problem()
    mean, covariance = model.exact(x, y)
    posterior = pbnn.fit_sgmcmc(
        model, x, y, chains=64, steps=800, cycles=2, lr=0.1 * ROWS * float(covariance),
        friction=0.3, draws=100, seed=1, dtype=torch.float64, compile=False, progress=False,
    )  # fmt: skip
    # The step size is 0.1 / precision at most, so the bias of the variance is below 3.1%.
    square = (posterior.draws["w"][..., 0] - mean).square().mean(1)
    error = 4 * float(square.std()) / math.sqrt(64)
    assert abs(float(square.mean() / covariance) - 1) < 0.031 + error / float(covariance)


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_a_chain_does_not_depend_on_the_others_and_has_batches_of_its_own(toy):
    options = {
        "steps": 8, "draws": 4, "lr": 1e-4, "batch_size": 5, "init": "prior", "compile": False,
        "progress": False, "schedule": "constant",
    }  # fmt: skip
    two = pbnn.fit_sgmcmc(Toy(), *toy, chains=2, seed=5, **options)
    again = pbnn.fit_sgmcmc(Toy(), *toy, chains=2, seed=5, **options)
    one = pbnn.fit_sgmcmc(Toy(), *toy, chains=1, seed=5, **options)
    for name, value in two.draws.items():
        assert torch.equal(value, again.draws[name])
        torch.testing.assert_close(value[:1], one.draws[name])
        assert not torch.equal(value[0], value[1])
    assert two.markov
    assert two.stats["lp"].shape == two.stats["step_size"].shape == (2, 4)
    assert two.history["log_joint"].shape == (8, 2)


def test_step_sizes_fall_by_half_a_cosine_and_draws_lie_in_the_noisy_part():
    sizes = StepSizes(steps=40, lr=2.0, schedule="cyclical", cycles=4, burn_in=0.6, draws=8)
    assert [sizes.size(k) for k in (0, 5, 10, 35)] == pytest.approx([2.0, 1.0, 2.0, 1.0])
    assert [k for k in range(10) if sizes.noisy(k)] == [6, 7, 8, 9]
    assert sizes.kept() == [7, 9, 17, 19, 27, 29, 37, 39]
    flat = StepSizes(steps=40, lr=2.0, schedule="constant", cycles=4, burn_in=0.5, draws=4)
    assert flat.kept() == [24, 29, 34, 39]
    assert flat.noisy(0)
    assert flat.size(39) == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"draws": 30, "steps": 40},
        {"burn_in": 1.0},
        {"lr": 0.0},
        {"schedule": "cosine"},
        {"algorithm": "hmc"},
        {"friction": 0.0},
        {"friction": 0.5, "algorithm": "sgld"},
        {"cycles": 2, "schedule": "constant"},
        {"cycles": 0},
        {"batch_size": 31},
    ],
    ids=lambda o: next(iter(o)),
)
def test_option_out_of_range_is_named(toy, options):
    with pytest.raises(FitError, match=next(iter(options))):
        pbnn.fit_sgmcmc(Toy(), *toy, progress=False, **options)


def test_log_joint_that_is_not_finite_stops_the_run_and_names_the_step(toy):
    with pytest.raises(FitError, match=r"at step \d+; lower lr \(now 100000\.0\)"):
        pbnn.fit_sgmcmc(Toy(), *toy, lr=1e5, steps=300, draws=2, compile=False, progress=False)


@pytest.mark.filterwarnings("ignore:R-hat:pbnn.errors.ConvergenceWarning")
def test_interrupted_run_keeps_the_draws_so_far(toy, monkeypatch):
    calls = []

    def interrupting(self):
        calls.append(0)
        if len(calls) > 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(LogJoint, "advance", interrupting)
    with pytest.warns(ConvergenceWarning, match="10 of 20 draws"):
        posterior = pbnn.fit_sgmcmc(
            Toy(), *toy, steps=40, burn_in=0.5, schedule="constant", draws=20, chains=2,
            compile=False, progress=False,
        )  # fmt: skip
    assert posterior.draws_per_chain == 10
    assert posterior.provenance["interrupted"]


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_parameters_without_a_prior_are_named_or_frozen(toy):
    model = Toy()
    model.shift = torch.nn.Parameter(torch.zeros(()))
    with pytest.raises(FitError, match="shift"):
        pbnn.fit_sgmcmc(model, *toy, progress=False)
    given = {"shift": torch.tensor(2.0)}
    posterior = pbnn.fit_sgmcmc(
        model, *toy, constants=given, steps=8, cycles=2, draws=2, lr=1e-4, init="prior",
        compile=False, progress=False,
    )  # fmt: skip
    assert float(posterior.constants["shift"]) == 2.0


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_compiling_leaves_the_chains_their_noise(toy, monkeypatch):
    options = {"steps": 8, "cycles": 2, "draws": 2, "lr": 1e-4, "init": "prior", "progress": False}
    plain = pbnn.fit_sgmcmc(Toy(), *toy, compile=False, **options)
    monkeypatch.setattr(sgmcmc, "compile_graph", lambda function, inputs: function)
    compiled = pbnn.fit_sgmcmc(Toy(), *toy, compile=True, **options)
    assert compiled.provenance["compiled"]
    for name, value in plain.draws.items():
        torch.testing.assert_close(compiled.draws[name], value)
