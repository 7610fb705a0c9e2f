"""Reading an adapter's directory: names, shapes, what is missing or too much, and files that are broken. Without torch."""

import json
import mmap
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ryzanstein.worker.adapters.digest import digest_of
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter
from ryzanstein.worker.adapters.packing import open_packed, pack, packed_bytes
from ryzanstein.worker.adapters.reading import CONFIG, TENSORS, read_adapter
from ryzanstein.worker.adapters.unfit import AdapterUnfit

ADAPTABLE = {
    "model.embed_tokens": (11, 8),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in (("self_attn.q_proj", (8, 12)), ("self_attn.v_proj", (8, 4)), ("mlp.down_proj", (16, 8)))
    },
    "lm_head": (8, 11),
}
PREFIX = "base_model.model."
Tensors = dict[str, npt.NDArray[np.generic]]
Write = Callable[..., Path]


def factors(module: str, rank: int = 3, shape: tuple[int, int] | None = None) -> Tensors:
    num_inputs, num_outputs = shape or ADAPTABLE[module]
    generator = np.random.default_rng(len(module))
    return {
        f"{PREFIX}{module}.lora_A.weight": generator.normal(size=(rank, num_inputs)).astype(np.float32),
        f"{PREFIX}{module}.lora_B.weight": generator.normal(size=(num_outputs, rank)).astype(np.float32),
    }


Q, V = "self_attn.q_proj", "self_attn.v_proj"
BOTH = {**factors(f"model.layers.0.{Q}"), **factors(f"model.layers.1.{Q}")}
A0, B0 = list(BOTH)[:2]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Writes an adapter's directory: tensors, and changes of its configuration."""

    def write(tensors: Mapping[str, Any] = BOTH, **config: Any) -> Path:
        save_file(dict(tensors), tmp_path / TENSORS)
        plain = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
        (tmp_path / CONFIG).write_text(json.dumps({**plain, **config}))
        return tmp_path

    return write


def refusal(path: Path, adaptable: Mapping[str, tuple[int, int]] = ADAPTABLE) -> AdapterUnfit:
    with pytest.raises(AdapterUnfit) as refused:
        read_adapter(path, adaptable)
    return refused.value


def test_factors_are_read_and_scaled(written: Write, tmp_path: Path) -> None:
    adapter = read_adapter(written(base_model_name_or_path="their/model"), ADAPTABLE)
    assert adapter.base == "their/model"
    assert set(adapter.weights) == {f"model.layers.{layer}.{Q}" for layer in range(2)}
    pack(adapter, tmp_path / "packed")
    found = open_packed(tmp_path / "packed")[f"model.layers.0.{Q}"]
    assert np.array_equal(found.a_IR, BOTH[A0].T)
    assert np.array_equal(found.b_RO, BOTH[B0].T * np.float32(2))
    assert found.bias_O is None
    for each in open_packed(tmp_path / "packed").values():
        assert each.a_IR.ctypes.data % 64 == each.b_RO.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("theirs", "adaptable"),
    [
        ("model.language_model.layers.", ADAPTABLE),
        ("language_model.model.layers.", ADAPTABLE),
        ("language_model.layers.", ADAPTABLE),
        ("layers.", ADAPTABLE),
        ("model.layers.", {name.replace("model.", "backbone."): shape for name, shape in ADAPTABLE.items()}),
    ],
)
def test_modules_may_have_other_names_than_the_weights(
    theirs: str, adaptable: dict[str, tuple[int, int]], written: Write
) -> None:
    renamed = {PREFIX + theirs + name.partition(".layers.")[2]: each for name, each in BOTH.items()}
    assert len(read_adapter(written(renamed), adaptable).weights) == 2
    lacking = {name: each for name, each in renamed.items() if f"{theirs}1." not in name}
    assert refusal(written(lacking), adaptable).where == "target_modules"


