"""What a training writes: the adapter, a report of it, its curve."""
