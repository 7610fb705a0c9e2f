"""The base model: its frozen weights as they are served, in the modules of transformers."""
