"""What runs inside of vLLM's processes: it imports the documented interfaces of vLLM, torch, numpy and msgspec."""
