"""What a prior says about functions and data, and what is wrong with it, before and after a fit."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pbnn.errors import DataError, ModelError
from pbnn.evaluate.functions import Functions, functions_of
from pbnn.infer.posterior import Posterior
from pbnn.model import Data, Model, indexable, leaves, take
from pbnn.prediction import sample_prior

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PriorFault", "PriorReport", "prior_report"]

# Rows at most, evenly spaced.
ROWS = 500
FIT_DRAWS = 400
# A prior that holds f within this share of what it would have to explain leaves nothing to learn.
PINNED = 0.1
# Scales of y from its mean: of a Normal f with the scale of y, 0.3% lie beyond.
OUTSIDE = 3.0
SURE = 0.99
# Share of draws and rows, or of hidden values, from which on a prior is named.
MOST = 0.5
# Prior scales: no posterior lies so far from its prior.
FAR = 20.0
# Of Normals: from its quartiles to its scale.
_QUARTILES = 1.349
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class PriorFault:
    """Something that is wrong with a prior.

    Attributes:
        name: "pinned", "flat", "wide" or "saturated".
        why: What was found, and what to change.
        after: What it did to the fit; empty before there is one.
    """

    name: str
    why: str
    after: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" + (f" After the fit: {self.after}" if self.after else "")


@dataclass(frozen=True, kw_only=True)
class PriorReport:
    """What a prior says about functions and data.

    Attributes:
        table: Numbers by name, of the `prior` and, where there is one, of the `posterior`: the
            smallest, median and largest `scale of f` over rows; its `variation`, the median over
            draws of its standard deviation over rows; the share of draws and rows `outside`, where
            E[y] is more than 3 scales of y from the mean of y (for classes `sure`, where one class
            has more than 0.99); the `noise` scale of y (median); the share of saturated values of
            each bounded activation; the share of y's variance that the mean explains; and the `KL`
            to expect in nats with its `KL share`, see `prior_report`.
        sites: By latent site its number of `values` and their prior `scale` (medians, as below,
            from quartiles); with a posterior `scale_ratio`, its scale over the prior's, `shift`,
            how many prior scales its median lies from the prior's, and `at_prior`, the share of
            values with a ratio from 0.8 to 1.25 and a shift below 0.2.
        bands: Quantiles of f and of y over draws of the prior, by row and output of f; y where it
            has as many outputs and is no class.
        faults: What is wrong, each with why.
        rows: Positions in x of the rows that were looked at, at most 500, evenly spaced.
        f: Draws of f from the prior at these rows, `(draws, rows, outputs)`.
        y: One sampled y for each of them, `(draws, rows, …)`.
    """

    table: "pd.DataFrame"
    sites: "pd.DataFrame"
    bands: "pd.DataFrame"
    faults: tuple[PriorFault, ...]
    rows: Tensor
    f: Tensor
    y: Tensor

    def __str__(self) -> str:
        def text(frame: "pd.DataFrame") -> str:
            return str(frame.to_string(float_format=lambda v: f"{v:.3g}"))

        found = [f"fault {fault}" for fault in self.faults] or ["no fault found in the prior"]
        return "\n".join([*found, text(self.table), text(self.sites)])


def prior_report(
    model: Model,
    x: Data,
    y: Data,
    *,
    posterior: Posterior | None = None,
    draws: int = 400,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> PriorReport:
    """Draw functions and data from a model's prior, and hold them against the scale of y.

    Faults are named by E[y given a draw], which is f(x) for the usual regression:

    - "pinned": in 95% of the draws its root mean square distance from the prior's own mean is less
      than a tenth of the distance from there to y, so that no data can move it;
    - "flat": the same of its variation over rows: each draw is a constant function;
    - "wide": it is outside 3 scales of y in more than half of all draws and rows, or there is sure
      of one class;
    - "saturated": more than half of the values of a bounded activation are within a hundredth of
      its bounds. Calls of tanh, sigmoid, erf and hardtanh are counted wherever `forward` makes
      them, by module or by function; those inside a fused GRU or LSTM are not seen.

    The KL to expect is the information that y has about E[y], ½ log det(I + V^(−½) K V^(−½)), with
    K the prior covariance of E[y] over rows and V the median variance of y; for classes V is their
    mean probability. It is the expected KL divergence of the exact posterior from the prior, exact
    for a linear model with known noise; a mean-field guide pays more. The KL share holds it against
    the expected log-likelihood, as `pbnn.svi_report` does.

    Parameters without a prior are taken as they are, or as the posterior has them; before a fit,
    which would learn them, no prior beside them is called "pinned" or "flat".

    Args:
        model: A Pyro model with one observed site and its rows in plate `data`.
        x: Training rows.
        y: Their observations, as a fit takes them: standardised, if it does.
        posterior: A fit of the model by any road, to see what the prior did to it.
        draws: Number of draws from the prior.
        seed: Seed.
        device: Where to run.

    Raises:
        DataError: x or y cannot be used, or draws is below 20.
        ModelError: The model has no x, a prior cannot be sampled, or the posterior is not one of
            this model.
    """
    if draws < 20:
        raise DataError(f"draws is {draws}; expected 20 or more")
    if x is None:
        raise ModelError("x is None: a model without input has no function; see sample_prior")
    x, y = indexable(x), indexable(y)
    count = len(leaves(x)[0][1])
    rows = torch.linspace(0, count - 1, min(count, ROWS), dtype=torch.float64)
    rows = rows.round().long().unique()
    if posterior is not None:
        model = _with_constants(model, posterior)
    x, y = take(x, rows), take(y, rows)
    options = {"seed": seed, "device": device}
    prior = sample_prior(model, x, draws=draws, **options)  # type: ignore[arg-type]
    before = functions_of(model, prior, x, y, **options)  # type: ignore[arg-type]
    target = _target(y, before)
    after, thinned = None, None
    if posterior is not None:
        thinned = _thinned(posterior)
        after = functions_of(model, thinned, x, y, **options)  # type: ignore[arg-type]
    sites = _sites(prior, thinned)
    table = _table(before, after, target, count / len(rows))
    return PriorReport(
        table=table,
        sites=sites,
        bands=_bands(before, rows),
        faults=tuple(
            _faults(before, target, table, sites, fixed=after is not None or not prior.constants)
        ),
        rows=rows,
        f=before.f,
        y=before.y,
    )


def _with_constants(model: Model, posterior: Posterior) -> Model:
    """Return a copy of a module with the parameters and buffers that a fit left."""
    if not isinstance(model, nn.Module) or not posterior.constants:
        return model
    model = copy.deepcopy(model)
    model.load_state_dict(posterior.first_state(), strict=False)
    return model


def _thinned(posterior: Posterior) -> Posterior:
    """Return draws evenly spaced over the chains, so many that quartiles can be read."""
    each = posterior.draws_per_chain
    kept = min(each, max(1, FIT_DRAWS // posterior.chains))
    places = torch.linspace(0, each - 1, kept, dtype=torch.float64).round().long()
    return posterior.select(draws=places)


def _target(y: Data, functions: Functions) -> Tensor:
    """Return y like E[y], `(rows, outputs)`: classes as indicators, NaN where missing."""
    (_, value), *_ = leaves(y)
    value = torch.as_tensor(value).cpu()
    outputs = functions.location.shape[2]
    if functions.certainty is not None and functions.location.shape[2] != value[0].numel():
        return torch.nn.functional.one_hot(value.long(), outputs).double()
    return value.double().reshape(len(value), -1)


def _outside(functions: Functions, target: Tensor) -> float:
    """Return the share of draws and rows at which E[y] is far from all that was observed."""
    if functions.certainty is not None:
        return float((functions.certainty > SURE).double().mean())
    centre = target.nanmean(0)
    scale = (target - centre).square().nanmean(0).sqrt()
    # Not "above": what is not finite lies outside, too.
    inside = (functions.location - centre).abs() <= OUTSIDE * scale
    return float(1 - inside.double().mean())


def _information(functions: Functions, weight: float) -> tuple[float, float]:
    """Return the KL to expect and its share of the loss, of `weight` times these rows."""
    location, draws = functions.location, len(functions.location)
    mean = location.mean(0)
    classes = functions.certainty is not None and location.shape[2] > 1
    # The median: the mean of a variance under a wide prior is that of its largest draw.
    noise = mean if classes else functions.variance.median(0).values
    signal = ((location - mean) * (weight / (noise * (draws - 1))).sqrt()).reshape(draws, -1)
    gram = signal @ signal.T
    if not gram.isfinite().all():
        return float("nan"), float("nan")
    kl = 0.5 * float(torch.linalg.eigvalsh(gram).clamp(min=0.0).log1p().sum())
    likelihood = weight * float(functions.log_density.mean())
    return kl, kl / (kl + abs(likelihood))


def _explained(functions: Functions, target: Tensor) -> float:
    """Return the share of y's variance that the mean over draws of E[y] explains."""
    rest = (target - functions.location.mean(0)).square().nanmean()
    return float(1 - rest / (target - target.nanmean(0)).square().nanmean())


