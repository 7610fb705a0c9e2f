"""Small models of random weights on clusters, and what is asked of them in tokens."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import torch

from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub


def write_model(model_dir: Path, config_class: str, fields: dict[str, Any], noise: float) -> Path:
    """Writes a model of transformers with the demo's tokenizer. No weight is left at a zero or one that it begins with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**fields)).float()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * noise)
        model.save_pretrained(model_dir)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, model_dir / name)
    return model_dir


def connected(cluster: LocalCluster) -> Iterator[InferenceServiceStub]:
    """Yields a stub of the cluster's router."""
    with grpc.insecure_channel(cluster.router_address) as channel:
        yield InferenceServiceStub(channel)


def asked(prompt: list[int], num_tokens: int, **sampling: Any) -> inference.CompleteRequest:
    params = inference.SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **sampling})
    return inference.CompleteRequest(token_ids=inference.TokenIds(ids=prompt), sampling=params)


def prompt_of(length: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def computed(response: inference.CompleteResponse) -> int:
    """The tokens of the prompt that were not found in the cache."""
    return response.usage.prompt_tokens - response.usage.cached_prompt_tokens


def survives_its_node(stub: InferenceServiceStub, cluster: LocalCluster, request: inference.CompleteRequest) -> None:
    """Kills the node in the middle of an answer, and compares the tokens with those of an undisturbed one."""
    undisturbed = stub.Complete(request, timeout=60)
    tokens: list[int] = []
    nodes: list[str] = []
    killed = ""
    for response in stub.StreamComplete(inference.StreamCompleteRequest(complete=request), timeout=60):
        event = response.event
        if event.HasField("delta"):
            assert event.delta.first_index == len(tokens)
            tokens += event.delta.token_ids
            nodes.append(event.delta.node_id)
            if len(tokens) >= 30 and not killed:
                killed = nodes[0]
                cluster.kill(killed)
    assert tokens == list(undisturbed.choices[0].token_ids)
    assert len(set(nodes)) == 2
