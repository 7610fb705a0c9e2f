"""`python -P -m ryzanstein.lab.load`, or `ryzanstein load`."""

from __future__ import annotations

from ryzanstein.lab.load.command import main

if __name__ == "__main__":
    main()
