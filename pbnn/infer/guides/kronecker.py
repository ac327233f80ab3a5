"""AutoKronecker: a matrix-normal (Kronecker-factored) guide for the weights of each layer."""

import warnings
from typing import Any

from pbnn.errors import FitError, PbnnWarning
from pbnn.infer.guides.blocks import (
    AutoBlocks,
    Block,
    GuideSite,
    MatrixBlock,
    RootKind,
    VectorBlock,
    check_root_kind,
)
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = ["AutoKronecker", "matrix_blocks"]

_FALLBACK_RANK = 10


class AutoKronecker(AutoBlocks):
    """A guide with one matrix normal for each layer, and one Normal for all other sites.

    A layer is a real site whose last name holds "weight" and that has two or more dimensions, all
    of them event dimensions; a convolution's weight counts as `(out, in·kernel)`. Its covariance is
    scale² · U ⊗ V, with U between outputs and V between inputs (Louizos & Welling 2016). Full
    factors hold (out² + in²)/2 parameters.

    It is exact for a linear model with Normal noise and one output, or several of equal noise scale
    whose priors differ by input only, with `bias="homogeneous"`. It does not contain the mean-field
    family: where outputs differ in noise, a diagonal guide can be closer.

    Args:
        model: A Pyro model.
        init_loc_fn: Initial value of each site.
        init_scale: Initial standard deviation of each entry in unconstrained space.
        factors: Form of U and V: "full", "diagonal", or ("lowrank", rank), diagonal plus low rank.
        bias: "homogeneous" makes the bias one more input of its layer, so that it varies with the
            weight; "separate" puts it into the Normal.
        max_width: Full factors of more rows than this fall back to diagonal plus rank 10, with a
            warning.

    Raises:
        FitError: An option is none of those listed.
    """

    family = "kronecker"

    def __init__(
        self,
        model: Any,
        *,
        init_loc_fn: Any = init_to_fan_in,
        init_scale: float = 0.01,
        factors: RootKind = "full",
        bias: str = "homogeneous",
        max_width: int = 1024,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale)
        check_root_kind(factors)
        if bias not in ("homogeneous", "separate"):
            raise FitError(f"bias is {bias!r}; expected 'homogeneous' or 'separate'")
        self.factors, self.bias, self.max_width = factors, bias, max_width

    def _make_blocks(self, sites: list[GuideSite]) -> dict[str, Block]:
        blocks = matrix_blocks(
            sites, self.init_scale, self.factors, self.bias == "homogeneous", self.max_width
        )
        taken = {name for block in blocks.values() for name in block.layout.sites}
        rest = [site for site in sites if site.name not in taken]
        if rest:
            blocks["others.normal"] = VectorBlock(rest, self.init_scale)
        return blocks


def matrix_blocks(
    sites: list[GuideSite], init_scale: float, factors: RootKind, with_bias: bool, max_width: int
) -> dict[str, Block]:
    """Return a matrix block for each layer among `sites`, by name; other sites are left out."""
    biases = {site.name: site for site in sites if site.real_event and site.start.dim() == 1}
    blocks: dict[str, Block] = {}
    for weight in sites:
        leaf = weight.name.rpartition(".")[2]
        if "weight" not in leaf or not weight.real_event or weight.start.dim() < 2:
            continue
        members = [weight]
        bias = biases.get(weight.name[: -len(leaf)] + leaf.replace("weight", "bias"))
        if with_bias and bias is not None and bias.start.shape == weight.start.shape[:1]:
            members.append(bias)
        rows = weight.start.shape[0]
        columns = sum(site.start.numel() for site in members) // rows
        row, column = (_capped(factors, size, max_width, weight.name) for size in (rows, columns))
        blocks[f"{weight.name}.matrix_normal"] = MatrixBlock(members, init_scale, row, column)
    return blocks


def _capped(factors: RootKind, size: int, max_width: int, name: str) -> RootKind:
    """Return the form of a factor of `size` rows: full ones end at the width cap."""
    if isinstance(factors, tuple):
        return factors[0], min(factors[1], size)
    if factors == "full" and size > max_width:
        warnings.warn(
            f"site {name!r}: a full {size} × {size} factor is above max_width={max_width}; it is "
            f"diagonal plus rank {_FALLBACK_RANK} instead (raise max_width to keep it full)",
            PbnnWarning,
            stacklevel=2,
        )
        return "lowrank", min(_FALLBACK_RANK, size)
    return factors
