"""Model directories that somebody broke, or meant to break: each is refused with a short reason, soon.

The two readers of a directory are asked in one process: the text side, and a rank.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape
from ryzanstein.worker.refusal import MAX_MESSAGE_CHARS, ModelRefused
from ryzanstein.worker.text.tokenizer import TextModel

WITHIN_S = 10.0
"""Two seconds are meant; a machine that runs other tests as well takes longer."""
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, WEIGHTS, INDEX = "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG)
DEEP = "[" * 100_000
NUM_FUZZED = 120


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("sound")
    synthesize(model_dir, Recipe("llama", ModelShape(32, 2, 4, 2, 48, 300), "float32", seed=0, num_files=1))
    return model_dir


@pytest.fixture
def model_dir(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


@dataclass(frozen=True)
class Answer:
    """What the readers said; empty where both can serve the directory."""

    reason: str
    seconds: float


@pytest.fixture
def load(runner: Callable[..., Any]) -> Callable[[Path], Answer]:
    """Asks both readers and, where neither refuses, for a prompt and a step. Anything but a refusal is an error."""

    def ask(model_dir: Path) -> str:
        try:
            text = TextModel.load(model_dir)
            text.encode_prompt(TextPrompt("hello"))
            text.decode(list(range(300)))
        except RyzansteinError as refusal:
            return f"{refusal}" if refusal.reason == "MODEL_INVALID" else f"{refusal.reason} is no refusal"
        try:
            runner(model_dir, kernels="torch", num_blocks=8, block_size=4, max_tokens_per_step=8).warm_up()
        except ModelRefused as refusal:
            return str(refusal)
        return ""

    def timed(model_dir: Path) -> Answer:
        began = time.monotonic()
        return Answer(ask(model_dir), time.monotonic() - began)

    return timed


def edit(**changes: Any) -> Callable[[Path], object]:
    """Changes keys of config.json."""

    def change(model_dir: Path) -> object:
        path = model_dir / CONFIG
        return path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def spell(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Writes a file."""
    content = text.encode() if isinstance(text, str) else text
    return lambda model_dir: (model_dir / name).write_bytes(content)


