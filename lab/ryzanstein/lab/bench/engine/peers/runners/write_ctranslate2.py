"""Writes a checkpoint in CTranslate2's format, int8.

`python -P -m runners.write_ctranslate2 MODEL_DIR OUT` uses CTranslate2's own converter. The converter
writes special tokens that the tokenizer lacks as null, which its loader refuses. The first entry
replaces them, because nothing here uses them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ctranslate2.converters import TransformersConverter


def write(model_dir: str, out: Path) -> None:
    TransformersConverter(model_dir).convert(str(out), quantization="int8")
    path = out / "config.json"
    config = json.loads(path.read_text())
    vocabulary = json.loads((out / "vocabulary.json").read_text())
    for name in ("bos_token", "eos_token", "unk_token"):
        config[name] = config.get(name) or vocabulary[0]
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
