"""What counts as a miss, and what the page and the document say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ryzanstein.lab.chaos.catalog import chosen
from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.report.budget import BudgetRow, Quantiles, summed
from ryzanstein.lab.chaos.report.document import CampaignFacts, document
from ryzanstein.lab.chaos.report.page import page
from ryzanstein.lab.chaos.trial.observation import Observation

TIMES = {
    "detected_s": 0.01,
    "rerouted_s": 0.002,
    "first_token_s": 0.1,
    "serving_s": 2.0,
    "whole_s": 3.0,
    "spared_pause_s": 0.02,
}
GOOD = Observation("", 0, "greedy", 20, 2, **TIMES)  # type: ignore[arg-type]


def fault(name: str) -> Fault:
    (found,) = chosen([name])
    return found


def row(name: str, **changes: object) -> BudgetRow:
    """Thirty runs, the last of them otherwise."""
    last = replace(GOOD, **changes)  # type: ignore[arg-type]
    return summed(fault(name), [*[GOOD] * 29, last])


def test_of_thirty_runs_p99_is_the_greatest_and_what_never_happened_has_none() -> None:
    values = [float(i) for i in range(1, 31)]
    assert Quantiles.of(values) == Quantiles(30, 15.0, 30.0)
    assert Quantiles.of([None, 2.0]) == Quantiles(1, 2.0, 2.0)
    assert Quantiles.of([None]) == Quantiles(0, None, None)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("sigkill_agent", {"lost": 1}, "1 tokens lost"),
        ("sigkill_agent", {"repeated": 2}, "2 tokens repeated"),
        ("sigkill_agent", {"changed": 1}, "1 answers changed"),
        ("sigkill_agent", {"failed": 1}, "1 requests failed"),
        ("sigkill_agent", {"detected_s": 0.05}, "detected p99 0.05 s, not < 0.05 s"),
        ("sigkill_agent", {"detected_s": None}, "detected in only 29 of 30 runs"),
        ("sigkill_agent", {"rerouted_s": 0.1}, "re-routed p99 0.1 s, not < 0.1 s"),
        ("sigkill_rank_0", {"serving_s": 5.5}, "rank restart to SERVING p99 5.5 s, not < 5 s"),
        ("sigkill_rank_0", {"serving_s": None}, "rank restart to SERVING in only 29 of 30 runs"),
        ("sigkill_agent", {"whole_s": None}, "not recovered in 1 of 30 runs"),
        ("busy_cpu", {"beats": 100, "alarms": 2}, "2 false alarms in 100 beats"),
        ("all_nodes_3s", {"lost": 1}, "1 tokens lost"),
        ("object_node_killed", {"formed": 5, "invalid": 1}, "1 answers invalid"),
        ("object_node_killed", {}, "no answer with a form finished"),
        ("alone_rank_0_killed", {"failed": 1}, "1 requests failed"),
        ("model_rank_killed", {"spared_pause_s": 0.5}, "pauses of other models p99 0.5 s, not < 0.5 s"),
        ("model_rank_killed", {"spared_pause_s": None}, "pauses of other models in only 29 of 30 runs"),
        ("model_rank_killed", {"unwanted": Counter({"moved": 1})}, "moved x1"),
        ("idle_hour", {"unwanted": Counter({"node: ranks lost": 2})}, "node: ranks lost x2"),
    ],
)
def test_a_single_bad_run_is_a_miss(name: str, changes: dict[str, object], says: str) -> None:
    assert says in row(name, **changes).misses


@pytest.mark.parametrize("name", ["sigkill_agent", "sigkill_rank_0", "busy_cpu", "all_nodes_3s", "model_rank_killed"])
def test_what_is_within_its_bounds_is_no_miss(name: str) -> None:
    assert row(name, beats=1000, alarms=9, rerouted_s=None).kept


def test_where_no_node_is_left_a_request_may_fail() -> None:
    assert row("all_nodes_3s", failed=3).kept


def test_the_document_has_what_scripts_rely_on() -> None:
    made = CampaignFacts("command", "seed", 30, 6, 60.0, {"tcp_reset": "no namespaces"})
    text = document([row("sigkill_agent", lost=1)], made)
    (entry,) = text["faults"]
    assert entry["fault"] == "sigkill_agent"
    assert entry["runs"] == 30
    for key in ("detected_s", "rerouted_s", "first_token_s"):
        assert {"p50", "p99"} <= entry[key].keys()
    assert (entry["tokens_lost"], entry["tokens_repeated"], entry["requests_failed"]) == (1, 0, 0)
    assert entry["missed"] == ["1 tokens lost"]


def test_the_page_shows_figures_misses_and_what_was_not_run() -> None:
    made = CampaignFacts(".venv/bin/ryzanstein bench failover --runs 30", "seed", 30, 6, 60.0, {"tcp_reset": "no namespaces"})
    rows = [
        row("sigkill_agent", lost=7, failures=("greedy: 7 gone",)),
        row("sigkill_rank_0", startup_s={"import": 1.5}),
        row("busy_cpu"),
        row("model_rank_killed", spared=9, unwanted=Counter({"moved": 2})),
    ]
    text = page([replace(rows[0], troubles=Counter({"UNAVAILABLE": 3})), *rows[1:]], made)
    assert "    .venv/bin/ryzanstein bench failover --runs 30" in text
    assert "- `sigkill_agent`: 7 tokens lost" in text
    assert "greedy: 7 gone" in text
    assert "- `tcp_reset`: not run: no namespaces" in text
    assert "UNAVAILABLE x3" in text
    assert "| import |" in text
    assert "| `model_rank_killed` | 9 | 0.020 / 0.020 [< 0.5] | - | moved x2 | 30 |" in text
    assert "False alarms" in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in tables)
