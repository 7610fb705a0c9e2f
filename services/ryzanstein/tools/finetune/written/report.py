"""What a training was: told to whoever has the adapter later, and to a run that goes on with it."""

from __future__ import annotations

import hashlib
import math
import resource
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from ryzanstein.files.model_paths import model_name
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.data.examples import Examples
from ryzanstein.tools.finetune.request import FinetuneRequest
from ryzanstein.tools.finetune.training.session import TrainingOutcome

_LIBRARIES = ("torch", "transformers", "peft", "tokenizers")


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The examples, and the format of their file."""

    examples: Examples
    form: str


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What is known of a training before it begins."""

    request: FinetuneRequest
    base: Base
    data: TrainingData
    targets: list[str]


def _options(request: FinetuneRequest) -> dict[str, Any]:
    schedule, lora = request.schedule, request.lora
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "epochs": schedule.epochs,
        "batch": schedule.batch,
        "accumulate": schedule.accumulate,
        "learning_rate": schedule.learning_rate,
        "warmup": schedule.warmup,
        "clip": schedule.clip,
        "max_length": schedule.max_length,
        "packing": schedule.packing,
        "checkpointing": schedule.checkpointing,
        "seed": schedule.seed,
        "compute": schedule.compute,
        "quantization": "int8" if request.int8 else "none",
        "chat_template_kwargs": request.template_variables,
        "validate_every": request.watching.every,
        "patience": request.watching.patience,
    }


def made_of(request: FinetuneRequest, base: Base, data: TrainingData) -> dict[str, Any]:
    """Returns what a training must have in common with an earlier one to go on with it, to the bit."""
    digests = (each.digest for each in (*data.examples.training, *data.examples.validation))
    content = hashlib.sha256(b"".join([*digests, str(len(data.examples.training)).encode()]))
    options = {f"--{name.replace('_', '-')}": value for name, value in _options(request).items()}
    return {
        "BASE": base.digest[:16],
        "DATA": content.hexdigest()[:16],
        "--targets": ",".join(request.lora.targets),
        **options,
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in _LIBRARIES},
    }


def report_of(run: KnownRun, outcome: TrainingOutcome) -> dict[str, Any]:
    """Returns what training.json has."""
    request, base, data = run.request, run.base, run.data
    last = dict(outcome.validations).get(outcome.best)
    near = outcome.steps[max(0, outcome.best - 20) : outcome.best]
    return {
        "base": {"name": model_name(request.base), "model_type": base.spec.model_type, "digest": base.digest},
        "data": {
            "file": request.data.name,
            "format": data.form,
            "examples": len(data.examples.training),
            "held_out": len(data.examples.validation),
            "tokens": data.examples.num_tokens,
            "learned_tokens": data.examples.num_learned,
            "notes": list(data.examples.notes),
        },
        "options": {**_options(request), "targets": run.targets},
        "result": {
            "steps": len(outcome.steps),
            "best_step": outcome.best,
            "training_loss": math.fsum(near) / len(near),
            "validation_loss": last,
            "seconds": round(outcome.seconds, 1),
            "resumed_at": outcome.resumed_at,
            "tokens_per_s": round(outcome.tokens / outcome.seconds, 1),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
        "versions": {name: version(name) for name in ("ryzanstein", *_LIBRARIES)},
        "threads": torch.get_num_threads(),
        "losses": outcome.steps,
        "validations": [{"step": step, "loss": loss} for step, loss in outcome.validations],
    }
