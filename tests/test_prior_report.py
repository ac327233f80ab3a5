"""What a prior says: exact for linear models, its faults by name, before a fit and after one."""

import math
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.axes import Axes
from model_cases import Linear, Toy, linear_data
from network_cases import CASES
from pyro.nn import PyroModule
from torch import nn

import pbnn
from pbnn import cli
from pbnn.errors import DataError, ModelError
from pbnn.evaluate.functions import functions_of
from pbnn.evaluate.prior_report import prior_report
from pbnn.plots import plot_prior

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(scope="module")
def sine():
    """Forty rows of a sine, standardised."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(40, generator=generator)
    return x, (y - y.mean()) / y.std()


def network(scale, **options):
    options = {"hidden": 16, "weight_scale": scale, "bias_scale": scale, **options}
    return pbnn.load_model(MODELS / "regression.py", in_features=1, **options)


FAULTS = {1e-6: ["pinned"], 1.0: [], 10.0: ["wide", "saturated"]}
WHY = {1e-6: "pins E[y] to zero", 10.0: "is absurd"}


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
@pytest.mark.parametrize("scale", FAULTS)
def test_scales_on_the_sine_before_and_after_the_fit(sine, scale):
    """Of prior scales of 1e-6, 1 and 10 the first and the last are faulty, and it says why."""
    model = network(scale)
    before = prior_report(model, *sine)
    fit = pbnn.fit_svi(
        model, *sine, steps=40, draws=50, compile=False, progress=False, early_stopping=False
    )
    after = pbnn.prior_report(model, *sine, posterior=fit)
    for report in (before, after):
        assert [fault.name for fault in report.faults] == FAULTS[scale]
        assert WHY.get(scale, "no fault found in the prior") in str(report)
    assert "After the fit" not in str(before)
    assert str(after).count("After the fit") == len(FAULTS[scale])
    assert list(before.table.columns) == ["prior"]
    assert list(after.table.columns) == ["prior", "posterior"]
    if scale == 1e-6:
        assert "it explains 0% of y" in after.faults[0].after


def test_draws_of_the_prior_are_found_at_their_prior(sine):
    """As the posterior of a fit that learned nothing: other draws of the same prior."""
    model = network(1e-6)
    nothing = pbnn.sample_prior(model, sine[0], draws=800, seed=7)
    report = prior_report(model, *sine, posterior=nothing, draws=800)
    assert (report.sites["at_prior"] > 0.7).all()
    assert "of its values are where their prior has them" in report.faults[0].after


def test_weights_without_scale_make_constants(sine):
    model = network(1e-6, bias_scale=1.0)
    (fault,) = prior_report(model, *sine).faults
    assert fault.name == "flat"
    assert "constant" in fault.why


def test_linear_model_is_exact():
    """Scale of f, KL and likelihood of a linear model, within 4 Monte Carlo errors."""
    draws, noise = 1000, 0.5
    x, y = linear_data(30, 3, noise=noise)
    report = prior_report(Linear(3, noise=noise), x, y, draws=draws)
    scales = x.square().sum(1).sqrt()
    error = 4 / (2 * draws) ** 0.5
    quantities = report.table["prior"]
    assert quantities["scale of f, largest"] == pytest.approx(float(scales.max()), rel=error)
    assert quantities["scale of f, median"] == pytest.approx(float(scales.median()), rel=error)
    information = 0.5 * torch.linalg.eigvalsh(x.T @ x / noise**2).log1p().sum()
    # Each ½ log of an eigenvalue of a covariance over draws has an error of ½ sqrt(2 / draws).
    assert quantities["KL"] == pytest.approx(float(information), abs=4 * 0.5 * (6 / draws) ** 0.5)
    likelihood = -15 * math.log(2 * math.pi * math.e * noise**2)
    share = quantities["KL"] / (quantities["KL"] - likelihood)
    assert quantities["KL share"] == pytest.approx(share, rel=4 * (15 / draws) ** 0.5 / 20)
    assert quantities["noise"] == pytest.approx(noise)
    assert not report.faults
    bands = report.bands.loc[(0, 0)]
    # The error of a 95% quantile: sqrt(p (1 - p) / draws) over the Normal's density there.
    spread = 4 * float(scales[0]) * (0.95 * 0.05 / draws) ** 0.5 / 0.103
    assert bands["f 95%"] == pytest.approx(1.645 * float(scales[0]), abs=spread)
    assert bands["y 95%"] > bands["f 95%"]


class Activations(PyroModule):
    """Units whose pre-activations are x times one weight: a tanh module, then a sigmoid by name."""

    def __init__(self):
        super().__init__()
        self.tanh = nn.Tanh()
        self.w = pyro.nn.PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, x, y=None):
        f = self.tanh(x * self.w) + torch.sigmoid(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        return f


def test_saturated_values_are_counted_by_call():
    """|tanh(x w)| > 0.99 where |w| > atanh(0.99) / |x|; sigmoid(x) > 0.995 where x > 5.293."""
    x, y = torch.tensor([1.0, 5.0, 6.0, 8.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    model = Activations()
    prior = pbnn.sample_prior(model, x, draws=2000)
    found = functions_of(model, prior, x, y)
    # The sigmoid inside Bernoulli(logits) is no hidden unit, and is not counted.
    assert list(found.saturated) == ["tanh 1", "sigmoid 2"]
    assert found.saturated["sigmoid 2"] == pytest.approx(0.5)
    bound = math.atanh(0.99) / x.double()
    expected = 2 * (1 - dist.Normal(0.0, 1.0).cdf(bound)).mean()
    w = prior.draws["w"].flatten().double()
    assert found.saturated["tanh 1"] == pytest.approx(
        float((w[:, None].abs() > bound).double().mean())
    )
    assert found.saturated["tanh 1"] == pytest.approx(float(expected), abs=4 * 0.5 / 2000**0.5)
    torch.testing.assert_close(found.certainty, (found.location[..., 0] - 0.5).abs() + 0.5)


def test_logits_too_wide_are_sure_of_a_class():
    x = torch.randn(20, 2)
    y = (x[:, 0] > 0).long()
    wide = pbnn.load_model(MODELS / "classification.py", in_features=2, weight_scale=30.0)
    report = prior_report(wide, x, y, draws=100)
    assert report.faults[0].name == "wide"
    assert "absurd for logits" in report.faults[0].why
    usual = pbnn.load_model(MODELS / "classification.py", in_features=2)
    assert not prior_report(usual, x, y, draws=100).faults


def test_unstandardised_target_is_named(toy):
    x, y = toy
    (fault,) = prior_report(Toy(), x, 500 + 100 * y, draws=100).faults
    assert fault.name == "pinned"
    assert "standardise y" in fault.why


def test_constants_are_not_yet_what_they_will_be():
    """A rank-1 network's weights are constants: only after a fit can its prior be too narrow."""
    model, x, y = CASES["rank1"].build()
    assert not prior_report(model, x, y, draws=30).faults
    nothing = pbnn.sample_prior(model, x, draws=30)
    (fault,) = prior_report(model, x, y, draws=30, posterior=nothing).faults
    assert fault.name == "pinned"


