"""`python -P -m ryzanstein.lab.simulation --seed N | --minutes M`: see docs/internals/testing.md.

Exit codes: 0 no violation, 1 a violation, 2 wrong usage.
"""

from __future__ import annotations

import sys

from ryzanstein.lab.simulation.machine import clock

clock.install()

from ryzanstein.lab.simulation.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
