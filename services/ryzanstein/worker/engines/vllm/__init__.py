"""vLLM with our plug-in: its model and its cache, and our own decision about every token."""
