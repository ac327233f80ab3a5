"""Rank sweep and mending: constructed posteriors that are kept, rolled back or no better."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample

from pbnn.errors import DataError
from pbnn.evaluate import recipes
from pbnn.evaluate.judging import judge_on
from pbnn.evaluate.recipes import mend, rank_sweep
from pbnn.infer.posterior import Posterior

ROWS = 120


def posterior(mean, scale, seed=0, method="given"):
    """Return draws of w ~ Normal(mean, scale), `(1, 100, 2)`, with these moments exactly."""
    z = torch.randn(100, 2, generator=torch.Generator().manual_seed(seed))
    z = (z - z.mean(0)) / z.std(0, correction=0)
    draws = torch.tensor(mean) + torch.tensor(scale) * z
    return Posterior(
        draws={"w": draws[None]},
        stats={"lp": torch.zeros(1, 100)},
        method=method,
        markov=False,
        seconds=1.5,
    )


class Line(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


class Sides(Line):
    """Two classes by the sign of x·w."""

    def forward(self, x, y=None):
        f = torch.stack([torch.zeros(x.shape[0]), x @ self.w], -1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f


@pytest.fixture(scope="module")
def rows():
    """Rows along the first axis, with y = 2 x₀ + noise, and rows along the second."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 2, generator=generator) * torch.tensor([1.0, 0.1])
    y = 2 * x[:, 0] + 0.5 * torch.randn(ROWS, generator=generator)
    far = torch.randn(ROWS, 2, generator=generator) * torch.tensor([1.0, 3.0])
    return x, y, {"far": far}


def mended(rows, structures, start=None, model=None, y=None, **options):
    x, numbers, ood = rows
    data = (x, numbers if y is None else y)
    fits = {name: lambda average, p=p: p for name, p in structures.items()}
    # Spread along the first axis alone: as wide on both sets.
    start = start or posterior([2.0, 0.0], [0.1, 0.0])
    return mend(model or Line(), start, data, data, ood, structures=fits, **options)


def outcomes(mending):
    return [(a.step, a.name, a.outcome) for a in mending.attempts]


def test_what_ranks_better_is_kept_and_what_costs_density_is_rolled_back(rows):
    biased = posterior([1.0, 0.0], [0.1, 0.3])
    good = posterior([2.0, 0.0], [0.1, 0.3])
    found = mended(rows, {"biased": biased, "good": good, "again": good})
    assert outcomes(found)[:4] == [
        ("start", "given", "start"),
        ("structure", "biased", "rolled back"),
        ("structure", "good", "kept"),
        ("structure", "again", "no better"),
    ]
    # Both rank the far rows: it is the density that the biased one loses by.
    assert found.attempts[1].numbers["auroc"] > found.attempts[0].numbers["auroc"] + 0.2
    assert "of the log density" in found.attempts[1].why
    assert found.best.posterior is good
    assert found.table["latency"].gt(0).all()
    assert "ends with good" in str(found)


def test_accuracy_is_guarded_by_half_a_point(rows):
    x, _, _ = rows
    y = (x[:, 0] > 0).long()
    start = posterior([4.0, 0.0], [0.1, 0.0])
    # A direction that turns the boundary: some rows change sides.
    turned = posterior([4.0, 4.0], [0.1, 3.0])
    close = posterior([4.0, 0.0], [0.1, 3.0])
    model = Sides()
    found = mended(rows, {"turned": turned, "close": close}, start, model, y)
    accuracy = [a.numbers["accuracy"] for a in found.attempts]
    assert accuracy[0] - accuracy[1] > 0.005
    assert outcomes(found)[1][2] == "rolled back"
    assert "points of accuracy" in found.attempts[1].why
    assert outcomes(found)[2][2] == "kept"
    # What is allowed to cost more is not rolled back.
    loose = mended(rows, {"turned": turned}, start, model, y, accuracy_cost=0.5)
    assert outcomes(loose)[1][2] == "kept"


def test_the_mean_is_tried_on_the_best_structure(rows):
    x, y, ood = rows
    asked = []

    def fit(average):
        asked.append(average)
        return posterior([2.0, 0.0], [0.1, 0.3 if average else 0.2])

    found = mend(
        Line(), posterior([2.0, 0.0], [0.1, 0.0]), (x, y), (x, y), ood, structures={"wide": fit}
    )
    assert asked == [False, True]
    assert ("mean", "wide, weights averaged") in [(a.step, a.name) for a in found.attempts]


