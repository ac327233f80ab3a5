"""Points in the space of a model's latent values and constants: where they start, what they become.

A point is one vector: the unconstrained values of all latent sites, then the constants (parameters
without a prior). Roads that train points, or draw from what training left behind, share it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor

from pbnn.errors import FitError
from pbnn.infer.batch_norm import BatchStatistics, statistics_of
from pbnn.infer.density import Density
from pbnn.infer.graph import LaneSafe
from pbnn.infer.guides.starts import find_start
from pbnn.infer.lane import NUMERICAL, TRIES, Lane
from pbnn.infer.posterior import Posterior
from pbnn.infer.unconstrained import from_flat
from pbnn.model import BoundModel, isolated

__all__ = ["Points", "Space", "lane_seed"]

# Up to so many points are evaluated through Python: a trace takes as long as 50 runs.
_FEW = 20

# Rows that BatchNorm statistics are taken from: all layers hold them at once.
_STATISTICS_ROWS = 4096

Values = Mapping[str, Tensor]
Purpose = Literal["start", "rows", "shift", "fit"]


def lane_seed(seed: int, lane: int, purpose: Purpose, attempt: int = 0) -> int:
    """Return the seed of one lane, which does not depend on how many lanes there are."""
    # Never 0 at the end: trailing zeros change nothing in a seed sequence.
    path = (seed, lane, get_args(Purpose).index(purpose), attempt + 1)
    return int(np.random.SeedSequence(path).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class Points:
    """Some points, one in each lane.

    Attributes:
        values: Unconstrained latent values, then constants, `(points, size)`.
        buffers: The statistics of BatchNorm layers at each point, by name, `(points, *shape)`.
    """

    values: Tensor
    buffers: Mapping[str, Tensor]

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.values)

    def __getitem__(self, lanes: slice) -> "Points":
        """Return the points of some lanes."""
        buffers = {name: value[lanes] for name, value in self.buffers.items()}
        return Points(values=self.values[lanes], buffers=buffers)


class Space:
    """The vectors of a bound model: latent values on the unconstrained space, then constants.

    Args:
        bound: The model and its data.

    Attributes:
        bound: The model and its data.
        sites: Where each latent site lies in a vector.
        dim: Number of unconstrained latent values, which come first.
        constants: Shapes of the parameters that are learned, by name, in the order in which they
            follow.
        size: Length of a vector.
        statistics: Names of the BatchNorm layers' running statistics.
    """

    def __init__(self, bound: BoundModel) -> None:
        self.bound = bound
        self._lane = Lane(bound)
        self.sites = self._lane.sites
        self.dim = int(self._lane.start.numel())
        named = bound.model.named_parameters()
        self.constants = {name: p.shape for name, p in named if p.requires_grad}
        self.size = self.dim + sum(shape.numel() for shape in self.constants.values())
        self.statistics = tuple(statistics_of(bound.model))

    def split(self, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the latent values `(…, dim)` of vectors, and their constants by name."""
        z, *parts = values.split([self.dim, *(s.numel() for s in self.constants.values())], -1)
        pairs = zip(self.constants.items(), parts, strict=True)
        return z, {name: part.reshape((*part.shape[:-1], *shape)) for (name, shape), part in pairs}

    def latent(self, z: Tensor) -> dict[str, Tensor]:
        """Return the unconstrained values of one vector `(dim,)` by site."""
        return {s.name: z[s.slice].reshape(s.unconstrained_shape) for s in self.sites}

    def join(self, z: Tensor, constants: Values) -> Tensor:
        """Return vectors `(…, size)`: the inverse of `split`."""
        parts = (constants[name].reshape(*z.shape[:-1], -1) for name in self.constants)
        return torch.cat([z, *parts], -1)

    def start(self, lanes: int, seed: int, init: str | Values = "fan_in") -> Points:
        """Return a start for each lane, which depends on the seed and the lane's index only.

        Constants start in the first lane where the model has them; in the others the layers that
        hold them draw them anew, where torch knows how (`reset_parameters`).

        Args:
            lanes: Number of lanes.
            seed: Seed.
            init: Where latent sites start; see `pbnn.infer.guides.starts.find_start`.

        Raises:
            FitError: `init` is no start, or no start with a finite log joint was found.
        """
        held, values = self.bound.constants(), []
        for lane in range(lanes):
            values.append(self._start(lane, seed, init))
            self._set(held)
        return self.points(torch.stack(values))

    def start_at(self, start: Posterior | Values) -> Points:
        """Return trained points: all draws of a posterior, or the one of a state dict.

        Args:
            start: A posterior of this model, whose every draw is a point; or a trained network's
                `state_dict`, whose names are those of sites, constants and buffers.

        Raises:
            FitError: It does not hold all of the model.
        """
        if isinstance(start, Posterior):
            return self._start_at_draws(start)
        latent = self.bound.named("latent")
        if missing := [name for name in latent if not {name, f"{name}_unconstrained"} & set(start)]:
            raise FitError(
                f"start has no value for site {missing[0]!r}; it has {', '.join(start) or 'none'}"
            )
        with isolated(0, self.bound.device):
            point = self._at(find_start(start, self.bound))
        held = statistics_of(self.bound.model)
        buffers = {name: value.detach()[None].clone() for name, value in held.items()}
        return Points(values=point[None], buffers=buffers)

    def points(self, values: Tensor) -> Points:
        """Return vectors with the statistics of BatchNorm layers recomputed from the rows.

        They are those of all rows up to 4,096, and of so many evenly spaced ones of more.
        """
        found = [self._statistics(point) for point in values] if self.statistics else []
        return Points(
            values=values,
            buffers={name: torch.stack([f[name] for f in found]) for name in self.statistics},
        )

    def culprit(self, point: Points) -> str:
        """Name the first site whose log density is not finite at one point, for a message."""
        try:
            terms = self._terms(point.values[0], {k: v[0] for k, v in point.buffers.items()})
        except (*NUMERICAL, RuntimeError) as error:
            return f" ({str(error).strip().splitlines()[0]})"
        bad = [name for name, term in terms.items() if not math.isfinite(term)]
        return f" (site {bad[0]!r})" if bad else ""

    def fields(self, points: Points) -> dict[str, Any]:
        """Return the fields of a `Posterior` whose draws are these points, in one chain.

        Constants and buffers that all draws share are kept once; `lp` is the log joint on the
        unconstrained space.

        Args:
            points: The draws.
        """
        z, constants = self.split(points.values)
        own = {**constants, **points.buffers}
        varying = {k: v for k, v in own.items() if bool((v != v[:1]).any())}
        self._set({name: value[0] for name, value in own.items() if name not in varying})
        lanes = {
            "constants": {k: v for k, v in varying.items() if k in constants},
            "buffers": {k: v for k, v in varying.items() if k not in constants},
        }
        if len(points) <= _FEW:
            (lp,) = self._each(self._lane.log_density_alone, points)
            values = self._each(self._lane.values, points)
            draws = dict(zip((site.name for site in self.sites), values, strict=True))
            values = self._each(self._lane.deterministic_values, points)
            deterministic = dict(zip(self._lane.deterministic, values, strict=True))
        else:
            density = Density(self.bound, chains=0, compile=False, lanes=lanes if varying else None)
            with torch.no_grad():
                lp = density.log_density(z)
            draws, deterministic = density.constrain(z), density.deterministic(z)

        def cpu(values: Values) -> dict[str, Tensor]:
            return {name: value[None].cpu() for name, value in values.items()}

        def held(values: Values, part: str) -> dict[str, Tensor]:
            return {name: value.cpu() for name, value in values.items()} | cpu(lanes[part])

        return {
            "draws": cpu(draws),
            "deterministic": cpu(deterministic),
            "stats": {"lp": lp[None].cpu()},
            "constants": held(self.bound.constants(), "constants"),
            "buffers": held(self.bound.buffers(), "buffers"),
            "per_draw": tuple(varying),
        }

    def _each(self, function: Callable[..., Any], points: Points) -> tuple[Tensor, ...]:
        """Apply a function of one lane, its latent values and data, to one point after another."""
        z, constants = self.split(points.values)
        state = {**constants, **points.buffers}
        with isolated(0, z.device), torch.no_grad():
            rows = [
                function(z[k], *self._data({name: value[k] for name, value in state.items()}))
                for k in range(len(z))
            ]
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def _start(self, lane: int, seed: int, init: str | Values) -> Tensor:
        """Return a point with finite log joint for one lane."""
        for attempt in range(TRIES):
            with isolated(lane_seed(seed, lane, "start", attempt), self.bound.device):
                if lane or attempt:
                    self._reset()
                point = self._at(find_start(init, self.bound))
            terms = self._terms(point, {})
            if all(map(math.isfinite, terms.values())):
                return point
        listed = ", ".join(f"{name} {term:.6g}" for name, term in terms.items())
        raise FitError(
            f"no start with a finite log joint in {TRIES} tries; log density by site at the last "
            f"one: {listed}; pass init= with values"
        )

    def _at(self, start: Any) -> Tensor:
        """Return the vector of a Pyro `init_loc_fn` and of the constants as they are."""
        with InitMessenger(start), torch.no_grad():
            nodes = self.bound.run({}).nodes
            values = [nodes[site.name]["value"] for site in self.sites]
            (z,) = self._lane.unconstrained(*values, *self._lane.data)
        return self.join(z, self.bound.constants())

    def _terms(self, point: Tensor, buffers: Values) -> dict[str, float]:
        """Return the log density by site at one point, on all rows."""
        z, constants = self.split(point)
        return self._lane.by_site(z, self._data({**constants, **buffers}))

    def _start_at_draws(self, start: Posterior) -> Points:
        bound = self.bound
        count = start.chains * start.draws_per_chain
        if set(start.draws) != set(bound.named("latent")):
            raise FitError(
                f"start has sites {', '.join(start.draws)}, the model "
                f"{', '.join(bound.named('latent'))}; start from a posterior of the same model"
            )
        state = {**start.constants, **start.buffers}
        state = {
            name: value.flatten(0, 1)
            if name in start.per_draw
            else value.expand(count, *value.shape)
            for name, value in state.items()
        }
        held = bound.constants() | bound.buffers()
        theirs, ours = (
            {name: tuple(value.shape) for name, value in sorted(values.items())}
            for values in ({name: value[0] for name, value in state.items()}, held)
        )
        if theirs != ours:
            raise FitError(
                f"start has constants and buffers {theirs or 'none'}, the model {ours or 'none'}; "
                "start from a posterior of the same model"
            )
        self._set({name: value[0] for name, value in state.items()})
        state = {k: v.to(held[k].device, held[k].dtype) for k, v in state.items()}
        z = Density(bound, chains=0, compile=False).unconstrain(start.flat())
        buffers = {name: state[name].clone() for name in self.statistics}
        return Points(values=self.join(z, state), buffers=buffers)

    def _data(self, values: Values) -> tuple[Tensor, ...]:
        """Return what the model runs on, all rows of it, with some constants and buffers given."""
        named = zip(self._lane.names, self._lane.data, strict=True)
        return tuple(values.get(k, v) if part == "state" else v for (part, k), v in named)

    def _statistics(self, point: Tensor) -> dict[str, Tensor]:
        """Return the statistics of BatchNorm layers at one point."""
        z, constants = self.split(point)
        data = self._some_rows(self._data(constants))
        named = zip(self._lane.names, data, strict=True)
        mode = BatchStatistics({key: value for (part, key), value in named if part == "state"})
        with torch.no_grad(), pyro.validation_enabled(False), LaneSafe(), mode:
            self._lane.run(from_flat(self.sites, z), data)
        if missing := set(self.statistics) - set(mode.found):
            raise FitError(
                f"the BatchNorm statistics {', '.join(sorted(missing))} cannot be recomputed: the "
                "layer does not run, or not through torch.nn.functional.batch_norm"
            )
        return mode.found

    def _some_rows(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return data of as many rows as statistics are taken from, evenly spaced."""
        every = math.ceil((self.bound.rows or 1) / _STATISTICS_ROWS)
        if every == 1:
            return data
        parts = (part for part, _ in self._lane.names)
        return tuple(v if p == "state" else v[::every] for p, v in zip(parts, data, strict=True))

    def _set(self, values: Values) -> None:
        """Set constants and buffers in the bound model, in place."""
        model = self.bound.model
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in values.items():
                held[name].copy_(value)

    def _reset(self) -> None:
        """Draw constants anew in the layers that hold all of their parameters as constants."""
        for module in self.bound.model.modules():
            own = dict(module.named_parameters(recurse=False))
            sampled = vars(module).get("_pyro_samples", {})
            reset: Any = getattr(module, "reset_parameters", None)
            if own and not sampled and reset is not None:
                reset()
