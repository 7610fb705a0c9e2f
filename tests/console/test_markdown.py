"""Markdown as a tree: nothing of the text is lost or made up, whatever it is, and seams change nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ryzanstein.client import clean
from ryzanstein.console.answers.markdown import KINDS, SEAM, Element, flat, is_plain, parse, pieces, safe, tree_of

MARKS = "`*_~[]()<>#-+|!&\\:\n \t0123456789.abc\u00e9\U0001f600"
written = st.one_of(st.text(max_size=200), st.text(MARKS, max_size=300))
anything = st.one_of(written, st.text(st.characters(categories=["Cc", "Cf", "Cs", "Co", "Cn"]), max_size=50))


class _Text(HTMLParser):
    """The text of what another renderer made of the same source."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.feed(html)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.text += dict(attributes).get("alt") or "image"


def kinds(tree: Sequence[Element | str]) -> set[str]:
    return {name for each in tree if isinstance(each, Element) for name in ({each.kind} | kinds(each.children))}


def addresses(tree: Sequence[Element | str]) -> list[str]:
    found = [str(each.attr) for each in tree if isinstance(each, Element) and each.kind in ("a", "img")]
    return found + [name for each in tree if isinstance(each, Element) for name in addresses(each.children)]


def seams(tree: Sequence[Element | str]) -> list[int]:
    found = []
    for each in tree:
        if isinstance(each, Element):
            found += [int(each.attr or 0)] if each.kind == "seam" else seams(each.children)
    return found


def squeezed(text: str) -> str:
    return "".join(text.split())


@given(written.filter(lambda text: "![" not in text))
def test_the_tree_has_the_text_that_another_renderer_shows(text: str) -> None:
    source = safe(text)
    html = MarkdownIt("js-default", {"html": False, "maxNesting": 20}).render(source)
    assert squeezed(flat(parse(source))) == squeezed(_Text(html).text)


@given(anything)
def test_every_text_becomes_known_kinds_and_safe_addresses(text: str) -> None:
    tree = parse(safe(text))
    assert kinds(tree) <= KINDS
    assert all(each.lower().startswith(("http://", "https://", "mailto:")) for each in addresses(tree))
    assert SEAM not in flat(tree)


@given(anything)
def test_text_without_marks_is_the_text_itself(text: str) -> None:
    text = "".join(each for each in safe(text) if each.isalnum())
    assert flat(parse(text)) == text


@given(written, st.lists(st.integers(0, 300), max_size=5))
def test_seams_change_no_text_and_are_there_in_order(text: str, places: list[int]) -> None:
    source = safe(text)
    at = sorted(min(place, len(source)) for place in places)
    tree = parse(source, at)
    assert flat(tree) == flat(parse(source))
    assert seams(tree) == list(range(len(at)))


@pytest.mark.parametrize(
    ("source", "place", "before"),
    [
        ("one two three", 4, "one "),
        ("one **two three** four", 8, "one tw"),
        ("one **two** three four", 5, "one two"),  # between two stars it would end the emphasis
        ("see [here](http://a.example/x) now", 15, "see here"),
        ("a `code span` b", 7, "a code"),
        ("[x](http://a.example/b)", 10, "x"),
    ],
)
def test_a_seam_stands_where_it_is_or_at_the_next_space_or_at_the_end(source: str, place: int, before: str) -> None:
    tree = parse(source, [place])
    assert flat(tree) == flat(parse(source))
    assert _before_seam(tree) == (before, True)


def _before_seam(tree: Sequence[Element | str]) -> tuple[str, bool]:
    text = ""
    for each in tree:
        if isinstance(each, str):
            text += each
        elif each.kind == "seam":
            return text, True
        else:
            inside, found = _before_seam(each.children)
            text += inside
            if found:
                return text, True
    return text, False


@given(st.lists(st.one_of(written, st.sampled_from(["```\n", "\n\n", "- a\n", "  b\n", "~~~py\n", "x" * 9000])), max_size=8))
@settings(max_examples=60)
def test_pieces_are_all_of_the_text_and_those_that_are_complete_stay(texts: list[str]) -> None:
    text = safe("".join(texts))
    whole = pieces(text, final=True)
    assert "".join(text[each.start : each.end] for each in whole) == text
    assert all(each.end - each.start <= 8192 for each in whole)
    assert all(kinds(tree_of(text[each.start : each.end], (), each.how)) <= KINDS for each in whole)
    complete = pieces(text)
    assert whole[: len(complete)] == complete


def test_a_block_ends_at_a_blank_line_outside_of_fences_and_lists() -> None:
    text = "one\ntwo\n\n- a\n\n  b\n\n```\nx\n\ny\n```\n\nend"
    assert [text[each.start : each.end] for each in pieces(text, final=True)] == [
        "one\ntwo\n\n",
        "- a\n\n  b\n\n",
        "```\nx\n\ny\n```\n\n",
        "end",
    ]


@pytest.mark.parametrize("text", ["[" * 20_000, "*a_" * 5_000, "x" * 10_000])
def test_what_could_take_long_is_shown_as_it_is(text: str) -> None:
    assert is_plain(text)
    (block,) = parse(text)
    assert isinstance(block, Element)
    assert (block.kind, flat([block])) == ("plain", text)


@pytest.mark.parametrize("unit", ["[", "> ", "- ", "|a", "`", "*a ", "a\n", "![", "<", "&amp;", "1. ", "\\", "~~", "[a](", "#"])
def test_no_block_takes_long(unit: str) -> None:
    text = (unit * 8192)[:8192]
    began = time.process_time()
    for each in pieces(text, final=True):
        tree_of(text[each.start : each.end], (), each.how)
    assert time.process_time() - began < 5.0


def test_images_are_links_and_dangerous_schemes_are_text() -> None:
    tree = parse("![seen](https://a.example/b.png) [x](javascript:alert(1)) ![y](data:image/svg+xml,z) [m](mailto:a@b.example)")
    assert addresses(tree) == ["https://a.example/b.png", "mailto:a@b.example"]


def test_the_marks_of_seams_in_a_models_text_are_replaced() -> None:
    assert safe(f"a{SEAM}b\u202ec\x1b[2J") == "a\ufffdbc[2J"
    assert safe("plain") == clean("plain")
