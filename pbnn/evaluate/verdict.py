"""What the three criteria of collapse say together: one verdict, its reason, what to try next."""

from dataclasses import dataclass

from pbnn.evaluate.bootstrap import Interval

__all__ = [
    "INVERTED",
    "MISCALIBRATED",
    "NO_SIGNAL",
    "ORDER",
    "SOUND",
    "UNRANKED",
    "Verdict",
    "judge",
]

INVERTED = "inverted"
UNRANKED = "scale without ranking"
NO_SIGNAL = "no signal"
MISCALIBRATED = "miscalibrated"
SOUND = "sound"
ORDER = (INVERTED, UNRANKED, NO_SIGNAL, MISCALIBRATED, SOUND)
"""Verdicts, worst first."""

_REMEDIES = {
    INVERTED: ("structure", "mean"),
    UNRANKED: ("structure",),
    NO_SIGNAL: ("mean",),
    MISCALIBRATED: ("scale",),
    SOUND: (),
}
_WORDS = {
    "structure": "covariances between weights (guide='lowrank' or 'kronecker')",
    "mean": "another mean of the weights (weight averaging, for a flatter optimum)",
    "scale": "scaling (temperature for classes, one factor on the scales for numbers)",
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
        """What to try, in this order: "structure", "mean" or "scale"."""
        return _REMEDIES[self.name]

    @property
    def next_step(self) -> str:
        """What to try next, in words."""
        if not self.remedies:
            return "nothing to mend; choose a threshold on validation rows"
        return "try " + ", then ".join(_WORDS[remedy] for remedy in self.remedies)


def judge(signal: Interval, direction: Interval, miscalibrated: str | None) -> Verdict:
    """Return the verdict that matches first.

    A's interval wholly below 0.5: inverted. It holds 0.5 and B > 0: scale without ranking, for the
    covariances; and B <= 0: no signal, for the mean. It is above and C is bad: to be scaled. Else
    sound. Structure comes first: one factor on the spread of f cannot change its ranking.

    Args:
        signal: A, the AUROC of the epistemic spread for these inputs against those in distribution.
        direction: B, log of its mean square here over that in distribution.
        miscalibrated: What of C is bad, in words; None where nothing is.
    """
    numbers = f"A {signal}, B {direction}"
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
