"""What a covariance says about itself, against the dense matrix of every Gaussian family."""

import math

import pytest
import torch
from guide_cases import (
    GAUSSIANS,
    Network,
    clean,  # noqa: F401
    data,
    scrambled,
)

from pbnn.infer import covariance
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.guides import approximation, dense_moments, make_guide


@pytest.fixture(params=GAUSSIANS, ids=str)
def pair(request):
    """A Gaussian approximation with every kind of site, and its dense moments by site."""
    rank = 2 if request.param in ("lowrank", "layer_lowrank") else None
    guide = scrambled(make_guide(request.param, Network(), rank=rank), *data())
    known = approximation(guide)
    return GaussianCovariance(known), dense_moments(known)


def split(value, names, shapes):
    sizes = [shapes[name].numel() for name in names]
    return dict(zip(names, value.split(sizes, -1), strict=True))


def test_marginals_by_site(pair):
    found, (mean, dense, names) = pair
    means, scales = found.means(), found.scales()
    assert list(means) == list(scales) == names
    for name, part in split(mean, names, found.shapes).items():
        torch.testing.assert_close(means[name].flatten(), part)
    for name, part in split(dense.diagonal().sqrt(), names, found.shapes).items():
        torch.testing.assert_close(scales[name].flatten(), part)
        assert scales[name].shape == found.shapes[name]


def entropy(dense):
    return 0.5 * float(torch.logdet(2 * math.pi * math.e * dense))


def test_entropies(pair):
    found, (_, dense, names) = pair
    start, entropies = 0, found.entropies()
    for name in names:
        stop = start + found.shapes[name].numel()
        assert entropies[name] == pytest.approx(entropy(dense[start:stop, start:stop]), abs=1e-8)
        start = stop
    assert found.entropy() == pytest.approx(entropy(dense), abs=1e-8)
    assert sum(entropies.values()) >= found.entropy() - 1e-8


def test_spectrum(pair):
    found, (_, dense, _) = pair
    values = torch.linalg.eigvalsh(dense).flip(0)
    torch.testing.assert_close(found.leading_eigenvalues(5), values[:5])
    expected = float(values.sum() ** 2 / values.square().sum())
    assert found.effective_rank() == pytest.approx(expected)


def test_leading_eigenvalues_of_a_large_block(pair, monkeypatch):
    """Lanczos iterations take over from the dense matrix, and find the same."""
    found, (_, dense, _) = pair
    monkeypatch.setattr(covariance, "_DENSE", 4)
    values = torch.linalg.eigvalsh(dense).flip(0)
    torch.testing.assert_close(found.leading_eigenvalues(3), values[:3])


def test_variance_of_linear_functions(pair):
    found, (_, dense, names) = pair
    g = torch.randn(7, 2, found.dim, dtype=torch.float64)
    parts = split(g, names, found.shapes)
    gradients = {name: parts[name].reshape(7, 2, *found.shapes[name]) for name in names}
    total, diagonal = found.variance_of(gradients)
    torch.testing.assert_close(total, torch.einsum("bki,ij,bkj->bk", g, dense, g))
    torch.testing.assert_close(diagonal, (g.square() * dense.diagonal()).sum(-1))
