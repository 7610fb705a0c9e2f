"""All chosen faults on all their clusters: what was seen, and what could not be tried."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ryzanstein.cli.service_process import ServiceFailedError
from ryzanstein.lab.chaos.budget import BudgetRow, summed
from ryzanstein.lab.chaos.catalog import by_layout
from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.layouts import ClusterLayout
from ryzanstein.lab.chaos.network import HostNetwork, NetworkImpossibleError
from ryzanstein.lab.chaos.observation import Observation
from ryzanstein.lab.chaos.series import Series
from ryzanstein.lab.chaos.stage import LaboratoryError, Stage, staged
from ryzanstein.lab.chaos.trial import Trials

_MAX_REBUILDS = 3
Tell = Callable[[str], None]


@dataclass(slots=True)
class Results:
    """The results.

    `rows` are in the order of the table; `not_run` maps the name of a fault to the reason.
    """

    rows: list[BudgetRow] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Order:
    """What to try: the faults, the runs of each, and the clients.

    `keep`: a directory for the services' logs.
    """

    faults: Sequence[Fault]
    runs: int
    clients: int
    seed: str
    keep: Path | None = None


@dataclass(slots=True)
class Campaign:
    """All runs of an order. `run` it once.

    `tell` is called with one line of progress at a time. `network` None: everything is on
    127.0.0.1.
    """

    order: Order
    tell: Tell
    network: HostNetwork | None
    results: Results = field(default_factory=Results)
    _seen: dict[str, list[Observation]] = field(default_factory=dict)

    async def run(self) -> Results:
        """Runs all faults and returns the results.

        Runs that failed because of the laboratory itself are retried on a new cluster a few times,
        while that helps.
        """
        for layout, faults in by_layout(self.order.faults):
            possible = [fault for fault in faults if self._possible(fault)]
            for _ in range(_MAX_REBUILDS):
                left = self._left(possible)
                if not left or await self._on_a_stage(layout, possible) or left == self._left(possible):
                    break
        for fault in self.order.faults:
            if seen := self._seen.get(fault.name):
                self.results.rows.append(summed(fault, seen))
            else:
                self.results.not_run.setdefault(fault.name, "no run took place")
        return self.results

    def _possible(self, fault: Fault) -> bool:
        if fault.needs_network and self.network is None:
            self.results.not_run[fault.name] = "network namespaces are not available"
            return False
        return True

    def _left(self, faults: Sequence[Fault]) -> list[tuple[Fault, int]]:
        """Returns the runs that are still to be tried."""
        return [
            (fault, run) for fault in faults for run in range(len(self._seen.get(fault.name, ())), fault.runs(self.order.runs))
        ]

    async def _on_a_stage(self, layout: ClusterLayout, faults: Sequence[Fault]) -> bool:
        """Tries the faults on a new stage. Returns whether every run happened."""
        self.tell(f"{layout.name}: starting {layout}")
        try:
            async with staged(layout, self.network, self.order.clients, f"{self.order.seed}-{layout.name}") as stage:
                try:
                    await self._try_all(stage, faults)
                finally:
                    self._keep_logs(stage)
        except (ServiceFailedError, NetworkImpossibleError, LaboratoryError) as failure:
            self.tell(f"{layout.name}: {failure}")
            for fault, _ in self._left(faults):
                self.results.not_run[fault.name] = str(failure).splitlines()[0]
            return False
        return True

    def _keep_logs(self, stage: Stage) -> None:
        if self.order.keep is None:
            return
        directory = self.order.keep / stage.layout.name
        directory.mkdir(parents=True, exist_ok=True)
        for service in stage.cluster.services.values():
            shutil.copy(service.log_path, directory)

    async def _try_all(self, stage: Stage, faults: Sequence[Fault]) -> None:
        trials = Trials(stage, self.order.seed)
        calm = await trials.calm()
        self.tell(f"{stage.layout.name}: {calm.streams} answers without a fault, {calm.tokens} tokens, all correct")
        if stage.layout.step_s:
            await self._try_in_series(Series(stage, self.order.seed, trials.usual), faults)
            return
        for fault, run in self._left(faults):
            self._note(fault, await trials.run(fault, run))

    async def _try_in_series(self, series: Series, faults: Sequence[Fault]) -> None:
        """Tries long answers: all faults of a run strike the same ones."""
        for run in sorted({run for _, run in self._left(faults)}):
            left = [fault for fault, each in self._left(faults) if each == run]
            for fault, seen in zip(left, await series.run(left, run), strict=True):
                self._note(fault, seen)

    def _note(self, fault: Fault, seen: Observation) -> None:
        """Records an observation.

        Raises LaboratoryError if the cluster did not recover: the next run would mean nothing.
        """
        self._seen.setdefault(fault.name, []).append(seen)
        self.tell(_line(fault, seen))
        if seen.whole_s is None:
            raise LaboratoryError(f"{fault.name}: the cluster did not recover")


def _line(fault: Fault, seen: Observation) -> str:
    """Returns a run as one line."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    text = (
        f"{fault.name} {seen.run + 1}: detected {seconds(seen.detected_s)} re-routed {seconds(seen.rerouted_s)} "
        f"token {seconds(seen.first_token_s)} recovered {seconds(seen.whole_s)} | {seen.struck} of {seen.streams} struck, "
        f"lost {seen.lost} repeated {seen.repeated} changed {seen.changed} failed {seen.failed}"
        + (f" invalid {seen.invalid} of {seen.formed}" if seen.formed else "")
    )
    if seen.spared_pause_s is not None:
        text += f" | {seen.spared} answers of other models, longest pause {seconds(seen.spared_pause_s)}"
    said = [*(f"{what} x{times}" for what, times in seen.unwanted.items()), *seen.failures[:3]]
    return f"{text} | {'; '.join(said)}" if said else text
