"""Does the uncertainty rank, point the right way, and carry probability: the criteria of collapse.

A, signal: does the epistemic spread of f tell rows out of distribution from those in it. B,
direction: is it larger there. C, mass: what it is worth as probability. For any posterior.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.bootstrap import Interval
from pbnn.evaluate.convergence import probe_rows
from pbnn.evaluate.criteria import direction, error_signal, mass_numbers, signal
from pbnn.evaluate.features import FeatureDensity
from pbnn.evaluate.field import distance_to_training
from pbnn.evaluate.linearised import linearised_variance
from pbnn.evaluate.mass import Mass, mass_of, miscalibrated
from pbnn.evaluate.scores import combined, uncertainty_scores
from pbnn.evaluate.verdict import FEW_ROWS, ORDER, Verdict, judge
from pbnn.front_door import bind
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, leaves
from pbnn.prediction import Prediction, predictive

if TYPE_CHECKING:
    import pandas as pd

    from pbnn.data import Units

__all__ = ["ID", "OodReport", "check_ood"]

ID = "id"
"""Name of the rows in distribution, among the sets of inputs."""

Key = tuple[str, str, str]  # criterion, inputs, number
# Rows of each set of which the linearised variance is split, at most.
VARIANCE_ROWS = 200


@dataclass(frozen=True, kw_only=True)
class OodReport:
    """The three criteria for one posterior, and what follows from them.

    Attributes:
        table: One row for each number, by `criterion` ("A", "B" or "C"), `inputs` ("id", or the
            name of a set) and `number`; columns `value`, `low` and `high`, its 95% bootstrap
            interval. Numbers as in `check_ood`.
        verdicts: What the criteria say of each set out of distribution, by name.
        faults: What is bad about C in a set, in words, for those where something is.
        scores: Uncertainty scores by set and name, each `(n,)`, in the model's units.
        distances: Distance of each row to its nearest training row, by set; empty without training
            rows.
        effective_rank: (Σλ)² / Σλ² of the covariance of a Gaussian guide; NaN for others.
        variance: By set the mean linearised variance of f (standardised units): `total`, and its
            `diagonal` and `cross` parts; None where the posterior is no Gaussian guide's.
    """

    table: "pd.DataFrame"
    verdicts: Mapping[str, Verdict]
    faults: Mapping[str, str]
    scores: Mapping[str, Mapping[str, Array]]
    distances: Mapping[str, Array]
    effective_rank: float
    variance: "pd.DataFrame | None"

    def interval(self, criterion: str, inputs: str, number: str) -> Interval:
        """Return one number with its interval.

        Raises:
            DataError: The table has no such number.
        """
        key = (criterion, inputs, number)
        if key not in self.table.index:
            raise DataError(f"no number {key}; the table has {self.table.index.tolist()}")
        return Interval(*(float(self.table[name][key]) for name in ("value", "low", "high")))

    def rows(self, name: str) -> int:
        """Return how many rows a set has, or those in distribution where they are fewer."""
        return min(len(self.scores[inputs]["epistemic"]) for inputs in (ID, name))

    @property
    def worst(self) -> str:
        """Name of the set with the worst verdict, the first one among equals."""
        return min(self.verdicts, key=lambda name: ORDER.index(self.verdicts[name].name))

    @property
    def verdict(self) -> str:
        """The worst verdict of all sets: one of `pbnn.evaluate.verdict.ORDER`."""
        return self.verdicts[self.worst].name

    @property
    def reason(self) -> str:
        """The set that it is about, and the numbers that it follows from."""
        return f"{self.worst}: {self.verdicts[self.worst].reason}"

    @property
    def next_step(self) -> str:
        """What to try next."""
        return self.verdicts[self.worst].next_step

    def __str__(self) -> str:
        def text(frame: "pd.DataFrame") -> str:
            return str(frame.to_string(float_format=lambda v: f"{v:.3f}"))

        lines = [f"{self.verdict} ({self.reason}); {self.next_step}"]
        lines += [
            f"{name}: {verdict.name} ({verdict.reason})"
            for name, verdict in self.verdicts.items()
            if name != self.worst
        ]
        if np.isfinite(self.effective_rank):
            lines.append(f"effective rank of the covariance: {self.effective_rank:.1f}")
        if self.variance is not None:
            lines += ["linearised variance of f:", text(self.variance)]
        return "\n".join([*lines, self._side_by_side().to_string(na_rep="")])

    def _side_by_side(self) -> "pd.DataFrame":
        """Return numbers with their intervals in words, one column for each set."""
        words = self.table.apply(lambda row: str(Interval(*row)), axis=1)
        return words.unstack("inputs").dropna(how="all")


def check_ood(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    ood: Mapping[str, Data],
    *,
    x_train: Data = None,
    scores: Sequence[str] | None = None,
    layer: str | None = None,
    replicates: int = 1000,
    units: "Units | None" = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> OodReport:
    """Ask of a posterior whether its uncertainty ranks, points the right way, and carries mass.

    A: for each set, and each of the scores, `auroc_SCORE`, `aupr_SCORE` and `fpr95_SCORE` of the
    set against the rows in distribution; on these, `spearman_error` of the epistemic spread with
    the error, beside `spearman_replicated`, the same on data drawn from the predictive itself (it
    is small for an exact posterior, too, and decides nothing). B: `log_ratio` of the mean square of
    the epistemic spread to that in distribution, `log_median_ratio` of the medians, and with
    training rows `slope`: of the spread, in units of its root mean square in distribution, against
    the distance to the nearest training row, in training scales. C: see `pbnn.evaluate.mass.Mass`.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, from any road.
        x: Held-out rows in distribution.
        y: Their observations, as the fit took them.
        ood: Rows out of distribution by name, such as "near" and "far"; each its inputs, or
            `(inputs, observations)` where these are known.
        x_train: The training rows, for distances and densities.
        scores: Names of scores as in `pbnn.evaluate.scores.uncertainty_scores`; "a+b" adds
            standardised scores up. All that the model has by default, "density" only with x_train.
        layer: Module whose features the density score is of; None takes x itself.
        replicates: Bootstrap resamples.
        units: How y was standardised; C is in the user's units.
        seed: Seed of predictive samples and resampling.
        device: Where to run.
        progress: Whether to show progress bars on stderr.

    Raises:
        DataError: Data cannot be used as they are, a set is empty, or a score is not there.
        ModelError: The posterior is not one of this model.
    """
    sets = _sets(x, y, ood)
    size = _sizes(sets)
    x_train = indexable(x_train)
    place: dict[str, Any] = {"device": device, "progress": progress}
    masses = {
        name: mass_of(model, posterior, rows, seen, units=units, seed=seed, **place)
        for name, (rows, seen) in sets.items()
    }
    found = _scores(
        model,
        posterior,
        {name: (rows, masses[name].prediction) for name, (rows, _) in sets.items()},
        units,
        x_train,
        scores,
        layer,
        place,
    )
    distances = {}
    if x_train is not None:
        distances = {name: distance_to_training(v, x_train) for name, (v, _) in sets.items()}
    numbers = _numbers(found, distances, masses, replicates=replicates, seed=seed)
    faults = _faults(numbers, masses)
    known = posterior.approximation or {}
    covariance = GaussianCovariance(known) if "blocks" in known else None  # of a Gaussian guide
    inputs = {name: rows for name, (rows, _) in sets.items()}
    return OodReport(
        table=_table(numbers),
        verdicts={
            name: judge(
                numbers["A", name, "auroc_epistemic"],
                numbers["B", name, "log_ratio"],
                # What is bad in distribution is bad for each set.
                faults.get(ID, faults.get(name)),
                rows=min(size[ID], size[name]),
                draws=posterior.chains * posterior.draws_per_chain,
            )
            for name in ood
        },
        faults=faults,
        scores=found,
        distances=distances,
        effective_rank=float("nan") if covariance is None else covariance.effective_rank(),
        variance=None
        if covariance is None
        else _variance(model, posterior, covariance, inputs, device),
    )


def _sets(x: Data, y: Data, ood: Mapping[str, Data]) -> dict[str, tuple[Data, Tensor | None]]:
    """Return inputs and observations of each set, those in distribution first."""
    if not ood:
        raise DataError("no rows out of distribution; expected {name: rows, …}")
    if ID in ood:
        raise DataError(f"the set {ID!r} is the rows of x; choose another name")
    if y is None:
        raise DataError("y is None; expected the observations of the rows in distribution")
    sets = {ID: (x, y)}
    for name, given in ood.items():
        sets[name] = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    for name, (rows, _) in sets.items():
        if not leaves(rows) or len(indexable(leaves(rows)[0][1])) == 0:
            raise DataError(f"the set {name!r} has no rows; expected at least one")
    return {name: (indexable(rows), _observations(seen)) for name, (rows, seen) in sets.items()}


def _sizes(sets: Mapping[str, tuple[Data, Tensor | None]]) -> dict[str, int]:
    """Return the number of rows of each set; warn of those that are too few for a verdict."""
    size = {name: len(leaves(rows)[0][1]) for name, (rows, _) in sets.items()}
    few = [f"{name!r} ({n})" for name, n in size.items() if n < FEW_ROWS]
    if few:
        warnings.warn(
            f"sets of fewer than {FEW_ROWS} rows: {', '.join(few)}; their intervals are not to be "
            "trusted, and no verdict comes of them: give more rows",
            PbnnWarning,
            stacklevel=3,
        )
    return size


def _observations(y: Data) -> Tensor | None:
    if y is None:
        return None
    if isinstance(y, Mapping):
        raise DataError(f"y is a dict of sites {list(y)}; expected the values of one observed site")
    y = indexable(y)
    return y.detach().cpu() if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y))


def _scores(
    model: Model,
    posterior: Posterior,
    sets: Mapping[str, tuple[Data, Prediction]],
    units: "Units | None",
    x_train: Data,
    names: Sequence[str] | None,
    layer: str | None,
    place: Mapping[str, Any],
) -> dict[str, dict[str, Array]]:
    """Return the scores of each set by name; sums of scores are standardised by training rows."""
    density = None
    wants = x_train is not None if names is None else any("density" in name for name in names)
    if layer is not None and (x_train is None or not wants):
        raise DataError(f"layer {layer!r} is for the score 'density', which needs x_train, too")
    if x_train is not None and wants:
        density = FeatureDensity(layer).fit(model, posterior, x_train, device=place["device"])
    all_of = {
        name: uncertainty_scores(
            model, posterior, rows, prediction=prediction, units=units, density=density, **place
        )
        for name, (rows, prediction) in sets.items()
    }
    if names is None:
        return all_of
    reference = all_of[ID]
    if x_train is not None and any("+" in name for name in names):
        reference = uncertainty_scores(model, posterior, x_train, density=density, **place)
    # The verdict is about the epistemic spread, whatever else is looked at.
    wanted = dict.fromkeys(["epistemic", *names])
    return {
        name: {
            wish: combined(values, wish.split("+"), reference)
            if "+" in wish
            else _named(values, wish)
            for wish in wanted
        }
        for name, values in all_of.items()
    }


def _named(scores: Mapping[str, Array], name: str) -> Array:
    if name not in scores:
        hint = "; the density needs x_train" if name == "density" else ""
        raise DataError(f"no score {name!r}; this model has {list(scores)}{hint}")
    return scores[name]


def _numbers(
    scores: Mapping[str, Mapping[str, Array]],
    distances: Mapping[str, Array],
    masses: Mapping[str, Mass],
    **resampling: int,
) -> dict[Key, Interval]:
    """Return the numbers of all sets."""
    home = scores[ID]["epistemic"]
    out: dict[Key, Interval] = {}
    for name, mass in masses.items():
        spread = scores[name]["epistemic"]
        found = {"C": mass_numbers(mass, **resampling)}
        if name == ID:
            found["A"] = error_signal(spread, mass, **resampling)
        else:
            found["A"] = signal(scores[ID], scores[name], **resampling)
            apart = (distances[ID], distances[name]) if distances else None
            found["B"] = direction(home, spread, apart, **resampling)
        for criterion, numbers in found.items():
            out |= {(criterion, name, number): value for number, value in numbers.items()}
    return out


def _faults(numbers: Mapping[Key, Interval], masses: Mapping[str, Mass]) -> dict[str, str]:
    """Return what is bad about C by set, for those where something is."""
    found = {}
    for name, mass in masses.items():
        scores = {k[2]: value for k, value in numbers.items() if k[:2] == ("C", name)}
        bad = miscalibrated(scores, mass.floor, away=name != ID, discrete=mass.discrete)
        if bad is not None:
            found[name] = f"{bad} on {name!r}"
    return found


def _table(numbers: Mapping[Key, Interval]) -> "pd.DataFrame":
    import pandas as pd

    # Criteria by letter; sets and numbers in the order in which they came.
    levels = [
        pd.Categorical(level, sorted(set(level)) if k == 0 else list(dict.fromkeys(level)))
        for k, level in enumerate(zip(*numbers, strict=True))
    ]
    index = pd.MultiIndex.from_arrays(levels, names=["criterion", "inputs", "number"])
    rows = [(v.value, v.low, v.high) for v in numbers.values()]
    return pd.DataFrame(rows, index=index, columns=["value", "low", "high"]).sort_index()


def _variance(
    model: Model,
    posterior: Posterior,
    covariance: GaussianCovariance,
    sets: Mapping[str, Data],
    device: str | torch.device | None,
) -> "pd.DataFrame | None":
    """Return the mean linearised variance of each set, and where it comes from."""
    import pandas as pd

    first = posterior.select(chains=[0], draws=slice(0, 1))
    rows = {}
    for name, x in sets.items():
        some = probe_rows(x, VARIANCE_ROWS)
        # Nothing of y acts on f; the front door wants some that the model could have given.
        y = {k: v[0, 0] for k, v in predictive(model, first, some, device=device).items()}
        y.pop("f")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PbnnWarning)
            bound = bind(
                model,
                some,
                next(iter(y.values())),
                device=device,
                dtype=next(iter(posterior.draws.values())).dtype,
                constants=posterior.first_state(),
            )
        try:
            total, diagonal = linearised_variance(bound, covariance)
        except ModelError:
            return None
        rows[name] = {
            "total": float(total.mean()),
            "diagonal": float(diagonal.mean()),
            "cross": float((total - diagonal).mean()),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("inputs")
