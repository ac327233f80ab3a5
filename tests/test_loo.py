"""Leave-one-out densities against those of a conjugate linear model, which are exact."""

import arviz as az
import pytest
import torch
from model_cases import Linear, linear_data

import pbnn
from pbnn.errors import DataError
from pbnn.evaluate.loo import leave_one_out
from pbnn.evaluate.psis import TRUSTED_K, smoothed
from pbnn.infer.posterior import Posterior

DRAWS = 4_000


@pytest.fixture(scope="module")
def case():
    """A linear model, its data, the exact posterior, and the exact leave-one-out densities."""
    model, (x, y) = Linear(3), linear_data(25, 3, correlation=0.5)
    law = torch.distributions.MultivariateNormal(*model.exact(x, y))
    exact = []
    for i in range(25):
        others = torch.arange(25) != i
        mean, covariance = model.exact(x[others], y[others])
        row = x[i].double()
        scale = (model.noise**2 + row @ covariance @ row).sqrt()
        exact.append(torch.distributions.Normal(row @ mean, scale).log_prob(y[i].double()))
    return model, (x, y), law, torch.stack(exact)


def drawn(case, guide, *, markov=False):
    """Return draws of a Gaussian with the log densities that a road would have noted."""
    model, (x, y), _, _ = case
    torch.manual_seed(1)
    w = guide.sample((4, DRAWS // 4) if markov else (1, DRAWS))
    likelihood = torch.distributions.Normal(w @ x.double().T, model.noise).log_prob(y.double())
    lp = likelihood.sum(-1) + torch.distributions.Normal(0.0, model.prior).log_prob(w).sum(-1)
    return Posterior(
        draws={"w": w},
        stats={"lp": lp} if markov else {"lp": lp, "log_q": guide.log_prob(w)},
        method="nuts" if markov else "svi",
        markov=markov,
        seconds=1.0,
        provenance={"rows": 25},
    )


def around(law, factor, *, diagonal=False):
    covariance = law.covariance_matrix * factor**2
    covariance = covariance.diagonal().diag_embed() if diagonal else covariance
    return torch.distributions.MultivariateNormal(law.mean, covariance)


def errors(case, posterior):
    """Return the Monte Carlo error of each row: that of a self-normalised mean, in logs."""
    model, (x, y), *_ = case
    scores = pbnn.log_likelihood(model, posterior, x, y).flatten(0, 1).T.double()
    ratio = 0.0
    if not posterior.markov:
        ratio = (posterior.stats["lp"] - posterior.stats["log_q"]).flatten()
    weights = torch.from_numpy(smoothed((ratio - scores).numpy())[0]).exp()
    share = scores.exp() / (weights * scores.exp()).sum(1, keepdim=True) - 1
    return (weights * share).square().sum(1).sqrt()


@pytest.mark.parametrize("kind", ["chains", "exact guide", "mean field", "wide guide"])
def test_densities_are_those_of_fits_without_the_row(case, kind):
    """Each row within 5 Monte Carlo errors (25 rows), their mean within 4."""
    model, (x, y), law, exact = case
    guide = {
        "chains": law,
        "exact guide": law,
        "mean field": around(law, 1.1, diagonal=True),
        "wide guide": around(law, 1.3),
    }[kind]
    posterior = drawn(case, guide, markov=kind == "chains")
    loo = leave_one_out(model, posterior, x, y)
    error = errors(case, posterior)
    assert not loo.unavailable
    assert bool((loo.khat <= TRUSTED_K).all())
    assert bool(((loo.density - exact).abs() < 5 * error).all())
    # Errors of the rows come from the same draws: at worst they add up.
    assert abs(loo.mean - float(exact.mean())) < 4 * float(error.mean())
    assert loo.error == pytest.approx(float(exact.std()) / 5, rel=0.1)


def test_chains_are_scored_as_arviz_does(case):
    model, (x, y), law, _ = case
    posterior = drawn(case, law, markov=True)
    data = pbnn.to_inference_data(posterior, model=model, x=x, y=y)
    theirs = az.loo(data, pointwise=True, reff=1.0)
    ours = leave_one_out(model, posterior, x, y)
    assert ours.mean * 25 == pytest.approx(float(theirs.elpd_loo), abs=1e-6)
    assert ours.khat.tolist() == pytest.approx(theirs.pareto_k.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_guide_shrunk_tenfold_has_no_score_and_never_comes_first(case, diagonal):
    """Its plain PSIS-LOO would be the best of all: it is as sure of the rows as it was fitted."""
    model, (x, y), law, exact = case
    shrunk = drawn(case, around(law, 0.1, diagonal=diagonal))
    fits = {"shrunk": shrunk, "guide": drawn(case, law), "nuts": drawn(case, law, markov=True)}
    found = pbnn.compare(fits, model, x, y, train=(x, y))
    table = found.table
    assert table["loo"].drop(["shrunk", "nuts (half)"]).notna().all()
    assert table.loc[["shrunk", "nuts (half)"], "loo"].isna().all()
    assert table["loo"].sort_values(ascending=False).index[0] in ("guide", "nuts")
    assert found.ranking[-1] == "shrunk"
    assert "'shrunk': PSIS-LOO is not available: Pareto k is" in str(found)
    scores = pbnn.log_likelihood(model, shrunk, x, y).flatten(0, 1).T.double()
    naive, k = (torch.from_numpy(v) for v in smoothed(-scores.numpy()))
    assert float(torch.logsumexp(naive + scores, 1).mean()) > float(exact.mean())
    assert float(k.max()) < TRUSTED_K


def test_what_cannot_be_left_out(case):
    model, (x, y), law, _ = case
    posterior = drawn(case, law, markov=True)
    with pytest.raises(DataError, match="24 rows to leave out, and the fit had 25"):
        leave_one_out(model, posterior, x[1:], y[1:])
    few = leave_one_out(model, posterior.select(draws=slice(5)), x, y)
    assert few.unavailable == "Pareto k is nan in the worst row"
    points = Posterior(
        draws=posterior.draws, stats=posterior.stats, method="swag", markov=False, seconds=1.0
    )
    assert "neither chains nor log_q" in leave_one_out(model, points, x, y).unavailable
