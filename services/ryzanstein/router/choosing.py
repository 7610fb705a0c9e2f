"""The router's chooser, from its settings."""

from __future__ import annotations

import zlib

from ryzanstein.router.choice_telemetry import ChoiceTelemetry
from ryzanstein.router.choose import BalanceSettings, Bounds, Chooser, PolicyChoice, Thresholds
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.telemetry import Telemetry


def make_chooser(settings: RouterSettings, router_id: str, telemetry: Telemetry) -> Chooser:
    """Routers take turns from different nodes on, so that several that start together do not go round in step."""
    first_turn = zlib.crc32(router_id.encode())
    choice = PolicyChoice(settings.policy, settings.model_policy, _bounds(settings), first_turn)
    return Chooser(choice, _balance(settings), ChoiceTelemetry(telemetry))


def _bounds(settings: RouterSettings) -> Bounds:
    return Bounds(settings.queue_bound, settings.load_bound, settings.bound_floor, settings.prefix_entries)


def _balance(settings: RouterSettings) -> BalanceSettings:
    thresholds = Thresholds(
        alarm=settings.imbalance_alarm,
        switch=settings.imbalance_switch,
        calm=settings.imbalance_calm,
        calm_s=settings.imbalance_calm_s,
        floor=settings.load_floor,
    )
    return BalanceSettings(settings.load_window_s, thresholds)
