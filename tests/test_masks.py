"""Dropout masks: their rates, what they depend on, and what the kinds of dropout make of them."""

import math

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional

from pbnn.errors import ModelError
from pbnn.infer.graph import trace
from pbnn.infer.masks import Masks, check_dropout

ROWS, UNITS, P = 300, 40, 0.3


def mask(draw=0, *, seed=0, row=0, rows=ROWS, before=0):
    """Return which units are kept in the dropout after `before` others."""
    with Masks(seed, draw, row):
        for _ in range(before):
            functional.dropout(torch.ones(1, 1), P)
        return nn.Dropout(P).eval()(torch.ones(rows, UNITS))


def test_units_are_dropped_at_their_rate_and_the_others_scaled():
    kept = mask()
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    dropped = (kept == 0).double()
    count = dropped.numel()
    assert abs(float(dropped.mean()) - P) < 4 * math.sqrt(P * (1 - P) / count)


@pytest.mark.parametrize(
    "other",
    [{"draw": 1}, {"draw": -1}, {"seed": 1}, {"row": 1}, {"before": 1}, {"draw": 2**33}],
    ids=str,
)
def test_masks_of_other_draws_rows_layers_and_seeds_are_independent(other):
    first, second = mask(), mask(**other)
    agree = P**2 + (1 - P) ** 2
    same = float((first == second).double().mean())
    assert abs(same - agree) < 4 * math.sqrt(agree * (1 - agree) / first.numel())


def test_neighbouring_units_rows_and_draws_are_uncorrelated():
    draws = torch.stack([mask(draw, rows=50) for draw in range(60)]).double()
    value = (draws - draws.mean()) / draws.std()
    for dim in range(3):
        product = value * value.roll(1, dim)
        assert abs(float(product.mean())) < 4 / math.sqrt(product.numel())


def test_a_mask_is_the_same_mapped_traced_in_a_loop_and_in_blocks_of_rows():
    draws = torch.arange(5)
    looped = torch.stack([mask(draw) for draw in draws])
    assert torch.equal(vmap(mask)(draws), looped)
    x = torch.ones(ROWS, UNITS)

    def dropped(draw, x):
        with Masks(0, draw):
            return (functional.dropout(x, P),)

    graph = trace(vmap(dropped, (0, None)), (draws, x))
    assert torch.equal(graph(draws + 3, x)[0], torch.stack([mask(draw + 3) for draw in draws]))
    assert torch.equal(mask(row=100, rows=ROWS - 100), mask()[100:])


def test_rates_of_nought_and_one():
    x = torch.randn(4, 3)
    with Masks(0, 0):
        assert torch.equal(functional.dropout(x, 0.0), x)
        assert torch.equal(functional.dropout(x, 1.0), torch.zeros(4, 3))
        assert torch.equal(functional.alpha_dropout(x, 1.0), torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d(0.5), (8, 6, 5)),
        (nn.Dropout2d(0.5), (8, 6, 4, 5)),
        (nn.Dropout3d(0.5), (8, 6, 2, 3, 4)),
        (nn.FeatureAlphaDropout(0.5), (8, 6, 5)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_whole_channels_are_dropped(layer, shape):
    with Masks(0, 0):
        out = layer.eval()(torch.ones(shape)).flatten(2)
    assert bool((out == out[:, :, :1]).all())
    assert len(out.unique()) == 2


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0))
    with Masks(0, 0):
        out = nn.AlphaDropout(0.2).eval()(x).double()
    # Four standard errors; that of the variance from the fourth moment.
    count = out.numel()
    assert abs(float(out.mean())) < 4 / math.sqrt(count)
    error = float(((out**2 - 1) ** 2).mean().sqrt()) / math.sqrt(count)
    assert abs(float((out**2).mean()) - 1) < 4 * error


def test_in_place_dropout_writes_its_input():
    x = torch.ones(50, 4)
    with Masks(0, 0):
        out = functional.dropout(x, 0.5, False, True)
    assert out is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


def test_attention_in_eval_mode_takes_no_path_around_its_dropout():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True).eval()
    layer.self_attn.dropout = 0.0
    check_dropout(layer)
    x, fast = torch.randn(2, 3, 4), torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        outputs = []
        for draw in range(2):
            with Masks(0, draw):
                outputs.append(layer(x))
    assert not torch.equal(*outputs)
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize(
    "layer", [nn.GRU(2, 3, 2, dropout=0.1), nn.MultiheadAttention(4, 2, dropout=0.1)], ids=str
)
def test_layers_with_a_dropout_of_their_own_are_refused_with_the_line_to_write(layer):
    with pytest.raises(ModelError, match=r"write `self\.0\.dropout = 0\.0`"):
        check_dropout(nn.Sequential(layer))
