"""The curve of a training's loss, as an SVG of a few kilobytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 24, 36
_MOST_POINTS = 400
_TICKS = 5


def chart(losses: Sequence[float], validations: Sequence[tuple[int, float]]) -> str:
    """Returns an SVG: the loss of each step, of which many become means of several, and that of validation."""
    points = list(_thinned(losses))
    values = [loss for _, loss in (*points, *validations)]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or 0.5
    scale = _Scale(len(losses), low - room, high + room)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        "<title>Loss by step</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *scale.axes(),
        _line(scale, points, "#3465a4"),
    ]
    if validations:
        parts += [_line(scale, validations, "#cc5500"), *(_dot(scale, *each) for each in validations)]
    legend = [("training", "#3465a4"), *([("validation", "#cc5500")] if validations else [])]
    for place, (name, colour) in enumerate(legend):
        parts.append(f'<text x="{_LEFT + 8 + 90 * place}" y="16" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Steps and losses as places of the picture."""

    def __init__(self, last: int, low: float, high: float) -> None:
        self._last, self._low, self._high = max(2, last), low, high

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / (self._last - 1)

    def y(self, loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self._high - loss) / (self._high - self._low)

    def axes(self) -> Iterable[str]:
        for tick in range(_TICKS):
            loss = self._low + (self._high - self._low) * tick / (_TICKS - 1)
            y = self.y(loss)
            yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.3g}</text>'
        for step in dict.fromkeys(round(1 + (self._last - 1) * tick / (_TICKS - 1)) for tick in range(_TICKS)):
            yield f'<text x="{self.x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{step}</text>'


def _thinned(losses: Sequence[float]) -> Iterable[tuple[float, float]]:
    size = -(-len(losses) // _MOST_POINTS)
    for first in range(0, len(losses), size):
        some = losses[first : first + size]
        yield first + (len(some) + 1) / 2, sum(some) / len(some)


def _line(scale: _Scale, points: Sequence[tuple[float, float]], colour: str) -> str:
    places = " ".join(f"{scale.x(step):.1f},{scale.y(loss):.1f}" for step, loss in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _dot(scale: _Scale, step: float, loss: float) -> str:
    return f'<circle cx="{scale.x(step):.1f}" cy="{scale.y(loss):.1f}" r="3" fill="#cc5500"/>'
