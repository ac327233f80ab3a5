"""Every family against the dense covariance it states, under Pyro's tools, and how it is chosen."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from guide_cases import (
    GAUSSIANS,
    PATTERNS,
    Network,
    clean,  # noqa: F401
    data,
    flat_unconstrained,
    scrambled,
    trace_latents,
)
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.distributions import MultivariateNormal, biject_to

from pbnn.errors import FitError, ModelError
from pbnn.infer.guides import (
    GUIDES,
    AutoKronecker,
    AutoLayerLowRank,
    AutoPatterns,
    approximation,
    dense_moments,
    draw_guide,
    log_prob_guide,
    make_guide,
)


@pytest.mark.parametrize("kind", GAUSSIANS, ids=str)
def test_density_and_draws_equal_dense(kind):
    x, y = data()
    guide = scrambled(make_guide(kind, Network()), x, y)
    values, log_q = draw_guide(guide, 20_000, seed=1)
    mean, covariance, names = dense_moments(approximation(guide))
    assert names == ["hidden.weight", "hidden.bias", "out.weight", "out.bias", "scale", "share"]
    assert {v.dtype for v in (*values.values(), log_q, mean)} == {torch.float64}
    flat = flat_unconstrained(guide, values, names)
    dense = MultivariateNormal(mean, covariance)
    torch.testing.assert_close(log_q, dense.log_prob(flat), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_prob_guide(guide, values), log_q, rtol=1e-6, atol=1e-6)
    # A correlation of n draws has standard error below 1/sqrt(n); 4.5 of them cover 120 entries.
    scale = covariance.diagonal().sqrt()
    correlation = covariance / torch.outer(scale, scale)
    torch.testing.assert_close(flat.T.corrcoef(), correlation, rtol=0, atol=4.5 / 20_000**0.5)
    assert ((flat.mean(0) - mean).abs() / scale < 4.5 / 20_000**0.5).all()
    assert ((flat.std(0) / scale - 1).abs() < 4.5 / 40_000**0.5).all()


@pytest.mark.parametrize("kind", GAUSSIANS, ids=str)
def test_trace_is_log_q_with_jacobian_and_replays(kind):
    x, y = data()
    guide = scrambled(make_guide(kind, Network()), x, y)
    trace = poutine.trace(guide).get_trace(x, y)
    values = {name: trace.nodes[name]["value"] for name, _ in trace_latents(guide)}
    jacobian = 0.0
    for name, node in trace_latents(guide):
        transform = biject_to(node["fn"].support)
        u = transform.inv(values[name])
        jacobian = jacobian + transform.log_abs_det_jacobian(u, values[name]).sum()
    expected = log_prob_guide(guide, values) - jacobian
    torch.testing.assert_close(trace.log_prob_sum(), expected)
    again = poutine.trace(poutine.replay(guide, trace=trace)).get_trace(x, y)
    assert all(torch.equal(again.nodes[name]["value"], v) for name, v in values.items())
    torch.testing.assert_close(again.log_prob_sum(), trace.log_prob_sum())


@pytest.mark.parametrize("kind", [*GUIDES, PATTERNS], ids=str)
def test_gradient_reaches_every_parameter(kind):
    x, y = data()
    guide = scrambled(make_guide(kind, Network()), x, y)
    Trace_ELBO().differentiable_loss(Network(), guide, x, y).backward()
    for name, parameter in guide.named_parameters():
        # One number, U of the one-output layer, is pinned.
        pinned = parameter.numel() == 1 and "matrix_normal.row" in name
        assert pinned or parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", [*GUIDES, PATTERNS], ids=str)
def test_start_scale_is_init_scale(kind):
    x, y = data()
    guide = make_guide(kind, Network(), init_scale=0.02)
    guide(x, y)
    _, covariance, _ = dense_moments(approximation(guide))
    torch.testing.assert_close(covariance.diagonal().sqrt(), torch.full((16,), 0.02).double())


@pytest.mark.parametrize("kind", [*GUIDES, PATTERNS], ids=str)
def test_median_and_quantiles(kind):
    x, y = data()
    guide = scrambled(make_guide(kind, Network()), x, y)
    values, _ = draw_guide(guide, 20_000, seed=0)
    median, quantiles = guide.median(x, y), guide.quantiles([0.1, 0.5, 0.9], x, y)
    for name in ("hidden.weight", "out.bias", "scale"):
        torch.testing.assert_close(quantiles[name][1], median[name])
        below = (values[name] < quantiles[name][0]).double().mean(0)
        # A proportion of 0.1 over 20,000 draws has standard error 0.0021.
        assert ((below - 0.1).abs() < 4.5 * 0.0021).all()
    assert median["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize("local", [True, False], ids=["local params", "global params"])
@pytest.mark.parametrize("kind", [*GUIDES, PATTERNS], ids=str)
def test_works_under_pyro_svi_and_predictive(kind, local):
    x, y = data(torch.float32)
    with pyro.settings.context(module_local_params=local):
        model = Network(torch.float32)
        guide = make_guide(kind, model)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
        losses = [svi.step(x, y) for _ in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10])
        predictive = Predictive(model, guide=guide, num_samples=4)
        assert predictive(x)["y"].shape == (4, 30)
        assert (len(pyro.get_param_store()) > 0) is not local
        draws, _ = draw_guide(guide, 3, seed=0)
    assert draws["hidden.weight"].shape == (3, 3, 2)


@pytest.mark.parametrize("kind", ["kronecker", "layer_lowrank", PATTERNS], ids=str)
def test_vectorised_particles_give_the_same_elbo(kind):
    def model(x, y):
        w = pyro.sample("w.weight", dist.Normal(x.new_zeros(1, 2), 1).to_event(2))
        b = pyro.sample("w.bias", dist.Normal(x.new_zeros(1), 1).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(x.new_ones(())))
        with pyro.plate("groups", 3):
            pyro.sample("level", dist.Normal(x.new_zeros(3), 1))
        f = (x * w[..., 0, :]).sum(-1) + b[..., 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, scale), obs=y)

    x, y = data()
    patterns = {"w*": "full", "*": "lowrank"}
    guide = scrambled(make_guide(patterns if kind == PATTERNS else kind, model), x, y, 0.1)
    one = Trace_ELBO()
    losses = torch.tensor([one.loss(model, guide, x, y) for _ in range(100)])
    many = Trace_ELBO(num_particles=2000, vectorize_particles=True, max_plate_nesting=1)
    error = losses.std() / 100**0.5
    assert abs(many.loss(model, guide, x, y) - losses.mean()) < 4 * error


def test_latent_site_in_a_plate_and_refused_subsampling():
    def model(size=None):
        with pyro.plate("groups", 4, subsample_size=size):
            pyro.sample("level", dist.Normal(0.0, 1.0).expand([size or 4]))

    guide = AutoKronecker(model)
    assert guide()["level"].shape == (4,)
    with pytest.raises(ModelError, match="'level' is inside the subsampled plate 'groups'"):
        AutoKronecker(model)(2)


def test_model_without_latent_sites_is_refused():
    with pytest.raises(ModelError, match="no latent sites"):
        AutoKronecker(lambda: None)()


def test_state_dict_moves_a_guide():
    x, y = data()
    first = scrambled(AutoKronecker(Network()), x, y)
    second = AutoKronecker(Network())
    second(x, y)
    second.load_state_dict(first.state_dict())
    one, two = (draw_guide(guide, 5, seed=0)[0] for guide in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_low_rank_takes_ranks_up_to_the_number_of_values():
    x, y = data()
    for rank in (1, 5, 16):
        guide = make_guide("lowrank", Network(), rank=rank)
        guide(x, y)
        assert guide.cov_factor.shape == (16, rank)
    with pytest.raises(
        FitError, match="rank 60 is above the model's 16 latent values; use rank 1 to 16"
    ):
        make_guide("lowrank", Network(), rank=60)(x, y)
    guide = make_guide("layer_lowrank", Network(), rank=9)
    guide(x, y)
    assert [block.spread.factor.shape for block in guide.named_blocks().values()] == [
        (9, 9),
        (4, 4),
        (3, 3),
    ]
    with pytest.raises(FitError, match="use a rank from 1 to 9"):
        AutoLayerLowRank(Network(), rank=10)(x, y)


def test_kinds_that_cannot_be_used_are_refused():
    model = Network()
    with pytest.raises(FitError, match="'meanfield' is unknown; use one of 'normal', 'lowrank'"):
        make_guide("meanfield", model)
    with pytest.raises(FitError, match="takes no rank"):
        make_guide("normal", model, rank=3)
    with pytest.raises(FitError, match="no effect on a ready guide"):
        make_guide(AutoNormal(model), model, rank=3)
    with pytest.raises(FitError, match="rank is 0"):
        make_guide("lowrank", model, rank=0)
    with pytest.raises(FitError, match="guide is a int"):
        make_guide(3, model)
    with pytest.raises(FitError, match="returned a NoneType"):
        make_guide(lambda _: None, model)
    instance = AutoNormal(model)
    assert make_guide(instance, model) is instance


def test_patterns_give_each_group_its_family():
    x, y = data()
    guide = scrambled(AutoPatterns(Network(), PATTERNS), x, y)
    _, covariance, _ = dense_moments(approximation(guide))
    group = torch.tensor([0] * 9 + [1] * 3 + [2] + [3] * 3)
    across = group[:, None] != group
    assert (covariance[across] == 0).all()
    assert (covariance[:9, :9] != 0).all()
    assert (covariance[9:12, 9:12] != 0).all()
    assert (covariance[13:, 13:] == covariance[13:, 13:].diagonal().diag()).all()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            {"fc9.*": "normal", "*": "normal"},
            "'fc9.*' matches no site; the model has 'hidden.weight'",
        ),
        ({"*": "normal", "*.bias": "full"}, "only sites that earlier patterns took"),
        ({"hidden.*": "normal"}, "'out.weight' matches none of the patterns"),
        ({"*.bias": "kronecker", "*": "normal"}, "matches no weight matrix"),
    ],
)
def test_patterns_that_cannot_mean_anything_are_refused(patterns, message):
    x, y = data()
    with pytest.raises(ModelError) as error:
        AutoPatterns(Network(), patterns)(x, y)
    assert message in str(error.value)


def test_unknown_family_of_a_pattern_is_refused():
    with pytest.raises(FitError, match="family 'diag'; expected one of 'normal'"):
        AutoPatterns(Network(), {"*": "diag"})
    with pytest.raises(FitError, match="rank 99 is above the 16 values"):
        AutoPatterns(Network(), {"*": "lowrank"}, rank=99)(*data())
