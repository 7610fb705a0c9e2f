"""All samples of all services at a moment, and which changed since.

A silent service is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.status.scrape import page

_TIMEOUT_S = 1.0
_IGNORED_SUFFIXES = ("_created", "_bucket", "_sum")
BREAKER_STATE = "ryzanstein_router_breaker_state"
_OURS, _COUNTED = "ryzanstein_", ("_total", "_count")

Samples = Mapping[str, float]
"""Value by sample name and labels, as in `ryzanstein_router_failovers_total{cause="silence"}`."""


async def scrape(urls: Mapping[str, str]) -> dict[str, Samples]:
    """Returns the samples by service."""
    answers = await asyncio.gather(*(asyncio.to_thread(_scrape, url) for url in urls.values()))
    return {name: samples for name, samples in zip(urls, answers, strict=True) if samples}


def moved(before: Mapping[str, Samples], after: Mapping[str, Samples]) -> dict[str, float]:
    """Returns how much each counter grew, summed over the services.

    Node ids are left out, because they differ from run to run.
    """
    growth: dict[str, float] = {}
    for service, samples in after.items():
        for name, value in samples.items():
            delta = value - before.get(service, {}).get(name, 0.0)
            if delta > 0 and name.startswith(_OURS) and name.partition("{")[0].endswith(_COUNTED):
                key = _without_node(name)
                growth[key] = growth.get(key, 0.0) + delta
    return growth


def _scrape(url: str) -> Samples:
    try:
        text = page(url, _TIMEOUT_S)
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {
        _name(sample.name, sample.labels): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(_IGNORED_SUFFIXES)
    }


def _name(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def _without_node(name: str) -> str:
    head, brace, labels = name.partition("{")
    kept = [label for label in labels.rstrip("}").split(",") if label and not label.startswith(("node_id=", "model="))]
    return f"{head}{brace}{','.join(kept)}}}" if kept else head
