"""`python -P -m ryzanstein.lab.reference`: writes the generated pages of docs/reference/, and names those that changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ryzanstein.lab.reference.access_tables import access_page
from ryzanstein.lab.reference.command_pages import commands_page
from ryzanstein.lab.reference.metric_tables import metrics_page
from ryzanstein.lab.reference.proto_comments import grpc_page
from ryzanstein.lab.reference.setting_tables import settings_page
from ryzanstein.tools import catalog

FOLDER = Path(__file__).resolve().parents[4] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "settings.md": settings_page,
        "metrics.md": metrics_page,
        "cli.md": commands_page,
        "grpc.md": grpc_page,
        "access.md": access_page,
        "architectures.md": catalog.page,
    }
)


def main() -> None:
    """Writes every page that the code would have otherwise."""
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path)


if __name__ == "__main__":
    main()
