"""llama.cpp through its C interface: one sequence per prompt, greedy by the largest logit."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np

from .protocol import RunnerAnswer, Settings, finished, serve

_BATCH_TOKENS = 2048
_PROBE = [[0, 0, 0]]  # more than one row, which takes another code path than a single one


class LlamaCpp:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        repacks = _survives(lambda: Model(settings.model, repack=True).prefill_alone(settings.threads, _PROBE))
        self.facts = {
            "weights repacked": "yes" if repacks else "no: it crashes on this machine",
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }
        self._model = Model(settings.model, repack=repacks)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        context = Context(self._model, self._settings.threads, len(prompts), len(prompts[0]) + new_tokens)
        try:
            return self._generate(context, prompts, new_tokens)
        finally:
            context.free()

    @staticmethod
    def _generate(context: Context, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        began_s = time.perf_counter()
        latest = context.prefill(prompts)
        ttft_s = time.perf_counter() - began_s
        steps = [latest]
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
            latest = context.decode(latest, position)
            steps.append(latest)
        total_s = time.perf_counter() - began_s
        answers = [list(answer) for answer in zip(*steps, strict=True)]
        return finished(answers, new_tokens, ttft_s, total_s, len(prompts))


def _survives(attempt: Callable[[], object]) -> bool:
    """Tries something in a separate process. Returns whether the process survived.

    Native code that this processor cannot run ends a process without an exception.
    """
    pid = os.fork()
    if pid == 0:
        attempt()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status == 0


class Model:
    """The weights.

    `repack`: in llama.cpp's layouts for particular instructions, which is its default.
    """

    def __init__(self, path: str, *, repack: bool) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = repack
        self.handle = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))

    def prefill_alone(self, threads: int, prompts: list[list[int]]) -> None:
        Context(self, threads, len(prompts), len(prompts[0])).prefill(prompts)


class Context:
    """The sequences of one batch.

    It is created before the clock starts, with a cache of the batch's size and without a cache of
    earlier prompts. Each sequence has keys and values of its own in one batch.
    """

    def __init__(self, model: Model, threads: int, num_sequences: int, num_tokens: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * (-(-num_tokens // 256) * 256)
        parameters.n_batch = _BATCH_TOKENS
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp creates no context for {num_sequences} sequences of {num_tokens} tokens")
        self._batch: Any = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._vocab_size = model.vocab_size

    def free(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Returns the first token of each prompt.

        Prompts are processed whole, as many at once as fit; a longer one is split.
        """
        at_once = max(1, _BATCH_TOKENS // len(prompts[0]))
        first: list[int] = []
        for start in range(0, len(prompts), at_once):
            first += self._prefill(list(enumerate(prompts))[start : start + at_once])
        return first

    def _prefill(self, numbered: list[tuple[int, list[int]]]) -> list[int]:
        length = len(numbered[0][1])
        rows: list[tuple[int, int, int, bool]] = []
        for start in range(0, length, _BATCH_TOKENS):
            positions = range(start, min(start + _BATCH_TOKENS, length))
            rows = [(prompt[at], at, sequence, at == length - 1) for sequence, prompt in numbered for at in positions]
            self._run(rows)
        return [self._largest(row) for row, (_, _, _, wanted) in enumerate(rows) if wanted]

    def decode(self, latest: list[int], position: int) -> list[int]:
        self._run([(token_id, position, sequence, True) for sequence, token_id in enumerate(latest)])
        return [self._largest(row) for row in range(len(latest))]

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Runs rows of token id, position, sequence and whether its logits are needed."""
        batch = self._batch
        for row, (token_id, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token_id, position, int(wanted)
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens = len(rows)
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens: {code}")

    def _largest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))


if __name__ == "__main__":
    serve(LlamaCpp, ["llama_cpp_python"])
