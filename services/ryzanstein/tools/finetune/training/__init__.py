"""The training itself, on the Trainer of transformers."""
