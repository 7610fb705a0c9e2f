"""Which node is asked to fill in the middle while nodes are upgraded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.router.nodes.calls import texts
from ryzanstein.v1 import text_pb2 as pb


@dataclass
class Link:
    node_id: str


class Links:
    def __init__(self, *names: str) -> None:
        self._links = [Link(name) for name in names]

    def least_loaded(self, model: str, excluded: Any = ()) -> Link | None:
        return next((link for link in self._links if link.node_id not in excluded), None)


async def test_a_node_of_an_older_version_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(link: Link, method: str, request: Any) -> Any:
        return pb.TokenizeResponse(token_ids=[1, 2], infill=link.node_id == "newer", stop_token_ids=[3])

    monkeypatch.setattr(texts, "_asked", asked)
    filled = await texts.infill(Links("older", "newer"), "demo", "a", "b")  # type: ignore[arg-type]
    assert (list(filled.token_ids), list(filled.stop_token_ids)) == ([1, 2], [3])
    with pytest.raises(RyzansteinError) as refused:
        await texts.infill(Links("older"), "demo", "a", "b")  # type: ignore[arg-type]
    assert refused.value.reason == "NODES_TOO_OLD"
