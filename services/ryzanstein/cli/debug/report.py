"""What `ryzanstein debug` prints: the oldest requests, the way of one, or all stacks of one service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape

from ryzanstein.cli.debug.evidence import Evidence, seconds
from ryzanstein.cli.debug.findings import doing, place, standstills
from ryzanstein.cli.fitted_table import Column, FittedTable
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.wire.enum_names import enum_name

MAX_ROWS = 20


def stage_of(request: pb.FoundRequest) -> str:
    return enum_name(pb.RequestStage, request.stage)


def _node_of(evidence: Evidence, request: pb.FoundRequest) -> str:
    """Returns the node that has the request: the one that a router names, or that answers. Empty: none."""
    return request.node_id or ("" if evidence.service.peer is None else evidence.name)


def headlines(all_evidence: Sequence[Evidence]) -> Iterator[str]:
    """Yields what stands out in a cluster, one line each: who does not answer, what is silent longest, who holds it up."""
    for each in all_evidence:
        if each.error:
            yield f"{each.name} does not answer: {each.error}"
    found = [(request, _node_of(each, request)) for each in all_evidence for request in each.requests]
    running = [pair for pair in found if stage_of(pair[0]) != "paused"]
    if running:
        silent, node = max(running, key=lambda pair: seconds(pair[0].silent))
        where = f" on {node}" if node else ""
        for_s = f"{seconds(silent.silent):.1f} s"
        yield f"silent for longest: request {silent.request_id}, {stage_of(silent)}{where}, for {for_s}"
    for each in all_evidence:
        for stands in standstills(each.stacks) if each.stacks is not None else ():
            yield f"{each.name}: {stands.text}"


def request_table(all_evidence: Sequence[Evidence]) -> FittedTable:
    """Returns the oldest requests: where the router has them, and those that only nodes know."""
    table = FittedTable(
        "oldest requests",
        Column("request", folds=True),
        Column("stage"),
        Column("node", folds=True),
        Column("age"),
        Column("silent"),
        Column("attempt", 2),
        Column("tokens", 1),
        Column("model", 3, folds=True),
        Column("generation", 4, folds=True),
    )
    found: dict[str, tuple[pb.FoundRequest, str]] = {}
    for each in all_evidence:
        for request in each.requests:
            found.setdefault(request.generation_id, (request, _node_of(each, request) or "-"))
    oldest = sorted(found.values(), key=lambda pair: -seconds(pair[0].age))
    for request, node in oldest[:MAX_ROWS]:
        age, silent = f"{seconds(request.age):.1f} s", f"{seconds(request.silent):.1f} s"
        told = (escape(request.request_id), stage_of(request), node, age, silent, str(request.attempt))
        table.add(*told, str(request.tokens), request.model, request.generation_id)
    return table


def way(all_evidence: Sequence[Evidence]) -> Iterator[str]:
    """Yields the way of one request through the services that have it, and the ranks where it is."""
    for each in all_evidence:
        for request in each.requests:
            yield f"{each.name}: {_told(request)}"
        if each.requests and each.service.peer is not None and each.stacks is not None:
            yield from _ranks(each.stacks, {request.model for request in each.requests})
    for each in all_evidence:
        for stands in standstills(each.stacks) if each.requests and each.stacks is not None else ():
            yield f"it waits for {each.name}: {stands.text}"


def _told(request: pb.FoundRequest) -> str:
    place = f" on {request.node_id}" if request.node_id else ""
    queue = f", {request.ahead} ahead of it" if stage_of(request) == "queued" else ""
    prompt = f", prompt {request.prefilled}/{request.prompt_tokens}" if request.step else ""
    return (
        f"generation {request.generation_id}, attempt {request.attempt}: {stage_of(request)}{place}{queue}{prompt}, "
        f"{request.tokens} tokens, {seconds(request.age):.1f} s old, silent for {seconds(request.silent):.1f} s"
    )


def _ranks(stacks: pb.DumpStacksResponse, models: set[str]) -> Iterator[str]:
    for process in stacks.processes:
        if process.HasField("board") and process.model in models:
            yield f"  {process.name}: {place(process)}"


def everything(evidence: Evidence) -> Iterator[str]:
    """Yields all threads and tasks of one service, those of its ranks, and what lost ranks did."""
    stacks = evidence.stacks
    if stacks is None:
        yield f"{evidence.name} does not answer: {evidence.error}"
        return
    for stands in standstills(stacks):
        yield stands.text
    for process in stacks.processes:
        yield from _process(process)
    for task in sorted(stacks.tasks, key=lambda task: task.name):
        yield f"task {task.name}"
        yield from _indented(task.stack)
    for autopsy in stacks.autopsies:
        yield f"lost at {autopsy.time.ToJsonString()}: {autopsy.loss.message}"
        yield from (f"  rank {rank}: {text}" for rank, text in enumerate(autopsy.ranks))
        if autopsy.missing:
            yield f"  the others waited for rank {', '.join(map(str, autopsy.missing))}"
        for process in autopsy.processes:
            yield from _process(process)


def _process(process: pb.ProcessStacks) -> Iterator[str]:
    model = f" of {process.model}" if process.model else ""
    yield f"{process.name}{model}, process {process.pid}" + (f": {place(process)}" if process.HasField("board") else "")
    for thread in process.threads:
        yield f"  thread {thread.tid} {thread.name} {doing(thread)}"
        yield from _indented(thread.stack)


def _indented(stack: str) -> Iterator[str]:
    yield from (f"    {line}" for line in stack.splitlines())
