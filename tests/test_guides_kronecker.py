"""The matrix normal of one layer: covariance, bias, shapes of weights, width cap, memory."""

import subprocess
import sys
import textwrap

import pyro.distributions as dist
import pytest
import torch
from guide_cases import (
    clean,  # noqa: F401
    flat_unconstrained,
    scrambled,
)
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import MultivariateNormal

from pbnn.errors import FitError, PbnnWarning
from pbnn.infer.guides import AutoKronecker, approximation, dense_moments, draw_guide
from pbnn.infer.guides.roots import DiagonalRoot, LowRankRoot, TriangularRoot


class Layer(PyroModule):
    """One layer `fc` of any torch type under N(0, 1) priors."""

    def __init__(self, layer, **extra):
        super().__init__()
        self.fc = PyroModule[type(layer)](*extra.pop("args"), **extra)
        for name, parameter in list(self.fc.named_parameters()):
            prior = dist.Normal(0.0, 1.0).expand(parameter.shape).to_event(parameter.dim())
            setattr(self.fc, name, PyroSample(prior))

    def forward(self, *args):
        return {name: getattr(self.fc, name) for name in self.fc._pyro_samples}


def layer(cls, *args, **options):
    return Layer(cls(*args, **options), args=args, **options)


def test_weight_of_unequal_factors_has_the_kronecker_covariance():
    guide = AutoKronecker(layer(nn.Linear, 2, 3, bias=False))
    guide()
    block = guide.named_blocks()["fc.weight.matrix_normal"]
    u = torch.tensor([[1.0, 0.6, -0.3], [0.6, 0.8, 0.1], [-0.3, 0.1, 0.5]])
    v = torch.tensor([[0.9, -0.5], [-0.5, 0.6]])
    for factor, covariance in ((block.row, u), (block.column, v)):
        tril = torch.linalg.cholesky(covariance)
        factor.scale, factor.unit_tril = tril.diagonal(), tril / tril.diagonal()[:, None]
    block.scale = (u.diagonal().mean() * v.diagonal().mean()).sqrt()  # both factors are pinned
    values, log_q = draw_guide(guide, 200_000, seed=0)
    flat = values["fc.weight"].flatten(1)
    # The largest variance is 0.9: no entry has a standard error above 0.9·sqrt(2/200,000) = 0.003.
    torch.testing.assert_close(flat.T.cov(), torch.kron(u, v), rtol=0, atol=0.02)
    mean = guide.median()["fc.weight"].flatten()
    dense = MultivariateNormal(mean, torch.kron(u, v))
    torch.testing.assert_close(log_q, dense.log_prob(flat), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", ["homogeneous", "separate"])
def test_bias_is_a_column_or_apart(bias):
    guide = scrambled(AutoKronecker(layer(nn.Linear, 2, 3), bias=bias), None, None)
    _, covariance, names = dense_moments(approximation(guide))
    assert names == ["fc.weight", "fc.bias"]
    cross = covariance[:6, 6:]
    block = guide.named_blocks()["fc.weight.matrix_normal"].gaussian()
    u, v = block.row.covariance(), block.scale**2 * block.column.covariance()
    if bias == "homogeneous":
        expected = torch.einsum("ik,j->ijk", u, v[:2, 2]).reshape(6, 3)
        torch.testing.assert_close(cross, expected)
        torch.testing.assert_close(covariance[6:, 6:], v[2, 2] * u)
        torch.testing.assert_close(covariance[:6, :6], torch.kron(u, v[:2, :2].contiguous()))
    else:
        assert (cross == 0).all()
        assert (covariance[6:, 6:] == covariance[6:, 6:].diagonal().diag()).all()
        torch.testing.assert_close(covariance[:6, :6], torch.kron(u, v))


def test_convolution_and_recurrent_weights_are_matrices():
    guide = scrambled(AutoKronecker(layer(nn.Conv2d, 2, 3, kernel_size=2)), None, None)
    (block,) = guide.named_blocks().values()
    assert block.layout.sites == {"fc.weight": (3, 2, 2, 2), "fc.bias": (3,)}
    assert block.gaussian().loc.shape == (3, 9)
    values, log_q = draw_guide(guide, 5, seed=0)
    assert values["fc.weight"].shape == (5, 3, 2, 2, 2)
    packed = torch.cat([values["fc.weight"].flatten(2), values["fc.bias"][..., None]], -1)
    gaussian = block.gaussian()
    dense = MultivariateNormal(gaussian.loc.flatten(), gaussian.covariance())
    torch.testing.assert_close(log_q, dense.log_prob(packed.flatten(1)), rtol=1e-4, atol=1e-4)
    guide = scrambled(AutoKronecker(layer(nn.GRU, 2, 4)), None, None)
    assert [list(block.layout.sites) for block in guide.named_blocks().values()] == [
        ["fc.weight_ih_l0", "fc.bias_ih_l0"],
        ["fc.weight_hh_l0", "fc.bias_hh_l0"],
    ]


def test_factors_above_the_width_cap_fall_back_with_a_warning():
    guide = AutoKronecker(layer(nn.Linear, 30, 12), max_width=20)
    with pytest.warns(
        PbnnWarning, match=r"'fc.weight': a full 31 × 31 factor is above max_width=20"
    ):
        guide()
    gaussian = guide.named_blocks()["fc.weight.matrix_normal"].gaussian()
    assert isinstance(gaussian.row, TriangularRoot)
    assert isinstance(gaussian.column, LowRankRoot)


@pytest.mark.parametrize("factors", ["diagonal", ("lowrank", 2)], ids=str)
def test_other_forms_of_factors(factors):
    guide = scrambled(AutoKronecker(layer(nn.Linear, 4, 3), factors=factors), None, None)
    gaussian = guide.named_blocks()["fc.weight.matrix_normal"].gaussian()
    kinds = {"diagonal": DiagonalRoot}
    assert isinstance(gaussian.column, kinds.get(str(factors), LowRankRoot))
    for root in (gaussian.row, gaussian.column):
        torch.testing.assert_close(root.variance().mean(), torch.tensor(1.0))
    values, log_q = draw_guide(guide, 50, seed=0)
    mean, covariance, names = dense_moments(approximation(guide))
    flat = flat_unconstrained(guide, values, names)
    torch.testing.assert_close(
        log_q, MultivariateNormal(mean, covariance).log_prob(flat), rtol=1e-3, atol=1e-3
    )


def test_options_out_of_range_are_refused():
    model = layer(nn.Linear, 2, 3)
    with pytest.raises(FitError, match="factors is 'dense'; expected 'full', 'diagonal' or"):
        AutoKronecker(model, factors="dense")
    with pytest.raises(FitError, match="factors"):
        AutoKronecker(model, factors=("lowrank", 0))
    with pytest.raises(FitError, match="bias is 'joint'; expected 'homogeneous' or 'separate'"):
        AutoKronecker(model, bias="joint")
    with pytest.raises(FitError, match="init_scale is 0"):
        AutoKronecker(model, init_scale=0.0)
    with pytest.raises(FitError, match=r"call guide\(x, y\) once"):
        AutoKronecker(model).median()


def test_a_500_by_200_layer_stays_under_500_mb():
    script = """
        import resource, sys, torch, pyro
        import pyro.distributions as dist
        from pyro.infer import SVI, Trace_ELBO
        from pbnn.infer.guides import AutoKronecker

        def model():
            w = pyro.sample("fc.weight", dist.Normal(0.0, 0.1).expand([500, 200]).to_event(2))
            pyro.sample("fc.bias", dist.Normal(0.0, 1.0).expand([500]).to_event(1))

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        before = peak()
        svi = SVI(model, AutoKronecker(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
        for _ in range(5):
            svi.step()
        print(peak() - before)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 500
