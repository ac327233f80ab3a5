"""The training run: rates, KL weights, averages, the way back, starts, going on after a kill."""

import math

import pytest
import torch
from model_cases import Linear, Toy, linear_data
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal
from pyro.nn import PyroModule
from torch import nn

from pbnn import fit_svi
from pbnn.errors import ConvergenceWarning, FileError, FitError
from pbnn.front_door import bind
from pbnn.infer import training
from pbnn.infer.batches import Batches
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.guides import dense_moments
from pbnn.infer.guides import starts as guide_starts
from pbnn.infer.schedule import Plan, is_flat
from pbnn.infer.training import Training, shrinking

QUIET = {"progress": False, "early_stopping": False}


def fit(model, data, **options):
    return fit_svi(model, *data, **{**QUIET, "steps": 30, "draws": 20, **options})


class Counting:
    """A step that only counts: its one parameter is the number of steps, its terms are given."""

    compiled, rule, kl, estimator = False, "", {}, {}

    def __init__(self, terms=lambda k: (-1.0, 2.0)):
        self.parameters = [torch.zeros(2)]
        self.terms = terms
        self.calls = []

    def __call__(self, x, y, factor, *, kl_weight, lr):
        done = int(self.parameters[0][0])
        self.parameters[0].add_(1.0)
        self.calls.append((done, kl_weight, lr))
        return torch.tensor(self.terms(done))

    def culprit(self):
        return f" (at {int(self.parameters[0][0])})"

    def state(self):
        return {}

    def load(self, state):
        pass


def run(step, **options):
    plan = Plan(**{"early_stopping": False, **options})
    bound = bind(Linear(1), *linear_data(5, 1))
    run = Training(step, Batches(bound, None, 0), plan, dict)
    run.run(progress=False)
    return run


# Learning rates and KL weights.


def test_default_rate_is_constant_and_then_falls_to_a_hundredth():
    step = Counting()
    run(step, steps=300, lr=0.5)
    rates = [lr for _, _, lr in step.calls]
    assert rates[:150] == [0.5] * 150
    expected = [0.5 * 0.01 ** (k / 150) for k in range(150)]
    assert rates[150:] == pytest.approx(expected)


def test_rate_falls_from_the_plateau_on():
    step = Counting()
    done = run(step, steps=30_000, lr=0.5, early_stopping=True)
    assert done.ended == "plateau"
    assert (done.done, done.messages) == (2_000, [])  # ten windows that do not rise, and as many
    assert step.calls[999][2] == 0.5
    assert step.calls[-1][2] == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ("constant", lambda k: 0.5),
        ("cosine", lambda k: 0.25 * (1 + math.cos(math.pi * k / 100))),
        (lambda share: 1 - share, lambda k: 0.5 * (1 - k / 100)),
    ],
)
def test_other_schedules(schedule, rate):
    step = Counting()
    run(step, steps=100, lr=0.5, schedule=schedule)
    assert [lr for _, _, lr in step.calls] == pytest.approx([rate(k) for k in range(100)])


def test_a_schedule_is_recorded_by_name(toy):
    def falling(share):
        return 1 - share

    options = fit(Toy(), toy, schedule=falling).provenance["options"]
    assert options["schedule"].endswith("falling")


