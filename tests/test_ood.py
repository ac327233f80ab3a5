"""The three criteria on linear models, where they are known exactly; every verdict; the edges.

The law of a linear model: with weights N(m, s² I) and rows N(0, I), u² = s² |x|², so that rows
scaled by k have A = P(k² χ² > χ'²), which is the distribution of F, and B = log k².
"""

import numpy as np
import pyro
import pytest
import torch
from guide_cases import scrambled
from model_cases import Linear
from scipy.stats import f as f_law
from test_scores import Softmax, TwoOutputs

from pbnn import check_ood
from pbnn.data import Units
from pbnn.errors import DataError, PbnnWarning
from pbnn.evaluate.calibration import negative_log_likelihood
from pbnn.evaluate.field import distance_to_training
from pbnn.infer.guides import approximation, dense_moments, make_guide
from pbnn.infer.posterior import Posterior

D, SCALE, NOISE, DRAWS = 3, 0.3, 0.5, 1000
CLOSE = {"replicates": 200}


def posterior(w, **fields):
    """Return draws `(draws, …)` of site w as a posterior."""
    return Posterior(
        draws={"w": w[None]},
        stats={"lp": torch.zeros(1, len(w))},
        method="exact",
        markov=False,
        seconds=0.0,
        **fields,
    )


def observed(x, mean):
    """Return y of rows, each from a draw of the weights of its own: the predictive's own law."""
    w = mean + SCALE * torch.randn(len(x), D)
    return (x * w).sum(1) + NOISE * torch.randn(len(x))


@pytest.fixture(scope="module")
def case():
    """A linear model, draws of its posterior, and 2,000 rows of its predictive."""
    torch.manual_seed(0)
    mean = torch.tensor([1.0, -2.0, 0.5])
    x = torch.randn(2_000, D)
    exact = posterior(mean + SCALE * torch.randn(DRAWS, D))
    return Linear(D, noise=NOISE), exact, x, observed(x, mean), mean


def test_criteria_of_a_linear_model_are_exact(case):
    model, exact, x, y, mean = case
    k = 1.5
    away = k * torch.randn(2_000, D)
    report = check_ood(model, exact, x, y, {"far": (away, observed(away, mean))}, **CLOSE)

    # The spread of an AUROC is at most that of 2,000 pairs of independent rows: 0.5 / sqrt(2,000).
    signal = report.interval("A", "far", "auroc_epistemic")
    truth = f_law.sf(1 / k**2, D, D)
    assert signal.value == pytest.approx(truth, abs=4 * 0.5 / 2_000**0.5)
    assert signal.holds(truth)
    # |x|² of a row has relative variance 2 / D, in both samples; the draws' covariance, which both
    # share, is isotropic up to sqrt(1 / draws).
    direction = report.interval("B", "far", "log_ratio")
    error = (2 * 2 / D / 2_000) ** 0.5 + DRAWS**-0.5
    assert direction.value == pytest.approx(np.log(k**2), abs=4 * error)
    median = report.interval("B", "far", "log_median_ratio")
    assert median.value == pytest.approx(np.log(k), abs=4 * error)

    for name, rows in (("id", x), ("far", away)):
        variance = NOISE**2 + SCALE**2 * rows.double().square().sum(1)
        nll = 0.5 * (np.log(2 * np.pi) + 1 + variance.log()).mean()
        found = report.interval("C", name, "nll")
        # Half of a squared Normal less its mean: variance ½ a row; draws as above.
        assert found.value == pytest.approx(float(nll), abs=4 * (0.5 / 2_000) ** 0.5 + DRAWS**-0.5)
        coverage = report.interval("C", name, "coverage_90")
        assert coverage.value == pytest.approx(0.9, abs=4 * (0.09 / 2_000 + 0.09 / DRAWS) ** 0.5)
        crps = report.interval("C", name, "crps")
        # σ / sqrt(π) (Gneiting & Raftery 2007, eq. 22); its scale over rows is below σ.
        expected = float((variance.sqrt()).mean() / np.pi**0.5)
        assert crps.value == pytest.approx(expected, abs=4 * 1.2 / 2_000**0.5)
        width = float(2 * 1.6449 * variance.sqrt().mean())
        sharp = report.interval("C", name, "sharpness_90")
        # A quantile of 1,000 Normal draws: error sqrt(p (1 − p) / S) / density at ± 1.645.
        assert sharp.value == pytest.approx(width, rel=4 * (0.05 * 0.95 / DRAWS) ** 0.5 / 0.103)
        assert report.interval("C", name, "coverage_error").value < 4 * 0.5 / 400**0.5
    assert report.verdict == "sound"
    replicated = report.interval("A", "id", "spearman_replicated")
    assert replicated.holds(report.interval("A", "id", "spearman_error").value)


