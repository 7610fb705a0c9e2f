"""`python -P -m ryzanstein.worker.kernels`: compiles the kernels for this machine, once, and says so.

Exit codes: 0 there are kernels; 1 there are none, and torch's operators are used, which are
slower. With --json each line is a document: {"state": "compiling"}, then {"library": PATH,
"compiled_s": SECONDS} or {"reason": WHY}, each with a "text" for people; and the program ends when
its standard input does, as it does when the process ends that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time

from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.packaged import packaged_library

REMEDY = "answers take longer without them; install a C compiler (GCC 12, clang 15 or later) or set CC"


class _Teller:
    """Tells the user, or the program that reads JSON, what happens."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self._as_json, self._quiet = as_json, quiet
        self._began_s: float | None = None

    def building(self) -> None:
        self._began_s = time.monotonic()
        self._say({"state": "compiling"}, "compiling kernels, once ...")

    def built(self, path: str) -> None:
        spent_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        text = f"compiled kernels, once: {spent_s:.0f} s" if self._began_s is not None else f"kernels: {path}"
        if not self._quiet or self._began_s is not None:
            self._say({"library": path, "compiled_s": round(spent_s, 3)}, text)

    def without(self, reason: str) -> None:
        self._say({"reason": reason}, f"no kernels: {reason}; {REMEDY}")

    def _say(self, document: dict[str, object], text: str) -> None:
        print(json.dumps({**document, "text": text}) if self._as_json else text, flush=True)


def _end_with_input() -> None:
    """Ends this process at the end of standard input; the compilers end with it."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


def main() -> int:
    """Runs the program and returns its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = argparse.ArgumentParser(prog="python -P -m ryzanstein.worker.kernels", description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print JSON documents, one per line")
    arguments.add_argument("--quiet", action="store_true", help="print nothing if the kernels are there")
    arguments.add_argument("--again", action="store_true", help="call a compiler again that has failed within the last hour")
    chosen = arguments.parse_args()
    if chosen.json:
        threading.Thread(target=_end_with_input, daemon=True).start()
    teller = _Teller(chosen.json, chosen.quiet)
    try:
        teller.built(str(packaged_library().path))
        return 0
    except NotBuilt:
        pass  # a source tree has none
    try:
        teller.built(str(library(building=teller.building, despite_failure=chosen.again)))
    except NotBuilt as error:
        teller.without(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
