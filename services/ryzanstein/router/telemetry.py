"""The router's metrics. Every retry, failover, hedge, refusal and eviction is counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.generation.tokens import Started
from ryzanstein.observe.labelled import LabelledCounter, LabelledGauge, LabelledHistogram
from ryzanstein.observe.metrics import (
    DURATION_BUCKETS,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    FormerName,
    new_registry,
    show_service,
)
from ryzanstein.process.background import Background
from ryzanstein.process.loop_lag import LoopLag
from ryzanstein.rpc.tls.handshake_counts import HandshakeCounts

# Counters that alerts use exist from the start: `increase()` does not see the 1 of a series whose
# first value is 1.
LINK_LOSS_CAUSES = ("link_lost", "silence", "deaf", "protocol", "not_trusted")
SUSPICION_CAUSES = ("silence", "deaf", "stall")
FAILOVER_CAUSES = (
    *LINK_LOSS_CAUSES,
    "stall",
    "node_state",
    "node_fault",
    "back_pressure",
    "no_progress",
    "slow",
    "refused",
    "other_prompt",
)

EVICTION_CAUSES = ("number", "bytes")
REFUSALS = (
    "embeddings_full",
    "foreign_tenant",
    "no_nodes",
    "prompt_bytes",
    "queue_full",
    "session_busy",
    "tenant_share",
    "too_big",
)
HTTP_REFUSALS = ("too_large", "malformed", "timeout", "connections", "memory", "origin")

REROUTE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0)


class _Maker:
    """Creates metrics whose names begin with the router's prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return LabelledCounter(f"ryzanstein_router_{name}_total", text, labels, registry=self._registry)

    def former_name(self, metric: Counter, name: str) -> None:
        """Also serves the counter under the name that it had in the release before."""
        self._registry.register(FormerName(metric, f"ryzanstein_router_{name}"))

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return LabelledGauge(f"ryzanstein_router_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return LabelledHistogram(f"ryzanstein_router_{name}_seconds", text, labels, registry=self._registry, buckets=buckets)


class PromptMetrics:
    """Counters of the prompts that nodes accepted, and of what was left out of those that did not fit."""

    def __init__(self, make: _Maker) -> None:
        self.held_bytes = make.gauge("held_prompt_bytes", "Memory of the prompts of generations that run or may go on")
        self.tokens = make.counter("prompt_tokens", "Prompt tokens", "model")
        self._cut = make.counter("cut_prompts", "Prompts that did not fit and of which a part was left out", "model")
        self._omitted = make.counter("omitted_prompt_tokens", "Prompt tokens that were left out", "model")
        self._other = make.counter("other_prompts", "Attempts dropped because they kept another part of the prompt", "model")

    def started(self, model: str, started: Started) -> None:
        """Counts an accepted prompt."""
        self.read(model, started.prompt_tokens)
        if started.omitted_prompt_tokens:
            self._cut.labels(model).inc()
            self._omitted.labels(model).inc(started.omitted_prompt_tokens)

    def read_otherwise(self, model: str) -> None:
        """Counts an attempt that was dropped because its node kept another part of a prompt than the first one."""
        self._other.labels(model).inc()

    def read(self, model: str, num_tokens: int) -> None:
        """Counts tokens of inputs."""
        self.tokens.labels(model).inc(num_tokens)


class TimeMetrics:
    """How long generations take, in all and by stage, and the longest waits among those that run.

    A histogram shows a wait when it is over, the gauges while it lasts.
    """

    def __init__(self, make: _Maker) -> None:
        first, token = TIME_TO_FIRST_TOKEN_BUCKETS, TIME_PER_OUTPUT_TOKEN_BUCKETS
        self.first_token = make.histogram("time_to_first_token", "Time from submit to first token", first, "model")
        self.per_token = make.histogram("time_per_output_token", "Mean time per output token after the first", token, "model")
        self.longest_pause = make.histogram("longest_pause", "Longest time between two tokens of a generation", first, "model")
        self.duration = make.histogram("generation_duration", "Time from submit to end", DURATION_BUCKETS, "model")
        self.stage = make.histogram("stage", "Time of each stage until the first token; the stages add up", first, "stage")
        self.oldest = make.gauge("oldest_running_seconds", "Time since the oldest running generation was submitted")
        self.unanswered = make.gauge("oldest_unanswered_seconds", "Longest wait of a running generation without a token")
        self.silent = make.gauge("silent_seconds", "Longest time since the last token of a running generation that has tokens")


MOST_TENANTS, OTHER_TENANTS = 100, "other"


class TenantMetrics:
    """The requests of tenants. The first hundred tenants have series of their own, for as long as the router runs."""

    def __init__(self, make: _Maker) -> None:
        self._requests = make.counter(
            "tenant_requests", "Generations by outcome; the first hundred tenants, then other", "tenant", "outcome"
        )
        self._known: set[str] = set()

    def ended(self, tenant: str, outcome: str) -> None:
        """Counts a generation that ended, or that was refused."""
        if len(self._known) < MOST_TENANTS:
            self._known.add(tenant)
        self._requests.labels(tenant if tenant in self._known else OTHER_TENANTS, outcome).inc()


class CompatibilityMetrics:
    """How alike the nodes of a model are, and what moved between nodes that are not."""

    def __init__(self, make: _Maker) -> None:
        self._kinds = make.gauge(
            "model_kinds", "Kinds of ready nodes of one engine and purpose that compute other tokens; 1: all alike", "model"
        )
        self._contexts = make.gauge("model_contexts", "Different lengths of the ready nodes' contexts", "model")
        self.moved = make.counter("incompatible_failovers", "Answers continued by a node that computes other tokens", "model")
        make.former_name(self.moved, "unlike_failovers")

    def show(self, model: str, kinds: int, contexts: int) -> None:
        self._kinds.labels(model).set(kinds)
        self._contexts.labels(model).set(contexts)

    def forget(self, model: str) -> None:
        """Shows nothing of a model that no node serves."""
        self._kinds.remove(model)
        self._contexts.remove(model)


class UnreadMetrics:
    """Counters of what happens to generations without readers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"ryzanstein_router_generations_{name}_total", text, registry=registry)

        self.paused = counter("paused", "Generations paused because they had no reader")
        self.unpaused = counter("unpaused", "Paused generations resumed by a reader")
        self.interrupted = counter("interrupted", "Generations without a reader, ended for a new turn of their session")
        self.abandoned = counter("abandoned", "Generations cancelled because no reader came back")


class EmbeddingMetrics:
    """The metrics of requests for vectors."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Maker(registry)
        self.inputs = make.counter("embedded_inputs", "Inputs whose vectors were returned", "model")
        self.retries = _known(
            make.counter("embedding_retries", "Parts of requests for vectors that went to another node, by cause", "cause"),
            ("unavailable", "resource_exhausted", "unimplemented", "not_found"),
        )


class StoreRoomMetrics:
    """What the session store holds, and what it evicts to hold no more."""

    def __init__(self, make: _Maker) -> None:
        self.used = make.gauge("store_bytes", "Bytes that sessions and kept responses use")
        evicted = make.counter("sessions_evicted", "Sessions and kept responses evicted, by the bound on them", "cause")
        self._evicted = _known(evicted, EVICTION_CAUSES)

    def evicted(self, cause: str) -> Callable[[int], None]:
        return self._evicted.labels(cause).inc


class HandshakeMetrics(HandshakeCounts):
    """The TLS handshakes of the HTTP port. It exists where that port has TLS."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Maker(registry)
        self._listeners: list[Callable[[], int]] = []
        num_open = make.gauge("public_tls_handshakes_open", "Connections to the HTTP port whose handshake is not complete")
        num_open.set_function(lambda: sum(each() for each in self._listeners))
        super().__init__(
            make.counter("public_tls_handshakes", "TLS handshakes at the HTTP port that ended, by outcome", "outcome"),
            make.counter("public_tls_handshake_failures", "Failed TLS handshakes of HTTP, by reason", "reason"),
        )

    def watch(self, num_open: Callable[[], int]) -> None:
        self._listeners.append(num_open)


class RouterTelemetry:
    """The router's metrics and background tasks, built once and passed on.

    The ends of background tasks are counted. Labels are bounded: names of models and nodes, codes,
    causes.
    """

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.background, self.loop_lag = Background("router", registry), LoopLag("router", registry)

        make = _Maker(registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram

        show_service("router", registry)
        self.requests = counter("requests", "Calls that ended, by code", "face", "method", "code")
        self.request_seconds = histogram(
            "request", "Duration of calls; a stream's until it ends", DURATION_BUCKETS, "face", "method"
        )
        self.generations = counter("generations", "Generations that ended, by outcome", "model", "outcome")
        self.running = gauge("generations_running", "Running generations")
        self.waiting = gauge("generations_waiting", "Generations that no node has accepted yet")
        self.retained = gauge("generations_retained", "Ended generations that can still be read")
        self.evicted = counter("generations_evicted", "Ended generations evicted early to stay within max_retained_tokens")
        self.unread, self.embeddings = UnreadMetrics(registry), EmbeddingMetrics(registry)
        self.reattached = counter("generations_reattached", "Readers that attached to a started generation")
        self.resumed = counter("generations_resumed", "Failed generations resumed by a reader")
        self.tokens = counter("tokens", "Generated tokens", "model", "node_id")
        self.prompts, self.compatibility = PromptMetrics(make), CompatibilityMetrics(make)
        self.refused = _known(counter("refused", "Requests refused by admission", "reason"), REFUSALS)
        self.http_refused = _known(counter("http_refused", "HTTP refusals before admission", "reason"), HTTP_REFUSALS)
        self.keyed_requests = counter("keyed_requests", "Requests with an idempotency key, by outcome", "outcome")
        self.times, self.tenants = TimeMetrics(make), TenantMetrics(make)
        self.failovers = _known(counter("failovers", "Failovers to another node, by cause", "cause"), FAILOVER_CAUSES)
        self.rerouted = histogram("detected_to_rerouted", "Time from fault detection to the next attempt", REROUTE_BUCKETS)
        self.failed_over_in_vain = counter("failovers_exhausted", "Generations that ran out of nodes or attempts", "cause")
        self.hedges = counter("hedges", "Hedges, by outcome", "outcome")
        self.hedges_running = gauge("hedges_running", "Running hedges")
        self.dropped_rows = counter("dropped_rows", "Token rows that the token log dropped as duplicate or fenced", "kind")
        self.link_up = gauge("link_up", "1: the link to the node is up", "node_id")
        self.link_losses = counter("link_losses", "Links lost, by cause", "node_id", "cause")
        self.beats = counter("beats", "Beats received", "node_id")
        self.suspicions = counter("suspicions", "Times a node became suspected", "node_id", "cause")
        self.clock_skew = gauge(
            "clock_skew_seconds", "The node's wall clock minus this router's, including the network delay", "node_id"
        )
        self.suspected = gauge("node_suspected", "1: the node is suspected: silent, deaf or stalled", "node_id")
        self.accept = histogram(
            "time_to_accept", "Time from sending an attempt until the node accepts it", TIME_TO_FIRST_TOKEN_BUCKETS, "node_id"
        )
        self.breaker = gauge("breaker_state", "0 closed, 1 half-open, 2 open", "node_id")
        self.session_turns = counter("session_turns", "Session turns, by outcome", "outcome")
        self.store_room = StoreRoomMetrics(make)
        self.store_info = gauge("store_info", "1: sessions are in this store", "store")
        self.store_outage = gauge("store_outage", "1: the session store fails, turns are queued in memory")
        self.store_outages = counter("store_outages", "Outages of the session store")
        self.store_backlog = gauge("store_backlog", "Session writes queued for the store")
        self.store_from_memory = counter("store_from_memory", "Sessions read from memory while the store failed")
        self.store_lost_writes = counter("store_lost_writes", "Session writes lost, by cause", "cause")
        self.choices = counter("choices", "Nodes chosen for attempts, by policy and outcome", "model", "policy", "outcome")
        self.policy = gauge("policy", "1: requests for the model follow this policy now", "model", "policy")
        self.policy_switches = counter("policy_switches", "Automatic changes of policy", "model", "policy")
        self.imbalance = gauge("load_imbalance_ratio", "Fullest node over its fair share of recent requests, minus 1", "model")
        self.imbalance_chance = gauge(
            "load_imbalance_chance_ratio", "The part of load_imbalance_ratio that chance alone explains", "model"
        )
        self.imbalance_alarm = gauge("load_imbalance_alarm", "1: the imbalance beyond chance has reached the alarm", "model")
        self.view_resyncs = counter("view_resyncs", "Snapshots of the view after the first, by cause", "cause")

    def request_ended(self, face: str, method: str, code: str, duration_s: float) -> None:
        """Counts and measures a call of a face."""
        self.requests.labels(face, method, code).inc()
        self.request_seconds.labels(face, method).observe(duration_s)

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
