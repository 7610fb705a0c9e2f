"""Leads the process group of `compilers`, and ends it when the process that compiles has ended.

Started by path in an isolated interpreter (`python -I -S compiler_guard.py FOLDER`). The end of its
standard input is the end of that process.
"""

import os
import shutil
import signal
import sys
import time

_WRITING_S = 0.1


def guard(folder: str) -> None:
    """Waits for the end of standard input, then ends the group and removes its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that compiles
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(_WRITING_S)  # what still ends writes no more
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    guard(sys.argv[1])
