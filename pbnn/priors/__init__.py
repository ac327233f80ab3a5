"""Priors on the parameters of any module: where they go, rules for choosing them, the last fit's.

place_priors(network, {"*.weight": horseshoe(), "*.bias": dist.Normal(0.0, 1.0)})
"""

from pbnn.priors.description import describe_priors
from pbnn.priors.placement import Target, place_priors
from pbnn.priors.rules import (
    ard,
    horseshoe,
    laplace,
    layer_scale,
    normal,
    pretrained,
    regularised_horseshoe,
    sparse_scale,
    spike_and_slab,
    student_t,
)
from pbnn.priors.sequential import from_posterior

__all__ = [
    "Target",
    "ard",
    "describe_priors",
    "from_posterior",
    "horseshoe",
    "laplace",
    "layer_scale",
    "normal",
    "place_priors",
    "pretrained",
    "regularised_horseshoe",
    "sparse_scale",
    "spike_and_slab",
    "student_t",
]
