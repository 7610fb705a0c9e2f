"""How likely the tokens of a prompt are, asked of a server before the answer: it gives them in no stream.

The prompt is computed for it alone; the answer finds it in the prefix cache.
"""

from __future__ import annotations

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.dialects.vllm import scores, scoring
from ryzanstein.worker.engines.remote.http.client import EngineClient

_PATIENCE_S = 600.0
"""A prompt may take long; a server that hangs is found by its silence."""
_SCORE_BYTES = 256
"""A score in JSON takes less."""
_REST_BYTES = 64 * 1024


async def prompt_scores(client: EngineClient, served: ServedEngine, sequence: Sequence) -> list[SampledToken]:
    """Returns the scores of the tokens of a sequence's prompt, from the second on. Raises EngineFault."""
    message, num_top = sequence.group.message, sequence.group.num_top
    prompt_ids = message.prompt_ids
    asked = AskedChoice(
        prompt_ids,
        len(prompt_ids),
        SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=1,
        min_tokens=0,
        stop_token_ids=(),
        salt=message.cache_root.hex(),
        request_id=f"{sequence.group.id}-scores",
    )
    most_bytes = _REST_BYTES + _SCORE_BYTES * len(prompt_ids) * (num_top + 2)
    answer = await client.post(*scoring(asked, served, num_top), timeout_s=_PATIENCE_S, most_bytes=most_bytes)
    return [SampledToken(each.token_id, each.logprob, tuple(each.top)) for each in scores(answer, prompt_ids, num_top)]
