"""The digest of a checkpoint's weights: nodes with the same digest compute the same keys and values.

It covers the whole content of the weights and of config.json, and no path or file name, so that
copies in different folders are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from threading import Event

import structlog

from ryzanstein.process.background import Background
from ryzanstein.worker.checkpoints.weight_files import stamp, weight_files

log = structlog.get_logger(__name__)

_READ_BYTES = 4 * 2**20
_MAX_KNOWN = 64
_known: dict[tuple[Path, str], bytes] = {}


class LoadedWeights:
    """The digest of the weights of one group of ranks, computed in the background when it is first needed.

    `loaded` is the stamp of the files as they were loaded. `on_known` is called once, when `digest` is there.
    """

    def __init__(self, model: Path, loaded: str, background: Background, on_known: Callable[[], None]) -> None:
        self.digest: bytes | None = None
        self._model, self._loaded, self._background, self._on_known = model, loaded, background, on_known
        self._identifying: asyncio.Task[None] | None = None

    def identify(self) -> None:
        """Begins to compute the digest, unless that was begun before."""
        if self._identifying is None:
            self._identifying = self._background.once("weights_digest", self._identify())

    async def known(self, timeout_s: float) -> bytes | None:
        """Returns the digest; None when it takes longer than `timeout_s`, or there is none."""
        self.identify()
        if self._identifying is not None and self.digest is None:
            await asyncio.wait([self._identifying], timeout=timeout_s)
        return self.digest

    @property
    def failed(self) -> bool:
        """Whether there is no digest, and will be none."""
        return self._identifying is not None and self._identifying.done() and self.digest is None

    def close(self) -> None:
        """Ends the computing."""
        if self._identifying is not None:
            self._identifying.cancel()

    async def _identify(self) -> None:
        stop = Event()
        try:
            self.digest = await asyncio.to_thread(weights_digest, self._model, self._loaded, stop.is_set)
        except OSError as error:
            log.warning("no pages are moved, the weights cannot be read", model=str(self._model), error=str(error))
            return
        finally:
            stop.set()  # the process would not end before its threads
        self._on_known()


def weights_digest(model: Path, loaded: str, stopped: Callable[[], bool] = lambda: False) -> bytes:
    """Returns the digest of a directory or GGUF file, of which `loaded` is the stamp as it was loaded.

    Computed once for files that have not changed; that reads everything, about a gigabyte a second:
    call it in a thread. Raises OSError, also when files changed after they were loaded, or `stopped`
    returns True.
    """
    if stamp(model) != loaded:
        raise OSError("the files changed after they were loaded")
    if (digest := _known.get((model, loaded))) is None:
        digest = _digest(model, stopped)
        if stamp(model) != loaded:
            raise OSError("the files changed while they were read")
        while len(_known) >= _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[model, loaded] = digest
    return digest


def _digest(model: Path, stopped: Callable[[], bool]) -> bytes:
    digest = hashlib.sha256()
    for path in weight_files(model):
        digest.update(path.stat().st_size.to_bytes(8, "big"))
        _add(path, digest, stopped)
    return digest.digest()


def _add(path: Path, digest: hashlib._Hash, stopped: Callable[[], bool]) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            if stopped():
                raise OSError("stopped")
            digest.update(buffer[:size])