def test_one_factor_mends_scales(rows):
    """Noise is 0.5 where y is twice as far from the mean: the factor is near 2, and NLL falls."""
    x, _, ood = rows
    y = 2 * x[:, 0] + torch.randn(ROWS, generator=torch.Generator().manual_seed(3))
    start = posterior([2.0, 0.0], [1e-4, 0.0])
    found = mend(Line(), start, (x, y), (x, y), ood, structures={})
    last = found.attempts[-1]
    assert outcomes(found)[-1] == ("temperature", "given, scales", "kept")
    residuals = (y - 2 * x[:, 0]).square().mean().sqrt() / 0.5
    assert last.calibration == pytest.approx(float(residuals), rel=1e-3)
    # Cross-fitted, so within four standard errors of the NLL of the right Normal, not equal.
    exact = -torch.distributions.Normal(2 * x[:, 0], 0.5 * residuals).log_prob(y)
    assert last.numbers["nll"] == pytest.approx(float(exact.mean()), abs=0.02)
    assert found.best is last


def test_a_temperature_mends_classes_and_leaves_a_alone(rows):
    x, *_ = rows
    chance = torch.sigmoid(x[:, 0])
    y = (torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) < chance).long()
    found = mended(rows, {}, posterior([4.0, 0.0], [0.1, 0.0]), Sides(), y)
    start, last = found.attempts[0], found.attempts[-1]
    assert outcomes(found)[-1] == ("temperature", "given, temperature", "kept")
    assert last.calibration > 2
    assert last.numbers["auroc"] == start.numbers["auroc"]


def test_no_error_determines_no_temperature(rows):
    x, *_ = rows
    found = mended(rows, {}, posterior([4.0, 0.0], [0.1, 0.0]), Sides(), (x[:, 0] > 0).long())
    assert found.attempts[-1].outcome == "no better"
    assert found.best.calibration == 1.0


def test_the_set_that_is_ranked_worst_counts(rows):
    x, y, ood = rows
    made = [posterior([2.0, 0.0], [0.1, scale]) for scale in (0.3, 0.6)]
    alone, beside = (judge_on(Line(), (x, y), sets, 0, None) for sets in (ood, {**ood, "same": x}))
    narrow, wide = map(alone.of, made)
    assert alone.auroc(narrow).value > 0.7
    assert alone.auroc(wide, narrow).value > 0.0
    # Neither ranks the rows that are the same, whatever it does on the others.
    narrow, wide = map(beside.of, made)
    assert beside.auroc(narrow).value == 0.5
    assert beside.auroc(wide, narrow).value == 0.0


def test_rank_sweep_takes_the_likelihood_among_those_that_rank_as_well(rows):
    x, y, ood = rows
    made = {
        2: posterior([2.0, 0.0], [0.1, 0.0]),  # does not rank
        4: posterior([1.8, 0.0], [0.1, 0.3]),  # ranks, and is biased
        8: posterior([2.0, 0.0], [0.1, 0.3]),
    }
    sweep = rank_sweep(Line(), (x, y), (x, y), ood, ranks=tuple(made), fit=made.__getitem__)
    assert sweep.best == 8
    assert sweep.table["auroc"][2] < 0.6 < sweep.table["auroc"][4]
    assert sweep.table["nll"][8] < sweep.table["nll"][4]
    assert sweep.table["seconds"].tolist() == [1.5] * 3
    assert list(sweep.posteriors) == [2, 4, 8]


def test_fits_by_default(rows):
    """The guides of SVI and SWAG, and their averaged form, on few steps."""
    x, y, ood = rows
    few = {"steps": 5, "draws": 10, "compile": False, "progress": False}
    with pytest.warns(UserWarning, match="levelled off|at hand|rose"):
        sweep = rank_sweep(Line(), (x, y), (x, y), ood, ranks=(1, 2), **few)
    assert sweep.best in (1, 2)
    with pytest.warns(UserWarning, match="levelled off|at hand|rose"):
        found = mend(Line(), sweep.posteriors[1], (x, y), (x, y), ood, **few)
    tried = [(a.step, a.name.partition(",")[0]) for a in found.attempts]
    assert ("structure", "Kronecker") in tried
    assert ("structure", "post-hoc low rank") in tried
    assert "low rank" not in [name for _, name in tried], "the given guide is that already"


