"""Runs a server so that nothing of it outlives the agent, however either of them ends.

Started by path in an isolated interpreter: `python -I -S keeper.py COMMAND...`. Its standard input is a
pipe of the agent, which the kernel closes when the agent dies. Processes of the server whose parent has
died become children of this one (prctl(2), PR_SET_CHILD_SUBREAPER), so that all of them are found. It
ends with the exit code of the server, when no process of it is left, and nothing in shared memory.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0
_POLL_S = 0.02
_LOOKS = 2
"""A process may get another parent while one looks; so often in a row nothing must be there."""


def descendants() -> list[int]:
    """Returns the processes below this one, as far as they live; no zombies.

    What is below a zombie is among them: its parent may have died while this looks.
    """
    children: dict[int, list[int]] = {}
    living = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(name))
            if state not in "ZX":
                living.add(int(name))
    found, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return [pid for pid in found if pid in living]


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end(server: "subprocess.Popen[bytes]") -> None:
    """Asks the server to end, then kills what is left of it."""
    send([server.pid], signal.SIGTERM)
    send(descendants(), signal.SIGCONT)
    ends = time.monotonic() + GRACE_S
    while server.poll() is None and time.monotonic() < ends:
        time.sleep(_POLL_S)
    num_empty = 0
    while num_empty < _LOOKS:
        pids = descendants()
        num_empty = 0 if pids else num_empty + 1
        send(pids, signal.SIGKILL)
        reap()
        time.sleep(_POLL_S)


def reap() -> None:
    """Takes note of adopted processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def beside(name: str) -> ModuleType:
    """Loads the module of this name in this folder, which is on no path here."""
    spec = spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    litter = beside("litter")
    before = litter.present()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    watched = os.pidfd_open(server.pid)
    ready, _, _ = select.select([0, watched], [], [])
    code = server.poll() if watched in ready else None
    end(server)
    for name in litter.remove_new(before):
        print(f"shared memory of a killed engine removed: {name}", file=sys.stderr)
    return 0 if code is None else (code if code >= 0 else 128 - code)


if __name__ == "__main__":
    sys.exit(main())
