"""The grammar process, real: whatever a client's schema does to its compiler, the next one is judged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ryzanstein.backoff import Backoff
from ryzanstein.constraints import Constraint
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics
from ryzanstein.worker.text.grammars.frames import Ended
from ryzanstein.worker.text.grammars.judge import Verdict
from ryzanstein.worker.text.grammars.process import GrammarProcess
from ryzanstein.worker.text.programs.starting import ProgramBounds
from ryzanstein.worker.text.tokenizer import TextModel

SOUND = Constraint.json_object()


@asynccontextmanager
async def running(
    cpu_s: float = 2.0, memory_bytes: int = 256 * 2**20, max_waiting: int = 64
) -> AsyncIterator[tuple[GrammarProcess, NodeMetrics]]:
    telemetry = NodeMetrics()
    process = GrammarProcess(ProgramBounds(cpu_s, memory_bytes, max_waiting), telemetry.grammars.observer)
    telemetry.background.supervise("grammars", process.run, Backoff(0.01, 0.05, 5.0))
    try:
        yield process, telemetry
    finally:
        await telemetry.background.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "grammars"]


def counted(telemetry: NodeMetrics, name: str, **labels: str) -> float:
    return telemetry.registry.get_sample_value(f"ryzanstein_worker_{name}", labels) or 0.0


def schema(value: Any) -> Constraint:
    return Constraint.json_schema(json.dumps(value))


def alike(count: int, depth: int) -> Any:
    """Objects in which everything may follow everything, in each other."""
    if depth == 0:
        return {"type": "string", "pattern": "^(a|b)*c(a|b){1,900}$"}
    return {"anyOf": [{"type": "object", "properties": {f"k{i}": alike(count, depth - 1)}} for i in range(count)]}


async def test_no_process_runs_before_the_first_constraint(text_model: TextModel) -> None:
    async with running() as (process, _):
        await asyncio.sleep(0.05)
        assert children() == []
        assert (await process.judge(SOUND, text_model)).grammar_bytes > 0
        assert len(children()) == 1
    assert children() == []


async def test_the_table_is_that_of_the_model(text_model: TextModel) -> None:
    async with running() as (process, _):
        table = TokenTable.decode(await process.tokens(text_model))
        assert len(table.tokens) == text_model.vocab_size
        assert table.eos == sorted(text_model.eos_token_ids)
        assert await process.tokens(text_model) == table.encode()


async def test_a_verdict_is_remembered(text_model: TextModel) -> None:
    async with running() as (process, telemetry):
        for _ in range(3):
            await process.judge(SOUND, text_model)
            with pytest.raises(RyzansteinError, match="uniqueItems"):
                await process.judge(schema({"uniqueItems": True}), text_model)
        assert counted(telemetry, "grammar_verdicts_total", outcome="miss") == 2
        assert counted(telemetry, "grammar_verdicts_total", outcome="hit") == 4
        assert counted(telemetry, "grammar_refusals_total", cause="keyword") == 1
        assert counted(telemetry, "grammar_compile_seconds_count") == 1


@pytest.mark.parametrize(("number", "why"), [(signal.SIGALRM, "too busy"), (signal.SIGKILL, "short of memory")])
async def test_an_end_that_the_machine_caused_is_nobodys_mistake_and_not_remembered(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, why: str
) -> None:
    async with running() as (process, telemetry):
        await process.judge(Constraint.regex("a"), text_model)

        async def killed(*_: object) -> Ended:
            return Ended(0, -number)

        with monkeypatch.context() as patched:
            patched.setattr(process, "_ask", killed)
            with pytest.raises(RyzansteinError, match=why) as refused:
                await process.judge(SOUND, text_model)
        assert refused.value.code is Code.UNAVAILABLE
        assert counted(telemetry, "grammar_refusals_total", cause="process") == 1
        assert (await process.judge(SOUND, text_model)).grammar_bytes > 0


async def test_an_error_of_the_compiler_itself_is_a_refusal(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be one at every node, as often as it is tried."""

    async def failed(*_: object) -> Ended:
        return Ended(0, 1)

    async with running() as (process, _):
        await process.judge(Constraint.regex("a"), text_model)
        monkeypatch.setattr(process, "_ask", failed)
        for _ in range(2):
            with pytest.raises(RyzansteinError, match="could not be compiled") as refused:
                await process.judge(SOUND, text_model)
            assert refused.value.code is Code.INVALID_ARGUMENT


