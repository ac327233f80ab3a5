"""fit_svi: what it returns, what it refuses, and how it ends when something goes wrong."""

import gc
import os
import resource

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

from pbnn import Posterior, fit_svi, predict, to_inference_data
from pbnn.errors import ConvergenceWarning, FitError, ModelError
from pbnn.infer import training
from pbnn.infer.guides import dense_moments, log_prob_guide
from pbnn.inference_data import groups

QUIET = {"progress": False, "early_stopping": False}


def fit(model, data, **options):
    return fit_svi(model, *data, **{**QUIET, "steps": 10, "draws": 20, **options})


def identical(a, b):
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("draws", "stats", "history")]
    return all(
        torch.equal(value, other[name]) for one, other in pairs for name, value in one.items()
    )


@pytest.fixture(scope="module")
def fitted():
    """A model with everything in it, its data, and its fit."""

    class Full(Toy):
        def __init__(self):
            super().__init__()
            self.norm, self.drop, self.shift = nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)

        def network(self, x):
            f = super().network(self.drop(self.norm(x))) + self.shift(x).squeeze(-1)
            pyro.deterministic("largest", self.fc1.weight.max())
            return f

    torch.manual_seed(0)
    model, data = Full(), linear_data(40, 2)
    return model, data, fit(model, data, steps=40, draws=300, batch_size=16, seed=3)


# What comes back.


def test_posterior_of_the_documented_shape(fitted):
    _, _, posterior = fitted
    shapes = {name: tuple(value.shape) for name, value in posterior.draws.items()}
    assert shapes == {
        "fc1.weight": (1, 300, 5, 2),
        "fc1.bias": (1, 300, 5),
        "fc2.weight": (1, 300, 1, 5),
        "fc2.bias": (1, 300, 1),
        "sigma": (1, 300),
    }
    assert {name: tuple(v.shape) for name, v in posterior.stats.items()} == {
        "lp": (1, 300),
        "log_q": (1, 300),
    }
    assert (posterior.method, posterior.markov) == ("svi", False)
    assert {name: tuple(v.shape) for name, v in posterior.history.items()} == {
        "elbo": (40,),
        "expected_log_likelihood": (40,),
        "kl": (40,),
    }
    assert bool((posterior.draws["sigma"] > 0).all())
    options = posterior.provenance["options"]
    assert (options["batch_size"], options["particles"]) == (16, 2)
    assert posterior.provenance["seed"] == 3
    assert (posterior.provenance["ended"], posterior.provenance["steps_taken"]) == ("steps", 40)


def test_deterministic_sites_of_the_same_draws(fitted):  # fault 21
    _, _, posterior = fitted
    largest = posterior.draws["fc1.weight"].flatten(2).max(-1).values
    assert torch.equal(posterior.deterministic["largest"], largest)


def test_constants_are_learned_and_buffers_are_not(fitted):
    model, _, posterior = fitted
    before = dict(model.named_parameters())
    assert set(posterior.constants) == set(before)
    assert not torch.equal(posterior.constants["shift.weight"], before["shift.weight"])
    for name, value in model.named_buffers():
        assert torch.equal(posterior.buffers[name], value)


def test_lp_is_the_log_joint_with_its_jacobian(fitted):
    """By hand, from the draws: prior + likelihood + log |d sigma / d log sigma|."""
    model, (x, y), posterior = fitted
    total = posterior.draws["sigma"].log() + dist.HalfNormal(1.0).log_prob(posterior.draws["sigma"])
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        total = total + dist.Normal(0.0, 1.0).log_prob(posterior.draws[name]).flatten(2).sum(-1)
    d, c = posterior.flat(), posterior.constants
    h = x / (1 + model.norm.eps) ** 0.5 * c["norm.weight"] + c["norm.bias"]
    hidden = torch.tanh(h @ d["fc1.weight"].mT + d["fc1.bias"][:, None])
    f = (hidden @ d["fc2.weight"].mT).squeeze(-1) + d["fc2.bias"]
    f = f + x @ c["shift.weight"][0] + c["shift.bias"]
    likelihood = dist.Normal(f, d["sigma"][:, None]).log_prob(y).sum(-1)
    torch.testing.assert_close(posterior.stats["lp"], total + likelihood, rtol=1e-4, atol=1e-3)


