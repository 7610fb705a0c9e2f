from __future__ import annotations

import torch

from ryzanstein.lab.bench.engine.reference import ReferenceKernel, References, matmul_kernel, num_cores, read_kernel
from ryzanstein.lab.bench.engine.reference_ceilings import choose_buffer_bytes, measure_ceilings
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.settings.options import RunnerOptions


def test_each_kernel_gives_a_time_and_says_what_it_is() -> None:
    references = References.build(buffer_bytes=2**20)
    assert set(references.definitions) == {"matmul", "read", "read-1", "small", "loop"}
    assert min(references.time(references.definitions).values()) > 0
    assert set(references.time(["loop"])) == {"loop"}


def test_a_kernel_runs_with_its_own_threads_and_leaves_those_of_others_as_they_were() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    ReferenceKernel("work", before + 1, lambda: seen.append(torch.get_num_threads())).time()
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_a_definition_tells_sizes_and_threads_apart() -> None:
    assert read_kernel(2**20).definition != read_kernel(2**21).definition
    assert f"{num_cores()} thread" in matmul_kernel().definition


def test_ceilings_are_measured_with_our_kernels_where_there_are_any() -> None:
    one, *_ = measure_ceilings(1, 2**21)
    assert one.threads == 1
    assert one.kernels == ("torch" if open_kernels(RunnerOptions()).native is None else "native")
    assert min(one.read_bytes_per_s, one.matmul_flops_per_s) > 2**20


def test_the_buffer_is_larger_than_the_caches_where_memory_allows() -> None:
    assert 2**20 < choose_buffer_bytes() <= 2**31
