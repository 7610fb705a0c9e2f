"""Generations over Connect, on a real node with two ranks."""

import asyncio
import time

import pytest

from ryzanstein.errors import Code
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt
from ryzanstein.generation.request import ChoiceProgress
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.v1 import worker_pb2 as pb

pytestmark = pytest.mark.cluster

WILD = {"prompt": TokenPrompt((300, 7, 451)), "temperature": 2.0, "seed": 5}  # the model is sure of what it has learned
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {
    **WILD,
    "top_p": 0.95,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "min_tokens": 12,
    "logprobs": 3,
    "max_tokens": 40,
    "stop": ("\u2603",),
}


async def blocks_held(stub) -> int:
    return (await stub.GetStatus(pb.GetStatusRequest())).kv_blocks_held


async def test_tokens_come_with_the_indices_0_to_n_and_their_text(link, attempt, text_model):
    stream = await link.run(attempt(max_tokens=30, ignore_eos=True))
    assert stream.prompt_tokens == len(text_model.encode_prompt(attempt().request.prompt))
    assert stream.indices() == list(range(30))
    assert stream.text() == text_model.decode(stream.tokens())
    assert stream.finished[0].reason == FinishReason.LENGTH


async def test_an_answer_ends_at_the_models_own_stop_token(link, attempt, text_model):
    stream = await link.run(attempt("Hello!", max_tokens=200))
    assert stream.finished[0].reason == FinishReason.STOP
    assert stream.tokens()[-1] in text_model.eos_token_ids


async def test_max_tokens_is_by_default_what_the_context_has_left(link, attempt, text_model):
    prompt = TokenPrompt(tuple([5, 6, 7] * 680))
    stream = await link.run(attempt(prompt=prompt, ignore_eos=True))
    assert len(stream.tokens()) == text_model.context_length - 2040
    assert stream.finished[0].reason == FinishReason.LENGTH


async def test_cancel_frees_the_blocks_and_silences_the_handle(link, stub, attempt, eventually):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 3)
    await link.cancel(handle)
    await eventually(lambda: is_zero(stub), 5, "kv_blocks_held == 0")
    seen = len(link.streams[handle].tokens())
    other = await link.run(attempt(max_tokens=5, ignore_eos=True))
    assert len(other.tokens()) == 5
    assert len(link.streams[handle].tokens()) - seen < 20
    assert not link.streams[handle].finished


async def is_zero(stub) -> bool:
    return await blocks_held(stub) == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_continuation_is_exactly_the_rest_of_the_undisturbed_answer(link, attempt, sampling):
    whole = await link.run(attempt(**sampling))
    assert len(whole.tokens()) > 12
    for known in (1, 2, 5, 11, len(whole.tokens()) - 1):
        progress = [ChoiceProgress(tuple(whole.tokens()[:known]))]
        rest = await link.run(attempt(known=progress, number=1, **sampling))
        assert rest.rows[0] == whole.rows[0][known:]
        assert rest.finished[0].reason == whole.finished[0].reason
        for (choice, index), logprobs in rest.logprobs.items():
            assert logprobs.logprob == pytest.approx(whole.logprobs[choice, index].logprob, abs=1e-4)
    assert len(whole.logprobs) == (len(whole.tokens()) if "logprobs" in sampling else 0)


async def test_a_continuation_of_a_complete_choice_only_says_its_end_again(link, attempt):
    whole = await link.run(attempt(**GREEDY))
    again = await link.run(attempt(known=[ChoiceProgress(tuple(whole.tokens()))], number=1, **GREEDY))
    assert again.rows == {}
    assert again.finished[0].reason == FinishReason.LENGTH


