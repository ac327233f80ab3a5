"""Comparisons of posteriors on held-out rows, against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, linear_data
from pyro import poutine

from pbnn import compare
from pbnn.data import Units
from pbnn.errors import DataError
from pbnn.evaluate.comparison import Comparison
from pbnn.infer.posterior import Posterior

REGRESSION = [
    "lpd",
    "lpd_se",
    "rmse",
    "coverage_90",
    "scale_ratio",
    "epistemic_ratio",
    "epistemic_ratio_5",
    "epistemic_ratio_95",
    "wasserstein",
    "draws",
    "seconds",
]


def posterior(w, *, markov=True, seconds=1.0):
    """Return draws `(chain, draw, …)` of site w as a posterior."""
    return Posterior(
        draws={"w": w},
        stats={"lp": torch.randn(w.shape[:2])},
        method="nuts" if markov else "svi",
        markov=markov,
        seconds=seconds,
    )


@pytest.fixture(scope="module")
def case():
    """A linear model, held-out rows, and draws of its exact posterior in four chains."""
    torch.manual_seed(0)
    model, (x, y) = Linear(3), linear_data(60, 3)
    mean, covariance = model.exact(x[:20], y[:20])
    w = dist.MultivariateNormal(mean, covariance).sample((4, 500)).float()
    return model, (x[20:], y[20:]), (mean, covariance), posterior(w, seconds=2.0)


def test_scores_are_those_of_the_exact_posterior(case):
    """Log predictive density N(x m, noise² + x C xᵀ), RMSE and coverage; 2,000 draws."""
    model, (x, y), (mean, covariance), exact = case
    result = compare({"exact": exact}, model, x, y)
    row = result.table.loc["exact"]
    assert list(result.table.columns) == REGRESSION
    x, y = x.double(), y.double()
    scale = (model.noise**2 + (x @ covariance * x).sum(1)).sqrt()
    density = dist.Normal(x @ mean, scale).log_prob(y)
    # A mean over S draws of the likelihood is off by its spread over draws / sqrt(S), < 0.01 here.
    assert row["lpd"] == pytest.approx(density.mean().item(), abs=0.01)
    assert row["lpd_se"] == pytest.approx(density.std().item() / 40**0.5, rel=0.1)
    rmse = (x @ mean - y).square().mean().sqrt().item()
    assert row["rmse"] == pytest.approx(rmse, abs=4 * scale.mean().item() / 2_000**0.5)
    half = dist.Normal(0.0, 1.0).icdf(torch.tensor(0.95)) * scale
    inside = ((y - x @ mean).abs() < half).double().mean().item()
    assert row["coverage_90"] == pytest.approx(inside, abs=0.051)  # two rows at the ends
    assert (row["draws"], row["seconds"]) == (2_000, 2.0)
    assert row["scale_ratio"] == row["epistemic_ratio"] == 1.0


def test_shrunk_draws_show_in_the_ratios(case):
    model, (x, y), (mean, _), exact = case
    shrunk = mean.float() + 0.1 * (exact.draws["w"].flatten(0, 1)[None] - mean.float())
    result = compare({"shrunk": posterior(shrunk, markov=False), "exact": exact}, model, x, y)
    assert result.reference == "exact"
    row = result.table.loc["shrunk"]
    for name in ("epistemic_ratio", "epistemic_ratio_5", "epistemic_ratio_95"):
        assert row[name] == pytest.approx(0.1, rel=1e-3)
    assert 0.5 < row["scale_ratio"] < 1.0  # the noise stays
    assert set(result.predictions) == {"shrunk", "exact"}
    assert result.predictions["shrunk"].mean.shape == (40,)


def test_half_of_the_chains_are_the_noise_floor(case):
    model, (x, y), _, exact = case
    table = compare({"exact": exact}, model, x, y).table
    assert list(table.index) == ["exact", "exact (half)"]
    half = table.loc["exact (half)"]
    assert half["draws"] == 1_000
    assert math.isnan(half["seconds"])  # the halves ran in one batch
    # A scale from S draws is off by 1 / sqrt(2 S), the ratio of two by sqrt(2) times that.
    assert half["epistemic_ratio"] == pytest.approx(1.0, abs=4 * 1_000**-0.5)
    single = compare({"exact": exact.select(chains=[0])}, model, x, y).table
    assert list(single.index) == ["exact"]


def test_the_verdict_comes_first(case):
    model, (x, y), _, exact = case
    for draws, words in ((None, "converged: 4 chains of 500"), (20, "not converged")):
        result = compare({"a": exact.select(draws=slice(draws))}, model, x, y)
        assert str(result).startswith(f"reference 'a' {words}")
        assert str(result).index("lpd") > str(result).index(words)


def test_without_markov_chains(case):
    model, (x, y), _, exact = case
    one = posterior(exact.draws["w"].flatten(0, 1)[None], markov=False)
    result = compare({"one": one, "two": one}, model, x, y)
    assert result.reference is result.convergence is None
    assert result.verdict.startswith("no MCMC reference")
    assert "epistemic_ratio" not in result.table
    chosen = compare({"one": one, "two": one}, model, x, y, reference="two")
    assert chosen.verdict == "reference 'two' is an approximation itself, not Markov chains"
    assert chosen.table.loc["one", "epistemic_ratio"] == 1.0


def test_bad_arguments(case):
    model, (x, y), _, exact = case
    with pytest.raises(DataError, match="reference 'b'; expected one of \\['a'\\]"):
        compare({"a": exact}, model, x, y, reference="b")
    with pytest.raises(DataError, match="no posteriors to compare"):
        compare({}, model, x, y)


def test_units_of_the_user(case):
    model, (x, y), _, exact = case
    units = Units(np.array(5.0), np.array(3.0))
    plain = compare({"exact": exact}, model, x, y).table.loc["exact"]
    found = compare({"exact": exact}, model, x, y, units=units).table.loc["exact"]
    assert found["lpd"] == pytest.approx(plain["lpd"] - math.log(3.0))
    assert found["rmse"] == pytest.approx(3 * plain["rmse"])
    for name in ("lpd_se", "coverage_90", "scale_ratio", "epistemic_ratio"):
        assert found[name] == pytest.approx(plain[name])


def test_one_held_out_row_and_numpy_arrays(case):
    model, (x, y), _, exact = case
    table = compare({"exact": exact}, model, x[:1].numpy(), y[:1].double().numpy()).table
    assert math.isnan(table.loc["exact", "lpd_se"])
    assert math.isfinite(table.loc["exact", "lpd"])


def test_missing_rows_are_left_out_of_scores(case):
    _, (x, y), _, exact = case

    def masked(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        f = x @ w
        with pyro.plate("data", x.shape[0]), poutine.mask(mask=y is None or ~y.isnan()):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f

    kept = torch.arange(40) >= 10
    gaps = compare({"exact": exact}, masked, x, y.masked_fill(~kept, torch.nan)).table
    whole = compare({"exact": exact}, masked, x[kept], y[kept]).table
    for name in ("lpd", "lpd_se", "rmse"):
        assert gaps.loc["exact", name] == pytest.approx(whole.loc["exact", name], rel=1e-5)
    # Sampled quantiles differ by the rows before them.
    assert gaps.loc["exact", "coverage_90"] == pytest.approx(
        whole.loc["exact", "coverage_90"], abs=0.1
    )


def outputs(build):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", build(x @ w), obs=y)
        return x @ w

    return model


def test_classes():
    torch.manual_seed(0)
    model, x = outputs(lambda f: dist.Categorical(logits=f)), torch.randn(50, 3)
    w = torch.randn(4, 100, 3, 2)
    logits = x @ w.flatten(0, 1)
    probabilities = logits.softmax(-1).mean(0)
    y = torch.where(torch.arange(50) < 40, probabilities.argmax(1), probabilities.argmin(1))
    other = posterior(w.flatten(0, 1)[None] * 0.5, markov=False)
    result = compare({"nuts": posterior(w), "svi": other}, model, x, y)
    assert list(result.table.columns) == [
        "lpd",
        "lpd_se",
        "accuracy",
        "ece",
        "epistemic_ratio",
        "epistemic_ratio_5",
        "epistemic_ratio_95",
        "wasserstein",
        "draws",
        "seconds",
    ]
    row = result.table.loc["nuts"]
    assert row["accuracy"] == 0.8
    density = probabilities[torch.arange(50), y].log().mean().item()
    assert row["lpd"] == pytest.approx(density, rel=1e-4)
    confidence = probabilities.max(1).values
    bins = (confidence * 10).long()
    right = (torch.arange(50) < 40).float()
    gaps = [((bins == b) * (right - confidence)).sum().abs() for b in range(10)]
    assert row["ece"] == pytest.approx(float(sum(gaps)) / 50, abs=1e-5)
    assert result.table.loc["svi", "epistemic_ratio"] == pytest.approx(0.5, rel=1e-4)
    assert "scale_ratio" not in result.table
    near = result.distances.loc[("held out", "svi")]
    half = (0.5 * logits).softmax(-1).mean(0)
    total_variation = 0.5 * (half - probabilities).abs().sum(1).mean().item()
    assert near["total_variation"] == pytest.approx(total_variation, rel=1e-4)
    same = (half.argmax(1) == probabilities.argmax(1)).double().mean().item()
    assert near["agreement"] == same


def test_several_outputs_in_their_own_units():
    torch.manual_seed(0)
    model = outputs(lambda f: dist.Normal(f, 1.0).to_event(1))
    x, w = torch.randn(30, 3), torch.randn(4, 100, 3, 2)
    y = x @ torch.ones(3, 2)
    wide = posterior(w.flatten(0, 1)[None] * torch.tensor([2.0, 2.0]), markov=False)
    units = Units(np.zeros(2), np.array([10.0, 0.1]))
    result = compare({"nuts": posterior(w), "wide": wide}, model, x, y, units=units)
    assert result.table.loc["wide", "epistemic_ratio"] == pytest.approx(2.0, rel=1e-4)
    residual = (x @ w.flatten(0, 1)).mean(0) - y
    expected = (residual * torch.tensor([10.0, 0.1])).square().mean().sqrt().item()
    assert result.table.loc["nuts", "rmse"] == pytest.approx(expected, rel=1e-4)
    assert bool(result.table.drop(columns="seconds").notna().all(axis=None))


def test_comparison_prints_its_table(case):
    model, (x, y), _, exact = case
    result = compare({"exact": exact}, model, x, y)
    assert isinstance(result, Comparison)
    lines = str(result).splitlines()
    assert lines[0] == result.verdict
    assert lines[1].startswith("distances are between 1000 draws of each posterior")
    assert lines[2].split()[:2] == ["lpd", "lpd_se"]
    assert str(replace(result, convergence=None, reference=None)).startswith("no MCMC reference")
