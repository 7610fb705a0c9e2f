from __future__ import annotations

import io

import pytest
from rich.console import Console

from ryzanstein.lab.bench.engine.engine import Load, Workload
from ryzanstein.lab.bench.engine.peers.comparison import PeerOutcome
from ryzanstein.lab.bench.engine.peers.contenders import Label
from ryzanstein.lab.bench.engine.peers.footprint import Footprint
from ryzanstein.lab.bench.engine.peers.machine import PeerMachine
from ryzanstein.lab.bench.engine.peers.report import PeerReport
from ryzanstein.lab.bench.engine.peers.timing import Timing

OURS, PEER, BROKEN = Label("ryzanstein", "none", 1), Label("peer", "int8", 1), Label("broken", "int8", 1)
ONE, EIGHT, PREFILL = Load(1, 128, 64), Load(8, 128, 64), Load(1, 2000, 1)


def timing(tokens_per_s: float, peak_rss_bytes: int) -> Timing:
    return Timing(tokens_per_s, tokens_per_s, 0.5, peak_rss_bytes, 1.0, (7,))


@pytest.fixture
def report() -> PeerReport:
    timings = {
        (OURS, ONE): {0: timing(10, 2**20), 1: timing(30, 2**22), 2: timing(20, 2**20)},
        (PEER, ONE): {0: timing(5, 2**20), 1: timing(10, 2**20), 2: timing(20, 2**20)},
        (OURS, EIGHT): {0: timing(80, 2**20)},
        (OURS, PREFILL): {0: timing(2, 2**20)},
    }
    outcome = PeerOutcome(timings, {BROKEN: "ended with 3: no"}, {PEER: {"peer": "1.0"}}, [9e9, 1e10])
    workload = Workload((1, 8), 128, 64, 3, prefill_tokens=2000)
    footprints = {OURS: Footprint(2e8, 5_000_000)}
    absent = {Label("gone", "none", 2): "not installed"}
    return PeerReport("S", PeerMachine.read(), workload, 2, outcome, absent, footprints)


def test_a_row_has_medians_the_highest_memory_and_every_round(report: PeerReport) -> None:
    row = report.document()["results"][0]
    assert (row["engine"], row["batch"], row["prompt_tokens"], row["new_tokens"]) == ("ryzanstein", 1, 128, 64)
    assert (row["total_tokens_per_s"], row["peak_rss_bytes"]) == (20, 2**22)
    assert [done["total_tokens_per_s"] for done in row["rounds"]] == [10, 30, 20]


def test_a_prompt_alone_is_a_row_of_its_own(report: PeerReport) -> None:
    rows = [(row["batch"], row["prompt_tokens"], row["new_tokens"]) for row in report.document()["results"]]
    assert rows == [(1, 128, 64), (1, 128, 64), (8, 128, 64), (1, 2000, 1)]


def test_one_sequences_decode_is_a_share_of_the_most_that_was_read(report: PeerReport) -> None:
    document = report.document()
    assert document["read_bytes_per_s"] == [9e9, 1e10]
    assert document["footprints"] == {"ryzanstein none tp 1": {"step_bytes": 2e8, "memory_bound_bytes": 5_000_000}}
    assert [row["share_of_bandwidth"] for row in document["results"]] == [20 * 2e8 / 1e10, None, None, None]


def test_a_ratio_names_both_and_has_its_bounds(report: PeerReport) -> None:
    [ratio] = report.document()["ratios"]
    assert (ratio["engine"], ratio["peer"], ratio["batch"]) == (
        "ryzanstein",
        {"engine": "peer", "quantization": "int8", "tp": 1},
        1,
    )
    assert ratio["total_tokens_per_s"] == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_who_did_not_run_is_listed_with_the_reason(report: PeerReport) -> None:
    document = report.document()
    assert document["absent"] == [{"engine": "gone", "quantization": "none", "tp": 2, "reason": "not installed"}]
    assert document["failed"] == [{"engine": "broken", "quantization": "int8", "tp": 1, "reason": "ended with 3: no"}]


def test_the_tables_show_speeds_ratios_and_who_did_not_run(report: PeerReport) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    for table in report.tables():
        console.print(table)
    text = console.export_text()
    assert "20, 20, 500 ms, 4 MiB" in text
    assert "40%" in text
    assert "4, 5 MB" in text
    assert "2.00 (1.00 to 3.00)" in text
    assert "not installed" in text
    assert "ended with 3: no" in text
