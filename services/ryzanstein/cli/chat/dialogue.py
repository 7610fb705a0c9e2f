"""The conversation at a terminal: lines that are edited, commands, and an answer that Ctrl-C ends.

One event loop runs from the first line to the last. prompt-toolkit has the terminal while nobody answers, rich while the
answer comes; never both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from ryzanstein.cli import display
from ryzanstein.cli.chat.talk import SETTINGS, Talk
from ryzanstein.cli.chat.views import AnswerView
from ryzanstein.client import clean
from ryzanstein.errors import RyzansteinError

INTERRUPTED = 130
_AGAIN_S = 1.0
_MODE = 0o600
_LOCAL_MODES = 3  # in what `termios.tcgetattr` returns
HELP = {
    "/help": "this list",
    "/session [ID]": "a new conversation, or another one",
    "/system TEXT": "a new conversation that begins with these instructions",
    "/set [NAME VALUE]": f"sampling: {', '.join(SETTINGS)}; `default` takes a value back",
    "/model [NAME]": "the models, or another one",
    "/retry": "ask the last question again, in a copy of the conversation",
    "/tokens": "how many tokens the conversation has",
    "/nodes": "who wrote the last answer, and its moves",
    "/exit": "leave, as Ctrl-D does",
}


class Dialogue:
    """A conversation with a person."""

    def __init__(self, talk: Talk, view: AnswerView, people: Console, *, keeps_history: bool) -> None:
        self._talk, self._view, self._people = talk, view, people
        self._prompt: PromptSession[str] = PromptSession(
            history=_history() if keeps_history else InMemoryHistory(),
            completer=WordCompleter([name.partition(" ")[0] for name in HELP], sentence=True),
            complete_while_typing=False,
            key_bindings=_keys(),
            prompt_continuation="... ",
            enable_history_search=True,
        )
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/session": self._session,
            "/system": self._system,
            "/set": self._set,
            "/model": self._model,
            "/retry": self._retry,
            "/tokens": self._tokens,
            "/nodes": self._nodes,
        }
        self._interrupted_at = 0.0

    async def run(self) -> int:
        """Returns the exit code, when the person leaves."""
        self._note(f"session {self._talk.session}; /help shows the commands, Ctrl-D leaves")
        async with self._talk.client:
            while True:
                try:
                    text = (await self._prompt.prompt_async(HTML("<ansicyan><b>you</b></ansicyan> "))).strip()
                except EOFError:
                    return 0
                except KeyboardInterrupt:
                    return INTERRUPTED
                if text == "/exit":
                    return 0
                if text and not await self._does(text):
                    return INTERRUPTED

    async def _does(self, text: str) -> bool:
        """Does what a line says. Returns False if it was interrupted twice."""
        name, _, rest = text.partition(" ")
        with self._interruptible() as interrupted:
            try:
                if name.startswith("/") and name[1:].isalpha():
                    await self._commands.get(name, self._unknown)(rest.strip())
                else:
                    await self._answered(self._talk.say(text, self._view))
            except RyzansteinError as error:
                display.show_error(self._people, error)
            except asyncio.CancelledError:
                if not interrupted:
                    raise
                return False
        return True

    @contextmanager
    def _interruptible(self) -> Iterator[list[bool]]:
        """Ctrl-C ends the answer; a second one within a second leaves. Yields a list that is then not empty."""
        task, loop, left = asyncio.current_task(), asyncio.get_running_loop(), list[bool]()

        def interrupt() -> None:
            now, before = time.monotonic(), self._interrupted_at
            self._interrupted_at = now
            if now - before < _AGAIN_S or not self._talk.cancel():
                left.append(True)
                if task is not None:
                    task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            with _unechoed():
                yield left
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    async def _answered(self, saying: Awaitable[object]) -> None:
        await saying
        answer = self._talk.last
        assert answer is not None
        self._note(("stopped; " if answer.finish_reason == "cancelled" else "") + self._talk.figures(answer))

    async def _unknown(self, _: str) -> None:
        self._note("there is no such command; /help shows them")

    async def _help(self, _: str) -> None:
        for usage, about in HELP.items():
            self._note(f"{usage:<18} {about}")
        self._note("Alt-Enter, or a line that ends with \\, begins another line of the same message")

    async def _session(self, session: str) -> None:
        self._talk.new_session(session)
        self._note(f"session {self._talk.session}")

    async def _system(self, text: str) -> None:
        self._talk.new_session()
        self._talk.system = text
        self._note(f"session {self._talk.session}" + (" begins with these instructions" if text else ""))

    async def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ").partition(" ")
        if name:
            try:
                self._talk.set(name, value.strip())
            except KeyError:
                self._note(f"{name} cannot be set: there are {', '.join(SETTINGS)}")
                return
            except ValueError:
                self._note(f"{name} must be {'a whole number' if SETTINGS[name] is int else 'a number'}, got {value!r}")
                return
        self._note(", ".join(f"{name} {value}" for name, value in self._talk.options.items() if name in SETTINGS) or "none set")

    async def _model(self, name: str) -> None:
        if name:
            self._talk.options["model"] = name
            self._talk.new_session()
            self._note(f"model {name}, session {self._talk.session}")
            return
        for model in await self._talk.client.models():
            self._note(f"{model.name}: context {model.context_length}, nodes {model.ready_nodes}")

    async def _retry(self, _: str) -> None:
        await self._answered(self._talk.retry(self._view))

    async def _tokens(self, _: str) -> None:
        self._note(f"{await self._talk.num_tokens()} tokens in session {self._talk.session}")

    async def _nodes(self, _: str) -> None:
        if self._talk.last is None:
            self._note("nobody has answered yet")
            return
        for part in self._talk.last.parts:
            self._note(f"{part.node}: tokens {part.first_index} to {part.first_index + part.tokens - 1}")
        for move in self._talk.last.moves:
            silence = f"{move.silence_s * 1e3:.0f} ms of silence"
            cause = f": {move.cause}" if move.cause else ""
            self._note(f"{move.from_node} -> {move.to_node} at token {move.at_index}, {silence}{cause}")

    def _note(self, line: str) -> None:
        self._people.print(Text(clean(line), style="dim"))


@contextmanager
def _unechoed() -> Iterator[None]:
    """What is typed meanwhile does not stand in the answer; the next prompt has it."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before[:_LOCAL_MODES], before[_LOCAL_MODES] & ~termios.ECHO, *before[_LOCAL_MODES + 1 :]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return keys


def _history() -> History:
    """Returns the file that keeps what was typed, for this user alone; without a place for it, memory."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "ryzanstein" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, _MODE))
        path.chmod(_MODE)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
