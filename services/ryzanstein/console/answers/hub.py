"""The answers of one person. Each has one reader, however many tabs show it, and goes on without any.

A change of an answer wakes its tabs, and each asks the sheet for what it lacks. So a slow tab does not slow another one, and
nothing is kept for each tab.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ryzanstein.client import AsyncClient, AsyncStream, ClientError, Position, Started, clean
from ryzanstein.client.errors import NotFound
from ryzanstein.console.answers.questions import Question, last_asked, options_of
from ryzanstein.console.answers.restarts import AnswerNote, RestartNotes
from ryzanstein.console.answers.view import Sheet
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import Sampling, SessionList, SessionRow

MOST_ANSWERS = 200
MOST_TEXT = 4 * 2**20
"""Characters of all answers that are kept."""
_BOUND_EACH = 2**14
MOST_RUNNING = 32
MOST_SESSIONS = 200
LAYOUT_S = 0.25
_TITLE_CHARS = 80
_NOT_TAKEN = "the console was restarted before a node had taken the question; Retry asks it again"
_STILL = "the console keeps no more answers while so many run; stop one first"

Wake = Callable[[], None]


class TooManyAnswers(ValueError):
    """So many answers run that no other one can be begun."""


@dataclass(slots=True)
class KeptAnswer:
    """An answer that the console reads or has read."""

    session: str
    question: Question
    sheet: Sheet
    stream: AsyncStream | None = None
    watchers: dict[object, Wake] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    bounded_at: int = _BOUND_EACH
    resumed: bool = False
    """Whether an earlier process of the console began to read it."""

    def wake(self) -> None:
        """Tells the layout and those who look at it that it has changed."""
        self.changed.set()
        for wake in list(self.watchers.values()):
            wake()


class Hub:
    """What one person asked, as far as it is kept."""

    def __init__(
        self, client: AsyncClient, telemetry: ConsoleTelemetry, notes: RestartNotes | None = None, person: str = ""
    ) -> None:
        """`notes` keep which answers of this person run."""
        self.client, self._telemetry = client, telemetry
        self._notes, self._person = notes or RestartNotes(None), person
        self.answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._readers: set[asyncio.Task[None]] = set()
        self._titles: OrderedDict[str, str] = OrderedDict()
        self.on_turn: list[Callable[[KeptAnswer], None]] = []
        self.on_gone: list[Callable[[KeptAnswer], None]] = []
        """Called with an answer of which the cluster may know the end, and the console does not."""

    @property
    def running(self) -> int:
        return len(self._readers)

    def ask(self, session: str, question: Question, sampling: Sampling) -> KeptAnswer:
        """Begins an answer. Raises TooManyAnswers, and ValueError for a value that cannot be one."""
        if len(self._readers) >= MOST_RUNNING:
            raise TooManyAnswers(_STILL)
        self._make_room()
        stream = self.client.stream(question.messages(), **options_of(session, sampling))
        kept = KeptAnswer(session, question, Sheet(f"answer-{uuid.uuid4().hex[:16]}"))
        self._note(kept, "")
        self._begin(kept, stream)
        for tell in self.on_turn:
            tell(kept)
        return kept

    def resume(self) -> None:
        """Goes on with the answers that ran when the console stopped. The cluster has them from their beginning."""
        for answer_id, note in self._notes.answers(self._person).items():
            kept = KeptAnswer(note.session, Question(note.text, note.results), Sheet(answer_id), resumed=True)
            if answer_id in self.answers or len(self._readers) >= MOST_RUNNING:
                continue
            if note.generation_id:
                self._begin(kept, self.client.attach(Position(note.generation_id, (0,))))
            else:
                self.answers[answer_id] = kept
                kept.sheet.lose(_NOT_TAKEN)
                self._notes.forget_answer(answer_id)

    def _begin(self, kept: KeptAnswer, stream: AsyncStream) -> None:
        kept.stream = stream
        self.answers[kept.sheet.answer_id] = kept
        self._remember(kept.session, kept.question.shown)
        reader = self._telemetry.background.once("answer", self._read(kept, stream))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        self._telemetry.answers_kept.set(len(self.answers))

    def _note(self, kept: KeptAnswer, generation_id: str) -> None:
        question = kept.question
        note = AnswerNote(self._person, kept.session, question.text, question.results, generation_id)
        self._notes.write_answer(kept.sheet.answer_id, note)

    async def retry(self, session: str, sampling: Sampling) -> KeptAnswer:
        """Asks the last question of a session again, in a copy of the conversation without its answer. Raises ClientError,
        and what `ask` raises."""
        try:
            before = list((await self.client.sessions.get(session)).messages)
        except NotFound:  # the first turn failed, and nothing was kept of it
            before = []
        rest, asked = last_asked(before)
        own = self.of_session(session)
        if own and (not own[-1].question.says(asked) or own[-1].sheet.status == "failed"):
            asked = own[-1].question  # the cluster keeps no turn that failed
        else:
            before = rest
        if asked == Question():
            raise ValueError("the session has no question yet")
        copy = new_session()
        if before:
            await self.client.sessions.create(copy, before, model=sampling.model)
        return self.ask(copy, asked, sampling)

    async def stop(self, answer_id: str) -> None:
        """Ends an answer; its sheet shows when the cluster has done so. Raises ClientError if no router takes it."""
        kept = self.answers.get(answer_id)
        if kept is None or kept.stream is None or kept.sheet.over:
            return
        kept.sheet.stop()
        kept.wake()
        await kept.stream.cancel()

    async def sessions(self) -> SessionList:
        """Returns the sessions of the cluster, last used first. Raises ClientError."""
        running = {kept.session for kept in self.answers.values() if not kept.sheet.over}
        rows: list[SessionRow] = []
        async for each in self.client.sessions.list():
            if len(rows) == MOST_SESSIONS:
                return SessionList(rows, cut=True)
            title = self._titles.get(each.session, "")
            row = SessionRow(each.session, title, each.updated.timestamp(), clean(each.node), each.session in running)
            rows.append(row)
        known = {row.session for row in rows}
        new = [SessionRow(each, self._titles.get(each, ""), time.time(), "", True) for each in running - known]
        return SessionList([*new, *rows])

    async def delete(self, session: str) -> None:
        """Deletes a session and the answers that are kept of it. Raises ClientError."""
        for kept in [each for each in self.answers.values() if each.session == session]:
            if not kept.sheet.over:
                await self.stop(kept.sheet.answer_id)
        await self.client.sessions.delete(session)
        for answer_id in [name for name, each in self.answers.items() if each.session == session]:
            del self.answers[answer_id]
        self._titles.pop(session, None)

    def of_session(self, session: str) -> list[KeptAnswer]:
        """Returns the answers of a session that are kept, the oldest first."""
        return [kept for kept in self.answers.values() if kept.session == session]

    async def close(self, grace_s: float) -> None:
        """Waits for running answers, then leaves those that still run: the cluster ends or goes on with them."""
        if self._readers:
            await asyncio.wait(set(self._readers), timeout=grace_s)
        for kept in self.answers.values():
            if kept.stream is not None:
                kept.stream.detach()  # closing the client would cancel what still runs
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self.client.close()

    async def _read(self, kept: KeptAnswer, stream: AsyncStream) -> None:
        sheet = kept.sheet
        layout = self._telemetry.background.once("layout", self._lay_out(kept))
        try:
            async for event in stream:
                sheet.take(event)
                if isinstance(event, Started):
                    self._note(kept, event.generation_id)
                self._bound(kept)
                kept.wake()
            sheet.end(stream.answer)
        except ClientError as error:
            sheet.fail(error)
            if kept.resumed and isinstance(error, NotFound):
                self._gone(kept)
        except asyncio.CancelledError:
            sheet.lose("the console stops; the answer goes on in the cluster")
            layout.cancel()
            raise
        finally:
            if not sheet.over:
                sheet.lose("the console failed while it read the answer; its log says why")
            if sheet.status != "lost":
                self._notes.forget_answer(sheet.answer_id)
            kept.stream = None
            self._telemetry.answers.labels(sheet.status).inc()
            kept.wake()

    def _gone(self, kept: KeptAnswer) -> None:
        """Forgets an answer that ended while no console ran: its session has it, if the cluster kept it."""
        self.answers.pop(kept.sheet.answer_id, None)
        self._notes.forget_answer(kept.sheet.answer_id)
        for tell in self.on_gone:
            tell(kept)

    async def _lay_out(self, kept: KeptAnswer) -> None:
        """Lays out what has come, a few times a second, until the answer has ended and all of it is laid out."""
        sheet = kept.sheet
        while True:
            kept.changed.clear()
            job = sheet.layout(watched=bool(kept.watchers))
            if job is not None:
                began = time.monotonic()
                sheet.commit(job, await asyncio.to_thread(job.run))
                self._telemetry.layout.observe(time.monotonic() - began)
                for wake in list(kept.watchers.values()):
                    wake()
            elif sheet.over:
                return
            else:
                await kept.changed.wait()
            if not sheet.over and not (job is not None and sheet.is_behind):
                await asyncio.sleep(LAYOUT_S)

    def _bound(self, kept: KeptAnswer) -> None:
        """Looks now and then whether a growing answer needs the room of older ones, or has none."""
        if kept.sheet.num_chars < kept.bounded_at:
            return
        kept.bounded_at = kept.sheet.num_chars + _BOUND_EACH
        self._make_room()
        if self._num_chars > MOST_TEXT:
            kept.sheet.give_up_text()

    @property
    def _num_chars(self) -> int:
        return sum(each.sheet.num_chars for each in self.answers.values())

    def _make_room(self) -> None:
        """Forgets the oldest answers that have ended, as far as the bounds ask for it."""

        for answer_id in [name for name, each in self.answers.items() if each.sheet.over]:
            if len(self.answers) < MOST_ANSWERS and self._num_chars <= MOST_TEXT:
                return
            del self.answers[answer_id]
            self._telemetry.answers_forgotten.inc()

    def _remember(self, session: str, text: str) -> None:
        self._titles.setdefault(session, " ".join(clean(text).split())[:_TITLE_CHARS])
        while len(self._titles) > MOST_ANSWERS:
            self._titles.popitem(last=False)


def new_session() -> str:
    """Returns the id of a new session."""
    return f"console-{uuid.uuid4().hex[:12]}"
