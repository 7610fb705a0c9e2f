"""Reads a service's /metrics once, as Prometheus would."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0


def total(url: str, sample_name: str) -> float:
    """Returns the sum of a sample over all labels, 0 if never observed.

    Raises OSError if there is no answer.
    """
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == sample_name)
