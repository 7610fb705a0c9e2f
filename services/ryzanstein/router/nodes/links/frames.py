"""The inner loop: delivers a `StepOutput`, columns of tokens, to the attempts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.tokens import FinishReason, PromptScores, Token
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.events import logprobs_from_wire, scores_from_wire, style_from_wire


class AttemptSink(Protocol):
    """Receives what one attempt does on its node, in order.

    Called from the link's read loop: its methods must neither block nor raise. Nothing follows
    `failed` or `lost`. Times are those of `time.monotonic`.
    """

    def submitted(self, at: float) -> None:
        """Called when the submit frame was handed to the connection."""
        ...

    def preparing(self) -> None:
        """Called now and then while the node has it and cannot accept it yet."""
        ...

    def accepted(self, prompt_tokens: int, reply: ReplyStyle | None = None, omitted: int = 0) -> None:
        """Called when the node has accepted it. `reply` None: its answers are content alone."""
        ...

    def progressed(self, num_tokens: int) -> None:
        """Called when a part of its prompt was computed: so many tokens are now."""
        ...

    def scored(self, scores: PromptScores) -> None:
        """Called with each part of the prompt's log probabilities, before the first token."""
        ...

    def token(self, choice: int, index: int, token: Token) -> bool:
        """Returns True if this is the next token of its choice.

        Returns False if the token is known already, or the attempt is no longer trusted.
        """
        ...

    def finished(self, choice: int, reason: FinishReason, cached_prompt_tokens: int) -> None: ...

    def preempted(self, choice: int) -> None:
        """Called when the choice waits again, until its next token."""
        ...

    def failed(self, error: RyzansteinError, node_fault: bool) -> None: ...

    def suspected(self, cause: str, at: float) -> None:
        """Called when the node is silent or deaf, or its work does not move.

        Tokens may still follow.
        """
        ...

    def lost(self, cause: str, at: float) -> None:
        """Called when the link ended, or the node lost its ranks."""
        ...


def deliver(output: worker.StepOutput, sinks: Mapping[int, AttemptSink]) -> int:
    """Delivers a step's output and returns how many tokens were new.

    Tokens of handles that are not in `sinks` are stale and ignored. Raises ValueError when the
    columns do not match.
    """
    for accepted in output.accepted:
        if (sink := sinks.get(accepted.handle)) is not None:
            sink.accepted(accepted.prompt_tokens, _style(accepted), accepted.omitted_prompt_tokens)
    _deliver_prompts(output, sinks)
    num_new = (_deliver_with_logprobs if output.logprobs else _deliver_tokens)(output, sinks)
    for preempted in output.preempted:
        if (sink := sinks.get(preempted.handle)) is not None:
            sink.preempted(preempted.choice)
    for end in output.finished:
        if (sink := sinks.get(end.handle)) is not None:
            sink.finished(end.choice, FinishReason(end.reason), end.cached_prompt_tokens)
    for failed in output.failed:
        if (sink := sinks.get(failed.handle)) is not None:
            sink.failed(_error(failed), failed.node_fault)
    return num_new


def _style(accepted: worker.Accepted) -> ReplyStyle | None:
    return style_from_wire(accepted.reply) if accepted.HasField("reply") else None


def _deliver_prompts(output: worker.StepOutput, sinks: Mapping[int, AttemptSink]) -> None:
    for progress in output.prompt_progress:
        if (sink := sinks.get(progress.handle)) is not None:
            sink.progressed(progress.tokens)
    for part in output.prompt_parts:
        if (sink := sinks.get(part.handle)) is not None:
            sink.scored(scores_from_wire(part.prompt))


def _deliver_tokens(output: worker.StepOutput, sinks: Mapping[int, AttemptSink]) -> int:
    find, num_new = sinks.get, 0
    columns = zip(output.handle, output.choice, output.index, output.token_id, output.text, strict=True)
    for handle, choice, index, token_id, text in columns:
        if (sink := find(handle)) is not None:
            num_new += sink.token(choice, index, Token(token_id, text))
    return num_new


def _deliver_with_logprobs(output: worker.StepOutput, sinks: Mapping[int, AttemptSink]) -> int:
    num_new = 0
    logprobs = dict(zip(output.logprob_row, output.logprobs, strict=True))
    columns = zip(output.handle, output.choice, output.index, output.token_id, output.text, strict=True)
    for row, (handle, choice, index, token_id, text) in enumerate(columns):
        if (sink := sinks.get(handle)) is not None:
            wire = logprobs.get(row)
            logprobs_of_row = None if wire is None else logprobs_from_wire(wire)
            num_new += sink.token(choice, index, Token(token_id, text, logprobs_of_row))
    return num_new


_RETRY_AFTER_S = {Code.RESOURCE_EXHAUSTED: 1.0, Code.UNAVAILABLE: 1.0}


def _error(failed: worker.Failed) -> RyzansteinError:
    """Returns the node's error as the client sees it. An unknown code is a bug of the node."""
    try:
        code = Code(failed.code)
    except ValueError:
        return errors.internal(f"the node returned the unknown error code {failed.code}")
    metadata = dict(failed.metadata)
    violations: tuple[errors.FieldViolation, ...] = ()
    if code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION):
        field = metadata.get("field") or ("sampling.max_tokens" if failed.reason == "CONTEXT_TOO_LONG" else "")
        violations = (errors.FieldViolation(field, failed.message),) if field else ()
    return RyzansteinError(
        failed.message,
        code,
        failed.reason or code.name,
        metadata,
        violations,
        failed.retry_delay.ToNanoseconds() / 1e9 if failed.HasField("retry_delay") else _RETRY_AFTER_S.get(code),
        ("model", metadata["model"]) if code is Code.NOT_FOUND and "model" in metadata else None,
    )
