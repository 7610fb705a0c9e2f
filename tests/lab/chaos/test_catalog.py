"""Every fault that was promised is there, under its name, on a cluster that can have it."""

from __future__ import annotations

import pytest

from ryzanstein.lab.chaos.catalog import CATALOG, UnknownFaultError, by_layout, chosen
from ryzanstein.lab.chaos.fault import Fault, Resume, Scope
from ryzanstein.lab.chaos.questions import FORM_QUESTIONS, LONG_QUESTIONS
from ryzanstein.lab.chaos.stage.layouts import ClusterLayout
from ryzanstein.lab.chaos.trial.series import GAP_S, LATE_S
from ryzanstein.router.config import RouterSettings

PROMISED = """
sigkill_agent sigkill_rank_0 sigkill_rank_1 sigstop_agent sigstop_rank skipped_collective slow_rank rank_out_of_memory
nan_logits model_rank_killed model_rank_stopped model_rank_slow model_out_of_memory model_crashed model_dead_everywhere
adapter_node_killed models_node_killed tcp_reset
partition_router_node_one_way partition_router_node_two_way partition_node_orchestrator node_500ms_away
router_sigkill orchestrator_sigkill store_sqlite_locked store_disk_full store_redis_killed client_gone_and_back clock_jump
rolling_drain two_nodes_at_once all_nodes_3s busy_cpu large_bodies
object_node_killed object_node_frozen object_router_killed call_node_killed call_node_frozen call_router_killed
websocket_node_killed websocket_node_frozen websocket_router_killed
server_killed server_hung all_servers_killed
context_killed context_30k_killed replica_stream_cut pages_damaged page_disk_full
late_rank_of_each_node late_all_agents_frozen late_sigkill_agent
alone_rank_0_killed alone_rank_1_killed alone_rank_stopped alone_agent_killed idle_hour
"""
LATE = [fault for fault in CATALOG if fault.layout.step_s]


def test_all_faults_are_there_once() -> None:
    assert sorted(fault.name for fault in CATALOG) == sorted(PROMISED.split())


def test_faults_that_share_a_cluster_come_together() -> None:
    grouped = by_layout(CATALOG)
    assert len({layout.name for layout, _ in grouped}) == len(grouped)
    assert sum(len(faults) for _, faults in grouped) == len(CATALOG)


def test_a_part_can_be_chosen_and_a_wrong_name_is_refused() -> None:
    assert [fault.name for fault in chosen(["tcp_reset", "sigkill_agent"])] == ["sigkill_agent", "tcp_reset"]
    with pytest.raises(UnknownFaultError, match="no such fault: sigkil_agent; must be one of"):
        chosen(["sigkil_agent"])


@pytest.mark.parametrize("fault", CATALOG, ids=lambda fault: fault.name)
def test_a_fault_can_be_tried_where_it_says(fault) -> None:  # type: ignore[no-untyped-def]
    assert fault.signs or fault.resumes is Resume.REJOINED, "somebody has to detect it"
    assert fault.layout.nodes >= 2 or fault.layout.step_s, "a node has to be left, or to come back"
    assert fault.scope is not Scope.ROUTER or fault.layout.routers > 1
    assert fault.at_most_s > 0
    assert fault.runs(30) >= 1
    assert fault.spared_pause_s is None or fault.layout.further_models, "there has to be another model"
    assert not fault.unwanted or fault.scope is Scope.ALL


@pytest.mark.parametrize("fault", [fault for fault in CATALOG if fault.layout.forms], ids=lambda fault: fault.name)
def test_a_strike_on_forms_waits_for_streams_that_clients_ask_for(fault: Fault) -> None:
    assert set(fault.kinds) <= {question.kind for question in FORM_QUESTIONS}
    sockets = {question.kind for question in FORM_QUESTIONS if question.face == "websocket"}
    assert set(fault.kinds) <= sockets or not fault.name.startswith("websocket")
    assert fault.runs(30) == 10


@pytest.mark.parametrize("fault", LATE, ids=lambda fault: fault.name)
def test_an_answer_that_is_struck_late_may_not_fail_though_no_node_is_left(fault: Fault) -> None:
    assert fault.healthy_left
    assert fault.runs(30) == 10
    assert fault.runs(2) == 2


@pytest.mark.parametrize("layout", list(dict.fromkeys(fault.layout for fault in LATE)), ids=lambda layout: layout.name)
def test_long_answers_outlast_the_strikes_and_strikes_the_patience_of_a_router(layout: ClusterLayout) -> None:
    struck = [fault for fault in LATE if fault.layout == layout]
    answer_s = min(question.sampling["max_tokens"] for question in LONG_QUESTIONS) * layout.step_s
    patience_s = RouterSettings.model_fields["failover_wait_s"].default
    assert min(LATE_S, GAP_S) > patience_s
    assert answer_s > LATE_S + (len(struck) - 1) * GAP_S
    assert all(question.call_s > 2 * answer_s for question in LONG_QUESTIONS)
