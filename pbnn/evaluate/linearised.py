"""The variance of f(x) to first order in the latent values, split by where it comes from."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.distributions.transforms import biject_to
from torch import Tensor
from torch.func import jacrev, vmap

from pbnn.errors import ModelError
from pbnn.front_door import prior_values
from pbnn.infer.covariance import GaussianCovariance
from pbnn.model import BoundModel, isolated, run, take

__all__ = ["linearised_variance"]

# Values of the Jacobian held at once.
_BLOCK_VALUES = 2**24


def linearised_variance(
    bound: BoundModel, covariance: GaussianCovariance, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Var f(x_n) ≈ gᵀ Σ g by row and output, and its diagonal part Σ_i σ_i² g_i².

    g is the gradient of f(x_n) at the mean of the unconstrained values. The rest of the variance
    is the cross part, which only a guide with correlations has.

    Args:
        bound: The model and its data.
        covariance: The Gaussian approximation of its posterior.
        rows: Numbers of the rows to look at; all by default.

    Returns:
        Variance and its diagonal part, each `(rows, outputs)`, in float64.

    Raises:
        ModelError: The model has no rows, or f(x) is no tensor with a first axis of rows.
    """
    if bound.rows is None:
        raise ModelError("the model has no plate 'data', so f(x) has no rows to tell apart")
    if rows is None:
        rows = torch.arange(bound.rows)
    with isolated(0, bound.device):
        with prior_values(bound.dtype, bound.device):
            nodes = bound.run({}).nodes
        like = next(iter(bound.named("latent")))
        kind = nodes[like]["value"]
        means = {name: mean.to(kind) for name, mean in covariance.means().items()}
        transforms = {name: biject_to(nodes[name]["fn"].support) for name in means}

        def f(u: Mapping[str, Tensor], x: Any, y: Any) -> Tensor:
            values = {name: transforms[name](value) for name, value in u.items()}
            row = [_one_row(data) for data in (x, y)]
            output = run(bound.model, values, *row, fill=bound.fill).nodes["_RETURN"]["value"]
            if not isinstance(output, Tensor) or output.shape[:1] != (1,):
                raise ModelError(
                    "f(x) is no tensor with a first axis of rows; nothing to linearise"
                )
            return output.reshape(-1)

        parts = [
            covariance.variance_of({name: g.detach().cpu() for name, g in block.items()})
            for block in _jacobians(f, means, bound, rows.to(bound.device))
        ]
    total, diagonal = (torch.cat(values) for values in zip(*parts, strict=True))
    return total, diagonal


def _one_row(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: value[None] for name, value in data.items()}
    return None if data is None else data[None]


def _jacobians(
    f: Callable[..., Tensor], means: dict[str, Tensor], bound: BoundModel, rows: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients by site, block of rows by block, each `(rows, outputs, *shape)`."""
    outputs = f(means, *(take(data, torch.tensor(0)) for data in (bound.x, bound.y))).numel()
    size = max(1, _BLOCK_VALUES // (outputs * sum(mean.numel() for mean in means.values())))
    for block in rows.split(size):
        yield _block(f, means, [take(data, block) for data in (bound.x, bound.y)], len(block))


def _block(
    f: Callable[..., Tensor], means: dict[str, Tensor], data: list[Any], rows: int
) -> dict[str, Tensor]:
    try:
        dims = (None, *(None if value is None else 0 for value in data))
        gradients: dict[str, Tensor] = vmap(jacrev(f), dims)(means, *data)
        return gradients
    except RuntimeError:  # a model that cannot be mapped over rows: one output of one row each
        found = []
        for row in range(rows):
            leaves = {name: mean.clone().requires_grad_() for name, mean in means.items()}
            output = f(leaves, *(take(value, torch.tensor(row)) for value in data))
            found.append(
                [
                    torch.autograd.grad(
                        entry, list(leaves.values()), retain_graph=True, materialize_grads=True
                    )
                    for entry in output
                ]
            )
        return {
            name: torch.stack([torch.stack([entry[k] for entry in row]) for row in found])
            for k, name in enumerate(means)
        }