@pytest.mark.parametrize(("slope", "flat"), [(0.0, True), (0.05, False)])
def test_a_slow_rise_under_noise_is_no_plateau(slope, flat):
    """It does not stand out in five windows, whose mean has an error of 0.45, but does in 25."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, generator=generator)
    assert is_flat((noise + slope * torch.arange(100)).tolist()) is flat


def test_another_schedule_ends_on_the_plateau_itself():
    done = run(Counting(), steps=30_000, schedule="constant", early_stopping=True)
    assert (done.ended, done.done) == ("plateau", 1_000)


def test_weight_of_the_kl_rises_and_is_recorded():
    step = Counting()
    done = run(step, steps=200, kl_weight=0.5, kl_annealing=99)
    weights = [weight for _, weight, _ in step.calls]
    assert weights == pytest.approx([0.5 * min((k + 1) / 100, 1.0) for k in range(200)])
    history = done.history()
    torch.testing.assert_close(history["kl_weight"], torch.tensor(weights))
    assert bool((history["elbo"] == -3.0).all())  # the ELBO itself has no weight
    assert done.account()["kl_weight"] == 0.5


def test_no_plateau_counts_while_the_weight_rises():
    step = Counting()
    done = run(step, steps=30_000, kl_annealing=2_000, early_stopping=True)
    assert done.done == 6_000  # 2,000 and ten windows, and as many


def test_a_fit_that_is_stopped_while_the_weight_rises_says_so():
    def stop(k):
        if k == 50:
            raise KeyboardInterrupt
        return -1.0, 2.0

    done = run(Counting(stop), steps=300, kl_annealing=99)
    assert done.ended == "interrupted"
    assert done.account()["kl_weight"] == 0.5


def test_a_weight_other_than_one_tempers_the_posterior():
    """The optimum of E log-likelihood − w KL is the posterior of the likelihood to the 1 / w."""
    model, (x, y) = Linear(3), linear_data(40, 3, correlation=0.5)
    posterior = fit(
        model, (x, y), guide=AutoMultivariateNormal, kl_weight=4.0, steps=1_000, lr=0.03
    )
    assert posterior.provenance["options"]["kl_weight"] == posterior.provenance["kl_weight"] == 4.0
    assert "the KL divergence has weight 4, not 1" in posterior.provenance["notes"][0]
    mean, covariance, _ = dense_moments(posterior.approximation)
    exact_mean, exact = Linear(3, noise=model.noise * 2.0).exact(x, y)
    scale = exact.diagonal().sqrt()
    # As in test_closed_form_svi: what remains is the length of Adam's last steps.
    assert float(((mean - exact_mean) / scale).abs().max()) < 0.02
    assert float(((covariance - exact) / torch.outer(scale, scale)).abs().max()) < 0.02


# Averages.


def test_average_is_the_mean_over_the_last_phase_at_a_constant_rate():
    step = Counting()
    done = run(step, steps=300, lr=0.5, average=True)
    assert {lr for _, _, lr in step.calls} == {0.5}
    assert done.averaged == 15
    # The counts 160, 170, …, 300.
    torch.testing.assert_close(step.parameters[0], torch.full((2,), 230.0))


def test_averaging_takes_the_noise_of_small_batches_off():
    """The mean-field optimum is known; averaged scales lie nearer to it than the last ones."""
    model, data = Linear(3, noise=1.0), linear_data(200, 3, noise=1.0, correlation=0.5)
    optimum = torch.linalg.inv(model.exact(*data)[1]).diagonal().rsqrt()

    def errors(**options):
        found = []
        for seed in range(3):
            posterior = fit(
                model, data, steps=900, lr=0.03, batch_size=10, particles=1, seed=seed, **options
            )
            scale = dense_moments(posterior.approximation)[1].diagonal().sqrt().double()
            found.append((scale / optimum).log())
        return torch.stack(found).square().mean().sqrt()

    assert errors(average=True) < 0.7 * errors(schedule="constant")


# What is not finite.


@pytest.mark.parametrize("bad", [100, 250, 399])
def test_it_stops_at_the_first_bad_step_and_goes_back_to_the_best_window(bad):
    """The ELBO rises for two windows and falls after; the culprit is looked for at the bad step."""

    def terms(k):
        return math.nan if k == bad else -abs(k - 199.0), 0.0

    step = Counting(terms)
    done = run(step, steps=400)
    best = min(200, bad // 100 * 100)
    assert (done.ended, done.done, done.best_step) == ("not finite", bad, best)
    assert float(step.parameters[0][0]) == best
    assert done.messages == [
        f"the ELBO was not finite at step {bad} (at {bad}); the draws are those of the best state "
        f"so far, after {best} steps; lower lr or init_scale"
    ]
    assert done.history()["elbo"].shape == (bad,)


def test_parameters_that_are_not_finite_are_found_too():
    step = Counting()

    def poison(k):
        if k == 150:
            step.parameters[0][1] = math.inf
        return -1.0, 2.0

    step.terms = poison
    done = run(step, steps=400)
    assert (done.ended, done.best_step) == ("not finite", 100)
    assert bool(step.parameters[0].isfinite().all())


def test_in_the_first_window_parameters_are_kept_more_often():
    step = Counting(lambda k: (math.nan if k == 50 else -1.0, 2.0))
    done = run(step, steps=200)
    assert (done.ended, done.done, done.best_step) == ("not finite", 50, 32)
    assert float(step.parameters[0][0]) == 32


def test_nothing_good_is_an_error():
    with pytest.raises(FitError, match=r"at step 0 \(at 0\), before any good state"):
        run(Counting(lambda k: (math.nan, 2.0)), steps=50)


def test_scales_that_shrink_below_a_thousandth_and_still_fall():
    falling = [1e-2, 5e-3, 2e-3, 9e-4, 5e-4]
    scales = {"a": falling, "b": [9e-4] * 5, "c": [v * 100 for v in falling], "d": [1e-5] * 2}
    assert shrinking(scales) == {"a": 5e-4}


def test_a_collapsing_guide_is_told_in_the_fit(toy):
    """It starts at the exact mean, wide for its likelihood, and is stopped on its way down."""
    model = Linear(2, noise=1e-4)
    mean, _ = model.exact(*toy)
    options = {"init": {"w": mean}, "init_scale": 1e-3, "steps": 600, "lr": 1e-2}
    with pytest.warns(ConvergenceWarning, match="scale of site 'w' is .* and was still falling"):
        posterior = fit(model, toy, **options)
    assert len(posterior.provenance["scales"]["w"]) == 6


# Going on after a kill.


class Killed(Exception):
    pass


def killed(monkeypatch, after):
    take = Training._take_step

    def killing(self, done):
        if done == after:
            raise Killed
        return take(self, done)

    monkeypatch.setattr(Training, "_take_step", killing)


def tensors(posterior):
    parts = ("draws", "stats", "history", "constants")
    found = {f"{part}.{k}": v for part in parts for k, v in getattr(posterior, part).items()}
    return found | posterior.approximation["tensors"]


@pytest.mark.parametrize(
    "options",
    [
        {"guide": "kronecker", "steps": 90, "batch_size": 7, "kl_annealing": 30},
        {"guide": "normal", "steps": 320, "average": True},  # long enough to be traced
        {"guide": "normal", "steps": 3_000, "early_stopping": True, "lr": 0.1},
    ],
    ids=["batches", "traced", "plateau"],
)
def test_a_run_that_goes_on_gives_the_same_bits(toy, tmp_path, monkeypatch, options):
    monkeypatch.setattr(training, "WINDOW", 20)
    monkeypatch.setattr(training, "CHECKPOINT_WINDOWS", 2)

    class Model(Toy):  # with a constant, that is learned on the way
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def network(self, x):
            return super().network(x) + self.shift

    whole = fit(Model(), toy, **options)
    with monkeypatch.context() as patch:
        killed(patch, after=75 if options["steps"] < 3_000 else whole.history["elbo"].numel() - 25)
        with pytest.raises(Killed):
            fit(Model(), toy, checkpoint=tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    resumed = fit(Model(), toy, checkpoint=tmp_path, resume=True, **options)
    again = fit(Model(), toy, checkpoint=tmp_path, resume=True, **options)
    for other in (resumed, again):
        for name, value in tensors(whole).items():
            assert torch.equal(value, tensors(other)[name]), name
        changing = ("created", "versions")
        for key in set(whole.provenance) - set(changing):
            assert other.provenance[key] == whole.provenance[key], key


def test_a_checkpoint_of_another_run_is_refused(toy, tmp_path):
    fit(Toy(), toy, checkpoint=tmp_path)
    with pytest.raises(FileError, match="holds a checkpoint; pass resume=True"):
        fit(Toy(), toy, checkpoint=tmp_path)
    for other, word in [({"lr": 0.1}, "lr"), ({"seed": 1}, "seed"), ({"init_scale": 0.1}, "init")]:
        with pytest.raises(FileError, match=f"another run \\({word}"):
            fit(Toy(), toy, checkpoint=tmp_path, resume=True, **other)
    with pytest.raises(FileError, match="another run"):
        fit(Toy(), (toy[0], toy[1] + 1), checkpoint=tmp_path, resume=True)


# Starts.


def start(model, data, **options):
    """Return the mean of the guide by site before it has learned anything, and its posterior."""
    posterior = fit(model, data, steps=1, lr=1e-12, **options)
    mean, _, names = dense_moments(posterior.approximation)
    sizes = [math.prod(shape) for _, shape in posterior.approximation["sites"]]
    return dict(zip(names, mean.split(sizes), strict=True)), posterior


def test_map_start_is_uphill():
    model, data = Linear(3), linear_data(40, 3)
    found, _ = start(model, data, init="map")
    exact, covariance = model.exact(*data)
    error = (found["w"] - exact) / covariance.diagonal().sqrt()
    assert float(error.abs().max()) < 0.1  # in units of the posterior's scale


def test_map_start_repeats_and_differs_by_seed(toy, monkeypatch):
    monkeypatch.setattr(guide_starts, "_MAP_STEPS", 20)
    first, second, other = (start(Toy(), toy, init="map", seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(first["fc1.weight"], second["fc1.weight"])
    assert not torch.equal(first["fc1.weight"], other["fc1.weight"])


class Mixed(Toy):
    """A network with priors, a trunk without, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.trunk, self.norm = PyroModule[nn.Linear](2, 2), nn.BatchNorm1d(2)

    def network(self, x):
        return super().network(self.norm(self.trunk(x)))


