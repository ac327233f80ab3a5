"""SWAG: a Gaussian about the path of an optimiser that goes on at a constant rate."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor

from pbnn.errors import FitError, ModelError
from pbnn.front_door import bind
from pbnn.infer.descent import Descent, Optimiser, StepOptions
from pbnn.infer.guides.gaussians import VectorNormal
from pbnn.infer.guides.roots import DiagonalRoot, LowRankRoot
from pbnn.infer.log_joint import LogJoint
from pbnn.infer.map import start_word, trained_point
from pbnn.infer.options import whole_number
from pbnn.infer.points import Space
from pbnn.infer.posterior import Posterior, provenance
from pbnn.model import Data, Model, isolated

__all__ = ["SnapshotMoments", "fit_swag", "sweep_rank"]

# Columns of the low-rank part (Maddox et al. 2019, section 3.2), where there are as many snapshots.
_RANK = 20
# Rows in a batch, where the data have ten times as many.
_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class SnapshotMoments:
    """The Gaussian of SWAG (Maddox et al. 2019, section 3.2) over one vector of all parameters.

    Attributes:
        mean: Mean of all snapshots `(size,)`.
        variance: Their variances `(size,)`, not scales: second moment minus squared mean.
        deviations: D of the low-rank part, `(size, rank)`: each of the last snapshots minus the
            mean of those up to it. No columns for the diagonal form.
    """

    mean: Tensor
    variance: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, snapshots: Tensor, rank: int) -> "SnapshotMoments":
        """Return the moments of some snapshots.

        Args:
            snapshots: Points in the order in which the optimiser met them, `(snapshots, size)`;
                where it started from is none of them.
            rank: Number of columns of the low-rank part, 0 for the diagonal form.

        Raises:
            FitError: There are fewer than 2 snapshots, or the rank is 1, below 0 or above their
                number.
        """
        count = len(snapshots)
        if count < 2:
            raise FitError(f"snapshots={count}; expected at least 2, which a variance needs")
        check_rank(rank, count)
        exact = snapshots.double()
        numbers = torch.arange(1, count + 1, dtype=torch.float64, device=exact.device)
        means = exact.cumsum(0) / numbers[:, None]
        moments = means[-1], exact.var(0, correction=0), (exact - means)[count - rank :].T
        mean, variance, deviations = (value.to(snapshots.dtype) for value in moments)
        return cls(mean=mean, variance=variance, deviations=deviations.contiguous())

    @property
    def rank(self) -> int:
        """Number of columns of the low-rank part; 0 for the diagonal form."""
        return self.deviations.shape[1]

    def draw(self, count: int) -> Tensor:
        """Draw from the Gaussian, `(count, size)`, with torch's global generator.

        mean + sqrt(variance / 2) z₁ + D z₂ / sqrt(2 (rank − 1)) (eq. 1), one z₂ for all
        parameters; the diagonal form alone is mean + sqrt(variance) z₁ (section 3.1).
        """
        like = self.mean
        first = torch.randn(count, len(like), dtype=like.dtype, device=like.device)
        if not self.rank:
            return like + self.variance.sqrt() * first
        second = torch.randn(count, self.rank, dtype=like.dtype, device=like.device)
        low_rank = second @ self.deviations.T / math.sqrt(2 * (self.rank - 1))
        return like + (self.variance / 2).sqrt() * first + low_rank

    def normal(self, dim: int) -> VectorNormal:
        """Return the marginal Gaussian of the first `dim` values, with its density."""
        # A value that never moved has no density: a scale at the edge of the type stands for 0.
        least = torch.finfo(self.mean.dtype).tiny ** 0.5
        if not self.rank:
            scale = self.variance[:dim].sqrt().clamp(min=least)
            return VectorNormal(self.mean[:dim], DiagonalRoot(scale))
        scale = (self.variance[:dim] / 2).sqrt().clamp(min=least)
        factor = self.deviations[:dim] / math.sqrt(2 * (self.rank - 1)) / scale[:, None]
        return VectorNormal(self.mean[:dim], LowRankRoot(scale, factor))


def check_rank(rank: int, snapshots: int) -> None:
    """Refuse a rank that so many snapshots do not give.

    Raises:
        FitError: The rank is 1, below 0, or above their number.
    """
    whole_number("rank", rank, least=0)
    if rank == 1 or rank > snapshots:
        raise FitError(
            f"rank={rank} with {snapshots} snapshots; expected 0 (diagonal), or from 2 up to the "
            "number of snapshots"
        )


def fit_swag(
    model: Model,
    x: Data,
    y: Data = None,
    *,
    start: Posterior | Mapping[str, Tensor] | None = None,
    snapshots: int = 20,
    every: int | None = None,
    rank: int | None = None,
    lr: float = 0.01,
    optimiser: Optimiser = "adam",
    batch_size: int | None = None,
    steps: int = 2_000,
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw from the Gaussian that an optimiser's path at a constant rate spans (SWAG).

    Maddox et al. 2019, "A simple baseline for Bayesian uncertainty in deep learning", algorithm 1:
    from a trained state the optimiser goes on at a constant rate; mean and variances of the
    snapshots, and their deviations from the running mean, make a diagonal plus low-rank Gaussian.
    It lies on the unconstrained space, whose log joint the optimiser climbs; constants belong to
    it. The spread is that of the noise of batches at this rate, not one that the model implies:
    without batches there is none.

    Args:
        model: A Pyro model `(x, y=None)` with its rows in plate `data`.
        x: Input `(n, …)`, a dict of inputs, or None.
        y: Observations `(n,)` or `(n, outputs)`, or a dict by site.
        start: The trained state: a posterior of one draw, such as `fit_map` returns, or a trained
            network's `state_dict`. None trains a MAP first.
        snapshots: Number of snapshots.
        every: Steps from one snapshot to the next; by default a pass over the rows.
        rank: Columns of the low-rank part, from the last snapshots; 0 is the diagonal form. By
            default 20, or the number of snapshots if that is less.
        lr: The constant learning rate, on the loss -log joint / rows.
        optimiser: "adam", or "sgd" with momentum 0.9 as in the paper. Adam is the default, since it
            asks for no rate of its own where the noise is small: on the yacht data (noise scale
            0.02) "sgd" was not finite after five steps at a rate of 0.001.
        batch_size: Rows in each step; by default 128, or a tenth of the rows if that is less.
        steps: Steps of the MAP run where `start` is None; see `pbnn.fit_map`.
        draws: Number of draws.
        seed: Seed; the global random state and Pyro's param store stay untouched.
        device: Where to run; see `pbnn.front_door.bind`.
        dtype: `torch.float32` or `torch.float64`; see `pbnn.front_door.bind`.
        compile: Whether to compile the step; None decides by a rule of its size.
        progress: Whether to show a progress bar on stderr.

    Returns:
        One chain of independent draws with `lp`, and `log_q` where no constants are learned;
        statistics of BatchNorm layers are recomputed for each. `history` holds `snapshots`
        `(snapshots, size)` (see `sweep_rank`) and `log_joint` before each step.

    Raises:
        DataError: The data cannot be used as they are.
        ModelError: The front door refuses the model, or it has no rows to take in batches.
        FitError: An option is out of range, `start` is no point of this model, or the log joint is
            not finite at some step.
    """
    seed, draws = whole_number("seed", seed, least=0), whole_number("draws", draws)
    snapshots = whole_number("snapshots", snapshots, least=2)
    rank = min(_RANK, snapshots) if rank is None else rank
    check_rank(rank, snapshots)
    started = time.perf_counter()
    bound = bind(model, x, y, device=device, dtype=dtype)
    if bound.rows is None:
        raise ModelError(
            "SWAG takes the rows in batches, and the model has none; write `with "
            "pyro.plate('data', x.shape[0]):` around the observed site"
        )
    if batch_size is None:
        batch_size = min(_BATCH, max(1, bound.rows // 10))
    options = StepOptions(optimiser=optimiser, lr=lr, batch_size=batch_size, jacobian=True)
    if every is None:
        every = math.ceil(bound.rows / batch_size)
    every = whole_number("every", every)
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        state = trained_point(
            space, start, seed=seed, steps=steps, compile=compile, progress=progress
        )
        joint = LogJoint(space, state, batch_size=batch_size, seed=seed, jacobian=True)
        count = snapshots * every
        descent = Descent(joint, state, options, compile=compile, steps=count)
        kept: list[Tensor] = []

        def keep(done: int) -> None:
            if done % every == 0:
                kept.append(descent.points.values[0])

        descent.run([lr] * count, label="SWAG", progress=progress, each=keep)
        path = torch.stack(kept)
        fields = _drawn(space, path, rank, draws, seed)
    settings = {
        "start": "map" if start is None else start_word(start),
        "snapshots": snapshots,
        "every": every,
        "rank": rank,
        "steps": steps if start is None else 0,
        "draws": draws,
        **vars(options),
    }
    return Posterior(
        **fields,
        method="swag",
        markov=False,
        seconds=time.perf_counter() - started,
        history={"snapshots": path.cpu(), "log_joint": descent.history()[:, 0]},
        provenance={**provenance(bound, seed=seed, **settings), **descent.account()},
    )


def sweep_rank(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data = None,
    *,
    ranks: Sequence[int] = (0, 2, 4, 8, 16),
    draws: int = 1000,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> dict[int, Posterior]:
    """Draw from SWAG at several ranks, from the snapshots of one fit.

    Args:
        model: The model that was fitted.
        posterior: What `fit_swag` returned.
        x: The training rows.
        y: Their observations.
        ranks: Columns of the low-rank part; 0 is the diagonal form.
        draws: Number of draws of each.
        seed: Seed of the draws.
        device: Where to run; see `pbnn.front_door.bind`.

    Returns:
        The posteriors by rank; their `seconds` are those of the fit.

    Raises:
        FitError: The posterior has no snapshots, or fewer than a rank.
    """
    path = posterior.history.get("snapshots")
    if path is None:
        raise FitError(
            f"the draws of {posterior.method!r} have no snapshots; pass what fit_swag returned"
        )
    for rank in ranks:
        check_rank(rank, len(path))
    bound = bind(model, x, y, device=device, dtype=path.dtype)
    found = {}
    with isolated(seed, bound.device), pyro.validation_enabled(False):
        space = Space(bound)
        if path.shape[1] != space.size:
            raise FitError(
                f"the snapshots have {path.shape[1]} values and the model {space.size}; sweep with "
                "the model that was fitted"
            )
        for rank in ranks:
            fields = _drawn(space, path.to(bound.device), rank, draws, seed)
            record = dict(posterior.provenance)
            record["options"] = {**record.get("options", {}), "rank": rank, "draws": draws}
            found[rank] = Posterior(
                **fields,
                method="swag",
                markov=False,
                seconds=posterior.seconds,
                history=posterior.history,
                provenance=record,
            )
    return found


def _drawn(space: Space, snapshots: Tensor, rank: int, draws: int, seed: int) -> dict[str, Any]:
    """Return the fields of a posterior of draws from the Gaussian of some snapshots."""
    moments = SnapshotMoments.of(snapshots, rank)
    with isolated(seed, snapshots.device):
        values = moments.draw(draws)
    fields = space.fields(space.points(values))
    normal = moments.normal(space.dim)
    if space.size == space.dim:
        log_q = normal.log_prob(values)
        fields["stats"]["log_q"] = log_q[None].cpu()
    shapes = [[site.name, list(site.unconstrained_shape)] for site in space.sites]
    fields["approximation"] = {
        "family": "swag",
        "sites": shapes,
        "blocks": [{"sites": [name for name, _ in shapes], "rows": [], "prefix": ""}],
        "tensors": {name: value.cpu() for name, value in normal.tensors().items()},
    }
    return fields
