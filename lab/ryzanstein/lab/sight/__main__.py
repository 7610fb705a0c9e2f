"""`python -P -m ryzanstein.lab.sight`: writes what is generated in k8s/components/monitoring, and names what changed."""

from __future__ import annotations

from pathlib import Path

from ryzanstein.lab.sight.dashboards import DASHBOARDS
from ryzanstein.lab.sight.dashboards.drawing import drawn
from ryzanstein.lab.sight.objectives import objective_rules
from ryzanstein.lab.sight.prometheus_rules import prometheus_rule

FOLDER = Path(__file__).resolve().parents[4] / "k8s" / "components" / "monitoring"


def write(path: Path, text: str) -> None:
    """Writes the file, if it would change."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        print(path)


def main() -> None:
    """Writes the rules of the objectives first: the resources have them, too."""
    write(FOLDER / "rules" / "objectives.yaml", objective_rules(FOLDER / "objectives.toml"))
    for path in sorted((FOLDER / "rules").glob("*.yaml")):
        write(FOLDER / "prometheus-rules" / path.name, prometheus_rule(path))
    for board in DASHBOARDS:
        write(FOLDER / "dashboards" / f"{board.name}.json", drawn(board))


if __name__ == "__main__":
    main()
