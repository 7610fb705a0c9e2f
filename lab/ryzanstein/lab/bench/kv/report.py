"""The tables of a document in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ryzanstein.lab.bench.kv.document import KvDocument, TimeRow, WindowRow
from ryzanstein.lab.bench.quality.document import WindowSums
from ryzanstein.lab.bench.quality.estimates import (
    Estimate,
    added_loss,
    divergence,
    equal_beginning,
    same_greedy,
    same_token,
)
from ryzanstein.lab.bench.quality.report import percent, table, with_error

_SPARSE = {"pass key": "pass keys", "needle": "one of four keys", "reading": "prompt, s", "step": "token, ms"}


def as_markdown(document: KvDocument, command: str) -> str:
    """Returns the tables of what is measured so far."""
    loads = document.machine.loads
    where = (
        f"{document.machine.cores} cores of {document.machine.cpu}, {document.settings.threads} threads, "
        f"load {min(loads, default=0):.1f} to {max(loads, default=0):.1f}."
    )
    parts = [f"    {command}", where, *_quality(document), *_sparse(document), *_times(document), *_outliers(document)]
    return "\n\n".join(parts) + "\n"


def _quality(document: KvDocument) -> Iterator[str]:
    settings = document.settings
    if not document.memory:
        return
    full = document.memory[0].bytes_per_token
    lengths = [length for length in settings.windows if any(row.length == length for row in document.windows)]
    keys = [n for n in settings.pass_key_contexts if any(row.context == n for row in document.pass_keys)]
    heads = ["keys and values", "bytes a token", "of 16 bits", "of 32 bits"]
    for length in lengths:
        heads += [f"perplexity at {length:,}", f"divergence at {length:,}, nats", f"same token at {length:,}"]
    if document.greedy:
        heads += [f"greedy: equal of {settings.new_tokens}", "greedy: same token"]
    heads += [f"pass keys at {n:,}" for n in keys]
    rows = []
    for number, row in enumerate(document.memory):
        size = row.bytes_per_token
        cells = [row.option, f"{size:,.0f}", f"{size / full * 2 - 1:+.1%}", f"{size / full - 1:+.1%}"]
        for length in lengths:
            cells += _window_cells(document, length, number)
        if document.greedy:
            matches = [each.matches[number] for each in document.greedy]
            cells += [with_error(equal_beginning(matches)), percent(same_greedy(matches, settings.new_tokens))]
        for n in keys:
            found = [each.found[number] for each in document.pass_keys if each.context == n]
            cells.append(f"{sum(found)} of {len(found)}")
        rows.append(cells)
    yield table(heads, rows)
    yield (
        f"{settings.model}; texts: {', '.join(text.name for text in settings.texts)}; windows of each: {settings.num_windows}, "
        f"one of {settings.every} tokens is scored; {len(document.greedy)} greedy answers after prompts of "
        f"{settings.prompt_tokens}. Perplexity: change against the first row, paired by text and window."
    )


def _window_cells(document: KvDocument, length: int, number: int) -> list[str]:
    rows = [row for row in document.windows if row.length == length]
    mine, reference = [row.sums[number] for row in rows], [row.sums[0] for row in rows]
    if number == 0:
        return [_perplexities(rows_of=reference), "", ""]
    change = added_loss(mine, reference).exp().minus(1)
    return [percent(change, "+"), with_error(divergence(mine)), percent(same_token(mine))]


def _perplexities(rows_of: Sequence[WindowSums]) -> str:
    loss, count = sum(each.loss for each in rows_of), sum(each.num_tokens for each in rows_of)
    return f"{Estimate(loss / count, 0.0).exp().mean:.2f}"


def _sparse(document: KvDocument) -> Iterator[str]:
    if not document.sparse and not document.sparse_windows:
        return
    lengths = [length for length in document.settings.windows if any(row.length == length for row in document.sparse_windows)]
    heads, columns = ["reads"], [[f"{name}" for name in document.settings.sparse]]
    for length in lengths:
        heads += [f"perplexity at {length:,}", f"same token at {length:,}"]
        rows = [row for row in document.sparse_windows if row.length == length]
        cells = [_sparse_window(rows, number) for number in range(len(columns[0]))]
        columns += [[cell[0] for cell in cells], [cell[1] for cell in cells]]
    for what, visible in (
        ("pass key", "pass keys"),
        ("needle", "one of four keys"),
        ("reading", "prompt, s"),
        ("step", "token, ms"),
    ):
        for context in document.settings.pass_key_contexts:
            if rows_of := [row.found for row in document.sparse if (row.what, row.context) == (what, context)]:
                heads.append(f"{visible} at {context:,}")
                columns.append([_sparse_cell(what, values) for values in zip(*rows_of, strict=True)])
    yield table(heads, list(map(list, zip(*columns, strict=True))))


def _sparse_window(rows: Sequence[WindowRow], number: int) -> tuple[str, str]:
    mine, dense = [row.sums[number] for row in rows], [row.sums[0] for row in rows]
    if number == 0:
        return _perplexities(rows_of=dense), ""
    return percent(added_loss(mine, dense).exp().minus(1), "+"), percent(same_token(mine))


def _sparse_cell(what: str, values: Sequence[float]) -> str:
    if what in ("reading", "step"):
        return f"{values[0] * (1e3 if what == 'step' else 1):.3g}"
    return f"{sum(values):.0f} of {len(values)}"


def _times(document: KvDocument) -> Iterator[str]:
    if not document.times:
        return
    names = list(document.times[0].seconds)
    rows = [_time_cells(row, names) for row in document.times]
    yield table(["attention, ms", "batch", "keys", *names, "FP8 by float16"], rows)


def _time_cells(row: TimeRow, names: Sequence[str]) -> list[str]:
    times = [f"{row.seconds[name] * 1e3:.3g}" for name in names]
    return [row.shape, str(row.batch), f"{row.context:,}", *times, f"{row.seconds['FP8'] / row.seconds['float16']:.2f}"]


def _outliers(document: KvDocument) -> Iterator[str]:
    if not document.outliers:
        return
    names = list(document.outliers[0].errors)
    rows = [[f"{row.factor:,.0f}", *(f"{row.errors[name]:.2g}" for name in names)] for row in document.outliers]
    yield table(["a channel times as large", *names], rows)
