"""Rules for choosing priors. A `scale` is a standard deviation, divided by sqrt(fan in)."""

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import constraints

from pbnn.errors import ModelError
from pbnn.priors.placement import Rule, Target

__all__ = [
    "ard",
    "horseshoe",
    "laplace",
    "layer_scale",
    "normal",
    "pretrained",
    "regularised_horseshoe",
    "sparse_scale",
    "spike_and_slab",
    "student_t",
]

Parts = Mapping[str, Any]


def normal(scale: float = 1.0) -> Rule:
    """Return independent Normals: w ~ N(0, scale / sqrt(fan in)).

    So that the scale of a layer's output does not grow with its width (Neal 1996).

    Args:
        scale: Standard deviation, times sqrt(fan in); a bias has fan-in 1.
    """
    _positive("scale", scale)
    return lambda target: {"": _over(target, dist.Normal(target.number(0.0), _by(target, scale)))}


def laplace(scale: float = 1.0) -> Rule:
    """Return independent Laplace priors of mean 0: sharper at 0 and heavier in the tails.

    Args:
        scale: Standard deviation, times sqrt(fan in): sqrt(2) times Laplace's own parameter.
    """
    _positive("scale", scale)
    return lambda target: {
        "": _over(target, dist.Laplace(target.number(0.0), _by(target, scale / 2**0.5)))
    }


def student_t(scale: float = 1.0, df: float = 4.0) -> Rule:
    """Return independent Student-t priors of mean 0.

    Args:
        scale: Standard deviation, times sqrt(fan in): sqrt(df / (df - 2)) times the t's own scale.
        df: Degrees of freedom, above 2.

    Raises:
        ModelError: An argument is out of range.
    """
    _positive("scale", scale)
    if not df > 2:
        raise ModelError(
            f"df is {df}; expected more than 2, for there to be a standard deviation (horseshoe() "
            "has heavier tails)"
        )
    own = scale * ((df - 2) / df) ** 0.5

    def rule(target: Target) -> Parts:
        prior = dist.StudentT(target.number(df), target.number(0.0), _by(target, own))
        return {"": _over(target, prior)}

    return rule


def pretrained(scale: float = 1.0) -> Rule:
    """Return Normals about the values that parameters have: w ~ N(value, scale / sqrt(fan in)).

    Load the pretrained state into the module before its priors are placed.

    Args:
        scale: Standard deviation, times sqrt(fan in).
    """
    _positive("scale", scale)
    return lambda target: {"": _over(target, dist.Normal(target.value.clone(), _by(target, scale)))}


def spike_and_slab(scale: float = 1.0, spike: float = 0.05, share: float = 0.5) -> Rule:
    """Return the continuous spike and slab: a mixture of a wide and a narrow Normal about 0.

    p(w) = share · N(w; 0, slab²) + (1 − share) · N(w; 0, (spike · slab)²), slab = scale / sqrt(fan
    in), summed in log space (Blundell et al. 2015, eq. 7). No discrete site, so every road runs it.

    Args:
        scale: Standard deviation of the slab, times sqrt(fan in).
        spike: Standard deviation of the spike over that of the slab, below 1.
        share: Prior probability of the slab.

    Raises:
        ModelError: An argument is out of range.
    """
    _positive("scale", scale)
    for name, value in {"spike": spike, "share": share}.items():
        if not 0 < value < 1:
            raise ModelError(f"{name} is {value}; expected a number between 0 and 1")

    def rule(target: Target) -> Parts:
        scales = _by(target, scale) * target.value.new_tensor([1.0, spike])
        weights = target.value.new_tensor([share, 1 - share])
        mixture = _NormalMixture(dist.Categorical(weights), dist.Normal(0 * scales, scales))
        return {"": _over(target, mixture)}

    return rule


class _NormalMixture(dist.MixtureSameFamily):  # type: ignore[misc]
    """A mixture that says that it is real, so that guides know its site for a weight."""

    support = constraints.real


def layer_scale(scale: float = 1.0, *, centred: bool = False) -> Rule:
    """Return one prior scale for each parameter tensor, learned: w ~ N(0, s / sqrt(fan in)).

    s ~ HalfNormal(scale) at site `…_scale`. Non-centred, the weight is a deterministic site, s · z
    / sqrt(fan in) with z ~ N(0, 1) at site `…_raw`: which suits few data, and NUTS.

    Args:
        scale: Scale of the HalfNormal.
        centred: Whether the weight itself is the random site, which suits many data.
    """
    _positive("scale", scale)

    def rule(target: Target) -> Parts:
        s, raw = _names(target, "scale", "raw")
        root, shape = target.fan_in**0.5, target.shape
        hyper = {"scale": dist.HalfNormal(target.number(scale))}
        if centred:
            return {**hyper, "": lambda m: _normals(0.0, getattr(m, s) / root, shape)}
        return {
            **hyper,
            "raw": _standard(target),
            "": lambda m: getattr(m, raw) * getattr(m, s) / root,
        }

    return rule


