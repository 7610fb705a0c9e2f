"""What a model's sequences keep of keys and values: `python -P -m ryzanstein.lab.bench.kv.extents --model MODEL`.

It computes sizes from the description of the model, and runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein.worker.cache.sizes import CacheRequest, CacheSize, cache_size
from ryzanstein.worker.cache.zones import zones_of
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.loading import open_model
from ryzanstein.worker.settings.quantization import KV_COMPRESSIONS, KvCompression

_ALONE = TensorParallel(0, 1, LocalCollectives())
_LENGTHS = (1024, 4096, 8192, 16384, 32768)
_BLOCK_SIZE, _SEQUENCES, _BUDGET, _HOT = 16, 64, 512, 16


def main(model: Annotated[Path, typer.Option()], item_bytes: int = 4) -> None:
    """Prints the bytes of a token in sequences of some lengths, and how many of them 1 GiB holds."""
    spec, _ = open_model(model)

    def size(compression: KvCompression) -> CacheSize:
        zones = zones_of(compression, _HOT, _BLOCK_SIZE, spec, _ALONE)
        request = CacheRequest(None, None, _BLOCK_SIZE, _SEQUENCES, _BUDGET, item_bytes, zones)
        return cache_size(spec, _ALONE, request)

    plain = size("none")
    one_block = plain.block_bytes * len(plain.extents.windows) // _BLOCK_SIZE
    title = f"bytes of a token, sequences in 1 GiB: {spec.model_type}"
    visible = Table("tokens", "one block for all layers", *KV_COMPRESSIONS, title=title)
    for length in (each for each in _LENGTHS if each <= spec.context_length):
        cells = [(kept.extents.blocks_for(length) * kept.block_bytes, kept) for kept in map(size, KV_COMPRESSIONS)]
        found = [f"{nbytes / length:,.0f}, {kept.num_blocks // kept.extents.blocks_for(length)}" for nbytes, kept in cells]
        visible.add_row(f"{length:,}", f"{one_block:,}, {plain.num_blocks * plain.block_bytes // (one_block * length)}", *found)
    Console(width=200).print(visible)


if __name__ == "__main__":
    typer.run(main)
