"""The failure budget as a page for people: only this module writes docs/internals/log/failure-budget.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ryzanstein.lab.chaos.report.budget import MAX_FALSE_ALARM_SHARE, BudgetRow, Quantiles
from ryzanstein.lab.chaos.report.document import CampaignFacts
from ryzanstein.lab.machine import machine

_MOST_LISTED = 6
_NEVER = "-"


def page(rows: Sequence[BudgetRow], campaign: CampaignFacts) -> str:
    """Returns the page as Markdown."""
    parts = (
        _head(rows, campaign),
        _costs(rows),
        _losses(rows),
        _forms(rows),
        _spared(rows),
        _restarts(rows),
        _alarms(rows),
        _signs(rows),
        _misses(rows, campaign),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(rows: Sequence[BudgetRow], campaign: CampaignFacts) -> str:
    about = machine()
    return f"""# The failure budget

The measured effect of each fault on the clients. This page is generated, do not edit it:

    {campaign.command}

{about["cores"]} cores ({about["cpu"]}), {about["memory_bytes"] / 2**30:.0f} GiB, {about["system"]}, Python {about["python"]},
{about["date"]}; up to {campaign.runs} runs per fault, seed `{campaign.seed}`, {campaign.took_s / 60:.0f} minutes in total.
Everything runs on this one machine, including the clients.

The services are real processes, each on a separate host (a network namespace behind a bridge). {campaign.clients} clients
send requests to the embedded demo model without a pause, over gRPC, one of them over server-sent events: greedy with log
probabilities; sampled with penalties, `min_tokens` and log probabilities; n = 3; stop strings; conversations of five turns.
A fault strikes at a seeded moment in the middle of a stream of its victim. Every answer, struck or not, is compared with the
answer to the same request without a fault: tokens, text, log probabilities within 0.001, finish reason, usage. Faults with
`late` or `alone` in their names strike answers of a minute and more; several such faults strike the same answers, one after
the other, and the time to the first new token is then the time until a node is back. Faults with `object`, `call` or
`websocket` in their names strike answers that follow a JSON schema, demanded calls of functions, and streams on sockets.

Times are in seconds, p50 / p99 over the runs in which the event occurred, by nearest rank: **of up to 99 runs, p99 is the
maximum**. The slowest stream of each run counts."""


def _costs(rows: Sequence[BudgetRow]) -> str:
    table = _table(
        ("fault", "what", "detected [target]", "detected to re-routed", "first new token", "recovered", "runs"),
        (
            (
                f"`{row.fault.name}`",
                f"{row.fault.what} ({row.fault.layout})",
                f"{_seconds(row.detected_s)}{_target(row.fault.bounds.detected_s)}",
                _seconds(row.rerouted_s),
                f"{_seconds(row.first_token_s)}{_target(row.fault.bounds.first_token_s)}",
                _seconds(row.whole_s),
                str(row.runs),
            )
            for row in rows
        ),
    )
    return f"""## Times

Detected: from just before the strike to its first sign in a log, or to the client's broken stream if the router itself dies.
Detected to re-routed: until the attempt on the next node, as the router measures it; the target is < 0.1 s if another node can
take over at once. First new token: from the strike, for the client that waited longest. Recovered: from the end of the fault
until every node serves and no breaker is open.

{table}"""


def _losses(rows: Sequence[BudgetRow]) -> str:
    table = _table(
        ("fault", "answers", "tokens", "lost", "repeated", "changed", "failed", "errors at clients"),
        (
            (
                f"`{row.fault.name}`",
                str(row.requests),
                str(row.tokens),
                str(row.lost),
                str(row.repeated),
                str(row.changed),
                f"{row.failed}{'' if row.fault.healthy_left else ' (no healthy node left)'}",
                _most(row.troubles) or "none",
            )
            for row in rows
        ),
    )
    return f"""## Losses

Lost and repeated tokens are counted by their indices, at the client. Failed: requests that did not finish, although the client
attaches again after a broken stream and retries as the error demands. The target is 0 in every column; failed requests are
permitted only if no healthy node is left.