def _numbers(functions: Functions, target: Tensor) -> dict[str, float]:
    scales = functions.f.std(0)
    outside = "outside" if functions.certainty is None else "sure"
    numbers = {
        "scale of f, smallest": float(scales.min()),
        "scale of f, median": float(scales.median()),
        "scale of f, largest": float(scales.max()),
        "variation of f": float(functions.f.std(1, correction=0).median()),
        outside: _outside(functions, target),
        "noise": float(functions.variance.sqrt().median()),
        "explained": _explained(functions, target),
    }
    return numbers | {f"saturated, {k}": share for k, share in functions.saturated.items()}


def _table(
    before: Functions, after: Functions | None, target: Tensor, weight: float
) -> "pd.DataFrame":
    import pandas as pd

    kl, share = _information(before, weight)
    columns = {"prior": _numbers(before, target) | {"KL": kl, "KL share": share}}
    if after is not None:
        columns["posterior"] = _numbers(after, target)
    return pd.DataFrame(columns).rename_axis("quantity")


def _sites(prior: Posterior, posterior: Posterior | None) -> "pd.DataFrame":
    """Return the table of latent sites, by quartiles: a heavy-tailed prior has no moments."""
    import pandas as pd

    rows = {}
    for name, value in prior.flat().items():
        middle, scale = _middle_and_scale(value)
        row = {"values": scale.numel(), "scale": float(scale.median())}
        if posterior is not None:
            other, own = _middle_and_scale(posterior.flat()[name])
            ratio, shift = own / scale, (other - middle) / scale
            still = (ratio > 0.8) & (ratio < 1.25) & (shift.abs() < 0.2)
            row |= {
                "scale_ratio": float(ratio.median()),
                "shift": float(shift.abs().median()),
                "at_prior": float(still.double().mean()),
            }
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").astype({"values": int}).rename_axis("site")