def header(text: str | bytes, data: bytes = b"") -> Callable[[Path], object]:
    """Writes a safetensors file with this header."""
    content = text.encode() if isinstance(text, str) else text
    return spell(WEIGHTS, struct.pack("<Q", len(content)) + content + data)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else where a file should be."""

    def change(model_dir: Path) -> None:
        (model_dir / name).unlink(missing_ok=True)
        make(model_dir / name)

    return change


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _overlapping(model_dir: Path) -> None:
    """Every tensor of a shape lies where the first one does."""
    path = model_dir / WEIGHTS
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    table, places = json.loads(content[8 : 8 + length]), {}
    for name, fields in table.items():
        if name != "__metadata__":
            fields["data_offsets"] = places.setdefault(str(fields["shape"]), fields["data_offsets"])
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "text_config is a string": (edit(text_config="llama"), "text_config must be an object, got 'llama'"),
    "text_config is deep": (spell(CONFIG, '{"text_config": ' + DEEP), "nested too deeply"),
    "multimodal": (
        edit(model_type="llava", text_config={"model_type": "llama"}),
        "a multimodal model, and only text is served: save its language model by itself",
    ),
    "eos is an object": (edit(eos_token_id={"a": 1}), "eos_token_id must be a token id in [0, 300)"),
    "eos is a word": (edit(eos_token_id="abc"), "eos_token_id must be a token id in [0, 300), or a list of them, got 'abc'"),
    "eos is beyond the vocabulary": (edit(eos_token_id=300), "eos_token_id must be a token id in [0, 300)"),
    "eos is negative": (edit(eos_token_id=-1), "eos_token_id must be a token id"),
    "eos is a list of words": (edit(eos_token_id=[1, "abc"]), "eos_token_id must be a token id"),
    "eos is true": (edit(eos_token_id=True), "eos_token_id must be a token id"),
    "eos is one of a million": (edit(eos_token_id=[10**9] * 10**5), "eos_token_id must be a token id"),
    "eos of generation": (spell(GENERATION, '{"eos_token_id": "abc"}'), f"{GENERATION}: eos_token_id must be a token id"),
    "a thousand million layers": (edit(num_hidden_layers=10**9), "num_hidden_layers must be at most 4096, got 1000000000"),
    "more layers than are stored": (edit(num_hidden_layers=4096), "tensor model.layers.2."),
    "a vocabulary of 10**18": (edit(vocab_size=10**18), "vocab_size must be at most 2147483647"),
    "a vocabulary of 2**31": (edit(vocab_size=2**31 - 1), "model.embed_tokens.weight has shape"),
    "a width of 2**31": (edit(hidden_size=2**31 - 1), "model.embed_tokens.weight has shape [300, 32], config.json needs"),
    "heads of 2**31": (edit(head_dim=2**31 - 2), "q_proj.weight has shape [32, 32], config.json needs"),
    "a width and a vocabulary of 2**31": (edit(hidden_size=2**31 - 1, vocab_size=2**31 - 1), "which is too large"),
    "a million heads": (edit(num_attention_heads=10**6, num_key_value_heads=10**6), "q_proj.weight has shape"),
    "a context of 10**30": (edit(max_position_embeddings=10**30), "max_position_embeddings must be at most 2147483647"),
    "a context of 4,000 digits": (
        spell(CONFIG, f'{{"max_position_embeddings": 1{"0" * 4000}, "vocab_size": 300, "model_type": "llama"}}'),
        "max_position_embeddings must be at most",
    ),
    "a number of 5,000 digits": (spell(CONFIG, f'{{"a": {"1" * 5000}}}'), "not valid JSON"),
    "half a layer": (edit(num_hidden_layers=1.5), "num_hidden_layers must be a whole number above 0, got 1.5"),
    "layers are true": (edit(num_hidden_layers=True), "num_hidden_layers must be a whole number above 0, got True"),
    "no layers": (edit(num_hidden_layers=0), "num_hidden_layers must be a whole number above 0, got 0"),
    "minus one head": (edit(num_attention_heads=-1), "num_attention_heads must be a whole number above 0, got -1"),
    "eps is not a number": (edit(rms_norm_eps=float("nan")), "rms_norm_eps must be a number above 0, got nan"),
    "eps is infinite": (edit(rms_norm_eps=float("inf")), "rms_norm_eps must be a number above 0, got inf"),
    "theta is beyond a float": (edit(rope_theta=10**400), "rope_theta must be a number above 0"),
    "a factor is not a number": (
        edit(rope_scaling={"rope_type": "linear", "factor": float("nan")}),
        "rope_scaling.factor must be a number above 0, got nan",
    ),
    "quantized": (
        edit(quantization_config={"quant_method": "hqq"}),
        "(quant_method 'hqq'): only gptq, awq, compressed-tensors, fp8, bitnet, mxfp4 are read",
    ),
    "a model_type of a megabyte": (edit(model_type="x" * 10**6), "is not supported, only ["),
    "a model_type that is half a character": (spell(CONFIG, '{"model_type": "\\ud800", "vocab_size": 3}'), CONFIG),
    "a deep header": (header(DEEP), "nested too deeply"),
    "a deep shape": (header('{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": ' + DEEP), "nested too deeply"),
    "a header of 32 MiB": (header(b" " * 2**25), "its header has 33554432 bytes, more than 16777216"),
    "a header that is a list": (header("[]"), "must be an object"),
    "an entry that is a number": (header('{"a": 3}'), "not a safetensors file"),
    "a dtype that is a list": (header(json.dumps({"a": {**ENTRY, "dtype": []}}), b"12345678"), "and dtype []"),
    "a negative shape": (header(json.dumps({"a": {**ENTRY, "shape": [-1, -2]}}), b"12345678"), "has shape [-1, -2]"),
    "a range that ends before it begins": (header(json.dumps({"a": {**ENTRY, "data_offsets": [8, 0]}})), "invalid byte range"),
    "tensors in each other's bytes": (_overlapping, "before the previous tensor ends"),
    "an index that leaves the directory": (spell(INDEX, '{"weight_map": {"a": "../a"}}'), "files in the same directory"),
    "an index to the directory above": (spell(INDEX, '{"weight_map": {"a": ".."}}'), "files in the same directory"),
    "an index to nothing": (spell(INDEX, '{"weight_map": {"a": ""}}'), "files in the same directory"),
    "an index to no name": (spell(INDEX, '{"weight_map": {"a": "a\\u0000b"}}'), "invalid file name"),
    "an index to a file that is missing": (spell(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), "No such file"),
    "a deep index": (spell(INDEX, DEEP), "nested too deeply"),
    "weights of torch only": (
        instead(WEIGHTS, lambda path: path.with_name("pytorch_model.bin").write_bytes(b"PK")),
        "pytorch_model.bin exists, but its format is not supported: save the model as safetensors",
    ),
    **{
        f"{name} {what}": (change(name), name)
        for name in (*JSON_FILES, WEIGHTS)
        for what, change in {
            "is empty": lambda name: spell(name, b""),
            "is garbage": lambda name: spell(name, bytes(range(256)) * 40),
            "is a directory": lambda name: instead(name, Path.mkdir),
            "is a pipe": lambda name: instead(name, os.mkfifo),
            "is a link to itself": lambda name: instead(name, _loop),
            "is a device": lambda name: instead(name, lambda path: path.symlink_to("/dev/zero")),
        }.items()
    },
    **{f"{name} is deep": (spell(name, DEEP), name) for name in JSON_FILES},
    "weights end early": (lambda model_dir: os.truncate(model_dir / WEIGHTS, 9000), "truncated in tensor"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory_is_refused_with_the_reason(model_dir: Path, load: Callable[[Path], Answer], what: str) -> None:
    breaks, reason = BROKEN[what]
    breaks(model_dir)
    answer = load(model_dir)
    assert reason in answer.reason
    assert len(answer.reason) <= MAX_MESSAGE_CHARS
    assert "\n" not in answer.reason.strip()
    assert answer.reason.encode()
    assert answer.seconds < WITHIN_S


def test_links_to_files_elsewhere_are_followed(model_dir: Path, load: Callable[[Path], Answer], tmp_path: Path) -> None:
    """As in the cache of the hub's client, where all files are."""
    for path in list(model_dir.iterdir()):
        shutil.move(path, tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert load(model_dir).reason == ""


POOL: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    -1e300,
    "",
    "abc",
    "\ud800",
    "x" * 10_000,
    [],
    {},
    [None],
    [[]],
    {"a": {}},
    [[[[[[]]]]]],
]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in a JSON file, or other bytes anywhere."""
    if chance.random() < 0.25:
        return _damaged(content, chance)
    value = json.loads(content)
    holder, key = chance.choice(list(_places(value)))
    if chance.random() < 0.2:
        del holder[key]
    else:
        holder[key] = chance.choice(POOL)
    return json.dumps(value).encode()


def _damaged(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content[: chance.randrange(len(content))] if chance.random() < 0.3 else content)
    for _ in range(min(len(damaged), 5)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged)


def _places(value: Any, depth: int = 0) -> Any:
    """Where a value can be changed: of a long list or table only the first."""
    if not isinstance(value, dict | list) or depth > 4:
        return
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in list(keys)[: 12 if depth else 40]:
        yield value, key
        yield from _places(value[key], depth + 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*JSON_FILES, WEIGHTS])
def test_whatever_a_file_says_it_is_served_or_refused(
    sound: Path, model_dir: Path, load: Callable[[Path], Answer], name: str
) -> None:
    chance, served, original = random.Random(name), 0, (sound / name).read_bytes()
    for _ in range(NUM_FUZZED):
        content = _header_mutated(original, chance) if name == WEIGHTS else mutated(original, chance)
        (model_dir / name).write_bytes(content)
        answer = load(model_dir)
        assert len(answer.reason) <= MAX_MESSAGE_CHARS
        assert answer.reason.encode() is not None
        assert answer.seconds < WITHIN_S, (content[:2000], answer)
        served += not answer.reason
    assert 0 < served < NUM_FUZZED


def _header_mutated(content: bytes, chance: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    changed = mutated(content[8 : 8 + length], chance)
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]
