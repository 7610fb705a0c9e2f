"""Answers that have a form, and streams on sockets, when their node or their router is lost.

The strikes are those on plain answers. What is new is what they hit: JSON of a schema in the middle
of an object, calls of functions in the middle of their arguments, and WebSockets.
"""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.lab.chaos.fault import Fault, Resume
from ryzanstein.lab.chaos.faults import control, nodes
from ryzanstein.lab.chaos.stage.layouts import FORMS

_RUNS = 10
_STRIKES = {"node_killed": "sigkill_agent", "node_frozen": "sigstop_agent", "router_killed": "router_sigkill"}
_HIT = {
    "object": ("in the middle of an object", ("object", "object-n2", "object-session", "object-sse")),
    "call": ("in the middle of a demanded call", ("call", "call-named", "call-sse")),
    "websocket": ("in the middle of streams on a socket", ("websocket", "object-websocket", "call-websocket")),
}
# Frames do not name their node. One that arrives this soon after the strike was sent before it.
_IN_FLIGHT_S = 0.01


def _fault(hit: str, strike: str) -> Fault:
    plain = next(fault for fault in (*nodes.FAULTS, *control.FAULTS) if fault.name == _STRIKES[strike])
    what, kinds = _HIT[hit]
    fault = replace(plain, name=f"{hit}_{strike}", what=f"{plain.what}, {what}", layout=FORMS, kinds=kinds, most_runs=_RUNS)
    if hit == "websocket" and plain.resumes is Resume.MOVED:
        return replace(fault, resumes=Resume.ANY, in_flight_s=_IN_FLIGHT_S)
    return fault


FAULTS = tuple(_fault(hit, strike) for hit in _HIT for strike in _STRIKES)
