"""llama.cpp's side of `ryzanstein bench quality --peers llama.cpp`, in the environment that has it.

`python llama_program.py SETTINGS` answers lines of JSON on standard input with lines on standard
output until its input ends. It imports nothing of the project. The library is that of the package
xllamacpp, whose own interface gives no logits. Parameters are llama.cpp's defaults, passed in a
buffer that is larger than any of its structures; keys and values are therefore 16-bit floats.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char, c_char_p, c_float, c_int, c_int8, c_int32, c_uint32, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LISTED_MESSAGES = 12
_LEAST_CONTEXT = 256
_BATCH_TOKENS = 512
_messages: list[str] = []


class OpaqueParameters(ctypes.Structure):
    """Parameters of a model or a context, by value."""

    _fields_ = (("content", c_char * 1024),)


class LlamaBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embedding", c_void_p),
        ("position", POINTER(c_int32)),
        ("num_sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))),
        ("wanted", POINTER(c_int8)),
    )


def _keep(_level: int, text: bytes, _data: int) -> None:
    _messages.append(text.decode(errors="replace"))


_log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(_keep)


def _open_library() -> ctypes.CDLL:
    found = find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise RuntimeError("the package xllamacpp is not installed")
    (path,) = Path(found.origin).parent.glob("xllamacpp*.so")
    return ctypes.CDLL(str(path))


class Llama:
    """A model and one context with one sequence."""

    def __init__(self, path: str, max_tokens: int, at_once: int, threads: int) -> None:
        self._library = _open_library()
        self._call("llama_log_set", None, ctypes.cast(_log, c_void_p), c_void_p())
        self._call("llama_backend_init", None)
        parameters = self._call("llama_model_default_params", OpaqueParameters)
        self._model = c_void_p(self._call("llama_model_load_from_file", c_void_p, c_char_p(path.encode()), parameters))
        if not self._model:
            raise RuntimeError("".join(_messages[-_LISTED_MESSAGES:]).strip())
        self.memory_bytes = int(self._call("llama_model_size", c_uint64, self._model))
        vocabulary = c_void_p(self._call("llama_model_get_vocab", c_void_p, self._model))
        self.vocab_size = int(self._call("llama_vocab_n_tokens", c_int, vocabulary))
        self._batch_tokens, self._num_read = max(at_once, _BATCH_TOKENS), 0
        self._context = self._new_context(max(_LEAST_CONTEXT, max_tokens), threads)
        self._batch = self._call("llama_batch_init", LlamaBatch, c_int32(self._batch_tokens), c_int32(0), c_int32(1))

    def restart(self) -> None:
        memory = c_void_p(self._call("llama_get_memory", c_void_p, self._context))
        self._call("llama_memory_clear", None, memory, c_bool(True))
        self._num_read = 0

    def read(self, ids: Sequence[int], *, only_last: bool = False) -> Any:
        """Appends tokens. Returns a pointer to the logits after each, or after the last."""
        batch = self._batch
        batch.num_tokens = len(ids)
        for row, token_id in enumerate(ids):
            batch.token[row], batch.position[row] = token_id, self._num_read + row
            batch.num_sequences[row], batch.sequence[row][0] = 1, 0
            batch.wanted[row] = not only_last or row == len(ids) - 1
        self._num_read += len(ids)
        if (code := self._call("llama_decode", c_int, self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens: {code}")
        return self._call("llama_get_logits", POINTER(c_float), self._context)

    def time(self, ids: Sequence[int], new_tokens: int) -> list[float]:
        """Returns the seconds of the prompt and of the tokens after the first."""
        import numpy as np

        self.restart()
        began_s = time.perf_counter()
        for start in range(0, len(ids), self._batch_tokens):
            logits = self.read(ids[start : start + self._batch_tokens], only_last=True)
        first_s = time.perf_counter()
        for _ in range(new_tokens - 1):
            logits = self.read([int(np.argmax(np.ctypeslib.as_array(logits, (self.vocab_size,))))], only_last=True)
        return [first_s - began_s, time.perf_counter() - first_s]

    def _new_context(self, max_tokens: int, threads: int) -> c_void_p:
        parameters = self._call("llama_context_default_params", OpaqueParameters)
        sizes = ctypes.cast(ctypes.pointer(parameters), POINTER(c_uint32))
        sizes[0], sizes[1], sizes[2] = (
            max_tokens,
            self._batch_tokens,
            self._batch_tokens,
        )  # of the context, of a batch, of a part of a batch
        context = c_void_p(self._call("llama_init_from_model", c_void_p, self._model, parameters))
        if not context:
            raise RuntimeError("".join(_messages[-_LISTED_MESSAGES:]).strip())
        self._call("llama_set_n_threads", None, context, c_int32(threads), c_int32(threads))
        return context

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*arguments)


class LlamaServer:
    """Answers requests. Logits go into the memory behind `shared_fd`, [T, V] as float32."""

    def __init__(self, llama: Llama, shared_fd: int) -> None:
        self._llama = llama
        self._shared = mmap.mmap(shared_fd, 0)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handlers: dict[str, Callable[[dict[str, Any]], Any]] = {"advance": self._advance, "time": self._time}
        return {"answer": handlers[request["do"]](request)}

    def _advance(self, request: dict[str, Any]) -> None:
        if request["restart"]:
            self._llama.restart()
        ids = request["ids"]
        logits = self._llama.read(ids)
        shared = (c_float * (len(ids) * self._llama.vocab_size)).from_buffer(self._shared)
        ctypes.memmove(shared, logits, ctypes.sizeof(shared))
        del shared

    def _time(self, request: dict[str, Any]) -> list[float]:
        return self._llama.time(request["ids"], request["new_tokens"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed, by native code too, goes to standard error

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        settings = json.loads(sys.argv[1])
        llama = Llama(settings["path"], settings["max_tokens"], settings["at_once"], settings["threads"])
        say({"vocab_size": llama.vocab_size, "memory_bytes": llama.memory_bytes})
        server: LlamaServer | None = None
        for line in sys.stdin:
            request = json.loads(line)
            if server is None:
                os.ftruncate(settings["shared_fd"], settings["at_once"] * llama.vocab_size * 4)
                server = LlamaServer(llama, settings["shared_fd"])
            say(server.answer(request))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:2000]})
        sys.exit(1)


if __name__ == "__main__":
    main()