def test_names_without_the_prefix_of_peft(written: Write) -> None:
    assert len(read_adapter(written({name.removeprefix(PREFIX): each for name, each in BOTH.items()}), ADAPTABLE).weights) == 2


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_floats(kind: Any, written: Write) -> None:
    adapter = read_adapter(written({name: each.astype(kind) for name, each in BOTH.items()}), ADAPTABLE)
    assert np.array_equal(adapter.weights[f"model.layers.0.{Q}"].a_RI, BOTH[A0].astype(kind).astype(np.float32))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (f"model.layers.2.{Q}", "no such weight"),
        ("model.layers.0.mlp.experts.3.down_proj", "experts"),
        ("model.layers.0.mlp.experts", "experts"),
        ("model.layers.0.self_attn.kv_b_proj", "latents"),
        ("model.visual.blocks.0.q_proj", "text half"),
        ("model.layers.0.mlp.gate", "no such weight"),
    ],
)
def test_a_module_that_takes_no_adapter_is_named(module: str, why: str, written: Write) -> None:
    refused = refusal(written({**BOTH, **factors(module, shape=(8, 8))}))
    assert module in refused.where
    assert why in refused.message
    assert "merge" in refused.message


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}model.layers.0.{Q}.lora_magnitude_vector",
        f"{PREFIX}model.layers.0.{Q}.lora_A.default.weight",
        f"{PREFIX}model.layers.0.input_layernorm.weight",
        f"{PREFIX}lm_head.weight",
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta",
        f"{PREFIX}model.embed_tokens.base_layer.weight",
        f"{PREFIX}model.layers.0.{V}.lora_embedding_A",
        f"{PREFIX}model.embed_tokens.lora_A.weight",
        f"{PREFIX}model.layers.0.{V}.lora_A.weight",
        f"{PREFIX}model.layers.0.{V}.lora_B.weight",
        f"{PREFIX}model.layers.0.{Q}.lora_B.bias",
        "lora_A.weight",
        "",
    ],
)
def test_a_tensor_too_much_is_named(name: str, written: Write) -> None:
    assert refusal(written({**BOTH, name: np.ones((3, 8), np.float32)})).where == name


@pytest.mark.parametrize(
    ("name", "shape"), [(A0, (3, 9)), (A0, (4, 8)), (A0, (24,)), (B0, (12, 4)), (B0, (3, 12)), (B0, (12, 3, 1)), (A0, (0, 8))]
)
def test_another_shape_is_named(name: str, shape: tuple[int, ...], written: Write) -> None:
    assert refusal(written({**BOTH, name: np.ones(shape, np.float32)})).where == name


def test_an_adapter_of_a_smaller_model_is_refused_for_its_shapes(written: Write) -> None:
    found = refusal(written(factors(f"model.layers.0.{Q}", shape=(6, 9))))
    assert found.where.startswith(PREFIX)
    assert "has 8 inputs" in found.message


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(number: float, written: Write) -> None:
    broken = BOTH[B0].copy()
    broken[5, 2] = number
    assert refusal(written({**BOTH, B0: broken})).where == B0


def test_a_factor_that_is_too_large_once_it_is_scaled(written: Write, tmp_path: Path) -> None:
    adapter = read_adapter(written({**BOTH, B0: BOTH[B0] * np.float32(1e37)}, lora_alpha=1000), ADAPTABLE)
    with pytest.raises(AdapterUnfit, match="q_proj"):
        pack(adapter, tmp_path / "packed")
    assert not list(tmp_path.glob("*packed*"))


def test_tensors_of_whole_numbers_are_refused(written: Write) -> None:
    assert refusal(written({**BOTH, A0: np.ones((3, 8), np.int32)})).where in (A0, TENSORS)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules"),
        ({"target_modules": r".*\.0\.self_attn\.q_proj"}, f"{PREFIX}model.layers.1.{Q}.lora_A.weight"),
        ({"exclude_modules": ["1.self_attn.q_proj"]}, f"{PREFIX}model.layers.1.{Q}.lora_A.weight"),
        ({"layers_to_transform": [0]}, f"{PREFIX}model.layers.1.{Q}.lora_A.weight"),
        ({"rank_pattern": {r"1\.self_attn\.q_proj": 5}}, f"{PREFIX}model.layers.1.{Q}.lora_A.weight"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"lora_bias": True}, "lora_bias"),
    ],
)
def test_tensors_and_targets_must_be_the_same(config: dict[str, Any], where: str, written: Write) -> None:
    assert refusal(written(**config)).where == where


