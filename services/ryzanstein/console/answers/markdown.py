"""Markdown of a model as a tree of few kinds, from which the page makes elements without ever reading HTML.

A seam is where another node goes on. It goes through the parser as a noncharacter, so that every text knows who wrote it. An
unknown kind of token becomes its text, and a block that would take long is shown as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Literal, Union

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ryzanstein.client import clean

SEAM = "\ufdd0"
MOST_CHARS = 8192
"""Characters of a block that is parsed."""
MOST_DELIMITERS = 500
MOST_SEAMS = 8
"""Seams in one block whose exact place is looked for; with more they are all at its end."""
MOST_OPEN = 1024
"""Characters of a block that is parsed again and again while it grows."""
How = Literal["markdown", "plain", "code"]
KINDS = frozenset(
    {"p", "h", "ul", "ol", "li", "quote", "pre", "code", "em", "strong", "del", "a", "img", "br", "hr"}
    | {"table", "tr", "th", "td", "seam", "plain"}
)
_DELIMITERS = re.compile(r"[\[\]*_`~<&\\]")
_SCHEMES = re.compile("(?:https?://|mailto:)", re.IGNORECASE)
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
_MAX_NESTING = 20
_NAMES = {
    "paragraph": "p",
    "heading": "h",
    "ordered_list": "ol",
    "hardbreak": "br",
    "hr": "hr",
    "bullet_list": "ul",
    "list_item": "li",
    "blockquote": "quote",
    "table": "table",
    "tr": "tr",
    "em": "em",
    "strong": "strong",
    "s": "del",
    "th": "th",
    "td": "td",
}
_THROUGH = frozenset({"thead", "tbody"})


class Element(msgspec.Struct, array_like=True, frozen=True):
    """A node of the tree. `attr` is a level, a first number, a language, an address, an alignment, or the number of a seam."""

    kind: str
    attr: int | str | None
    children: list[Union[Element, str]]  # noqa: UP007 (msgspec reads it at run time)


Tree = list[Element | str]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a text that never changes again: Markdown, or a piece of a block that is too long to be parsed."""

    start: int
    end: int
    how: How
    after: Within


@dataclass(frozen=True, slots=True)
class Within:
    """What a text begins in: the mark of a fence that is open, and how the text is read."""

    fence: str = ""
    how: How = "markdown"


OUTSIDE = Within()


def safe(text: str) -> str:
    """Returns a model's text without what a page would obey, and without the character that marks seams."""
    return clean(text).replace(SEAM, "\ufffd")


def parse(source: str, seams: Sequence[int] = ()) -> Tree:
    """Returns the tree of a block. `seams` are places in it, in order; the seam at place i has the number i."""
    if is_plain(source):
        return tree_of(source, seams, "plain")
    plain = _tree(source)
    if not seams:
        return plain
    places = [] if len(seams) > MOST_SEAMS else _places(source, seams, plain)
    inside = _tree(_marked(source, places)) if places else plain
    return [*inside, *(Element("seam", number, []) for number in range(len(places), len(seams)))]


def tree_of(source: str, seams: Sequence[int], how: How) -> Tree:
    """Returns the tree of a piece. `seams` are places in it, in order; the seam at place i has the number i."""
    if how == "markdown":
        return parse(source, seams)
    if how == "code":
        *before, last = source.rstrip("\n").split("\n")
        if before and _FENCE.match(last):
            source = source[: len("\n".join(before)) + 1]
        return [Element("pre", None, _split(_marked(source, [min(each, len(source)) for each in seams]), count()))]
    return [Element("plain", None, _split(_marked(source, seams), count()))]


def is_plain(source: str) -> bool:
    """Returns whether a block is shown as it is, because parsing it could take long."""
    return len(source) > MOST_CHARS or len(_DELIMITERS.findall(source)) > MOST_DELIMITERS


def flat(tree: Sequence[Element | str]) -> str:
    """Returns the text of a tree, without its seams."""
    return "".join(each if isinstance(each, str) else flat(each.children) for each in tree)


def pieces(text: str, before: Within = OUTSIDE, *, final: bool = False) -> list[TextPiece]:
    """Divides a text that still grows. Returns what is complete.

    A block ends at a blank line outside of a fence, before a line that begins without a space, which it would need to belong to
    a list. Long lists also end between items, long blocks anywhere. `final`: nothing follows, and the rest is a piece too.
    """
    cut = _Cutting(before)
    for line in text.splitlines(keepends=True):
        cut.line(line)
    if final and cut.start < len(text):
        cut.end(len(text), cut.how, OUTSIDE)
    return cut.found


class _Cutting:
    """A walk through lines that notes the ends of pieces."""

    def __init__(self, before: Within) -> None:
        self.found: list[TextPiece] = []
        self.fence = before.fence
        self.how: How = before.how
        self.start = self._at = 0
        self._blank = False

    def line(self, line: str) -> None:
        if self._ends_before(line):
            self.end(self._at, self.how, OUTSIDE)
        while self._at + len(line) - self.start > MOST_CHARS:
            self._cut_long(line)
            if self.start > self._at:
                line, self._at = line[self.start - self._at :], self.start
        self._at += len(line)
        self._blank = not line.strip()
        if found := _FENCE.match(line):
            self._fenced(*found.groups())

    def end(self, at: int, how: How, after: Within) -> None:
        self.found.append(TextPiece(self.start, at, how, after))
        self.start, self.how = at, after.how

    def _ends_before(self, line: str) -> bool:
        if self.fence or self.start == self._at:
            return False
        if self._blank:
            return bool(line.strip()) and line[0] not in " \t"
        return self._at - self.start > MOST_OPEN and _ITEM.match(line) is not None

    def _cut_long(self, line: str) -> None:
        """Ends a piece that is too long, before this line or within it."""
        at = self._at if self._at > self.start else self.start + MOST_CHARS
        if self.fence:
            self.end(at, self.how, Within(self.fence, "code"))
        else:
            self.end(at, "plain", Within("", "plain"))

    def _fenced(self, mark: str, info: str) -> None:
        if not self.fence:
            self.fence = mark if "`" not in info or mark[0] == "~" else ""
        elif mark.startswith(self.fence) and not info.strip():
            self.fence = ""
            if self.how == "code":
                self.end(self._at, "code", OUTSIDE)