def test_log_q_is_the_density_of_the_guide(fitted):
    """The approximation's tensors give the same density of the unconstrained draws."""
    _, _, posterior = fitted
    mean, covariance, names = dense_moments(posterior.approximation)
    values = {**posterior.flat(), "sigma": posterior.flat()["sigma"].log()}
    packed = torch.cat([values[name].reshape(300, -1) for name in names], 1)
    density = dist.MultivariateNormal(mean, covariance).log_prob(packed)
    torch.testing.assert_close(posterior.stats["log_q"][0], density, rtol=1e-4, atol=1e-3)


def test_history_adds_up(fitted):
    history = fitted[2].history
    parts = history["expected_log_likelihood"] - history["kl"]
    torch.testing.assert_close(history["elbo"], parts)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7, "particles": 4}])
def test_history_is_the_closed_form_elbo(options):
    """With a guide that stands still, means over steps are the closed form within 4 errors."""
    model, data = Linear(3), linear_data(20, 3)
    posterior = fit(model, data, steps=300, lr=1e-12, init_scale=0.2, **options)
    mean, covariance, _ = dense_moments(posterior.approximation)
    likelihood, kl = model.elbo(*data, mean.double(), covariance.double())
    for name, exact in (("expected_log_likelihood", likelihood), ("kl", kl)):
        found = posterior.history[name].double()
        assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / 300**0.5, name


def test_nothing_of_the_caller_changes(toy, unchanged):
    model = Toy().train()
    with unchanged(model):
        fit(model, toy, batch_size=7)
    with unchanged(model), torch.no_grad():
        fit(model, toy, steps=2)


# State (fault 28) and memory (fault 12).


def test_fits_do_not_see_each_other(toy):
    first = fit(Toy(), toy, batch_size=7)
    fit(Toy(), linear_data(30, 2), guide="kronecker")
    fit(Toy(hidden=8), toy)
    torch.randn(3)
    assert identical(first, fit(Toy(), toy, batch_size=7))
    assert not identical(first, fit(Toy(), toy, batch_size=7, seed=1))


@pytest.mark.skipif(os.name != "posix", reason="reads the peak memory of the process")
def test_repeated_fits_do_not_grow_memory():
    """50 MB over twenty fits is 2.5 MB a fit; caches are filled by the first ones."""
    peaks = []
    for _ in range(9):
        fit(Linear(3), linear_data(20, 3), steps=2)
        gc.collect()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert peaks[-1] - peaks[2] < 6 * 2.5


# Guides of the user's own (fault 16).


class AutoLaplace(AutoContinuous):
    """Independent Laplace distributions on the unconstrained space."""

    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        self.loc = nn.Parameter(self._init_loc())
        self.width = PyroParam(torch.full_like(self.loc, 0.1), dist.constraints.positive)

    def get_posterior(self, *args, **kwargs):
        return dist.Laplace(self.loc, self.width).to_event(1)


def test_a_family_of_the_users_own(toy, tmp_path):
    posterior = fit(Toy(), toy, guide=AutoLaplace)
    assert posterior.provenance["options"]["guide"] == "AutoLaplace"
    assert posterior.approximation is None
    assert bool(posterior.stats["log_q"].isfinite().all())
    loaded = Posterior.load(posterior.save(tmp_path / "a.pt"))
    assert identical(posterior, loaded)
    x, y = toy
    assert torch.equal(predict(Toy(), posterior, x).mean, predict(Toy(), loaded, x).mean)
    exported = to_inference_data(loaded, model=Toy(), x=x, y=y)
    assert {"posterior", "log_likelihood", "posterior_predictive"} <= set(groups(exported))


