"""What a router knows of a node's adapters, report by report."""

from __future__ import annotations

import random

from ryzanstein.adapters import MAX_ADAPTERS, AdapterReport, NodeAdapter
from ryzanstein.generation.request import AdapterRef
from ryzanstein.router.nodes.links.adapters import LinkAdapters
from ryzanstein.wire.adapters import report_to_wire

ONE, TWO = b"1" * 32, b"2" * 32


def adapter(name: str, digest: bytes = ONE, *, resident: bool = False) -> NodeAdapter:
    return NodeAdapter(AdapterRef(name, digest), 1, resident)


def take(link: LinkAdapters, *adapters: NodeAdapter, whole: bool = False, replaced: tuple[AdapterRef, ...] = ()) -> bool:
    return link.take(report_to_wire(AdapterReport(adapters, whole, replaced)))


def test_only_other_contents_and_names_are_news() -> None:
    link = LinkAdapters()
    assert take(link, adapter("a"), adapter("b"), whole=True)
    assert not take(link, adapter("a", resident=True))
    assert not take(link, adapter("b"), adapter("a"), whole=True)
    assert take(link, adapter("a", TWO))
    assert take(link, adapter("c"))
    assert take(link, adapter("a", TWO), whole=True)
    assert [each.ref.name for each in link] == ["a"]


def test_a_content_is_there_as_long_as_a_name_has_it_or_requests_may_still_ask_for_it() -> None:
    link = LinkAdapters()
    take(link, adapter("a"), adapter("b"), whole=True)
    take(link, adapter("a", TWO), replaced=(AdapterRef("a", ONE),))
    take(link, adapter("b", TWO))
    assert link.has(ONE)
    assert {each.ref.digest for each in link} == {TWO}
    take(link, adapter("a", TWO, resident=True))
    assert link.has(ONE), "a report of one that came into memory says nothing of others"
    take(link, adapter("a", TWO), whole=True)
    assert not link.has(ONE)
    take(link, adapter("a", TWO), whole=True, replaced=(AdapterRef("a", ONE),))
    assert link.has(ONE)
    link.forget()
    assert not link.has(ONE)
    assert not link.has(TWO)
    assert list(link) == []


def test_any_reports_lead_to_what_the_node_has() -> None:
    for seed in range(20):
        rng, link, node = random.Random(seed), LinkAdapters(), dict[str, NodeAdapter]()
        for _ in range(100):
            name, content = rng.choice("abcdef"), bytes([rng.randrange(3)]) * 32
            if rng.random() < 0.3:
                node.pop(name, None)
                take(link, *node.values(), whole=True)
            else:
                node[name] = adapter(name, content)
                take(link, node[name])
            assert dict(link.by_name) == node
            assert {bytes([n]) * 32 for n in range(3) if link.has(bytes([n]) * 32)} == {x.ref.digest for x in node.values()}


def test_no_more_are_kept_than_there_may_be() -> None:
    link = LinkAdapters()
    take(link, *(adapter(f"{number}") for number in range(MAX_ADAPTERS)), whole=True)
    assert not take(link, adapter("one more", TWO))
    assert len(list(link)) == MAX_ADAPTERS
    assert not link.has(TWO)
    assert take(link, adapter("0", TWO)), "one that is known may change"
    assert link.has(TWO)
