"""Ranks that do what they are told in a word, for tests of the fork server. PREPARE is an environment variable."""

import ctypes
import json
import os
import socket
import sys
import threading
import time

from ryzanstein.worker.ranks.starting import fork_server


def prepare() -> None:
    match os.environ.get("PREPARE"):
        case "fail":
            raise ImportError("no module named torch")
        case "hang":
            time.sleep(60)
        case "thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def hang_in_c() -> None:
    """Waits for ever and holds the interpreter, as a kernel that hangs does: it takes a lock twice."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def run(rank: int, fd: int) -> int:
    agent = socket.socket(fileno=fd)
    held = []
    while word := agent.recv(4096).decode():
        match word.split():
            case ["exit", code]:
                return int(code)
            case ["fail"]:
                raise RuntimeError("as told")
            case ["hold", number]:
                held.append(bytearray(b"x") * int(number))
                agent.send(b"held")
            case ["hang"]:
                hang_in_c()
            case ["spin", seconds]:
                spin(float(seconds))
            case ["read", number]:
                agent.send(os.pread(int(number), 4096, 0))
            case ["rank"]:
                agent.send(json.dumps([rank, os.getpid(), os.getppid(), os.getpgid(0)]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(fork_server.main(prepare, run))
