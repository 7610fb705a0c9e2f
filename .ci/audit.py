"""Compares what bandit and detect-secrets found with .ci/audit.toml, which explains each finding."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

Finding = tuple[str, str]  # the kind, and the file


def main(bandit: str, secrets: str) -> int:
    """Returns 0 if all findings are explained, and nothing else is."""
    explained = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    calls = json.loads(Path(bandit).read_text())
    if calls["errors"]:
        print(f"audit: bandit could not read {calls['errors']}")
        return 1
    rules = explained["rules"]
    risky = Counter((each["test_id"], each["filename"]) for each in calls["results"] if each["test_id"] not in rules)
    found = json.loads(Path(secrets).read_text())["results"]
    leaked = Counter((each["type"], file) for file, several in found.items() for each in several)
    faults = compared(risky, explained["calls"]) + compared(leaked, explained["secrets"])
    unused = set(rules) - {each["test_id"] for each in calls["results"]}
    faults += [f"{rule}: is explained and not found" for rule in sorted(unused)]
    told = faults or [f"{risky.total() + leaked.total()} findings, all explained"]
    print("\n".join(f"audit: {each}" for each in told))
    return 1 if faults else 0


def compared(found: Counter[Finding], explained: list[dict[str, Any]]) -> list[str]:
    """Returns how findings and explanations differ."""
    expected: Counter[Finding] = Counter()
    for each in explained:
        if not each["why"].strip():
            raise ValueError(f"{each['kind']}: why must say something")
        for file, count in each["files"].items():
            expected[each["kind"], file] += count
    return [
        f"{kind} in {file}: {found[kind, file]} found, {expected[kind, file]} explained"
        for kind, file in sorted(set(found) | set(expected))
        if found[kind, file] != expected[kind, file]
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
