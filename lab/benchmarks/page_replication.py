"""Measures what sending pages to the backup node gains and costs.

    .venv/bin/python lab/benchmarks/page_replication.py silence [--contexts 1000,8000,30000]
    .venv/bin/python lab/benchmarks/page_replication.py overhead [--clients 8] [--prompt 200] [--rounds 4] [--seconds 10]
    .venv/bin/python lab/benchmarks/page_replication.py disk [--contexts 8000]

All take --model PATH and --json FILE, `overhead` --flags FLAGS of the nodes besides.

`silence`: two nodes; a client reads the answer to a prompt of so many tokens. At its 64th token the node that generates it gets
SIGKILL. The silence is the longest time between two tokens from then on, the recomputed tokens are the prompt tokens that the
other node computed. Once without replication, once with it.

`overhead`: two nodes and --clients clients in sessions of their own, which send --prompt new tokens in each turn and read 64.
Clusters with `--kv-replication none` and `sessions` run at the same time and are loaded in turn: A, B, B, A and so on. The
overhead is one minus the ratio of tokens per second, new prompts and answers together. Both nodes, sender and receiver, share
this machine's cores. The nodes' processor time a token, which other work on the machine changes less, is counted besides.
Memory of the cache that is written for the first time costs more than later: --warm-up SECONDS fills a small one (--kv-bytes)
before the rounds.

`disk`: one node with a disk tier. The first token of a conversation's second turn: computed again by a node without a tier,
and read from the disk by a node that was killed and started again.

Without --model it uses a random decoder of four layers with a context of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.status import scrape
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

CALL_S = 900.0
KILL_AT = 64
FLAGS = ("--kv-replication-rate", "0")


def model_of(given: str, folder: Path) -> Path:
    """Returns the model that was given, or writes the random one."""
    if given:
        return Path(given)
    synthesize(folder / "model", Recipe("llama", PRESETS["context"], "float32", 0, 1))
    return folder / "model"


def text_of(num_tokens: int, salt: int = 0) -> str:
    """Returns a text of about so many tokens of the random model's tokenizer."""
    words = (f"{(i * 7919 + salt * 104729) % 9973:04d}" for i in range(num_tokens // 4))
    return "".join(words)


@contextmanager
def cluster(
    model: Path, policy: str, *flags: str, nodes: int = 2, threads: int = 2, kv_bytes: int = 2**30
) -> Iterator[LocalCluster]:
    spec = ClusterSpec(
        model,
        num_nodes=nodes,
        tp=1,
        threads_per_rank=threads,
        worker_flags=(*FLAGS, "--kv-bytes", str(kv_bytes), "--kv-replication", policy, *flags),
    )
    with LocalCluster(spec) as running:
        yield running


def metric(cluster: LocalCluster, node_id: str, name: str) -> float:
    lines = scrape.page(cluster.services[node_id].metrics_url).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"ryzanstein_worker_{name}"))


def chat(cluster: LocalCluster, text: str, session_id: str, max_tokens: int) -> Iterator[Any]:
    """Yields the deltas of an answer, each with the time at which it came."""
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    message = pb.Message(role=pb.ROLE_USER, content=text)
    request = pb.StreamChatRequest(chat=pb.ChatRequest(messages=[message], session_id=session_id, sampling=sampling))
    with open_blocking_channel(cluster.router_address) as channel:
        for response in InferenceServiceStub(channel).StreamChat(request, timeout=CALL_S):
            yield response.event


def silence(model: Path, policy: str, context: int) -> dict[str, Any]:
    """Kills the node in the middle of an answer; returns what the client saw."""
    with cluster(model, policy) as running:
        last, longest, tokens, killed, before, prompt = 0.0, 0.0, 0, "", 0.0, 0
        began = time.monotonic()
        first_s = 0.0
        for event in chat(running, text_of(context), "s", 3 * KILL_AT):
            now = time.monotonic()
            prompt = event.started.prompt_tokens or prompt
            if event.WhichOneof("kind") != "delta":
                continue
            first_s = first_s or now - began
            tokens += len(event.delta.token_ids)
            if killed:
                longest = max(longest, now - last)
            elif tokens >= KILL_AT:
                killed = event.delta.node_id
                (backup,) = (node for node in running.node_ids if node != killed)
                before = metric(running, backup, 'tokens_total{kind="prefill"}')
                running.kill(killed, signal.SIGKILL)
            last = time.monotonic()
        after = metric(running, backup, 'tokens_total{kind="prefill"}')
        received = metric(running, backup, "page_bytes_received_total")
    return {
        "policy": policy,
        "prompt_tokens": prompt,
        "first_token_s": round(first_s, 2),
        "silence_s": round(longest, 3),
        "recomputed_tokens": int(after - before),
        "received_bytes": int(received),
        "tokens": tokens,
    }


