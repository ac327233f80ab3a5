"""Sharpness: eigenvalues against dense ones, perturbations against the quadratic they are of."""

import math

import pytest
import torch
from model_cases import Linear, Toy, linear_data
from test_map import Normed

import pbnn
from pbnn.errors import DataError
from pbnn.evaluate.sharpness import check_sharpness, lanczos


def test_lanczos_finds_the_extreme_eigenvalues():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(80, 80, generator=generator, dtype=torch.float64)
    matrix = root + root.T
    start = torch.randn(80, generator=generator, dtype=torch.float64)
    values, residual = lanczos(lambda v: matrix @ v, start, iterations=70)
    exact = torch.linalg.eigvalsh(matrix)
    assert abs(values[-1] - exact[-1]) <= residual + 1e-9
    assert residual < 1e-3 * exact[-1]
    torch.testing.assert_close(values[[0, -1]], exact[[0, -1]], rtol=1e-3, atol=0.0)
    # A space that the start spans is exhausted early.
    values, residual = lanczos(lambda v: 3 * v, start)
    assert values.tolist() == pytest.approx([3.0])
    assert residual < 1e-9


def test_linear_model_has_its_exact_curvature():
    x, y = linear_data(40, 5)
    model = Linear(5)
    point = pbnn.fit_map(model, x, y, steps=400, lr=0.1, dtype=torch.float64, progress=False)
    found = check_sharpness(model, point, x, y, radii=(0.1, 1.0), perturbations=200)
    hessian = torch.linalg.inv(model.exact(x, y)[1]) / 40
    exact = torch.linalg.eigvalsh(hessian)
    assert found.largest == pytest.approx(float(exact[-1]), rel=1e-6)
    assert found.smallest == pytest.approx(float(exact[0]), rel=1e-6)
    assert found.gradient_norm < 1e-4
    # At the optimum a push u costs uᵀHu/2, on average r² tr(H)/2n.
    for radius, increase, spread in zip(found.radii, found.increase, found.spread, strict=True):
        expected = radius**2 * float(exact.mean()) / 2
        assert abs(increase - expected) < 4 * spread / math.sqrt(200) + 1e-6
    table = found.to_frame()
    assert list(table.columns) == ["quantity", "value"]
    assert "largest eigenvalue" in set(table["quantity"])


def test_sharpness_aware_training_ends_where_the_loss_is_flatter(toy):
    # Over seeds 0 to 4 of this fit it was 2.8 to 11 times flatter.
    ends = [
        pbnn.fit_map(Toy(), *toy, steps=150, lr=0.03, sharpness=radius, progress=False)
        for radius in (0.0, 0.5)
    ]
    plain, aware = (check_sharpness(Toy(), end, *toy).largest for end in ends)
    assert aware < plain


def test_mean_of_several_draws_has_batch_statistics_of_its_own():
    x = torch.randn(30, 2)
    options = {"snapshots": 2, "every": 1, "steps": 5, "draws": 3, "progress": False}
    posterior = pbnn.fit_swag(Normed(), x, x[:, 0], **options)
    found = check_sharpness(Normed(), posterior, x, x[:, 0], radii=(0.1,), perturbations=2)
    assert math.isfinite(found.largest)


def test_options_out_of_range_are_refused(toy):
    posterior = pbnn.fit_map(Toy(), *toy, steps=1, progress=False)
    with pytest.raises(DataError, match="perturbations=1; expected at least 2"):
        check_sharpness(Toy(), posterior, *toy, perturbations=1)
    with pytest.raises(DataError, match="radii is empty"):
        check_sharpness(Toy(), posterior, *toy, radii=())
    with pytest.raises(DataError, match="radius -1; expected a positive length"):
        check_sharpness(Toy(), posterior, *toy, radii=(-1,))