def test_a_guide_that_is_a_plain_function():
    """A function guide, with auxiliary noise, reaches the exact posterior mean."""
    model, data = Linear(1), linear_data(50, 1)

    def build(_):
        def guide(x, y=None):
            loc = pyro.param("loc", torch.zeros(1))
            width = pyro.param("width", torch.ones(1), constraint=dist.constraints.positive)
            noise = pyro.sample(
                "noise", dist.Normal(0.0, 1.0).expand([1]).to_event(1), infer={"is_auxiliary": True}
            )
            density = -width.log().sum()  # of w given the noise; the noise counts for itself
            pyro.sample("w", dist.Delta(loc + width * noise, log_density=density, event_dim=1))

        return guide

    posterior = fit(model, data, guide=build, steps=800, lr=0.05, draws=500)
    mean, covariance = model.exact(*data)
    scale = covariance.sqrt().item()
    draws = posterior.draws["w"].flatten().double()
    # The guide to 15% of the scale (this gradient keeps its noise), and 4 Monte Carlo errors.
    assert abs(draws.mean() - mean.item()) < (4 / 500**0.5 + 0.15) * scale
    expected = -dist.Normal(mean.item(), scale).entropy().item()
    assert abs(posterior.stats["log_q"].mean().item() - expected) < 4 * 0.5**0.5 / 500**0.5 + 0.15


def test_a_ready_instance_is_trained_in_place(toy, unchanged):
    model = Toy()
    model.norm = nn.BatchNorm1d(2)
    guide = AutoNormal(model)
    with unchanged(model):
        first = fit(model, toy, guide=guide, dtype=torch.float64)
    assert first.draws["sigma"].dtype == torch.float64
    assert log_prob_guide(guide, first.flat()).shape == (20,)
    second = fit(model, toy, guide=guide, dtype=torch.float64)
    assert second.history["elbo"].mean() > first.history["elbo"].mean()


def other_site(model):
    def guide(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("v", dist.Normal(0.0, 1.0))

    return guide


def no_site(model):
    return lambda x, y=None: None


def wrong_shape(model):
    return lambda x, y=None: pyro.sample("w", dist.Normal(0.0, 1.0))


def no_gradient(model):
    return lambda x, y=None: pyro.sample("w", dist.VonMises(torch.zeros(2), 1.0).to_event(1))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (other_site, "the guide draws site 'v', which the model does not have"),
        (no_site, "and the guide does not draw it; expected `pyro.sample('w', …)`"),
        (wrong_shape, "site 'w' has shape (2,) in the model, and the guide draws shape ()"),
        (no_gradient, "the guide draws site 'w' from VonMises, which is not reparameterised"),
    ],
)
def test_guides_that_would_be_quietly_wrong(toy, guide, message):
    with pytest.raises(ModelError) as caught:
        fit(Linear(2), toy, guide=guide)
    assert message in str(caught.value)


