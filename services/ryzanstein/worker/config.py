"""A worker's settings, read once in `__main__` from RYZANSTEIN_* or from flags; flags win."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ryzanstein.cluster import MAX_PLACE_CHARS
from ryzanstein.config import TUNING, ServiceSettings
from ryzanstein.files.model_paths import model_name
from ryzanstein.files.models_home import model_path
from ryzanstein.files.named_paths import is_object, read_setting
from ryzanstein.files.state_home import default_state
from ryzanstein.generation.prompts import MAX_NAME_CHARS, name_fault
from ryzanstein.generation.request import MAX_CHOICES
from ryzanstein.process import allotment
from ryzanstein.process.gpus import Device
from ryzanstein.worker.engines.child.command import check_arguments
from ryzanstein.worker.engines.remote.bounds import DialectName, SamplerUse
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.settings.quantization import Kernels, KvCompression, KvDtype, Quantization, Step
from ryzanstein.worker.settings.rank_settings import ModelSettings, QueueSettings
from ryzanstein.worker.settings.sparse import parse_sparse_attention
from ryzanstein.worker.tuning import MOVED, WorkerTuning

MAX_FURTHER_MODELS = 31
MAX_PATH_CHARS = 1024
_BORROW_BYTES = 2**30
OWN, VLLM = "own", "vllm"
_OF_RANKS = frozenset(
    {
        "tp",
        "device",
        "dtype",
        "kernels",
        "step",
        "kv_dtype",
        "quantization",
        "collectives",
        "threads_per_rank",
        "pin",
        "block_size",
        "num_blocks",
        "kv_bytes",
        "kv_compression",
        "sparse_attention",
        "kv_host_bytes",
        "kv_disk_bytes",
        "adapters",
        "adapter_bytes",
    }
)
"""Settings that mean nothing to an inference server beside the node, and must not be believed to."""

CallFormat = Literal[
    "auto",
    "llama3",
    "hermes",
    "mistral",
    "ministral",
    "deepseek",
    "lfm2",
    "olmo3",
    "qwen_xml",
    "seed",
    "glm",
    "granite",
    "cohere",
    "hunyuan",
    "gemma",
    "gemma4",
    "harmony",
    "generic",
]
ReasoningTags = Literal["auto", "none", "think", "answer", "response", "mistral", "seed", "cohere", "gemma4", "harmony"]


class WorkerSettings(ServiceSettings):
    """The settings of one node."""

    node_id: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description="name of the node; by default the host name",
    )
    grpc_server: Literal["builtin", "grpcio"] = Field(
        "grpcio",
        description="what serves gRPC: the library grpcio, whose threads carry the pages of other nodes, or the builtin "
        "server, which costs less for each message",
    )
    node_host: str = Field(
        default_factory=socket.gethostname,
        max_length=MAX_PLACE_CHARS,
        description="machine of the node, by default the host name; replicas are spread over machines",
    )
    node_zone: str = Field(
        "",
        max_length=MAX_PLACE_CHARS,
        description="zone of the machine, over which replicas are spread first",
    )
    grpc_port: int = Field(50061, ge=0, le=65535, description="gRPC API; 0: a free port, which is logged")
    tls_port: int = Field(50065, ge=0, le=65535, description="gRPC API with TLS; 0: a free port, which is logged")
    max_request_bytes: int = Field(
        16 * 2**20, ge=2**16, le=2**26, description="maximum size of a router's message, with session and generated tokens"
    )
    advertise_address: str = Field("", description="host:port, or IP address, for routers; empty: --host or the host name")
    orchestrator: str = Field("", description="host:port of the orchestrator, several with commas; empty: none")

    model: str = Field(
        "",
        description="directory of a Hugging Face checkpoint, GGUF file, or name of a fetched model; empty: none until one is "
        "deployed",
    )
    model_name: str = Field("", max_length=MAX_NAME_CHARS, description="name of the model; empty: the directory name")
    more_models: str = Field(
        "",
        description="directories of further models, comma-separated, each DIR or NAME=DIR, or a JSON object of names and "
        "directories; each has ranks of its own",
    )
    adapters: str = Field(
        "",
        description="adapters of `model`, comma-separated, each NAME=DIR, or a JSON object of names and directories; each "
        "answers under its name",
    )
    adapter_bytes: int = Field(2**30, ge=0, description="memory for adapters in use; those of idle ones make room for others")
    model_memory_bytes: int = Field(
        0, ge=0, description="memory for models, which bounds what is deployed; 0: 90 % of the machine's or container's"
    )
    engine: str = Field(
        "own",
        max_length=MAX_PATH_CHARS,
        description="what computes tokens: own; vllm, which the node starts itself; or the URL of an inference server beside "
        "the node that serves `model`: http://HOST:PORT, https://HOST:PORT or unix:///PATH; see docs/operate/engines.md",
    )
    engine_dialect: DialectName = Field("auto", description="how the server of `engine` speaks; auto: it is asked")
    engine_sampler: SamplerUse = Field(
        "auto",
        description="whether our sampler in vLLM decides tokens, so that answers go on exactly; auto: where vLLM has loaded it",
    )
    engine_python: str = Field(
        "python3", max_length=MAX_PATH_CHARS, description="interpreter that has vLLM, for engine vllm; never the node's own"
    )
    engine_args: str = Field(
        "", max_length=4096, description="further flags of `vllm serve`, for engine vllm, as in a shell: --dtype float32"
    )
    engine_board: Path | None = Field(
        None, description="file in which the ranks of vLLM with our sampler count their steps: their RYZANSTEIN_BOARD"
    )
    engine_key_file: Path | None = Field(None, description="file with the API key of the server of `engine`")
    tp: int = Field(1, ge=1, le=64, description="number of ranks, the degree of tensor parallelism")
    device: Device = Field(
        "auto", description="device of the ranks; auto: cuda if there is a GPU for each rank of the node, else cpu"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="data type of weights and arithmetic; auto: float32 on a CPU, bfloat16 on a GPU"
    )
    kernels: Kernels = Field("auto", description="native ones need a C compiler; auto: native where available, else torch")
    step: Step = Field("auto", description="auto: all layers of a small step in one native call; python: each in its own")
    kv_dtype: KvDtype = Field("auto", description="dtype of the KV cache; auto: same as dtype")
    quantization: Quantization = Field("none", description="quantization of weights; CPU only")
    collectives: Literal["auto", "shm", "gloo", "nccl"] = Field("auto", description="backend of the collectives")
    threads_per_rank: int = Field(
        0, ge=0, le=1024, description="threads of each rank; 0: number of cores divided by all ranks of the node"
    )
    pin: bool = Field(False, description="bind each rank to its own cores")

    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block of the KV cache")
    num_blocks: int = Field(0, ge=0, description="pages of the KV cache, for all layers; 0: as many as fit in kv_bytes")
    kv_bytes: int = Field(0, ge=0, description="size of each rank's KV cache; 0: enough for max_sequences, at most 1 GiB")
    kv_compression: KvCompression = Field(
        "none", description="how keys and values are kept that are not the newest, see docs/concepts/kv-cache.md; CPU only"
    )
    sparse_attention: str = Field(
        "",
        description="what layers without a window read, such as window=1024,sinks=64; empty: everything; see "
        "docs/concepts/kv-cache.md; CPU only",
    )
    kv_lending: bool = Field(
        True,
        description="models of a node lend each other KV memory that they do not need; CPU only, see docs/concepts/kv-cache.md",
    )
    kv_replication: Literal["none", "sessions", "all"] = Field(
        "sessions",
        description="whose pages of the KV cache go to the backup node: nobody's, conversations', all; see "
        "docs/concepts/kv-replication.md",
    )
    kv_replication_rate: int = Field(
        256 * 2**20, ge=0, description="bytes of pages that the node sends in a second at most; 0: no limit"
    )
    audit_file: Path | None = Field(
        None, description="file that operators' acts are appended to, beside the log; see docs/operate/secure.md"
    )
    state_dir: Path = Field(
        default_factory=default_state("worker"),
        description="directory for which orchestrator led last, so that a restarted node obeys no earlier one; by default in "
        "the state home",
    )
    kv_host_bytes: int = Field(0, ge=0, description="memory beside the KV cache for conversations' pages; 0: none")
    kv_disk_bytes: int = Field(0, ge=0, description="disk space for conversations' pages; 0: none")
    kv_disk_dir: Path = Field(
        default_factory=default_state("worker", "kv-pages"),
        description="directory of kv_disk_bytes, with a folder for each node; its content may be deleted; by default in the "
        "state home, see docs/operate/configure.md",
    )
    reserve: bool = Field(
        False,
        description="this node answers only where no other of the model can, for example a CPU node beside GPUs; see "
        "docs/concepts/routing.md",
    )
    max_sequences: int = Field(64, ge=1, le=4096, description="sequences that run at once")
    max_tokens_per_step: int = Field(512, ge=1, le=65536, description="token budget of a step")
    max_waiting: int = Field(256, ge=MAX_CHOICES, le=65536, description="sequences that wait in the queue; more are refused")
    fair: bool = Field(True, description="tenants of one priority get equal shares; false: first come, first served")
    ttft_objective_s: float = Field(
        0.0, ge=0, le=3600, description="requests that would wait longer for their first token are refused; 0: no limit"
    )
    tpot_objective_s: float = Field(
        0.0, ge=0, le=3600, description="prefills are split so that steps with decodes take no longer; 0: no limit"
    )

    chat_template: str = Field(
        "",
        description="file with a chat template that replaces that of `model`, or NAME=FILE for the model of this name; "
        "several are comma-separated, or in a JSON object, see docs/build/tools.md",
    )
    call_format: CallFormat = Field(
        "auto", description="how the models call functions; auto: as their chat templates show, see docs/build/tools.md"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="whether a model's generation_config.json has the default temperature, top_p, top_k, min_p and "
        "repetition_penalty of requests",
    )
    reasoning: ReasoningTags = Field(
        "auto",
        description="the tags between which the models think, or none, see docs/build/tools.md; auto: as their chat templates "
        "show",
    )

    tuning: WorkerTuning = Field(default_factory=WorkerTuning, description=TUNING)

    moved: ClassVar[Mapping[str, str]] = MOVED

    @property
    def kept_in(self) -> Path | None:
        """The `state_dir`; None where it is a default and there is no state home."""
        return self.state_dir if "state_dir" in self.model_fields_set or self.state_dir.is_absolute() else None

    @model_validator(mode="after")
    def _pages_are_placed(self) -> WorkerSettings:
        if self.kv_disk_bytes:
            self._placed("kv_disk_dir")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> WorkerSettings:
        names = [name for name, _ in self.further_models()]
        if len(names) > MAX_FURTHER_MODELS:
            raise ValueError(f"more_models has {len(names)} models, more than {MAX_FURTHER_MODELS}")
        if names and not self.model:
            raise ValueError("more_models needs model: the first one has a setting of its own")
        first = [self._first_name] if self.model else []
        if first and (fault := name_fault(first[0])):
            raise ValueError(f"model: its name {fault}: name it with model_name")
        for name in names:
            if fault := name_fault(name):
                raise ValueError(f"more_models: the name {name[:MAX_NAME_CHARS]!r} {fault}: name it as NAME=DIR")
            if (names + first).count(name) > 1:
                raise ValueError(f"more_models: there is more than one model {name!r}: name it as NAME=DIR")
        return self

    @model_validator(mode="after")
    def _one_template_each(self) -> WorkerSettings:
        entries = self._template_files()
        names = [name for name, _ in entries]
        if "" in names:
            raise ValueError("chat_template names no model, and there is no setting model: name it as NAME=FILE")
        listed = not is_object(self.chat_template)
        if (wrong_name := next((name for name in names if listed and "/" in name), None)) is not None:
            raise ValueError(f"chat_template: {wrong_name!r} is no name of a model: a file name may have no equals sign")
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ValueError(f"chat_template has more than one file for model {twice!r}: name the others as NAME=FILE")
        if (wrong := next((path for _, path in entries if not path or len(path) > MAX_PATH_CHARS), None)) is not None:
            raise ValueError(f"chat_template: a file name must have 1 to {MAX_PATH_CHARS} characters, got {len(wrong)}")
        return self

    @model_validator(mode="after")
    def _adapters_of_a_model(self) -> WorkerSettings:
        names = [name for name, _ in self.named_adapters()]
        if names and not self.model:
            raise ValueError("adapters needs model: the one that they change")
        taken = [self._first_name] if self.model else []
        for name in names:
            if not name or (fault := name_fault(name)):
                raise ValueError(f"adapters: the name {name[:MAX_NAME_CHARS]!r} {fault if name else 'is empty: give NAME=DIR'}")
            if names.count(name) > 1 or name in taken:
                raise ValueError(f"adapters: the name {name!r} is given twice, or is the model's own")
        return self

    @field_validator("engine")
    @classmethod
    def _is_reachable(cls, given: str) -> str:
        if given not in (OWN, VLLM):
            EngineAddress.parse(given)
        return given

    @model_validator(mode="after")
    def _engine_has_its_own_settings(self) -> WorkerSettings:
        if self.engine == OWN:
            if self.engine_key_file is not None or self.engine_board is not None:
                name = "engine_board" if self.engine_key_file is None else "engine_key_file"
                raise ValueError(f"{name} is of a server: set engine to its URL")
            if find_spec("torch") is None:
                raise ValueError("engine: own needs torch: pip install 'ryzanstein[worker]', or set it to the URL of a server")
            return self
        if self.engine_board is not None and self.engine == VLLM:
            raise ValueError("engine_board is set by the node for a vLLM that it starts")
        if given := sorted(self.model_fields_set & (_OF_RANKS - {"tp"} if self.engine == VLLM else _OF_RANKS)):
            raise ValueError(f"{given[0]} is a setting of the node's own ranks: set it at the server of engine {self.engine}")
        check_arguments(self.engine_arguments())
        if self.more_models:
            raise ValueError(f"more_models: the engine at {self.engine} serves one model")
        if self.engine_key_file is not None:
            self.engine_key()
        return self

    @field_validator("model")
    @classmethod
    def _is_where_it_was_fetched(cls, given: str) -> str:
        return str(model_path(given)) if given else ""

    @field_validator("sparse_attention")
    @classmethod
    def _known_rule(cls, text: str) -> str:
        parse_sparse_attention(text)
        return text.strip()

    @model_validator(mode="after")
    def _fits(self) -> WorkerSettings:
        if self.max_tokens_per_step < self.max_sequences:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_sequences ({self.max_sequences}): "
                "every running sequence decodes in every step"
            )
        return self

    @property
    def has_ranks(self) -> bool:
        """Whether the node computes with ranks of its own."""
        return self.engine == OWN

    @property
    def starts_engine(self) -> bool:
        """Whether the node starts and ends an inference server itself."""
        return self.engine == VLLM

    def engine_arguments(self) -> list[str]:
        """Returns `engine_args` as words. Raises ValueError."""
        try:
            return shlex.split(self.engine_args)
        except ValueError as error:
            raise ValueError(f"engine_args: {error}") from None

    def engine_key(self) -> str:
        """Returns the key of the server of `engine`; empty: it wants none. Raises ValueError for a file without one."""
        if self.engine_key_file is None:
            return ""
        try:
            key = self.engine_key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"engine_key_file {self.engine_key_file}: {getattr(error, 'strerror', None) or 'is not ASCII'}"
            ) from None
        if not 1 <= len(key) <= MAX_PATH_CHARS or not key.isprintable() or " " in key:
            raise ValueError(f"engine_key_file {self.engine_key_file}: must have one key of 1 to {MAX_PATH_CHARS} characters")
        return key

    @property
    def _lends(self) -> bool:
        """Whether there is, or may be, another model to lend to."""
        return self.kv_lending and (self.num_models > 1 or bool(self.orchestrator))

    @property
    def num_models(self) -> int:
        return 1 + len(self.further_models())

    def further_models(self) -> list[tuple[str, str]]:
        """Returns the names and directories of the further models."""
        pairs = read_setting(self.more_models)
        return [(name or model_name(Path(directory)), str(model_path(directory))) for name, directory in pairs]

    def named_adapters(self) -> list[tuple[str, Path]]:
        """Returns the names and paths of the adapters of the first model."""
        return [(name, Path(path)) for name, path in read_setting(self.adapters)]

    def template_file(self, name: str) -> Path | None:
        """Returns the file with the chat template of a model; None: the model's own."""
        path = dict(self._template_files()).get(name)
        return None if path is None else Path(path).resolve()

    def _template_files(self) -> list[tuple[str, str]]:
        """Returns the names of models and the files of `chat_template`."""
        return [(name or self._first_name, path) for name, path in read_setting(self.chat_template)]

    @property
    def _first_name(self) -> str:
        """Returns the name of the first model, empty if there is none."""
        return (self.model_name or model_name(Path(self.model))) if self.model else ""

    def of_model(self, name: str) -> WorkerSettings:
        """Returns the settings of the agent of a further model."""
        return self.model_copy(update={"node_id": f"{self.node_id}/{name}"})

    def rank_spec(self, model: str, ranks_before: int = 0) -> RankSpec:
        """Returns what the ranks that serve this directory are started with.

        `ranks_before`: see `RankSpec`.
        """
        num_ranks = self.tp * self.num_models
        threads = self.threads_per_rank or max(1, int(allotment.usable_cores() / num_ranks))
        return RankSpec(
            model=model,
            tp=self.tp,
            settings=self._model_settings(),
            queue=self.queue_settings,
            device=self.device,
            collectives=self.collectives,
            threads=threads,
            spins=allotment.granted_cores() >= threads * num_ranks,
            openmp_spins=self.tuning.openmp_spins,
            nice=self.tuning.rank_nice,
            pin=self.pin,
            ranks_before=ranks_before,
            log_level=self.log_level,
            node_id=self.node_id,
            grammar_cache_bytes=self.tuning.grammar_cache_bytes,
        )

    @property
    def queue_settings(self) -> QueueSettings:
        return QueueSettings(
            max_waiting=self.max_waiting,
            fair=self.fair,
            ttft_objective_s=self.ttft_objective_s,
            tpot_objective_s=self.tpot_objective_s,
        )

    def _model_settings(self) -> ModelSettings:
        return ModelSettings(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantization=self.quantization,
            kernels=self.kernels,
            step=self.step,
            block_size=self.block_size,
            num_blocks=self.num_blocks or None,
            kv_bytes=self.kv_bytes or None,
            num_states=self.tuning.kv_states or None,
            max_sequences=self.max_sequences,
            max_tokens_per_step=self.max_tokens_per_step,
            lends_blocks=self._lends,
            borrow_bytes=(self.tuning.kv_borrow_bytes or self.kv_bytes or _BORROW_BYTES) if self._lends else 0,
            kv_compression=self.kv_compression,
            kv_hot_tokens=self.tuning.kv_hot_tokens,
            sparse_attention=self.sparse_attention,
        )
