"""Counts the modules that one streamed chat passes, from the wire to the sampler and back.

`.venv/bin/python lab/benchmarks/walk.py` starts a cluster of one router and one node with the demo model,
records the calls in the main threads of router, agent and ranks during one chat of eight tokens, and
prints the modules per service. Modules that also run in an idle second (beats, leases) are counted
apart. With `--list` it names them; `*` marks those of the chat alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

TOKENS = 8
IDLE_S = 1.0
WAIT_S = 120.0

# Runs in every Python process of the cluster: SIGUSR1 begins to record, SIGPROF writes what ran to the folder.
RECORDER = """
import json, os, signal, sys

folder, seen = os.environ["WALK_DIR"], set()

def look(frame, event, argument):
    if event == "call":
        seen.add(frame.f_globals.get("__name__", ""))

def begin(*_):
    seen.clear()
    sys.setprofile(look)

def end(*_):
    sys.setprofile(None)
    path = os.path.join(folder, str(os.getpid()))
    with open(path + ".new", "w") as file:
        json.dump(sorted(seen), file)
    os.replace(path + ".new", path)

signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGPROF, end)
"""
SERVICES = {"router": "ryzanstein.router", "agent": "ryzanstein.worker", "ranks": "ryzanstein.worker.ranks.rank"}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, dict[int, str]]]:
    """The router's address, and the services by process id."""
    (folder / "sitecustomize.py").write_text(RECORDER)
    (folder / "seen").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder), "WALK_DIR": str(folder / "seen")}
    flags = ("--nodes", "1", "--tp", "2", "--grpc-port", "0", "--http-port", "0", "--orchestrator-port", "0")
    command = [str(Path(sys.executable).with_name("ryzanstein")), "up", "--json", *flags, "--state-dir", str(folder / "state")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            document = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
            yield document["grpc"][0], _services(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _services(parent: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for process in psutil.Process(parent).children(recursive=True):
        words = process.cmdline()
        module = words[words.index("-m") + 1] if "-m" in words else ""
        for name, started in SERVICES.items():
            if module == started:
                found[process.pid] = name
    return found


@contextmanager
def recorded(folder: Path, services: dict[int, str], modules: dict[str, set[str]]) -> Iterator[None]:
    """Adds what runs meanwhile to `modules` by service."""
    for pid in services:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    yield
    for pid in services:
        os.kill(pid, signal.SIGPROF)
    for pid, name in services.items():
        path, until = folder / "seen" / str(pid), time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > until:
                raise SystemExit(f"{name} {pid} recorded nothing")
            time.sleep(0.05)
        modules.setdefault(name, set()).update(each for each in json.loads(path.read_text()) if each.startswith("ryzanstein"))
        path.unlink()


def chat(address: str) -> None:
    with open_blocking_channel(address) as channel:
        grpc.channel_ready_future(channel).result(WAIT_S)
        message = pb.Message(role=pb.ROLE_USER, content="Count from 1 to 20.")
        request = pb.ChatRequest(messages=[message], sampling=pb.SamplingParams(max_tokens=TOKENS), session_id="walk")
        for _ in InferenceServiceStub(channel).StreamChat(pb.StreamChatRequest(chat=request), timeout=WAIT_S):
            pass


def main() -> None:
    idle: dict[str, set[str]] = {}
    busy: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as (address, services):
        chat(address)
        with recorded(Path(name), services, idle):
            time.sleep(IDLE_S)
        with recorded(Path(name), services, busy):
            chat(address)
    table = Table("service", "modules of a chat", "also when idle")
    for service, modules in busy.items():
        table.add_row(service, str(len(modules)), str(len(modules & idle[service])))
    everywhere, resting = set().union(*busy.values()), set().union(*idle.values())
    table.add_row("all", str(len(everywhere)), str(len(everywhere & resting)))
    console = Console()
    console.print(table)
    if "--list" in sys.argv:
        for module in sorted(everywhere):
            console.print(("  " if module in resting else "* ") + module)


if __name__ == "__main__":
    main()
