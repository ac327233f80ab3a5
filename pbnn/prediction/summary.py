"""What a posterior predicts, as one value, and how blocks of draws are summed up to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pbnn.prediction.monte_carlo import MonteCarlo

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Prediction", "Rows", "Summary", "summarise"]

Summary = dict[str, tuple[Tensor, Tensor]]
"""Numbers by name, each with its Monte Carlo error."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a posterior predicts for some rows.

    For numbers, shapes are those of y, `(n,)` or `(n, outputs)`, in the user's units. For classes
    `probabilities` is `(n, classes)`, and `mean` and the scales are None.

    Attributes:
        mean: Mean of the posterior predictive.
        epistemic_scale: Standard deviation over draws of E[y given draw and x].
        aleatoric_scale: Square root of the mean over draws of Var[y given draw and x].
        quantiles: Quantiles of the posterior predictive, by probability, each shaped like `mean`.
            Sampled: one y for each draw, or several where draws are few.
        probabilities: Mean over draws of the class probabilities.
        entropy: Entropy of `probabilities`, in nats, `(n,)`.
        mutual_information: `entropy` less the mean entropy of the draws, in nats, `(n,)`.
        log_predictive_density: Log of the mean over draws of the density of y, `(n,)`; where y was
            given, and NaN in rows where it is missing.
        mcse: Monte Carlo standard error of each of these numbers, by the name of the attribute
            ("scale" among them; a quantile's is "q0.05"): how far it would move with other draws.
            Four times the draws halve it.
    """

    mean: Tensor | None = None
    epistemic_scale: Tensor | None = None
    aleatoric_scale: Tensor | None = None
    quantiles: Mapping[float, Tensor] | None = None
    probabilities: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    log_predictive_density: Tensor | None = None
    mcse: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def scale(self) -> Tensor | None:
        """Standard deviation of the posterior predictive: both parts together."""
        if self.epistemic_scale is None or self.aleatoric_scale is None:
            return None
        return torch.hypot(self.epistemic_scale, self.aleatoric_scale)

    def to_frame(
        self, classes: Sequence[Any] | None = None, *, mcse: bool = False
    ) -> "pd.DataFrame":
        """Return one row for each row of x and one column for each number.

        Args:
            classes: Names of the classes, in the order of `probabilities`.
            mcse: Whether each number is followed by its Monte Carlo standard error, NAME_mcse.
        """
        import pandas as pd

        out: dict[str, Any] = {}
        for name, value in self._named().items():
            both = [("", value), ("_mcse", self.mcse.get(name))] if mcse else [("", value)]
            for end, part in both:
                out |= _columns(name, end, part, classes)
        frame = pd.DataFrame(out)
        if self.probabilities is not None:
            labels = list(range(self.probabilities.shape[1]) if classes is None else classes)
            best = self.probabilities.argmax(1).tolist()
            frame.insert(0, "prediction", pd.Series([labels[k] for k in best], dtype=object))
        return frame

    def _named(self) -> dict[str, Tensor]:
        """Return the numbers by name, in the order of a table."""
        named = {
            "probabilities": self.probabilities,
            "entropy": self.entropy,
            "mutual_information": self.mutual_information,
            "mean": self.mean,
            "scale": self.scale,
            "epistemic_scale": self.epistemic_scale,
            "aleatoric_scale": self.aleatoric_scale,
            **{f"q{p:g}": value for p, value in (self.quantiles or {}).items()},
            "log_predictive_density": self.log_predictive_density,
        }
        return {name: value for name, value in named.items() if value is not None}


class Rows:
    """Numbers by name for one block of rows after another, in one tensor each.

    Tensors grow by doubling: many small ones that live on would lie between the large ones that
    come and go, and keep the memory of all of them.

    Args:
        rows: Number of rows to come, where it is known.
    """

    def __init__(self, rows: int | None) -> None:
        self._room = rows or 0
        self._count = 0
        self._held: dict[str, Tensor] = {}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write the next rows, each `(rows, …)`."""
        stop = self._count + len(next(iter(values.values())))
        if stop > self._room:
            self._room = max(stop, 2 * self._room)
            for name, value in self._held.items():
                larger = value.new_empty((self._room, *value.shape[1:]))
                larger[: self._count] = value[: self._count]
                self._held[name] = larger
        for name, value in values.items():
            if name not in self._held:
                self._held[name] = value.new_empty((self._room, *value.shape[1:]))
            self._held[name][self._count : stop] = value
        self._count = stop

    def whole(self) -> dict[str, Tensor]:
        """Return all rows."""
        return {name: value[: self._count] for name, value in self._held.items()}


def _columns(
    name: str, end: str, value: Tensor | None, classes: Sequence[Any] | None
) -> dict[str, Any]:
    """Return the columns of one number: one, or one for each class or output."""
    if value is None:
        return {}
    values = np.asarray(value)
    if values.ndim == 1:
        return {f"{name}{end}": values}
    values = values.reshape(len(values), int(np.prod(values.shape[1:])))
    labels: Sequence[Any] = range(values.shape[1])
    if name == "probabilities":
        name, labels = "probability", labels if classes is None else classes
    return {f"{name}_{k}{end}": values[:, i] for i, k in enumerate(labels)}


def summarise(
    values: Mapping[str, Tensor], monte_carlo: MonteCarlo, quantiles: Sequence[float]
) -> Summary:
    """Sum up what was read for a block of rows at all draws.

    Args:
        values: `location` and `variance` of y, each `(draws, rows, …)`, and where there are
            quantiles, samples `y`, `(draws, rows, …, samples)`; or `probabilities`,
            `(draws, rows, classes)`; and `log_likelihood`, `(draws, rows)`, where y was given.
        monte_carlo: What computes errors.
        quantiles: Probabilities of the quantiles.
    """
    if "probabilities" in values:
        out = _classes(values["probabilities"].double(), monte_carlo)
    else:
        out = _numbers(values["location"].double(), values["variance"].double(), monte_carlo)
        if quantiles:
            found = monte_carlo.quantiles(values["y"], quantiles)
            out |= {f"q{p:g}": pair for p, pair in zip(quantiles, found, strict=True)}
    if "log_likelihood" in values:
        scores = values["log_likelihood"].double()
        out["log_predictive_density"] = monte_carlo.log_mean_exp(scores)
    return out


def _numbers(location: Tensor, variance: Tensor, monte_carlo: MonteCarlo) -> Summary:
    mean = location.mean(0)
    squares = (location - mean).square()
    return {
        "mean": (mean, monte_carlo.error(location)),
        "scale": monte_carlo.root_mean(squares + variance),
        "epistemic_scale": monte_carlo.root_mean(squares),
        "aleatoric_scale": monte_carlo.root_mean(variance),
    }


def _classes(probabilities: Tensor, monte_carlo: MonteCarlo) -> Summary:
    """Sum up class probabilities; errors of the entropies by the delta method."""
    mean = probabilities.mean(0)
    entropy = torch.special.entr(mean).sum(-1)
    inner = torch.special.entr(probabilities).sum(-1)
    # What a draw adds to the entropy of the mean, to first order: its cross-entropy with the mean.
    cross = -torch.xlogy(probabilities, mean).sum(-1)
    information = (entropy - inner.mean(0)).clamp(min=0.0)
    return {
        "probabilities": (mean, monte_carlo.error(probabilities)),
        "entropy": (entropy, monte_carlo.error(cross)),
        "mutual_information": (information, monte_carlo.error(cross - inner)),
    }
