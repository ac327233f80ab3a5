"""The KL divergence from guide to prior in closed form: where it exists, and its parts."""

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution
from torch import Tensor
from torch.distributions import Independent, Normal

from pbnn.front_door import prior_values
from pbnn.infer.guides.drawing import PackedGaussian
from pbnn.model import BoundModel, isolated

__all__ = ["expected_log_prob", "has_closed_form"]


def has_closed_form(bound: BoundModel, blocks: Sequence[PackedGaussian]) -> list[bool]:
    """Return for each block of a guide whether its KL divergence has a closed form.

    It has where the priors of all its sites are Normal and do not depend on the block's own values.
    They may depend on other blocks (a weight's scale, say), which the guide draws independently:
    then the closed form is that given those draws.
    """
    with isolated(0, bound.device), torch.no_grad(), prior_values(bound.dtype, bound.device):
        first = bound.run({})
        values = {name: first.nodes[name]["value"] for name in bound.named("latent")}
        closed = []
        for block in blocks:
            own = block.layout.sites
            again = bound.run({n: value for n, value in values.items() if n not in own})
            pairs = ((first.nodes[name], again.nodes[name]) for name in own)
            closed.append(all(_same_normal(*pair) for pair in pairs))
    return closed


def expected_log_prob(fn: Any, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the expectation of a Normal log density under marginals of given moments, summed.

    E log N(w; m, s) = log N(E w; m, s) − Var w / (2 s²)

    Args:
        fn: Independent Normals, as `has_closed_form` takes them.
        mean: Means, of the shape of one value.
        variance: Variances.
    """
    normal = _normal(fn)
    assert normal is not None
    expected: Tensor = fn.log_prob(mean).sum() - 0.5 * (variance / normal.scale.square()).sum()
    return expected


def _normal(fn: Any) -> Normal | None:
    """Return the Normal that a distribution is of many, without what only shapes it."""
    while isinstance(fn, Independent | ExpandedDistribution):
        fn = fn.base_dist
    return fn if isinstance(fn, Normal) else None


def _same_normal(first: Any, second: Any) -> bool:
    """Whether two nodes of one site have the same Normal prior, not masked and not scaled."""
    pair = [_normal(node["fn"]) for node in (first, second)]
    plain = all(node["mask"] is None and node["scale"] == 1.0 for node in (first, second))
    if pair[0] is None or pair[1] is None or not plain:
        return False
    return torch.equal(pair[0].loc, pair[1].loc) and torch.equal(pair[0].scale, pair[1].scale)