@pytest.mark.parametrize("key", ["sigma", "sigma_unconstrained"])
def test_start_from_the_state_of_a_trained_network(toy, key):
    """Sites, constants and buffers come from it; a constrained site through its bijection."""
    state = {
        "fc1.weight": torch.randn(5, 2),
        "fc2.bias": torch.tensor([0.3]),
        key: torch.tensor(0.2 if key == "sigma" else math.log(0.2)),
        "trunk.weight": torch.eye(2),
        "norm.running_mean": torch.tensor([1.0, 2.0]),
        "norm.num_batches_tracked": torch.tensor(7),
    }
    found, posterior = start(Mixed(), toy, init=state)
    torch.testing.assert_close(found["fc1.weight"], state["fc1.weight"].flatten())
    torch.testing.assert_close(found["fc2.bias"], state["fc2.bias"])
    assert float(found["sigma"]) == pytest.approx(math.log(0.2))
    torch.testing.assert_close(posterior.constants["trunk.weight"], torch.eye(2))
    assert torch.equal(posterior.buffers["norm.running_mean"], state["norm.running_mean"])
    assert posterior.provenance["options"]["init"] == "state_dict"
    default, _ = start(Mixed(), toy)
    assert set(default) == set(found)  # sites that the state lacks start as they would without it


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fc3.weight": torch.zeros(1)}, "init has 'fc3.weight', which the model does not; it has"),
        ({"fc1.weight": torch.zeros(2, 5)}, "init['fc1.weight'] has shape (2, 5); expected (5, 2)"),
        ({"sigma": torch.tensor(-1.0)}, "init['sigma'] lies outside the support of its site"),
        ({"trunk.weight": torch.eye(2)}, "init has no value for any site of the model"),
    ],
)
def test_a_state_that_does_not_fit(toy, state, message):
    with pytest.raises(FitError) as caught:
        fit(Mixed(), toy, init=state)
    assert message in str(caught.value)


