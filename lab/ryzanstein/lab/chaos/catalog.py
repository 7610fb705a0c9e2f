"""All faults, in the order of the table, and by layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.faults import (
    connections,
    control,
    forms,
    idle,
    late,
    models,
    nodes,
    pages,
    ranks,
    requests,
    servers,
    stores,
)
from ryzanstein.lab.chaos.stage.layouts import ClusterLayout

CATALOG: tuple[Fault, ...] = (
    *nodes.FAULTS,
    *ranks.FAULTS,
    *models.FAULTS,
    *connections.FAULTS,
    *control.FAULTS,
    *stores.FAULTS,
    *forms.FAULTS,
    *pages.FAULTS,
    *servers.FAULTS,
    *requests.FAULTS,
    *late.FAULTS,
    *idle.FAULTS,
)


class UnknownFaultError(ValueError):
    """No fault has this name."""


def chosen(names: Sequence[str]) -> list[Fault]:
    """Returns faults by name, in the order of the catalog; all without names.

    Raises UnknownFaultError.
    """
    known = {fault.name for fault in CATALOG}
    if unknown := set(names) - known:
        raise UnknownFaultError(f"no such fault: {', '.join(sorted(unknown))}; must be one of {', '.join(sorted(known))}")
    return [fault for fault in CATALOG if not names or fault.name in names]


def by_layout(faults: Sequence[Fault]) -> list[tuple[ClusterLayout, list[Fault]]]:
    """Returns the faults by shared cluster, so that each cluster is started once."""
    ordered = sorted(faults, key=lambda fault: fault.layout.name)
    return [(layout, list(group)) for layout, group in groupby(ordered, key=lambda fault: fault.layout)]