def load(running: LocalCluster, seconds: float, salt: int, clients: int, prompt: int) -> float:
    """Returns tokens per second of the clients' answers and new prompts."""
    stop_at, counts = time.monotonic() + seconds, [0] * clients

    def client(number: int) -> None:
        turn = 0
        while time.monotonic() < stop_at:
            turn += 1
            for event in chat(running, text_of(prompt, 100 * salt + number + 7 * turn), f"{salt}-{number}-{turn // 4}", 64):
                counts[number] += len(event.delta.token_ids) if event.WhichOneof("kind") == "delta" else 0
            counts[number] += prompt

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def processor_s(running: LocalCluster) -> Counter[str]:
    """Returns the processor time that the nodes' agents and their ranks have used."""
    agents = [psutil.Process(running.services[node].pid) for node in running.node_ids]
    ranks = [rank for agent in agents for rank in agent.children(recursive=True)]
    spent_s = {name: [each.cpu_times() for each in some] for name, some in (("agents", agents), ("ranks", ranks))}
    return Counter({name: sum(each.user + each.system for each in times) for name, times in spent_s.items()})


def overhead(model: Path, given: argparse.Namespace) -> dict[str, Any]:
    clients, prompt = given.clients, given.prompt
    rates: dict[str, list[float]] = {"none": [], "sessions": []}
    tokens = dict.fromkeys(rates, 0.0)
    spent_s: dict[str, Counter[str]] = {policy: Counter() for policy in rates}
    with ExitStack() as stack:
        flags = given.flags.split()
        clusters = {
            policy: stack.enter_context(cluster(model, policy, *flags, threads=1, kv_bytes=given.kv_bytes)) for policy in rates
        }
        for running in clusters.values():
            load(running, given.warm_up, 99, clients, prompt)
        for number in range(given.rounds):
            order = ("none", "sessions") if number % 4 in (0, 3) else ("sessions", "none")
            for policy in order:
                before_s, began_s = processor_s(clusters[policy]), time.monotonic()
                rates[policy].append(load(clusters[policy], given.seconds, number, clients, prompt))
                tokens[policy] += rates[policy][-1] * (time.monotonic() - began_s)
                spent_s[policy] += processor_s(clusters[policy]) - before_s
        sent = sum(metric(clusters["sessions"], node, "page_bytes_sent_total") for node in clusters["sessions"].node_ids)
    us_per_token = {policy: {who: 1e6 * each / tokens[policy] for who, each in spent_s[policy].items()} for policy in rates}
    one, two = (sum(us_per_token[policy].values()) for policy in ("none", "sessions"))
    ratios = sorted(one / two for one, two in zip(rates["sessions"], rates["none"], strict=True))
    return {
        "tokens_per_s": {policy: [round(rate, 1) for rate in each] for policy, each in rates.items()},
        "overhead": round(1 - sum(rates["sessions"]) / sum(rates["none"]), 4),
        "processor_us_per_token": {
            policy: {who: round(each, 1) for who, each in times.items()} for policy, times in us_per_token.items()
        },
        "processor_overhead": round(two / one - 1, 4),
        "of_rounds": [round(1 - ratio, 4) for ratio in reversed(ratios)],
        "sent_bytes": int(sent),
    }


def disk(model: Path, context: int, folder: Path) -> dict[str, Any]:
    """Returns the time to the first token of a second turn, after the node was killed and started again."""
    result: dict[str, Any] = {"context": context}
    tier = ("--kv-disk-bytes", str(8 * 2**30), "--kv-disk-dir", str(folder / "tier"))
    for name, flags in (("computed", ()), ("from_disk", tier)):
        with cluster(model, "none", *flags, nodes=1) as running:
            for _ in chat(running, text_of(context), "s", 16):
                pass
            time.sleep(2.0)
            running.restart("node-0")
            running.wait_nodes(1, 60)
            time.sleep(1.0)
            began = time.monotonic()
            for event in chat(running, "And now?", "s", 4):
                if event.WhichOneof("kind") == "delta":
                    result[f"{name}_s"] = round(time.monotonic() - began, 3)
                    break
            result[f"{name}_restored"] = int(metric(running, "node-0", 'pages_restored_total{source="disk"}'))
    result["ratio"] = round(result["computed_s"] / result["from_disk_s"], 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["silence", "overhead", "disk"])
    parser.add_argument("--model", default="")
    parser.add_argument("--flags", default="", help="more flags of the nodes, separated by spaces")
    parser.add_argument("--contexts", default="1000,8000,30000")
    parser.add_argument("--policies", default="none,sessions")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--kv-bytes", type=int, default=2**30)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ryzanstein-") as folder:
        model = model_of(given.model, Path(folder))
        contexts = [int(context) for context in given.contexts.split(",")]
        match given.what:
            case "silence":
                cases = ((policy, context) for context in contexts for policy in given.policies.split(","))
                for policy, context in cases:
                    results.append(silence(model, policy, context))
                    print(json.dumps(results[-1]), flush=True)
            case "overhead":
                results.append(overhead(model, given))
                print(json.dumps(results[-1]), flush=True)
            case "disk":
                for context in contexts:
                    results.append(disk(model, context, Path(folder)))
                    print(json.dumps(results[-1]), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
