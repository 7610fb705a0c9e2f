"""Choices as metrics and log lines.

They show how often a key's node is chosen, how even the load is, and which policy applies.
"""

from __future__ import annotations

import structlog

from ryzanstein.router.choose import ChoiceOutcome, Imbalance, PolicyName
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)


class ChoiceTelemetry:
    """Implements `ryzanstein.router.choose.ChoiceObserver`."""

    def __init__(self, telemetry: RouterTelemetry) -> None:
        self._telemetry = telemetry
        self._alarmed: set[str] = set()
        self._policies: dict[str, PolicyName] = {}

    def chosen(self, model: str, policy: PolicyName, outcome: ChoiceOutcome) -> None:
        self._telemetry.choices.labels(model, policy, outcome).inc()
        if model not in self._policies:
            self._rule(model, policy)

    def judged(self, model: str, placed: Imbalance, alarm: bool) -> None:
        self._telemetry.imbalance.labels(model).set(placed.ratio)
        self._telemetry.imbalance_chance.labels(model).set(placed.chance)
        self._telemetry.imbalance_alarm.labels(model).set(alarm)
        if alarm is (model in self._alarmed):
            return
        if alarm:
            self._alarmed.add(model)
            log.warning("load is uneven", model=model, **_measured(placed))
        else:
            self._alarmed.discard(model)
            log.info("load is even again", model=model, **_measured(placed))

    def switched(self, model: str, policy: PolicyName, wanted: Imbalance) -> None:
        self._telemetry.policy_switches.labels(model, policy).inc()
        self._rule(model, policy)
        log.warning("policy switched", model=model, policy=policy, **_measured(wanted))

    def _rule(self, model: str, policy: PolicyName) -> None:
        if (before := self._policies.get(model)) is not None:
            self._telemetry.policy.labels(model, before).set(0)
        self._policies[model] = policy
        self._telemetry.policy.labels(model, policy).set(1)


def _measured(imbalance: Imbalance) -> dict[str, float]:
    return {
        "imbalance": round(imbalance.ratio, 4),
        "by_chance": round(imbalance.chance, 4),
        "requests_per_node": round(imbalance.mean, 1),
    }
