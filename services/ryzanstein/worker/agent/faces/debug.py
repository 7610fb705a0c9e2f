"""What a node shows of itself: where its requests are, and its ranks, also those that were lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from ryzanstein.observe.requests import FoundRequest, RequestStage
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.timestamps import duration, timestamp
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.versions.generations import RunningGeneration
from ryzanstein.worker.agent.versions.version import ModelVersion
from ryzanstein.worker.supervision.autopsy import Autopsy
from ryzanstein.worker.supervision.group import RankLoss, RankProgress
from ryzanstein.worker.supervision.stacks import ProcessStacks, ThreadStack


class NodeSight:
    """The node's part of `DebugService`."""

    def __init__(self, models: NodeModels) -> None:
        self._models = models

    def requests(self) -> Iterator[FoundRequest]:
        """Yields where the generations are that have not ended, on all versions of all models."""
        for version in self._versions():
            step, ahead = version.step, 0
            for generation in version.running:
                found = _found(generation, ahead, step)
                ahead += found.stage is RequestStage.QUEUED
                yield found

    async def add_stacks(self, watched_s: float, answer: pb.DumpStacksResponse) -> None:
        """Adds the processes of all models, and what lost ranks did."""
        versions = list(self._versions())
        for processes in await asyncio.gather(*(_processes(version, watched_s) for version in versions)):
            answer.processes.extend(processes)
        for version in versions:
            answer.autopsies.extend(_autopsy_to_wire(each, _name(version)) for each in version.host.autopsies)

    def _versions(self) -> Iterator[ModelVersion]:
        for agent in self._models:
            yield from agent.node.versions


def _found(generation: RunningGeneration, ahead: int, step: int) -> FoundRequest:
    now, stage, times = time.monotonic(), _stage(generation), generation.times
    return FoundRequest(
        generation.attempt.request.request_id,
        generation.attempt.generation_id,
        generation.model.name,
        stage,
        now - times.began_s,
        now - (times.moved_s or times.began_s),
        generation.attempt.attempt,
        "",
        sum(choice.num_new for choice in generation.choices),
        generation.num_prompt,
        generation.num_prompt if times.first_token_s else times.num_prefilled,
        ahead if stage is RequestStage.QUEUED else 0,
        step,
    )


def _stage(generation: RunningGeneration) -> RequestStage:
    """Returns how far it is. Ranks report at the end of a step: a request in its first one still counts as queued."""
    if generation.times.first_token_s:
        return RequestStage.DECODE
    return RequestStage.PREFILL if generation.times.num_prefilled else RequestStage.QUEUED


async def _processes(version: ModelVersion, watched_s: float) -> list[pb.ProcessStacks]:
    """Returns the processes that run the model, with what they wrote on the board."""
    if (serving := version.host.serving) is None:
        return []
    found = _processes_to_wire(await serving.group.stacks(watched_s), _name(version))
    board = {progress.pid: progress for progress in serving.group.progress() if progress.pid}
    resident = serving.group.resident_bytes()
    for process in found:
        if (progress := board.get(process.pid)) is not None:
            process.board.CopyFrom(rank_to_wire(progress, resident[progress.rank]))
    return found


def _name(version: ModelVersion) -> str:
    return "" if version.host.text is None else version.host.text.name


def _processes_to_wire(processes: Sequence[ProcessStacks], model: str) -> list[pb.ProcessStacks]:
    return [
        pb.ProcessStacks(name=each.name, pid=each.pid, model=model, threads=map(_thread_to_wire, each.threads))
        for each in processes
    ]


def _thread_to_wire(thread: ThreadStack) -> pb.ThreadStack:
    return pb.ThreadStack(
        tid=thread.tid,
        name=thread.name,
        state=thread.state,
        waits_in=thread.waits_in,
        cpu=duration(thread.cpu_s),
        stack=thread.stack,
    )


def _autopsy_to_wire(autopsy: Autopsy, model: str) -> pb.Autopsy:
    return pb.Autopsy(
        time=timestamp(autopsy.time),
        loss=loss_to_wire(autopsy.time, autopsy.loss),
        model=model,
        ranks=autopsy.ranks,
        missing=autopsy.missing,
        processes=_processes_to_wire(autopsy.processes, model),
    )


def rank_to_wire(progress: RankProgress, resident_bytes: int) -> worker.RankStatus:
    """Returns what a rank wrote on the board."""
    return worker.RankStatus(
        rank=progress.rank,
        pid=progress.pid,
        step=progress.step,
        collective=progress.collective,
        phase=progress.doing,
        since_progress=duration(progress.still_s),
        last_step=duration(progress.last_step_s),
        resident_bytes=resident_bytes,
        loaded_bytes=progress.loaded_bytes,
        load_bytes=progress.load_bytes,
        packed_bytes=progress.packed_bytes,
        pack_bytes=progress.pack_bytes,
    )


def loss_to_wire(at: float, loss: RankLoss) -> worker.RankLoss:
    """Returns why a node's ranks were restarted; `at` is Unix seconds."""
    return worker.RankLoss(
        time=timestamp(at), rank=loss.rank, cause=loss.cause.value, message=loss.message, last_words=loss.last_words
    )
