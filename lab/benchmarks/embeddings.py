"""Measures vectors of texts beside transformers, for docs/build/clients.md.

    .venv/bin/python lab/benchmarks/embeddings.py [--json FILE] [--rounds 5] [--texts 96] [--threads 2] [--model DIR]

A node behind a router, asked over HTTP as OpenAI's client does (base64), and transformers in this process, which is what
sentence-transformers computes with: tokenized, sorted by length and padded as it does it, and pooled by the same rule.
Both have the same weights in float32 and the same number of threads, and take turns within each round. Without --model the
weights are random: a Qwen 3 of 8 layers and 38 million parameters. The vectors are compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

SHAPE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
BATCHES = (1, 32)
Vectors = Callable[[Sequence[str]], np.ndarray[Any, Any]]


def write_model(folder: Path) -> None:
    """Writes random weights as sentence-transformers lays them out: last token, normalized."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(7)
    vocab = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    Qwen3Model(
        Qwen3Config(vocab_size=vocab, intermediate_size=1536, max_position_embeddings=1024, tie_word_embeddings=False, **SHAPE)
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    pooling = {"word_embedding_dimension": SHAPE["hidden_size"], **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def texts_of(number: int) -> list[str]:
    """Returns texts of 10 to 120 words."""
    words, chosen = [str(i) for i in range(1, 100)], random.Random(5)
    return [" ".join(chosen.choices(words, k=chosen.randint(10, 120))) for _ in range(number)]


class Served:
    """A cluster of one node; counts the tokens that it reports."""

    def __init__(self, url: str, model: str) -> None:
        self._client, self._model, self.tokens = httpx.Client(base_url=url, timeout=120, trust_env=False), model, 0

    def vectors(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        import base64

        body = {"model": self._model, "input": list(texts), "encoding_format": "base64"}
        answer = self._client.post("/v1/embeddings", json=body).raise_for_status().json()
        self.tokens += answer["usage"]["prompt_tokens"]
        return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer["data"]])


class Peer:
    """transformers, as sentence-transformers drives it."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def vectors(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        with self._torch.inference_mode():
            batch = self._tokenizer(list(texts), padding=True, return_tensors="pt")
            hidden = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            ends = batch["attention_mask"].sum(1) - 1
            pooled = hidden[self._torch.arange(len(texts)), ends]
            return np.asarray(self._torch.nn.functional.normalize(pooled, dim=1).numpy())


def rate(vectors: Vectors, texts: Sequence[str], batch: int) -> float:
    """Returns texts per second, in batches of texts of about the same length."""
    ordered, began = sorted(texts, key=len), time.monotonic()
    for begin in range(0, len(ordered), batch):
        vectors(ordered[begin : begin + batch])
    return len(texts) / (time.monotonic() - began)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    texts = texts_of(options.texts)
    flags = ("--dtype", "float32", "--quantization", "none")
    spec = ClusterSpec(folder, num_nodes=1, tp=1, threads_per_rank=options.threads, worker_flags=flags)
    with LocalCluster(spec) as cluster:
        served, peer = Served(cluster.http_url, folder.name), Peer(folder, options.threads)
        ours, theirs = served.vectors(texts), peer.vectors(texts)
        per_text = served.tokens / len(texts)
        rows: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
        for _ in range(options.rounds):
            for batch in BATCHES:
                rows[batch].append((rate(served.vectors, texts, batch), rate(peer.vectors, texts, batch)))
    return {
        "tokens_per_text": per_text,
        "largest_difference": float(np.abs(ours - theirs).max()),
        "batches": {
            batch: {
                "texts_per_s": statistics.median(own for own, _ in pairs),
                "transformers_texts_per_s": statistics.median(other for _, other in pairs),
                "ratio": statistics.median(own / other for own, other in pairs),
            }
            for batch, pairs in rows.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary) / "embedder"
        if options.model is None:
            write_model(folder)
        found = measured(folder, options)
    print(f"{found['tokens_per_text']:.0f} tokens a text; largest difference of two numbers {found['largest_difference']:.1e}")
    print("| texts a request | texts/s, tokens/s | transformers' | ratio |")
    print("|---|---|---|---|")
    for batch, row in found["batches"].items():
        rates = (row["texts_per_s"], row["transformers_texts_per_s"])
        visible = [f"{each:,.1f}, {each * found['tokens_per_text']:,.0f}" for each in rates]
        print(f"| {batch} | {visible[0]} | {visible[1]} | {row['ratio']:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
