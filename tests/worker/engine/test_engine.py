from __future__ import annotations

import pytest

from ryzanstein.errors import Code
from ryzanstein.generation.tokens import FinishReason


def results(it) -> dict:
    return {key: (tokens, FinishReason(it.ended[key].reason)) for key, tokens in it.tokens.items() if key in it.ended}


def test_a_lone_choice_gives_the_models_answer(run, group, answer) -> None:
    it = run(num_blocks=16, block_size=4)
    message = group(1, range(10), max_tokens=9)
    it.engine.submit(message)
    it.drain()
    assert results(it) == {(1, 0): answer(message, 0)}
    assert it.engine.stats().blocks_held == 0


def test_requests_join_and_leave_between_any_two_steps(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=16)
    messages = [group(i, [i] * (3 + i), max_tokens=2 + 3 * (i % 3)) for i in range(9)]
    for message in messages:
        it.engine.submit(message)
        it.step()
    it.drain()
    assert results(it) == {(m.group, 0): answer(m, 0) for m in messages}


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_prefilled(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=8)
    it.engine.submit(group(1, [1, 2, 3], max_tokens=40))
    it.step()
    it.engine.submit(group(2, range(90), max_tokens=1))
    steps = 0
    while (2, 0) not in it.ended:
        events = it.step()
        steps += 1
        assert 1 in events.groups, "the decode stalled behind the prompt"
    assert steps == -(-90 // 7)


def test_each_part_of_a_prompt_is_reported(run, group) -> None:
    """However long a step takes, its router sees that the prompt is not forgotten."""
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=8)
    it.engine.submit(group(2, range(30), max_tokens=2))
    assert [it.step().prefilled for _ in range(5)] == [[(2, 8)], [(2, 16)], [(2, 24)], [], []]


def test_a_higher_priority_starts_first_and_equals_in_order_of_arrival(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=1, token_budget=8)
    for number, priority in [(1, 0), (2, 5), (3, 0), (4, 5)]:
        it.engine.submit(group(number, [number], max_tokens=3, priority=priority))
    it.drain()
    assert [key[0] for key in it.ended] == [2, 4, 1, 3]


def test_a_higher_priority_pre_empts_a_lower_one_and_both_answers_are_whole(run, group, answer) -> None:
    it = run(num_blocks=8, block_size=4, max_sequences=1, token_budget=8)
    low, high = group(1, [1] * 6, max_tokens=20), group(2, [2] * 6, max_tokens=20, priority=1)
    it.engine.submit(low)
    for _ in range(5):
        it.step()
    it.engine.submit(high)
    it.drain()
    assert list(it.ended) == [(2, 0), (1, 0)]
    assert results(it) == {(1, 0): answer(low, 0), (2, 0): answer(high, 0)}
    assert it.engine.stats().preemptions == 1


def test_pressure_pre_empts_the_youngest_and_fails_nobody(run, group, answer) -> None:
    it = run(num_blocks=10, block_size=4, max_sequences=8, token_budget=32)
    messages = [group(i, [i] * 5, max_tokens=24) for i in range(5)]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    assert results(it) == {(m.group, 0): answer(m, 0) for m in messages}
    assert it.engine.stats().preemptions > 0
    assert next(iter(it.ended)) == (0, 0), "the oldest is never pre-empted"


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(run, group) -> None:
    it = run(num_blocks=4, block_size=4)
    it.engine.submit(group(1, range(10), max_tokens=7))
    it.engine.submit(group(2, range(10), max_tokens=8))
    assert it.engine.has_work
    it.drain()
    assert (1, 0) in it.ended
    assert (it.failed[2].code, it.failed[2].reason) == (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
    assert "10" in it.failed[2].message
    assert "8" in it.failed[2].message


def test_a_full_queue_refuses_at_once(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=1, token_budget=8, max_waiting=16)
    for i in range(17):
        it.engine.submit(group(i, [1]))
    events = it.step()
    assert [(f.group, f.code, f.reason) for f in events.failed] == [(16, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")]
    assert events.stats.waiting == 15


@pytest.mark.parametrize("wrong", [{"prompt_ids": []}, {"max_tokens": 0}, {"generated": []}, {"finished": [False] * 2}])
def test_a_malformed_group_fails_alone(run, group, wrong) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, **{"prompt_ids": [1], **wrong}))
    it.engine.submit(group(2, [1]))
    it.drain()
    assert {g: f.code for g, f in it.failed.items()} == {1: Code.INVALID_ARGUMENT}
    assert (2, 0) in it.ended


def test_a_group_number_in_use_is_refused_and_the_first_goes_on(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1], max_tokens=4))
    it.engine.submit(group(1, [2], max_tokens=4))
    events = it.engine.step()
    assert [failure.code for failure in events.failed] == [Code.ALREADY_EXISTS]
    assert events.groups == [1]