def test_linearised_variance_is_exact_on_a_linear_model(case):
    model, _, x, y, mean = case
    with pyro.get_param_store().scope():
        guide = make_guide("lowrank", model, rank=D)
        known = approximation(scrambled(guide, x[:20], y[:20]))
    covariance = dense_moments(known)[1].double()
    fitted = posterior(mean + SCALE * torch.randn(DRAWS, D), approximation=known)
    report = check_ood(model, fitted, x[:100], y[:100], {"far": 3 * x[:50]}, **CLOSE)
    for name, rows in (("id", x[:100]), ("far", 3 * x[:50])):
        rows = rows.double()
        total = ((rows @ covariance) * rows).sum(1).mean()
        diagonal = (rows.square() @ covariance.diagonal()).mean()
        row = report.variance.loc[name]
        assert row["total"] == pytest.approx(float(total), rel=1e-4)
        assert row["diagonal"] == pytest.approx(float(diagonal), rel=1e-4)
        assert row["cross"] == pytest.approx(float(total - diagonal), rel=1e-3)
    eigenvalues = torch.linalg.eigvalsh(covariance)
    rank = eigenvalues.sum() ** 2 / eigenvalues.square().sum()
    assert report.effective_rank == pytest.approx(float(rank), rel=1e-4)
    assert "linearised variance" in str(report)


def test_every_verdict_is_reached(case):
    model, exact, x, y, mean = case
    x, y = x[:300], y[:300]
    mixed = torch.cat([0.01 * x[:150], 10 * x[150:]])
    shifted = posterior(exact.draws["w"][0] + 3.0)
    frozen = posterior(mean.expand(20, D))
    for fit, away, name, step in (
        (exact, 0.2 * x, "inverted", "covariances"),
        (exact, mixed, "scale without ranking", "covariances"),
        (exact, x, "no signal", "another mean"),
        (frozen, 4 * x, "no signal", "another mean"),
        (shifted, 4 * x, "miscalibrated", "scaling"),
        (exact, 4 * x, "sound", "nothing to mend"),
    ):
        report = check_ood(model, fit, x, y, {"away": away}, **CLOSE)
        assert report.verdict == name
        assert step in report.next_step
        assert report.reason.startswith("away: ")
        assert str(report).startswith(name)
    assert report.interval("A", "away", "auroc_epistemic").low > 0.5


def test_a_posterior_without_spread_has_the_defined_values(case):
    model, _, x, y, mean = case
    report = check_ood(model, posterior(mean.expand(5, D)), x[:50], y[:50], {"far": 4 * x}, **CLOSE)
    signal = report.interval("A", "far", "auroc_epistemic")
    assert (signal.value, signal.low, signal.high) == (0.5, 0.5, 0.5)
    assert report.interval("B", "far", "log_ratio").value == 0.0
    assert report.interval("A", "id", "spearman_error").value == 0.0


@pytest.mark.parametrize(("home", "away"), [(300, 1), (300, 9), (9, 300)])
def test_no_verdict_comes_of_too_few_rows(case, home, away):
    """One row's bootstrap interval has no width from that set: it would say sound."""
    model, exact, x, y, _ = case
    sets = {"far": 4 * x[-away:]}
    with pytest.warns(PbnnWarning, match=r"fewer than 10 rows: '(far|id)' \([19]\)"):
        report = check_ood(model, exact, x[:home], y[:home], sets, **CLOSE)
    assert report.verdict == "too few rows"
    assert f"{min(home, away)} row(s)" in report.reason
    assert report.rows("far") == min(home, away)


