"""Measures what a node and a router before vLLM cost, for docs/operate/engines.md.

    .venv/bin/python lab/benchmarks/beside_vllm.py [--model DIR] [--vllm build/vllm/bin/python] [--streams 8] [--tokens 128]
        [--rounds 6] [--flags "--dtype float32"] [--no-sampler] [--json FILE]

One vLLM, and a cluster of one node beside it. The same client sends the same requests to `/v1/completions` of vLLM and of the
router, in turns: tokens per second of all streams together, the time until the first token, and the processor time of a token
by process. vLLM computes with one thread, which has a core to itself, as a GPU does not share one with services. All else runs
on the other cores. Without --model it is a random decoder of four layers. `make test-engines` installs vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status.scrape import page
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.worker.engines.child.command import SAMPLER
from ryzanstein.worker.engines.vllm.packages import write_plugin

WORDS = ["river", "stone", "moon", "house", "tree", "night", "cloud", "bread", "light", "water"]
START_S = 600.0
ENGINE = "VLLM::"
"""Begins the names of vLLM's processes that schedule and compute."""


@contextmanager
def vllm_server(given: argparse.Namespace, model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Yields the address and the process id of a vLLM."""
    (port,) = free_ports(1)
    write_plugin(folder / "plugin")
    sampler = [] if given.no_sampler else ["--logits-processors", SAMPLER]
    command = [given.vllm, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "m", *sampler, *shlex.split(given.flags)]
    first, *others = sorted(os.sched_getaffinity(0))
    environment = os.environ | {"PYTHONPATH": str(folder / "plugin"), "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = str(first)
    log = (folder / "vllm.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                page(f"http://127.0.0.1:{port}/health", 2.0)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit((folder / "vllm.log").read_text()[-3000:]) from None
                time.sleep(0.5)
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.cpu_affinity([first] if ENGINE in each.name() else others)
        os.sched_setaffinity(0, others)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


async def answer(session: aiohttp.ClientSession, url: str, prompt: str, given: argparse.Namespace) -> float:
    """Asks for an answer; returns the seconds until its first token."""
    body = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": given.tokens, "temperature": 1.0, "seed": 1}
    began, first_s = time.monotonic(), 0.0
    async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and not first_s:
                first_s = time.monotonic() - began
    return first_s


async def run(url: str, given: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Returns tokens per second of all streams together, and the median time until the first token in seconds."""
    words = random.Random(seed)
    prompts = [" ".join(words.choices(WORDS, k=24)) for _ in range(given.streams)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        began = time.monotonic()
        firsts = await asyncio.gather(*(answer(session, url, prompt, given) for prompt in prompts))
        return given.streams * given.tokens / (time.monotonic() - began), statistics.median(firsts)


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process and of its threads, in seconds."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def measure(given: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    with vllm_server(given, model, folder) as (url, vllm_pid):
        spec = ClusterSpec(model, num_nodes=1, model_names=("m",), engines=(url,), router_flags=("--log-level", "warning"))
        with LocalCluster(spec) as cluster:
            ways = {"vllm": url, "router": cluster.http_url}
            pids = {"vllm": vllm_pid, **{name: cluster.services[name].pid for name in ("node-0", "router-0")}}
            pids |= {
                each.name(): each.pid for each in psutil.Process(vllm_pid).children(recursive=True) if ENGINE in each.name()
            }
            for way in ways.values():
                asyncio.run(run(way, given, 0))
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            spent = {way: dict.fromkeys(pids, 0.0) for way in ways}
            for turn in range(given.rounds):
                for way in sorted(ways, reverse=bool(turn % 2)):
                    before = {name: cpu_s(pid) for name, pid in pids.items()}
                    found[way].append(asyncio.run(run(ways[way], given, 1 + turn)))
                    for name, pid in pids.items():
                        spent[way][name] += cpu_s(pid) - before[name]
    num_tokens = given.rounds * given.streams * given.tokens
    return {
        "ratio": round(statistics.median(r[0] / v[0] for r, v in zip(found["router"], found["vllm"], strict=True)), 3),
        "added_first_token_ms": round(
            1e3 * statistics.median(r[1] - v[1] for r, v in zip(found["router"], found["vllm"], strict=True)), 1
        ),
        "tokens_per_s": {way: round(statistics.median(each[0] for each in rows), 1) for way, rows in found.items()},
        "cpu_us_per_token": {
            way: {name: round(1e6 * seconds / num_tokens) for name, seconds in each.items()} for way, each in spent.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (
        ("--model", ""),
        ("--vllm", "build/vllm/bin/python"),
        ("--flags", "--dtype float32 --max-model-len 1024"),
    ):
        parser.add_argument(name, default=text)
    for name, number in (("--streams", 8), ("--tokens", 128), ("--rounds", 6)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--no-sampler", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(given.model) if given.model else Path(folder) / "model"
        if not given.model:
            synthesize(model, Recipe("llama", PRESETS["context"], "float32", 0, 1))
        found = measure(given, model, Path(folder))
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found | {k: str(v) for k, v in vars(given).items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
