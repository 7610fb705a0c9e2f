"""What a tenant can ask about its usage, on the wire and on the command line, and how a refusal looks in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc
import pytest

from ryzanstein.auth import refusals
from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.router.access.limits.usage import this_month
from ryzanstein.router.faces.openai.answers.failures import failure_from_error
from ryzanstein.rpc.status import error_from_rpc, error_from_status, status_from_error
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import usage_pb2 as pb
from ryzanstein.v1.usage_pb2_grpc import UsageServiceStub

LIMITS = TenantLimits(requests_per_second=50.5, tokens_per_month=1000, hard_month=True)


@pytest.fixture
async def router(start_node: Any, start_router: Any) -> Any:
    started = await start_router(await start_node("a"))
    started.router.allowance.limits_of = lambda tenant: LIMITS if tenant == "acme" else TenantLimits()
    for tenant, tokens in (("acme", 3), ("acme", 4), ("zeta", 5), ("", 6)):
        request = inference.CompleteRequest(text="hello", sampling=inference.SamplingParams(max_tokens=tokens))
        await started.inference.Complete(request, metadata=(("x-tenant-id", tenant),) if tenant else ())
    return started


async def asked(router: Any, caller: str = "", **request: str) -> list[pb.TenantUsage]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.server.port}") as channel:
        metadata = (("x-tenant-id", caller),) if caller else ()
        answer = await UsageServiceStub(channel).GetUsage(pb.GetUsageRequest(**request), metadata=metadata)
    return list(answer.rows)


async def test_a_tenant_sees_its_own_usage_and_its_limits(router: Any) -> None:
    (row,) = await asked(router, "acme")
    assert (row.tenant, row.month, row.requests, row.prompt_tokens, row.generated_tokens) == ("acme", this_month(), 2, 14, 7)
    assert (row.limits.requests_per_second, row.limits.tokens_per_month, row.limits.hard_month) == (50.5, 1000, True)
    assert not row.limits.HasField("concurrent")
    assert [each.requests for each in await asked(router, "nobody")] == [0]
    assert [each.requests for each in await asked(router, "acme", month="2020-01")] == [0]


async def test_a_tenant_does_not_see_another_ones(router: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asked(router, "acme", tenant="zeta")
    assert error_from_rpc(refused.value).reason == "TENANT_NOT_YOURS"
    assert [row.tenant for row in await asked(router, "acme", tenant="acme")] == ["acme"]


async def test_who_has_no_tenant_sees_all(router: Any) -> None:
    rows = await asked(router)
    assert [(row.tenant, row.generated_tokens) for row in rows] == [("", 6), ("acme", 7), ("zeta", 5)]
    assert [row.tenant for row in await asked(router, tenant="zeta")] == ["zeta"]


@pytest.mark.parametrize("month", ["2026", "2026-13", "2026-1", "x" * 5000, "2026-11-01"])
async def test_what_is_no_month_is_refused(router: Any, month: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asked(router, month=month)
    assert [each.field for each in error_from_rpc(refused.value).violations] == ["month"]


async def test_the_command_line_shows_it(router: Any) -> None:
    async def run(*more: str) -> tuple[int | None, str, str]:
        command = ("-P", "-m", "ryzanstein.cli", "usage", "--router", f"127.0.0.1:{router.server.port}", *more)
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, **pipes)  # type: ignore[arg-type]
        out, error = await process.communicate()
        return process.returncode, out.decode(), error.decode()

    asked = [run(), run("--json", "--tenant", "acme"), run("--month", "2020-01"), run("--month", "soon")]
    shown, document, empty, wrong = await asyncio.gather(*asked)
    assert shown[0] == 0
    assert [line for line in shown[1].splitlines() if "acme" in line and "14" in line and "1000" in line]
    rows = json.loads(document[1])["usage"]
    assert [(each["tenant"], each["requests"], each["limits"]["concurrent"]) for each in rows] == [("acme", 2, None)]
    assert empty[:2] == (0, "")
    assert (wrong[0], "YYYY-MM" in wrong[2]) == (1, True)


def test_a_rate_is_to_be_tried_again_and_a_quota_is_not() -> None:
    rate = refusals.rate_limited("tokens_per_minute", 1000, 7, "6s", retry_after_s=0.25, tenant="acme")
    failure = failure_from_error(rate)
    assert (failure.status, failure.code, failure.headers["Retry-After"]) == (429, "rate_limit_exceeded", "1")
    assert failure.headers["Retry-After-Ms"] == "250"
    assert "x-should-retry" not in failure.headers
    assert failure.metadata["remaining"] == "7"
    quota = failure_from_error(refusals.quota_exhausted("tokens_per_month", 1000, 0, tenant="acme"))
    assert (quota.status, quota.code, dict(quota.headers)) == (429, "insufficient_quota", {"x-should-retry": "false"})


@pytest.mark.parametrize(
    "error",
    [
        refusals.rate_limited("requests_per_second", 0.5, 0, "2s", retry_after_s=0.25, tenant="acme"),
        refusals.quota_exhausted("tokens_per_month", 1000, 0, tenant="acme"),
    ],
)
def test_the_wire_names_the_quota_once(error: Any) -> None:
    status = status_from_error(error)
    kinds = [detail.TypeName().rpartition(".")[2] for detail in status.details]
    assert kinds == ["ErrorInfo", "QuotaFailure", *(["RetryInfo"] if error.retry_after_s else [])]
    again = error_from_status(status)
    assert (again.reason, again.metadata, again.retry_after_s) == (error.reason, error.metadata, error.retry_after_s)