def test_one_draw_is_told_from_draws_without_signal(case):
    model, _, x, y, mean = case
    single = posterior(mean[None])
    report = check_ood(model, single, x[:50], y[:50], {"far": 4 * x[:50]}, **CLOSE)
    assert report.verdict == "no spread"
    assert "one draw has no epistemic spread" in report.reason
    assert "a fit with draws" in report.next_step


def test_the_worst_set_comes_first(case):
    model, exact, x, y, _ = case
    sets = {"far": 4 * x[:300], "near": x[:300], "inside": 0.2 * x[:300]}
    report = check_ood(model, exact, x[:300], y[:300], sets, **CLOSE)
    assert [report.verdicts[name].name for name in sets] == ["sound", "no signal", "inverted"]
    assert (report.worst, report.verdict) == ("inside", "inverted")
    assert "far: sound" in str(report)


def test_bad_intervals_away_count_only_where_y_is_known(case):
    model, exact, x, y, mean = case
    away = 4 * x[:300]
    wrong = observed(away, mean) + 20.0
    known = check_ood(model, exact, x, y, {"far": (away, wrong)}, **CLOSE)
    assert known.verdict == "miscalibrated"
    assert "on 'far'" in known.reason
    assert list(known.faults) == ["far"]
    unknown = check_ood(model, exact, x, y, {"far": away}, **CLOSE)
    assert unknown.verdict == "sound"
    assert ("C", "far", "nll") not in unknown.table.index


def test_slope_against_the_distance_to_the_training_rows(case):
    model, exact, x, y, _ = case
    home, away, training = x[:100], 4 * x[100:200], x[200:500]
    report = check_ood(
        model, exact, home, y[:100], {"far": away}, x_train=training, layer=None, **CLOSE
    )
    u = np.r_[report.scores["id"]["epistemic"], report.scores["far"]["epistemic"]]
    distance = distance_to_training(torch.cat([home, away]), training)
    np.testing.assert_allclose(np.r_[report.distances["id"], report.distances["far"]], distance)
    unit = np.sqrt(np.mean(u[:100] ** 2))
    expected = np.polyfit(distance, u / unit, 1)[0]
    assert report.interval("B", "far", "slope").value == pytest.approx(expected)
    assert "density" in report.scores["far"]


def test_no_number_of_the_rows_away_reaches_those_at_home(case):
    """A leak would show: other rows away, the same scores, densities and sums at home."""
    model, exact, x, y, _ = case
    options = {"x_train": x[500:700], "scores": ["density", "epistemic+density"], **CLOSE}
    near, far = (
        check_ood(model, exact, x[:100], y[:100], {"away": away}, **options)
        for away in (2 * x[100:200], 100 + 50 * x[200:300])
    )
    for name, values in near.scores["id"].items():
        np.testing.assert_array_equal(values, far.scores["id"][name])
    assert list(far.scores["id"]) == ["epistemic", "density", "epistemic+density"]
    alone = check_ood(model, exact, x[:100], y[:100], {"away": 100 + 50 * x[200:210]}, **options)
    for name, values in alone.scores["away"].items():
        np.testing.assert_allclose(values, far.scores["away"][name][:10], rtol=1e-12)


