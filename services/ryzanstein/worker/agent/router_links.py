"""The links of a model to the routers that are connected to it."""

from __future__ import annotations

import structlog

from ryzanstein.cluster import Beat
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.agent.routers import LinkBounds, RouterLink
from ryzanstein.worker.agent.versions.model_versions import ModelVersions
from ryzanstein.worker.telemetry import WorkerTelemetry

log = structlog.get_logger(__name__)

MAX_LINKS = 256


class RouterLinks:
    """Opens and closes links. What a router submitted ends with its link."""

    def __init__(self, bounds: LinkBounds, versions: ModelVersions, telemetry: WorkerTelemetry) -> None:
        self._bounds, self._versions, self._telemetry = bounds, versions, telemetry
        self._links: list[RouterLink] = []

    def open(self, router_id: str) -> RouterLink:
        """Returns a link for the router. Release it with `close`.

        Raises RESOURCE_EXHAUSTED when too many routers are connected.
        """
        if len(self._links) >= MAX_LINKS:
            raise RyzansteinError(f"too many routers, the limit is {MAX_LINKS}", Code.RESOURCE_EXHAUSTED, "TOO_MANY_LINKS")
        link = RouterLink(router_id, self._bounds)
        self._links.append(link)
        self._telemetry.links.set(len(self._links))
        log.info("router connected", router_id=router_id)
        return link

    def close(self, link: RouterLink) -> None:
        """Cancels what the router submitted and releases the link."""
        for version in self._versions:
            version.running.close_link(link)
        self._links.remove(link)
        if link.overflowed:
            self._telemetry.link_overflows.inc()
        self._telemetry.links.set(len(self._links))
        log.info("router disconnected", router_id=link.router_id, overflowed=link.overflowed)

    def end(self) -> None:
        """Ends all links because the agent stops; the routers fail over what still runs.

        The ends of the last generations are sent before that.
        """
        for link in self._links:
            link.end()

    def beat(self, beat: Beat) -> None:
        """Sends a beat to all routers."""
        for link in self._links:
            link.beat(beat)