@pytest.mark.parametrize("guide", [AutoDiagonalNormal, "lowrank"])
def test_constants_of_a_function_model(guide):
    """The mean of y is learned as a constant, and prediction uses it."""

    def model(x, y=None):
        shift = pyro.param("shift", torch.tensor(0.0))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, 1e-3))
        f = x * w + shift
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, noise), obs=y)
        return f

    x, y = torch.randn(50), 3.0 + 0.5 * torch.randn(50)
    posterior = fit(model, (x, y), guide=guide, steps=300, lr=0.1)
    noise = posterior.constants["noise_unconstrained"].exp()
    # Maximum likelihood; w is as good as 0.
    torch.testing.assert_close(posterior.constants["shift"], y.mean(), atol=5e-3, rtol=0.0)
    torch.testing.assert_close(noise, y.std(correction=0), rtol=0.02, atol=0.0)
    prediction = predict(model, posterior, x)
    torch.testing.assert_close(prediction.mean.float(), y.mean().expand(50), atol=0.02, rtol=0.0)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0; expected a whole number of at least 1"),
        ({"particles": 0}, "particles=0; expected a whole number of at least 1"),
        ({"estimator": "exact"}, "estimator='exact'; expected one of 'pathwise'"),
        ({"divergence": "exact"}, "divergence='exact'; expected one of 'auto'"),
        ({"steps": 2.5}, "steps=2.5; expected a whole number of at least 1"),
        ({"seed": -1}, "seed=-1; expected a whole number of at least 0"),
        ({"schedule": lambda _: -1.0}, "schedule returned -1.0 at share 0 of the steps; expected"),
        ({"draws": 0}, "draws=0; expected a whole number of at least 1"),
        ({"lr": 0.0}, "lr=0.0; expected a positive learning rate"),
        ({"lr": float("nan")}, "lr=nan; expected a positive learning rate"),
        ({"clip": 0.0}, "clip=0.0; expected a positive norm"),
        ({"kl_weight": 0.0}, "kl_weight=0.0; expected a positive number, 1 by rights"),
        ({"kl_annealing": 10}, "kl_annealing=10; expected a number of steps from 0 up, and below"),
        ({"schedule": "linear"}, "schedule='linear'; expected one of 'plateau', 'constant'"),
        ({"init": "svi"}, "init='svi'; expected one of 'fan_in', 'map', or a state dict"),
        ({"resume": True}, "resume=True goes on from a checkpoint; pass checkpoint=FOLDER too"),
        ({"batch_size": 0}, "batch_size=0; expected a whole number of at least 1"),
        ({"batch_size": 31}, "batch_size=31 for 30 rows; expected at most as many"),
        ({"guide": "norml"}, "guide 'norml' is unknown; use one of 'normal'"),
    ],
)
def test_options_out_of_range(toy, options, message):
    with pytest.raises(FitError) as caught:
        fit(Toy(), toy, **options)
    assert message in str(caught.value)


def no_plate(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)
    return x @ w


def local_latent(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", x.shape[0]):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        pyro.sample("y", dist.Normal(x @ w, noise), obs=y)
    return x @ w


def outside_factor(x, y=None):
    f = Linear(2)(x, y)
    pyro.factor("sum", -f.sum().square())
    return f


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_plate, "batch_size needs rows in plate 'data'"),
        (local_latent, "site 'noise' has one value for each row of plate 'data'"),
        (outside_factor, "site 'sum' is observed outside plate 'data'"),
    ],
)
def test_batches_where_their_scaling_would_be_wrong(toy, model, message):
    with pytest.raises(ModelError) as caught:
        fit(model, toy, batch_size=10)
    assert message in str(caught.value)


# How it ends.


def test_early_stopping_ends_on_a_plateau():
    posterior = fit_svi(
        Linear(1), *linear_data(20, 1), steps=20_000, lr=0.05, draws=5, progress=False
    )
    assert posterior.provenance["ended"] == "plateau"
    assert posterior.provenance["steps_taken"] < 5_000


def test_too_few_steps_are_told_where_the_fit_was_called(toy):
    with pytest.warns(ConvergenceWarning, match="had not levelled off after 20 steps") as told:
        fit(Toy(), toy, steps=20, early_stopping=True)
    assert [warning.filename for warning in told] == [__file__]


