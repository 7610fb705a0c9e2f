"""Kills the node that generates an answer, midway, and reports what the reader noticed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.client import Answer, Text


@dataclass(frozen=True, slots=True)
class Failover:
    """How an answer moved from one node to another.

    Times are in seconds, None if it did not happen.

    `lost` and `repeated` are counted from the indices that arrived. `identical` compares tokens and
    text with the answer to the same conversation without a fault.
    """

    killed_node: str
    killed_after_tokens: int
    continued_on: str
    tokens: int
    lost: int
    repeated: int
    identical: bool
    detected_to_rerouted_s: float | None
    killed_to_next_token_s: float | None


class MidAnswerKill:
    """Kills once, with SIGKILL, after at least `after_tokens` tokens.

    Pass every piece of one answer to `watch`.
    """

    def __init__(self, cluster: LocalCluster, after_tokens: int) -> None:
        self._cluster = cluster
        self._after_tokens = after_tokens
        self._killed_at = 0.0
        self._next_index = self._num_lost = self._num_repeated = 0
        self._next_token_at: float | None = None
        self.victim = ""
        self.victim_pid = 0
        self.tokens_at_death = 0

    def watch(self, event: Text) -> bool:
        """Returns True if this event was the victim's last: the node was just killed. Counts indices by itself."""
        self._num_lost += max(0, event.first_index - self._next_index)
        self._num_repeated += max(0, self._next_index - event.first_index)
        self._next_index = event.first_index + len(event.token_ids)
        if self.victim:
            if self._next_token_at is None and event.node != self.victim:
                self._next_token_at = time.monotonic()
            return False
        if self._next_index < self._after_tokens:
            return False
        self._kill(event.node, self._next_index)
        return True

    def report(self, answer: Answer, undisturbed: Answer, detected_to_rerouted_s: float | None) -> Failover:
        """Returns the result for the watched answer, once it is complete."""
        return Failover(
            killed_node=self.victim,
            killed_after_tokens=self.tokens_at_death,
            continued_on=answer.nodes[-1],
            tokens=len(answer.token_ids),
            lost=self._num_lost + max(0, len(undisturbed.token_ids) - len(answer.token_ids)),
            repeated=self._num_repeated,
            identical=(answer.token_ids, answer.text) == (undisturbed.token_ids, undisturbed.text),
            detected_to_rerouted_s=detected_to_rerouted_s,
            killed_to_next_token_s=None if self._next_token_at is None else self._next_token_at - self._killed_at,
        )

    def _kill(self, node_id: str, num_tokens: int) -> None:
        self.victim, self.tokens_at_death = node_id, num_tokens
        self.victim_pid = self._cluster.services[node_id].pid
        self._killed_at = time.monotonic()
        self._cluster.kill(node_id)
