"""What a rank reads of a tensor: rows or columns, through small windows, converted, from wherever it lies in its file."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ryzanstein.worker.checkpoints.checkpoint import MappedWeights
from ryzanstein.worker.checkpoints.memory import WeightMemory
from ryzanstein.worker.checkpoints.safetensors_files import SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.loading import load_model, slice_bytes
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.settings.options import RunnerOptions

CPU = torch.device("cpu")
SHAPE = (3001, 1003)  # in float32 more than one window of 8 MiB
NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write(path: Path, tensor: torch.Tensor, header_padding: int = 0) -> None:
    """One tensor "w"; the header's length decides how the data is aligned."""
    data = tensor.view(torch.uint8).numpy().tobytes()
    header = json.dumps({"w": {"dtype": NUMBERS[tensor.dtype], "shape": tensor.shape, "data_offsets": [0, len(data)]}})
    header = header.ljust(-(-len(header) // 8) * 8 + header_padding)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def opened(model_dir: Path, dtype: torch.dtype = torch.float32) -> MappedWeights:
    files = SafetensorsFiles(model_dir, read_tensor_files(model_dir))
    return MappedWeights(files, dtype, CPU, WeightFormat("none", CPU, dtype))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stored", list(NUMBERS))
def test_the_slices_of_all_ranks_are_the_whole(tmp_path: Path, stored: torch.dtype, dim: int, size: int) -> None:
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(stored)
    write(tmp_path / "model.safetensors", whole)
    width = -(-SHAPE[dim] // size)
    shape = [width if d == dim else SHAPE[d] for d in (0, 1)]
    with opened(tmp_path) as weights:
        parts = [weights.new(*shape) for _ in range(size)]
        for rank, part in enumerate(parts):
            weights.read("w", SHAPE, part, dim=dim, start=rank * width)
    joined = torch.cat(parts, dim=dim)
    assert torch.equal(joined.narrow(dim, 0, SHAPE[dim]), whole.float())
    assert joined.narrow(dim, SHAPE[dim], size * width - SHAPE[dim]).count_nonzero() == 0


@pytest.mark.parametrize("padding", range(1, 8))
def test_a_tensor_that_is_not_aligned_is_read(tmp_path: Path, padding: int) -> None:
    whole = torch.arange(3000, dtype=torch.float64).view(30, 100)
    write(tmp_path / "model.safetensors", whole, padding)
    with opened(tmp_path) as weights:
        weights.read("w", (30, 100), out := weights.new(10, 100), start=20)
    assert torch.equal(out, whole[20:].float())


def test_a_slice_past_the_end_is_zero(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", torch.ones(10, 4))
    with opened(tmp_path) as weights:
        weights.read("w", (10, 4), out := weights.new(4, 4), start=12)
    assert out.count_nonzero() == 0


def test_reading_into_a_transposed_view_transposes(tmp_path: Path) -> None:
    whole = torch.randn(SHAPE)
    write(tmp_path / "model.safetensors", whole)
    with opened(tmp_path) as weights:
        out = weights.new(SHAPE[1], SHAPE[0])
        weights.read("w", SHAPE, out.t())
    assert torch.equal(out, whole.t())


def test_memory_that_is_forgotten_is_given_to_the_next_as_zeros() -> None:
    memory = WeightMemory(torch.float32, CPU)
    first = memory.zeros(1024, 1024).fill_(1)
    address, part = first.data_ptr(), first[0]
    del first
    assert memory.zeros(1024, 1024).data_ptr() != address, "a view still looks at it"
    del part
    again = [memory.zeros(1024, 1024) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert all(tensor.count_nonzero() == 0 for tensor in again)


def test_memory_outlives_the_source_that_it_came_from(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", whole := torch.randn(SHAPE))
    with opened(tmp_path) as weights:
        weights.read("w", SHAPE, out := weights.new(*SHAPE))
    del weights
    assert torch.equal(out, whole)


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_of_a_checkpoint_in_files_hold_every_number_of_it_once(checkpoint, size: int) -> None:
    model_dir = checkpoint(max_shard_size="50KB")
    stored = [tensor for file in model_dir.glob("*.safetensors") for tensor in load_file(file).values()]
    everywhere = sum(tensor.nbytes for tensor in stored if tensor.dim() == 1)  # norms
    ranks = [TensorParallel(rank, size, LocalCollectives()) for rank in range(size)]
    slices = [slice_bytes(model_dir, tp, RunnerOptions(num_blocks=4)) for tp in ranks]
    assert sum(slices) == sum(tensor.nbytes for tensor in stored) + (size - 1) * everywhere
    assert load_model(model_dir, ranks[-1], RunnerOptions(num_blocks=4)).cache.num_blocks == 4


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("size", [1, 2])
def test_reading_is_told_to_its_end(checkpoint, size: int, quantization: str) -> None:
    told: list[tuple[int, int]] = []
    options = RunnerOptions(num_blocks=4, quantization=quantization, on_read=lambda *read: told.append(read))
    load_model(checkpoint(), TensorParallel(0, size, LocalCollectives()), options)
    totals = {total for _, total in told}
    assert totals == {told[-1][0]}
    assert [read for read, _ in told] == sorted({read for read, _ in told})
    assert len(told) > 10


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_packing_is_told_to_its_end(checkpoint, quantization: str) -> None:
    told: list[tuple[int, int]] = []
    options = RunnerOptions(num_blocks=4, quantization=quantization, on_pack=lambda *packed: told.append(packed))
    load_model(checkpoint(), TensorParallel(0, 1, LocalCollectives()), options)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0