def _middle_and_scale(draws: Tensor) -> tuple[Tensor, Tensor]:
    quartiles = draws.double().quantile(draws.new_tensor([0.25, 0.5, 0.75]).double(), 0)
    return quartiles[1], (quartiles[2] - quartiles[0]) / _QUARTILES


def _bands(functions: Functions, rows: Tensor) -> "pd.DataFrame":
    import pandas as pd

    outputs = functions.f.shape[2]
    index = pd.MultiIndex.from_product([rows.tolist(), range(outputs)], names=["row", "output"])
    drawn = {"f": functions.f}
    if functions.certainty is None and functions.y[0, 0].numel() == outputs:
        drawn["y"] = functions.y.double().reshape(functions.f.shape)
    levels = torch.tensor(_LEVELS, dtype=torch.float64)
    columns = {
        f"{name} {level:.0%}": values.flatten().numpy()
        for name, draws in drawn.items()
        for level, values in zip(_LEVELS, draws.quantile(levels, 0), strict=True)
    }
    return pd.DataFrame(columns, index=index)


def _faults(
    prior: Functions,
    target: Tensor,
    table: "pd.DataFrame",
    sites: "pd.DataFrame",
    *,
    fixed: bool,
) -> list[PriorFault]:
    """Name what is wrong with a prior, and what it did to the fit where there is one."""
    narrow = _narrow(prior, target)
    # Where constants are still to be learned, they move what the priors hold in place.
    found = (narrow if fixed else {}) or ({} if narrow else _wide(prior, table["prior"]))
    full = {name: share for name, share in prior.saturated.items() if share > MOST}
    if full:
        listed = ", ".join(f"{share:.0%} of {name}" for name, share in full.items())
        found["saturated"] = (
            f"hidden units are steps: {listed} lie within a hundredth of their bounds. Lower the "
            "prior scales of the weights and biases before them."
        )
    return [PriorFault(name, why, _after(name, table, sites)) for name, why in found.items()]


