"""What nodes of later versions understand: a request goes only to nodes that know what it needs."""

from __future__ import annotations

EXTENDED = "extended-parameters"
"""The feature of nodes that know everything in `SamplingParams` from `bad_words` on, and `TemplateOptions`."""
TOOLS = "tools"
"""The feature of nodes that know tools, and messages that are not plain."""
CONSTRAINTS = "constraints"
"""The feature of nodes that enforce `SamplingParams.constraint`."""
PROMPT_CUTS = "prompt-cuts"
"""The feature of nodes that know `SamplingParams.keep_prompt_head`."""
KNOWN_FEATURES = frozenset({EXTENDED, TOOLS, CONSTRAINTS, PROMPT_CUTS})
"""All features that this version knows."""
