"""Calibration texts as windows of tokens: some to fit to, some held out to measure with.

Legend: W windows, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ryzanstein.worker.refusal import ModelRefused

WINDOW = 1024
HELD_OUT = 4  # one window of so many
MIN_WINDOWS = 8
_CHARS = 24  # read at most per token that is needed


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of ids. `digest` identifies their content."""

    fit_WT: Tensor
    held_WT: Tensor
    digest: str

    @property
    def length(self) -> int:
        return self.fit_WT.shape[1]


def read_texts(tokenizer_file: Path, files: Sequence[Path], num_tokens: int, context_length: int) -> CalibrationText:
    """Returns at most `num_tokens` to fit to, and a third as many held out, in equal shares of all files.

    Each window begins as a prompt does. A window that appears again is left out: nothing that is
    fitted to is held out. Raises ModelRefused if the texts are too short, not UTF-8 or one file twice;
    OSError.
    """
    _refuse_same(files)
    length = min(WINDOW, context_length)
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises plain Exception
        raise ModelRefused(f"{tokenizer_file}: cannot be read, and calibration needs a tokenizer: {error}") from error
    tokenizer.no_padding()  # a tokenizer.json can ask for both
    tokenizer.no_truncation()
    start = tokenizer.encode("").ids[:1]
    wanted = max(MIN_WINDOWS, num_tokens * HELD_OUT // (HELD_OUT - 1) // length)
    share = -(-wanted // len(files))
    windows: list[list[int]] = []
    for file in files:
        ids = tokenizer.encode(_text(file, share * length * _CHARS), add_special_tokens=False).ids
        body = length - len(start)
        windows += [start + ids[first : first + body] for first in range(0, len(ids) - body + 1, body)][:share]
    windows = [list(ids) for ids in dict.fromkeys(map(tuple, windows))][:wanted]
    if len(windows) < MIN_WINDOWS:
        raise ModelRefused(
            f"--calibration: {len(windows)} windows of {length} tokens, at least {MIN_WINDOWS} are needed: "
            f"{MIN_WINDOWS * length} tokens, about {MIN_WINDOWS * length * 4 // 1000} kB of text without repetitions"
        )
    ids_WT = torch.tensor(windows)
    held_W = torch.arange(len(windows)) % HELD_OUT == HELD_OUT - 1
    return CalibrationText(ids_WT[~held_W], ids_WT[held_W], sha256(ids_WT.numpy().tobytes()).hexdigest())


def _refuse_same(files: Sequence[Path]) -> None:
    for one, other in combinations(files, 2):
        if one.samefile(other):
            raise ModelRefused(f"--calibration {other}: the same file as {one}")


def _text(file: Path, num_chars: int) -> str:
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(num_chars)
    except UnicodeDecodeError as error:
        raise ModelRefused(f"--calibration {file}: not UTF-8 text: {error}") from error
