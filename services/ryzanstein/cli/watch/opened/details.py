"""All that is known of one row: its cells in full, its trends, and of a node its ranks, links and losses."""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.cli.status.status_tables import losses_of
from ryzanstein.cli.watch.board import WatchBoard
from ryzanstein.cli.watch.rows import clock, node_named, owner_of
from ryzanstein.cli.watch.table import CHART, WatchRow, chart
from ryzanstein.client.cleaning import clean
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import ClusterStatus, LinkView, NodeStatus


def details(board: WatchBoard, key: str, now: float, width: int) -> list[str]:
    """Returns what is known of a row of the board's view, one text a line."""
    row, table, status = board.row(key, now), board.table(), board.status
    if row is None or table is None or status is None:
        return ["it is not known any more"]
    told = [(column.title, each.text) for column, each in zip(table.columns, row.cells, strict=True) if not column.chart]
    lines = [f"{title:<12} {text}" for title, text in told]
    if row.age:
        lines.append(f"{'silent for':<12} {row.age}")
    lines += _charts(board, row, width)
    if row.node_id:
        lines += _of_node(status, row.node_id)
    return [clean(line) for line in lines]


def _charts(board: WatchBoard, row: WatchRow, width: int) -> Iterator[str]:
    """Yields the last sixty samples of load and, where tokens are counted, of tokens a second."""
    subject = (
        ("model", row.model)
        if board.view_name == "models"
        else ("node", row.key if board.view_name in ("nodes", "generations") else row.node_id)
    )
    trend, room = board.trends.of(subject), min(CHART, max(0, width - 20))
    if not subject[1] or not trend.shares:
        return
    yield ""
    share = trend.shares[-1]
    yield f"{'load':<12} {chart(trend.shares, room)}" + ("" if share is None else f" {share:.0%}")
    if any(rate is not None for rate in trend.rates):
        rate = trend.tokens_per_s
        yield f"{'tokens/s':<12} {chart(trend.busiest, room)}" + ("" if rate is None else f" {rate:.0f}")


def _of_node(status: ClusterStatus, node_id: str) -> Iterator[str]:
    parts = [each for each in status.nodes if owner_of(each) == node_id]
    for each in parts:
        yield ""
        yield from _part(each)
    for link in status.router.links:
        if node_named(status, link.node_id) == node_id:
            yield from ("", f"link of {status.router.router_id} to {link.address}: {_link(link)}")
    if found := [each for each in problems(status) if node_id in each]:
        yield from ("", "problems:", *(f"  {each}" for each in found))
    names = {each.node.node_id for each in parts}
    told = sorted(
        (each for each in losses_of(status) if each[1] in names or each[2].removeprefix("link to ") in names), reverse=True
    )
    if told:
        yield from ("", "losses:")
        for at, seen_by, what, cause, more in told:
            yield f"  {clock(at)} {what}, seen by {seen_by}: {cause}" + (f", {more}" if more else "")


def _link(link: LinkView) -> str:
    state = "up" if link.up else f"down: {link.failure}" if link.failure else "down"
    suspicion = f", suspected: {link.suspicion}" if link.suspicion else ""
    return f"{state}{suspicion}, breaker {link.breaker.replace('_', '-')}, {link.inflight} in flight"


def _part(each: NodeStatus) -> Iterator[str]:
    node = each.node
    yield f"{node.node_id} at {node.address}: {node.state.name}" + (f", {each.reason}" if each.reason else "")
    if each.error:
        yield f"  no answer: {each.error}"
    if node.model:
        yield f"  model {node.model}, context {node.context_length}"
    if each.engine.name:
        yield f"  engine {each.engine.name}, continues {'exactly' if each.engine.exact else 'inexactly'}"
    if each.protection.tls:
        yield f"  TLS {each.protection.tls}" + (", INSECURE" if each.protection.insecure else "")
    for loss in each.recent_losses:
        if loss.last_words:
            yield from (
                f"  last words of rank {loss.rank} at {clock(loss.time)}:",
                *map("    {}".format, loss.last_words.splitlines()),
            )
    for rank in each.ranks:
        yield f"  rank {rank.rank}: {rank.phase}, step {rank.step}, process {rank.pid}"
