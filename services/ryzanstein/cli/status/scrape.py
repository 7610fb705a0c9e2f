"""Reads a service's /metrics once, as Prometheus would."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def page(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Returns a page of a service, never through a proxy. Raises OSError if there is no answer."""
    with _DIRECT.open(url, timeout=timeout_s) as response:
        text: str = response.read().decode()
    return text


def total(url: str, sample_name: str) -> float:
    """Returns the sum of a sample over all labels, 0 if never observed.

    Raises OSError if there is no answer.
    """
    samples = (sample for family in text_string_to_metric_families(page(url)) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == sample_name)
