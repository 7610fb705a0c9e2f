"""Measures how often the router suspects a healthy node on a fully loaded machine, and how soon it suspects a frozen one.

    .venv/bin/python lab/benchmarks/false_alarms.py [--seconds 60] [--spinners 4] [--freezes 10] [--json]

A real cluster of two nodes streams without a pause beside busy processes. Counted from the router's metrics: beats, suspicions,
backups that overtook (an answer moved although its node was healthy), links given up; at the clients: answers that failed or
differ from the first one. Then a node is frozen (SIGSTOP) repeatedly while it streams: the time from the signal to the router's
suspicion, and the longest pause that a client saw.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import grpc

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.status import scrape
from ryzanstein.demo import MODEL_DIR
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

NUM_STREAMS = 4
MAX_TOKENS = 120
_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


class Readers:
    """Clients that read one answer after the other, each with a user of its own, until they are stopped."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(f"user-{i}",)) for i in range(NUM_STREAMS)]
        self.failed: list[str] = []
        self.answers: dict[str, set[str]] = {}
        self.num_answers = 0
        self.longest_pause_s = 0.0

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def num_different(self) -> int:
        return sum(len(texts) - 1 for texts in self.answers.values())

    def _read(self, user: str) -> None:
        with open_blocking_channel(self._address) as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            while not self._stop.is_set():
                try:
                    text = self._answer(stub, user)
                except grpc.RpcError as error:
                    self.failed.append(str(error.code()))
                else:
                    self.answers.setdefault(user, set()).add(text)
                    self.num_answers += 1

    def _answer(self, stub: inference_grpc.InferenceServiceStub, user: str) -> str:
        chat = inference.ChatRequest(
            messages=[inference.Message(role=inference.ROLE_USER, content=f"Tell a story, {user}.")],
            user=user,
            sampling=inference.SamplingParams(temperature=1.0, seed=7, max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS),
        )
        text, last = "", None
        for response in stub.StreamChat(inference.StreamChatRequest(chat=chat), timeout=60):
            if response.event.WhichOneof("kind") == "delta":
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - (last or now))
                last, text = now, text + response.event.delta.text
        return text


def spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def spinners(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def counted(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over all labels but those given."""
    lines = scrape.page(url, 30).splitlines()
    samples = (match for line in lines if (match := _SAMPLE.match(line)) and match["name"] == f"ryzanstein_router_{name}")
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(float(sample["value"]) for sample in samples if wanted <= set((sample["labels"] or "").split(",")))


def false_alarms(cluster: LocalCluster, seconds: float) -> dict[str, float]:
    url = cluster.services[cluster.router_names[0]].metrics_url

    def now() -> dict[str, float]:
        return {
            "beats": counted(url, "beats_total"),
            "suspicions": counted(url, "suspicions_total"),
            "hedges": counted(url, "hedges_total", outcome="started"),
            "answers_moved": counted(url, "failovers_total"),
            "links_given_up": counted(url, "link_losses_total"),
        }

    with Readers(cluster.router_address) as readers:
        time.sleep(2.0)
        before = now()
        time.sleep(seconds)
        after = now()
    figures = {name: after[name] - before[name] for name in before}
    return {
        **figures,
        "false_alarms_per_beat": figures["suspicions"] / figures["beats"],
        "answers": readers.num_answers,
        "answers_failed": len(readers.failed),
        "answers_that_differ": readers.num_different,
        "longest_pause_s": readers.longest_pause_s,
    }


def freezes(cluster: LocalCluster, count: int) -> dict[str, float]:
    """Freezes each node in turn while both stream."""
    log = cluster.services[cluster.router_names[0]].log_path
    took: list[float] = []
    pauses: list[float] = []
    for number in range(3 * count):
        node_id = cluster.node_ids[number % len(cluster.node_ids)]
        with Readers(cluster.router_address) as readers:
            time.sleep(1.5)
            readers.longest_pause_s, read_to, frozen_at = 0.0, log.stat().st_size, time.time()
            cluster.kill(node_id, signal.SIGSTOP)
            time.sleep(2.5)
            cluster.kill(node_id, signal.SIGCONT)
            at, generations = suspicion(log, read_to, node_id, frozen_at)
        if readers.failed or readers.num_different:
            raise SystemExit(f"{len(readers.failed)} answers failed, {readers.num_different} differ: {readers.failed[:3]}")
        # A node that happens to be idle is judged by its slower beats, and nobody waits for it.
        if generations:
            took.append(at - frozen_at)
            pauses.append(readers.longest_pause_s)
        if len(took) == count:
            break
        cluster.wait_nodes(len(cluster.node_ids))
        time.sleep(1.0)
    return {
        "freezes": len(took),
        "suspected_p50_s": statistics.median(took),
        "suspected_max_s": max(took),
        "longest_pause_p50_s": statistics.median(pauses),
        "longest_pause_max_s": max(pauses),
    }


def suspicion(log: Path, read_to: int, node_id: str, since: float) -> tuple[float, int]:
    """When the router's log says that the node is suspected, and how many generations it had then."""
    for line in log.read_bytes()[read_to:].splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if entry.get("event") == "node suspected" and entry.get("node_id") == node_id:
                at = datetime.fromisoformat(entry["timestamp"]).timestamp()
                if at > since:
                    return at, entry["generations"]
    raise SystemExit(f"{node_id} was frozen and never suspected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--spinners", type=int, default=4)
    parser.add_argument("--freezes", type=int, default=10, help="number of freezes; 0: none")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec = ClusterSpec(model=MODEL_DIR, num_nodes=2, tp=1)
    with LocalCluster(spec) as cluster, spinners(arguments.spinners):
        figures = {"spinners": arguments.spinners, **false_alarms(cluster, arguments.seconds)}
        if arguments.freezes:
            figures |= freezes(cluster, arguments.freezes)
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:.4g}")


if __name__ == "__main__":
    main()
