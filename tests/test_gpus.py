"""Which device ranks get, decided from counts: none of it has run on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.process import gpus
from ryzanstein.process.gpus import DeviceChoice, Gpus, choose_device

NONE = Gpus()
ONE = Gpus(("0",), variable="0")
TWO = Gpus(("0", "1"))


@pytest.mark.parametrize(
    ("asked", "num_ranks", "found", "chosen"),
    [
        ("auto", 1, ONE, DeviceChoice("cuda", "1 is visible (CUDA_VISIBLE_DEVICES=0)")),
        ("auto", 2, TWO, DeviceChoice("cuda", "2 are visible")),
        ("auto", 2, ONE, DeviceChoice("cpu", "tp 2 needs 2 GPUs, 1 is visible (CUDA_VISIBLE_DEVICES=0)")),
        ("auto", 2, NONE, DeviceChoice("cpu", "tp 2 needs 2 GPUs, 0 are visible")),
        ("auto", 1, Gpus(("0",), has_build=False), DeviceChoice("cpu", "1 is visible, and torch was built without CUDA")),
        ("cpu", 1, ONE, DeviceChoice("cpu", "as it was set")),
        ("cuda", 2, TWO, DeviceChoice("cuda", "2 are visible")),
    ],
)
def test_auto_is_cuda_only_if_every_rank_has_a_gpu_that_torch_can_use(asked, num_ranks, found, chosen) -> None:
    assert choose_device(asked, num_ranks, f"tp {num_ranks}", found) == chosen


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ONE, "tp 2 needs 2 GPUs, 1 is visible (CUDA_VISIBLE_DEVICES=0); choose device cpu, or fewer ranks"),
        (NONE, "tp 2 needs 2 GPUs, 0 are visible; choose device cpu, or fewer ranks"),
        (
            Gpus(("0", "1"), has_build=False),
            "2 are visible, and torch was built without CUDA; choose device cpu, or fewer ranks",
        ),
    ],
)
def test_gpus_that_are_asked_for_and_missing_are_refused_with_both_numbers(found, text) -> None:
    with pytest.raises(RyzansteinError) as refused:
        choose_device("cuda", 2, "tp 2", found)
    assert (refused.value.message, refused.value.code, refused.value.reason) == (text, Code.FAILED_PRECONDITION, "NO_GPU")


@pytest.mark.parametrize(
    ("line", "has_cuda"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.1'", False),
        ("cuda: Optional[str] = '12.8'", True),
        ('cuda = "13.0"', True),
        ("", False),
    ],
)
def test_the_build_of_torch_is_read_and_not_imported(line, has_cuda, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2'\ndebug = False\n{line}\n")
    monkeypatch.setattr(gpus, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert gpus.torch_has_cuda() is has_cuda


def test_the_installed_torch_says_the_same_itself() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    assert gpus.torch_has_cuda() == (torch.version.cuda is not None)
