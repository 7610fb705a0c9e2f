"""What became of one request, and of the tokens of each second."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ryzanstein.lab.clients.judge import Verdict
from ryzanstein.lab.clients.reading import AnswerReading


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are of `time.monotonic`.

    `came` is when the request should have been sent, and every latency counts from there: a load that waits for a slow
    answer before it sends the next request would hide the slowness (Tene, "How NOT to Measure Latency", 2015). `sent` is
    when it was. `first` is 0 where no token came. `nodes` gave tokens, in order; over HTTP and WebSocket it is the last
    known one. `same_node`: it began where the turn before it ended; None: there is none, or it is not known.
    """

    kind: str
    turn: int
    came: float
    sent: float
    first: float
    ended: float
    num_prompt: int
    num_tokens: int
    longest_pause_s: float
    nodes: tuple[str, ...]
    num_calls: int
    failure: str
    refused: bool
    verdict: Verdict
    same_node: bool | None

    @property
    def complete(self) -> bool:
        return not self.failure

    @property
    def ttft_s(self) -> float:
        return self.first - self.came

    @property
    def e2e_s(self) -> float:
        return self.ended - self.came

    @property
    def tpot_s(self) -> float | None:
        """Returns the mean time of each token after the first; None: there is no other."""
        return (self.ended - self.first) / (self.num_tokens - 1) if self.first and self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Times:
    """See `Outcome`."""

    came: float
    sent: float
    ended: float


def outcome_of(reading: AnswerReading, verdict: Verdict, times: Times, node_before: str | None) -> Outcome:
    """Returns the outcome of what was read; `node_before` ended the turn before it."""
    arrivals = reading.arrivals
    given = [arrival.node_id for arrival in arrivals if arrival.node_id] or [reading.node_id][: bool(reading.node_id)]
    return Outcome(
        kind=reading.kind,
        turn=reading.turn,
        came=times.came,
        sent=times.sent,
        first=arrivals[0].at if arrivals else 0.0,
        ended=times.ended,
        num_prompt=reading.prompt_tokens,
        num_tokens=reading.num_tokens,
        longest_pause_s=max((after.at - before.at for before, after in pairwise(arrivals)), default=0.0),
        nodes=tuple(dict.fromkeys(given)),
        num_calls=reading.calls,
        failure=reading.failure,
        refused=reading.refused,
        verdict=verdict,
        same_node=given[0] == node_before if given and node_before else None,
    )
