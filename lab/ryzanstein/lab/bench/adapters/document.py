"""What was found about many adapters, as JSON, as lines for people, and as what must not be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ryzanstein.lab.bench.adapters.asking import AdapterAnswer
from ryzanstein.lab.bench.adapters.survey import AdaptersFound, AdaptersPlan
from ryzanstein.lab.load.report import quantiles
from ryzanstein.lab.machine import machine

TARGET = 2.0
"""Of the 99th percentile of the first token with adapters, over that of the model alone at the same rate."""


def document(plan: AdaptersPlan, found: AdaptersFound, base: str) -> dict[str, Any]:
    """Returns it in SI units. `ratio` is that of the 99th percentiles of first tokens, see TARGET."""
    seen, mixed = found.samples, [each for each in found.mixed.answers if not each.failure]
    asked = (found.base, found.alone, found.mixed, found.after)
    alone = quantiles([each.first_s for each in found.base.answers if not each.failure])
    adapted = quantiles([each.first_s for each in mixed if each.question.model != base])
    among = quantiles([each.first_s for each in mixed if each.question.model == base])
    return {
        "machine": machine(),
        "plan": asdict(plan),
        "ratio": adapted["p99"] / alone["p99"] if adapted and alone else None,
        "first_token_s": {"model alone": alone, "adapters": adapted, "model among adapters": among},
        "answers": {
            "total": sum(len(each.answers) for each in asked),
            "compared": sum(each.num_compared for each in asked),
            "wrong": [_name(answer) for each in asked for answer in each.wrong],
            "failures": [failure for each in asked for failure in each.failures],
            "alone": len(found.alone.answers),
            "different": len({each.token_ids for each in found.alone.answers}),
            "adapters": len({each.question.model for each in found.mixed.answers}),
        },
        "memory": {
            "budget": found.budget,
            "adapter_bytes": seen.adapter_bytes,
            "held_bytes": seen.held_bytes,
            "resident": seen.resident,
            "files": seen.files,
        },
        "nodes": seen.last,
        "hit_rate": _hit_rate(seen.last.values()),
        "frames": {when: sizes.document() for when, sizes in found.frames.items()},
        "times_s": found.times_s,
        "sizes": found.sizes,
    }


def faults(content: dict[str, Any]) -> Iterator[str]:
    """Yields what must not be, whatever the machine does meanwhile."""
    answers, memory = content["answers"], content["memory"]
    yield from (f"an answer failed: {each}" for each in answers["failures"][:5])
    yield from (f"an answer is wrong: {each}" for each in answers["wrong"][:5])
    if not answers["compared"]:
        yield "no answer was compared"
    if answers["different"] < answers["alone"] // 2:
        yield f"{answers['alone']} questions have only {answers['different']} answers: wrong ones would not be seen"
    if max(memory["adapter_bytes"], memory["held_bytes"]) > memory["budget"]:
        yield f"adapters took {memory['held_bytes']} bytes, {memory['adapter_bytes']} counted; the budget is {memory['budget']}"
    sizes = {when: frames["beat_bytes"] for when, frames in content["frames"].items()}
    if not sizes["before"] or max(map(max, sizes.values())) > max(sizes["before"]):
        yield f"beats grew: {sizes}"


def lines(content: dict[str, Any]) -> Iterator[str]:
    """Yields it for people."""
    for name, times in content["first_token_s"].items():
        if times:
            yield f"first token, {name}: " + ", ".join(f"{each} {value * 1e3:.0f} ms" for each, value in times.items())
    if content["ratio"]:
        yield f"p99 of adapters over that of the model alone: {content['ratio']:.2f} (target {TARGET:g})"
    answers, memory = content["answers"], content["memory"]
    yield (
        f"{answers['total']} answers of {answers['adapters']} models, {answers['compared']} compared, "
        f"{len(answers['wrong'])} wrong, {len(answers['failures'])} failed"
    )
    yield (
        f"memory: at most {memory['adapter_bytes'] / 2**20:.1f} MiB of {memory['budget'] / 2**20:.1f} in use, "
        f"{memory['held_bytes'] / 2**20:.1f} held; {memory['resident']} resident, {memory['files']} files"
    )
    hit_rate = content["hit_rate"]
    for node, figures in content["nodes"].items():
        yield (
            f"{node}: {figures.get('adapter_requests_total/hit', 0):.0f} hits, "
            f"{figures.get('adapter_requests_total/miss', 0):.0f} misses, "
            f"{figures.get('adapter_load_seconds_count', 0):.0f} loads, {_mean_load_ms(figures):.0f} ms each, "
            f"{figures.get('adapter_evictions_total', 0):.0f} evictions"
        )
    yield "no request had an adapter" if hit_rate is None else f"hit rate {hit_rate:.1%}"
    for when, frames in content["frames"].items():
        yield f"{when}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in frames.items())
    for what, took in content["times_s"].items():
        yield f"{what}: {took * 1e3:.0f} ms"
    for what in content["sizes"].get("before", {}):
        yield f"{what}: " + ", ".join(f"{sizes[what]:.0f} {when}" for when, sizes in content["sizes"].items())


def _name(answer: AdapterAnswer) -> str:
    return f"{answer.question.model}: {answer.question.prompt}"


def _hit_rate(nodes: Any) -> float | None:
    hits, misses = (sum(each.get(f"adapter_requests_total/{name}", 0.0) for each in nodes) for name in ("hit", "miss"))
    return hits / (hits + misses) if hits + misses else None


def _mean_load_ms(figures: dict[str, float]) -> float:
    return 1e3 * figures.get("adapter_load_seconds_sum", 0.0) / max(1.0, figures.get("adapter_load_seconds_count", 0.0))


def names(num: int) -> Sequence[str]:
    """Returns the names of so many adapters."""
    return [f"adapter-{number:04}" for number in range(num)]