class Breaking(PyroModule):
    """A linear model with a constant shift, which fails where the shift is above 1."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, y=None):
        f = x @ self.w + self.shift
        with pyro.plate("data", x.shape[0]):
            noise = torch.where(self.shift > 1, torch.nan, 0.5)
            pyro.sample("y", dist.Normal(f, noise), obs=y)
        return f


@pytest.mark.parametrize("batch_size", [None, 15])
def test_nan_stops_at_its_step_and_returns_the_best_state(toy, monkeypatch, batch_size):
    """Fault 13: the data ask for a shift of 3, which the run reaches in steps of 0.02."""
    monkeypatch.setattr(training, "WINDOW", 10)
    with pytest.warns(ConvergenceWarning, match="the draws are those of the best state") as told:
        posterior = fit(Breaking(), (toy[0], toy[1] + 3), steps=200, lr=0.02, batch_size=batch_size)
    assert [warning.filename for warning in told] == [__file__]
    provenance, elbo = posterior.provenance, posterior.history["elbo"]
    bad = provenance["steps_taken"]
    assert f"the ELBO was not finite at step {bad} (site 'y')" in str(told[0].message)
    assert provenance["ended"] == "not finite"
    # Every step before the bad one is kept, and the best of the windows is the one returned.
    assert elbo.shape == (bad,)
    assert bool(elbo.isfinite().all())
    windows = elbo[: bad // 10 * 10].reshape(-1, 10).mean(1)
    assert provenance["best_step"] == 10 * (int(windows.argmax()) + 1)
    assert bool(posterior.draws["w"].isfinite().all())
    assert 0.5 < posterior.constants["shift"] < 1


@pytest.mark.parametrize("guide", ["normal", "lowrank", "kronecker"])
def test_nan_from_the_start_is_an_error_that_names_a_site(toy, guide):  # fault 13
    with pytest.raises(FitError) as caught:
        fit(Toy(), toy, guide=guide, init_scale=1e30)
    assert str(caught.value) == (
        "the ELBO was not finite at step 0 (site 'fc1.weight'), before any good state; lower lr or "
        "init_scale"
    )


def interrupt(monkeypatch, after):
    take = training.Training._take_step

    def interrupted(self, done):
        if done == after:
            raise KeyboardInterrupt
        return take(self, done)

    monkeypatch.setattr(training.Training, "_take_step", interrupted)


def test_ctrl_c_keeps_what_is_done(toy, monkeypatch):
    interrupt(monkeypatch, 7)
    with pytest.warns(ConvergenceWarning, match="interrupted after 7 of 10 steps") as told:
        posterior = fit(Toy(), toy)
    assert [warning.filename for warning in told] == [__file__]
    assert posterior.provenance["ended"] == "interrupted"
    assert posterior.history["elbo"].shape == (7,)
    assert posterior.draws_per_chain == 20


def test_ctrl_c_before_the_first_step_is_ctrl_c(toy, monkeypatch, unchanged):
    interrupt(monkeypatch, 0)
    model = Toy()
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        fit(model, toy)


@pytest.mark.cuda
def test_cuda_gives_what_the_cpu_gives():
    model, data = Linear(3), linear_data(50, 3)
    posteriors = [
        fit(
            model,
            data,
            guide="lowrank",
            steps=800,
            lr=0.05,
            device=device,
            batch_size=25,
            particles=2,
        )
        for device in ("cpu", "cuda")
    ]
    for first, second in zip(
        *(dense_moments(p.approximation)[:2] for p in posteriors), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=0.05, atol=1e-3)


def test_a_point_guide_is_called_one(toy):
    with pytest.warns(ConvergenceWarning, match="all draws of guide AutoDelta are one point"):
        posterior = fit_svi(
            Toy(), *toy, guide=AutoDelta, steps=50, early_stopping=False, draws=5, progress=False
        )
    assert any("an estimate, not a posterior" in note for note in posterior.provenance["notes"])


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_laplace_guide_has_the_curvature_at_the_mode():
    """On a linear model the Laplace approximation is the posterior; 2,000 draws."""
    model, (x, y) = Linear(2), linear_data(30, 2)
    posterior = fit_svi(
        model, x, y, guide=AutoLaplaceApproximation, steps=300, lr=0.05, draws=2000, progress=False
    )
    mean, covariance = model.exact(x, y)
    w = posterior.draws["w"][0].double()
    scale = covariance.diagonal().sqrt()
    assert ((w.mean(0) - mean).abs() < 0.1 * scale).all()  # Adam ends near the mode
    # A variance from S draws is off by sqrt(2 / S) of itself.
    torch.testing.assert_close(w.var(0) / scale**2, torch.ones(2).double(), atol=0.13, rtol=0)
    assert posterior.stats["log_q"].std() > 0
