"""An answer from a cluster whose servers are struck while they give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

Strike = Callable[[str], None]
"""Takes the node that answers."""


def answer_of(
    cluster: LocalCluster, strike: Strike | None = None, *, at: int = 9, text: str = "one two three", **sampling: Any
) -> tuple[dict[int, list[int]], list[str]]:
    """The tokens of each choice, and the nodes that gave them. The first node is struck when choice 0 has `at` tokens."""
    params = inference.SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **sampling})
    request = inference.StreamCompleteRequest(complete=inference.CompleteRequest(text=text, sampling=params))
    tokens: dict[int, list[int]] = {}
    nodes: list[str] = []
    with grpc.insecure_channel(cluster.router_address) as channel:
        for response in inference_grpc.InferenceServiceStub(channel).StreamComplete(request, timeout=200):
            if response.event.WhichOneof("kind") != "delta":
                continue
            delta = response.event.delta
            seen = tokens.setdefault(delta.choice, [])
            assert delta.first_index == len(seen), "a token was lost or repeated"
            seen += delta.token_ids
            nodes += [] if delta.node_id in nodes else [delta.node_id]
            if strike is not None and len(tokens.get(0, [])) >= at:
                strike(delta.node_id)
                strike = None
    return tokens, nodes
