"""Which conclusions move when prior or likelihood weigh more or less, without fitting again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import logsumexp  # type: ignore[import-untyped]

from pbnn.errors import DataError, ModelError
from pbnn.evaluate.arrays import Array
from pbnn.evaluate.functions import functions_of
from pbnn.evaluate.power_scaling import cumulative_js, log_prior, matching_sites, power_scaled
from pbnn.evaluate.psis import TRUSTED_K, smoothed
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model
from pbnn.prediction import log_likelihood

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Sensitivity", "sensitivity"]

COMPONENTS = ("prior", "likelihood")
# Cumulative Jensen-Shannon distance per doubling (Kallioinen et al. 2024).
SENSITIVE = 0.05
# What that is of a Normal whose mean moves, in its scales.
SHIFTED = 0.35
_FEWEST = 25
HELD_OUT = "held-out log density"

Refit = Callable[[Model], Posterior]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Which conclusions move with the prior, and which with the likelihood.

    Attributes:
        table: By conclusion its posterior `mean` and `scale` (of the held-out log density: mean and
            standard error over rows); `prior` and `likelihood`, its sensitivity to the power of
            each (0.05 and more is a move); `prior_shift` and `likelihood_shift`, how its mean moves
            for each doubling, in scales; and a `verdict`. NaN where the weights are not to be
            trusted.
        means: Mean of each conclusion, by component and power.
        khat: By component and power Pareto k of the weights; NaN where the model was fitted again.
    """

    table: "pd.DataFrame"
    means: "pd.DataFrame"
    khat: Mapping[tuple[str, float], float]

    def __str__(self) -> str:
        lines = []
        for name, row in self.table.iterrows():
            parts = [
                f"{component} {row[component]:.2f} ({row[f'{component}_shift']:+.2f} scales)"
                for component in COMPONENTS
            ]
            lines.append(
                f"{name}: {row['mean']:.3g} ± {row['scale']:.2g}; {', '.join(parts)}: "
                f"{row['verdict']}"
            )
        return "\n".join(lines)


def sensitivity(
    model: Model,
    posterior: Posterior,
    x: Data,
    y: Data,
    *,
    inputs: Data = None,
    held_out: tuple[Data, Data] | None = None,
    sites: Sequence[str] | None = None,
    priors: Sequence[str] = ("*",),
    power: float = 1.25,
    refit: Refit | None = None,
    device: str | torch.device | None = None,
) -> Sensitivity:
    """Say which conclusions move when the prior or the likelihood is raised to a power.

    Draws with weights p(θ)^(α − 1), Pareto-smoothed, are draws from the posterior of
    p(y | θ) p(θ)^α, for α = 1 / power and power; those of p(y | θ)^α p(θ) likewise. The sensitivity
    is the distance by which a conclusion's distribution moves for each doubling of α (Kallioinen et
    al. 2024, "Detecting and diagnosing prior and likelihood sensitivity with power-scaling").
    What moves with both is a conflict of prior and data; what moves with the prior alone is
    something that the data say little about. Draws of a guide are weighed as if they were the
    posterior's own, so their answers are no better than the guide. A `pyro.factor` counts neither
    as prior nor as likelihood.

    Args:
        model: The model that was fitted.
        posterior: Its posterior, of at least 25 draws.
        x: The rows of the fit.
        y: Their observations; rows without one are left out.
        inputs: Inputs at which E[y] is a conclusion; none by default.
        held_out: Rows and observations, two or more, whose mean log predictive density is one.
        sites: Latent sites that are conclusions; by default those of one value.
        priors: Patterns of the sites whose priors are raised; all by default. Of a hierarchical
            prior, name those at its top.
        power: Largest α, above 1. Networks have many priors: a power nearer to 1 keeps k low.
        refit: Fits a model as the posterior was fitted, `lambda model: pbnn.fit_nuts(model, x, y)`;
            called with the power-scaled model where Pareto k is above 0.7. Its draws are others, so
            that the sensitivity has a floor of their Monte Carlo error.
        device: Where to run.

    Raises:
        DataError: x, y, the rows held out or the power cannot be used, a log density is not
            finite, or there are too few draws.
        ModelError: The posterior is not one of this model, or has no such site.
    """
    import pandas as pd

    draws = posterior.chains * posterior.draws_per_chain
    if draws < _FEWEST:
        raise DataError(f"{draws} draws; expected {_FEWEST} or more")
    if not power > 1:
        raise DataError(f"power is {power}; expected a number above 1")
    raised = matching_sites(posterior, priors)
    asked = _Asked(model, inputs, held_out, _scalars(posterior, sites), device)
    base = asked.of(posterior)
    scores = {
        "prior": log_prior(model, posterior, x, raised, device=device),
        "likelihood": _joint(model, posterior, x, y, device).sum(1),
    }
    even = np.full(draws, 1 / draws)
    found, khat = {}, {}
    for component in COMPONENTS:
        for alpha in (1 / power, power):
            weights, k = _weights(component, scores[component], alpha)
            if refit is not None and not k <= TRUSTED_K:
                scaled = power_scaled(model, priors=priors, **{component: alpha})
                found[component, alpha] = _against(base, even, asked.of(refit(scaled)))
                k = float("nan")
            elif k <= TRUSTED_K:
                found[component, alpha] = _reweighted(base, even, weights)
            else:
                found[component, alpha] = dict.fromkeys(base.names, (np.nan, np.nan))
            khat[component, alpha] = k
    center = {name: (mean, scale) for name, mean, scale in base.summary(even)}
    table = _table(center, found, power, max(k for k in (0.0, *khat.values()) if k == k))
    means = {key: {name: value[0] for name, value in moved.items()} for key, moved in found.items()}
    columns = pd.DataFrame(means).rename_axis("conclusion")
    columns.columns = columns.columns.set_names(["component", "power"])
    return Sensitivity(table=table, means=columns.loc[list(base.names)], khat=khat)


