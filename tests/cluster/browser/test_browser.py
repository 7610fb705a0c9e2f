"""A browser's pages and a router: what a page of an allowed origin sees, and what one of another origin cannot do."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cluster.browser.pages import CuttingProxy, PageServer, page_server, report_of

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OPENAI = Path("build/browser/node_modules/openai")
TWELVE = "1 2 3 4 5 6 7 8 9 10 11 12"
_REPORT_S = 120.0


class Reports(NamedTuple):
    """What the page saw from an allowed origin and from another; how many streams were cut; what the other began."""

    allowed: dict[str, Any]
    foreign: dict[str, Any]
    cut: int
    begun_by_foreign: float


@pytest.fixture(scope="module")
def reports() -> Iterator[Reports]:
    assert OPENAI.is_dir(), "the npm package openai is needed: bash .ci/parts browser"
    with page_server(OPENAI.resolve()) as allowed, page_server(OPENAI.resolve()) as foreign:
        flags = ("--http-cors-origins", f"http://example.org,{allowed.origin}", "--http-max-body-bytes", "65536")
        with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, router_flags=flags)) as cluster:
            yield _reports(cluster, allowed, foreign)


def _reports(cluster: LocalCluster, allowed: PageServer, foreign: PageServer) -> Reports:
    url = cluster.http_url
    proxy = CuttingProxy(int(url.rpartition(":")[2]), 100_000)
    try:
        seen = report_of(allowed, _REPORT_S, api=url, cut=proxy.url)
        before = _generations(url)
        unseen = report_of(foreign, _REPORT_S, api=url, cut=proxy.url)
        return Reports(seen, unseen, proxy.cut, _generations(url) - before)
    finally:
        proxy.close()


def _generations(url: str) -> float:
    """Returns how many generations the router has begun."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ryzanstein_router_generations_total"))


def test_a_page_streams_an_answer_with_headers_that_need_a_preflight(reports: Reports) -> None:
    seen = reports.allowed["fetch"]
    assert (seen["status"], seen["last"]) == (200, "[DONE]")
    assert seen["text"].startswith(TWELVE)
    assert seen["type"].startswith("text/event-stream")
    assert seen["requestId"]


def test_an_event_source_goes_on_behind_its_last_event_when_its_connection_breaks(reports: Reports) -> None:
    events = reports.allowed["events"]
    assert events["seen"]["text"] == events["text"]
    assert events["seen"]["opened"] == 2
    assert reports.cut == 1
    assert len(set(events["seen"]["ids"])) == len(events["seen"]["ids"])


def test_a_page_opens_a_web_socket_with_its_subprotocol_alone(reports: Reports) -> None:
    seen = reports.allowed["socket"]
    assert (seen["protocol"], seen["types"], seen["code"]) == ("ryzanstein.v1", ["accepted", "started", "done"], 1000)
    assert seen["text"].startswith(TWELVE)
    assert reports.allowed["wrongSocket"] == {"protocol": "", "text": "", "types": [], "code": 1006}


def test_the_official_client_works_in_a_page(reports: Reports) -> None:
    seen = reports.allowed["openai"]
    assert seen["text"].startswith(TWELVE)
    assert seen["response"].startswith(TWELVE)
    assert seen["models"] == ["demo"]
    assert (seen["refused"]["status"], seen["refused"]["code"]) == (404, "model_not_found")
    assert seen["refused"]["requestID"]


def test_a_page_can_read_why_it_is_refused_and_cancel_what_it_began(reports: Reports) -> None:
    assert [answer["status"] for answer in reports.allowed["refusals"]] == [400, 413]
    assert reports.allowed["refusals"][1]["code"] == "body_too_large"
    assert reports.allowed["cancelled"] == 200


def test_a_page_of_another_origin_reads_nothing_and_begins_nothing(reports: Reports) -> None:
    unseen = reports.foreign
    for name in ("fetch", "events", "openai", "refusals", "cancelled", "models"):
        assert "failed" in unseen[name], unseen[name]
    for name in ("socket", "wrongSocket"):
        assert unseen[name] == {"protocol": "", "text": "", "types": [], "code": 1006}
    assert unseen["blind"] == "opaque"  # it was answered, with a refusal that the page cannot see
    assert reports.begun_by_foreign == 0
