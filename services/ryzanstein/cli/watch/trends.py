"""How loaded each node, each model and the cluster were lately, and how many tokens a second they made.

A rate is the difference between the counters of two samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ryzanstein.cli.watch.table import CHART
from ryzanstein.survey.views import ClusterStatus, Distribution, NodeStatus, RouterView

CLUSTER = ("cluster", "")
FORGOTTEN_S = 900.0

Subject = tuple[str, str]
"""What a trend is of: its kind, `node`, `model` or `cluster`, and its name."""


def generated_tokens(told: NodeStatus | RouterView) -> int | None:
    """Returns how many tokens a router, or the ranks of a node, have generated since their start. None: it does not say.

    One of an earlier release tells none, and has no rate.
    """
    if isinstance(told, RouterView):
        return None if told.figures is None else told.figures.generated_tokens
    return None if told.figures is None else told.figures.decode_tokens


@dataclass(frozen=True, slots=True)
class LoadReading:
    """What one sample says of a subject: sequences that run and fit, and tokens counted until then."""

    running: int = 0
    capacity: int = 0
    tokens: int | None = None

    def and_also(self, other: LoadReading) -> LoadReading:
        """Returns the sum; tokens of those that count them."""
        counted = [each for each in (self.tokens, other.tokens) if each is not None]
        return LoadReading(self.running + other.running, self.capacity + other.capacity, sum(counted) if counted else None)


@dataclass(slots=True)
class Trend:
    """The last values of a subject: the share of its capacity that ran, from 0 to 1, and tokens a second."""

    shares: deque[float | None] = field(default_factory=lambda: deque(maxlen=CHART))
    rates: deque[float | None] = field(default_factory=lambda: deque(maxlen=CHART))
    seen: float = 0.0
    _counted: tuple[float, int] | None = None

    def add(self, reading: LoadReading | None, now: float) -> None:
        """Adds a sample; None: it did not answer."""
        self.shares.append(reading.running / reading.capacity if reading is not None and reading.capacity else None)
        self.rates.append(self._rate(None if reading is None else reading.tokens, now))
        if reading is not None:
            self.seen = now

    @property
    def tokens_per_s(self) -> float | None:
        return self.rates[-1] if self.rates else None

    @property
    def busiest(self) -> tuple[float | None, ...]:
        """The rates as shares of the highest one, for a chart."""
        most = max((each for each in self.rates if each is not None), default=0.0)
        return tuple(None if each is None else each / most if most else 0.0 for each in self.rates)

    def _rate(self, tokens: int | None, now: float) -> float | None:
        before, self._counted = self._counted, None if tokens is None else (now, tokens)
        if tokens is None or before is None or now <= before[0] or tokens < before[1]:
            return None  # the first sample, or the service was restarted and counts from 0
        return (tokens - before[1]) / (now - before[0])


class Trends:
    """The trends of all that was seen lately."""

    def __init__(self) -> None:
        self._of: dict[Subject, Trend] = {}
        self._first_tokens: deque[Distribution] = deque(maxlen=CHART)

    def of(self, subject: Subject) -> Trend:
        """Returns a trend; one without values if the subject was not seen."""
        return self._of.get(subject) or Trend()

    def first_token_s(self, share: float) -> float | None:
        """Returns below which time this share of the first tokens of the last samples came, at the router that is asked."""
        return self._first_tokens[-1].since(self._first_tokens[0]).quantile(share) if len(self._first_tokens) > 1 else None

    def take(self, view: ClusterStatus, now: float) -> None:
        """Adds a sample of a cluster."""
        if view.router.figures is not None:
            self._first_tokens.append(view.router.figures.time_to_first_token)
        found: dict[Subject, LoadReading] = {}
        for subject, reading in _readings(view):
            found[subject] = found[subject].and_also(reading) if subject in found else reading
        for subject in found.keys() - self._of.keys():
            self._of[subject] = Trend(seen=now)
        for subject, trend in self._of.items():
            trend.add(found.get(subject), now)
        self._of = {subject: trend for subject, trend in self._of.items() if now - trend.seen < FORGOTTEN_S}


def _readings(view: ClusterStatus) -> Iterator[tuple[Subject, LoadReading]]:
    answering = [each for each in view.nodes if not each.error]
    for each in answering:
        load = each.node.load
        reading = LoadReading(load.running, load.capacity, generated_tokens(each))
        for subject in _subjects(each):
            yield subject, reading
    if (
        not any(generated_tokens(each) is not None for each in answering)
        and (told := generated_tokens(view.router)) is not None
    ):
        yield CLUSTER, LoadReading(tokens=told)  # of one router alone, which is better than nothing


def _subjects(each: NodeStatus) -> Iterable[Subject]:
    return ("node", each.node.node_id), ("model", each.node.model), CLUSTER
