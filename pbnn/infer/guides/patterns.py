"""AutoPatterns: different variational families for different sites, by patterns of their names."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from pbnn.errors import FitError, ModelError
from pbnn.infer.guides.blocks import AutoBlocks, Block, GuideSite, RootKind, VectorBlock
from pbnn.infer.guides.kronecker import matrix_blocks
from pbnn.infer.guides.lowrank import DEFAULT_RANK, check_rank
from pbnn.infer.guides.starts import init_to_fan_in

__all__ = ["AutoPatterns"]

_FAMILIES = ("normal", "lowrank", "full", "kronecker")


class AutoPatterns(AutoBlocks):
    """A guide that gives each group of sites a family of its own; groups are independent.

        AutoPatterns(model, {"layers.0.*": "kronecker", "layers.1.*": "lowrank", "*": "normal"})

    A site belongs to the first pattern that it matches, and all sites of a pattern are one group:

    - "normal": independent Normals;
    - "lowrank": one D + U Uᵀ over the group;
    - "full": one dense covariance over the group;
    - "kronecker": a matrix normal for each weight, with its bias as a homogeneous coordinate where
      the bias is in the group; Normals for the group's other sites.

    Args:
        model: A Pyro model.
        patterns: Shell-style pattern of site names (`*`, `?`, `[…]`) to family, in order.
        init_loc_fn: Initial value of each site.
        init_scale: Initial marginal standard deviation of each entry.
        rank: Columns of each U; 10, or the size of the group where that is less, by default.
        max_width: Kronecker factors of more rows fall back to diagonal plus low rank; see
            `AutoKronecker`.

    Raises:
        FitError: A family is unknown or the rank is out of its range.
        ModelError: When the guide first runs: a pattern matches no site, or only sites that earlier
            patterns took; a site matches no pattern; or "kronecker" found no weight.
    """

    family = "patterns"

    def __init__(
        self,
        model: Any,
        patterns: Mapping[str, str],
        *,
        init_loc_fn: Any = init_to_fan_in,
        init_scale: float = 0.01,
        rank: int | None = None,
        max_width: int = 1024,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale)
        for pattern, family in patterns.items():
            if family not in _FAMILIES:
                raise FitError(
                    f"pattern {pattern!r} asks for family {family!r}; "
                    f"expected one of {', '.join(map(repr, _FAMILIES))}"
                )
        self.patterns = dict(patterns)
        self.rank = check_rank(rank)
        self.max_width = max_width

    def _make_blocks(self, sites: list[GuideSite]) -> dict[str, Block]:
        blocks: dict[str, Block] = {}
        for index, (pattern, group) in enumerate(_groups(sites, self.patterns).items()):
            family = self.patterns[pattern]
            rest = group
            if family == "kronecker":
                matrices = matrix_blocks(group, self.init_scale, "full", True, self.max_width)
                if not matrices:
                    raise ModelError(
                        f"pattern {pattern!r} asks for 'kronecker' but matches no weight matrix, "
                        f"only {_listed(group)}; use 'normal' or 'full' for it"
                    )
                blocks.update(matrices)
                taken = {name for block in matrices.values() for name in block.layout.sites}
                rest = [site for site in group if site.name not in taken]
            if rest:
                root = self._root(pattern, rest)
                blocks[f"group_{index}.vector"] = VectorBlock(rest, self.init_scale, root)
        return blocks

    def _root(self, pattern: str, group: list[GuideSite]) -> RootKind:
        family = self.patterns[pattern]
        if family == "full":
            return "full"
        if family != "lowrank":
            return "diagonal"
        size = sum(site.start.numel() for site in group)
        if self.rank is not None and self.rank > size:
            raise FitError(
                f"rank {self.rank} is above the {size} values that pattern {pattern!r} covers; "
                f"use a rank from 1 to {size}"
            )
        return "lowrank", self.rank or min(DEFAULT_RANK, size)


def _listed(sites: list[GuideSite]) -> str:
    return ", ".join(repr(site.name) for site in sites)


def _groups(sites: list[GuideSite], patterns: Mapping[str, str]) -> dict[str, list[GuideSite]]:
    """Return the sites of each pattern; every pattern has some, and every site has a pattern."""
    groups: dict[str, list[GuideSite]] = {pattern: [] for pattern in patterns}
    for site in sites:
        for pattern in patterns:
            if fnmatchcase(site.name, pattern):
                groups[pattern].append(site)
                break
        else:
            raise ModelError(
                f"site {site.name!r} matches none of the patterns "
                f"{', '.join(map(repr, patterns))}; add '*': 'normal' as the last one"
            )
    for pattern, group in groups.items():
        if not group:
            matching = [site for site in sites if fnmatchcase(site.name, pattern)]
            reason = (
                f"only sites that earlier patterns took ({_listed(matching)})"
                if matching
                else f"no site; the model has {_listed(sites)}"
            )
            raise ModelError(f"pattern {pattern!r} matches {reason}")
    return groups
