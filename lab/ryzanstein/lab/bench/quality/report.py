"""The tables of a document in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ryzanstein.lab.bench.quality.document import QualityDocument, QualityRow, QualitySettings
from ryzanstein.lab.bench.quality.estimates import (
    Estimate,
    added_loss,
    divergence,
    equal_beginning,
    over_texts,
    perplexity,
    same_greedy,
    same_token,
)

_MB = 1e6
_LEAST_DIVERGENCE = 1e-6
_MOST_DIGITS = 7


def as_markdown(document: QualityDocument, command: str) -> str:
    """Returns the tables with what a reader must know about them."""
    complete = [row for row in document.rows if _is_complete(row, document.settings)]
    if document.reference not in complete:
        return "Nothing is finished yet.\n"
    parts = [
        f"    {command}",
        _conditions(document),
        table(_heads_of_costs(document.settings), [_costs(row, document) for row in complete]),
        table(_heads_of_texts(document.settings), [_texts(row, document) for row in complete]),
        *(f"Not measured: {name}: {why}" for name, why in document.failed.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _is_complete(row: QualityRow, settings: QualitySettings) -> bool:
    return all(text.name in row.texts for text in settings.texts) and bool(row.greedy) and bool(row.decode_s)


def _conditions(document: QualityDocument) -> str:
    settings, machine = document.settings, document.machine
    texts = "; ".join(f"{text.name} ({text.source})" for text in settings.texts)
    return (
        f"Texts: {texts}; {settings.num_tokens:,} tokens of each, in windows of {settings.window:,}. "
        f"The reference is {settings.reference}. "
        f"Greedy: {settings.new_tokens} tokens after {len(document.reference.greedy)} prompts of {settings.prompt_tokens}. "
        f"Speed: batch 1, a prompt of {settings.prefill_tokens}, medians of {settings.rounds} interleaved rounds, "
        f"{settings.threads} threads; {machine.cores} cores of {machine.cpu}, "
        f"load {min(machine.loads, default=0):.1f} to {max(machine.loads, default=0):.1f}."
    )


def _heads_of_costs(settings: QualitySettings) -> list[str]:
    return [
        "weights",
        "memory, MB",
        "file, MB",
        "perplexity",
        "divergence, nats",
        "same token",
        f"greedy: equal of {settings.new_tokens}",
        "greedy: same token",
        "decode, tokens/s",
        "prefill, tokens/s",
    ]


def _costs(row: QualityRow, document: QualityDocument) -> list[str]:
    names = [text.name for text in document.settings.texts]
    reference = document.reference
    change = over_texts([added_loss(row.texts[name], reference.texts[name]) for name in names]).exp().minus(1)
    apart = over_texts([divergence(row.texts[name]) for name in names])
    same = over_texts([same_token(row.texts[name]) for name in names])
    is_reference = row is reference
    return [
        row.name,
        _size(row.memory_bytes),
        _size(row.file_bytes),
        "" if is_reference else percent(change, "+"),
        "" if is_reference else _divergence(apart),
        "" if is_reference else percent(same),
        "" if is_reference else with_error(equal_beginning(row.greedy)),
        "" if is_reference else percent(same_greedy(row.greedy, document.settings.new_tokens)),
        _speed(row.decode_s),
        _speed(row.prefill_s),
    ]


def _heads_of_texts(settings: QualitySettings) -> list[str]:
    return ["perplexity", *(text.name for text in settings.texts)]


def _texts(row: QualityRow, document: QualityDocument) -> list[str]:
    return [row.name, *_perplexities(row, document)]


def _perplexities(row: QualityRow, document: QualityDocument) -> Iterator[str]:
    for text in document.settings.texts:
        windows, expected = row.texts[text.name], document.reference.texts[text.name]
        value = with_error(perplexity(windows))
        change = added_loss(windows, expected).exp().minus(1)
        yield value if row is document.reference else f"{value} ({percent(change, '+')})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_error(estimate: Estimate, sign: str = "") -> str:
    """Returns the mean with two digits of its error, as many digits for both."""
    scale = estimate.error if estimate.error > 0 else abs(estimate.mean)
    digits = max(0, min(_MOST_DIGITS, 1 - math.floor(math.log10(scale)))) if scale > 0 else 1
    error = "" if math.isnan(estimate.error) else f" ± {estimate.error:,.{digits}f}"
    return f"{estimate.mean:{sign},.{digits}f}{error}"


def percent(estimate: Estimate, sign: str = "") -> str:
    return f"{with_error(Estimate(estimate.mean * 100, estimate.error * 100), sign)} %"


def _divergence(estimate: Estimate) -> str:
    """Returns a divergence. Float32 rounds at about 1e-7."""
    return f"< {_LEAST_DIVERGENCE:.6f}" if estimate.mean < _LEAST_DIVERGENCE else with_error(estimate)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MB:,.{0 if num_bytes >= 10 * _MB else 1}f}"


def _speed(seconds: Sequence[float]) -> str:
    speed = 1 / statistics.median(seconds)
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
