"""The program `ryzanstein`. It obeys SIGTERM from its first moment, also as the first process of a container."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs the command line, whose modules take a second to import."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from ryzanstein.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
