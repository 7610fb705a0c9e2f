"""How much memory a model takes: the estimate, and the ranks that take it."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import SamplingParams
from ryzanstein.process import gpus
from ryzanstein.process.allotment import memory_bytes
from ryzanstein.worker import devices
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import StepEvents, SubmitGroup
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.starting.process import private_bytes
from ryzanstein.worker.sizing import need_of, node_memory_bytes
from ryzanstein.worker.supervision.group import GroupEvents

pytestmark = pytest.mark.long

DEMO = Path(__file__).parents[2] / "shared" / "ryzanstein" / "demo"
MIB = 2**20


def settings(**changes) -> WorkerSettings:
    return WorkerSettings(device="cpu", threads_per_rank=1, **changes)


class Filled:
    """Fills the KV cache of a group, and watches the memory of its ranks meanwhile."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings, self._ended, self.held, self.peak = settings, 0, 0, 0
        events = GroupEvents(self._on_step, lambda trace: None, lambda: False)
        self._engines = NativeEngines(settings.rank_spec(str(DEMO)), settings.tuning.ranks, events)

    async def run(self, num_prompts: int, length: int) -> None:
        group = self._engines.make()
        try:
            await group.start()
            draw = random.Random(0)
            for number in range(1, num_prompts + 1):
                prompt = [draw.randrange(2, 1000) for _ in range(length)]
                group.send(SubmitGroup(number, prompt, SamplingParams(seed=number), 120, [], [[]], [False]))
            async with asyncio.timeout(60):
                while self._ended < num_prompts and not group.lost.done():
                    self.peak = max(self.peak, sum(group.private_bytes()))
                    await asyncio.sleep(0.02)
            assert not group.lost.done(), group.lost
            self.peak = max(self.peak, sum(group.private_bytes()))
        finally:
            await group.end(graceful=False)
            await self._engines.close()

    def _on_step(self, events: StepEvents) -> None:
        self._ended += len(events.ended)
        self.held = max(self.held, events.stats.blocks_held)


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("format", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=["float32", "int8", "bfloat16"])
async def test_the_need_of_a_model_is_what_its_ranks_take_with_a_full_cache_and_little_more(tp, format) -> None:
    chosen = settings(tp=tp, num_blocks=512, **format)
    filled = Filled(chosen)
    await filled.run(5, 1500)
    assert filled.held >= 480, "the cache is full"
    need = need_of(DEMO, chosen)
    print(f"tp {tp} {format}: need {need / MIB:.0f} MiB, taken {filled.peak / MIB:.0f} MiB")
    assert filled.peak <= need <= 1.5 * filled.peak + 150 * MIB


def test_the_need_grows_by_exactly_the_cache() -> None:
    token_bytes = 4 * 2 * 4 * 24 * 4  # layers, keys and values, heads, dimension, float32
    few, many = (need_of(DEMO, settings(num_blocks=blocks)) for blocks in (4096, 8192))
    assert many - few == 4096 * 16 * token_bytes
    by_bytes = need_of(DEMO, settings(kv_bytes=8192 * 16 * token_bytes + 1))
    assert by_bytes == many
    default = need_of(DEMO, settings(max_sequences=64))  # each as long as the context: 2048
    assert default == need_of(DEMO, settings(max_sequences=64, num_blocks=64 * 2048 // 16))


def test_the_need_is_known_in_a_moment_and_without_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from ryzanstein.worker.config import WorkerSettings; "
        "from ryzanstein.worker.sizing import need_of; "
        f"print(need_of(Path({str(DEMO)!r}), WorkerSettings(device='cpu')) > 0, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True False\n"


@pytest.fixture
def copy(tmp_path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def refusal(directory: Path, **changes) -> str:
    began = time.monotonic()
    with pytest.raises(RyzansteinError) as raised:
        need_of(directory, settings(**changes))
    assert time.monotonic() - began < 2
    assert (raised.value.code, raised.value.reason) == (Code.FAILED_PRECONDITION, "MODEL_REFUSED")
    return raised.value.message


def huge_header(directory: Path) -> None:
    with (directory / "model.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda place: (place / "config.json").unlink(), "config.json"),
        (lambda place: (place / "config.json").write_text("[" * 100_000), "config.json"),
        (lambda place: (place / "config.json").write_text('{"model_type": "tree"}'), "config.json"),
        (lambda place: (place / "model.safetensors").unlink(), "model.safetensors"),
        (lambda place: (place / "model.safetensors").write_bytes(b"\xff" * 100), "model.safetensors"),
        (huge_header, "model.safetensors"),
        (lambda place: ((place / "config.json").unlink(), (place / "config.json").mkdir()), "config.json"),
    ],
    ids=["no config", "nested", "unknown", "no weights", "nonsense", "huge header", "a directory"],
)
def test_a_directory_that_cannot_be_served_is_refused_by_the_name_of_its_file(copy, spoil, names) -> None:
    spoil(copy)
    assert names in refusal(copy)


def test_numbers_that_do_not_fit_are_named(copy) -> None:
    assert "8 attention heads" in refusal(copy, tp=9)
    assert "smaller than one block" in refusal(copy, kv_bytes=100)
    assert str(copy / "nothing") in refusal(copy / "nothing")


def test_weights_are_not_read(copy) -> None:
    """The file is sparse: 100 GB of a tensor would take minutes."""
    header = json.dumps({"x.weight": {"dtype": "F32", "shape": [250_000, 100_000], "data_offsets": [0, 10**11]}}).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**11)
    began = time.monotonic()
    assert need_of(copy, settings()) > 10**11
    assert time.monotonic() - began < 2


def test_a_node_has_most_of_the_memory_that_it_may_use(monkeypatch) -> None:
    assert node_memory_bytes(settings()) == int(0.9 * memory_bytes())
    monkeypatch.setattr(devices.allotment, "memory_bytes", lambda: 1_000_000)
    assert node_memory_bytes(settings()) == 900_000


def test_gpus_without_a_driver_are_an_error_that_says_so(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "_NVML", "libnothing.so.1")
    with pytest.raises(RyzansteinError, match=r"^tp 1 needs 1 GPU, 0 are visible"):
        node_memory_bytes(WorkerSettings(device="cuda"))
    with pytest.raises(RyzansteinError, match="the driver finds no GPU"):
        devices.gpu_memory_bytes(1)


def test_private_memory_is_that_without_files() -> None:
    before = private_bytes()
    held = bytearray(b"x") * (64 * MIB)
    assert 0.9 * len(held) <= private_bytes() - before <= 1.2 * len(held)
    with pytest.raises(OSError, match="4194305"):
        private_bytes(4194305)
