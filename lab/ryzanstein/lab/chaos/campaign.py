"""All chosen faults on all their clusters: what was seen, and what could not be tried."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.lab.chaos.catalog import by_layout
from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.machines.network import HostNetwork, NetworkImpossibleError
from ryzanstein.lab.chaos.report.budget import BudgetRow, summed
from ryzanstein.lab.chaos.report.progress import FinishedRun, Progress
from ryzanstein.lab.chaos.stage.layouts import ClusterLayout
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage, staged
from ryzanstein.lab.chaos.timetable import Timetable
from ryzanstein.lab.chaos.trial.exposure import exposures
from ryzanstein.lab.chaos.trial.observation import Observation
from ryzanstein.lab.chaos.trial.series import Series
from ryzanstein.lab.chaos.trial.trial import Trials

_MAX_REBUILDS = 3
Tell = Callable[[str], None]


@dataclass(slots=True)
class Results:
    """The results.

    `rows` are in the order of the table; `not_run` maps the name of a fault to the reason. `exposed` are
    places that had a secret which does not belong there.
    """

    rows: list[BudgetRow] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    exposed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Order:
    """What to try: the faults, the runs of each, and the clients.

    `secure`: every cluster has TLS and keys. `keep`: a directory for the services' logs. `seconds`: no
    run begins later, except the first of each fault; None: no limit.
    """

    faults: Sequence[Fault]
    runs: int
    clients: int
    seed: str
    keep: Path | None = None
    seconds: float | None = None
    secure: bool = False


@dataclass(slots=True)
class Campaign:
    """All runs of an order. `run` it once.

    `tell` is called with one line of progress at a time. `network` None: everything is on
    127.0.0.1. Runs that `progress` has are not repeated.
    """

    order: Order
    tell: Tell
    network: HostNetwork | None
    progress: Progress
    results: Results = field(default_factory=Results)
    _seen: dict[str, list[Observation]] = field(default_factory=dict)
    _noted_at: float = 0.0

    async def run(self) -> Results:
        """Runs all faults and returns the results.

        Runs that failed because of the laboratory itself are retried on a new cluster a few times,
        while that helps.
        """
        for finished in self.progress.runs:
            self._seen.setdefault(finished.observation.fault, []).append(finished.observation)
        self._noted_at = time.monotonic()
        timetable = Timetable(self.order.seconds)
        layouts = [
            (layout, [fault for fault in faults if self._possible(fault)]) for layout, faults in by_layout(self.order.faults)
        ]
        for i, (layout, faults) in enumerate(layouts):
            timetable.begin(len(self._left(faults)), sum(len(self._left(later)) for _, later in layouts[i:]))
            for _ in range(_MAX_REBUILDS):
                left = self._due(faults, timetable)
                if not left or await self._on_a_stage(layout, faults, timetable) or left == self._due(faults, timetable):
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
        """Returns the runs that are still to be tried: the first of every fault, then the second of every fault, ..."""
        runs = ((fault, run) for fault in faults for run in range(self._num_seen(fault), fault.runs(self.order.runs)))
        return sorted(runs, key=lambda each: each[1])

    def _due(self, faults: Sequence[Fault], timetable: Timetable) -> list[tuple[Fault, int]]:
        """Returns those of the runs left that there is time for. Every fault is tried once in any case."""
        return [(fault, run) for fault, run in self._left(faults) if run == 0 or not timetable.is_over]

    def _num_seen(self, fault: Fault) -> int:
        return len(self._seen.get(fault.name, ()))

    async def _on_a_stage(self, layout: ClusterLayout, faults: Sequence[Fault], timetable: Timetable) -> bool:
        """Tries the faults on a new stage. Returns whether every run happened that there was time for."""
        layout = replace(layout, secure=self.order.secure)
        self.tell(f"{layout.name}: starting {layout}")
        try:
            async with staged(layout, self.network, self.order.clients, f"{self.order.seed}-{layout.name}") as stage:
                try:
                    await self._try_all(stage, faults, timetable)
                finally:
                    self._keep_logs(stage)
                    self.results.exposed += await exposures(stage)
        except (ServiceFailedError, NetworkImpossibleError, LaboratoryError) as failure:
            self.tell(f"{layout.name}: {failure}")
            for fault, _ in self._due(faults, timetable):
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

    async def _try_all(self, stage: Stage, faults: Sequence[Fault], timetable: Timetable) -> None:
        trials = Trials(stage, self.order.seed)
        calm = await trials.calm()
        self.tell(f"{stage.layout.name}: {calm.streams} answers without a fault, {calm.tokens} tokens, all correct")
        series = Series(stage, self.order.seed, trials.usual)
        while due := self._due(faults, timetable):
            fault, run = due[0]
            if not stage.layout.step_s:
                self._note(fault, await trials.run(fault, run))
                continue
            # Long answers: all faults of a run strike the same ones.
            struck = [fault for fault, each in due if each == run]
            for fault, seen in zip(struck, await series.run(struck, run), strict=True):
                self._note(fault, seen)

    def _note(self, fault: Fault, seen: Observation) -> None:
        """Records an observation.

        Raises LaboratoryError if the cluster did not recover: the next run would mean nothing.
        """
        self._seen.setdefault(fault.name, []).append(seen)
        now = time.monotonic()
        self.progress.add(FinishedRun(now - self._noted_at, seen))
        self._noted_at = now
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
    message = [*(f"{what} x{times}" for what, times in seen.unwanted.items()), *seen.failures[:3]]
    return f"{text} | {'; '.join(message)}" if message else text
