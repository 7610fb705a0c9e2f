"""One rank as a process of its own, for the tests: `rank_program.py JOBS RANK SIZE SEGMENT_FD OUT`.

JOBS is a pickled list of `(model directory, options, plans)`, and packed adapters by slot if there are any. A plan with
full_logits is answered by logits, another by greedy tokens. OUT gets this rank's answers; a refusal is answered by its text.
Before the jobs, shared-memory collectives are compared with gloo's.
"""

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.collectives.opening import GroupAddress, open_collectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.engine.plan import SampleRow, StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions

GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
SIZES = (1, 7, 2048, 100_003, 600_001)  # the last two split into parts, and into several chunks of a slot


class Recorder:
    """Remembers what collectives report."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.depth = 0
        self.address = None

    def begin(self, op: str, size_bytes: int) -> None:
        self.ops.append(op)
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1


def main() -> None:
    jobs_file, rank, size, segment_fd, out = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(1)
    patience = WaitPolicy(spin_s=0.0, deadline_s=60.0)
    recorder = Recorder()
    shm = open_collectives(GroupAddress("shm", segment_fd), rank, size, recorder, patience)
    gloo = open_collectives(GroupAddress("gloo", store_path=Path(f"{jobs_file}.store")), rank, size, Recorder(), patience)
    answers: dict[str, Any] = {"collectives": [compare(shm, gloo, rank, count) for count in SIZES]}
    answers["reported"] = (sorted(set(recorder.ops)), recorder.depth)
    tp = TensorParallel(rank, size, shm)
    answers["jobs"] = [run(tp, *job) for job in pickle.loads(Path(jobs_file).read_bytes())]
    torch.save(answers, out)
    gloo.close()
    shm.close()


def compare(shm: Collectives, gloo: Collectives, rank: int, count: int) -> dict[str, Any]:
    """The greatest difference of each operation, and the sum's bits, which must be the same on every rank."""
    mine = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    summed = shm.all_reduce(mine.clone())
    rows = mine[: count // 7 * 7].view(7, -1) if count >= 7 else mine.view(1, 1)
    rooted, expected = shm.gather_to_root(rows), gloo.gather_to_root(rows)
    integers = torch.arange(count) * (rank + 1)
    return {
        "all_reduce": (summed - gloo.all_reduce(mine.clone())).abs().max().item(),
        "bits": summed.view(torch.int32).sum(dtype=torch.int64).item(),
        "integers": torch.equal(shm.all_reduce(integers.clone()), gloo.all_reduce(integers.clone())),
        "half": shm.all_reduce(torch.full((count,), 0.5, dtype=torch.bfloat16)).float().mean().item(),
        "all_gather": torch.equal(shm.all_gather(rows), gloo.all_gather(rows)),
        "all_gather_rows": torch.equal(shm.all_gather(rows, dim=0), gloo.all_gather(rows, dim=0)),
        "rooted": (rooted is None) == (rank > 0) and (rooted is None or torch.equal(rooted, expected)),
        "broadcast": torch.equal(shm.broadcast(mine.clone()), gloo.broadcast(mine.clone())),
    }


def run(
    tp: TensorParallel,
    model_dir: Path,
    options: dict[str, Any],
    plans: list[StepPlan],
    adapters: Mapping[int, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    try:
        runner = ModelRunner.load(model_dir, tp, RunnerOptions(**options))
    except ModelRefused as refusal:
        return {"refused": str(refusal)}
    runner.warm_up()
    for slot, path in adapters.items():
        runner.map_adapter(slot, path)
    answers: list[Any] = []
    for each in plans:
        plain = runner.plans.plan(*msgspec.structs.astuple(each)[1:6], full_logits=each.full_logits)
        plan = msgspec.structs.replace(plain, adapters=each.adapters)
        if plan.full_logits:
            answers.append(runner.hidden_logits(plan))
        else:
            rows = [GREEDY] * len(plan.sampled) if tp.rank == 0 else []
            answers.append([token.token_id for token in runner.execute(plan, rows)])
    return {"answers": answers, "kv_bytes": runner.kv_bytes, "num_blocks": runner.num_blocks}


if __name__ == "__main__":
    main()
