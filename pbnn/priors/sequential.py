"""Yesterday's posterior as today's prior."""

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import pyro.distributions as dist
import torch
from pyro.nn import PyroSample
from torch import Tensor, nn
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import Transform

from pbnn.errors import ModelError
from pbnn.priors.placement import Rule, Target

__all__ = ["FittedPosterior", "from_posterior"]

_FACTOR = "posterior_factor"


class FittedPosterior(Protocol):
    """What `from_posterior` reads of a posterior."""

    @property
    def draws(self) -> Mapping[str, Tensor]:
        """Latent sites on their own support, each `(chain, draw, *site_shape)`."""
        ...

    @property
    def approximation(self) -> Mapping[str, Any] | None:
        """The Gaussian on the unconstrained space, or None; see `pbnn.Posterior`."""
        ...


def from_posterior(posterior: FittedPosterior, *, independent: bool = False) -> dict[str, Rule]:
    """Return a posterior as priors for `place_priors`, by site: Bayes' rule, one data set later.

        place_priors(model, from_posterior(posterior))

    The model is the one that was fitted, built anew. Of a posterior that is a Gaussian on the
    unconstrained space the prior is the same Gaussian, as in variational continual learning
    (Nguyen et al. 2018):

    - independent Normals stay so, site by site;
    - S (I + G Gᵀ) S over several sites becomes Normals of scale S about loc + S G u, with one more
      site u ~ N(0, I), `posterior_factor_…`, that they share;
    - a matrix normal over a weight and its bias becomes one over the weight, and a Normal of the
      bias given the weight.

    A constrained site keeps its support. Of any other posterior (NUTS, a subspace, or a guide that
    is no Gaussian), and with `independent`, each value gets a Normal with its mean and scale.

    Args:
        posterior: A fit, a `pbnn.Posterior` for example. Its constants are not among the sites:
            name them in `place_priors(…, constants=…)`, and load their values beforehand by
            `model.load_state_dict(dict(posterior.constants), strict=False)`.
        independent: Whether to keep each value's mean and scale only.

    Returns:
        By site, a rule; add entries for parameters that are new, such as another head.

    Raises:
        ModelError: The Gaussian has one dense covariance over several sites.
    """
    known = posterior.approximation
    # Not each approximation is a Gaussian of the sites: that of a subspace is its plane.
    if known is not None and "blocks" in known:
        rules = _gaussian(known, independent)
    else:
        rules = {name: _moments(value) for name, value in posterior.draws.items()}
    # The factors of an earlier prior acted through sites that now have a prior of their own.
    return {name: rule for name, rule in rules.items() if not _is_factor(name)}


def _gaussian(known: Mapping[str, Any], independent: bool) -> dict[str, Rule]:
    """Return the rules of a Gaussian on the unconstrained space."""
    shapes = {name: torch.Size(shape) for name, shape in known["sites"]}
    rules: dict[str, Rule] = {}
    for index, block in enumerate(known["blocks"]):
        prefix, names = block["prefix"], block["sites"]
        tensors = {
            name.removeprefix(prefix): value
            for name, value in known["tensors"].items()
            if name.startswith(prefix)
        }
        if independent:
            rules |= _independent(tensors, names, shapes)
        elif block["rows"]:
            rules |= _matrix(tensors, names, shapes)
        elif "tril" in tensors:
            raise ModelError(
                f"the posterior has one dense covariance over {names}, which has no form as a "
                "prior of single sites; pass independent=True, or fit guide='lowrank'"
            )
        else:
            rules |= _vector(tensors, names, shapes, f"{_FACTOR}_{index}")
    return rules


def _is_factor(name: str) -> bool:
    return name.rpartition(".")[2].startswith(_FACTOR)


def _moments(draws: Tensor) -> Rule:
    """Return the rule of Normals with the moments of draws `(chain, draw, *site_shape)`."""

    def rule(target: Target) -> Mapping[str, Any]:
        z = biject_to(target.support).inv(draws.flatten(0, 1))
        return {"": _normal(target, z.mean(0), z.std(0))}

    return rule


