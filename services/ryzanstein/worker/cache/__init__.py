"""The KV cache of one rank: its tensors, zones and sizes."""
