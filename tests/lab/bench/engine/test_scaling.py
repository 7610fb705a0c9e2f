"""One rank and several side by side, with real ranks, and what the figures say of their samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ryzanstein.demo
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.scaling.figures import figures, ratios
from ryzanstein.lab.bench.engine.scaling.layouts import RankLayout, parse_layouts
from ryzanstein.lab.bench.engine.scaling.rounds import ScalingLoad, ScalingSample

DEMO = str(next(iter(ryzanstein.demo.__path__)))
ONE, TWO = RankLayout(1, 1), RankLayout(2, 1)
DECODE = ScalingLoad.decode(8, 16)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["scaling", "--model", DEMO, "--rounds", "2", *arguments])


def test_layouts_are_ranks_times_threads_pinned_or_not() -> None:
    assert parse_layouts("1x2, 2x1,2x1:pin,2x1") == (RankLayout(1, 2), RankLayout(2, 1), RankLayout(2, 1, pinned=True))
    assert str(RankLayout(4, 2, pinned=True)) == "4x2:pin"


@pytest.mark.parametrize("text", ["", "2", "0x1", "1x0", "65x1", "2x1:pinned", "-1x1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(RyzansteinError, match="layouts"):
        parse_layouts(text)


def test_a_prefill_counts_what_is_fed_and_a_decode_what_comes_out() -> None:
    assert ScalingLoad.prefill(512).num_tokens == 512
    assert DECODE.num_tokens == 128


def samples(*, fed: ScalingLoad, one_s: list[float], two_s: list[float], waits_s: tuple[float, float]) -> Any:
    alone = [ScalingSample(fed.num_tokens, elapsed_s, (0.0,)) for elapsed_s in one_s]
    return {ONE: {fed: alone}, TWO: {fed: [ScalingSample(fed.num_tokens, elapsed_s, waits_s) for elapsed_s in two_s]}}


def test_figures_are_medians_of_the_rounds() -> None:
    one, two = figures(samples(fed=DECODE, one_s=[1.0, 4.0, 2.0], two_s=[1.0, 1.0, 2.0], waits_s=(0.1, 0.2)))
    assert (one.tokens_per_s, one.step_s, one.communication_shares) == (64, 2.0 / 16, (0.0,))
    assert (two.layout, two.ranks, two.load, two.batch) == ("2x1", 2, "decode-8", 8)
    assert two.communication_shares == (0.1, 0.2)


def test_ratios_are_taken_within_a_round() -> None:
    """A round in which the machine was slow for both says as much as any other."""
    (ratio,) = ratios(samples(fed=ScalingLoad.prefill(64), one_s=[1.0, 8.0, 2.0], two_s=[0.5, 4.0, 1.6], waits_s=(0.0, 0.0)))
    assert (ratio.layout, ratio.over, ratio.load) == ("2x1", "1x1", "prefill-64")
    assert (ratio.median, ratio.least, ratio.most) == (2.0, 1.25, 2.0)


@pytest.mark.distributed
def test_every_load_runs_on_every_layout(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    result = bench("--layouts", "1x1,2x1:pin", "--steps", "4", "--batch", "1,3", "--prefill-tokens", "40", "--json", str(path))
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert (document["model"], document["quantization"]) == (DEMO, "none")
    loads = ("decode-1", "decode-3", "prefill-40")
    assert {(row["layout"], row["load"]) for row in document["results"]} == {(x, y) for x in ("1x1", "2x1:pin") for y in loads}
    for row in document["results"]:
        assert row["tokens_per_s"] > 0
        assert len(row["communication_shares"]) == row["ranks"]
        assert all(0 < share < 1 for share in row["communication_shares"]) == (row["ranks"] == 2)
    assert [(row["layout"], row["over"], row["load"]) for row in document["ratios"]] == [("2x1:pin", "1x1", y) for y in loads]
    assert "unsplit" not in document


@pytest.mark.distributed
def test_what_ranks_cannot_share_is_measured_on_a_twin() -> None:
    result = bench("--layouts", "1x1", "--steps", "4", "--batch", "2", "--prefill-tokens", "0", "--unsplit", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (figure,), (twin,) = document["results"], document["unsplit"]
    assert twin["load"] == figure["load"] == "decode-2"
    assert twin["step_s"] > 0
    assert document["ratios"] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--layouts", "two"], "layouts: must be like 1x1,2x1:pin"),
        (["--quantization", "int3"], "quantization: must be one of none, fp16, int8"),
        (["--collectives", "nccl"], "collectives: must be auto, shm or gloo"),
        (["--batch", "", "--prefill-tokens", "0"], "batch: must not be empty without a prefill"),
        (["--batch", "0"], "batch: must be at least 1"),
        (["--prefill-tokens", "1000000"], "context"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(arguments: list[str], why: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.output
    assert why in result.output
    assert "loading" not in result.output
