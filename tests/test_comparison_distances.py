"""Distances in function space: their values, their noise floors, and what they refuse to rank."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from model_cases import Linear, linear_data
from scipy.stats import wasserstein_distance

import pbnn
from pbnn import compare
from pbnn.errors import ConvergenceWarning, DataError
from pbnn.evaluate.comparison import HELD_OUT
from pbnn.evaluate.distance import Distance, thinned
from pbnn.evaluate.probes import away
from pbnn.infer.posterior import Posterior


def posterior(w, *, markov=True, **provenance):
    """Return draws `(chain, draw, …)` of site w as a posterior."""
    return Posterior(
        draws={"w": w},
        stats={"lp": torch.randn(w.shape[:2])},
        method="nuts" if markov else "svi",
        markov=markov,
        seconds=1.0,
        provenance=provenance,
    )


@pytest.fixture(scope="module")
def case():
    """A linear model, held-out rows, draws of its exact posterior in four chains, and the mean."""
    torch.manual_seed(0)
    model, (x, y) = Linear(3), linear_data(60, 3)
    mean, covariance = model.exact(x[:20], y[:20])
    exact = torch.distributions.MultivariateNormal(mean, covariance)
    return model, (x[20:], y[20:]), exact, posterior(exact.sample((4, 500)).float())


def test_values_are_those_of_scipy_for_each_input():
    torch.manual_seed(0)
    f, reference = torch.randn(200, 7, 2) * 1.5 + 0.3, torch.randn(200, 7, 2)
    apart = Distance.between(f, reference)
    for k, value in enumerate(apart.wasserstein):
        i, j = divmod(k, 2)
        a, b = f[:, i, j].numpy(), reference[:, i, j].numpy()
        assert value == pytest.approx(wasserstein_distance(a, b) / b.std(), rel=1e-4)
        assert apart.epistemic_ratio[k] == pytest.approx(a.std() / b.std(), rel=1e-4)


def test_an_input_that_nothing_depends_on_is_no_difference():
    f = torch.randn(50, 3, 1)
    f[:, 0] = 2.0
    apart = Distance.between(f, f)
    assert apart.epistemic_ratio.tolist() == [1.0, 1.0, 1.0]
    assert apart.wasserstein.tolist() == [0.0, 0.0, 0.0]
    wider = Distance.between(torch.randn(50, 3, 1), f)
    assert wider.wasserstein[0].isinf()
    summary = wider.summary()
    assert summary["wasserstein_low"] < summary["wasserstein_high"] == np.inf


def test_thinned_draws_come_from_all_chains():
    f = torch.arange(20.0).reshape(4, 5)
    assert thinned(f, 4).tolist() == [0.0, 6.0, 13.0, 19.0]
    assert thinned(f, 20).tolist() == f.flatten().tolist()


def test_a_permuted_copy_is_no_difference(case):
    model, (x, y), _, exact = case
    order = torch.randperm(2_000)
    copy = posterior(exact.draws["w"].flatten(0, 1)[order].reshape(4, 500, 3))
    result = compare({"exact": exact, "copy": copy}, model, x, y, reference="exact")
    near = result.distances.loc[HELD_OUT]
    # Both are thinned to half, so that other draws stay on either side: that is the floor, of
    # order 1 / sqrt(draws).
    assert near.loc["copy", "wasserstein"] <= near.loc["exact (half)", "wasserstein"]
    assert near.loc["copy", "wasserstein"] < 2 / 1_000**0.5
    assert f"copy {near.loc['copy', 'wasserstein']:.3f} (within noise)" in str(result)


def test_a_guide_shrunk_tenfold_never_comes_first(case):
    model, (x, y), law, exact = case
    middle = law.mean.float()
    independent = law.sample((1, 1_000)).float()
    shrunk = posterior(middle + 0.1 * (independent - middle), markov=False)
    # A diagonal guide of the right variances; a guide that is off by half a scale.
    diagonal = middle + law.stddev.float() * torch.randn(1, 1_000, 3)
    off = independent + 0.5 * law.stddev.float()
    others = {"diagonal": diagonal, "off": off}
    fits = {"shrunk": shrunk, **{k: posterior(v, markov=False) for k, v in others.items()}}
    result = compare({**fits, "nuts": exact}, model, x, y)
    assert result.ranking is not None
    assert result.ranking[-1] == "shrunk"
    # N(m, s) against N(m, s/10): the mean of |0.9 z| is 0.9 sqrt(2/π).
    expected = 0.9 * (2 / np.pi) ** 0.5
    row = result.distances.loc[(HELD_OUT, "shrunk")]
    assert row["wasserstein"] == pytest.approx(expected, abs=4 / 1_000**0.5)
    assert row["epistemic_ratio"] == pytest.approx(0.1, abs=0.1 * 4 * 1_000**-0.5)
    assert row["wasserstein_low"] <= row["wasserstein"] <= row["wasserstein_high"]
    assert row["wasserstein_low"] < row["wasserstein_high"]


def test_twenty_draws_are_no_reference_to_rank_by(case):
    model, (x, y), law, exact = case
    other = posterior(law.sample((1, 1_000)).float(), markov=False)
    few = exact.select(draws=slice(20))
    result = compare({"nuts": few, "guide": other}, model, x, y)
    assert result.ranking is None
    assert str(result).startswith("reference 'nuts' not converged")
    assert "no ranking" in str(result)
    assert "distances are between 40 draws" in str(result)


def test_another_seed_is_a_noise_floor(case):
    model, (x, y), law, exact = case
    guide, again = (posterior(law.sample((1, 1_000)).float(), markov=False) for _ in range(2))
    result = compare({"guide": guide, "nuts": exact}, model, x, y, repeats={"guide": again})
    assert list(result.table.index) == ["guide", "nuts", "nuts (half)", "guide (other seed)"]
    row = result.table.loc["guide (other seed)"]
    assert row["epistemic_ratio"] == pytest.approx(1.0, abs=4 / 1_000**0.5)
    assert result.ranking == ["guide"]
    with pytest.raises(DataError, match="repeat 'other'; expected one of"):
        compare({"guide": guide}, model, x, y, repeats={"other": again})


def test_inputs_elsewhere_have_distances_of_their_own(case):
    model, (x, y), law, exact = case
    # f = w·x is wider in proportion to x, and so is the ratio of any two spreads of w: unchanged.
    wide = posterior(law.mean.float() + 2 * (exact.draws["w"] - law.mean.float()))
    inputs = away(x, x)
    fits = {"wide": wide, "nuts": exact}
    result = compare(fits, model, x, y, reference="nuts", elsewhere=inputs)
    assert list(result.distances.index.unique("inputs")) == [HELD_OUT, "shifted", "far"]
    ratios = result.distances.xs("wide", level="posterior")["epistemic_ratio"]
    np.testing.assert_allclose(ratios, 2.0, rtol=1e-4)
    assert "away from the data:" in str(result)
    with pytest.raises(DataError, match="choose another name"):
        compare({"nuts": exact}, model, x, y, elsewhere={HELD_OUT: x})


def test_what_a_fit_says_of_itself_comes_before_the_numbers(case):
    model, (x, y), _, exact = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        cold = pbnn.fit_svi(model, x, y, kl_weight=0.1, steps=5, draws=500, progress=False)
    text = str(compare({"cold": cold, "nuts": exact}, model, x, y))
    note = next(line for line in text.splitlines() if "tempered" in line)
    assert note.startswith("'cold': ")
    assert text.index(note) < text.index("lpd")


def test_away_moves_rows_by_training_scales():
    torch.manual_seed(0)
    training = torch.randn(500, 4) * torch.tensor([1.0, 5.0, 0.1, 0.0]) + 3.0
    x = training[:50]
    moved = away(x, training)
    step = (moved["shifted"] - x) / training.std(0, correction=0)
    assert (step[:, 3].isnan() | (step[:, 3] == 0)).all()
    assert torch.equal(moved["shifted"][:, 3], x[:, 3])
    # Root mean square over all four features is 2; the fourth stays, so three keep at most that.
    assert step[:, :3].square().sum(1).max() <= 4 * 4 + 1e-3
    centre = training.mean(0)
    torch.testing.assert_close(moved["far"] - centre, 4 * (x - centre), atol=1e-4, rtol=1e-4)
    again = away(x, training)
    assert torch.equal(again["shifted"], moved["shifted"])
    assert not torch.equal(away(x, training, seed=1)["shifted"], moved["shifted"])


def test_away_moves_numbers_of_a_dict_only():
    x = {"a": torch.randn(5, 2), "group": torch.arange(5)}
    moved = away(x, x)["far"]
    assert torch.equal(moved["group"], x["group"])
    assert not torch.equal(moved["a"], x["a"])
    arrays = away(np.random.default_rng(0).normal(size=(5, 2)), np.zeros((3, 2)))
    assert arrays["shifted"].dtype == torch.float64
    with pytest.raises(DataError, match="x is a dict and training is not"):
        away(x, x["a"])
    for bad in ({"group": torch.arange(5)}, torch.arange(5)):
        with pytest.raises(DataError, match="floating-point"):
            away(bad, bad)


def test_one_held_out_row_has_no_interval(case):
    model, (x, y), _, exact = case
    result = compare({"nuts": exact}, model, x[:1], y[:1])
    row = result.distances.loc[(HELD_OUT, "nuts")]
    assert row["wasserstein_low"] == row["wasserstein"] == row["wasserstein_high"] == 0.0
    assert replace(result, convergence=None).ranking is None


def test_frames_and_lists_are_data(case):
    model, (x, y), _, exact = case
    expected = compare({"nuts": exact}, model, x, y).table
    frame, series = pd.DataFrame(x.numpy()), pd.Series(y.numpy())
    for rows, target in ((frame, series), (x.tolist(), y.tolist())):
        found = compare({"nuts": exact}, model, rows, target, elsewhere=away(rows, rows))
        pd.testing.assert_frame_equal(found.table, expected, rtol=1e-4)
    with pytest.raises(DataError, match="x has no rows"):
        compare({"nuts": exact}, model, x[:0], y[:0])