def test_two_names_of_one_weight_are_refused(written: Write) -> None:
    again = factors(f"model.language_model.layers.0.{Q}", shape=(8, 12))
    assert "another module" in refusal(written({**BOTH, **again})).message


def test_a_file_cut_anywhere_is_refused(written: Write) -> None:
    path = written()
    whole = (path / TENSORS).read_bytes()
    for part in range(16):
        (path / TENSORS).write_bytes(whole[: len(whole) * part // 16])
        assert refusal(path).where == TENSORS


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b"not json",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400000000]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 0]}}',
        b'{"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
    ids=lambda header: header[:60].decode(),
)
def test_a_wrong_header_is_refused(header: bytes, written: Write) -> None:
    path = written()
    (path / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)
    assert refusal(path).where == TENSORS


@pytest.mark.parametrize("length", [2**63, 2**40, 9, 0])
def test_a_wrong_length_of_the_header_is_refused(length: int, written: Write) -> None:
    path = written()
    (path / TENSORS).write_bytes(length.to_bytes(8, "little") + (path / TENSORS).read_bytes()[8:])
    assert refusal(path).where == TENSORS


def test_missing_files_are_named(written: Write, tmp_path: Path) -> None:
    path = written()
    (path / TENSORS).unlink()
    assert refusal(path).where == TENSORS
    (path / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    assert "pickle" in str(refusal(path))
    (path / CONFIG).unlink()
    assert refusal(path).where == CONFIG
    assert refusal(tmp_path / "nowhere").where == CONFIG


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"peft_type": "LORA", "r": 99999999999999999999}'])
def test_a_broken_configuration_is_refused(content: str, written: Write) -> None:
    path = written()
    (path / CONFIG).write_text(content)
    assert refusal(path).where in (CONFIG, "r")


def test_a_digest_is_of_the_content(written: Write, tmp_path: Path) -> None:
    path = written()
    digest = digest_of(path)
    assert len(digest) == 64
    (path / "README.md").write_text("other")
    (path / TENSORS).touch()
    assert digest_of(path) == digest
    changed = bytearray((path / TENSORS).read_bytes())
    changed[-1] ^= 1
    (path / TENSORS).write_bytes(changed)
    assert digest_of(path) != digest
    assert digest_of(written(lora_alpha=7)) != digest
    with pytest.raises(AdapterUnfit, match=CONFIG):
        digest_of(tmp_path / "nowhere")


def test_nothing_of_torch_or_peft_is_imported() -> None:
    program = (
        "import sys; import ryzanstein.worker.adapters.digest, ryzanstein.worker.adapters.packing; "
        "assert not {'torch', 'peft', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e4])
def test_a_packed_file_takes_as_much_memory_as_was_said(half: bool, size: float, tmp_path: Path) -> None:
    random = np.random.default_rng(1)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return (random.normal(size=shape) * size).astype(np.float32)

    weights = {
        f"weight-{n}": AdaptedWeight(normal(n, 100), normal(70, n), normal(70) if n % 2 else None, 0.5) for n in range(1, 9)
    }
    pack(Adapter(weights), tmp_path / "packed", half=half)
    written, said = (tmp_path / "packed").stat().st_size, packed_bytes(Adapter(weights), half=half)
    assert written <= said < 1.05 * written + mmap.PAGESIZE


def test_a_packed_file_of_something_else_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="no packed adapter"):
        open_packed(tmp_path / "other")


def test_an_empty_adapter_packs(tmp_path: Path) -> None:
    pack(Adapter({}), tmp_path / "packed")
    assert open_packed(tmp_path / "packed") == {}
