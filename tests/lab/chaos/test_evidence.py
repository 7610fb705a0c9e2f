"""Log lines, counters and arrivals become figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.lab.chaos.catalog import chosen
from ryzanstein.lab.chaos.stage.logs import LogLine, LogReader, parse
from ryzanstein.lab.chaos.stage.scrape import BREAKER_STATE, moved
from ryzanstein.lab.chaos.trial import evidence
from ryzanstein.lab.chaos.trial.evidence import Moment
from ryzanstein.lab.clients.reading import AnswerReading, TokenArrival


def line(at: float, service: str, event: str, **fields: Any) -> LogLine:
    return LogLine(at, service, str(fields.pop("level", "info")), event, fields)


def reading(*arrivals: TokenArrival, broken_at: tuple[float, ...] = ()) -> AnswerReading:
    return AnswerReading("greedy", arrivals=list(arrivals), broken_at=list(broken_at))


def moment(*readings: AnswerReading, victims: frozenset[str] = frozenset({"node-1"}), calls: int = 1) -> Moment:
    return Moment(100.0, 50.0, dict.fromkeys(readings, calls), victims)


def test_detection_is_the_first_sign_after_the_strike_that_concerns_the_victim() -> None:
    (fault,) = chosen(["sigkill_agent"])
    lines = [
        line(99.0, "router-0", "link down", node_id="node-1"),
        line(100.1, "router-0", "link down", node_id="node-2"),
        line(100.2, "router-0", "something else", node_id="node-1"),
        line(100.25, "router-0", "link down", node_id="node-1"),
    ]
    seconds, by = evidence.detection(fault, lines, moment())
    assert seconds == pytest.approx(0.25)
    assert by == "router: link down"
    assert evidence.detection(fault, lines[:3], moment()) == (None, "")


def test_a_line_about_a_node_concerns_a_struck_model_of_it_and_one_about_its_other_model_does_not() -> None:
    (fault,) = chosen(["model_rank_killed"])
    struck = moment(victims=frozenset({"node-1/second"}))
    assert evidence.detection(fault, [line(100.1, "node-1", "ranks lost", node_id="node-1")], struck)[0] is not None
    other = line(100.1, "node-1", "ranks lost", node_id="node-1/third")
    assert evidence.detection(fault, [other, line(100.1, "node-0", "ranks lost", node_id="node-0")], struck)[0] is None
    lines = [line(100.1, "node-1", "ranks lost"), line(100.6, "node-1", "ranks ready", rank_0={"import": 0.5})]
    assert evidence.restart(lines, struck) == (pytest.approx(0.5), {"import": 0.5})


def test_where_the_router_dies_the_client_detects_it() -> None:
    (fault,) = chosen(["router_sigkill"])
    struck = moment(reading(broken_at=(49.0, 50.5)), reading(broken_at=(50.2,)))
    assert evidence.detection(fault, [], struck)[0] == pytest.approx(0.2)


def test_the_first_new_token_is_one_of_another_node_and_the_slowest_stream_counts() -> None:
    (fault,) = chosen(["sigkill_agent"])
    late_old = TokenArrival(50.1, "node-1", 1)
    slow = reading(late_old, TokenArrival(50.9, "node-2", 1), TokenArrival(51.5, "node-2", 1))
    fast = reading(TokenArrival(49.0, "node-2", 1), TokenArrival(50.3, "node-0", 1))
    assert evidence.first_token(fault, moment(slow, fast)) == pytest.approx(0.9)
    assert evidence.first_token(fault, moment(reading(late_old))) is None


def test_a_token_that_was_on_its_way_is_no_new_one() -> None:
    (fault,) = chosen(["late_rank_of_each_node"])
    struck = reading(TokenArrival(50.0 + fault.in_flight_s / 2, "node-1", 1), TokenArrival(52.0, "node-1", 1))
    assert evidence.first_token(fault, moment(struck)) == pytest.approx(2.0)


def test_what_an_idle_hour_must_not_lead_to_is_counted() -> None:
    idle, other = chosen(["sigkill_rank_0", "idle_hour"])[::-1]
    lines = [line(200, "node-1", "ranks lost"), line(201, "router-0", "link up"), line(202, "node-0", "ranks lost")]
    breakers = {f'{BREAKER_STATE}{{node_id="node-{number}"}}': float(number) for number in range(2)}
    assert evidence.unwanted(idle, lines, {"router-0": breakers}) == {"node: ranks lost": 2, "breaker open": 1}
    assert evidence.unwanted(idle, lines[1:2], {}) == Counter()
    assert evidence.unwanted(other, lines, {"router-0": breakers}) == Counter()


def test_after_a_rejoin_it_is_one_on_another_call() -> None:
    (fault,) = chosen(["client_gone_and_back"])
    joined = reading(TokenArrival(50.1, "node-1", 1), TokenArrival(50.6, "node-1", 2))
    assert evidence.first_token(fault, moment(joined)) == pytest.approx(0.6)


def test_rerouting_is_what_the_router_says_and_the_slowest_counts() -> None:
    lines = [
        line(at, "router-0", "generation failed over", detected_to_rerouted_s=s)
        for at, s in ((99, 9.0), (101, 0.1), (102, 0.3))
    ]
    assert evidence.rerouting(lines, moment()) == 0.3
    assert evidence.rerouting(lines[:1], moment()) is None


def test_a_restart_is_from_the_loss_to_ready_with_the_phases_of_the_slowest_rank() -> None:
    ranks = {"rank_0": {"import": 1.0, "load": 0.5}, "rank_1": {"import": 2.0, "load": 0.25}}
    lines = [
        line(90.0, "node-1", "ranks lost"),
        line(100.5, "node-0", "ranks lost"),
        line(101.0, "node-1", "ranks lost"),
        line(104.0, "node-1", "ranks ready", tp=2, **ranks),
    ]
    assert evidence.restart(lines, moment()) == (3.0, ranks["rank_1"])
    assert evidence.restart(lines[:3], moment()) == (None, {})


def test_a_line_of_a_clock_that_has_jumped_does_not_tell_when() -> None:
    (fault,) = chosen(["clock_jump"])
    lines = [line(3700.0, "router-0", "node suspected", node_id="node-1", cause="silence")]
    assert evidence.detection(fault, lines, moment()) == (None, "")


def test_alarms_are_suspicions_and_losses_for_silence_and_stalls_only() -> None:
    lines = [
        line(100, "router-0", "node suspected", cause="silence"),
        line(100, "router-0", "link down", cause="stall"),
        line(100, "router-0", "link down", cause="link_lost"),
        line(100, "router-0", "generation failed over", cause="silence"),
    ]
    assert evidence.alarms(lines) == 2


def test_usual_lines_are_left_out() -> None:
    usual = line(100, "node-2", "registered")
    unusual = line(100, "node-2", "ranks lost", level="error", cause="RANK_LOST")
    seen = evidence.unusual_lines([usual, unusual], frozenset({evidence.kind_of(usual)}))
    assert seen == Counter({"node error: ranks lost (RANK_LOST)": 1})


def test_only_complete_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "router-0.log"
    reader = LogReader({"router-0": path, "node-0": tmp_path / "missing.log"})
    assert reader.read() == []
    first = json.dumps({"timestamp": "2026-11-21T15:00:00.250000Z", "level": "info", "event": "link up", "node_id": "node-0"})
    path.write_text(f"{first}\nTraceback, not JSON\n{first[:20]}")
    (only,) = reader.read()
    assert (only.service, only.event, only.at % 60) == ("router-0", "link up", 0.25)
    with path.open("a") as file:
        file.write(f"{first[20:]}\n{first}\n")
    assert len(reader.read()) == 2
    with path.open("a") as file:
        file.write(f"{first}\n")
    reader.skip()
    assert reader.read() == []


def test_a_log_that_is_continued_in_a_new_file_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "router-0.log"
    record = json.dumps({"timestamp": "2026-11-21T15:00:00.250000Z", "event": "link up"})
    path.write_text(f"{record}\n")
    reader = LogReader({"router-0": path})
    reader.skip()
    with path.open("a") as file:
        file.write(f"{record}\n{record}\n")
    path.rename(tmp_path / "router-0.log.1")
    path.write_text(f"{record}\n")
    assert len(reader.read()) == 3
    assert reader.read() == []


@pytest.mark.parametrize("text", ["", "{}", "[]", "plain", '{"event": "x", "timestamp": "noon"}'])
def test_what_is_not_one_of_our_lines_is_none(text: str) -> None:
    assert parse("router-0", text) is None


def test_counters_that_grew_are_reported_without_the_node() -> None:
    before = {"router-0": {'ryzanstein_router_link_losses_total{cause="silence",node_id="node-0"}': 1.0}}
    after = {
        "router-0": {
            'ryzanstein_router_link_losses_total{cause="silence",node_id="node-0"}': 2.0,
            'ryzanstein_router_link_losses_total{cause="silence",node_id="node-1"}': 1.0,
            'ryzanstein_router_link_up{node_id="node-1"}': 1.0,
            "python_gc_collections_total": 7.0,
        },
        "node-0": {"ryzanstein_worker_beats_total": 3.0},
    }
    assert moved(before, after) == {
        'ryzanstein_router_link_losses_total{cause="silence"}': 2.0,
        "ryzanstein_worker_beats_total": 3.0,
    }
