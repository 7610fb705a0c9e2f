"""Documents are synthetic here: a figure of known cost on a machine whose speed drifts, and with it the reference kernel."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.compare.documents import Rule, compare_documents
from ryzanstein.lab.bench.engine.suite.document import SCHEMA, KernelTimes, SuiteDocument, SuiteFigure, SuiteSample
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine

NAMES = [f"engine/demo/batch{batch}" for batch in range(1, 13)]
MACHINE = SuiteMachine("host", "a cpu", 2, ["avx2"], 2**34, "Linux", "3.11.7", "2.13.0", "abc")
RULE = Rule(min_effect=0.05, false_alarms=0.05)


def figure(
    name: str, choose: random.Random, rounds: int, *, cost_s: float, noise: float, drift: float, stalls: float
) -> SuiteFigure:
    """Each round the machine is slower by up to `drift`; a stall hits single rounds of the figure alone."""
    samples = []
    for _ in range(rounds):
        pace = 1 + drift * choose.random()
        stall = 3.0 if choose.random() < stalls else 1.0
        seconds = cost_s * pace * stall * choose.lognormvariate(0, noise)
        samples.append(SuiteSample.of(seconds, *(0.01 * pace * choose.lognormvariate(0, noise / 2) for _ in range(2))))
    return SuiteFigure(name, "a token", "small", samples)


def document(seed: int, *, slower: Mapping[str, float] | None = None, rounds: int = 9, **machine: float) -> SuiteDocument:
    """`slower` are factors by name of figure."""
    choose = random.Random(seed)
    noisy = {"noise": 0.03, "drift": 0.3, "stalls": 0.0} | machine
    pace = choose.uniform(1, 1.3)  # this run's machine, all of it
    figures = [figure(name, choose, rounds, cost_s=pace * 0.1 * (slower or {}).get(name, 1.0), **noisy) for name in NAMES]
    figures = [msgspec.structs.replace(f, rounds=[paced(sample, pace) for sample in f.rounds]) for f in figures]
    return SuiteDocument(SCHEMA, MACHINE, [], {"small": KernelTimes("50 products, 2 threads", [pace] * rounds)}, figures)


def paced(sample: SuiteSample, pace: float) -> SuiteSample:
    return SuiteSample.of(sample.seconds, sample.reference_s * pace, sample.reference_s * pace)


def alarms(before: SuiteDocument, after: SuiteDocument) -> set[str]:
    return {row.name for row in compare_documents(before, after, RULE).named("slower")}


@pytest.mark.parametrize("seed", range(20))
def test_a_fifth_slower_is_found_and_nothing_else_while_the_machine_drifts_by_a_third(seed: int) -> None:
    slower = {NAMES[seed % 12]: 1.2}
    comparison = compare_documents(document(2 * seed), document(2 * seed + 1, slower=slower), RULE)
    assert [row.name for row in comparison.named("slower")] == [NAMES[seed % 12]]
    assert comparison.named("slower")[0].change.factor == pytest.approx(1.2, rel=0.1)
    assert not comparison.named("faster")


def test_a_fifth_faster_is_found_and_is_no_alarm() -> None:
    comparison = compare_documents(document(1), document(2, slower={NAMES[3]: 1 / 1.2}), RULE)
    assert [row.name for row in comparison.named("faster")] == [NAMES[3]]
    assert not comparison.named("slower")


@pytest.mark.parametrize(
    "machine",
    [
        {"noise": 0.03, "drift": 0.3},
        {"noise": 0.03, "drift": 3.0},
        {"noise": 0.3, "drift": 0.3},
        {"noise": 0.1, "drift": 0.3, "stalls": 0.2},
    ],
)
def test_drift_noise_and_stalls_alone_alarm_in_at_most_one_of_twenty_comparisons(machine: dict[str, float]) -> None:
    runs = 300
    alarmed = sum(bool(alarms(document(2 * i, **machine), document(2 * i + 1, **machine))) for i in range(runs))
    assert alarmed / runs <= RULE.false_alarms


def test_a_slowdown_below_the_least_effect_is_no_alarm_however_clear_it_is() -> None:
    quiet = {"noise": 0.001, "drift": 0.0}
    comparison = compare_documents(document(1, **quiet), document(2, slower={NAMES[0]: 1.04}, **quiet), RULE)
    assert comparison.rows[0].change.low > 1.03
    assert comparison.rows[0].verdict == "same"


def test_how_much_slower_the_machine_itself_was_is_reported_and_is_no_alarm() -> None:
    before, after = document(1), document(2)
    before = msgspec.structs.replace(before, kernels={"small": KernelTimes("50 products, 2 threads", [1.0, 9.0, 1.0])})
    after = msgspec.structs.replace(after, kernels={"small": KernelTimes("50 products, 2 threads", [2.0, 2.0, 2.0])})
    comparison = compare_documents(before, after, RULE)
    assert comparison.kernel_factors == {"small": 2.0}
    assert not comparison.named("slower")


def test_figures_that_are_new_and_facts_that_changed_are_reported() -> None:
    before, after = document(1), document(2)
    before = msgspec.structs.replace(before, figures=before.figures[1:])
    after = msgspec.structs.replace(after, machine=msgspec.structs.replace(MACHINE, torch="2.14.0"))
    comparison = compare_documents(before, after, RULE)
    assert comparison.added == (NAMES[0],)
    assert comparison.notes == ("machine.torch differs: 2.13.0, now 2.14.0",)


def first_figure(**changes: Any) -> Callable[[SuiteDocument], SuiteDocument]:
    def change(whole: SuiteDocument) -> SuiteDocument:
        changed = msgspec.structs.replace(whole.figures[0], **changes)
        return msgspec.structs.replace(whole, figures=[changed, *whole.figures[1:]])

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (first_figure(name="other"), f"figures[{NAMES[0]}]: is missing in the later document"),
        (first_figure(workload="a page"), f"figures[{NAMES[0]}].workload: must be the same"),
        (first_figure(reference="loop"), f"figures[{NAMES[0]}].reference: must be the same"),
        (
            lambda d: msgspec.structs.replace(d, kernels={"small": KernelTimes("7 products", [1.0])}),
            "kernels[small]: must be the same",
        ),
        (lambda d: msgspec.structs.replace(d, machine=msgspec.structs.replace(MACHINE, cpu="other")), "machine.cpu: must be"),
        (lambda d: msgspec.structs.replace(d, machine=msgspec.structs.replace(MACHINE, cores=64)), "machine.cores: must be"),
        (
            lambda d: document(2, rounds=2),
            f"figures[{NAMES[0]}].rounds: must be at least 6 in both to tell a change from noise",
        ),
    ],
)
def test_unlike_documents_are_refused_naming_the_field(change: Callable[[SuiteDocument], SuiteDocument], why: str) -> None:
    with pytest.raises(RyzansteinError) as refused:
        compare_documents(document(1), change(document(2)), RULE)
    assert refused.value.message.startswith(why)


def write(path: Path, whole: Any) -> str:
    path.write_bytes(msgspec.json.encode(whole))
    return str(path)


def test_the_exit_code_tells_scripts_whether_something_became_slower(tmp_path: Path) -> None:
    before = write(tmp_path / "a.json", document(1))
    same, slower = write(tmp_path / "b.json", document(2)), write(tmp_path / "c.json", document(3, slower={NAMES[5]: 1.3}))
    assert CliRunner().invoke(app, ["compare", before, same]).exit_code == 0
    done = CliRunner().invoke(app, ["compare", before, slower, "--json", str(tmp_path / "d.json")])
    assert done.exit_code == 1, done.output
    written = json.loads((tmp_path / "d.json").read_text())
    assert (written["slower"], written["faster"]) == ([NAMES[5]], [])
    row = written["changes"][5]
    assert (row["name"], row["verdict"]) == (NAMES[5], "slower")
    assert 1.05 < row["low"] < row["factor"] < row["high"]


def test_people_read_the_figure_and_by_how_much(tmp_path: Path) -> None:
    before = write(tmp_path / "a.json", document(1))
    after = write(tmp_path / "b.json", document(3, slower={NAMES[5]: 1.3}))
    visible = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", before, after])
    (line,) = [line for line in visible.output.splitlines() if NAMES[5] in line]
    assert "slower" in line
    assert visible.output.rstrip().splitlines()[-1].startswith("1 slower, 0 faster")


BUILTINS = msgspec.to_builtins(document(1))
BAD_SAMPLE = {"seconds": 1.0, "reference_s": 0.0, "ratio": 1.0}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (BUILTINS | {"schema": "ryzanstein.bench.suite/0"}, "schema: must be ryzanstein.bench.suite/1"),
        ({"results": []}, "missing required field `schema`"),
        ({key: value for key, value in BUILTINS.items() if key != "kernels"}, "missing required field `kernels`"),
        (BUILTINS | {"figures": []}, "$.figures"),
        (BUILTINS | {"figures": [BUILTINS["figures"][0]] * 2}, "figures: must have each name once"),
        (BUILTINS | {"figures": [BUILTINS["figures"][0] | {"rounds": [BAD_SAMPLE]}]}, "$.figures[0].rounds[0].reference_s"),
        ("no document", "Expected `object`"),
    ],
)
def test_what_is_no_document_of_the_suite_is_refused_with_exit_code_two(tmp_path: Path, content: Any, why: str) -> None:
    before, after = write(tmp_path / "a.json", document(1)), write(tmp_path / "b.json", content)
    for arguments in ([before, after], [after, before]):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["compare", *arguments])
        assert done.exit_code == 2
        assert "b.json" in done.output
        assert why in done.output


def test_a_file_that_is_not_there_or_cut_short_is_refused_with_exit_code_two(tmp_path: Path) -> None:
    before = write(tmp_path / "a.json", document(1))
    (tmp_path / "b.json").write_text(Path(before).read_text()[:500])
    assert CliRunner().invoke(app, ["compare", before, str(tmp_path / "b.json")]).exit_code == 2
    missing = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["compare", before, str(tmp_path / "c.json")])
    assert missing.exit_code == 2
    assert "No such file" in missing.output
