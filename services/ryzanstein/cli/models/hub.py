"""Models of a hub in the Hugging Face layout, by the library `huggingface_hub`.

Its environment variables hold: HF_ENDPOINT for a mirror, HF_TOKEN for what needs a login.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from ryzanstein.cli.models.fetching import FetchError, require_room, size_of

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# What is read of a model; other formats of the same weights are not fetched.
_DIRECTORY = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "1_Pooling/*")
_REPORT_S = 0.5
_NOT_READ = ("onnx/*", "original/*", "*/original/*")


def is_hub_name(name: str) -> bool:
    """Whether a name is that of a repository, ORGANIZATION/MODEL."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at a revision, None for its main branch; or of its GGUF files the one that `file` names."""

    repository: str
    revision: str | None = None
    file: str | None = None


def fetch_from_hub(model: HubModel, home: Path, name: str, report: Callable[[str], None]) -> Path:
    """Fetches what is needed to serve a model. Returns where it is.

    An interrupted fetch continues where it was. Raises FetchError with a sentence, or OSError.
    """
    repository = model.repository
    if find_spec("huggingface_hub") is None:
        raise FetchError("models of a hub need the package huggingface_hub: pip install 'ryzanstein[hub]'")
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    partial = home / f".partial-{name}"
    try:
        report(f"asking the hub for {repository}")
        found = HfApi().model_info(repository, revision=model.revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        wanted = _wanted(repository, list(sizes), model.file)
        total = sum(sizes[each] for each in wanted)
        require_room(home, total - size_of(partial))
        with ThreadPoolExecutor(1) as aside:
            download = aside.submit(snapshot_download, repository, revision=found.sha, allow_patterns=wanted, local_dir=partial)
            while not wait([download], timeout=_REPORT_S).done:
                report(f"downloading {repository}: {size_of(partial) / 1e9:.2f} of {total / 1e9:.2f} GB")
            download.result()
    except HfHubHTTPError as error:
        raise FetchError(f"the hub refused {repository}: {_first_line(error)}") from None
    except (ConnectionError, LocalEntryNotFoundError) as error:
        raise FetchError(f"the hub cannot be reached: {error}") from None
    except Exception as error:
        # Its versions use different libraries for HTTP, and let their errors through.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):
            raise
        raise FetchError(f"the hub cannot be reached: {error}") from None
    return _put_in_place(partial, wanted, home / name, is_file=model.file is not None)


def _wanted(repository: str, files: list[str], pattern: str | None) -> list[str]:
    """Returns the files to fetch. Raises FetchError if there is no model among them, or more than one."""
    gguf = [each for each in files if each.endswith(".gguf")]
    if pattern is not None:
        matched = [
            each for each in gguf if fnmatch(each.lower(), pattern.lower()) or fnmatch(each.lower(), f"*{pattern.lower()}*")
        ]
        if len(matched) != 1:
            raise FetchError(f"--file {pattern} names {len(matched)} GGUF files of {repository}: it has {_list(gguf)}")
        return matched
    wanted = [each for each in files if any(fnmatch(each, kind) for kind in _DIRECTORY)]
    wanted = [each for each in wanted if not any(fnmatch(each, kind) for kind in _NOT_READ)]
    if "config.json" in wanted and any(each.endswith(".safetensors") for each in wanted):
        return wanted
    if gguf:
        raise FetchError(f"{repository} has GGUF files, choose one with --file: {_list(gguf)}")
    raise FetchError(f"{repository} has neither config.json with safetensors nor GGUF files")


def _put_in_place(partial: Path, wanted: list[str], target: Path, *, is_file: bool) -> Path:
    if is_file:
        target = target.with_name(f"{target.name}.gguf")
        os.replace(partial / wanted[0], target)
        shutil.rmtree(partial, ignore_errors=True)
        return target
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    os.replace(partial, target)
    return target


def _first_line(error: Exception) -> str:
    """Returns what the hub said, in one line."""
    return str(getattr(error, "server_message", None) or error).strip().splitlines()[0]


def _list(files: list[str]) -> str:
    return ", ".join(files[:20]) + (f" and {len(files) - 20} more" if len(files) > 20 else "") if files else "none"
