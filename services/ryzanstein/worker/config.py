"""A worker's settings, read once in `__main__` from RYZANSTEIN_* or from flags; flags win."""

from __future__ import annotations

import os
import socket
from typing import Literal

from pydantic import Field, model_validator

from ryzanstein.config import ServiceSettings
from ryzanstein.generation import MAX_CHOICES, MAX_NAME_CHARS
from ryzanstein.worker.quantization import Kernels, KvDtype, Quantization
from ryzanstein.worker.ranks.group import GroupBounds
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.recovery import RecoveryPolicy
from ryzanstein.worker.ranks.slowness import SlowBounds
from ryzanstein.worker.ranks.watchdog import StallBounds
from ryzanstein.worker.text.templates.process import TemplateBounds


class WorkerSettings(ServiceSettings):
    """The settings of one node."""

    node_id: str = Field(default_factory=socket.gethostname, min_length=1, max_length=MAX_NAME_CHARS)
    grpc_port: int = Field(50061, ge=0, le=65535, description="0: a free port, which is logged")
    max_request_bytes: int = Field(
        16 * 2**20, ge=2**16, le=2**26, description="of one frame of a router, which carries the session and what is generated"
    )
    max_request_records: int = Field(32_768, ge=1024, le=2**20, description="fields of one, those of its messages included")
    advertise_address: str = Field("", description="host:port for routers; empty: --host, or the host's name, and the port")
    orchestrator: str = Field("", description="host:port of the orchestrator; empty: the node stands alone")

    model: str = Field("", description="directory of a Hugging Face checkpoint; empty: none until one is deployed")
    model_name: str = Field("", max_length=MAX_NAME_CHARS, description="empty: the directory's name")
    tp: int = Field(1, ge=1, le=64, description="ranks, the degree of tensor parallelism")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kernels: Kernels = Field("auto", description="of our own, which need a C compiler once; auto: where they can be had")
    kv_dtype: KvDtype = Field("auto", description="of keys and values; auto: the model's")
    quantization: Quantization = Field("none", description="of weights, on CPUs")
    collectives: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    threads_per_rank: int = Field(0, ge=0, le=1024, description="0: the cores divided by the ranks")
    rank_nice: int = Field(10, ge=0, le=19, description="ranks give way to their agent; 0: they do not")
    openmp_spins: int = Field(0, ge=0, description="looks of a thread before it sleeps; 0: many. 1500 where cores are shared")
    pin: bool = Field(False, description="bind each rank to cores of its own")

    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block of the KV cache")
    num_blocks: int = Field(0, ge=0, description="0: as many as kv_bytes hold")
    kv_bytes: int = Field(0, ge=0, description="KV cache of each rank; 0: what max_sequences need, at most 1 GiB")
    max_sequences: int = Field(64, ge=1, le=4096, description="sequences that run at once")
    max_tokens_per_step: int = Field(512, ge=1, le=65536, description="token budget of a step")
    max_waiting: int = Field(256, ge=MAX_CHOICES, le=65536, description="sequences that wait; more are refused")
    fair: bool = Field(True, description="tenants of one priority get equal shares; false: first come, first served")
    ttft_objective_s: float = Field(
        0.0, ge=0, le=3600, description="who would wait longer for the first token is refused at once; 0: nobody"
    )
    tpot_objective_s: float = Field(
        0.0, ge=0, le=3600, description="prompts are cut so that a step which decodes takes no longer; 0: not for that"
    )

    template_cpu_s: float = Field(1.0, gt=0, le=60, description="processor time of a chat template for one conversation")
    template_memory_bytes: int = Field(512 * 2**20, ge=64 * 2**20, description="... and memory, beyond its process's own")
    template_waiting: int = Field(1024, ge=1, description="conversations that wait for it; more are refused")

    beat_busy_s: float = Field(0.05, gt=0, le=10, description="interval of the status beat while work runs")
    beat_idle_s: float = Field(0.5, gt=0, le=10, description="... and while the node is idle")
    router_silence_s: float = Field(5.0, gt=0, description="a router that says nothing for so long is gone, its work is freed")
    link_rows: int = Field(65536, ge=1, description="tokens that may wait for a router before its link is closed")
    link_bytes: int = Field(8 * 2**20, ge=1024, description="... and their bytes")

    start_timeout_s: float = Field(300.0, gt=0, description="until all ranks have loaded and warmed up")
    stall_min_s: float = Field(2.0, gt=0, description="pending work that does not move for so long is a stall ...")
    stall_factor: float = Field(10.0, ge=1, description="... or for so many times the p99 step, whichever is longer")
    slow_factor: float = Field(4.0, gt=1, description="a rank that computes so many times as long as its peers is slow")
    slow_warn_s: float = Field(5.0, gt=0, description="... and is named after so long of work")
    slow_restart_s: float = Field(60.0, ge=0, description="... and its group is started again after so much; 0: never")
    idle_check_s: float = Field(1.0, ge=0, le=60, description="how often idle ranks are asked if they are there; 0: never")
    watch_interval_s: float = Field(0.1, gt=0, le=1, description="how often the watchdog looks")
    stop_grace_s: float = Field(2.0, ge=0, description="from SIGTERM to SIGKILL for a rank")
    restart_first_s: float = Field(0.25, gt=0, description="back-off before the second restart in a row")
    restart_longest_s: float = Field(30.0, gt=0)
    crash_limit: int = Field(5, ge=1, description="crashes in a row that put the node in quarantine")
    loss_limit: int = Field(20, ge=1, description="... or losses of ranks within loss_window_s")
    loss_window_s: float = Field(600.0, gt=0, description="service for so long without a loss clears the node's record")
    quarantine_s: float = Field(30.0, gt=0, description="until a node in quarantine tries again; doubled while that fails")
    longest_quarantine_s: float = Field(600.0, gt=0)
    quarantine_limit: int = Field(5, ge=0, description="quarantines after which the node drains and waits for an undrain")

    @model_validator(mode="after")
    def _fits(self) -> WorkerSettings:
        if self.max_tokens_per_step < self.max_sequences:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_sequences ({self.max_sequences}): "
                "every running sequence decodes in every step"
            )
        return self

    def rank_spec(self, model: str) -> RankSpec:
        """Returns what the ranks that serve this directory are started with."""
        return RankSpec(
            model=model,
            tp=self.tp,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantization=self.quantization,
            kernels=self.kernels,
            collectives=self.collectives,
            threads=self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // self.tp),
            openmp_spins=self.openmp_spins,
            nice=self.rank_nice,
            pin=self.pin,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_bytes=self.kv_bytes,
            max_sequences=self.max_sequences,
            max_tokens_per_step=self.max_tokens_per_step,
            max_waiting=self.max_waiting,
            fair=self.fair,
            ttft_objective_s=self.ttft_objective_s,
            tpot_objective_s=self.tpot_objective_s,
            log_level=self.log_level,
            node_id=self.node_id,
        )

    def group_bounds(self) -> GroupBounds:
        return GroupBounds(
            self.start_timeout_s,
            self.watch_interval_s,
            self.stop_grace_s,
            StallBounds(self.stall_min_s, self.stall_factor),
            SlowBounds(self.slow_factor, warn_s=self.slow_warn_s, restart_s=self.slow_restart_s),
            self.idle_check_s,
        )

    def template_bounds(self) -> TemplateBounds:
        return TemplateBounds(self.template_cpu_s, self.template_memory_bytes, self.template_waiting)

    def recovery(self) -> RecoveryPolicy:
        return RecoveryPolicy(
            self.restart_first_s,
            self.restart_longest_s,
            crash_limit=self.crash_limit,
            loss_limit=self.loss_limit,
            window_s=self.loss_window_s,
            quarantine_s=self.quarantine_s,
            longest_quarantine_s=self.longest_quarantine_s,
            quarantine_limit=self.quarantine_limit,
        )
