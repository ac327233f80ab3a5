"""Uncertainty scores: each against its formula on the draws, alone and added up."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, linear_data, prior_posterior
from pyro.nn import PyroModule, PyroSample

from pbnn.errors import DataError
from pbnn.evaluate.features import FeatureDensity
from pbnn.evaluate.field import grid_rows, ray_rows
from pbnn.evaluate.scores import combined, uncertainty_scores
from pbnn.prediction import predict


class Softmax(PyroModule):
    """A linear classifier into three classes."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))

    def forward(self, x, y=None):
        f = x @ self.w + 5.0  # a level that the likelihood does not see
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f


class TwoOutputs(PyroModule):
    """A linear model with two outputs of unequal noise."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, torch.tensor([0.1, 1.0])).to_event(1), obs=y)
        return f


def test_scores_of_classes_are_their_formulas():
    x = torch.randn(600, 2)  # more rows than a block holds
    model = Softmax()
    posterior = prior_posterior(model, x, torch.arange(600) % 3)
    scores = uncertainty_scores(model, posterior, x)
    f = (x @ posterior.draws["w"][0] + 5.0).double()
    p = f.softmax(-1)
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(1)
    expected = {
        "epistemic": (f - f.mean(-1, keepdim=True)).var(0, correction=0).mean(-1).sqrt(),
        "total": (mean * (1 - mean)).sum(1).sqrt(),
        "entropy": entropy,
        "mutual_information": entropy + (p * p.log()).sum(-1).mean(0),
        "max_probability": 1 - mean.amax(1),
        "energy": -f.exp().sum(-1).log().mean(0),
    }
    assert list(scores) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(scores[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_scores_of_numbers_are_their_formulas():
    x = torch.randn(50, 2)
    model = TwoOutputs()
    posterior = prior_posterior(model, x, torch.randn(50, 2))
    scores = uncertainty_scores(model, posterior, x)
    variance = (x @ posterior.draws["w"][0]).double().var(0, correction=0)
    np.testing.assert_allclose(scores["epistemic"], variance.mean(1).sqrt(), rtol=1e-4)
    total = (variance + torch.tensor([0.01, 1.0])).mean(1).sqrt()
    np.testing.assert_allclose(scores["total"], total, rtol=1e-4)
    assert list(scores) == ["epistemic", "total"]


class Growing(PyroModule):
    """A linear model whose noise grows with x."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.05 + 0.2 * x[:, 0].abs()), obs=y)
        return f


@pytest.mark.parametrize(("model", "columns"), [(TwoOutputs(), 2), (Growing(), 1)])
def test_epistemic_and_aleatoric_parts_add_up_to_the_total(model, columns):  # fault 22
    x = torch.randn(40, columns).double()
    y = torch.zeros(40, 2).double() if columns == 2 else torch.zeros(40).double()
    posterior = prior_posterior(model, x, y)
    scores = uncertainty_scores(model, posterior, x)
    prediction = predict(model, posterior, x)
    noise = prediction.aleatoric_scale.reshape(40, -1).square().mean(1)
    total = scores["epistemic"] ** 2 + noise.numpy()
    np.testing.assert_allclose(scores["total"] ** 2, total, rtol=0, atol=1e-6)
    expected = [0.01, 1.0] if columns == 2 else (0.05 + 0.2 * x.abs()) ** 2
    np.testing.assert_allclose(
        prediction.aleatoric_scale.reshape(40, -1) ** 2,
        torch.as_tensor(expected).double().expand(40, columns),
        rtol=1e-6,
    )


def test_a_prediction_at_hand_is_not_made_again(monkeypatch):
    x, y = linear_data(20, 2)
    model = Linear(2)
    posterior = prior_posterior(model, x, y)
    prediction = predict(model, posterior, x)
    expected = uncertainty_scores(model, posterior, x)
    monkeypatch.setattr("pbnn.evaluate.scores.predict", None)
    found = uncertainty_scores(model, posterior, x, prediction=prediction)
    np.testing.assert_array_equal(found["total"], expected["total"])


def test_the_field_of_a_linear_model_is_exact():
    """Along rays from the origin the spread grows in proportion; on a grid it is sqrt(xᵀ S x)."""
    x, y = linear_data(50, 2)
    x = x - x.mean(0)
    model = Linear(2)
    posterior = prior_posterior(model, x, y)
    w = posterior.draws["w"][0].double().numpy()
    covariance = np.cov(w.T, bias=True)
    rays, away = ray_rows(x, rays=3, points=6)
    for rows in rays:
        u = uncertainty_scores(model, posterior, torch.tensor(rows))["epistemic"]
        np.testing.assert_allclose(u, u[-1] * away / away[-1], rtol=1e-3, atol=1e-5)
    grid = grid_rows(x, features=(0, 1), points=5)
    u = uncertainty_scores(model, posterior, torch.tensor(grid))["epistemic"]
    expected = np.sqrt(((grid @ covariance) * grid).sum(1))
    np.testing.assert_allclose(u, expected, rtol=1e-4, atol=1e-6)


def test_a_density_joins_and_adds_up_by_the_scales_of_the_reference():
    x, y = linear_data(100, 2)
    model = Linear(2)
    posterior = prior_posterior(model, x, y)
    density = FeatureDensity().fit(model, posterior, x)
    at_home, away = (
        uncertainty_scores(model, posterior, rows, density=density) for rows in (x, 4 * x)
    )
    np.testing.assert_array_equal(away["density"], density.score(4 * x))
    total = combined(away, ["epistemic", "density"], at_home)
    parts = [
        (away[name] - at_home[name].mean()) / at_home[name].std()
        for name in ("epistemic", "density")
    ]
    np.testing.assert_allclose(total, sum(parts))
    # What is judged together changes no row's score.
    few = {name: value[:7] for name, value in away.items()}
    np.testing.assert_array_equal(combined(few, ["epistemic", "density"], at_home), total[:7])
    constant = {"epistemic": np.zeros(3)}
    assert combined({"epistemic": np.ones(2)}, ["epistemic"], constant).tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="no score 'energy'; expected some of"):
        combined(away, ["energy"], at_home)