class Coin(Line):
    """Two classes by one logit."""

    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        return f


class Counts(Line):
    def forward(self, x, y=None):
        f = x @ self.w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)
        return f


def test_one_logit_has_a_temperature(rows):
    """As the same probabilities of two logits do."""
    x, *_ = rows
    generator = torch.Generator().manual_seed(4)
    y = torch.bernoulli(torch.sigmoid(x[:, 0]), generator=generator)
    start = posterior([4.0, 0.0], [0.1, 0.0])
    one, two = (mended(rows, {}, start, model, y).attempts for model in (Coin(), Sides()))
    assert one[-1].calibration == pytest.approx(two[-1].calibration, rel=1e-3)
    assert one[-1].numbers["accuracy"] == two[-1].numbers["accuracy"]
    assert one[-1].numbers["nll"] == pytest.approx(two[-1].numbers["nll"], rel=1e-4)
    assert one[-1].outcome == "kept"


def test_counts_are_not_stretched(rows):
    x, *_ = rows
    y = torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(4))
    found = mended(rows, {}, posterior([1.0, 0.0], [0.1, 0.0]), Counts(), y)
    last = found.attempts[-1]
    assert outcomes(found)[-1] == ("temperature", "given, scales", "no better")
    assert "whole numbers" in last.why
    assert last.calibration == 1.0


def test_missing_y_is_left_out(rows):
    """Rows without y change nothing; of two outputs, the one that is there counts alone."""
    x, _, ood = rows
    y = 2 * x[:, 0] + torch.randn(ROWS, generator=torch.Generator().manual_seed(3))
    start = posterior([2.0, 0.0], [1e-4, 0.0])
    whole = mend(Line(), start, (x, y), (x, y), ood, structures={})
    longer = torch.cat([x, x[:7]]), torch.cat([y, torch.full((7,), torch.nan)])
    found = mend(Line(), start, (x, y), longer, ood, structures={})
    assert found.best.calibration == whole.best.calibration
    assert found.best.numbers["nll"] == whole.best.numbers["nll"]
    with pytest.raises(DataError, match="every validation row"):
        mend(Line(), start, (x, y), (x, y * torch.nan), ood, structures={})
    half = torch.stack([y, torch.full_like(y, torch.nan)], 1)
    found = mend(Twice(), start, (x, half), (x, half), ood, structures={})
    assert found.best.calibration == pytest.approx(whole.best.calibration, rel=1e-6)
    assert found.best.numbers["nll"] == pytest.approx(whole.best.numbers["nll"], rel=1e-5)


class Twice(Line):
    """Two outputs of one mean, of which some are missing."""

    def forward(self, x, y=None):
        f = (x @ self.w)[:, None].expand(-1, 2)
        seen = True if y is None else ~y.isnan()
        each, outputs = pyro.plate("data", x.shape[0], dim=-2), pyro.plate("outputs", 2, dim=-1)
        with each, outputs, poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


def test_averaging_alone_changes_in_the_second_fit(rows, monkeypatch):
    x, y, ood = rows
    asked = {}

    def fit(model, x, y, **options):
        asked.update(options)
        return posterior([2.0, 0.0], [0.1, 0.0])

    own = {
        "guide": "lowrank",
        "rank": 1,
        "lr": 0.02,
        "steps": 7,
        "batch_size": 40,
        "average": False,
    }
    told = {**own, "schedule": "cosine", "estimator": "flipout", "init": "state_dict"}
    start = replace(posterior([2.0, 0.0], [0.1, 0.0], method="svi"), provenance={"options": told})
    monkeypatch.setattr(recipes, "fit_svi", fit)
    mend(Line(), start, (x, y), (x, y), ood, structures={}, lr=0.05)
    del told["init"]  # its tensors are not recorded
    assert asked == {**told, "lr": 0.05, "average": True, "seed": 0, "device": None}


def test_no_sets_and_empty_sets_are_named(rows):
    x, y, ood = rows
    start = posterior([2.0, 0.0], [0.1, 0.0])
    with pytest.raises(DataError, match="no rows out of"):
        mend(Line(), start, (x, y), (x, y), {}, structures={})
    with pytest.raises(DataError, match="'far' has no rows"):
        mend(Line(), start, (x, y), (x, y), {"far": ood["far"][:0]}, structures={})
    with pytest.raises(DataError, match="no ranks"):
        rank_sweep(Line(), (x, y), (x, y), ood, ranks=())