{table}"""


def _forms(rows: Sequence[BudgetRow]) -> str:
    rows = [row for row in rows if row.fault.layout.forms]
    if not rows:
        return ""
    table = _table(
        ("fault", "finished answers with a form", "invalid", "runs"),
        ((f"`{row.fault.name}`", str(row.formed), str(row.invalid), str(row.runs)) for row in rows),
    )
    return f"""## Objects and calls

Answers that have to be JSON of a schema, or calls of functions whose arguments have to match the functions' schemas, as
`jsonschema` judges them. An answer counts when all its choices have finished. The target is no invalid one.

{table}"""


def _spared(rows: Sequence[BudgetRow]) -> str:
    rows = [row for row in rows if row.fault.spared_pause_s is not None]
    if not rows:
        return ""
    head = ("fault", "answers", "longest pause [target]", "without a fault", "disturbed", "runs")
    table = _table(
        head,
        (
            (
                f"`{row.fault.name}`",
                str(row.spared),
                f"{_seconds(row.spared_pause_s)}{_target(row.fault.spared_pause_s)}",
                _seconds(row.usual_pause_s),
                _most(row.unwanted) or "none",
                str(row.runs),
            )
            for row in rows
        ),
    )
    return f"""## The other model of the same nodes

Answers of the model that was not struck, from the strike until the struck model served again. Longest pause: between two
tokens of one answer, beside the longest in the same load without a fault. Disturbed: answers that are wrong, were read again
or moved to another node, and nodes that a router left or suspected for this model. The target is none.

{table}"""


def _restarts(rows: Sequence[BudgetRow]) -> str:
    restarted = [row for row in rows if row.serving_s.count]
    if not restarted:
        return ""
    phases = list(dict.fromkeys(name for row in restarted for name in row.startup_s))
    table = _table(
        ("fault", "rank lost to SERVING", *phases, "other"),
        (
            (
                f"`{row.fault.name}`",
                f"{_seconds(row.serving_s)}{_target(row.fault.bounds.serving_s)}",
                *(f"{row.startup_s.get(name, 0.0):.2f}" for name in phases),
                f"{max(0.0, (row.serving_s.p50 or 0.0) - sum(row.startup_s.values())):.2f}",
            )
            for row in restarted
        ),
    )
    return f"""## Phases of a rank's restart

Mean seconds of the slowest rank by phase, as the worker logs them, while the load continues at a third. Other: the end of the
old ranks and the report to the agent.

{table}"""


def _alarms(rows: Sequence[BudgetRow]) -> str:
    counted = [row for row in rows if row.fault.counts_beats]
    if not counted:
        return ""
    table = _table(
        ("condition", "beats", "false alarms", f"share [target < {MAX_FALSE_ALARM_SHARE:.0%}]"),
        (
            (row.fault.what, str(row.beats), str(row.alarms), f"{row.alarms / row.beats:.2%}" if row.beats else _NEVER)
            for row in counted
        ),
    )
    return f"""## False alarms

A false alarm is a healthy node that is suspected, or whose link is given up, because of silence, deafness or a stall.

{table}"""


def _signs(rows: Sequence[BudgetRow]) -> str:
    table = _table(("fault", "detected by"), ((f"`{row.fault.name}`", _most(row.detected_by) or _NEVER) for row in rows))
    return f"""## Detected by

The first sign of each fault in a log, with the number of runs. The metrics and log lines that a fault changes are in the JSON
document.

{table}"""


def _misses(rows: Sequence[BudgetRow], campaign: CampaignFacts) -> str:
    missed = [f"- `{row.fault.name}`: {'; '.join(row.misses)}" for row in rows if row.misses]
    missed += [f"  - {failure}" for row in rows if row.misses for failure in row.failures[:2]]
    not_run = [f"- `{name}`: not run: {why}" for name, why in campaign.not_run.items()]
    return "## Missed targets\n\n" + ("\n".join(missed + not_run) or "None.")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _seconds(quantiles: Quantiles) -> str:
    if quantiles.p50 is None or quantiles.p99 is None:
        return _NEVER
    return f"{_short(quantiles.p50)} / {_short(quantiles.p99)}"


def _short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def _target(bound_s: float | None) -> str:
    return f" [< {bound_s:g}]" if bound_s is not None else ""


def _most(counter: Counter[str]) -> str:
    return "; ".join(f"{text} x{count}" for text, count in counter.most_common(_MOST_LISTED))
