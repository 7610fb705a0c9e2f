"""An attempt on a node: what a generation does with it once it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.router.nodes.links.link import NodeLink

_MAX_TENANTS = 4096  # pairs of tenant and priority whose newest begun attempt a link remembers


@dataclass(frozen=True, slots=True)
class AttemptPlacement:
    """An attempt on a node."""

    link: NodeLink
    node_id: str
    handle: int
    tenant: str
    priority: int

    @property
    def overtaken(self) -> bool:
        """Whether an attempt that was sent to the node later has already produced output.

        Both have the same tenant and priority, so fairness between tenants and priority do not
        explain it.
        """
        return self.link.newest_begun.get((self.tenant, self.priority), 0) > self.handle

    def began(self) -> None:
        """Records that the attempt has produced output."""
        newest, key = self.link.newest_begun, (self.tenant, self.priority)
        if len(newest) >= _MAX_TENANTS and key not in newest:
            newest.clear()  # for a moment no attempt counts as overtaken
        newest[key] = max(newest.get(key, 0), self.handle)

    def cancel(self) -> None:
        self.link.cancel(self.handle)

    def release(self) -> None:
        self.link.release(self.handle)
