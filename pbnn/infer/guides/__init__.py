"""Variational families as Pyro AutoGuides, and one way to make, draw and describe any of them.

A fit uses four functions, and never asks which family it has:

    guide = make_guide("kronecker", model)           # or any AutoGuide class, instance or function
    values, log_q = draw_guide(guide, 1000, (x, y))  # after the fit
    approximation(guide)                             # plain tensors to keep, or None
    dense_moments(approximation(guide))              # mean and covariance, for small models
"""

from pbnn.infer.guides.choose import GUIDES, make_guide
from pbnn.infer.guides.drawing import (
    approximation,
    dense_moments,
    draw_guide,
    log_prob_guide,
    prepare_guide,
)
from pbnn.infer.guides.kronecker import AutoKronecker
from pbnn.infer.guides.lowrank import AutoLayerLowRank, AutoLowRank
from pbnn.infer.guides.patterns import AutoPatterns
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = [
    "GUIDES",
    "AutoKronecker",
    "AutoLayerLowRank",
    "AutoLowRank",
    "AutoPatterns",
    "approximation",
    "dense_moments",
    "draw_guide",
    "init_to_fan_in",
    "log_prob_guide",
    "make_guide",
    "prepare_guide",
]
