"""Densities of features: of the layer that was named, at one draw, by training rows alone."""

import numpy as np
import pytest
import torch
from model_cases import Toy, prior_posterior
from sklearn.mixture import GaussianMixture

from pbnn.errors import DataError, ModelError
from pbnn.evaluate.features import FeatureDensity, feature_rows


@pytest.fixture(scope="module")
def case():
    """The toy network, 20 draws of its prior, and 200 training rows."""
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    model = Toy()
    return model, prior_posterior(model, x, x[:, 0] - x[:, 1]), x


def test_features_are_those_of_the_likeliest_draw(case, unchanged):
    model, posterior, x = case
    with unchanged(model):
        found = feature_rows(model, posterior, x, "fc1")
    best = int(posterior.stats["lp"].argmax())
    w, b = (posterior.draws[f"fc1.{name}"][0, best] for name in ("weight", "bias"))
    np.testing.assert_allclose(found, (x @ w.T + b).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(feature_rows(model, posterior, x), x.double().numpy())
    assert not model.fc1._forward_hooks


def test_rows_are_alike_in_blocks(case):
    model, posterior, x = case
    many = x.repeat(4, 1)  # more rows than a block holds
    whole = feature_rows(model, posterior, many, "fc1")
    np.testing.assert_allclose(whole[:200], feature_rows(model, posterior, x, "fc1"), rtol=1e-6)
    assert len(whole) == 800


def test_density_is_that_of_the_mixture(case):
    model, posterior, x = case
    density = FeatureDensity(components=2).fit(model, posterior, x)
    rows = x.double().numpy()
    standardised = (rows - rows.mean(0)) / rows.std(0)
    mixture = GaussianMixture(2, reg_covar=1e-3, random_state=0).fit(standardised)
    np.testing.assert_allclose(density.score(x), -mixture.score_samples(standardised))


def test_far_rows_score_high_and_one_gaussian_is_enough_for_one(case):
    model, posterior, x = case
    density = FeatureDensity("fc1").fit(model, posterior, x)
    assert density.score(4 * x).mean() > density.score(x).mean() + 2
    assert FeatureDensity().fit(model, posterior, x).mixture.n_components == 1
    clusters = torch.cat([x - 8, x + 8])
    assert FeatureDensity().fit(model, posterior, clusters).mixture.n_components == 2


def test_many_features_have_diagonal_covariances(case):
    model, posterior, _ = case
    x = torch.randn(60, 101)
    density = FeatureDensity().fit(model, posterior, x)
    assert density.mixture.covariance_type == "diag"
    assert FeatureDensity(components=1).fit(model, posterior, x).mixture.covariance_type == "full"


def test_only_training_rows_count(case):
    """Rows that are scored together, or before, change nothing."""
    model, posterior, x = case
    density = FeatureDensity("fc1").fit(model, posterior, x[:100])
    alone = density.score(x[100:110])
    density.score(1e3 * x)
    np.testing.assert_allclose(density.score(torch.cat([x[100:110], 9 * x]))[:10], alone)


def test_a_constant_feature_is_left_out(case):
    model, posterior, x = case
    rows = torch.stack([x[:, 0], torch.full((200,), 3.0)], 1)
    density = FeatureDensity().fit(model, posterior, rows)
    assert np.isfinite(density.score(rows)).all()
    with pytest.raises(DataError, match="are constant over the training rows"):
        FeatureDensity().fit(model, posterior, torch.ones(5, 2))


def test_what_is_refused(case):
    model, posterior, x = case
    with pytest.raises(ModelError, match=r"no layer 'fc9'; the model has \['fc1', 'fc2'\]"):
        feature_rows(model, posterior, x, "fc9")
    with pytest.raises(ModelError, match="is not fitted"):
        FeatureDensity().score(x)
    with pytest.raises(DataError, match="3 training rows for 5 components"):
        FeatureDensity(components=5).fit(model, posterior, x[:3])
