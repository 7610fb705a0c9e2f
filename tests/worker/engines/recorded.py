"""Streams of each kind of server for one answer: the tokens 17, 18, 2 after a prompt of three, the last one a stop token.

vLLM's have the form of those that vLLM 0.32 sent, llama.cpp's that of the build of October 2026. SGLang's are as
`_handle_batch_output` of SGLang 0.5.23 writes them, those of TensorRT-LLM as `completion_stream_post_processor` of its 1.2.
"""

from __future__ import annotations

import json
from typing import Any

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import EngineDialect, ServedEngine
from ryzanstein.worker.engines.remote.dialects.llama_cpp import LlamaCppDialect
from ryzanstein.worker.engines.remote.dialects.sglang import SglangDialect
from ryzanstein.worker.engines.remote.dialects.trtllm import TrtllmDialect
from ryzanstein.worker.engines.remote.dialects.vllm import VllmDialect

DONE = b"[DONE]"
PROMPT = (1, 5, 9)
TOKENS = [17, 18, 2]
DIALECTS: dict[str, EngineDialect] = {
    each.name: each for each in (VllmDialect(), SglangDialect(), LlamaCppDialect(), TrtllmDialect())
}


def served(name: str, vocabulary: int = 100) -> ServedEngine:
    return ServedEngine(DIALECTS[name], f"{name} 1", "m", 2048, 4, 20, vocabulary)


def asked(max_tokens: int = 8, stops: tuple[int, ...] = (2,), **more: Any) -> AskedChoice:
    own = {
        name: more.pop(name) for name in ("token_ids", "num_prompt", "seed", "min_tokens", "salt", "request_id") if name in more
    }
    sampling = SamplingParams(**{"temperature": 0.0, **more})
    values: dict[str, Any] = {"token_ids": PROMPT, "num_prompt": len(PROMPT), "seed": 7, "min_tokens": 0, **own}
    return AskedChoice(sampling=sampling, max_tokens=max_tokens, stop_token_ids=stops, **values)


def vllm_event(ids: list[int], count: int, finish: str | None = None, stop: int | None = None, **more: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "x" * len(ids),
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": stop,
        "prompt_token_ids": list(PROMPT) if count == len(ids) else None,
        "token_ids": ids,
        **more,
    }
    usage = {"prompt_tokens": 3, "total_tokens": 3 + count, "completion_tokens": count}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def sglang_event(ids: list[int], count: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    meta = {"id": "r", "finish_reason": finish, "prompt_tokens": 3, "weight_version": "default", "completion_tokens": count}
    return {"text": "x", "output_ids": ids, "meta_info": {**meta, "cached_tokens": 2, "reasoning_tokens": 0}}


def llama_event(ids: list[int], count: int, content: str = "x", **more: Any) -> dict[str, Any]:
    event = {"index": 0, "content": content, "tokens": ids, "stop": False, "id_slot": -1, "tokens_predicted": count}
    return {**event, "tokens_evaluated": 3, **more}


def llama_end(count: int, stop_type: str, cached: int = 2) -> dict[str, Any]:
    timings = {"cache_n": cached, "prompt_n": 1, "predicted_n": count}
    more = {"stop": True, "stop_type": stop_type, "stopping_word": "", "truncated": False, "timings": timings}
    return llama_event([], count, "", **more)


def llama_progress(processed: int) -> dict[str, Any]:
    progress = {"total": 3, "cache": 2, "processed": processed, "time_ms": 1}
    return llama_event([0], 0, "", prompt_progress=progress)


def trtllm_event(ids: list[int], count: int, finish: str | None = None, stop: int | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    details = {"cached_tokens": 2}
    usage = {"prompt_tokens": 3, "total_tokens": 3 + count, "completion_tokens": count, "prompt_tokens_details": details}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def vllm_usage(count: int, cached: int = 2) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "total_tokens": 3 + count, "completion_tokens": count}
    return {"id": "cmpl-1", "choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}


STOPPED = {"type": "stop", "matched": 2}
STREAMS: dict[str, list[object]] = {
    "vllm": [vllm_event([17], 1), vllm_event([18, 2], 3, "stop", 2), vllm_usage(3), DONE],
    "sglang": [sglang_event([17], 1), sglang_event([17, 18], 2), sglang_event([17, 18, 2], 3, STOPPED), DONE],
    "llama.cpp": [
        llama_progress(2),
        llama_progress(3),
        llama_event([17], 1),
        llama_event([18], 2),
        llama_event([2], 3, ""),
        llama_end(3, "eos"),
    ],
    "tensorrt-llm": [trtllm_event([17], 1), trtllm_event([18], 2), trtllm_event([2], 3, "stop", 2), DONE],
}
INCREMENTAL: list[object] = [sglang_event([17], 1), sglang_event([18], 2), sglang_event([2], 3, STOPPED), DONE]
"""SGLang's with `--incremental-streaming-output`."""


def packed(event: object) -> bytes:
    return event if isinstance(event, bytes) else json.dumps(event).encode()
