"""Where models are kept that `ryzanstein models get` fetched, and the names that stand for them.

The first that is set and absolute: `RYZANSTEIN_MODELS`; `ryzanstein/models` in `XDG_DATA_HOME`;
`.local/share/ryzanstein/models` in `HOME`. A model there is a GGUF file `NAME.gguf`, or a directory
`NAME` in the Hugging Face layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ryzanstein.demo import MODEL_DIR
from ryzanstein.files.model_paths import GGUF_SUFFIX, model_name

VARIABLES = "RYZANSTEIN_MODELS, XDG_DATA_HOME or HOME"
EMBEDDED = "demo"
"""The name of the model that is part of the package."""
_PLACES: Mapping[str, Path] = {
    "RYZANSTEIN_MODELS": Path(),
    "XDG_DATA_HOME": Path("ryzanstein/models"),
    "HOME": Path(".local/share/ryzanstein/models"),
}


def models_home() -> Path | None:
    """Returns the directory of models. None: the environment names none."""
    for variable, below in _PLACES.items():
        named = Path(os.environ.get(variable, ""))
        if named.is_absolute():
            return named / below
    return None


def kept_models(home: Path) -> Iterator[tuple[str, Path]]:
    """Yields the names and paths of the models in the directory, by name. What begins with a dot is not complete."""
    try:
        places = sorted(home.iterdir())
    except OSError:
        return
    for place in places:
        if not place.name.startswith(".") and (place.is_dir() or place.suffix == GGUF_SUFFIX):
            yield model_name(place), place


def model_path(given: str) -> Path:
    """Returns the path that a setting or an option means: one that exists, else that of a model of this name.

    What is neither is returned as it is, for the one who reads it to refuse.
    """
    if not given or os.path.exists(given) or os.sep in given:
        return Path(given)
    home = models_home()
    kept = {} if home is None else dict(kept_models(home))
    return kept.get(given) or (MODEL_DIR if given == EMBEDDED else Path(given))
