"""Records what the rules see of a cluster, as `input_series` of `promtool test rules`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ryzanstein.cli.status.scrape import page

_TIMEOUT_S = 2.0
_NAME = re.compile(r"\b(?:up|ryzanstein_(?:router|worker|orchestrator)_\w+)\b")
_BOUND = re.compile(r'(ryzanstein_\w+_bucket)\{[^}]*le="([^"]+)"')
# Prometheus marks a series that a scrape does not find any more as ended.
_ENDED, _ABSENT = "stale", "_"


class UsedSeries:
    """Knows which series the rules use: those of their metrics, and of a histogram the buckets that they name."""

    def __init__(self, rules: Iterable[Path]) -> None:
        text = "\n".join(path.read_text() for path in rules)
        self._names = set(_NAME.findall(text))
        self._bounds: dict[str, set[str]] = {}
        for name, bound in _BOUND.findall(text):
            self._bounds.setdefault(name, set()).add(bound)

    def __contains__(self, sample: Sample) -> bool:
        bounds = self._bounds.get(sample.name)
        return sample.name in self._names and (bounds is None or sample.labels["le"] in bounds)


class Recording:
    """Scrapes services, and keeps the values of each series, one for each scrape.

    `targets` is a service's job and URL by its name, which is the label `instance`. Scrapes are `step_s` apart.
    """

    def __init__(self, targets: Mapping[str, tuple[str, str]], used: UsedSeries, step_s: float) -> None:
        self._targets, self._used, self._step_s = targets, used, step_s
        self._series: dict[str, list[str]] = {}
        self._scrapes = 0

    def scrape(self) -> None:
        """Takes one value of every series. A service that does not answer is down."""
        for instance, (job, url) in self._targets.items():
            labels = {"instance": instance, "job": job}
            samples = _scraped(url)
            self._take("up", labels, float(samples is not None))
            for sample in filter(self._used.__contains__, samples or ()):
                self._take(sample.name, sample.labels | labels, sample.value)
        self._scrapes += 1
        for values in self._series.values():
            if len(values) < self._scrapes:
                values.append(_ENDED if values[-1] not in (_ENDED, _ABSENT) else _ABSENT)

    def write(self, path: Path, about: str) -> None:
        """Writes the series, and above them what was recorded."""
        lines = [f"# {about}", f"interval: {self._step_s:g}s", "input_series:"]
        for series, values in sorted(self._series.items()):
            lines += [f"  - series: '{series}'", f"    values: '{' '.join(_shortened(values))}'"]
        path.write_text("\n".join(lines) + "\n")

    def _take(self, name: str, labels: Mapping[str, str], value: float) -> None:
        matchers = ", ".join(f'{label}="{labels[label]}"' for label in sorted(labels))
        series = f"{name}{{{matchers}}}"
        values = self._series.setdefault(series, [_ABSENT] * self._scrapes)
        values.append(f"{value:.4g}" if value % 1 else f"{value:.0f}")


def _scraped(url: str) -> list[Sample] | None:
    """Returns the samples of a service, or None if it does not answer."""
    try:
        text = page(url, _TIMEOUT_S)
    except OSError:
        return None
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _shortened(values: Iterable[str]) -> Iterator[str]:
    """Yields the values in promtool's notation, in which `1+0x3` is 1 four times and `_x3` is absent three times."""
    for value, run in groupby(values):
        times = len(list(run))
        if times == 1 or value == _ENDED:
            yield from [value] * times
        else:
            yield f"_x{times}" if value == _ABSENT else f"{value}+0x{times - 1}"
