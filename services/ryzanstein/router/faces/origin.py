"""Where a request comes from: who sent it, and the id of the call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ryzanstein import errors
from ryzanstein.auth.caller import Caller
from ryzanstein.embeddings import EmbeddingRequest
from ryzanstein.generation.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Who sent a request, and the id of the call that it came with."""

    caller: Caller
    request_id: str

    def owned(self, request: GenerationRequest, traceparent: str, deadline: float | None) -> GenerationRequest:
        """Returns the request as the caller's own, with what its call says. Without a tenant, its user is charged.

        Raises PERMISSION_DENIED PRIORITY_NOT_ALLOWED, NOT_FOUND for a model that the caller may not
        use, and INVALID_ARGUMENT where it must name one of several.
        """
        caller = self.caller
        caller.check_priority(request.priority)
        return replace(
            request,
            model=allowed_model(caller, request.model),
            request_id=self.request_id,
            tenant=caller.tenant or request.user,
            tenant_named=bool(caller.tenant),
            key_id=caller.key_id,
            cache_scope=caller.cache_scope,
            traceparent=traceparent,
            deadline=deadline,
        )

    def owned_texts(self, request: EmbeddingRequest, user: str) -> EmbeddingRequest:
        """Returns the request for vectors as the caller's own; see `owned`."""
        caller = self.caller
        caller.check_priority(request.priority)
        return replace(
            request,
            model=allowed_model(caller, request.model),
            request_id=self.request_id,
            tenant=caller.tenant or user,
            cache_scope=caller.cache_scope,
        )


def allowed_model(caller: Caller, model: str) -> str:
    """Returns the model to use, which may be empty: the router's only one.

    Raises NOT_FOUND for one that the caller may not use, as for one that is not served, and
    INVALID_ARGUMENT where the caller may use several and names none.
    """
    if caller.models is None:
        return model
    if model:
        caller.check_model(model)
        return model
    if len(caller.models) != 1:
        raise errors.invalid("model", f"must be given, one of: {', '.join(sorted(caller.models))}"[:256])
    return next(iter(caller.models))
