"""docs/build/asyncapi.yaml as validators: one for each kind of message."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

PAGE = Path(__file__).parents[4] / "docs" / "build" / "asyncapi.yaml"


@functools.cache
def document() -> dict[str, Any]:
    return yaml.safe_load(PAGE.read_text())


@functools.cache
def validator(kind: str) -> Draft202012Validator:
    resource = Resource(contents=document(), specification=DRAFT202012)
    registry = Registry().with_resource("asyncapi", resource)
    payload = document()["components"]["messages"][kind]["payload"]["$ref"]
    return Draft202012Validator({"$ref": f"asyncapi{payload}"}, registry=registry)


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message. Raises ValidationError when it is not as the document says."""
    validator(message["type"]).validate(message)
    return message