async def test_models_of_one_directory_with_other_templates_are_two(text_model: TextModel, tmp_path: Path) -> None:
    """Templates decide which tokens only they may write."""
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    other = TextModel.load(text_model.path, "other", template_file=template)
    async with running() as (process, telemetry):
        for _ in range(3):
            await process.judge(SOUND, text_model)
            await process.judge(SOUND, other)
        assert counted(telemetry, "grammar_verdicts_total", outcome="miss") == 2


HOSTILE = [
    schema({"$ref": "#"}),
    schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    schema({"$ref": "http://127.0.0.1:1/schema"}),
    schema({"type": "string", "maxLength": 10**9}),
    schema({"type": "string", "pattern": "(?=x)y"}),
    schema({"type": "string", "pattern": "("}),
    schema({"type": "string", "pattern": "\\1(a)"}),
    schema({"type": "object", "patternProperties": {"^a": {}, "^ab": {"type": "string"}}, "additionalProperties": False}),
    schema({"enum": [f"value {i * 7919}" for i in range(5000)], "not": {}}),
    schema({"const": "\ud800"}),
    Constraint.json_schema('{"items":' * 14_000 + "{}" + "}" * 14_000),
    Constraint.json_schema("[" * 131_072),
    Constraint.json_schema('{"type": "object", "type": '),
    Constraint.regex("("),
    Constraint.regex("(?<=a)b"),
    Constraint.regex("[a-z]{99999999999}"),
    Constraint.regex("(" * 50_000),
    Constraint.regex("a|" * 60_000 + "("),
    Constraint.grammar("start: " + "(" * 100_000),
    Constraint.grammar("start: a\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(5000))),
    Constraint.grammar("start: start"),
    Constraint.grammar("%import common.INT\nstart: INT NOPE"),
    Constraint.grammar("\0"),
]


async def test_hostile_constraints_are_refused_in_time_and_hold_no_loop(text_model: TextModel) -> None:
    async with running(cpu_s=1.0) as (process, _):
        await process.judge(SOUND, text_model)
        lag = asyncio.create_task(longest_lag())
        for constraint in HOSTILE:
            began = time.monotonic()
            with pytest.raises(RyzansteinError) as refused:
                await process.judge(constraint, text_model)
            assert time.monotonic() - began < 12
            assert refused.value.code is Code.INVALID_ARGUMENT, constraint.text[:40]
            assert refused.value.reason == "INVALID_CONSTRAINT"
            assert refused.value.violations[0].field == constraint.field
            assert len(refused.value.message) <= 512
        lag.cancel()
        assert await lag < 0.05
        assert (await process.judge(schema({"const": 1}), text_model)).grammar_bytes > 0


LARGE = [
    schema({"enum": [f"v{i}" for i in range(10_000)]}),
    schema({"type": "object", "properties": {f"p{i}": {"enum": [f"v{i}", i]} for i in range(400)}}),
    Constraint.regex("[ab]*a[ab]{400}"),
    Constraint.regex("(a?){1000}a{1000}"),
    Constraint.choice(tuple(f"alternative {i}" for i in range(1024))),
]


async def test_a_verdict_of_another_cache_scope_is_not_remembered(text_model: TextModel) -> None:
    async with running() as (process, telemetry):
        compiles = []
        for scope in ("", "a", "b", "a", ""):
            await process.judge(SOUND, text_model, scope)
            compiles.append(telemetry.registry.get_sample_value("ryzanstein_worker_grammar_compile_seconds_count"))
        assert compiles == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("constraint", LARGE, ids=range(len(LARGE)))
async def test_large_constraints_are_judged_in_time_and_hold_no_loop(text_model: TextModel, constraint: Constraint) -> None:
    async with running(cpu_s=1.0) as (process, _):
        await process.judge(SOUND, text_model)
        lag, began = asyncio.create_task(longest_lag()), time.monotonic()
        (verdict,) = await asyncio.gather(process.judge(constraint, text_model), return_exceptions=True)
        assert time.monotonic() - began < 12
        lag.cancel()
        assert await lag < 0.05
        if isinstance(verdict, RyzansteinError):
            assert verdict.reason == "INVALID_CONSTRAINT"
            assert verdict.metadata["cause"] in ("size", "time")
        else:
            assert isinstance(verdict, Verdict)
            assert verdict.grammar_bytes > 0


async def longest_lag() -> float:
    longest = 0.0
    try:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - began - 0.005)
    except asyncio.CancelledError:
        return longest


