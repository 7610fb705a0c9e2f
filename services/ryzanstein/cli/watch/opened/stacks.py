"""What `ryzanstein debug NODE` prints, for a node of a watch."""

from __future__ import annotations

from ryzanstein.cli.debug.evidence import Questions, Service, ask_all
from ryzanstein.cli.debug.report import everything
from ryzanstein.client.cleaning import clean
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.reach import ANY_NODE


async def stack_lines(node_id: str, address: str, dialer: Dialer) -> list[str]:
    """Returns the command, then all threads and tasks of a node, or why it does not tell."""
    (found,) = await ask_all([Service(node_id, address, peer=ANY_NODE)], dialer, Questions())
    told = [line for text in everything(found) for line in clean(text).splitlines()]
    return [clean(f"$ ryzanstein debug {node_id}"), "", *told]
