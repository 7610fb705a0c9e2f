"""What calls of a client raise. Each is a `RyzansteinError`: with code, reason, metadata, and the wrong fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ryzanstein.errors import RyzansteinError

if TYPE_CHECKING:
    from ryzanstein.client.answer import Answer


class ClientError(RyzansteinError):
    """The base of all errors of the client. `partial` is what of an answer had arrived; None: nothing was begun."""

    partial: Answer | None = None

    @classmethod
    def of(cls, error: RyzansteinError, partial: Answer | None = None) -> Self:
        """Returns an error of this class that says what another one says."""
        made = cls(
            error.message, error.code, error.reason, error.metadata, error.violations, error.retry_after_s, error.resource
        )
        made.partial = partial
        return made

    def _number(self, name: str) -> int:
        text = self.metadata.get(name, "")
        return int(text) if text.isdecimal() else 0


class RouterUnreachable(ClientError):
    """No router answered for so long as the client is patient. The message names each address and its failure."""


class Unavailable(ClientError):
    """The cluster cannot serve this now: no node, a drain, a store that is away."""


class VersionError(ClientError):
    """The server does not know the call or a part of the request: it is older, or no router."""


class Overloaded(ClientError):
    """There is no room. `waiting` is how many requests wait; 0: not said."""

    @property
    def waiting(self) -> int:
        return self._number("waiting")

    @property
    def expected_wait_s(self) -> float:
        """Returns how long the first token would take, or after which time to ask again; 0: not said."""
        return float(self.metadata.get("expected_wait_s", self.retry_after_s or 0.0))


class RateLimited(ClientError):
    """The tenant asks for more than its limits allow."""


class SessionBusy(ClientError):
    """Another request is being answered in the session."""


class DeadlineExceeded(ClientError):
    """The deadline passed, or cannot be met."""


class AnswerLost(ClientError):
    """No router knows the generation any more, and a part of its answer was already delivered."""


class AnswerCancelled(ClientError):
    """Somebody else cancelled the generation."""


class AnswerFailed(ClientError):
    """The cluster gave the answer up."""


class Incomplete(ClientError):
    """A structured answer ended before it was whole: `max_tokens` or the context was used up."""


class InvalidRequest(ClientError):
    """The request is wrong."""

    @property
    def field(self) -> str:
        """Returns the wrong field; empty: the error is about none."""
        return self.violations[0].field if self.violations else self.metadata.get("field", "")


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit into the model's context. Lengths are in tokens."""

    @property
    def prompt_tokens(self) -> int:
        return self._number("prompt_tokens")

    @property
    def max_tokens(self) -> int:
        return self._number("max_tokens")

    @property
    def context_length(self) -> int:
        return self._number("context_length")


class RequestTooLarge(InvalidRequest):
    """The request has more bytes than a router takes."""


class SessionFull(ClientError):
    """The conversation has become too long."""


class SessionDamaged(ClientError):
    """A part of the session's messages is gone. Delete the session."""


class Conflict(ClientError):
    """The id is taken."""


class NotFound(ClientError):
    """There is no such session, model, generation or node."""


class KeyRefused(ClientError):
    """The key is missing, wrong, over, or may not do this."""


class OperatorError(ClientError):
    """An error of the calls of operators and services."""


class ProtocolError(ClientError):
    """The server broke the protocol: an index is missing, or another generation came."""
