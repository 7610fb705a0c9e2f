"""The model card of an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def card(report: Mapping[str, Any]) -> str:
    """Returns README.md from what training.json has."""
    options, data, result = report["options"], report["data"], report["result"]
    held = f"{data['held_out']} examples were held out." if data["held_out"] else "Nothing was held out."
    loss = f"validation loss {result['validation_loss']:.4f}" if result["validation_loss"] is not None else "no validation"
    return f"""---
base_model: {json.dumps(report["base"]["name"])}
library_name: peft
tags:
- lora
- ryzanstein
---

# An adapter for {report["base"]["name"]}

A LoRA adapter of rank {options["rank"]}, alpha {options["alpha"]:g}, on {", ".join(options["targets"])}.

- Base: `{report["base"]["name"]}`, {report["base"]["model_type"]}, content {report["base"]["digest"][:16]}.
- Data: {data["examples"]} examples ({data["format"]}), {data["tokens"]} tokens, of which {data["learned_tokens"]} \
were learned. {held}
- Training: step {result["best_step"]} of {result["steps"]}, {options["epochs"]} epochs, batch {options["batch"]}, \
learning rate {options["learning_rate"]:g}, seed {options["seed"]}; training loss {result["training_loss"]:.4f}, {loss}.
- `training.json` has every number, `loss.svg` the curve.

![loss](loss.svg)
"""
