"""`python -m ryzanstein.lab.simulation.one SEED`: one seed, its result as a line of JSON."""

from __future__ import annotations

import json
import sys

from ryzanstein.lab.simulation import clock

clock.install()

from ryzanstein.lab.simulation.command import document  # noqa: E402
from ryzanstein.lab.simulation.plan import plan  # noqa: E402
from ryzanstein.lab.simulation.simulation import simulate  # noqa: E402

if __name__ == "__main__":
    outcome = simulate(plan(int(sys.argv[1])))
    print(json.dumps(document(outcome)))
    sys.exit(1 if outcome.violations else 0)
