"""Answers in bfloat16, cut and continued by another vLLM than the one that began them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.worker.engines.real_vllm.conftest import VllmServer
from tests.worker.engines.real_vllm.test_continuation import BASE, CASES, CUTS, cut

LEAST = 0.9
"""Where two tokens are as likely within the error of bfloat16, a prompt that has the answer in it may decide otherwise."""


@pytest.mark.timeout(900)
async def test_nearly_every_cut_continues_in_bfloat16(
    model: Any, node_process: Any, connect: Any, attempt: Any, tmp_path: Any
) -> None:
    server = VllmServer(model, tmp_path / "log", dtype="bfloat16")
    equal: dict[str, list[bool]] = {}
    try:
        server.wait()
        node = node_process(tmp_path / "node.log", "--engine", server.url, "--model-name", "demo", model=model)
        try:
            node.wait_event("ranks ready")
            async with connect(node.address) as link:
                for name, case in CASES.items():
                    params = BASE | case
                    whole = await link.run(attempt(**params), 120)
                    cuts = [known for at in CUTS if (known := cut(whole, params.get("n", 1), at)) is not None]
                    runs = [link.run(attempt(known=known, number=1, **params), 120) for known in cuts]
                    for known, rest in zip(cuts, await asyncio.gather(*runs), strict=True):
                        assert rest.failed is None
                        expected = {c: whole.rows[c][len(known[c].token_ids) :] for c in rest.rows}
                        equal.setdefault(name, []).append(rest.rows == expected)
        finally:
            node.close()
    finally:
        server.close()
    every = [each for cuts in equal.values() for each in cuts]
    print(f"{sum(every)} of {len(every)} equal; not: {[name for name, cuts in equal.items() if not all(cuts)]}")
    assert sum(every) >= LEAST * len(every)
