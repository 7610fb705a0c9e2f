"""Who holds up whom in a node, as its ranks' boards and stacks tell."""

from __future__ import annotations

from ryzanstein.cli.debug.findings import doing, innermost, standstills
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1 import worker_pb2

STACK = 'File "/a/b/waiting.py", line 45 in await_flag\nFile "/a/b/shm.py", line 168 in _await'


def rank(number: int, *, collective: int, still_s: int = 9, phase: str = "all_reduce", state: str = "S") -> pb.ProcessStacks:
    board = worker_pb2.RankStatus(rank=number, pid=7 + number, step=4, collective=collective, phase=phase)
    board.since_progress.FromSeconds(still_s)
    thread = pb.ThreadStack(tid=7, name="rank", state=state, stack=STACK if state == "S" else "")
    return pb.ProcessStacks(name=f"rank {number}", model="demo", threads=[thread], board=board)


def held_up(*ranks: pb.ProcessStacks) -> list[str]:
    return [found.behind.name for found in standstills(pb.DumpStacksResponse(processes=ranks))]


def test_the_rank_with_fewer_collectives_holds_up_the_others() -> None:
    assert held_up(rank(0, collective=6), rank(1, collective=5, phase="forward")) == ["rank 1"]
    assert held_up(rank(0, collective=5, phase="forward"), rank(1, collective=6)) == ["rank 0"]


def test_among_equals_it_is_the_stopped_one_then_the_one_that_moved_least_recently() -> None:
    assert held_up(rank(0, collective=6), rank(1, collective=6, state="T")) == ["rank 1"]
    assert held_up(rank(0, collective=6, still_s=9), rank(1, collective=6, still_s=12)) == ["rank 1"]


def test_ranks_that_move_or_are_idle_hold_up_nobody() -> None:
    assert held_up(rank(0, collective=6), rank(1, collective=6, still_s=0)) == []
    assert held_up(rank(0, collective=6, phase="idle"), rank(1, collective=6, phase="idle")) == []


def test_a_standstill_names_place_and_function() -> None:
    ranks = [rank(0, collective=6), rank(1, collective=5, phase="forward", state="T")]
    (found,) = standstills(pb.DumpStacksResponse(processes=ranks))
    assert found.text == (
        "rank 1 of demo holds up the others: step 4, forward, collective 5, still for 9.0 s, is stopped; "
        "rank 0 waits in step 4, all_reduce, collective 6, still for 9.0 s, sleeps in await_flag (waiting.py, line 45)"
    )


def test_what_a_thread_does_is_said_without_a_stack_too() -> None:
    assert innermost("") == ""
    assert doing(pb.ThreadStack(state="S", waits_in="do_epoll_wait")) == "sleeps in do_epoll_wait"
    assert doing(pb.ThreadStack(state="R")) == "runs"
