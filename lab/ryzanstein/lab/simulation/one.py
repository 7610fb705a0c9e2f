"""`python -P -m ryzanstein.lab.simulation.one SEED`: runs one seed and prints its result as JSON.

The result is one line.
"""

from __future__ import annotations

import json
import sys

from ryzanstein.lab.simulation.machine import clock

clock.install()

from ryzanstein.lab.simulation.command import document  # noqa: E402
from ryzanstein.lab.simulation.planning.drawing import plan  # noqa: E402
from ryzanstein.lab.simulation.simulation import simulate  # noqa: E402

if __name__ == "__main__":
    outcome = simulate(plan(int(sys.argv[1])))
    print(json.dumps(document(outcome)))
    sys.exit(1 if outcome.violations else 0)