@dataclass(frozen=True)
class _Conclusions:
    """Values by draw of what is concluded: `values` by name, and log densities `(draws, rows)`."""

    values: dict[str, Array]
    densities: Array | None

    @property
    def names(self) -> list[str]:
        return [*self.values, *([] if self.densities is None else [HELD_OUT])]

    def summary(self, weights: Array) -> list[tuple[str, float, float]]:
        """Return name, mean and scale of each under weights of the draws."""
        found = []
        for name, value in self.values.items():
            mean = float(weights @ value)
            found.append((name, mean, float(np.sqrt(weights @ np.square(value - mean)))))
        if self.densities is not None:
            rows = self.held_out(weights)
            found.append((HELD_OUT, float(rows.mean()), float(rows.std() / len(rows) ** 0.5)))
        return found

    def held_out(self, weights: Array) -> Array:
        """Return the log predictive density of each row."""
        assert self.densities is not None
        return np.asarray(logsumexp(self.densities, axis=0, b=weights[:, None]))


@dataclass(frozen=True)
class _Asked:
    """What is to be concluded from a posterior."""

    model: Model
    inputs: Data
    held_out: tuple[Data, Data] | None
    sites: Sequence[str]
    device: str | torch.device | None

    def of(self, posterior: Posterior) -> _Conclusions:
        """Return it, by draw."""
        values: dict[str, Array] = {}
        if self.inputs is not None:
            location = functions_of(self.model, posterior, self.inputs, device=self.device).location
            outputs = location.shape[2]
            for row in range(location.shape[1]):
                for output in range(outputs):
                    tail = f", output {output}" if outputs > 1 else ""
                    values[f"E[y] at input {row}{tail}"] = location[:, row, output].numpy()
        for name in self.sites:
            value = posterior.draws[name].flatten(0, 1).double()
            flat = value.reshape(len(value), -1)
            for k in range(flat.shape[1]):
                values[name if flat.shape[1] == 1 else f"{name}[{k}]"] = flat[:, k].numpy()
        densities = None
        if self.held_out is not None:
            densities = _joint(self.model, posterior, *self.held_out, self.device)
            _check_held_out(logsumexp(densities, axis=0))
        if not values and densities is None:
            raise DataError(
                "nothing to conclude: no site has one value; pass inputs, held_out or sites"
            )
        return _Conclusions(values, densities)


def _scalars(posterior: Posterior, sites: Sequence[str] | None) -> Sequence[str]:
    if sites is None:
        return [k for k, v in posterior.draws.items() if v[0, 0].numel() == 1]
    for name in sites:
        if name not in posterior.draws:
            raise ModelError(f"no latent site {name!r}; the posterior has {list(posterior.draws)}")
    return sites