async def test_a_compile_that_takes_too_long_is_ended(text_model: TextModel) -> None:
    async with running(cpu_s=0.05) as (process, telemetry):
        with pytest.raises(RyzansteinError, match="takes too long") as refused:
            await process.judge(schema(alike(9, 3)), text_model)
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert counted(telemetry, "grammar_refusals_total", cause="time") == 1
        assert (await process.judge(Constraint.regex("a"), text_model)).grammar_bytes > 0


async def test_a_killed_process_is_replaced(text_model: TextModel) -> None:
    async with running() as (process, _):
        await process.judge(SOUND, text_model)
        (first,) = children()
        os.kill(first.pid, signal.SIGKILL)
        # What is asked before the loss is seen, or of the lost process, is the node's fault.
        async with asyncio.timeout(20):
            while (error := await failure(process, text_model)) is not None or children()[0].pid == first.pid:
                assert error is None or error.code is Code.UNAVAILABLE
                await asyncio.sleep(0.02)
        assert children()[0].pid != first.pid


async def failure(process: GrammarProcess, model: TextModel) -> RyzansteinError | None:
    try:
        await process.judge(SOUND, model)
    except RyzansteinError as error:
        return error
    return None


@pytest.fixture
def gone(tmp_path: Path, demo_dir: Path) -> TextModel:
    """A model whose files have disappeared since it was read."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in demo_dir.glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    model = TextModel.load(copy)
    (copy / "tokenizer.json").unlink()
    return model


async def test_a_model_that_cannot_be_read_says_so(text_model: TextModel, gone: TextModel) -> None:
    async with running() as (process, _):
        with pytest.raises(RyzansteinError, match="tokens cannot be read") as error:
            await process.judge(SOUND, gone)
        assert error.value.code is Code.UNAVAILABLE
        await process.judge(SOUND, text_model)


async def test_too_many_that_wait_are_refused(text_model: TextModel) -> None:
    async with running(max_waiting=4) as (process, _):
        await process.judge(SOUND, text_model)
        jobs = (process.judge(schema({"const": i}), text_model) for i in range(12))
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, RyzansteinError)]
        assert {error.code for error in refused} == {Code.RESOURCE_EXHAUSTED}
        assert 4 <= len(outcomes) - len(refused) < 12


async def test_a_caller_that_leaves_disturbs_nobody(text_model: TextModel) -> None:
    async with running() as (process, _):
        first = asyncio.create_task(process.judge(SOUND, text_model))
        second = asyncio.create_task(process.judge(schema({"const": 3}), text_model))
        await asyncio.sleep(0)
        second.cancel()
        assert (await first).grammar_bytes > 0
        assert (await process.judge(schema({"const": 3}), text_model)).grammar_bytes > 0