def test_gates_of_a_recurrent_layer_are_taken_together():
    model, x, y = CASES["recurrent"].build()
    table = prior_report(model, x, y, draws=30).table
    saturated = [name for name in table.index if name.startswith("saturated")]
    assert saturated == ["saturated, every sigmoid", "saturated, every tanh"]


def test_refuses_few_draws_and_no_input(toy):
    with pytest.raises(ModelError, match="x is None"):
        prior_report(Toy(), None, toy[1])
    with pytest.raises(DataError, match="draws is 5; expected 20 or more"):
        prior_report(Toy(), *toy, draws=5)


def test_picture_and_global_state(sine, unchanged):
    model = network(1.0)
    with unchanged(model):
        report = prior_report(model, *sine, draws=30)
    x, y = (value.numpy() for value in sine)
    axes = plot_prior(report.f[..., 0], x[:, 0], points=(x[:, 0], y), functions=3)
    assert isinstance(axes, Axes)
    labels = axes.get_legend_handles_labels()[1]
    assert labels[-1] == "3 draws"
    assert len(axes.lines) == 1 + 1 + 3  # mean, data, draws
    assert np.isclose(axes.lines[-1].get_ydata(), report.f[2, :, 0]).all()


def test_command_line(tmp_path, capsys):
    arguments = [
        "prior", MODELS / "regression.py", "--dataset", "diabetes", "--set", "weight_scale=20",
        "--set", "hidden=5", "--draws", "50", "--feature", "bmi", "--out", tmp_path / "p.png",
    ]  # fmt: skip
    assert cli.main([str(a) for a in arguments]) == 0
    printed = capsys.readouterr().out
    assert "fault wide: the prior scale of f" in printed
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert cli.main([str(a) for a in arguments[:-4]] + ["--feature", "no", "--out", "p.png"]) == 2
    assert "no such column of x" in capsys.readouterr().err