def test_classes(case):
    torch.manual_seed(1)
    x = torch.randn(400, 2)
    model = Softmax()
    w = torch.tensor([[2.0, 0.0, -2.0], [0.0, 2.0, -1.0]])
    fit = posterior(w + 0.5 * torch.randn(200, 2, 3))
    p = (x @ fit.draws["w"][0] + 5.0).softmax(-1).mean(0)
    y = torch.distributions.Categorical(p).sample()
    report = check_ood(model, fit, x, y, {"far": 3 * x[:200], "known": (x, y)}, **CLOSE)
    nll = report.interval("C", "id", "nll")
    assert nll.value == pytest.approx(negative_log_likelihood(p, y).mean(), rel=1e-5)
    assert nll.holds(nll.value)
    accuracy = float((p.argmax(1) == y).double().mean())
    assert report.interval("C", "id", "accuracy").value == pytest.approx(accuracy)
    # Two standard errors of the error of calibrated classes reach from its mean to either end.
    floor = report.interval("C", "id", "ece_replicated")
    assert report.interval("C", "id", "ece").value < floor.value + floor.high - floor.low
    assert report.verdicts["far"].name == "sound"
    assert report.verdicts["known"].name == "no signal"
    numbers = set(report.table.loc[("A", "far")].index)
    assert numbers == {
        f"{metric}_{score}"
        for metric in ("auroc", "aupr", "fpr95")
        for score in (
            "epistemic",
            "total",
            "entropy",
            "mutual_information",
            "max_probability",
            "energy",
        )
    }
    wrong = check_ood(model, fit, x, (y + 1) % 3, {"far": 3 * x[:200]}, **CLOSE)
    assert wrong.verdict == "miscalibrated"
    assert "calibration error" in wrong.reason


def test_several_outputs_in_the_users_units(case):
    torch.manual_seed(2)
    x = torch.randn(200, 2)
    model, fit = TwoOutputs(), posterior(torch.randn(300, 2, 2))
    w = torch.randn(200, 2, 2)
    y = torch.einsum("ni,nio->no", x, w) + torch.tensor([0.1, 1.0]) * torch.randn(200, 2)
    plain = check_ood(model, fit, x, y, {"far": 3 * x}, **CLOSE)
    assert plain.interval("C", "id", "coverage_90").value == pytest.approx(0.9, abs=0.06)
    units = Units(loc=np.array([5.0, -1.0]), scale=np.array([10.0, 100.0]))
    scaled = check_ood(model, fit, x, y, {"far": 3 * x}, units=units, **CLOSE)
    for name, score in scaled.scores["far"].items():
        np.testing.assert_allclose(score, plain.scores["far"][name], rtol=1e-6)
    shift = np.log(10) + np.log(100)
    assert scaled.interval("C", "id", "nll").value == pytest.approx(
        plain.interval("C", "id", "nll").value + shift
    )
    for number in ("coverage_90", "coverage_error"):
        assert scaled.interval("C", "id", number).value == pytest.approx(
            plain.interval("C", "id", number).value, abs=1e-9
        )


def test_what_is_refused(case):
    model, exact, x, y, _ = case
    x, y = x[:20], y[:20]
    with pytest.raises(DataError, match="no rows out of distribution"):
        check_ood(model, exact, x, y, {})
    with pytest.raises(DataError, match="the set 'far' has no rows"):
        check_ood(model, exact, x, y, {"far": x[:0]})
    with pytest.raises(DataError, match="the set 'id' has no rows"):
        check_ood(model, exact, x[:0], y[:0], {"far": x})
    with pytest.raises(DataError, match="the set 'id' is the rows of x"):
        check_ood(model, exact, x, y, {"id": x})
    with pytest.raises(DataError, match="y is None"):
        check_ood(model, exact, x, None, {"far": x})
    with pytest.raises(DataError, match="not finite"):
        check_ood(model, exact, x, y, {"far": x * torch.nan})
    with pytest.raises(DataError, match=r"no score 'entropy'; this model has \['epistemic'"):
        check_ood(model, exact, x, y, {"far": x}, scores=["entropy"])
    with pytest.raises(DataError, match="the density needs x_train"):
        check_ood(model, exact, x, y, {"far": x}, scores=["density"])
    with pytest.raises(DataError, match="layer 'fc1' is for the score 'density'"):
        check_ood(model, exact, x, y, {"far": x}, layer="fc1")
    report = check_ood(model, exact, x, y, {"far": x}, **CLOSE)
    with pytest.raises(DataError, match="no number"):
        report.interval("A", "far", "auroc_entropy")