def _joint(
    model: Model, posterior: Posterior, x: Data, y: Data, device: str | torch.device | None
) -> Array:
    """Return log-likelihoods `(draws, rows)` of the rows that are observed."""
    scores = log_likelihood(model, posterior, x, y, device=device).flatten(0, 1).double()
    missing = scores.isnan().all(0)
    if missing.all():
        raise DataError("all observations are missing; expected some that are not NaN")
    return np.asarray(scores[:, ~missing])


def _check_held_out(rows: Array) -> None:
    """Refuse log densities of rows whose mean has no scale to measure its shift in."""
    if not np.isfinite(rows).all():
        bad = int((~np.isfinite(rows)).sum())
        raise DataError(
            f"held_out has {bad} of {len(rows)} rows whose log density is not finite; leave them "
            "out"
        )
    if not np.ptp(rows) > 0:
        raise DataError(
            f"held_out has {len(rows)} observed rows; expected two or more whose densities differ, "
            "for their mean to have a scale"
        )


def _weights(component: str, scores: Array, alpha: float) -> tuple[Array, float]:
    """Return the smoothed weights of a component's power, and their Pareto k."""
    bad = int((~np.isfinite(scores)).sum())
    if bad:
        raise DataError(
            f"log {component} is not finite at {bad} of {len(scores)} draws; leave out the rows of "
            "data, or the draws, at which it is not"
        )
    log_weights = (alpha - 1) * (scores - scores.max())
    if not np.ptp(log_weights) > 0:
        # A component that is constant over draws, such as a flat prior, moves nothing.
        return np.full(len(scores), 1 / len(scores)), 0.0
    found, k = smoothed(log_weights[None])
    weights = np.exp(found[0])
    return weights / weights.sum(), float(k[0])


def _reweighted(base: _Conclusions, even: Array, weights: Array) -> dict[str, tuple[float, float]]:
    """Return mean and distance of each conclusion under other weights of the same draws."""
    distances = {k: cumulative_js(v, even, weights) for k, v in base.values.items()}
    return {n: (mean, distances.get(n, np.nan)) for n, mean, _ in base.summary(weights)}


def _against(
    base: _Conclusions, even: Array, other: _Conclusions
) -> dict[str, tuple[float, float]]:
    """Return mean and distance of each conclusion from draws of another fit."""
    distances = {}
    for name, value in base.values.items():
        theirs = other.values[name]
        first = np.concatenate([even, np.zeros(len(theirs))])
        second = np.concatenate([np.zeros(len(value)), np.full(len(theirs), 1 / len(theirs))])
        distances[name] = cumulative_js(np.concatenate([value, theirs]), first, second)
    count = len(next(iter(other.values.values()), other.densities))  # type: ignore[arg-type]
    summary = other.summary(np.full(count, 1 / count))
    return {n: (mean, distances.get(n, np.nan)) for n, mean, _ in summary}


def _table(
    center: Mapping[str, tuple[float, float]],
    found: Mapping[tuple[str, float], Mapping[str, tuple[float, float]]],
    power: float,
    worst: float,
) -> "pd.DataFrame":
    import pandas as pd

    doublings = 2 * np.log2(power)
    rows = {}
    for name, (mean, scale) in center.items():
        row: dict[str, float | str] = {"mean": mean, "scale": scale}
        shifts = {}
        for component in COMPONENTS:
            (low, below), (high, above) = (found[component, a][name] for a in (1 / power, power))
            shifts[component] = (high - low) / doublings / scale if scale > 0 else 0.0
            # Held-out density is one number: its shift stands for the distance of distributions.
            by_shift = abs(shifts[component]) * SENSITIVE / SHIFTED
            row[component] = by_shift if name == HELD_OUT else (below + above) / doublings
        row |= {f"{component}_shift": shift for component, shift in shifts.items()}
        row["verdict"] = _verdict(float(row["prior"]), float(row["likelihood"]), worst)
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("conclusion")


def _verdict(prior: float, likelihood: float, k: float) -> str:
    if np.isnan(prior) or np.isnan(likelihood):
        return f"not known: Pareto k is {k:.2f}; pass refit=, or a power nearer to 1"
    if prior >= SENSITIVE and likelihood >= SENSITIVE:
        return "moves with both: prior and data disagree, or share it"
    if prior >= SENSITIVE:
        return "moves with the prior: the data say little about it"
    return "stands: the data decide it" if likelihood >= SENSITIVE else "stands: neither moves it"
