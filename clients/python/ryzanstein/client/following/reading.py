"""Puts the events of a generation together: each index once and in order, whichever streams they came on."""

from __future__ import annotations

from ryzanstein.client.answer import Answer, AnswerChoice, Move, Part, Position
from ryzanstein.client.events import Ended, Event, Moved, Reasoning, Started, Text, ToolPiece
from ryzanstein.v1 import inference_pb2 as pb

_PREFIX = "FINISH_REASON_"


class OutOfOrder(Exception):
    """An index was skipped or repeated, or another generation came."""


class AnswerReader:
    """Reads one answer. Times are of one monotonic clock, in seconds."""

    def __init__(self, num_choices: int, now: float, position: Position | None = None) -> None:
        """`position`: where an earlier reader stopped; what came before it is not in the answer."""
        first = position.next_index if position is not None else (0,) * num_choices
        self.answer = Answer(now, choices=[AnswerChoice(number) for number in range(len(first))])
        self.answer.generation_id = position.generation_id if position is not None else ""
        self._next = list(first)
        self._last_at = [now] * len(first)
        self._num_ended = 0

    @property
    def complete(self) -> bool:
        return self._num_ended == len(self._next)

    @property
    def position(self) -> Position:
        return Position(self.answer.generation_id, tuple(self._next))

    def read(self, event: pb.GenerationEvent, now: float) -> list[Event]:
        """Returns what an event says. Raises OutOfOrder if it does not follow what came before."""
        match event.WhichOneof("kind"):
            case "delta":
                return self._delta(event.delta, now)
            case "finished":
                return self._finished(event.finished)
            case "started":
                return self._started(event.started)
            case "prompt":
                del self.answer.prompt[event.prompt.first_index :]
                self.answer.prompt.extend(event.prompt.tokens)
        return []

    def cancelled(self) -> None:
        """Ends what has not ended: the reader wants no more of it."""
        for choice in self.answer.choices:
            choice.finish_reason = choice.finish_reason or "cancelled"

    def _started(self, started: pb.GenerationStarted) -> list[Event]:
        answer = self.answer
        if answer.generation_id not in ("", started.generation_id):
            raise OutOfOrder(f"generation {started.generation_id[:64]} came instead of {answer.generation_id[:64]}")
        answer.generation_id, answer.model = started.generation_id, started.model
        answer.accepted_by = answer.accepted_by or started.node_id
        answer.usage.prompt_tokens = started.prompt_tokens
        return [Started(started.generation_id, started.model, started.node_id, started.prompt_tokens)]

    def _delta(self, delta: pb.GenerationDelta, now: float) -> list[Event]:
        number, first_index, token_ids = delta.choice, delta.first_index, delta.token_ids
        if number >= len(self._next) or first_index != self._next[number]:
            raise OutOfOrder(f"index {first_index} of choice {number} came out of order")
        choice, node, text = self.answer.choices[number], delta.node_id, delta.text
        found: list[Event] = []
        part = choice.parts[-1] if choice.parts else None
        if part is None or part.node != node:
            before = part.node if part is not None else self.answer.accepted_by
            if before and before != node:
                move = _move(delta, before, now - self._last_at[number])
                self.answer.moves.append(move)
                found.append(Moved(move))
            part = Part(node, number, first_index, 0, choice.num_chars, choice.num_chars)
            choice.parts.append(part)
        self._timed(number, now)
        part.tokens += len(token_ids)
        part.end += len(text)
        choice.add(text)
        choice.token_ids.extend(token_ids)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        self._next[number] = first_index + len(token_ids)
        found.append(Text(number, node, first_index, text, token_ids))
        if delta.reasoning or delta.tool_calls:
            found += self._beside(choice, delta)
        return found

    def _finished(self, finished: pb.GenerationFinished) -> list[Event]:
        number = finished.choice
        if number >= len(self._next):
            raise OutOfOrder(f"choice {number} ended, and there is no such choice")
        choice = self.answer.choices[number]
        if choice.finish_reason:
            return []
        found: list[Event] = []
        if finished.text:
            choice.add(finished.text)
            if choice.parts:
                choice.parts[-1].end = choice.num_chars
            node = choice.parts[-1].node if choice.parts else self.answer.accepted_by
            found.append(Text(number, node, self._next[number], finished.text, ()))
        found += self._beside(choice, finished)
        choice.finish_reason = _reason(finished.finish_reason)
        self.answer.usage.CopyFrom(finished.usage)
        self._num_ended += 1
        return [*found, Ended(number, choice.finish_reason, finished.usage)]

    def _beside(self, choice: AnswerChoice, message: pb.GenerationDelta | pb.GenerationFinished) -> list[Event]:
        found: list[Event] = []
        if message.reasoning:
            choice.reasoning += message.reasoning
            found.append(Reasoning(choice.choice, message.reasoning))
        try:
            choice.call(message.tool_calls)
        except IndexError:
            raise OutOfOrder(f"a call of choice {choice.choice} came in pieces out of order") from None
        found += (ToolPiece(choice.choice, each.index, each.id, each.name, each.arguments) for each in message.tool_calls)
        return found

    def _timed(self, number: int, now: float) -> None:
        answer = self.answer
        if not answer.first_token_at:
            answer.first_token_at = now
        else:
            answer.longest_pause_s = max(answer.longest_pause_s, now - answer.last_token_at)
        answer.last_token_at = self._last_at[number] = now


def _move(delta: pb.GenerationDelta, before: str, silence_s: float) -> Move:
    """Returns how the tokens came to their node: as the router saw it, or as this client does where the router does not say."""
    if not delta.HasField("moved"):
        return Move(delta.choice, before, delta.node_id, delta.first_index, silence_s)
    moved = delta.moved
    silence_s = moved.silence.ToNanoseconds() / 1e9
    return Move(delta.choice, moved.from_node_id, delta.node_id, delta.first_index, silence_s, moved.cause)


def _reason(number: int) -> str:
    """Returns the name of a finish reason; one that this version does not know is unspecified."""
    try:
        return pb.FinishReason.Name(pb.FinishReason.ValueType(number)).removeprefix(_PREFIX).lower()
    except ValueError:
        return "unspecified"
