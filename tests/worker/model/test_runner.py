"""One rank's runner against transformers: prefill in pieces, mixed batches, any block table, the committed demo model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ryzanstein.demo
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampleRow, SequencesFailed, StepPlan

GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
RANDOM = SampleRow(SamplingParams(temperature=1, seed=1), 0, 0, (), ())
DEMO = Path(ryzanstein.demo.__file__).parent


@pytest.fixture(scope="module")
def model_dir(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(seed=20)


def prompt(length: int, vocab_size: int = 256) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("chunks", [[300], [1] * 20, [7, 130, 1, 1, 61], [128, 128, 44]])
def test_a_prompt_in_any_pieces_gives_the_same_logits(
    model_dir: Path, runner: Callable[..., Any], reference: Callable[[Path], Any], sequences: type, chunks: list[int]
) -> None:
    ids = prompt(sum(chunks))
    expected = reference(model_dir).logits(ids)
    books = sequences(runner(model_dir, num_blocks=200), [list(range(3, 103))])
    books.start([ids])
    for chunk in chunks:
        plan = books.plan({0: chunk})
        fed = books.fed[0]
        logits = books.runner.hidden_logits(plan if plan.sampled else StepPlan(*_sampled(plan)))
        assert (logits[0] - expected[fed - 1]).abs().max() < 1e-4


def _sampled(plan: StepPlan) -> list[Any]:
    return [plan.step, plan.token_ids, plan.num_new, plan.num_context, plan.block_tables, [0]]


TABLES = {
    "adjacent": lambda s: range(s * 60, s * 60 + 60),
    "scattered": lambda s: range(s, 300, 5),
    "backwards": lambda s: range(s * 60 + 59, s * 60 - 1, -1),
}


@pytest.mark.parametrize("layout", TABLES)
def test_sequences_of_all_lengths_join_and_leave_at_any_step(
    model_dir: Path, runner: Callable[..., Any], reference: Callable[[Path], Any], sequences: type, layout: str
) -> None:
    """Long ones are read as views or gathered alone, short ones together, prefills go beside decodes."""
    model = reference(model_dir)
    prompts = [prompt(length) for length in (150, 5, 131, 1, 40)]
    books = sequences(runner(model_dir, num_blocks=300), [list(TABLES[layout](s)) for s in range(5)])
    books.start(prompts)
    rows = [GREEDY] * 5
    books.step({0: 100}, rows)
    books.step({1: 5, 0: 20}, rows)
    books.step({0: 30, 1: 1, 2: 131}, rows)
    books.step({3: 1, 1: 1, 4: 33}, rows)
    for _ in range(6):
        books.step(books.rest(), rows)
    for s in (4, 0, 2):
        books.step({s: 1, 1: 1}, rows)
    for ids, start in zip(books.ids, prompts, strict=True):
        assert ids[len(start) :] == model.greedy(start, len(ids) - len(start))
        assert len(ids) - len(start) >= 7


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotary_positions_are_those_of_transformers(
    checkpoint: Callable[..., Path],
    runner: Callable[..., Any],
    reference: Callable[[Path], Any],
    sequences: type,
    rope: dict[str, Any],
) -> None:
    model_dir = checkpoint(seed=21, rope_parameters=rope, head_dim=32)
    ids = prompt(200)
    books = sequences(runner(model_dir), [list(range(64))])
    books.start([ids])
    logits = books.runner.hidden_logits(books.plan({0: 200}))
    assert (logits[0] - reference(model_dir).logits(ids)[-1]).abs().max() < 1e-4


def test_the_older_spelling_of_rotary_settings_means_the_same(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], sequences: type, edit_config: Callable[..., None]
) -> None:
    model_dir = checkpoint(seed=22, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})

    def logits() -> torch.Tensor:
        books = sequences(runner(model_dir), [list(range(64))])
        books.start([prompt(50)])
        answer: torch.Tensor = books.runner.hidden_logits(books.plan({0: 50}))
        return answer

    new = logits()
    edit_config(model_dir, rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert torch.equal(logits(), new)


def test_the_demo_model_answers_as_transformers_does(
    runner: Callable[..., Any], reference: Callable[[Path], Any], sequences: type
) -> None:
    model, loaded = reference(DEMO), runner(DEMO, block_size=16)
    ids = prompt(120, loaded.vocab_size)
    books = sequences(loaded, [list(range(32))])
    books.start([ids])
    assert (loaded.hidden_logits(books.plan({0: 120}))[0] - model.logits(ids)[-1]).abs().max() < 1e-3
    books.start([ids])
    for _ in range(64):
        books.step(books.rest(), [GREEDY])
    assert books.ids[0][120:] == model.greedy(ids, 64)


def test_greedy_is_the_same_with_and_without_full_logits(model_dir: Path, runner: Callable[..., Any]) -> None:
    loaded = runner(model_dir)
    plan = [1, prompt(9), [4, 5], [0, 0], [[0], [1, 2]], [0, 1]]
    biased = SampleRow(SamplingParams(temperature=0, logprobs=0), 0, 0, (), ())
    plain = loaded.execute(StepPlan(*plan), [GREEDY, GREEDY])
    full = loaded.execute(StepPlan(*plan, True), [biased, GREEDY])
    assert [token.token_id for token in plain] == [token.token_id for token in full]


def test_a_step_that_samples_nothing_answers_nothing(model_dir: Path, runner: Callable[..., Any]) -> None:
    assert runner(model_dir).execute(StepPlan(1, [1, 2], [2], [0], [[0]], []), []) == []


def test_warming_up_fits_any_cache_and_changes_no_answer(model_dir: Path, runner: Callable[..., Any]) -> None:
    plan = StepPlan(1, prompt(6), [6], [0], [[0, 1]], [0])
    cold, warm = runner(model_dir, num_blocks=2), runner(model_dir, num_blocks=2)
    warm.warm_up()
    assert torch.equal(cold.hidden_logits(plan), warm.hidden_logits(plan))


def test_a_model_whose_numbers_broke_fails_its_rows_only(model_dir: Path, runner: Callable[..., Any]) -> None:
    """Keys that are not numbers, as a broken cache would have: the sequence that reads them fails, its neighbour does not."""
    loaded = runner(model_dir)
    loaded._cache.plane(0)[:4].fill_(torch.nan)
    tables = [[0, 1], [2, 3]]
    with pytest.raises(SequencesFailed) as caught:
        loaded.execute(StepPlan(1, [1, 1], [1, 1], [4, 4], tables, [0, 1]), [GREEDY, GREEDY])
    assert set(caught.value.rows) == {0}
    with pytest.raises(SequencesFailed) as caught:
        loaded.execute(StepPlan(1, [1, 1], [1, 1], [4, 4], tables[::-1], [0, 1], True), [RANDOM, RANDOM])
    assert set(caught.value.rows) == {1}


def test_what_a_block_held_before_never_reaches_its_next_sequence(model_dir: Path, runner: Callable[..., Any]) -> None:
    """Neither through the rest of its last block nor through the padding of a batch nor from the staging place."""
    clean, dirty = runner(model_dir), runner(model_dir)
    zero_slot = dirty._cache.num_slots
    for layer in (0, 1):
        dirty._cache.plane(layer)[:zero_slot].fill_(torch.nan)
        dirty._cache.plane(layer)[zero_slot + 1 :].fill_(torch.nan)
    tables = [[3, 1], [0, 2, 5, 7], [8, 9]]
    for loaded in (clean, dirty):
        loaded.hidden_logits(StepPlan(1, prompt(4 + 13 + 5), [4, 13, 5], [0, 0, 0], tables, [0]))
    decode = StepPlan(2, [1, 2, 3], [1, 1, 1], [4, 13, 5], tables, [0, 1, 2])
    assert torch.equal(clean.hidden_logits(decode), dirty.hidden_logits(decode))


@pytest.mark.parametrize(
    ("plan", "rows", "message"),
    [
        (StepPlan(7, [1, 2], [2], [0], [[0]], [0]), [], "step 7: 0 rows for 1 sampled"),
        (StepPlan(7, [1, 2], [2], [0], [[0]], [0]), [RANDOM], "step 7: a row needs full logits"),
        (StepPlan(7, [1, 2], [3], [0], [[0]], [0]), [GREEDY], "step 7: 2 tokens for sequences of"),
        (StepPlan(7, [1, 2], [2, 0], [0, 0], [[0], [1]], [0]), [GREEDY], "step 7: 2 tokens for sequences of"),
        (StepPlan(7, [1, 2], [2], [3], [[0]], [0]), [GREEDY], "step 7: sequence 0 has 1 blocks for 5 tokens"),
        (StepPlan(7, [1, 2], [2], [0], [], [0]), [GREEDY], "step 7: 1 sequences, 0 block tables"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    model_dir: Path, runner: Callable[..., Any], plan: StepPlan, rows: list[SampleRow], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner(model_dir).execute(plan, rows)


def test_the_cache_follows_its_budget(model_dir: Path, runner: Callable[..., Any]) -> None:
    per_block = 2 * 4 * (2 * 4 * 8) * 4
    assert runner(model_dir, num_blocks=None, kv_bytes=10 * per_block + 1).num_blocks == 10
    assert runner(model_dir, num_blocks=None, max_sequences=3).num_blocks == 3 * 512 // 4
    assert runner(model_dir, num_blocks=5).kv_bytes == 5 * per_block


def test_half_precision_is_near_the_reference(
    model_dir: Path, runner: Callable[..., Any], reference: Callable[[Path], Any], sequences: type
) -> None:
    ids = prompt(30)
    books = sequences(runner(model_dir, dtype="bfloat16"), [list(range(64))])
    books.start([ids])
    logits = books.runner.hidden_logits(books.plan({0: 30}))[0]
    expected = reference(model_dir).logits(ids)[-1]
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.999


def test_an_unknown_dtype_is_named(model_dir: Path, runner: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="dtype 'int3' is not supported"):
        runner(model_dir, dtype="int3")
