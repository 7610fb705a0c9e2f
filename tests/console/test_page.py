"""The page's files: small, of our own, without HTML from strings, in colours that can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ryzanstein.console

STATIC = Path(next(iter(ryzanstein.console.__path__))) / "static"
FILES = sorted(STATIC.iterdir())


def test_the_page_weighs_little() -> None:
    assert sum(path.stat().st_size for path in FILES) < 120_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_reads_html_or_runs_text(path: Path) -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|eval\(|new Function|srcdoc"
    )
    assert re.findall(ways + r"|setHTML|style=|onclick=|javascript:", path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_host(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?|wss?)://\S+", text) == []


def palettes() -> dict[str, dict[str, str]]:
    """The colours of the light and of the dark scheme."""
    roots = re.findall(r":root \{(.*?)\}", (STATIC / "app.css").read_text(), re.DOTALL)
    assert len(roots) == 2
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", root)) for root in roots]
    return dict(zip(("light", "dark"), found, strict=True))


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(scheme: str) -> None:
    colours = palettes()[scheme]
    texts = [f"c{number}" for number in range(8)] + ["ink", "dim", "accent", "bad"]
    assert len({colours[name] for name in texts}) == len(texts)
    for ground in ("ground", "panel"):  # code in an answer stands on a panel
        for name in texts:
            bright, dark = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (name, ground)


def test_each_colour_has_an_underline_of_its_own() -> None:
    rule = r"\.moved \.part\.c(\d) \{.*?decoration-style: (\w+); text-decoration-thickness: (\w+);"
    rules = re.findall(rule, (STATIC / "app.css").read_text())
    assert [number for number, _, _ in rules] == [str(number) for number in range(8)]
    assert len({(style, thickness) for _, style, thickness in rules}) == 8