def _narrow(prior: Functions, target: Tensor) -> dict[str, str]:
    """Name a prior of E[y] that no data can move to y."""
    centre = prior.location.mean(0)
    gap, spread = target - centre, prior.location - centre
    reach, away = _high(_rms(spread.flatten(1), 1)), _rms(gap)
    if reach < PINNED * away:
        where = "zero" if _rms(centre) < PINNED * away else "one function"
        why = (
            f"the prior pins E[y] to {where}: 95% of its draws stay within {reach:.2g} of it, and "
            f"y lies {away:.2g} away. Raise the scales of the priors, or standardise y."
        )
        return {"pinned": why}
    varies = _high(_rms((spread - spread.mean(1, keepdim=True)).flatten(1), 1))
    moves = _rms(gap - gap.nanmean(0))
    if varies < PINNED * moves:
        why = (
            f"each draw of E[y] is a constant: over rows it varies by less than {varies:.2g} in "
            f"95% of the draws, and y by {moves:.2g}. Raise the scales of the weights."
        )
        return {"flat": why}
    return {}


def _wide(prior: Functions, numbers: "pd.Series[float]") -> dict[str, str]:
    """Name a prior under which E[y] is far from all that y could be."""
    scale = f"the prior scale of f, {numbers['scale of f, median']:.2g}, is absurd"
    if prior.certainty is not None and numbers["sure"] > MOST:
        why = (
            f"{scale} for logits: before it has seen data, the model gives one class more than "
            f"{SURE:g} in {numbers['sure']:.0%} of draws and rows. Lower the scales of the priors."
        )
        return {"wide": why}
    if prior.certainty is None and numbers["outside"] > MOST:
        why = (
            f"{scale}: E[y] lies more than {OUTSIDE:g} scales of y from its mean in "
            f"{numbers['outside']:.0%} of draws and rows. Lower the scales of the priors, or "
            "standardise y."
        )
        return {"wide": why}
    return {}


def _after(name: str, table: "pd.DataFrame", sites: "pd.DataFrame") -> str:
    """Say what a fault did to the fit."""
    if "posterior" not in table:
        return ""
    fit, kept = table["posterior"], _kept(sites)
    if name in ("pinned", "flat"):
        return f"it explains {max(fit['explained'], 0.0):.0%} of y, and {kept}"
    if name == "saturated":
        shares = [share for key, share in fit.items() if str(key).startswith("saturated")]
        return f"up to {max(shares):.0%} of a layer's values are saturated still, and {kept}"
    ratio = fit["scale of f, median"] / table.loc["scale of f, median", "prior"]
    return (
        f"at the data f keeps {ratio:.2g} of its prior scale, so away from them it is as wide as "
        f"the prior lets it be, and {kept}"
    )


def _kept(sites: "pd.DataFrame") -> str:
    share = sites["values"] / sites["values"].sum()
    shift, still = (float((sites[name] * share).sum()) for name in ("shift", "at_prior"))
    if shift > FAR:
        return f"its values lie {shift:.0f} prior scales away from their prior: it never got there."
    return f"{still:.0%} of its values are where their prior has them."


def _rms(values: Tensor, dim: int | None = None) -> Tensor:
    squares = values.square()
    return (squares.nanmean() if dim is None else squares.nanmean(dim)).sqrt()


def _high(values: Tensor) -> Tensor:
    """Return the 95% quantile over draws; infinite where one of them is not finite."""
    return torch.where(values.isfinite(), values, torch.inf).quantile(0.95)