def _independent(tensors: Mapping[str, Tensor], names: list[str], shapes: Any) -> dict[str, Rule]:
    """Return rules of Normals with the means and scales of one block."""
    loc = tensors["loc"]
    if loc.ndim == 2:
        row, column = _scales(tensors, "row."), _scales(tensors, "column.")
        scale = tensors["scale"] * torch.outer(row, column)
    else:
        scale = _scales(tensors)
    return {
        name: _marginal(loc[..., part], scale[..., part])
        for name, part in _columns(names, shapes, loc.shape[:-1].numel())
    }


def _marginal(loc: Tensor, scale: Tensor) -> Rule:
    return lambda target: {"": _normal(target, loc, scale)}


def _vector(
    tensors: Mapping[str, Tensor], names: list[str], shapes: Any, factor: str
) -> dict[str, Rule]:
    """Return rules of a block with independent entries, or of diagonal plus low rank."""
    if "factor" not in tensors:
        return _independent(tensors, names, shapes)
    return {
        name: _given_factor(
            tensors["loc"][part], tensors["scale"][part], tensors["factor"][part], factor
        )
        for name, part in _columns(names, shapes, 1)
    }


def _given_factor(loc: Tensor, scale: Tensor, loadings: Tensor, factor: str) -> Rule:
    """Return the rule of Normals of `scale` about loc + scale · loadings u, with u ~ N(0, I)."""

    def rule(target: Target) -> Mapping[str, Any]:
        root, shape, support = target.root, _unconstrained(target), target.support
        noise = dist.Normal(torch.zeros_like(loadings[0]), 1).to_event(1)
        setattr(root, factor, PyroSample(noise))
        mean, spread, by = (
            f"{target.attribute}_{suffix}" for suffix in ("prior_mean", "prior_scale", "prior_by")
        )

        def given(m: nn.Module) -> Any:
            shift = (getattr(m, by) @ getattr(root, factor)).reshape(shape)
            normal = dist.Normal(getattr(m, mean) + shift, getattr(m, spread))
            return _on_support(normal.to_event(len(shape)), support)

        return {
            "prior_mean": _like(target, loc, shape),
            "prior_scale": _like(target, scale, shape),
            "prior_by": scale[:, None] * loadings,
            "": given,
        }

    return rule


def _matrix(tensors: Mapping[str, Tensor], names: list[str], shapes: Any) -> dict[str, Rule]:
    """Return rules of a matrix normal over a weight, or a weight and its bias as a last column."""
    loc, row, column = tensors["loc"], _tril(tensors, "row."), _tril(tensors, "column.")
    row, inputs = tensors["scale"] * row, prod(shapes[names[0]][1:])

    def weight(target: Target) -> Mapping[str, Any]:
        mean = _like(target, loc[:, :inputs], target.shape)
        affine = _MatrixAffine(mean, row, column[:inputs, :inputs])
        noise = dist.Normal(torch.zeros_like(mean), 1).to_event(mean.ndim)
        return {"": dist.TransformedDistribution(noise, affine)}

    def bias(target: Target) -> Mapping[str, Any]:
        attribute = names[0].rpartition(".")[2]
        # The last row of the column root is (bᵀ, d): the bias is b-correlated with the inputs.
        slope = torch.linalg.solve_triangular(
            column[:inputs, :inputs].mT, column[inputs, :inputs, None], upper=True
        )
        mean, centre, by, tril = _attributes(target, "mean", "centre", "by", "tril")

        def given(m: nn.Module) -> Any:
            deviation = getattr(m, attribute).flatten(1) - getattr(m, centre)
            shifted = getattr(m, mean) + (deviation @ getattr(m, by)).squeeze(-1)
            return dist.MultivariateNormal(shifted, scale_tril=getattr(m, tril))

        return {
            "prior_mean": _like(target, loc[:, inputs], target.shape),
            "prior_centre": loc[:, :inputs],
            "prior_by": slope,
            "prior_tril": column[inputs, inputs] * row,
            "": given,
        }

    return dict(zip(names, (weight, bias), strict=False))


