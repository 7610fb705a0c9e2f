"""What a client has seen of an answer, and how it differs from one without faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.v1 import inference_pb2 as pb

_REPLAY_S = 0.1


@dataclass(slots=True)
class ChoiceSeen:
    """The tokens of one choice, in order."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reason: int = pb.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class ChoiceExpected:
    """The choice without any fault."""

    token_ids: tuple[int, ...]
    text: str
    reason: int


class SeenAnswer:
    """An answer built from the events of any stream. `problems` lists what must never happen."""

    def __init__(self, num_choices: int) -> None:
        self.generation_id = ""
        self.choices = [ChoiceSeen() for _ in range(num_choices)]
        self.problems: list[str] = []
        self.used = (0, 0)
        """Tokens of the prompt and of all choices, once the answer is complete."""
        self.progress_at = 0.0
        """When a token came that was new. Those that a stream begins with may be older than the stream."""
        self.node_ids: dict[str, None] = {}
        """The nodes that generated it."""
        self._started_at = 0.0

    @property
    def complete(self) -> bool:
        return all(choice.reason for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def from_index(self) -> dict[int, int]:
        return {number: len(choice.token_ids) for number, choice in enumerate(self.choices)}

    def reattached(self) -> None:
        """Prepares for a stream that sends the ends of choices again."""
        for choice in self.choices:
            choice.reason = pb.FINISH_REASON_UNSPECIFIED

    def event(self, event: pb.GenerationEvent, now: float) -> None:
        match event.WhichOneof("kind"):
            case "started":
                self._started_at = now
                self._started(event.started)
            case "delta":
                if now > self._started_at + _REPLAY_S:
                    self.progress_at = now
                self._delta(event.delta)
            case "finished":
                self.choices[event.finished.choice].reason = event.finished.finish_reason
                if self.complete:
                    self.used = event.finished.usage.prompt_tokens, event.finished.usage.completion_tokens

    def _started(self, started: pb.GenerationStarted) -> None:
        if self.generation_id and started.generation_id != self.generation_id and self.num_tokens:
            self.problems.append(f"generation {self.generation_id} became {started.generation_id}")
        self.generation_id = started.generation_id

    def _delta(self, delta: pb.GenerationDelta) -> None:
        choice = self.choices[delta.choice]
        if delta.first_index != len(choice.token_ids):
            self.problems.append(f"choice {delta.choice}: index {delta.first_index} after {len(choice.token_ids)} tokens")
        if choice.reason:
            self.problems.append(f"choice {delta.choice}: a token after its end")
        self.node_ids[delta.node_id] = None
        choice.token_ids.extend(delta.token_ids)
        choice.text.append(delta.text)

    def differences(self, expected: list[ChoiceExpected]) -> list[str]:
        """Returns how a complete answer differs from the one without faults."""
        return [
            f"choice {number}: {difference}"
            for number, (seen, wanted) in enumerate(zip(self.choices, expected, strict=True))
            if (difference := _difference(seen, wanted))
        ]


def _difference(seen: ChoiceSeen, wanted: ChoiceExpected) -> str:
    if tuple(seen.token_ids) != wanted.token_ids:
        pairs = enumerate(zip(seen.token_ids, wanted.token_ids, strict=False))
        at = next((index for index, (one, other) in pairs if one != other), min(len(seen.token_ids), len(wanted.token_ids)))
        return f"token {at} differs ({len(seen.token_ids)} tokens, {len(wanted.token_ids)} expected)"
    if "".join(seen.text) != wanted.text:
        return "the text differs"
    return "" if seen.reason == wanted.reason else f"finish reason {seen.reason}, {wanted.reason} expected"
