"""Synthetic checkpoints: transformers and the runner read the same model, the same arguments give the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer import Typer
from typer.testing import CliRunner

from ryzanstein.tools.synthesize.command import Recipe, main, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS, ModelShape, usual_shape

SMALL = ModelShape(
    hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=300, context_length=64
)


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"arch": "llama", "shape": SMALL, "dtype": "float32", "seed": 3, "num_files": 1, **changes})


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("num_files", [1, 3])
def test_transformers_and_the_runner_agree_on_it(
    tmp_path: Path, runner: Callable[..., Any], reference: Callable[[Path], Any], sequences: type, num_files: int
) -> None:
    num_parameters = synthesize(tmp_path, recipe(num_files=num_files))
    model = reference(tmp_path)
    assert sum(parameter.numel() for parameter in model.model.parameters()) == num_parameters == SMALL.num_parameters
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files
    books = sequences(runner(tmp_path), [list(range(16))])
    books.start([list(range(10, 40))])
    logits = books.runner.hidden_logits(books.plan({0: 30}))[0]
    assert (logits - model.logits(range(10, 40))[-1]).abs().max() < 1e-4


def test_the_same_arguments_give_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthesize(tmp_path / name, recipe(seed=seed, num_files=2, dtype="bfloat16"))
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a != c


def test_its_tokenizer_gives_any_text_back(tmp_path: Path) -> None:
    synthesize(tmp_path, recipe())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "héllo, wörld!\n 你好 🙂"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 300
    assert max(ids) < 300


def test_transformers_applies_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    synthesize(tmp_path, recipe())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<s>user: hi</s>assistant: "


@pytest.mark.parametrize("num_parameters", [5e6, 25e6, 110e6, 1.1e9, 7e9, 70e9])
def test_a_usual_shape_is_near_the_number_asked_for(num_parameters: float) -> None:
    shape = usual_shape(num_parameters)
    assert shape.num_parameters == pytest.approx(num_parameters, rel=0.15)
    assert shape.num_heads % shape.num_kv_heads == 0


def test_presets_are_those_of_the_benchmarks() -> None:
    assert {name: round(shape.num_parameters / 1e6) for name, shape in PRESETS.items()} == {
        "S": 8,
        "context": 6,
        "L": 246,
        "M": 1100,
    }


def run(*args: object) -> tuple[int, str]:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    code, output = run(tmp_path / "model", "--params", "1.4M", "--shards", 2, "--dtype", "float16", "--seed", 9)
    assert code == 0
    assert "1.4M parameters, float16" in output
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["torch_dtype"]) == (128, "float16")


@pytest.mark.parametrize(
    "args",
    [[], ["--preset", "S", "--params", "1M"], ["--preset", "X"], ["--params", "many"], ["--params", "1M", "--arch", "mixtral"]],
)
def test_wrong_arguments_exit_with_2_and_write_nothing(tmp_path: Path, args: list[str]) -> None:
    code, _ = run(tmp_path / "model", *args)
    assert code == 2
    assert not (tmp_path / "model").exists()


def test_only_what_the_command_wrote_is_replaced_and_only_if_told(tmp_path: Path) -> None:
    command = (tmp_path / "new" / "model", "--params", "1M")
    assert run(*command)[0] == 0
    assert run(*command) == (1, f"{command[0]} exists already; --force replaces it\n")
    assert run(*command, "--shards", 2, "--force")[0] == 0
    assert not (command[0] / "model.safetensors").exists()
    (command[0] / "adapter").mkdir()
    code, message = run(*command, "--force")
    assert code == 1
    assert "did not write, or that changed since (adapter)" in message
    assert (command[0] / "model.safetensors.index.json").exists()
