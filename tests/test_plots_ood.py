"""The picture of the field: lines over one input, a map over two, and shapes it refuses.

Needs no torch.
"""

import numpy as np
import pytest

from pbnn import plots
from pbnn.errors import DataError
from pbnn.plots.ood import plot_field


def test_lines_of_several_runs_and_their_median():
    x = np.linspace(-1, 1, 5)
    runs = np.abs(np.random.default_rng(0).normal(size=(3, 5))) + 0.1
    axes = plot_field(x, runs, training=[-0.5, 0.5])
    drawn = [line.get_ydata() for line in axes.lines]
    for line, expected in zip(drawn, [*runs, np.median(runs, 0)], strict=False):
        np.testing.assert_allclose(line, expected)
    assert axes.lines[-1].get_xdata().tolist() == [-0.5, 0.5]
    assert axes.get_ylim()[0] == 0
    one = plot_field(x, runs[0], log=True)
    assert len(one.lines) == 1
    assert one.get_yscale() == "log"


def test_a_map_of_two_inputs(tmp_path):
    first, second = np.linspace(0, 1, 4), np.linspace(5, 6, 3)
    x = np.stack([v.ravel() for v in np.meshgrid(first, second, indexing="ij")], 1)
    u = x[:, 0] + 10 * x[:, 1]
    axes = plot_field(x, u, training=x[:2])
    (mesh,) = axes.collections
    np.testing.assert_allclose(mesh.get_array(), first + 10 * second[:, None])
    assert plots.save(axes, tmp_path / "map.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("x", "scale"), [((5,), (4,)), ((5, 2), (5,)), ((4, 2), (3, 4)), ((2, 2, 2), (2,))]
)
def test_shapes_that_do_not_fit(x, scale):
    generator = np.random.default_rng(0)
    with pytest.raises(DataError, match=r"expected \(n,\)|no grid"):
        plot_field(generator.random(x), generator.random(scale))
