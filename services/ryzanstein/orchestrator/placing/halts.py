"""Why new revisions go no further. What is known here outlives the orchestrator: see `state.recovery`."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.state.stored import StoredHalt

log = structlog.get_logger(__name__)


class Halts:
    """The halts of revisions, by model."""

    def __init__(self, stored: Iterable[StoredHalt] = ()) -> None:
        self._halts = {each.model: each for each in stored}
        self._written = dict(self._halts)

    def find(self, deployment: Deployment) -> StoredHalt | None:
        """Returns why the deployment's revision goes no further; None if nothing is in its way."""
        halt = self._halts.get(deployment.model)
        return halt if halt is not None and halt.revision == deployment.revision else None

    def put(self, deployment: Deployment, reason: str, *, lasting: bool) -> StoredHalt:
        """Halts a revision, unless it is already. `lasting`: until the model is deployed again, else until something moves."""
        known = self.find(deployment)
        if known is not None and known.lasting >= lasting:
            return known
        halt = self._halts[deployment.model] = StoredHalt(deployment.model, deployment.revision, reason, lasting)
        log.warning("change of a model halted", model=halt.model, revision=halt.revision, reason=reason)
        return halt

    def lift(self, model: str) -> None:
        """Forgets a halt: the model moves again, or is deployed again."""
        self._halts.pop(model, None)

    def keep(self, deployments: Iterable[Deployment]) -> None:
        """Forgets the halts of what is not deployed any more."""
        if self._halts:
            revisions = {each.model: each.revision for each in deployments}
            self._halts = {model: halt for model, halt in self._halts.items() if revisions.get(model) == halt.revision}

    def unwritten(self) -> tuple[StoredHalt, ...] | None:
        """Returns what to store; None: it is stored as it is."""
        return None if self._halts == self._written else tuple(self._halts.values())

    def wrote(self, stored: Iterable[StoredHalt]) -> None:
        """Notes what is stored now."""
        self._written = {each.model: each for each in stored}