def test_a_start_that_a_guide_cannot_take(toy):
    with pytest.raises(FitError, match="init has no effect on a ready guide"):
        fit(Toy(), toy, guide=AutoMultivariateNormal(Toy()), init="map")


@pytest.mark.parametrize(
    "guide",
    ["normal", "lowrank", "kronecker", "layer_lowrank", {"*": "full"}, AutoMultivariateNormal],
)
def test_scales_start_by_fan_in(toy, guide):
    posterior = fit(Toy(hidden=16), toy, guide=guide, init_scale="fan_in", steps=1, lr=1e-12)
    scales = GaussianCovariance(posterior.approximation).scales()
    for name, fan_in in {"fc1.weight": 2, "fc2.weight": 16, "sigma": 1}.items():
        expected = torch.full_like(scales[name], 0.02 / fan_in**0.5)
        torch.testing.assert_close(scales[name], expected, rtol=1e-4, atol=0.0)


def test_scales_that_cannot_start_by_fan_in(toy):
    for options in ({"init_scale": "prior"}, {"guide": AutoMultivariateNormal(Toy())}):
        with pytest.raises(FitError, match="expected a number, or 'fan_in'"):
            fit(Toy(), toy, **{"init_scale": "fan_in", **options})
    with pytest.raises(FitError, match="does not know the scales of AutoIAFNormal"):
        fit(Toy(), toy, guide=lambda model: AutoIAFNormal(model), init_scale="fan_in")
