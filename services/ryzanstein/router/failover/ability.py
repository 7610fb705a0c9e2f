"""Which nodes can do what a request asks for, and why none ever can.

A node cannot if it is of an older version, which would ignore a part, if its engine does not support a part, or if it
does not have the request's adapter.
"""

from __future__ import annotations

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import CONSTRAINTS, GenerationRequest
from ryzanstein.router.nodes.roster import Roster


class Ability:
    """What the nodes of a roster can do of one request."""

    def __init__(self, request: GenerationRequest, links: Roster) -> None:
        self._request, self._links = request, links
        self._features, self._used = request.features, frozenset(request.used)

    @property
    def unable(self) -> frozenset[str]:
        """The nodes that cannot run the request."""
        lacking = self._links.lacking(self._features, self._used)
        return lacking if self._request.adapter is None else lacking | self._links.without_adapter(self._request.adapter)

    def never(self) -> tuple[str, RyzansteinError] | None:
        """Returns why no node of the model can ever run the request, for a metric and for the client; None: one can.

        A node that is away at the moment counts.
        """
        model = self._request.model
        if not self._none_but(self.unable):
            return None
        if self._none_but(self._links.lacking(self._features & {CONSTRAINTS})):
            return "constraints_unsupported", errors.constraints_unsupported(model)
        if not self._none_but(self._links.lacking(self._features)):
            lacking = self._request.lacking(self._links.unsupported(model))
            if lacking is not None:
                return "engine_lacks", lacking
        if self._request.adapter is not None and not self._none_but(self._links.lacking(self._features)):
            return "adapter_removed", errors.adapter_removed(self._request.adapter.name, model)
        return "nodes_too_old", errors.nodes_too_old(model, self._features)

    def _none_but(self, unable: frozenset[str]) -> bool:
        """Returns whether all nodes that have the model are among these, and one of them could serve it."""
        model = self._request.model
        return bool(unable) and self._links.contexts(model).keys() <= unable and self._links.could_serve(model, ())
