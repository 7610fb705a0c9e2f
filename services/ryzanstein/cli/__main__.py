"""The program `ryzanstein`. It obeys SIGTERM from its first moment, also as the first process of a container."""

from __future__ import annotations

import errno
import os
import signal
import sys

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Runs the command line, whose modules take a second to import."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from ryzanstein.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        try:
            run()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _give_up(error)


def _give_up(error: OSError) -> None:
    """Says what is full, and ends. What standard output still holds would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(f"{error.filename or 'standard output'} cannot be written: {error.strerror}; free some room", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