class _MatrixAffine(Transform):
    """noise E `(out, …)` to loc + A E Bᵀ, with what follows `out` as one dimension in between.

    Args:
        loc: Mean, of the shape of the weight.
        row: A, lower triangular, `(out, out)`.
        column: B, lower triangular, square in the number of inputs.
    """

    bijective = True

    def __init__(self, loc: Tensor, row: Tensor, column: Tensor) -> None:
        super().__init__()
        self.loc, self.row, self.column = loc, row, column
        self.domain = self.codomain = constraints.independent(constraints.real, loc.ndim)

    def _call(self, x: Tensor) -> Tensor:
        spread = self.row @ x.flatten(1 - self.loc.ndim) @ self.column.mT
        return self.loc + spread.reshape(x.shape)

    def _inverse(self, y: Tensor) -> Tensor:
        spread = (y - self.loc).flatten(1 - self.loc.ndim)
        noise = torch.linalg.solve_triangular(self.row, spread, upper=False)
        noise = torch.linalg.solve_triangular(self.column, noise.mT, upper=False).mT
        value: Tensor = noise.reshape(y.shape)
        return value

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log|d y / d x| = in · log|A| + out · log|B|."""
        (out, _), (inputs, _) = self.row.shape, self.column.shape
        logs = (root.diagonal().log().sum() for root in (self.row, self.column))
        determinant: Tensor = inputs * next(logs) + out * next(logs)
        return determinant.expand(x.shape[: x.ndim - self.loc.ndim])


def _scales(tensors: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Return the marginal standard deviations of a covariance from the tensors of its root."""
    if f"{prefix}tril" in tensors:
        return tensors[f"{prefix}tril"].square().sum(-1).sqrt()
    scale = tensors[f"{prefix}scale"]
    if f"{prefix}factor" not in tensors:
        return scale
    return scale * (1 + tensors[f"{prefix}factor"].square().sum(-1)).sqrt()


def _tril(tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Return the dense Cholesky factor of a covariance from the tensors of its root."""
    if f"{prefix}tril" in tensors:
        return tensors[f"{prefix}tril"]
    scale = tensors[f"{prefix}scale"]
    if f"{prefix}factor" not in tensors:
        return scale.diag_embed()
    spread = scale[:, None].double() * tensors[f"{prefix}factor"]
    covariance = scale.double().square().diag_embed() + spread @ spread.mT
    tril: Tensor = torch.linalg.cholesky(covariance).to(scale)
    return tril


def _columns(names: list[str], shapes: Any, rows: int) -> list[tuple[str, slice]]:
    """Return where each site of a block lies along the last dimension of its packed value."""
    found, start = [], 0
    for name in names:
        stop = start + shapes[name].numel() // rows
        found.append((name, slice(start, stop)))
        start = stop
    return found


def _attributes(target: Target, *suffixes: str) -> list[str]:
    return [f"{target.attribute}_prior_{suffix}" for suffix in suffixes]


def _normal(target: Target, loc: Tensor, scale: Tensor) -> Any:
    shape = _unconstrained(target)
    loc, scale = _like(target, loc, shape), _like(target, scale, shape)
    if not bool((scale > 0).all()):
        raise ModelError(
            f"site {target.name!r} has no spread in the posterior, so it can be no prior; expected "
            "two or more draws that differ"
        )
    return _on_support(dist.Normal(loc, scale).to_event(len(shape)), target.support)


def _unconstrained(target: Target) -> torch.Size:
    return torch.Size(biject_to(target.support).inverse_shape(target.shape))


def _on_support(normal: Any, support: constraints.Constraint) -> Any:
    """Return a Normal of unconstrained values as a distribution of values on a support."""
    plain = support
    while isinstance(plain, constraints.independent):
        plain = plain.base_constraint
    if plain is constraints.real:
        return normal
    return _OnSupport(normal, support)


class _OnSupport(dist.TransformedDistribution):  # type: ignore[misc]
    """A Normal taken to a support, which it keeps: a bijection that ends in a shift forgets it.

    Args:
        normal: Normal of the unconstrained values, one event.
        support: The support.
    """

    def __init__(self, normal: Any, support: constraints.Constraint) -> None:
        self._support = support
        super().__init__(normal, [biject_to(support)])

    @property
    def support(self) -> constraints.Constraint:
        """The support."""
        return self._support

    def expand(self, batch_shape: Any, _instance: Any = None) -> "_OnSupport":
        """Return the distribution with a larger batch shape."""
        return _OnSupport(self.base_dist.expand(batch_shape), self._support)


def _like(target: Target, value: Tensor, shape: torch.Size) -> Tensor:
    if value.numel() != shape.numel():
        raise ModelError(
            f"site {target.name!r} has {value.numel()} values in the posterior and "
            f"{shape.numel()} in this model; build the model with the options of that fit"
        )
    return value.reshape(shape)
