"""The metrics of attempts on a node: how they end, how long each stage takes, how long prompts and answers are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from ryzanstein.errors import LOGITS_NOT_FINITE, OUT_OF_MEMORY
from ryzanstein.observe.metrics import DURATION_BUCKETS, TIME_PER_OUTPUT_TOKEN_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS

LENGTH_BUCKETS = tuple(float(4**power) for power in range(1, 10))  # 4 to 262,144 tokens


class AttemptMetrics:
    """The metrics of one model's attempts. All are observed at a stage's end, none for each token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ryzanstein_worker_{name}", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        first, token = TIME_TO_FIRST_TOKEN_BUCKETS, TIME_PER_OUTPUT_TOKEN_BUCKETS
        self.outcomes = counter("generations_total", "Attempts ended, by outcome.", "outcome")
        self.choices = counter("choices_total", "Choices ended, by finish reason.", "reason")
        self.first_token = histogram("time_to_first_token_seconds", "Time from submit to the first token.", first)
        self.per_token = histogram("time_per_output_token_seconds", "Mean time per token of a choice, after the first.", token)
        self.queue = histogram("queue_seconds", "Time from submit to the first step that computes the attempt.", first)
        self.prefill = histogram("prefill_seconds", "Time from that step's begin to the first token.", first)
        self.decode = histogram("decode_seconds", "Time from the first token to the attempt's end.", DURATION_BUCKETS)
        self.prompt_tokens = histogram("prompt_tokens_length", "Tokens of an accepted prompt.", LENGTH_BUCKETS)
        self.generated_tokens = histogram("generated_tokens_length", "Tokens that an attempt generated.", LENGTH_BUCKETS)
        for outcome in (LOGITS_NOT_FINITE, OUT_OF_MEMORY):  # so that `increase()` sees the first time
            self.outcomes.labels(outcome.lower())
