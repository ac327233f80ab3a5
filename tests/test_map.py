"""fit_map: closed forms of its maximum, what each option does, and what stops it."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data, set_priors
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pbnn
from pbnn.errors import FitError, ModelError
from pbnn.infer import points
from pbnn.infer.density import Density

QUICK = {"steps": 30, "progress": False}


def fit(model, x, y, **options):
    return pbnn.fit_map(model, x, y, **{**QUICK, **options})


class Noise(PyroModule):
    """Rows of N(0, sigma), sigma ~ HalfNormal(1)."""

    def __init__(self):
        super().__init__()
        self.sigma = PyroSample(dist.HalfNormal(1.0))

    def forward(self, x, y=None):
        sigma = self.sigma
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(torch.zeros(x.shape[0]), sigma), obs=y)
        return x[:, 0]


class Normed(PyroModule):
    """Two BatchNorm layers, one of them fed by the other, between layers with priors."""

    def __init__(self):
        super().__init__()
        self.norm1, self.fc1 = nn.BatchNorm1d(2), PyroModule[nn.Linear](2, 4)
        self.norm2, self.fc2 = nn.BatchNorm1d(4), PyroModule[nn.Linear](4, 1)
        for layer in (self.fc1, self.fc2):
            set_priors(layer)

    def network(self, x):
        return self.fc2(torch.tanh(self.norm2(self.fc1(self.norm1(x))))).squeeze(-1)

    def forward(self, x, y=None):
        f = self.network(x)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


class Branching(Linear):
    """Its density reads a value of its weights, so that it cannot be traced."""

    def forward(self, x, y=None):
        w = self.w
        f = x @ (w if float(w[0].detach()) > -1e6 else -w)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f


@pytest.mark.parametrize("batch_size", [None, 10])
def test_linear_model_reaches_its_exact_mode(batch_size):
    x, y = linear_data(40, 3)
    options = {"steps": 400, "lr": 0.1, "batch_size": batch_size, "dtype": torch.float64}
    posterior = fit(Linear(3), x, y, **options)
    mean, covariance = Linear(3).exact(x, y)
    # The rate falls to 0: what is left is the optimiser's distance, in posterior scales.
    off = (posterior.draws["w"][0, 0] - mean) / covariance.diagonal().sqrt()
    assert off.abs().max() < (1e-4 if batch_size is None else 0.1)


@pytest.mark.parametrize("jacobian", [False, True])
def test_mode_of_a_scale_is_that_of_the_density_asked_for(jacobian):
    # d/dσ of −n log σ − S/2σ² − σ²/2, with log σ added for the Jacobian, is 0 at
    # σ² = (−m + sqrt(m² + 4 S))/2, m = n − 1 with it and n without.
    y = torch.linspace(-1, 1, 6).double()
    posterior = fit(Noise(), y[:, None], y, steps=400, lr=0.05, jacobian=jacobian)
    m, s = 6 - jacobian, y.square().sum()
    expected = ((-m + (m**2 + 4 * s).sqrt()) / 2).sqrt()
    torch.testing.assert_close(posterior.draws["sigma"][0, 0], expected, rtol=1e-4, atol=0.0)


def test_point_is_one_draw_with_its_log_joint(toy, unchanged):
    model = Toy()
    with unchanged(model):
        posterior = fit(model, *toy, seed=3)
    assert (posterior.chains, posterior.draws_per_chain) == (1, 1)
    assert (posterior.method, posterior.markov) == ("map", False)
    bound = pbnn.front_door.bind(model, *toy)
    density = Density(bound, compile=False)
    point = density.unconstrain({k: v[0] for k, v in posterior.draws.items()})
    torch.testing.assert_close(density.log_density(point), posterior.stats["lp"][0])
    history = posterior.history["log_joint"]
    assert history.shape == (30,)
    assert history[-1] > history[0]
    assert posterior.provenance["options"]["schedule"] == "cosine"


def test_same_seed_gives_the_same_bits_and_another_does_not(toy):
    a, b, c = (fit(Toy(), *toy, seed=s, batch_size=7).draws["fc1.weight"] for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_average_is_the_mean_of_every_tenth_point_of_the_second_half():
    x, y = linear_data(20, 3)
    options = {"schedule": "constant", "batch_size": 5, "dtype": torch.float64}
    # The points after 30 and 40 of 40 steps are where runs of 30 and 40 steps end.
    ends = [fit(Linear(3), x, y, steps=steps, **options).draws["w"] for steps in (30, 40)]
    averaged = fit(Linear(3), x, y, steps=40, average=True, batch_size=5, dtype=torch.float64)
    torch.testing.assert_close(averaged.draws["w"], sum(ends) / 2)
    assert averaged.provenance["options"]["schedule"] == "constant"


def test_sharpness_aware_step_takes_the_gradient_uphill():
    # Foret et al. 2021, algorithm 1: θ − lr ∇L(θ + ρ ∇L/|∇L|), here with L quadratic.
    x, y = (value.double() for value in linear_data(20, 3))
    start = torch.tensor([0.5, -1.0, 2.0]).double()

    def gradient(w):
        return (x.T @ (x @ w - y) / 0.25 + w) / 20

    uphill = 0.3 * gradient(start) / gradient(start).norm()
    expected = start - 0.01 * gradient(start + uphill)
    options = {"optimiser": "sgd", "steps": 1, "lr": 0.01, "sharpness": 0.3}
    found = fit(Linear(3), x, y, init={"w": start}, **options)
    torch.testing.assert_close(found.draws["w"][0, 0], expected)


def test_batch_norm_statistics_are_those_of_training_mode_at_the_point(unchanged):
    x = 2 * torch.randn(40, 2) + 1
    y = x[:, 0] - x[:, 1]
    model = Normed()
    with unchanged(model):
        posterior = fit(model, x, y, batch_size=8)
    draws = {name: value[0, 0] for name, value in posterior.draws.items()}
    norms = [nn.BatchNorm1d(2, momentum=1.0), nn.BatchNorm1d(4, momentum=1.0)]
    with torch.no_grad():
        for norm, name in zip(norms, ("norm1", "norm2"), strict=True):
            norm.load_state_dict(
                {k: posterior.constants[f"{name}.{k}"] for k in ("weight", "bias")}, strict=False
            )
        h = norms[0](x)
        norms[0].eval()
        # The second layer sees what the first gives in eval mode, with the statistics just found.
        h = nn.functional.linear(norms[0](x), draws["fc1.weight"], draws["fc1.bias"])
        norms[1](h)
    for norm, name in zip(norms, ("norm1", "norm2"), strict=True):
        for key in ("running_mean", "running_var"):
            torch.testing.assert_close(
                posterior.buffers[f"{name}.{key}"], getattr(norm, key), rtol=1e-4, atol=1e-5
            )
    # What was trained is what predicts: f explains y with these statistics.
    longer = fit(model, x, y, steps=200, lr=0.05)
    assert (pbnn.predict(model, longer, x, quantiles=()).mean - y).std() < 0.3 * y.std()


def test_many_rows_give_batch_norm_some_of_them_and_other_roads_can_have_its_statistics(
    monkeypatch,
):
    monkeypatch.setattr(points, "_STATISTICS_ROWS", 10)
    x = torch.randn(39, 2)
    posterior = fit(Normed(), x, x[:, 0], steps=1)
    torch.testing.assert_close(posterior.buffers["norm1.running_mean"], x[::4].mean(0))
    bound = pbnn.front_door.bind(Normed(), x, x[:, 0], constants=posterior.first_state())
    for name, value in {**bound.constants(), **bound.buffers()}.items():
        assert torch.equal(value, posterior.first_state()[name])


def test_one_row_of_a_channel_has_no_batch_norm_statistics():
    x = torch.randn(1, 2)
    with pytest.raises(FitError, match="'norm1' has one value of each channel"):
        fit(Normed(), x, x[:, 0])


def test_model_that_cannot_be_traced_gives_the_same_numbers():
    x, y = linear_data(20, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the density of the draws says that it is slow
        found, expected = (fit(c(3), x, y, batch_size=5) for c in (Branching, Linear))
    assert found.provenance["compile_rule"].startswith("through Python")
    torch.testing.assert_close(found.draws["w"], expected.draws["w"])
    with pytest.raises(FitError, match="compile=True, but the step cannot be traced"):
        fit(Branching(3), x, y, compile=True)


def test_log_joint_that_is_not_finite_stops_the_road(toy):
    with pytest.raises(FitError, match=r"not finite at step 1 \(site 'fc1.weight'\); lower lr"):
        fit(Toy(), *toy, lr=1e30)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, FitError, "steps=0; expected a whole number of at least 1"),
        ({"lr": 0.0}, FitError, "lr=0.0; expected a positive learning rate"),
        ({"optimiser": "rmsprop"}, FitError, "optimiser='rmsprop'; expected one of 'adam', 'sgd'"),
        ({"schedule": "step"}, FitError, "schedule='step'; expected one of 'cosine', 'constant'"),
        ({"schedule": lambda share: -1.0}, FitError, "schedule returned -1.0 at share 0 "),
        ({"sharpness": -0.1}, FitError, "sharpness=-0.1; expected a radius from 0 up"),
        ({"batch_size": 31}, FitError, "batch_size=31 for 30 rows"),
        ({"seed": -1}, FitError, "seed=-1"),
        ({"init": {"fc9": torch.ones(1)}}, FitError, "init has 'fc9', which the model does not"),
        ({"dtype": torch.float16}, ModelError, "dtype is torch.float16"),
    ],
)
def test_options_out_of_range_are_refused(toy, options, error, message):
    with pytest.raises(error) as caught:
        fit(Toy(), *toy, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
