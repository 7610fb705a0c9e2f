"""The pages agree with the tree: named files exist, links lead somewhere, the rooms are those of the contracts."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")))
GUIDES = ("docs/internals/architecture.md", "docs/concepts/request.md", "CONTRIBUTING.md")
# A path with a folder in it, as `router/nodes` or `tests/test_awake.py`.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
_BASES = ("", "services/ryzanstein", "services/ryzanstein/router", "shared/ryzanstein")


@pytest.mark.parametrize("page", GUIDES)
def test_every_path_that_a_guide_names_exists(page: str) -> None:
    named = set(_PATH.findall((ROOT / page).read_text()))
    assert named
    missing = sorted(path for path in named if not any((ROOT / base / path).exists() for base in _BASES))
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`(tests/[\w./-]+)`", page.read_text()))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as a Markdown viewer makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", page.read_text())
    pages = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in links]
    assert [(target.name, anchor) for target, anchor in pages if anchor not in anchors_of(target)] == []


def test_every_page_is_reached_from_the_list_of_pages() -> None:
    folder = ROOT / "docs"
    linked = {(folder / link).resolve() for link in re.findall(r"\]\(([^)#\s:]+)", (folder / "README.md").read_text())}
    pages = {page for page in folder.rglob("*.md") if "runbooks" not in page.parts} - {folder / "README.md"}
    assert sorted(str(page) for page in pages - linked) == []


def test_the_pages_stay_few_and_short() -> None:
    """Besides the runbooks. What draws a table is no word. Adapters, standbys, choices, gRPC, handshakes took the last."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "runbooks" not in page.parts]
    assert len(pages) <= 45
    assert sum(len(re.sub(r"\||-{3,}", " ", page.read_text()).split()) for page in pages) <= 79_900
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("service", ["router", "worker"])
def test_the_architectures_page_has_the_rooms_of_the_contracts_floor_by_floor(service: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == [f"ryzanstein.{service}"])
    contracted = {len(layers) - i: set(floor.split(" | ")) for i, floor in enumerate(layers)}
    page = (ROOT / "docs/internals/architecture.md").read_text()
    (section,) = re.findall(rf"`services/ryzanstein/{service}`\n(.*?)\n#", page, flags=re.DOTALL)
    described: dict[int, set[str]] = {}
    for floor, rooms in re.findall(r"^\| (\d+) \| ([^|]+) \|", section, flags=re.MULTILINE):
        described.setdefault(int(floor), set()).update(room.split("/")[0] for room in re.findall(r"`([\w/]+)`", rooms))
    assert described == contracted


def test_every_target_that_contributing_names_is_in_the_makefile() -> None:
    named = set(re.findall(r"^    make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE))
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert named <= set(re.findall(r"make ([\w-]+)", listed))
