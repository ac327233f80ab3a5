"""Stacking of chains that do not mix: weights in closed form, and a posterior of two modes."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, linear_data, prior_posterior
from scipy.optimize import minimize_scalar

import pbnn
from pbnn.errors import ConvergenceWarning, ModelError
from pbnn.evaluate.stacking import stack_chains, stacking_weights


def test_weights_are_shares_where_each_row_belongs_to_one_chain():
    """Then the mean of log w_k over rows is largest at the share of the rows of chain k."""
    owner = torch.tensor([0] * 12 + [1] * 6 + [2] * 2)
    density = torch.where(owner == torch.arange(4)[:, None], 0.0, -100.0)
    weights = stacking_weights(density)
    torch.testing.assert_close(
        weights, torch.tensor([0.6, 0.3, 0.1, 0.0]).double(), atol=1e-6, rtol=0
    )


def test_weights_are_those_of_a_direct_search():
    torch.manual_seed(0)
    density = torch.randn(2, 40).double() * torch.tensor([[1.0], [0.7]])

    def loss(w):
        return -float(torch.logaddexp(density[0] + w.log(), density[1] + (1 - w).log()).mean())

    best = minimize_scalar(
        lambda w: loss(torch.tensor(w).double()), bounds=(0, 1), method="bounded"
    )
    found = stacking_weights(density)
    assert loss(found[0]) - best.fun < 1e-6
    assert float(found[0]) == pytest.approx(best.x, abs=0.01)
    torch.testing.assert_close(stacking_weights(density + 500.0), found)  # differences count


def test_rows_that_no_chain_can_give_weigh_all_alike():
    torch.manual_seed(1)
    density = torch.randn(3, 30)
    none = torch.full((3, 2), -torch.inf)
    torch.testing.assert_close(
        stacking_weights(torch.cat([none, density], 1)), stacking_weights(density)
    )
    with pytest.raises(ModelError, match="no row has a density above 0"):
        stacking_weights(none)
    with pytest.raises(ModelError, match=r"NaN or \+inf"):
        stacking_weights(torch.cat([density, none * torch.nan], 1))


def bent(x, y=None):
    """A slope with heavy-tailed noise: rows of two slopes give a posterior of two modes."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    f = w * x[:, 0]
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.StudentT(3.0, f, 0.1), obs=y)
    return f


@pytest.fixture(scope="module")
def two_modes():
    """30 rows of slope 1 and 10 of slope −1; two chains start at either."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(40, 1, generator=generator)
    slope = torch.where(torch.arange(40) < 30, 1.0, -1.0)
    y = slope * x[:, 0] + 0.1 * torch.randn(40, generator=generator)
    start = {"w": torch.tensor([1.0, 1.0, -1.0, -1.0])}
    options = {"warmup": 50, "draws": 100, "progress": False, "compile": False, "init": start}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return pbnn.fit_nuts(bent, x, y, **options), x, y


def test_two_modes_are_mixed_by_what_they_predict(two_modes):
    posterior, x, y = two_modes
    assert (posterior.draws["w"][:2] > 0).all()
    assert (posterior.draws["w"][2:] < 0).all()
    stacked = stack_chains(bent, posterior, x, y)
    share = float(stacked.weights[:2].sum())
    # 20 scales away, the other mode's density is (1 + 20² / 3)⁻² = 6e-5 of its peak.
    assert share == pytest.approx(0.75, abs=0.01)
    w = stacked.posterior.draws["w"]
    assert float((w > 0).double().mean()) == pytest.approx(share, abs=0.01)
    assert len(w.flatten().unique()) >= 0.9 * w.numel()  # rejections repeat values, thinning none
    assert not stacked.posterior.markov
    mixed = pbnn.predict(bent, stacked.posterior, x, y).log_predictive_density.mean()
    equal = pbnn.predict(bent, posterior, x, y).log_predictive_density.mean()
    one = pbnn.predict(bent, posterior.select(chains=[0, 1]), x, y).log_predictive_density.mean()
    assert mixed > equal
    assert mixed > one


def test_the_comparison_says_that_chains_were_stacked(two_modes):
    posterior, x, y = two_modes
    text = str(pbnn.compare({"nuts": posterior}, bent, x, y))
    assert text.startswith("reference 'nuts' not converged")
    stacked = stack_chains(bent, posterior, x, y).posterior
    found = pbnn.compare({"stacked": stacked}, bent, x, y, reference="stacked")
    assert "'stacked': the chains are stacked: weighted to" in str(found)
    assert found.ranking is None
    assert stacked.provenance["stacking_weights"] == pytest.approx(
        stack_chains(bent, posterior, x, y).weights.tolist()
    )


def test_what_cannot_be_stacked():
    model, data = Linear(2), linear_data(20, 2)
    for options in ({"chains": 4}, {"chains": 1, "markov": True}):
        with pytest.raises(ModelError, match=r"to stack; expected two Markov chains or more"):
            stack_chains(model, prior_posterior(model, *data, **options), *data)
    with pytest.raises(ModelError, match="20 draws a chain give no leave-one-out density"):
        stack_chains(model, prior_posterior(model, *data, chains=2, markov=True), *data)
