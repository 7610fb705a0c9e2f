"""What one run of a fault showed. Plain data.

Times are seconds after the strike unless stated otherwise; None: it did not happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation of one run.

    - `rerouted_s`: after detection, the slowest of the run.
    - `first_token_s`: the slowest of the struck streams.
    - `serving_s`: from a rank's loss to the node's readiness, with its phases in `startup_s`.
    - `whole_s`: until everything was as before.
    - `troubles`: what clients saw, by kind.
    - `metrics`, `log_lines`: what changed or was logged that does not without a fault.
    - `beats`, `alarms`: of all nodes, while the fault lasted.
    - `unwanted`: what a fault must not lead to, but did.
    - `formed`, `invalid`: finished answers that were checked against their form, and those without it.
    - `spared`: answers of other models than the struck one while it was struck and restarted, with
      the longest pause between their tokens, and the longest in a load without a fault.
    """

    fault: str
    run: int
    kind: str
    streams: int
    struck: int
    detected_s: float | None = None
    detected_by: str = ""
    rerouted_s: float | None = None
    first_token_s: float | None = None
    serving_s: float | None = None
    startup_s: Mapping[str, float] = field(default_factory=dict)
    whole_s: float | None = None
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    failed: int = 0
    changed: int = 0
    failures: tuple[str, ...] = ()
    troubles: Counter[str] = field(default_factory=Counter)
    metrics: Counter[str] = field(default_factory=Counter)
    log_lines: Counter[str] = field(default_factory=Counter)
    beats: int = 0
    alarms: int = 0
    unwanted: Counter[str] = field(default_factory=Counter)
    formed: int = 0
    invalid: int = 0
    spared: int = 0
    spared_pause_s: float | None = None
    usual_pause_s: float | None = None
