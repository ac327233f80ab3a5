"""What the three criteria of collapse say together: one verdict, its reason, what to try next."""

from dataclasses import dataclass

from pbnn.evaluate.bootstrap import Interval

__all__ = [
    "FEW_ROWS",
    "INVERTED",
    "MISCALIBRATED",
    "NO_SIGNAL",
    "NO_SPREAD",
    "ORDER",
    "SOUND",
    "TOO_FEW",
    "UNRANKED",
    "Verdict",
    "judge",
]

INVERTED = "inverted"
UNRANKED = "scale without ranking"
NO_SPREAD = "no spread"
NO_SIGNAL = "no signal"
MISCALIBRATED = "miscalibrated"
TOO_FEW = "too few rows"
SOUND = "sound"
ORDER = (INVERTED, UNRANKED, NO_SPREAD, NO_SIGNAL, MISCALIBRATED, TOO_FEW, SOUND)
"""Verdicts, worst first."""
FEW_ROWS = 10
"""Fewer rows have no verdict: a bootstrap of one row has no spread, and of a few too little."""

_REMEDIES = {
    INVERTED: ("structure", "mean"),
    UNRANKED: ("structure",),
    NO_SPREAD: ("draws",),
    NO_SIGNAL: ("mean",),
    MISCALIBRATED: ("scale",),
    TOO_FEW: ("rows",),
    SOUND: (),
}
_WORDS = {
    "structure": "covariances between weights (guide='lowrank' or 'kronecker')",
    "draws": "a fit with draws (fit_svi, fit_laplace, fit_ensemble or fit_nuts)",
    "mean": "another mean of the weights (weight averaging, for a flatter optimum)",
    "scale": "scaling (temperature for classes, one factor on the scales for numbers)",
    "rows": f"{FEW_ROWS} rows or more, both in distribution and out of it",
}


@dataclass(frozen=True)
class Verdict:
    """What the criteria say of one set of inputs.

    Attributes:
        name: One of `ORDER`.
        reason: The numbers that it follows from, in words.
    """

    name: str
    reason: str

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to try, in this order: "structure", "draws", "mean", "scale" or "rows"."""
        return _REMEDIES[self.name]

    @property
    def next_step(self) -> str:
        """What to try next, in words."""
        if not self.remedies:
            return "nothing to mend; choose a threshold on validation rows"
        return "try " + ", then ".join(_WORDS[remedy] for remedy in self.remedies)


def judge(
    signal: Interval, direction: Interval, miscalibrated: str | None, *, rows: int, draws: int
) -> Verdict:
    """Return the verdict that matches first.

    One draw: no spread. Fewer than `FEW_ROWS` rows: too few, whatever the numbers. A's interval
    wholly below 0.5: inverted. It holds 0.5 and B > 0: scale without ranking, for the covariances;
    and B <= 0: no signal, for the mean. It is above and C is bad: to be scaled. Else sound.
    Structure comes first: one factor on the spread of f cannot change its ranking.

    Args:
        signal: A, the AUROC of the epistemic spread for these inputs against those in distribution.
        direction: B, log of its mean square here over that in distribution.
        miscalibrated: What of C is bad, in words; None where nothing is.
        rows: Number of rows here or in distribution, whichever is less.
        draws: Number of draws of the posterior, over all chains.
    """
    numbers = f"A {signal}, B {direction}"
    if draws == 1:
        return Verdict(NO_SPREAD, f"one draw has no epistemic spread on any row: {numbers}")
    if rows < FEW_ROWS:
        return Verdict(
            TOO_FEW, f"{rows} row(s), whose bootstrap intervals are not to be trusted: {numbers}"
        )
    if signal.high < 0.5:
        return Verdict(INVERTED, f"uncertainty is lower here than in distribution: {numbers}")
    if signal.holds(0.5):
        if direction.value > 0:
            return Verdict(
                UNRANKED, f"uncertainty is larger on average but does not rank rows: {numbers}"
            )
        return Verdict(NO_SIGNAL, f"uncertainty neither ranks rows nor grows: {numbers}")
    if miscalibrated is not None:
        return Verdict(MISCALIBRATED, f"rows are ranked, but {miscalibrated}: {numbers}")
    return Verdict(SOUND, f"rows are ranked, and probabilities hold: {numbers}")