async def test_a_stop_string_across_tokens_ends_the_text_before_it(link, attempt):
    whole = await link.run(attempt(max_tokens=40, ignore_eos=True))
    text = whole.text()
    stop = text[10:16]
    stopped = await link.run(attempt(max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert stopped.finished[0].reason == FinishReason.STOP
    assert stopped.text() == text[: text.index(stop)]
    assert stopped.tokens() == whole.tokens()[: len(stopped.tokens())]
    assert len(stopped.tokens()) < 40


async def test_a_continuation_that_already_contains_a_stop_string_ends_without_a_step(link, attempt):
    whole = await link.run(attempt(max_tokens=40, ignore_eos=True))
    stop = whole.text()[10:16]
    known = [ChoiceProgress(tuple(whole.tokens()))]
    again = await link.run(attempt(max_tokens=100, ignore_eos=True, stop=(stop,), known=known, number=1))
    assert again.rows == {}
    assert again.finished[0].reason == FinishReason.STOP


async def test_held_back_text_comes_with_the_last_token(link, attempt):
    whole = await link.run(attempt(max_tokens=12, ignore_eos=True))
    tail = whole.text()[-1]
    held = await link.run(attempt(max_tokens=12, ignore_eos=True, stop=(tail + "\u2603",)))
    assert held.text() == whole.text()
    assert held.rows[0][-1][2].endswith(tail)


async def test_choices_differ_and_are_the_same_again_with_the_same_seed(link, attempt):
    params = {"n": 3, "max_tokens": 16, "ignore_eos": True, **WILD}
    first = await link.run(attempt(**params))
    second = await link.run(attempt(**params))
    assert {choice: first.tokens(choice) for choice in range(3)} == {choice: second.tokens(choice) for choice in range(3)}
    assert first.tokens(0) != first.tokens(1)


async def test_finished_choices_of_an_earlier_attempt_do_not_run_again(link, attempt):
    params = {"n": 2, "max_tokens": 10, "ignore_eos": True, **WILD}
    whole = await link.run(attempt(**params))
    known = [ChoiceProgress(tuple(whole.tokens(0)), finished=True), ChoiceProgress(tuple(whole.tokens(1)[:4]))]
    rest = await link.run(attempt(known=known, number=1, **params))
    assert set(rest.rows) == {1}
    assert rest.rows[1] == whole.rows[1][4:]


async def test_batch_mates_do_not_change_a_seeded_answer(link, attempt):
    alone = await link.run(attempt(**SEEDED))
    mates = [attempt(f"Count from {i} to 90.", temperature=0.8, seed=i, max_tokens=60) for i in range(6)]
    streams = await asyncio.gather(link.run(attempt(**SEEDED)), *(link.run(mate) for mate in mates))
    assert streams[0].rows == alone.rows


async def test_two_routers_share_a_node_and_one_does_not_notice_the_others_end(connect, node, stub, attempt, eventually):
    async with connect(node.address, "router-t") as link, connect(node.address, "router-u") as other:
        theirs = await other.submit(attempt(max_tokens=1500, ignore_eos=True))
        ours = await link.submit(attempt(max_tokens=150, ignore_eos=True))
        assert ours == theirs
        await other.wait(theirs, lambda s: len(s.tokens()) > 5)
        await other.close()
        stream = await link.wait(ours, lambda s: bool(s.finished))
        assert stream.indices() == list(range(150))
        await eventually(lambda: is_zero(stub), 5, "the other router's generation is cancelled")


async def test_a_deadline_ends_a_generation(link, attempt, stub, eventually):
    began = time.time()
    stream = await link.run(attempt(max_tokens=1900, ignore_eos=True, deadline=began + 0.5))
    assert stream.failed.code == Code.DEADLINE_EXCEEDED
    assert not stream.failed.node_fault
    assert len(stream.tokens()) > 0
    assert time.time() - began < 3
    await eventually(lambda: is_zero(stub), 5)


async def test_a_deadline_that_has_passed_is_refused(link, attempt):
    stream = await link.run(attempt(deadline=time.time() - 1))
    assert (stream.failed.code, stream.failed.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert stream.prompt_tokens is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_tokens": 2100}, (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "2100")),
        ({"prompt": TokenPrompt((1,) * 2048)}, (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "2048")),
        ({"prompt": TokenPrompt((1, 99_999))}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "token_ids")),
        ({"prompt": TokenPrompt(())}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "prompt")),
        ({"prompt": TextPrompt("x" * 1_000_000)}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "text")),
        ({"stop_token_ids": (5000,)}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "stop_token_ids")),
        ({"logit_bias": ((5000, 1.0),)}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "logit_bias")),
        ({"known": [ChoiceProgress((5000,))]}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "generated")),
        ({"top_p": 7.0}, (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.top_p")),
    ],
)
async def test_a_bad_submit_fails_with_its_reason_and_is_not_the_nodes_fault(link, stub, attempt, change, expected):
    code, reason, wording = expected
    stream = await link.run(attempt(**change))
    assert (stream.failed.code, stream.failed.reason) == (code, reason)
    assert wording in stream.failed.message
    assert not stream.failed.node_fault
    assert await blocks_held(stub) == 0


async def test_a_continuation_with_nothing_to_run_is_refused(link, attempt):
    handle = await link.submit(attempt(known=[ChoiceProgress((5,), finished=True)]))
    stream = await link.wait(handle, lambda s: s.failed is not None)
    assert (stream.failed.code, stream.failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert "at least one choice" in stream.failed.message


async def test_a_model_that_is_not_served_here_may_be_asked_for_elsewhere(link, attempt):
    handle = await link.submit(attempt(), model="another")
    stream = await link.wait(handle, lambda s: s.failed is not None)
    assert (stream.failed.code, stream.failed.reason) == (Code.UNAVAILABLE, "MODEL_NOT_SERVED")


async def test_two_hundred_malformed_submits_leave_the_node_serving(link, stub, attempt):
    for number in range(1, 201):
        submit = pb.Submit(handle=number, generation_id=f"g{number}", model="demo")
        if number % 2:
            submit.token_ids.ids.extend([2**31] * (number % 5))
        if number % 3:
            submit.sampling.temperature = -float(number)
        await link.submit_wire(submit)
    await link.until(lambda: all(stream.failed is not None for stream in link.streams.values()))
    assert {stream.failed.code for stream in link.streams.values()} == {Code.INVALID_ARGUMENT}
    assert len((await link.run(attempt(max_tokens=5, ignore_eos=True))).tokens()) == 5
    assert await blocks_held(stub) == 0


async def test_the_node_beats_often_while_it_works_and_seldom_while_idle(link, attempt):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 2)
    busy_from = len(link.beats)
    await link.until(lambda: len(link.beats) >= busy_from + 10)
    busy = [at for at, _ in link.beats[busy_from:]]
    assert (busy[-1] - busy[0]) / (len(busy) - 1) < 0.15
    steps = [beat.step for _, beat in link.beats[busy_from:]]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    assert link.beats[-1][1].load.running == 1
    assert link.beats[-1][1].load.kv_blocks_used > 0
    await link.cancel(handle)
    await link.until(lambda: link.beats[-1][1].load.running == 0)
    count = len(link.beats)
    await asyncio.sleep(1.2)
    assert 1 <= len(link.beats) - count <= 4
    sequences = [beat.sequence for _, beat in link.beats]
    assert sequences == sorted(set(sequences))
