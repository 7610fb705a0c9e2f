"""`ryzanstein chat`: one message, a conversation at a terminal, or one line of a pipe after another."""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Annotated, Any

import typer
from rich.text import Text

from ryzanstein.cli import display
from ryzanstein.cli.access.keyed_router import KeyFile, client_of
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.chat.talk import Talk
from ryzanstein.cli.chat.views import AnswerView, PipeView, view_of
from ryzanstein.cli.options import ROUTER_ADDRESS, Routers, text_value
from ryzanstein.client import Answer
from ryzanstein.client.requests import Options
from ryzanstein.errors import RyzansteinError


def chat(
    text: Annotated[
        str | None, typer.Argument(callback=text_value, help="The message; omit it for an interactive conversation.")
    ] = None,
    *,
    session: Annotated[str, typer.Option(callback=text_value, help="Session to continue; default: a new one.")] = "",
    router: Routers = ROUTER_ADDRESS,
    key_file: KeyFile = None,
    ca: CaFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send the key without TLS, also to another machine.")] = False,
    model: Annotated[str, typer.Option(callback=text_value, help="Required if the cluster serves several models.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy: always the likeliest token.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=2**32 - 1, help="Limit of each answer.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed samples the same tokens.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.001, max=86_400, help="Deadline of each answer, in seconds.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for each answer.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are written, without formatting.")] = False,
    history: Annotated[bool, typer.Option(help="Keep what is typed, for the next conversation.")] = True,
) -> None:
    """Chat with the cluster; answers are streamed. At a terminal `/help` shows the commands."""
    options: Options = {"temperature": temperature}
    given = {"model": model or None, "max_tokens": max_tokens, "seed": seed, "timeout_s": timeout_s}
    for name, value in given.items():
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    talk = Talk(client_of(router, key_file, ca, insecure=insecure), session or f"chat-{uuid.uuid4().hex[:12]}", options)
    view = None if as_json else view_of(display.output(), display.people(), plain=plain)
    if text is not None:
        raise typer.Exit(asyncio.run(_one(talk, text, view)))
    if view is None or isinstance(view, PipeView) or not sys.stdin.isatty():
        raise typer.Exit(_lines(talk, view))
    from ryzanstein.cli.chat.dialogue import Dialogue

    raise typer.Exit(asyncio.run(Dialogue(talk, view, display.people(), keeps_history=history).run()))


async def _one(talk: Talk, text: str, view: AnswerView | None) -> int:
    """Sends one message, and returns the exit code."""
    async with talk.client:
        return 0 if await _turn(talk, text, view) else 1


def _lines(talk: Talk, view: AnswerView | None) -> int:
    """Sends one line of standard input after the other. An error does not end the conversation.

    Lines are read while the event loop stands still: Ctrl-C ends that at once, which a thread would not let it do.
    """
    people = display.people()
    people.print(Text(f"session {talk.session}; end with Ctrl-D", style="dim"))
    with asyncio.Runner() as runner:
        while line := _next_line():
            try:
                text = line.decode().strip()
            except UnicodeDecodeError:
                people.print("the input is not UTF-8 text", style="red")
                continue
            if text:
                runner.run(_turn(talk, text, view))
        runner.run(talk.client.close())
    return 0


def _next_line() -> bytes:
    """Returns a line of standard input; empty at its end. Who types sees that it is asked for."""
    if sys.stdin.isatty():
        display.people().print("[bold cyan]you[/] ", end="")
    return sys.stdin.buffer.readline()


async def _turn(talk: Talk, text: str, view: AnswerView | None) -> bool:
    """Sends one message and shows the answer. Returns False if it failed, after showing the error."""
    people = display.people()
    try:
        answer = await talk.say(text, view)
    except RyzansteinError as error:
        display.show_error(people, error)
        return False
    if view is None:
        display.print_json(as_document(answer, talk.session))
    else:
        people.print(Text(talk.figures(answer), style="dim"))
    return True


def as_document(answer: Answer, session_id: str) -> dict[str, Any]:
    """Returns an answer for scripts: SI units, null where there was nothing to measure."""
    return {
        "text": answer.text,
        "session_id": session_id,
        "generation_id": answer.generation_id,
        "model": answer.model,
        "node_ids": answer.nodes,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "cached_prompt_tokens": answer.usage.cached_prompt_tokens,
        },
        "time_to_first_token_s": answer.time_to_first_token_s,
        "tokens_per_s": answer.tokens_per_s,
        "reattaches": answer.reattaches,
    }
