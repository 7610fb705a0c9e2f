"""An inference server that the agent starts and ends itself: vLLM, with all of its processes."""
