"""The router's metrics. Every retry, failover, hedge, refusal and eviction is counted here."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.background import Background
from ryzanstein.loop_lag import LoopLag
from ryzanstein.metrics import (
    DURATION_BUCKETS,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    new_registry,
)

# Counters that alerts use exist from the start: `increase()` does not see the 1 of a series whose
# first value is 1.
LINK_LOSS_CAUSES = ("link_lost", "silence", "deaf", "protocol")
SUSPICION_CAUSES = ("silence", "deaf", "stall")
FAILOVER_CAUSES = (*LINK_LOSS_CAUSES, "stall", "node_state", "node_fault", "back_pressure", "no_progress", "refused")

HTTP_REFUSALS = ("too_large", "malformed", "timeout", "connections", "memory")

REROUTE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0)


class _Maker:
    """Creates metrics whose names begin with the router's prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ryzanstein_router_{name}_total", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ryzanstein_router_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"ryzanstein_router_{name}_seconds", text, labels, registry=self._registry, buckets=buckets)


class UnreadMetrics:
    """Counters of what happens to generations without readers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"ryzanstein_router_generations_{name}_total", text, registry=registry)

        self.paused = counter("paused", "Generations that were paused because nobody read them")
        self.unpaused = counter("unpaused", "Paused generations that a reader came back to")
        self.interrupted = counter("interrupted", "Generations that nobody read, ended for a new turn of their session")
        self.abandoned = counter("abandoned", "Generations cancelled because no reader came back")


class RouterTelemetry:
    """The router's metrics and background tasks, built once and passed on.

    The ends of background tasks are counted. Labels are bounded: names of models and nodes, codes,
    causes.
    """

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.background = Background("router", registry)

        make = _Maker(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram

        self.requests = counter("requests", "Calls that ended, by code", "face", "method", "code")
        self.generations = counter("generations", "Generations that ended, by outcome", "model", "outcome")
        self.running = gauge("generations_running", "Generations that run")
        self.waiting = gauge("generations_waiting", "Generations that no node has accepted yet")
        self.retained = gauge("generations_retained", "Ended generations that can still be read")
        self.evicted = counter("generations_evicted", "Ended generations forgotten early for want of room")
        self.unread = UnreadMetrics(registry)
        self.reattached = counter("generations_reattached", "Readers that joined a begun generation")
        self.resumed = counter("generations_resumed", "Ended generations that ran again because their client came back")
        self.tokens = counter("tokens", "Generated tokens", "model", "node_id")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens", "model")
        self.refused = counter("refused", "Requests refused by admission", "reason")
        self.http_refused = _known(counter("http_refused", "HTTP requests refused for their form", "reason"), HTTP_REFUSALS)
        self.keyed_requests = counter("keyed_requests", "Requests with an idempotency key, by what became of them", "outcome")
        self.first_token = histogram("time_to_first_token", "Submit to first token", TIME_TO_FIRST_TOKEN_BUCKETS, "model")
        self.per_token = histogram(
            "time_per_output_token", "Mean time of a token after the first", TIME_PER_OUTPUT_TOKEN_BUCKETS, "model"
        )
        self.duration = histogram("generation_duration", "Submit to end", DURATION_BUCKETS, "model")
        self.failovers = _known(counter("failovers", "Generations that moved to another node", "cause"), FAILOVER_CAUSES)
        self.rerouted = histogram("detected_to_rerouted", "Fault detected to attempt sent to the next node", REROUTE_BUCKETS)
        self.failed_over_in_vain = counter("failovers_exhausted", "Generations lost because no node took them", "cause")
        self.hedges = counter("hedges", "Backups started on suspicion, by how it ended", "outcome")
        self.hedges_running = gauge("hedges_running", "Generations that have a backup beside their first attempt")
        self.dropped_rows = counter("dropped_rows", "Rows of nodes that the log refused", "kind")
        self.link_up = gauge("link_up", "1: the link to the node is up", "node_id")
        self.link_losses = counter("link_losses", "Links that ended", "node_id", "cause")
        self.beats = counter("beats", "Beats heard", "node_id")
        self.suspicions = counter("suspicions", "Times a node became suspected", "node_id", "cause")
        self.clock_skew = gauge("clock_skew_seconds", "The node's wall clock less this router's, the way included", "node_id")
        self.suspected = gauge("node_suspected", "1: the node is silent, does not hear, or its work does not move", "node_id")
        self.accept = histogram(
            "time_to_accept", "Attempt sent to the node's word that it took it", TIME_TO_FIRST_TOKEN_BUCKETS, "node_id"
        )
        self.breaker = gauge("breaker_state", "0 closed, 1 half-open, 2 open", "node_id")
        self.session_turns = counter("session_turns", "Turns of sessions, by how they ended", "outcome")
        self.sessions_evicted = counter("sessions_evicted", "Sessions forgotten for want of room")
        self.store_outage = gauge("store_outage", "1: the session store fails, turns are queued in memory")
        self.store_outages = counter("store_outages", "Times that the session store began to fail")
        self.store_backlog = gauge("store_backlog", "Writes of sessions that wait for the store")
        self.store_from_memory = counter("store_from_memory", "Sessions read from memory while the store failed")
        self.store_lost_writes = counter("store_lost_writes", "Writes of sessions that the store never took", "cause")
        self.choices = counter("choices", "Nodes chosen for attempts, by why that one", "model", "policy", "outcome")
        self.policy = gauge("policy", "1: requests for the model follow this policy now", "model", "policy")
        self.policy_switches = counter("policy_switches", "Automatic changes of policy", "model", "policy")
        self.imbalance = gauge("load_imbalance_ratio", "Fullest node over its fair share of recent requests, minus 1", "model")
        self.imbalance_chance = gauge("load_imbalance_chance_ratio", "What of it chance alone explains", "model")
        self.imbalance_alarm = gauge("load_imbalance_alarm", "1: the imbalance beyond chance has reached the alarm", "model")
        self.loop_lag = LoopLag("router", registry)
        self.view_resyncs = counter("view_resyncs", "Snapshots taken after the first, by why", "cause")

    def know_node(self, node_id: str) -> None:
        """Creates the series of a linked node, so that its counters exist before the first loss."""
        self.suspected.labels(node_id).set(0)
        self.clock_skew.labels(node_id).set(0)
        for cause in LINK_LOSS_CAUSES:
            self.link_losses.labels(node_id, cause)
        for cause in SUSPICION_CAUSES:
            self.suspicions.labels(node_id, cause)

    def forget_node(self, node_id: str) -> None:
        """Drops the gauges of a node that is gone; its counters remain."""
        for metric in (self.link_up, self.breaker, self.suspected, self.clock_skew):
            metric.remove(node_id)


def _known(counted: Counter, labels: Iterable[str]) -> Counter:
    """Creates a series for each label, so that `increase()` sees the first increment."""
    for label in labels:
        counted.labels(label)
    return counted
