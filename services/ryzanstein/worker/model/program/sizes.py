"""How much memory a program takes, known before a weight is read. Without torch."""

from __future__ import annotations

from ryzanstein.worker.architectures.spec import DecoderSpec

MOST_ROWS = 64
"""The most rows of a step that a program runs. In larger steps arithmetic takes nearly all of the time."""
MOST_LOGITS = 4 * 2**20
"""Those of all rows. With more of them, what Python costs is nothing beside the product."""
_STATES = 8  # of the hidden size
_INPUT_BYTES = 12  # of an input of a product: normalized, quantized, and as much again when working memory grows


def program_bytes(spec: DecoderSpec, num_ranks: int) -> int:
    """Returns at least the bytes of a rank's program: buffers that layers share, and the rows of products.

    Layers of other widths have buffers of their own. Attention takes more where sequences are long.
    """
    layers = [spec.of_layer(index) for index in range(spec.num_layers)]
    heads = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    queries = {(num_heads, size): -(-num_heads // num_ranks) * size for num_heads, _, size in heads}
    inner = {-(-layer.intermediate_size // num_ranks) for layer in layers}
    attended = sum(2 * queries[num_heads, size] + 2 * -(-num_kv // num_ranks) * size for num_heads, num_kv, size in heads)
    floats = _STATES * spec.hidden_size + attended + 3 * sum(inner)
    width = -(-spec.vocab_size // num_ranks)
    logits = width * min(MOST_ROWS, MOST_LOGITS // width)
    return 4 * logits + MOST_ROWS * (4 * floats + _INPUT_BYTES * max(spec.hidden_size, *queries.values(), *inner))
