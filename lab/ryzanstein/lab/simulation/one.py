"""`python -P -m ryzanstein.lab.simulation.one SEED [NODES ROUTERS SECONDS]`: runs one seed and prints its result as JSON.

The result is one line. The numbers after the seed are for wide plans.
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
    outcome = simulate(plan(*map(int, sys.argv[1:5])))
    print(json.dumps(document(outcome)))
    sys.exit(1 if outcome.violations else 0)
