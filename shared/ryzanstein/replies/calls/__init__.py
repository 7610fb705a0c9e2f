"""How calls are written: as objects, as Python, in tags, in channels. Each module reads one way."""
