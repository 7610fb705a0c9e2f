"""The embedded demo model, a small trained chat model in the Hugging Face layout, and its training.

Serving needs only the files beside this module; the other modules generate dialogues, train the
model and measure it.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent
"""The directory with config.json, tokenizer.json and model.safetensors, loadable like any model."""

__all__ = ["MODEL_DIR"]