def ard(scale: float = 1.0) -> Rule:
    """Return automatic relevance determination: one learned scale for each input of a weight.

    w_ij = r_j z_ij with z_ij ~ N(0, 1) at site `…_raw` and r_j ~ HalfCauchy(scale / sqrt(fan in))
    at site `…_relevance`, so that all weights of an irrelevant input go to 0 together (MacKay 1994;
    Neal 1996). The inputs are the second dimension: channels, for a convolution. Of a transposed
    convolution, whose weight is `(in, out / groups, …kernel)`, they are the first.

    Args:
        scale: Scale of the half-Cauchy, times sqrt(fan in).
    """
    _positive("scale", scale)

    def rule(target: Target) -> Parts:
        if target.value.ndim < 2:
            raise ModelError(
                f"ard() is for weights with inputs; {target.name!r} has shape "
                f"{tuple(target.shape)}: give it normal()"
            )
        relevance, raw = _names(target, "relevance", "raw")
        along = 0 if isinstance(target.module, nn.modules.conv._ConvTransposeNd) else 1
        inputs = [size if k == along else 1 for k, size in enumerate(target.shape)]
        prior = dist.HalfCauchy(_by(target, scale)).expand(inputs).to_event(len(inputs))
        return {
            "relevance": prior,
            "raw": _standard(target),
            "": lambda m: getattr(m, relevance) * getattr(m, raw),
        }

    return rule


def horseshoe(scale: float = 1.0) -> Rule:
    """Return the horseshoe: w = τ λ z, which leaves large weights alone and shrinks all others.

    z ~ N(0, 1) at site `…_raw`, λ ~ HalfCauchy(1) for each weight at `…_local`, and
    τ ~ HalfCauchy(scale / sqrt(fan in)) at `…_global` (Carvalho, Polson & Scott 2010).
    Its tails are so heavy that NUTS may diverge: see `regularised_horseshoe`.

    Args:
        scale: Scale of τ, times sqrt(fan in); see `sparse_scale`.
    """
    _positive("scale", scale)

    def rule(target: Target) -> Parts:
        tau, local, raw = _names(target, "global", "local", "raw")
        return {
            **_global_and_local(target, scale),
            "": lambda m: getattr(m, tau) * getattr(m, local) * getattr(m, raw),
        }

    return rule


def regularised_horseshoe(scale: float = 1.0, slab: float = 2.0, slab_df: float = 4.0) -> Rule:
    """Return the horseshoe whose largest weights have a Student-t prior instead of none.

    w = τ λ̃ z with λ̃² = c² λ² / (c² + τ² λ²) (Piironen & Vehtari 2017, eq. 2.8): the horseshoe
    where τλ is far below c, N(0, c) where it is far above. c² = slab² v / fan in with
    v ~ InverseGamma(slab_df / 2, slab_df / 2) at site `…_slab` (their section 2.3), so that the
    slab is a t with slab_df degrees of freedom. Other sites as for `horseshoe`.

    Args:
        scale: Scale of τ, times sqrt(fan in); see `sparse_scale`.
        slab: Scale of the t, times sqrt(fan in).
        slab_df: Its degrees of freedom.
    """
    for name, value in {"scale": scale, "slab": slab, "slab_df": slab_df}.items():
        _positive(name, value)

    def rule(target: Target) -> Parts:
        tau, local, raw, slab_name = _names(target, "global", "local", "raw", "slab")
        width, half = slab / target.fan_in**0.5, target.number(slab_df / 2)

        def weight(m: nn.Module) -> Tensor:
            c, own = width * getattr(m, slab_name).sqrt(), getattr(m, tau) * getattr(m, local)
            # τλ̃ = c (τλ) / sqrt(c² + (τλ)²); hypot, since the square of τλ may overflow.
            product: Tensor = getattr(m, raw) * (c * (own / torch.hypot(c.expand_as(own), own)))
            return product

        return {
            **_global_and_local(target, scale),
            "slab": dist.InverseGamma(half, half),
            "": weight,
        }

    return rule


def sparse_scale(relevant: float, total: int, rows: int, noise: float = 1.0) -> float:
    """Return τ₀ = p₀ / (D − p₀) · noise / sqrt(rows), a horseshoe's scale for p₀ relevant weights.

    Piironen & Vehtari 2017, eq. 3.12, for a linear model of standardised inputs; times sqrt(D) it
    is the `scale` of `horseshoe` on its D weights, which divides by sqrt(fan in).

    Args:
        relevant: Expected number p₀ of weights that are not 0.
        total: Number D of weights.
        rows: Number of rows of data.
        noise: Scale of the noise.

    Raises:
        ModelError: `relevant` is not between 0 and `total`.
    """
    if not 0 < relevant < total:
        raise ModelError(f"relevant is {relevant}; expected a number between 0 and total={total}")
    return relevant / (total - relevant) * noise / math.sqrt(rows)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ModelError(f"{name} is {value}; expected a positive number")


def _names(target: Target, *suffixes: str) -> list[str]:
    return [f"{target.attribute}_{suffix}" for suffix in suffixes]


def _by(target: Target, scale: float) -> Tensor:
    return target.number(scale / target.fan_in**0.5)


def _over(target: Target, prior: Any) -> Any:
    return prior.expand(target.shape).to_event(target.value.ndim)


def _standard(target: Target) -> Any:
    return _over(target, dist.Normal(target.number(0.0), target.number(1.0)))


def _normals(loc: Any, scale: Tensor, shape: torch.Size) -> Any:
    return dist.Normal(loc, scale).expand(shape).to_event(len(shape))


def _global_and_local(target: Target, scale: float) -> Parts:
    return {
        "global": dist.HalfCauchy(_by(target, scale)),
        "local": _over(target, dist.HalfCauchy(target.number(1.0))),
        "raw": _standard(target),
    }
