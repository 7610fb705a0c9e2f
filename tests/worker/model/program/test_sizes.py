"""What a program takes is known before a model is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.model.architectures.checkpoints import CASES, at_its_mark
from tests.worker.model.program.test_program import OPTIONS

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.model.loading import open_model
from ryzanstein.worker.model.program.sizes import MOST_ROWS, program_bytes
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.sizing import MemoryNeed


@pytest.mark.parametrize("name", at_its_mark(CASES))
def test_a_program_takes_no_more_than_its_size_says(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner], name: str
) -> None:
    program = runner(model_dirs(name), **OPTIONS)._decoder.program
    if program is None:
        return
    rows = program._program.most_inputs * 4 + program._program.most_row_bytes
    taken = program._arena.nbytes + (program._program.threads + MOST_ROWS) * rows
    spec, _ = open_model(model_dirs(name))
    assert taken <= program_bytes(spec, 1) <= 4 * taken


def test_the_need_of_a_model_includes_its_program(model_dirs: Callable[[str], Path]) -> None:
    folder = model_dirs("llama")
    spec, _ = open_model(folder)
    python, native, torch = (
        MemoryNeed.of(folder, WorkerSettings(device="cpu", tp=2, **changes)).total_bytes
        for changes in ({"step": "python"}, {}, {"kernels": "torch"})
    )
    assert native - python == 2 * program_bytes(spec, 2) > 0
    assert torch == python
