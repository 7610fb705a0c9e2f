"""Bounds that an answer has to keep to count as good: `ttft=0.5,tpot=0.05,e2e=20`, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.lab.load.outcome import Outcome

_MOST_S = 86_400.0


class ObjectiveError(ValueError):
    """The text names no bound that is known, or no number of seconds."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds to the first token, for each further one, and to the end; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def read(cls, text: str) -> Objectives:
        """Raises ObjectiveError."""
        bounds: dict[str, float] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = part.partition("=")
            if name not in ("ttft", "tpot", "e2e"):
                raise ObjectiveError(f"{name!r} is none of ttft, tpot and e2e")
            try:
                seconds = float(value)
            except ValueError:
                raise ObjectiveError(f"{part!r} has no number of seconds") from None
            if not 0 < seconds <= _MOST_S:
                raise ObjectiveError(f"{name} must be more than 0 and at most {_MOST_S:.0f} seconds")
            bounds[f"{name}_s"] = seconds
        return cls(**bounds)

    def met_by(self, outcome: Outcome) -> bool:
        """Returns whether it is complete and within all bounds."""
        if not outcome.complete or not outcome.first:
            return False
        within = [self.ttft_s is None or outcome.ttft_s <= self.ttft_s, self.e2e_s is None or outcome.e2e_s <= self.e2e_s]
        tpot_s = outcome.tpot_s
        return all(within) and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
