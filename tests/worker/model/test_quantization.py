"""Whole models with weights of 16 and 8 bits: near the float one on one rank and two, rows that do not see each other."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from pydantic_settings import CliApp
from tests.worker.model.rank_processes import answers_of_ranks
from torch import Tensor

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.build import NotBuilt, library
from ryzanstein.worker.settings.quantization import Quantization

PERPLEXITY = Path(__file__).parents[3] / "lab" / "benchmarks" / "perplexity.py"
OPTIONS = {"num_blocks": 200, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 256, "max_sequences": 8}
SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 251,
    "max_position_embeddings": 256,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("LlamaConfig", {**SHAPE, "tie_word_embeddings": True}),
    "gpt2, tied head, biases, weights by inputs": (
        "GPT2Config",
        {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 251, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gemma2": ("Gemma2Config", {**SHAPE, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "mixtral": ("MixtralConfig", {**SHAPE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe, a shared expert": (
        "Qwen2MoeConfig",
        {
            **SHAPE,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
}
DENSE = [name for name in MODELS if "mixtral" not in name and "moe" not in name]
FORMATS: list[Quantization] = ["none", "fp16", "int8"]
WORST = {"none": 1e-5, "fp16": 1e-5, "int8": 0.1}
"""Norm of the error of a position's logits, over the norm of the logits. Checkpoints are in bfloat16."""
LENGTHS = (5, 30, 17, 1, 44, 9, 23, 12)
NUM_NEW = 12


