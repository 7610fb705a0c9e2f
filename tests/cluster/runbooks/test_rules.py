"""What every runbook page must have, held without a cluster: a page per fault, commands that can fail, metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.lab.chaos.catalog import CATALOG
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.telemetry import KeyMetrics
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.worker.telemetry import WorkerTelemetry

FOLDER = Path(__file__).parents[3] / "docs" / "operate" / "runbooks"
INDEX = dict(
    re.findall(r"^\| `([a-z0-9_]+)` \| \[[\w-]+\]\(([\w-]+)\.md\) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
)
SECTIONS = ["Symptom", "What fires", "Look", "Do", "Over"]
MAX_LINES = 100


def metric_names() -> set[str]:
    """As a scrape spells them."""
    registries = [made.registry for made in (RouterTelemetry(), WorkerTelemetry(), OrchestratorTelemetry())]
    KeyMetrics(registries[0])
    LimitMetrics(registries[0])
    for service, registry in zip(("router", "worker", "orchestrator"), registries, strict=True):
        TlsMetrics(service, registry)
    names = set()
    for family in (family for registry in registries for family in registry.collect()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in (*suffixes, "")}
    return names


def test_every_fault_that_the_laboratory_knows_has_a_page() -> None:
    assert {fault.name for fault in CATALOG} <= set(INDEX)


def test_the_index_and_the_pages_agree(pages: dict[str, Any]) -> None:
    assert set(INDEX.values()) == set(pages)
    for name, page in pages.items():
        assert page.faults == {fault for fault, where in INDEX.items() if where == name}, name


def test_every_page_has_its_sections_in_order_and_is_short(pages: dict[str, Any]) -> None:
    for name, page in pages.items():
        assert list(page.blocks) == SECTIONS, name
        assert len(page.text.splitlines()) <= MAX_LINES, name


def test_every_page_fires_looks_and_knows_its_end(pages: dict[str, Any]) -> None:
    for name, page in pages.items():
        assert page.expressions(), name
        assert page.commands("Look"), name
        assert page.commands("Over"), name


def test_every_command_outside_do_shows_output_that_can_be_missing(pages: dict[str, Any]) -> None:
    for name, page in pages.items():
        for section in ("What fires", "Look", "Over"):
            assert all(command.lines for command in page.commands(section)), (name, section)


def test_every_metric_of_the_runbooks_exists(pages: dict[str, Any]) -> None:
    known = metric_names()
    for name, page in pages.items():
        named = set(re.findall(r"ryzanstein_(?:router|worker|orchestrator)_[a-z_]*[a-z]", page.text))
        unknown = {metric for metric in named - known if not any(each.startswith(metric) for each in known)}
        assert not unknown, name


def test_every_link_of_the_runbooks_leads_somewhere() -> None:
    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_page_is_walked_through(pages: dict[str, Any]) -> None:
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*pages.py")))
    walked = set(re.findall(r'walk\(\s*\w+,\s*"([\w-]+)"', tests))
    assert walked == set(pages)
