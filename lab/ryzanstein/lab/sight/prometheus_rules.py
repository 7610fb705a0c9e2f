"""The rules as custom resources of the Prometheus Operator: a header, and each file's text as the `spec`."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

_HEAD = """# Generated from rules/{name}.yaml: `python -P -m ryzanstein.lab.sight` writes it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ryzanstein-{name}
spec:
"""


def prometheus_rule(path: Path) -> str:
    """Returns the resource of a file of rules."""
    return _HEAD.format(name=path.stem) + indent(path.read_text()[path.read_text().index("groups:") :], "  ")