def write(name: str, model_dir: Path) -> None:
    """A random checkpoint by transformers, stored in bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        config_class, fields = MODELS[name]
        torch.manual_seed(len(name))
        config = getattr(transformers, config_class)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.08)
        model.bfloat16().save_pretrained(model_dir)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 251, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclass(frozen=True)
class Case:
    """A checkpoint, and float32 logits of the last position of each prompt."""

    model_dir: Path
    logits: list[Tensor]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, reference: Callable[[Path], Any]) -> dict[str, Case]:
    made = {}
    for name in MODELS:
        model_dir = tmp_path_factory.mktemp("checkpoint")
        write(name, model_dir)
        model = reference(model_dir)
        made[name] = Case(model_dir, [model.logits(ids)[-1] for ids in prompts()])
    return made


def prompt_plans() -> list[StepPlan]:
    """One prompt a step, the logits of its last token wanted."""
    tables = [list(range(s * 20, s * 20 + 20)) for s in range(len(LENGTHS))]
    return [
        StepPlan(1, ids, [len(ids)], [0], [table], [0], full_logits=True) for ids, table in zip(prompts(), tables, strict=True)
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def answers(
    request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, Quantization], list[Tensor]]:
    """Logits of each prompt, by model and format; the ranks start once for all."""
    directory = tmp_path_factory.mktemp("ranks")
    keys = [(name, quantization) for name in cases for quantization in FORMATS]
    jobs = [(cases[name].model_dir, {**OPTIONS, "quantization": kind}, prompt_plans()) for name, kind in keys]
    done = answers_of_ranks(directory, request.param, jobs)[0]["jobs"]
    return {key: [logits[0] for logits in job["answers"]] for key, job in zip(keys, done, strict=True)}


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.long
def test_a_format_that_is_chosen_is_the_same_on_all_ranks_and_has_its_bits(
    cases: dict[str, Case], tmp_path: Path, size: int
) -> None:
    """8 bits suffice for these; a rank that chose otherwise would wait for another collective."""
    kinds = [(name, quantization) for name in ("llama, tied head", "mixtral") for quantization in ("int8", "auto")]
    jobs = [(cases[name].model_dir, {**OPTIONS, "quantization": kind}, prompt_plans()) for name, kind in kinds]
    answered = answers_of_ranks(tmp_path, size, jobs)[0]["jobs"]
    done = [torch.stack([logits[0] for logits in job["answers"]]) for job in answered]
    for int8, auto in zip(done[::2], done[1::2], strict=True):
        assert torch.equal(int8, auto)


@pytest.mark.distributed
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long
def test_logits_are_near_those_of_float_weights(
    cases: dict[str, Case], answers: dict[tuple[str, Quantization], list[Tensor]], name: str, quantization: Quantization
) -> None:
    errors = [
        ((logits - expected).norm() / expected.norm()).item()
        for logits, expected in zip(answers[name, quantization], cases[name].logits, strict=True)
    ]
    assert max(errors) < WORST[quantization]
    assert quantization != "int8" or max(errors) > WORST["fp16"], "nothing was quantized"


@dataclass(frozen=True)
class Text:
    """What sequences were continued with, and the logits of every step."""

    ids: list[list[int]]
    logits: list[list[Tensor]]


def generate(books: Any, prefills: Sequence[Sequence[int]], decodes: Sequence[Sequence[int]]) -> Text:
    """Greedy, each group of sequences in steps of its own."""
    books.start(prompts())
    logits: list[list[Tensor]] = [[] for _ in LENGTHS]

    def step(num_new: dict[int, int]) -> None:
        for s, logits_V in zip(num_new, books.runner.hidden_logits(books.plan(num_new, full_logits=True)), strict=True):
            logits[s].append(logits_V.clone())
            books.ids[s].append(int(logits_V.argmax()))

    for group in prefills:
        step({s: LENGTHS[s] for s in group})
    for _ in range(NUM_NEW):
        for group in decodes:
            step(dict.fromkeys(group, 1))
    return Text(books.ids, logits)


def alone_and_together(model_dir: Path, runner: Callable[..., Any], sequences: type, **options: Any) -> list[Text]:
    """Each of eight sequences alone; prompts alone and then together; all in the same steps."""
    tables = [list(range(s * 20, s * 20 + 20)) for s in range(len(LENGTHS))]
    apart, together = [[s] for s in range(len(LENGTHS))], [list(range(len(LENGTHS)))]
    return [
        generate(sequences(runner(model_dir, **OPTIONS, **options), tables), prefills, decodes)
        for prefills, decodes in ((apart, apart), (apart, together), (together, together))
    ]


@pytest.mark.parametrize("quantization", ["none", "fp16", "int8"])
@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch_of_eight(
    cases: dict[str, Case], runner: Callable[..., Any], sequences: type, name: str, quantization: Quantization
) -> None:
    """With kernels of our own: torch's attention is another product for another batch."""
    try:
        library()
    except NotBuilt as reason:
        pytest.skip(str(reason))
    options = {"quantization": quantization, "kernels": "native"}
    alone, *others = alone_and_together(cases[name].model_dir, runner, sequences, **options)
    for other in others:
        assert other.ids == alone.ids
        for mine, theirs in zip(alone.logits, other.logits, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long
def test_a_sequence_gets_nearly_the_same_alone_and_in_a_batch_with_any_kernels(
    cases: dict[str, Case], runner: Callable[..., Any], sequences: type, name: str, kernels: str
) -> None:
    """As far as the first token that differs: float32 attention and routing may move a number over the edge of a step."""
    alone, *others = alone_and_together(cases[name].model_dir, runner, sequences, quantization="int8", kernels=kernels)
    for other in others:
        for mine, theirs in zip(alone.logits, other.logits, strict=True):
            assert ((mine[0] - theirs[0]).norm() / mine[0].norm()).item() < WORST["int8"] / 2


@pytest.mark.parametrize("quantization", ["fp16", "int8"])
def test_a_format_of_cpus_refuses_other_dtypes(cases: dict[str, Case], runner: Callable[..., Any], quantization: str) -> None:
    with pytest.raises(Exception, match=f"quantization {quantization} needs float32 on a CPU, not torch.bfloat16"):
        runner(cases["llama"].model_dir, quantization=quantization, dtype="bfloat16")


def test_an_unknown_format_is_named(cases: dict[str, Case], runner: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="quantization 'int3' is not supported, only none, fp16, int8, auto"):
        runner(cases["llama"].model_dir, quantization="int3")


def test_perplexity_of_the_demo_model_stays_within_half_a_percent() -> None:
    """The command of docs/operate/quantize-and-convert.md on fewer dialogues."""
    command = [sys.executable, PERPLEXITY, "--dialogues", "16", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    none, fp16, int8 = json.loads(done.stdout)
    assert none["num_answer_tokens"] > 500
    assert none["right"] > 0.95
    for one in (fp16, int8):
        assert abs(one["answers"] / none["answers"] - 1) < 0.005
        assert abs(one["text"] / none["text"] - 1) < 0.005
        assert abs(one["right"] - none["right"]) < 0.02


@pytest.mark.parametrize("quantization", ["fp16", "int8", "auto"])
def test_flags_and_the_environment_choose_the_format(monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    assert CliApp.run(WorkerSettings, ["--quantization", quantization]).rank_spec("/m").settings.quantization == quantization
    monkeypatch.setenv("RYZANSTEIN_QUANTIZATION", quantization)
    assert CliApp.run(WorkerSettings, []).rank_spec("/m").settings.quantization == quantization


def test_a_setting_that_is_no_format_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"quantization\n.*'none', 'fp16', 'int8' or 'auto'"):
        WorkerSettings(quantization="int3")
