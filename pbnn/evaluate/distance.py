"""How far two posteriors are apart in function space, input by input, with bootstrap intervals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pbnn.evaluate.bootstrap import Mean, Median, bootstrap

__all__ = ["Distance", "thinned"]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """What separates the draws of f(x) under a posterior from those under a reference.

    Each is `(n · outputs,)`, or `(n,)` for classes.

    Attributes:
        epistemic_ratio: Scale of f(x) over the reference's.
        wasserstein: 1-Wasserstein distance between the draws of f(x), in reference scales.
        total_variation: Total variation distance between class probabilities.
        agreement: Whether the most probable class is the same, as 0 or 1.
    """

    epistemic_ratio: Tensor
    wasserstein: Tensor
    total_variation: Tensor | None = None
    agreement: Tensor | None = None

    @classmethod
    def between(
        cls,
        f: Tensor,
        reference: Tensor,
        probabilities: Tensor | None = None,
        reference_probabilities: Tensor | None = None,
    ) -> "Distance":
        """Compare draws of f(x), and class probabilities where there are any.

        Scales and distances depend on the number of draws, so both sides must have the same
        number. Between two empirical distributions of S values the 1-Wasserstein distance is the
        mean distance of their order statistics (Peyré & Cuturi 2019, remark 2.28).

        Args:
            f: Draws `(draws, n, outputs)`.
            reference: The reference's draws, as many.
            probabilities: Class probabilities `(n, classes)`.
            reference_probabilities: The reference's.
        """
        scale = reference.std(0, correction=0)
        gap = (f.sort(0).values - reference.sort(0).values).abs().mean(0)
        # Where both never vary (an input that the network ignores), they do not differ in scale.
        ratio = torch.where(
            (scale == 0) & (gap == 0), torch.ones_like(scale), f.std(0, correction=0) / scale
        )
        wasserstein = torch.where(gap == 0, torch.zeros_like(gap), gap / scale)
        out: dict[str, Tensor] = {}
        if probabilities is not None and reference_probabilities is not None:
            out["total_variation"] = 0.5 * (probabilities - reference_probabilities).abs().sum(1)
            same = probabilities.argmax(1) == reference_probabilities.argmax(1)
            out["agreement"] = same.double()
        return cls(epistemic_ratio=ratio.flatten(), wasserstein=wasserstein.flatten(), **out)

    def summary(self, seed: int = 0) -> dict[str, float]:
        """Return medians (means for classes) over inputs, each with a 95% bootstrap interval.

        Inputs are resampled, so the intervals say what other inputs of the kind would have given;
        the noise of the draws is for the noise floors to show.

        Args:
            seed: Seed of the resampling.

        Returns:
            By name; the ends of the interval of NAME are NAME_low and NAME_high, and
            epistemic_ratio_5 and epistemic_ratio_95 are quantiles over inputs.
        """
        out: dict[str, float] = {}
        for name in ("epistemic_ratio", "wasserstein"):
            out |= _with_interval(name, getattr(self, name), Median, seed)
        for level in (5, 95):
            quantile = self.epistemic_ratio.quantile(level / 100)
            out[f"epistemic_ratio_{level}"] = float(quantile)
        for name in ("total_variation", "agreement"):
            values = getattr(self, name)
            if values is not None:
                out |= _with_interval(name, values, Mean, seed)
        return out


def thinned(f: Tensor, count: int) -> Tensor:
    """Return `count` draws `(count, …)` of `(chain, draw, …)`, evenly spaced over all chains."""
    flat = f.flatten(0, 1)
    return flat[torch.linspace(0, len(flat) - 1, count).round().long()]


def _with_interval(
    name: str, values: Tensor, statistic: type[Mean] | type[Median], seed: int
) -> dict[str, float]:
    if values.isnan().any():
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), float("nan"))
    found = bootstrap(statistic(values.cpu()), len(values), seed=seed)
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
