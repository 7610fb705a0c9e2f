"""From a started process to a ready rank: threads, group, model, warm-up, each phase timed.

Imports torch late: until then the rank is a small process that can already report what fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.messages import RankSpec, StartRank
from ryzanstein.worker.ranks.starting.process import resident
from ryzanstein.worker.supervision.group import IDLE
from ryzanstein.worker.supervision.messages import RankReady

if TYPE_CHECKING:
    from ryzanstein.worker.collectives import Collectives
    from ryzanstein.worker.collectives.parallel import TensorParallel
    from ryzanstein.worker.model.runner import ModelRunner
    from ryzanstein.worker.settings.options import RunnerOptions


class Phases:
    """The seconds of each phase, and the memory at its end. The board shows the current phase."""

    def __init__(self, board: RankBoard) -> None:
        self._board = board
        self.seconds: dict[str, float] = {}
        self.resident_bytes: dict[str, int] = {}
        self.peak_bytes: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._board.enter(name)
        began = time.monotonic()
        yield
        self.end(name, time.monotonic() - began)

    def end(self, name: str, duration_s: float) -> None:
        """Records what the phase cost."""
        memory = resident()
        self.seconds[name] = duration_s
        self.resident_bytes[name], self.peak_bytes[name] = memory.now_bytes, memory.peak_bytes


def load(start: StartRank, board: RankBoard) -> tuple[ModelRunner, RankReady]:
    """Returns the model, loaded and warmed up, and the message for the agent.

    Raises ModelRefused.
    """
    spec, phases = start.spec, Phases(board)
    phases.end("spawn", time.monotonic() - start.spawned_s)
    if spec.pin:
        os.sched_setaffinity(0, cores(sorted(os.sched_getaffinity(0)), spec.ranks_before + start.rank, spec.threads))
    with phases.phase("import"):
        from ryzanstein.worker.collectives.parallel import TensorParallel
        from ryzanstein.worker.model.runner import ModelRunner
    device = _device(spec, start.rank)
    with phases.phase("group"):
        tp = TensorParallel(start.rank, spec.tp, _collectives(start, device, board))
        _meet(tp, device)
    with phases.phase("load"):
        files = _stamp(Path(spec.model))
        runner = ModelRunner.load(
            Path(spec.model), tp, replace(runner_options(spec, device), on_read=board.load, on_pack=board.pack)
        )
    board.load(0, 0)
    board.pack(0, 0)
    with phases.phase("warm_up"):
        runner.warm_up()
    board.enter(IDLE)
    # A sequence may fill the rank's own blocks but no more, whatever the model's context: with
    # borrowed ones it could wait forever when they are taken back.
    context_length = min(runner.context_length, runner.extents.tokens_in(runner.num_blocks))
    numbers = (context_length, runner.num_blocks, spec.settings.block_size, runner.max_sequences)
    measured = (phases.seconds, phases.resident_bytes, phases.peak_bytes)
    kernels = (runner.without_kernels, runner.company_matters, runner.kernels_library)
    lending = (runner.max_blocks, runner.block_bytes, runner.without_lending)
    weights = (runner.quantization, runner.divergence)
    more = {**_pages(runner, context_length), "weights_stamp": files, "adaptable": dict(runner.adaptable)}
    return runner, RankReady(start.rank, *numbers, *measured, *kernels, *lending, *weights, **more)


def _stamp(model: Path) -> str:
    """Returns which files are loaded; empty where there are none, which loading refuses."""
    from ryzanstein.worker.checkpoints.weight_files import stamp

    try:
        return stamp(model)
    except OSError:
        return ""


def _pages(runner: ModelRunner, context_length: int) -> dict[str, Any]:
    """Returns what a rank says of its pages: their extents, and how they are kept."""
    extents, whole = runner.extents, runner.context_length
    return {
        "windows": extents.windows,
        "lasting": extents.lasting,
        "sparse_attention": runner.sparse_attention,
        "context_bytes": runner.bytes_for(whole) if context_length < whole else 0,
        "kv_compression": runner.kv_compression,
        "hot_pages": runner.hot_pages,
        "hot_tokens": extents.hot_tokens or 0,
        "without_compression": runner.without_compression,
        "num_unpacked": runner.num_unpacked,
        "native_layers": runner.native_layers,
        "without_native": runner.without_native,
        "page_bytes": runner.page_bytes,
        "hot_page_bytes": runner.hot_page_bytes,
        "page_format": runner.page_format,
        "num_states": runner.num_states,
        "state_bytes": runner.state_bytes,
        "numerics": runner.numerics,
        "content": runner.content,
    }


def cores(available: list[int], rank: int, threads: int) -> set[int]:
    """Returns the cores of one rank. Ranks share cores when there are too few for all."""
    return {available[(rank * threads + i) % len(available)] for i in range(threads)}


def _device(spec: RankSpec, rank: int) -> str:
    """Returns the device of a rank: `cuda:0` is that of the node's first. Raises ModelRefused if there are too few GPUs."""
    if spec.device == "cpu":
        return "cpu"
    import torch

    from ryzanstein.errors import RyzansteinError
    from ryzanstein.process.gpus import Gpus, choose_device
    from ryzanstein.worker.refusal import ModelRefused

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = Gpus(tuple(map(str, range(count))), os.environ.get("CUDA_VISIBLE_DEVICES"))
    whose = f"tp {spec.tp}" + (f" after {spec.ranks_before} ranks of other models" if spec.ranks_before else "")
    try:
        choice = choose_device(spec.device, spec.ranks_before + spec.tp, whose, gpus)
    except RyzansteinError as error:
        raise ModelRefused(error.message) from None
    if choice.device == "cpu":
        return "cpu"
    torch.cuda.set_device(spec.ranks_before + rank)
    return f"cuda:{spec.ranks_before + rank}"


def _collectives(start: StartRank, device: str, board: RankBoard) -> Collectives:
    from ryzanstein.worker.collectives.opening import GroupAddress, default_backend, open_collectives
    from ryzanstein.worker.collectives.waiting import SLEEPING

    spec = start.spec
    backend = default_backend(device) if spec.collectives == "auto" else spec.collectives
    store = Path(f"/proc/self/fd/{start.store_fd}")
    address = GroupAddress(backend, start.segment_fd, store)
    return open_collectives(address, start.rank, spec.tp, board, None if spec.spins else SLEEPING)


def _meet(tp: TensorParallel, device: str) -> None:
    """Waits for all ranks.

    How much longer the slowest rank took to import then counts for the group phase, not for
    loading.
    """
    import torch

    tp.collectives.all_reduce(torch.zeros(1, device=device))


def runner_options(spec: RankSpec, device: str) -> RunnerOptions:
    """Returns how a rank of this specification runs its model on `device`."""
    from ryzanstein.worker.settings.options import RunnerOptions

    return RunnerOptions(**asdict(spec.settings), device=device, num_threads=spec.threads, compiles_kernels=False)
