"""The figures of a load as one HTML file, which loads nothing from anywhere. It needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from ryzanstein.lab.load.outcome import Outcome

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}code{background:#f4f4f4}"
)
_INCHES = (9.0, 2.8)


def page(figures: dict[str, Any], outcomes: Sequence[Outcome], started: float) -> str:
    """Returns the page. Raises ImportError without matplotlib."""
    title = escape(f"Load of {figures['machine']['date']}")
    parts = [
        f"<h1>{title}</h1>",
        f"<p><code>{escape(figures['command'])}</code></p>",
        f"<p>{escape(figures['machine']['cpu'])}, {figures['machine']['cores']} cores.</p>",
        _verdict(figures["verdict"]),
        _table("Latency of complete answers, seconds", figures["latency_s"]),
        _pairs("Requests", figures["requests"]),
        _pairs("Rate", figures["rate"]),
        _pairs("Objective", figures["objective"]),
        _pairs("Nodes that ended an answer", figures["nodes"]),
        *(_pairs("Failures", figures["failures"]) for _ in [0] if figures["failures"]),
        "<h2>Over time</h2>",
        _plot(lambda axes: _tokens(axes, figures["seconds"])),
        _plot(lambda axes: _first_tokens(axes, outcomes, started)),
        "<h2>Distribution</h2>",
        _plot(lambda axes: _shares(axes, outcomes)),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _verdict(found: dict[str, Any]) -> str:
    counts = {name: value for name, value in found.items() if name != "examples"}
    examples = "".join(f"<li>{escape(each)}</li>" for each in found["examples"])
    return _pairs("Verdict", counts) + (f"<ul>{examples}</ul>" if examples else "")


def _pairs(title: str, values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(str(name).replace('_', ' '))}</td><td>{value}</td></tr>" for name, value in values.items())
    return f"<h2>{escape(title)}</h2><table>{rows}</table>"


def _table(title: str, rows: dict[str, dict[str, float] | None]) -> str:
    heads = next((list(row) for row in rows.values() if row), [])
    head = "".join(f"<th>{each}</th>" for each in heads)
    lines = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td>{''.join(f'<td>{row[each]:.4f}</td>' for each in heads)}</tr>"
        for name, row in rows.items()
        if row
    )
    return f"<h2>{escape(title)}</h2><table><tr><th></th>{head}</tr>{lines}</table>"


def _plot(draw: Callable[[Any], None]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _tokens(axes: Any, seconds: Sequence[dict[str, Any]]) -> None:
    axes.step(range(len(seconds)), [each["tokens"] for each in seconds], where="post")
    for second, each in enumerate(seconds):
        if each["failed"]:
            axes.axvline(second, color="tab:red", alpha=0.5)
    axes.set(xlabel="seconds", ylabel="output tokens a second")


def _first_tokens(axes: Any, outcomes: Sequence[Outcome], started: float) -> None:
    for moved, colour in ((False, "tab:blue"), (True, "tab:orange")):
        shown = [each for each in outcomes if each.first and (each.num_calls > 1 or len(each.nodes) > 1) == moved]
        name = "resumed or moved" if moved else "undisturbed"
        axes.plot([each.came - started for each in shown], [each.ttft_s for each in shown], ".", ms=3, color=colour, label=name)
    axes.set(xlabel="came, seconds after the start", ylabel="first token, s")
    axes.legend(loc="upper right")


def _shares(axes: Any, outcomes: Sequence[Outcome]) -> None:
    complete = [each for each in outcomes if each.complete and each.first]
    for name, values in (
        ("first token", sorted(each.ttft_s for each in complete)),
        ("longest pause", sorted(each.longest_pause_s for each in complete)),
        ("further token", sorted(each.tpot_s for each in complete if each.tpot_s is not None)),
    ):
        axes.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
    axes.set(xlabel="seconds", ylabel="share of answers", xscale="log", ylim=(0, 1.02))
    axes.legend(loc="lower right")
