"""Completions that fill in the middle: a node writes what stands around it in the model's own tokens.

That is done before the generation begins, so that every node that runs or continues it computes the
same prompt.
"""

from __future__ import annotations

from dataclasses import replace

from ryzanstein import errors
from ryzanstein.generation.prompts import Prompt, TextPrompt, TokenPrompt
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.sampling import MAX_STOP_TOKEN_IDS
from ryzanstein.router.core.any_node import AnyNode
from ryzanstein.router.nodes.calls import texts
from ryzanstein.router.nodes.calls.texts import Infilled
from ryzanstein.router.nodes.links.link import NodeLink


def has_middle(prompt: Prompt) -> bool:
    """Returns whether the answer goes between two texts."""
    return isinstance(prompt, TextPrompt) and prompt.suffix is not None


async def filled(request: GenerationRequest, deadline: float, nodes: AnyNode) -> GenerationRequest:
    """Returns a request to fill in the middle as one in tokens; any other as it is.

    Waits for a node as a generation does. The model must be named.
    """
    prompt = request.prompt
    if not isinstance(prompt, TextPrompt) or prompt.suffix is None:
        return request
    prefix, suffix = prompt.text, prompt.suffix
    for name in ("truncate_prompt_tokens", "keep_prompt_head"):
        if getattr(request.sampling, name) is not None:
            raise errors.invalid(f"sampling.{name}", "is not supported with a suffix")

    async def asked(link: NodeLink) -> Infilled:
        return await texts.infill(link, request.model, prefix, suffix, deadline)

    infilled = await nodes.ask(request.model, deadline, asked)
    stops = tuple(dict.fromkeys((*request.sampling.stop_token_ids, *infilled.stop_token_ids)))
    if len(stops) > MAX_STOP_TOKEN_IDS:
        most = MAX_STOP_TOKEN_IDS - len(infilled.stop_token_ids)
        raise errors.invalid("stop_token_ids", f"must have at most {most} entries with a suffix", len(stops))
    sampling = replace(request.sampling, stop_token_ids=stops)
    return replace(request, prompt=TokenPrompt(tuple(infilled.token_ids)), sampling=sampling)
