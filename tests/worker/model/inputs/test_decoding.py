"""Inputs of decode steps that are updated against those that are built: every number, whatever happens in between."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import pytest
import torch

from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.builder import InputBuilder
from ryzanstein.worker.model.inputs.decoding import decode_steps
from ryzanstein.worker.model.inputs.layout import CacheLayout
from ryzanstein.worker.model.inputs.paged import PagedReader, PagedSegments
from ryzanstein.worker.model.inputs.step import StepInputs

SIZE, BLOCKS = 4, 1000
EXTENTS = {"one group": Extents((None,), SIZE), "windows": Extents((None, 21, 8, 6), SIZE)}


def builder(kernels: NativeKernels, extents: Extents, *, updates: bool) -> InputBuilder:
    layout = CacheLayout(BLOCKS, SIZE, torch.device("cpu"))
    readers = [PagedReader(PagedSegments(kernels.attention, layout), window) for window in extents.windows]
    return InputBuilder(layout, extents, readers, decoding=decode_steps(readers, extents) if updates else None)


def numbers(inputs: StepInputs) -> Iterator[object]:
    """Yields all that a step reads."""
    yield from (inputs.ids_T, inputs.positions_T, inputs.last_R)
    for group in inputs.groups:
        (segment,) = group.segments
        assert isinstance(segment, Paged)
        yield from (group.slots_T, group.sealing, group.bounding, group.taps_LT)
        yield from (getattr(segment.keys, each.name) for each in fields(segment.keys))


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@dataclass
class Member:
    """A sequence, whose tables are changed in place, as the engine's are."""

    tables: list[list[int]]
    firsts: list[int]
    context: int = 0


@dataclass
class Engine:
    """Makes plans of sequences that join, grow, pause and leave, with pages that come, go and move."""

    rng: random.Random
    extents: Extents
    members: list[Member] = field(default_factory=list)

    def plan(self) -> StepPlan:
        rng = self.rng
        if not self.members or rng.random() < 0.03:
            groups = len(self.extents.windows)
            self.members.append(Member([[] for _ in range(groups)], [0] * groups))
        if len(self.members) > 1 and rng.random() < 0.02:
            self.members.pop(rng.randrange(len(self.members)))
        if rng.random() < 0.03:
            rng.shuffle(self.members)
        fed = self.members if rng.random() < 0.97 else rng.sample(self.members, rng.randint(1, len(self.members)))
        new = [rng.randint(1, 9) if not member.context or rng.random() < 0.003 else 1 for member in fed]
        for member, count in zip(fed, new, strict=True):
            self._grow(member, count)
        context = [member.context for member in fed]
        firsts = [member.firsts[group] for group in range(len(self.extents.windows)) for member in fed]
        tables = [member.tables[group] for group in range(len(self.extents.windows)) for member in fed]
        ids, last = [rng.randrange(50_000) for _ in range(sum(new))], sum(new) - 1
        wanted = [[last] if rng.random() < 0.01 else [] for _ in range(2)]
        sampled = list(range(len(fed))) if rng.random() < 0.98 else []
        for member, count in zip(fed, new, strict=True):
            member.context += count
        return StepPlan(
            *(0, ids, new, context, tables, sampled, False, firsts if any(firsts) else []),
            scored=wanted[0],
            targets=[1] * len(wanted[0]),
            pooled=wanted[1],
        )

    def _grow(self, member: Member, count: int) -> None:
        """Gives a member its pages, sometimes one too many, and takes or moves others."""
        for group, (window, table) in enumerate(zip(self.extents.windows, member.tables, strict=True)):
            seen = self.extents.first_seen(window, member.context)
            del table[: seen - member.firsts[group]]
            member.firsts[group] = seen
            end = self.extents.pages(member.context + count) + (self.rng.random() < 0.02)
            table += [self.rng.randrange(BLOCKS) for _ in range(end - seen - len(table))]
            if table and self.rng.random() < 0.01:
                table[self.rng.randrange(len(table))] = self.rng.randrange(BLOCKS)


@pytest.mark.parametrize("name", EXTENTS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_updated_equals_what_is_built(kernels: NativeKernels, name: str, seed: int) -> None:
    rng, extents = random.Random(seed), EXTENTS[name]
    engine, built, updated = (
        Engine(rng, extents),
        builder(kernels, extents, updates=False),
        builder(kernels, extents, updates=True),
    )
    last, num_updated = None, 0
    for step in range(800):
        plan = engine.plan()
        if rng.random() < 0.01:
            updated.forget()
        expected, found = built.build(plan), updated.build(plan)
        assert all(map(equal, numbers(expected), numbers(found))), step
        num_updated += found is last
        last = found
    assert num_updated > 150


@pytest.mark.parametrize(
    ("context", "tables", "message"),
    [([4], [[1]], "1 blocks for 5 tokens"), ([4], [[1, 2], [3]], "2 block tables"), ([5], [[1]], "1 blocks for 6 tokens")],
    ids=["no page", "tables of another group", "a token left out"],
)
def test_an_inconsistent_plan_is_refused(
    kernels: NativeKernels, context: list[int], tables: list[list[int]], message: str
) -> None:
    """After that nothing is left of what was there before."""
    updated, built = (builder(kernels, EXTENTS["one group"], updates=updates) for updates in (True, False))
    first = StepPlan(0, [7], [1], [3], [[1]], [0])
    before = updated.build(first)
    with pytest.raises(ValueError, match=message):
        updated.build(StepPlan(1, [8], [1], context, tables, [0]))
    following = StepPlan(2, [9], [1], [4], [[1, 5]], [0])
    found = updated.build(following)
    assert found is not before
    assert all(map(equal, numbers(built.build(following)), numbers(found)))


def test_a_page_that_the_window_needs(kernels: NativeKernels) -> None:
    extents = Extents((6,), SIZE)
    updated = builder(kernels, extents, updates=True)
    updated.build(StepPlan(0, [7], [1], [9], [[1, 2]], [0], first_pages=[1]))
    with pytest.raises(ValueError, match="lacks the blocks before 2 in group 0"):
        updated.build(StepPlan(1, [8], [1], [10], [[2, 3]], [0], first_pages=[2]))
