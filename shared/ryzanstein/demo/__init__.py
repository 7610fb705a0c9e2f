"""The embedded demo model: a small trained chat model in the Hugging Face layout, and the program that made it.

Serving needs only the files beside this module; the other modules generate its dialogues, train it and measure it.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent
"""Directory with config.json, tokenizer.json and model.safetensors, loadable as any model directory."""

__all__ = ["MODEL_DIR"]
