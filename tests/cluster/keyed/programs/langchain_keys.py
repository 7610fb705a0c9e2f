"""langchain with each key that it is given: what it returns or raises, whole and streamed."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI

for name, key, stream in json.loads(sys.argv[2]):
    options: dict[str, Any] = {"base_url": sys.argv[1], "api_key": key, "model": "demo", "max_retries": 0}
    model = ChatOpenAI(**options, temperature=0, max_tokens=8)
    try:
        parts = model.stream("Count from 1 to 5.") if stream else [model.invoke("Count from 1 to 5.")]
        seen = {"text": "".join(str(part.content) for part in parts)}
    except openai.APIStatusError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        seen = {
            "error": next(kind for kind in kinds if hasattr(openai, kind)),
            "retry": error.response.headers.get("retry-after-ms"),
        }
    print(json.dumps({"name": name, **seen}))