def test_cancel_frees_the_blocks_before_the_next_step_and_says_nothing(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=1, token_budget=8)
    it.engine.submit(group(1, range(9), max_tokens=30, n=2))
    it.engine.submit(group(2, range(9), max_tokens=30))
    it.step()
    it.step()
    assert it.engine.stats().blocks_held > 0
    for unknown_too in (1, 2, 3):
        it.engine.cancel(unknown_too)
    assert it.engine.stats().blocks_held == 0
    assert not it.engine.has_work
    assert not it.ended
    assert not it.failed


def test_a_deadline_ends_what_runs_and_what_waits(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=1, token_budget=8)
    it.engine.submit(group(1, [1], max_tokens=99, deadline=it.now + 5))
    it.engine.submit(group(2, [1], max_tokens=99, deadline=it.now + 5))
    it.engine.submit(group(3, [1], max_tokens=2, deadline=it.now + 60))
    it.step()
    assert not it.failed
    it.now += 5
    it.step()
    assert {g: (f.code, f.reason) for g, f in it.failed.items()} == {
        1: (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        2: (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    }
    it.drain()
    assert list(it.ended) == [(3, 0)]


def test_choices_share_the_prompts_blocks_and_compute_it_once(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=64)
    message = group(1, range(17), max_tokens=3, n=4)
    it.engine.submit(message)
    it.step()
    assert it.engine.stats().waiting == 3
    it.step()
    assert it.engine.stats().blocks_held == 4 + 4, "four shared, one of each choice's own"
    it.drain()
    assert results(it) == {(1, c): answer(message, c) for c in range(4)}
    assert [it.ended[1, c].cached_tokens for c in range(4)] == [0, 16, 16, 16]
    assert it.engine.stats().prefill_tokens + it.engine.stats().decode_tokens == 17 + 3 + 4 * 2


def test_when_the_first_choice_is_finished_early_the_next_computes_the_prompt(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=8)
    message = group(1, range(30), max_tokens=3, n=3)
    it.engine.submit(message)
    it.step()
    it.engine.finish(1, 0)
    it.engine.finish(1, 2)
    it.drain()
    assert results(it) == {(1, 1): answer(message, 1)}
    assert {it.ended[1, c].reason for c in (0, 2)} == {FinishReason.STOP}


def test_a_continuation_says_exactly_the_rest(run, group, answer) -> None:
    whole = group(1, range(9), max_tokens=12, n=2)
    answers = [answer(whole, c)[0] for c in range(2)]
    for k in range(12):
        it = run(num_blocks=64, block_size=4, token_budget=64)
        it.engine.submit(group(1, range(9), max_tokens=12, n=2, generated=[answers[0][:k], answers[1][: k // 2]]))
        it.drain()
        assert it.tokens[1, 0] == answers[0][k:]
        assert it.tokens[1, 1] == answers[1][k // 2 :]


def test_a_continuation_with_nothing_left_ends_at_once_with_the_right_reason(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(
        group(1, [1], max_tokens=2, n=3, stop_token_ids=[9], generated=[[9], [4, 4], [9]], finished=[False, False, True])
    )
    it.drain()
    assert {key: end.reason for key, end in it.ended.items()} == {(1, 0): FinishReason.STOP, (1, 1): FinishReason.LENGTH}
    assert not it.ranks.plans


def test_stop_tokens_end_a_choice_but_not_before_min_tokens(run, group, answer) -> None:
    free = answer(group(1, [3], max_tokens=12), 0)[0]
    stop = [free[1]]
    for min_tokens in range(5):
        message = group(1, [3], max_tokens=12, stop_token_ids=stop, min_tokens=min_tokens)
        it = run(num_blocks=64, block_size=4)
        it.engine.submit(message)
        it.drain()
        assert results(it) == {(1, 0): answer(message, 0)}
        assert not set(stop) & set(it.tokens[1, 0][:min_tokens])
        if min_tokens < 2:
            assert it.tokens[1, 0][-1] == stop[0]
            assert it.ended[1, 0].reason == FinishReason.STOP


def test_finish_ends_a_choice_as_stop_and_unknown_ones_are_ignored(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1], max_tokens=50))
    it.step()
    it.engine.finish(1, 0)
    it.engine.finish(1, 0)
    it.engine.finish(7, 0)
    it.drain()
    assert it.ended[1, 0].reason == FinishReason.STOP
    assert len(it.tokens[1, 0]) == 1


def test_a_sequence_that_cannot_be_sampled_fails_alone(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4)
    it.ranks.failing = lambda row: row.prompt_ids[0] == 1 and row.index == 2
    bad, good = group(1, [1], max_tokens=6), group(2, [2], max_tokens=6)
    it.engine.submit(bad)
    it.engine.submit(good)
    it.drain()
    assert (it.failed[1].code, it.failed[1].message) == (Code.INTERNAL, "logits are not numbers")
    assert results(it) == {(2, 0): answer(good, 0)}
    assert it.engine.stats().blocks_held == 0


def test_a_lost_rank_is_an_exception_of_the_step(run, group) -> None:
    it = run(num_blocks=64, block_size=4)

    def lose(row: object) -> bool:
        raise ConnectionError("rank 1 is gone")

    it.ranks.failing = lose
    it.engine.submit(group(1, [1]))
    with pytest.raises(ConnectionError, match="rank 1"):
        it.engine.step()


def test_a_conversations_next_turn_computes_only_what_is_new(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, token_budget=64)
    first = group(1, range(20), max_tokens=13)
    it.engine.submit(first)
    it.drain()
    text = answer(first, 0)[0]
    second = group(2, [*range(20), *text, 5, 6], max_tokens=2)
    it.engine.submit(second)
    it.drain()
    assert results(it)[2, 0] == answer(second, 0)
    assert it.ended[2, 0].cached_tokens == 32
    assert it.engine.stats().prefix_hits == 32
    assert it.engine.stats().prefix_queries == 20 + 35


def test_logprobs_are_by_row_and_only_where_asked_for(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1], max_tokens=1))
    it.engine.submit(group(2, [2], max_tokens=1, logprobs=2))
    events = it.step()
    assert events.groups == [1, 2]
    assert list(events.logprobs) == [1]
    assert len(events.logprobs[1][1]) == 2


def test_idle_steps_are_not_counted(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1], max_tokens=2))
    it.drain()
    assert it.engine.step().step == 2
    assert [plan.step for plan in it.ranks.plans] == [1, 2]


def test_who_is_admitted_is_not_pre_empted_for_a_block_that_was_foreseeable(run, group) -> None:
    it = run(num_blocks=4, block_size=4, max_sequences=4, token_budget=16)
    it.engine.submit(group(1, [1] * 4, max_tokens=5))
    it.step()
    it.engine.submit(group(2, [2] * 12, max_tokens=1))
    it.drain()
    assert it.engine.stats().preemptions == 0
    assert list(it.ended) == [(1, 0), (2, 0)]


def test_a_prompt_holds_no_blocks_before_the_budget_reaches_it(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=8)
    it.engine.submit(group(1, range(40), max_tokens=1))
    it.engine.submit(group(2, range(50, 90), max_tokens=1))
    running = [it.step().stats.running for _ in range(5)]
    assert running == [1, 1, 1, 1, 0]
    assert it.step().stats.running == 1


def test_a_higher_priority_overtakes_a_prompt_that_is_being_prefilled(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=8)
    it.engine.submit(group(1, range(40), max_tokens=1))
    it.step()
    it.engine.submit(group(2, range(50, 58), max_tokens=1, priority=1))
    assert it.step().groups == [2]
    it.drain()
    assert it.engine.stats().preemptions == 0