def _places(source: str, seams: Sequence[int], plain: Tree) -> list[int]:
    """Returns where seams can be without changing what the source says. A seam that has no such place, and those after it, are
    not in the list."""
    places: list[int] = []
    for seam in seams:
        space = source.find(" ", seam)
        for place in (seam, space):
            if place >= 0 and (not places or place >= places[-1]):
                marked = _tree(_marked(source, [*places, place]))
                if _num_seams(marked) == len(places) + 1 and _unmarked(marked) == plain:
                    places.append(place)
                    break
        else:
            return places
    return places


def _marked(source: str, places: Sequence[int]) -> str:
    ends = [0, *places, len(source)]
    return SEAM.join(source[start:end] for start, end in pairwise(ends))


def _num_seams(tree: Sequence[Element | str]) -> int:
    return sum((each.kind == "seam") + _num_seams(each.children) for each in tree if isinstance(each, Element))


def _unmarked(tree: Sequence[Element | str]) -> Tree:
    """Returns the tree without its seams; texts that they divided are one again."""
    whole: Tree = []
    for each in tree:
        if isinstance(each, str):
            if whole and isinstance(whole[-1], str):
                whole[-1] += each
            else:
                whole.append(each)
        elif each.kind != "seam":
            whole.append(Element(each.kind, each.attr, _unmarked(each.children)))
    return whole


def _split(text: str, numbers: Iterator[int]) -> Tree:
    """Returns a text with elements where its seams are."""
    first, *rest = text.split(SEAM)
    pieces: Tree = [first] if first else []
    for each in rest:
        pieces.append(Element("seam", next(numbers), []))
        if each:
            pieces.append(each)
    return pieces


_PARSER = MarkdownIt("js-default", {"html": False, "linkify": False, "typographer": False, "maxNesting": _MAX_NESTING})


def _tree(source: str) -> Tree:
    """Returns the tree of a source, with the seams in it."""
    numbers = count()
    return _unsplit(_nested(iter(_PARSER.parse(source)), numbers))


def _unsplit(tree: Tree) -> Tree:
    """Returns the tree with texts that stand beside each other as one."""
    whole: Tree = []
    for each in tree:
        if isinstance(each, str) and whole and isinstance(whole[-1], str):
            whole[-1] += each
        elif isinstance(each, str) or each.kind == "seam":
            whole.append(each)
        else:
            whole.append(Element(each.kind, each.attr, _unsplit(each.children)))
    return whole


def _nested(tokens: Iterator[Token], numbers: Iterator[int]) -> Tree:
    """Returns what comes before the end of the element in which the tokens are."""
    found: Tree = []
    for token in tokens:
        if token.nesting < 0:
            break
        if token.nesting > 0:
            children = _nested(tokens, numbers)
            found += _opened(token, children)
        else:
            found += _alone(token, numbers)
    return found


def _opened(token: Token, children: Tree) -> Tree:
    """Returns an element with children, or only these where the page has no such element."""
    name, attr = token.type.removesuffix("_open"), None
    if name in _THROUGH or token.hidden:
        return children
    match name:
        case "link":
            return _link("a", str(token.attrs.get("href", "")), children)
        case "heading":
            attr = int(token.tag[1:])
        case "ordered_list":
            attr = _first_number(token)
        case "th" | "td":
            return [Element(name, _alignment(token), children)]
    return [Element(_NAMES[name], attr, children)] if name in _NAMES else children


def _alone(token: Token, numbers: Iterator[int]) -> Tree:
    """Returns what a token without an end is; its text, where the page has no such element."""
    match token.type:
        case "inline":
            return _nested(iter(token.children or ()), numbers)
        case "hardbreak" | "hr":
            return [Element(_NAMES[token.type], None, [])]
        case "code_inline":
            return [Element("code", None, _split(token.content, numbers))]
        case "fence" | "code_block":
            language = token.info.split(maxsplit=1)[0][:32] if token.info.strip() else None
            return [Element("pre", language, _split(token.content, numbers))]
        case "image":
            shown = _nested(iter(token.children or ()), numbers) or ["image"]
            return _link("img", str(token.attrs.get("src", "")), shown)
    return _split("\n" if token.type == "softbreak" else token.content, numbers)


def _link(kind: str, address: str, children: Tree) -> Tree:
    """Returns a link, or only its text where the address is of another scheme than a page may follow."""
    return [Element(kind, address, children)] if _SCHEMES.match(address) else children


def _first_number(token: Token) -> int | None:
    start: Any = token.attrs.get("start")
    return int(start) if start is not None else None


def _alignment(token: Token) -> str | None:
    _, _, side = str(token.attrs.get("style", "")).partition("text-align:")
    return side if side in ("left", "right", "center") else None
