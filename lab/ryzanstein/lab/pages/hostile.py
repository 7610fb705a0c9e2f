"""What a model may write to harm who reads it: by running something, by telling another host, or by taking long."""

from __future__ import annotations

HOSTILE = {
    "script": "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 1'> <svg onload='window.pwned = 1'>",
    "links": (
        "[a](javascript:window.pwned=1) [b](data:text/html,<script>window.pwned=1</script>) [c](JaVaScRiPt:window.pwned=1)\n"
        "[d](&#106;avascript:window.pwned=1) <javascript:window.pwned=1> [e](//evil.example/x) [f](file:///etc/passwd)\n\n"
        "![g](http://evil.example/secret.png) ![h](data:image/svg+xml,<svg/onload=window.pwned=1>) [i](https://ok.example/x)"
    ),
    "brackets": "[" * 20_000,
    "delimiters": "*_`~" * 5_000 + "\n\n" + "> " * 4_000 + "\n\n" + "- " * 4_000,
    "nested": "".join(f"{'  ' * depth}- x\n" for depth in range(300)) + "\n" + "1. " * 3_000,
    "line": "x" * 1_000_000,
    "bidi": "user \u202egnp.exe\u202c \u2066abc\u2069 \x1b[2J\x07 \ufdd0 seam \ufdd0",
    "fences": "before\n\n```html\n<b>open</b>\n\n~~~\n" + "x\n" * 3000,
    "table": "|a|b|\n|-|-|\n" + "|<b>x</b>|y|\n" * 500,
    "style": (
        "<style>*{display:none}</style><base href='http://evil.example/'><meta http-equiv=refresh content='0;//evil.example'>"
    ),
    "form": "<form action=http://evil.example><input name=x></form><iframe src=http://evil.example></iframe>",
}


def pieces_of(text: str, size: int = 400) -> list[tuple[str, str]]:
    """Returns a text as tokens of three nodes that take turns."""
    return [(f"node-{at % 3}", text[begin : begin + size]) for at, begin in enumerate(range(0, len(text), size))]
