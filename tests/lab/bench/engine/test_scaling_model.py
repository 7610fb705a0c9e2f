"""Time of a step by number of ranks: the arithmetic against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.scaling.hardware import ScalingDocument, measured, published, read_document
from ryzanstein.lab.bench.engine.scaling.model import Hardware, Latencies, predict
from ryzanstein.lab.bench.engine.scaling.work import DenseModel, RankWork, Step
from ryzanstein.worker.architectures.registry import spec_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96  # query and output, key and value, MLP
HEAD = 500 * 64
LATENCIES = Latencies(((1000, 10e-6), (2000, 12e-6), (4000, 20e-6)))
HARDWARE = Hardware("test", {1: 10e9, 2: 8e9}, {1: 100e9, 2: 90e9}, {2: LATENCIES}, {"decode-1": 3e-3})


def dense(**changes: Any) -> DenseModel:
    return DenseModel(spec_of(CONFIG | changes), weight_bytes=2, activation_bytes=4)


@pytest.mark.parametrize(
    ("num_bytes", "us"), [(16, 10), (1000, 10), (1500, 11), (2000, 12), (3000, 16), (4000, 20), (8000, 36)]
)
def test_latencies_are_linear_between_and_beyond_the_sizes_that_are_known(num_bytes: int, us: float) -> None:
    assert LATENCIES.seconds(num_bytes) == pytest.approx(us * 1e-6)


@pytest.mark.parametrize("points", [(), ((8, 1e-6),), ((8, 1e-6), (8, 2e-6)), ((16, 1e-6), (8, 2e-6))])
def test_latencies_need_two_ascending_sizes(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Latencies(points)


def test_a_step_bound_by_memory_takes_its_bytes_over_the_bandwidth_and_what_is_not_shared() -> None:
    one = predict(HARDWARE, "decode-1", RankWork(20e6, 1e6, 7, 1500, 32), 1)
    assert one.step_s == pytest.approx(20e6 / 10e9 + 3e-3)
    assert one.communication_s == 0


def test_a_step_bound_by_arithmetic_takes_its_operations_over_their_rate() -> None:
    one = predict(HARDWARE, "prefill-512", RankWork(20e6, 1e9, 7, 1500, 32), 1)
    assert one.step_s == pytest.approx(1e9 / 100e9)


def test_messages_of_several_ranks_are_added() -> None:
    two = predict(HARDWARE, "decode-1", RankWork(10e6, 1e6, 7, 1500, 32), 2)
    assert two.communication_s == pytest.approx(7 * 11e-6 + 10e-6)
    assert two.step_s == pytest.approx(10e6 / 8e9 + 3e-3 + two.communication_s)
    assert two.communication_share == pytest.approx(two.communication_s / two.step_s)


@pytest.mark.parametrize(
    ("hardware", "why"),
    [(HARDWARE, r"test has figures for \[1, 2\]"), (published()["h200-nccl"], r"h200-nccl has all-reduces of \[8\]")],
)
def test_ranks_without_figures_are_refused(hardware: Hardware, why: str) -> None:
    with pytest.raises(RyzansteinError, match=why):
        predict(hardware, "decode-1", RankWork(1, 1, 1, 1000, 16), 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_reads_and_computes_its_share(num_ranks: int) -> None:
    work = dense().work(Step.decode(batch=5, context=100), num_ranks)
    slots = 5 * 100 * 2 * 4 * 8 * 3  # sequences, keys, keys and values, heads, head dimension, layers
    attended = 5 * 100 * 8 * 8 * 3
    assert work.read_bytes == ((3 * LAYER + HEAD) * 2 + slots * 4) / num_ranks
    assert work.flops == (2 * 5 * (3 * LAYER + HEAD) + 4 * attended) / num_ranks
    assert (work.num_all_reduces, work.all_reduce_bytes, work.gather_bytes) == (7, 5 * 64 * 4, 5 * 16)


def test_a_key_value_head_that_ranks_share_is_read_by_each_of_them() -> None:
    """Half the heads, and of key and value a whole one each, as on four ranks."""
    work = dense().work(Step.decode(batch=1, context=1), 8)
    assert work.read_bytes == (3 * (64 * 8 * 2 + 64 * 8 * 2 + 3 * 64 * 12) + 63 * 64) * 2 + 2 * 8 * 3 * 4


def test_a_prefill_runs_the_head_once() -> None:
    work = dense().work(Step.prefill(101), 1)
    assert work.flops == 2 * 101 * 3 * LAYER + 2 * HEAD + 4 * 101 * 51 * 64 * 3
    assert work.all_reduce_bytes == 101 * 64 * 4


def test_a_tied_head_is_read_as_well() -> None:
    step = Step.decode(1, 1)
    assert dense(tie_word_embeddings=True).work(step, 2) == dense().work(step, 2)


def test_models_whose_reads_depend_on_the_tokens_are_refused() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(RyzansteinError, match="must be dense"):
        dense(**experts)


def documents(folder: Path) -> dict[str, Path]:
    """What `bench machine`, `collectives` and `scaling` write, as far as it is read, on a machine of round numbers."""
    ceilings = [{"threads": n, "read_bytes_per_s": n * 1e9, "matmul_flops_per_s": n * 1e12, "cache_bytes": 0} for n in (1, 2)]
    cell = {"backend": "shm", "op": "all_reduce", "ranks": 2, "p99_s": 1.0}
    messages = [cell | {"bytes": size, "p50_s": 1e-5} for size in (8192, 16)]
    others = [messages[0] | {"op": "broadcast", "p50_s": 1.0}, messages[0] | {"backend": "gloo", "p50_s": 1.0}]
    steps = [{"layout": f"{n}x1", "ranks": n, "load": "decode-1", "step_s": n * 1e-3} for n in (1, 2)]
    scaling = {"quantization": "fp16", "results": steps, "unsplit": [steps[0] | {"step_s": 5e-4}]}
    paths = {name: folder / f"{name}.json" for name in ("machine", "collectives", "scaling")}
    paths["machine"].write_text(json.dumps({"machine": {}, "ceilings": ceilings}))
    paths["collectives"].write_text(json.dumps({"results": [*messages, *others]}))
    paths["scaling"].write_text(json.dumps(scaling))
    return paths


def test_figures_are_read_from_the_benchmarks_documents(tmp_path: Path) -> None:
    paths = documents(tmp_path)
    scaling = read_document("scaling", paths["scaling"], ScalingDocument)
    hardware = measured(paths["machine"], paths["collectives"], scaling)
    assert hardware.read_bytes_per_s == {1: 1e9, 2: 1e9}
    assert hardware.flops_per_s == {1: 1e12, 2: 1e12}
    assert hardware.all_reduce == {2: Latencies(((16, 1e-5), (8192, 1e-5)))}
    assert hardware.unsplit_s == {"decode-1": 5e-4}


def run(model: Path, *arguments: str) -> Any:
    (model / "config.json").write_text(json.dumps(CONFIG))
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["predict", "--model", str(model), *arguments])


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    options = [word for name, path in documents(tmp_path).items() for word in (f"--{name}", str(path))]
    done = run(tmp_path, *options, "--ranks", "1,2", "--batch", "1,8", "--context", "1", "--json", "-")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["results"]
    assert [(row["load"], row["ranks"]) for row in rows] == [(f"decode-{b}", n) for b in (1, 8) for n in (1, 2)]
    assert ["measured_s" in row for row in rows] == [True, True, False, False]
    alone, two = rows[:2]
    assert alone["step_s"] == pytest.approx(5e-4 + ((3 * LAYER + HEAD) * 2 + 2 * 4 * 8 * 3 * 4) / 1e9)
    assert alone["efficiency"] == pytest.approx(alone["memory_s"] / 5e-4)  # 1 ms was measured, half of it is not shared
    assert alone["fitted_s"] == pytest.approx(1e-3)
    assert two["fitted_s"] == pytest.approx(5e-4 / 2 + 5e-4 + 8 * 1e-5, rel=0.01)
    assert two["error"] == pytest.approx(two["fitted_s"] / 2e-3 - 1)
    assert two["speed_up"] == pytest.approx(alone["step_s"] / two["step_s"])


def test_published_figures_need_no_measurement(tmp_path: Path) -> None:
    done = run(tmp_path, "--hardware", "h200-one-shot", "--ranks", "1,2,4,8", "--prefill-tokens", "64")
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [
        [load, str(n)] for load in ("decode-1", "decode-8", "prefill-64") for n in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "hardware: must be given"),
        (["--hardware", "abacus"], "hardware: must be one of h200-one-shot, h200-nccl"),
        (["--hardware", "h200-one-shot", "--ranks", "16"], "ranks: "),
        (["--hardware", "h200-one-shot", "--batch", "0"], "batch: must be at least 1"),
        (["--scaling", "/nowhere.json"], "FILE_MISSING"),
        (["--scaling", "/dev/null"], "scaling: is not the benchmark's document"),
    ],
)
def test_what_cannot_be_predicted_is_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.exit_code == 1
    assert why in done.output
