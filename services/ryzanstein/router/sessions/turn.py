"""A request's turn in its session: prepends the earlier messages, and adds the turn at the end.

One generation at a time speaks in a session. Every router refuses a second one meanwhile (ABORTED,
SESSION_BUSY): its history would lack the answer in progress, and the generation that ended last
would decide the order.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.sessions.claimed import Claimed
from ryzanstein.router.sessions.names import OwnedSessions, is_reserved, shown, store_name
from ryzanstein.router.sessions.store import ServingStore, Session, SessionBounds
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)


class Turn:
    """A generation's turn in its session, held from `Turns.open` or `Turns.resume` to `release`."""

    def __init__(
        self, turns: Turns, session_id: str, generation_id: str, session: Session | None, new_messages: tuple[Message, ...]
    ) -> None:
        self._turns = turns
        self.session_id = session_id
        self.generation_id = generation_id
        self.new_messages = new_messages
        self._session = session
        self._stored = False

    @property
    def model(self) -> str:
        """The session's model, empty while it has none."""
        return "" if self._session is None else self._session.model

    @property
    def last_node(self) -> str:
        """The node that answered the previous turn, empty before the first."""
        return "" if self._session is None else self._session.node_id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation."""
        earlier = () if self._session is None else self._session.messages
        return (*earlier, *self.new_messages)

    async def ensure(self, model: str, tenant: str = "") -> None:
        """Creates a session that did not exist. It is this tenant's."""
        if self._session is None:
            with shown():
                self._session = await self._turns.store.create(self.session_id, model, tenant=tenant)

    async def commit(self, answer: Message, model: str, node_id: str) -> None:
        """Adds what the client said and the answer, once per generation, which also ends the claim.

        A failure is logged and counted, because the answer itself is complete.
        """
        messages = (*self.new_messages, answer)
        await self._turns.claimed.settle(self.session_id, self.generation_id)
        try:
            await self._turns.store.append(
                self.session_id, messages, model=model, node_id=node_id, generation_id=self.generation_id
            )
        except Exception as error:
            self._turns.telemetry.session_turns.labels("dropped").inc()
            log.warning("session turn dropped", session_id=self.session_id, error=str(error))
        else:
            self._stored = True
            self._turns.telemetry.session_turns.labels("stored").inc()

    async def commit_cut_off(self, visible: Message, request: GenerationRequest, node_id: str) -> None:
        """Adds the shown part of an answer that was ended because it had no reader.

        It is left out if another turn was added to the session since.
        """
        earlier = self._num_earlier(request)
        try:
            session = await self._turns.store.get(self.session_id)
        except Exception as error:
            log.warning("session turn dropped", session_id=self.session_id, error=str(error))
            session = None
        if session is None or len(session.messages) != earlier:
            self._turns.telemetry.session_turns.labels("dropped").inc()
            return
        await self.commit(visible, request.public_model, node_id)

    def _num_earlier(self, request: GenerationRequest) -> int:
        """Returns how many messages the session had when the generation began."""
        messages = request.prompt.messages if isinstance(request.prompt, ChatPrompt) else ()
        return len(messages) - len(self.new_messages)

    def release(self) -> None:
        """Releases the claim, however the generation ended.

        The next `open` of the session at this router waits until that is done.
        """
        self._turns.claimed.release(self.session_id, self.generation_id, ended=self._stored)


class Turns:
    """Opens turns in sessions for this router's generations."""

    def __init__(
        self,
        store: ServingStore,
        bounds: SessionBounds,
        telemetry: RouterTelemetry,
        claimed: Claimed,
        owned: OwnedSessions | None = None,
    ) -> None:
        self.store = store
        self._owned = owned or OwnedSessions(store)
        self.telemetry = telemetry
        self.claimed = claimed
        self._bounds = bounds

    async def open(self, request: GenerationRequest, generation_id: str) -> tuple[GenerationRequest, Turn | None]:
        """Returns the request with its session's history and model, and the turn to `release`.

        The request then has the name under which its tenant's session is stored. Without a session the
        turn is None. Raises ABORTED while another generation speaks there, NOT_FOUND for an id that
        is reserved, INVALID_ARGUMENT for a model other than the session's, FAILED_PRECONDITION SESSION_FULL when the
        conversation has become too long, UNAVAILABLE when its history cannot be read. If it raises or is
        cancelled, it releases the claim.
        """
        if not request.session_id:
            return request, None
        if not isinstance(request.prompt, ChatPrompt):
            raise errors.invalid("session_id", "requires messages, not text or token_ids")
        if is_reserved(request.session_id):
            raise errors.not_found("session", request.session_id)
        tenant = request.tenant if request.tenant_named else ""
        with shown():
            return await self._opened(request, tenant, store_name(tenant, request.session_id), generation_id)

    async def _opened(
        self, request: GenerationRequest, tenant: str, name: str, generation_id: str
    ) -> tuple[GenerationRequest, Turn]:
        """Opens the turn in the session with this name, or in the one that an earlier version stored under its bare id."""
        await self.claimed.claim(name, generation_id)
        try:
            session = await self._find(name)
            legacy = await self._owned.legacy_name(tenant, request.session_id) if session is None else None
            if legacy is None or legacy == name:
                assert isinstance(request.prompt, ChatPrompt)
                turn = Turn(self, name, generation_id, session, request.prompt.messages)
                return self._continued(replace(request, session_id=name), turn), turn
        except BaseException:
            self.claimed.release(name, generation_id)
            raise
        self.claimed.release(name, generation_id)
        return await self._opened(request, "", legacy, generation_id)

    async def resume(self, session_id: str, generation_id: str, new_messages: tuple[Message, ...]) -> Turn:
        """Returns the turn of a generation that this router takes over from another one.

        The claim passes to this router. If the claim has expired and another generation has the
        session by now, the answer is added after that one's.
        """
        try:
            await self.claimed.claim(session_id, generation_id)
        except RyzansteinError as error:
            log.warning("session claimed by another generation", session_id=session_id, error=str(error))
        return Turn(self, session_id, generation_id, None, new_messages)

    async def again(self, session_id: str, generation_id: str, new_messages: tuple[Message, ...]) -> Turn:
        """Returns the turn of a generation that failed, released its claim, and runs again.

        Raises ABORTED SESSION_BUSY while another generation speaks in the session.
        """
        with shown():
            await self.claimed.claim(session_id, generation_id)
        return Turn(self, session_id, generation_id, None, new_messages)

    async def _find(self, session_id: str) -> Session | None:
        try:
            return await self.store.get(session_id)
        except RyzansteinError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return None

    def _continued(self, request: GenerationRequest, turn: Turn) -> GenerationRequest:
        if request.model and turn.model and request.model != turn.model:
            raise errors.invalid("model", f"must be {turn.model!r}, the session's model", request.model)
        # With room for the answer, which must not be refused after it was generated.
        self._bounds.check((*turn.messages, Message(Role.ASSISTANT, "")))
        assert isinstance(request.prompt, ChatPrompt)
        prompt = replace(request.prompt, messages=turn.messages)
        return replace(request, prompt=prompt, model=request.model or turn.model, last_node=turn.last_node)
