"""Small random Llama checkpoints, written and answered by transformers: the reference is independent of what it judges."""

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when torch is loaded. Threads that spin take the cores from each other where tests use more threads than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import msgspec
import pytest
import torch
from tests.worker.model.architectures.checkpoints import write

from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import Masks, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiled_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NativeKernels]:
    """The kernels as the compiler makes them with these options of x86: as on CPUs that have no others. Once a run each."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all processes of the run

    @cache
    def compiled(options: str) -> NativeKernels:
        if platform.machine() != "x86_64":
            pytest.skip("the options are those of x86")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", f"cc {options}")
            return NativeKernels(library(folder / "narrow"))

    return compiled


@dataclass(frozen=True)
class Reference:
    """transformers' own model of a checkpoint directory."""

    model: Any

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] of every position."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].float()

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([list(token_ids)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(token_ids) :].tolist()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """Opens a directory with transformers, in float32."""

    def load(model_dir: Path) -> Reference:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM, logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
        return Reference(model.eval())

    return load


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random Llama with transformers: `checkpoint(seed=0, **changes of SHAPE)`."""

    def write(seed: int = 0, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: object) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import LlamaConfig, LlamaForCausalLM, logging

            logging.disable_progress_bar()
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
        with torch.no_grad():  # the default initialization is so small that wrong attention would hide in the tolerance
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name or "bias" in name else 0.08))
        model_dir = tmp_path_factory.mktemp("llama")
        model.to(dtype).save_pretrained(model_dir, max_shard_size=max_shard_size)
        return model_dir

    return write


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a checkpoint of `architectures/checkpoints.py`, written once a module."""
    written: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("checkpoint")
            write(name, len(written), written[name])
        return written[name]

    return find


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Changes keys of a directory's config.json; None removes one."""

    def edit(model_dir: Path, **changes: object) -> None:
        path = model_dir / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return edit


@pytest.fixture(scope="session")
def built() -> Path:
    """The library of the source as it is: compiled once, by whichever process is first."""
    return library(despite_failure=True)


@pytest.fixture(scope="session")
def kernels(built: Path) -> NativeKernels:
    return NativeKernels(built)


@pytest.fixture(scope="session")
def threads() -> Callable[[int], AbstractContextManager[None]]:
    """`with threads(2): ...`"""

    @contextmanager
    def use(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use


class PlainTables(ModelRunner):
    """A runner whose plans name pages in one table, as if all layers kept all of them.

    Its layers get them group by group, without what a window has left.
    """

    forgets = True

    def hidden_logits(self, plan: StepPlan) -> torch.Tensor | None:
        return super().hidden_logits(self._in_groups(plan))

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow], masks: Masks | None = None) -> list[SampledToken]:
        return super().execute(self._in_groups(plan), rows, masks)

    def _in_groups(self, plan: StepPlan) -> StepPlan:
        extents = self.extents
        if len(plan.block_tables) != len(plan.num_new):
            return plan
        fed = plan.token_ids, plan.num_new, plan.num_context, plan.block_tables, plan.sampled
        found = self.plans.plan(*fed, full_logits=plan.full_logits)
        groups = [(lasting, window, start) for window, lasting in extents.groups for start in plan.num_context]
        firsts = [extents.first_seen(window, start) for _, window, start in groups]
        if self.forgets and any(firsts):
            kept = [
                [*(table[page] for page in extents.lasting_pages(lasting, first)), *table[first:]]
                for table, first, (lasting, _, _) in zip(found.block_tables, firsts, groups, strict=True)
            ]
            found = msgspec.structs.replace(found, block_tables=kept, first_pages=firsts)
        scored = {"scored": plan.scored, "targets": plan.targets, "num_top": plan.num_top}
        return msgspec.structs.replace(found, step=plan.step, adapters=plan.adapters, **scored)


def load_runner(model_dir: Path, tp: TensorParallel | None = None, **options: Any) -> ModelRunner:
    tp = tp or TensorParallel(0, 1, LocalCollectives())
    sizes = {"num_blocks": 64, "block_size": 4, "num_threads": 1, **options}
    sizes.setdefault("num_states", sizes["num_blocks"])  # of each page the state after it, see `PlainPlans`
    return PlainTables.load(model_dir, tp, RunnerOptions(**sizes))


@pytest.fixture(scope="session")
def runner() -> Callable[..., ModelRunner]:
    """Loads a directory on one rank: `runner(model_dir, **RunnerOptions)`."""
    return load_runner


@dataclass
class Sequences:
    """Feeds sequences to a runner and keeps their books, as the engine would, but without one."""

    runner: ModelRunner
    tables: list[list[int]]
    ids: list[list[int]] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.ids = [list(prompt) for prompt in prompts]
        self.fed = [0] * len(prompts)

    def plan(self, num_new: dict[int, int], full_logits: bool = False) -> StepPlan:
        """A step that feeds so many tokens of each sequence named; those that are then complete are sampled."""
        chosen = list(num_new)
        tokens = [token for s in chosen for token in self.ids[s][self.fed[s] : self.fed[s] + num_new[s]]]
        context = [self.fed[s] for s in chosen]
        for s in chosen:
            self.fed[s] += num_new[s]
        sampled = [i for i, s in enumerate(chosen) if self.fed[s] == len(self.ids[s])]
        tables = [self.tables[s] for s in chosen]
        return StepPlan(1, tokens, [num_new[s] for s in chosen], context, tables, sampled, full_logits)

    def rest(self) -> dict[int, int]:
        return {s: len(ids) - fed for s, (ids, fed) in enumerate(zip(self.ids, self.fed, strict=True)) if len(ids) > fed}

    def step(self, num_new: dict[int, int], rows: Sequence[SampleRow]) -> None:
        plan = self.plan(num_new)
        for i, token in zip(plan.sampled, self.runner.execute(plan, rows[: len(plan.sampled)]), strict=True):
            self.ids[list(num_new)[i]].append(token.token_id)


@pytest.fixture(scope="session")
def sequences() -> type[Sequences]:
    """The Sequences class, for tests that drive a runner step by step."""
    return Sequences
