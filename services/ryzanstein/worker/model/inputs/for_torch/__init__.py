"""How torch reads the keys of a step: views of slots, or batches that are padded and masked."""
