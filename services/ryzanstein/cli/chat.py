"""`ryzanstein chat`: a conversation with the cluster, token by token, over the public gRPC API."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ryzanstein.cli import display
from ryzanstein.cli.access.keyed_router import KeyedRouter, KeyFile, keyed_router
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.answers import ChatAnswer, ask, visible
from ryzanstein.cli.options import ROUTER_ADDRESS, Router, text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Speaker:
    """A speaker in one session. It sends messages and shows the answers as they arrive."""

    router: KeyedRouter
    session_id: str
    sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    model: str = ""
    timeout_s: float | None = None

    async def say(self, text: str, out: Console | None) -> ChatAnswer:
        """Returns the answer and shows it on `out` as it arrives. Raises RyzansteinError."""

        def show(_: ChatAnswer, event: pb.GenerationEvent) -> None:
            if out is not None:
                out.print(visible(event), end="", markup=False, soft_wrap=True)

        request = pb.ChatRequest(
            model=self.model,
            messages=[pb.Message(role=pb.ROLE_USER, content=text)],
            sampling=self.sampling,
            session_id=self.session_id,
        )
        try:
            async with self.router.open() as channel:
                return await ask(channel, request, show, self.timeout_s)
        finally:
            if out is not None:
                out.print()


def chat(
    text: Annotated[
        str | None, typer.Argument(callback=text_value, help="The message; omit it for an interactive conversation.")
    ] = None,
    *,
    session: Annotated[str, typer.Option(callback=text_value, help="Session to continue; default: a new one.")] = "",
    router: Router = ROUTER_ADDRESS,
    key_file: KeyFile = None,
    ca: CaFile = None,
    model: Annotated[str, typer.Option(callback=text_value, help="Required if the cluster serves several models.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy: always the likeliest token.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=2**32 - 1, help="Limit of each answer.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed samples the same tokens.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.001, max=86_400, help="Deadline of each answer, in seconds.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each answer.")] = False,
) -> None:
    """Chat with the cluster; answers are streamed."""
    sampling = pb.SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    speaker = Speaker(
        keyed_router(router, key_file, ca), session or f"chat-{uuid.uuid4().hex[:12]}", sampling, model, timeout_s
    )
    if text is not None:
        ok = _turn(speaker, text, as_json)
        raise typer.Exit(0 if ok else 1)
    _converse(speaker, as_json)


def _converse(speaker: Speaker, as_json: bool) -> None:
    """Runs turn after turn until the input ends. An error does not end the conversation."""
    people = display.people()
    people.print(Text(f"session {speaker.session_id}; end with Ctrl-D", style="dim"))
    while (text := _next_line(people)) is not None:
        if text:
            _turn(speaker, text, as_json)
    people.print()


def _next_line(people: Console) -> str | None:
    """Returns the next line, empty if there is nothing to send, or None at the end of the input."""
    try:
        return text_value(people.input("[bold cyan]you[/] ").strip())
    except EOFError:
        return None
    except (UnicodeDecodeError, typer.BadParameter):
        people.print("the input is not UTF-8 text", style="red")
        return ""


def _turn(speaker: Speaker, text: str, as_json: bool) -> bool:
    """Sends one message and shows the answer.

    Returns False if it failed, after showing the error.
    """
    people = display.people()
    try:
        answer = asyncio.run(speaker.say(text, None if as_json else display.output()))
    except RyzansteinError as error:
        display.show_error(people, error)
        return False
    if as_json:
        display.print_json(as_document(answer, speaker.session_id))
    else:
        people.print(Text(_figures(answer, speaker.session_id), style="dim"))
    return True


def as_document(answer: ChatAnswer, session_id: str) -> dict[str, Any]:
    """Returns an answer for scripts: SI units, null where there was nothing to measure."""
    return {
        "text": answer.text,
        "session_id": session_id,
        "generation_id": answer.generation_id,
        "model": answer.model,
        "node_ids": answer.node_ids,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "cached_prompt_tokens": answer.usage.cached_prompt_tokens,
        },
        "time_to_first_token_s": answer.time_to_first_token_s,
        "tokens_per_s": answer.tokens_per_s,
        "reattaches": answer.num_reattaches,
    }


def _figures(answer: ChatAnswer, session_id: str) -> str:
    """Returns the line below an answer."""
    rate = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.0f} tokens/s"
    first = display.milliseconds(answer.time_to_first_token_s)
    again = f", re-attached {answer.num_reattaches}x" if answer.num_reattaches else ""
    return f"{' -> '.join(answer.node_ids)}: first token {first}{rate}{again}, session {session_id}"
