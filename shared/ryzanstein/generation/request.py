"""What a client asks for: a prompt, how its tokens are chosen, when the answer ends. And an attempt to run it on one node.

A model's own sampling values (generation_config.json) count where a request says nothing. A request goes only to nodes that
know the features that it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import PLAIN_TEMPLATE, ChatPrompt, Prompt

EXTENDED = "extended-parameters"
"""The feature of nodes that know everything in `SamplingParams` from `bad_words` on, and `TemplateOptions`."""
TOOLS = "tools"
"""The feature of nodes that know tools, and messages that are not plain."""
CONSTRAINTS = "constraints"
"""The feature of nodes that enforce `SamplingParams.constraint`."""
PROMPT_CUTS = "prompt-cuts"
"""The feature of nodes that know `SamplingParams.keep_prompt_head`."""
CACHE_SCOPES = "cache-scopes"
"""The feature of nodes that keep what requests of one `cache_scope` leave in their caches from all others."""
ADAPTERS = "adapters"
"""The feature of nodes that know `GenerationRequest.adapter`: others would answer with the base model."""
KNOWN_FEATURES = frozenset({EXTENDED, TOOLS, CONSTRAINTS, PROMPT_CUTS, CACHE_SCOPES, ADAPTERS})
"""All features that this version knows."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter of a model: the public name under which it is asked for, and the digest of its content, 32 bytes.

    Of two adapters with one name, the digest tells which is meant.
    """

    name: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What one choice has generated so far. `finished` choices must not run again."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node, and where it is reached: host:port."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to run a generation on one node.

    `attempt` is a fencing number. `generated` has one entry per choice. `accepted_before`: an
    earlier node had accepted the generation. `backup`: where it goes next if the node fails.
    `previous`: a node that may have pages of the conversation's earlier turns. `conversation` is the
    same for all its turns; empty outside of one.
    """

    generation_id: str
    attempt: int
    request: GenerationRequest
    generated: tuple[ChoiceProgress, ...]
    accepted_before: bool = False
    backup: NodePlace | None = None
    previous: NodePlace | None = None
    conversation: bytes = b""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own values; None: that of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The values that the model has, by name."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, params: SamplingParams, *, seed: int | None, keep_prompt_head: int | None) -> SamplingParams:
        """Returns the parameters with these values for those that the request left out. None is left out then.

        `seed` and `keep_prompt_head` are the router's.
        """
        own = {name: value for name, value in self.given.items() if name in params.unset}
        return replace(params, **own, seed=seed, keep_prompt_head=keep_prompt_head, unset=frozenset())  # type: ignore[arg-type]

    def without(self, names: Collection[str]) -> SamplingDefaults:
        """Returns the values of the other parameters."""
        if not names:
            return self
        return SamplingDefaults(**{name: value for name, value in self.given.items() if name not in names})  # type: ignore[arg-type]


NO_DEFAULTS = SamplingDefaults()
NAMES = tuple(each.name for each in fields(SamplingDefaults))


MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MIN_REPETITION_PENALTY = 0.001
"""Logits divided by much less are no numbers any more."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which tokens are chosen.

    `validate` enforces the bounds of `SamplingParams` in inference.proto. `seed` is None only
    before the router has chosen one. `max_tokens` None means all that is left of the context.
    `allowed_token_ids` empty allows all. `truncate_prompt_tokens` keeps so many of the prompt's last
    tokens. With `keep_prompt_head` a prompt that does not fit is cut, see inference.proto. `unset` names
    the parameters that the request left out, until the router has filled in the model's own values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    keep_prompt_head: int | None = None
    unset: frozenset[str] = field(default=frozenset(), compare=False)

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the first field out of its bounds."""
        for (name, low, high), value in zip(_RANGES, _ranged(self), strict=True):
            if value is not None and not low <= value <= high:
                raise errors.invalid(f"sampling.{name}", f"must be in [{low}, {high}]", value)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise errors.invalid(f"sampling.{name}", "must be greater than 0", getattr(self, name))
        if self.truncate_prompt_tokens is not None and (self.keep_prompt_head or 0) >= self.truncate_prompt_tokens:
            bound = f"must be less than truncate_prompt_tokens ({self.truncate_prompt_tokens})"
            raise errors.invalid("sampling.keep_prompt_head", bound, self.keep_prompt_head)
        self._validate_lists()
        if self.constraint is not None:
            self.constraint.validate()

    @property
    def is_extended(self) -> bool:
        """Whether it has a parameter that only nodes with the feature `EXTENDED` know."""
        return bool(_extended(self) != _NOT_EXTENDED)

    def _validate_lists(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise errors.invalid("sampling.min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens)
        if not any(_lists(self)):
            return
        for name, bound in _LENGTHS:
            if len(getattr(self, name)) > bound:
                raise errors.invalid(f"sampling.{name}", f"must have at most {bound} entries", len(getattr(self, name)))
        for name, most in (("stop", MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORD_CHARS)):
            _check_texts(f"sampling.{name}", getattr(self, name), most)
        for _, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise errors.invalid("sampling.logit_bias", "each value must be in [-100, 100]", bias)


def in_bounds(name: str, value: float) -> bool:
    """Returns whether a parameter may have this value."""
    low, high = next((low, high) for each, low, high in _RANGES if each == name)
    return low <= value <= high and (value > 0 or name not in _POSITIVE)


def _check_texts(field: str, texts: Sequence[str], most: int) -> None:
    for text in texts:
        if not 1 <= len(text) <= most:
            raise errors.invalid(field, f"each string must have 1 to {most} characters", len(text))


NEVER_LACKING = frozenset(
    {
        "seed",
        "max_tokens",
        "n",
        "stop",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
        "keep_prompt_head",
    }
)
"""Parameters that no engine lacks: the node does them around its engine. A seed is always set, and is where draws begin."""
CONSTRAINT, EMBEDDINGS = "constraint", "embeddings"
"""What engines may lack that is more than a parameter of this name."""
EXTENDED_PARAMS = (
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
_DEFAULTS = SamplingParams()
_ENGINES_PARAMS = tuple(each.name for each in fields(SamplingParams) if each.name not in NEVER_LACKING | {CONSTRAINT, "unset"})
_UINT32 = 2**32 - 1
_POSITIVE = ("top_p", "repetition_penalty")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, _UINT32),
    ("min_p", 0, 1),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 2),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", 0, 2**64 - 1),
    ("max_tokens", 1, _UINT32),
    ("min_tokens", 0, _UINT32),
    ("logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", 1, _UINT32),
    ("keep_prompt_head", 0, _UINT32),
)
_LENGTHS = (
    ("stop", MAX_STOP_STRINGS),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS),
    ("logit_bias", MAX_LOGIT_BIAS),
    ("bad_words", MAX_BAD_WORDS),
    ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
)
# Each reads all of its parameters in one call: a request is checked several times.
_ranged, _lists = attrgetter(*(name for name, _, _ in _RANGES)), attrgetter(*(name for name, _ in _LENGTHS))
_extended, _of_engines = attrgetter(*EXTENDED_PARAMS), attrgetter(*_ENGINES_PARAMS)
_NOT_EXTENDED, _ENGINES_DEFAULTS = _extended(_DEFAULTS), _of_engines(_DEFAULTS)


MAX_PRIORITY = 10


def valid_priority(priority: int) -> int:
    """Returns the priority. Raises INVALID_ARGUMENT outside [-MAX_PRIORITY, MAX_PRIORITY]."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise errors.invalid("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    return priority


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A key that identifies a request that is sent again.

    `name` is a digest of tenant and key, `body` a digest of the request as it was sent.
    """

    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, as faces pass it to the router's core and the router to a node.

    `deadline` is Unix time in seconds by `clock.unix_s`; None: the client waits forever. Tenants
    share fairly among requests of one `priority`; "" is a tenant like any other. `tenant_named`: the
    caller's gateway named it, so it bounds what the request finds. `key_id` is the public id of the key
    that the caller used, or empty. Requests of one `cache_scope` share prefixes in the KV cache, and no
    others do; "" is the scope of all that have none. `traceparent` is W3C trace context or empty.
    `last_node` answered the session's previous turn, according to the session store: a hint where its
    KV cache is. `request_id` traces one call. `key` stays the same
    when a client sends the request again. `detached`: the generation runs to its end even without a
    reader. `created` is when it was admitted, in whole seconds of Unix time; 0: not yet. `shown_as`
    is how the face that took it shows the answer: the faces alone know what it means. `kept`: outside
    of a session, but what is said here is kept, and a later request may go on from it. `never_cut`: its
    face shows the prompt, so no default of the router's leaves out a part of it. `adapter` changes what the
    model answers; before the request is completed, `model` may be an adapter's name.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    session_id: str = ""
    user: str = ""
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    tenant_named: bool = False
    key_id: str = ""
    cache_scope: str = ""
    request_id: str = ""
    traceparent: str = ""
    last_node: str = ""
    key: RequestKey | None = None
    detached: bool = False
    created: int = 0
    answer_form: str = ""
    kept: bool = False
    never_cut: bool = False
    adapter: AdapterRef | None = None

    @property
    def public_model(self) -> str:
        """The name that clients know: the adapter's, if there is one."""
        return self.model if self.adapter is None else self.adapter.name

    @property
    def adapter_digest(self) -> bytes:
        """The digest of its adapter's content; empty without one."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def is_constrained(self) -> bool:
        """Whether its answer must have a form that a node enforces token by token."""
        return self.sampling.constraint is not None or (isinstance(self.prompt, ChatPrompt) and self.prompt.tools.must)

    @property
    def used(self) -> tuple[str, ...]:
        """What an engine must be able to do for it, in the order in which errors name it.

        The names are those of parameters that are not at their default, without `NEVER_LACKING`, and `CONSTRAINT`.
        """
        given = _of_engines(self.sampling)
        both = zip(_ENGINES_PARAMS, given, _ENGINES_DEFAULTS, strict=True)
        names = () if given == _ENGINES_DEFAULTS else tuple(name for name, value, default in both if value != default)
        return (CONSTRAINT, *names) if self.is_constrained else names

    def lacking(self, unsupported: Mapping[str, str]) -> errors.RyzansteinError | None:
        """Returns ENGINE_LACKS if the request uses what engines do not support; else None.

        `unsupported` maps names to an engine that does not support it.
        """
        name = next((name for name in self.used if name in unsupported), "")
        if not name:
            return None
        by_tools = name == CONSTRAINT and self.sampling.constraint is None
        return errors.engine_lacks(self.model, "tools" if by_tools else f"sampling.{name}", unsupported[name])

    @property
    def features(self) -> frozenset[str]:
        """The features that a node needs to run it: a node without one would ignore a part of it."""
        needed = {EXTENDED} if self.sampling.is_extended else set()
        needed |= {CONSTRAINTS} if self.is_constrained else set()
        needed |= {PROMPT_CUTS} if self.sampling.keep_prompt_head is not None else set()
        needed |= {CACHE_SCOPES} if self.cache_scope else set()
        needed |= {ADAPTERS} if self.adapter is not None else set()
        if isinstance(self.prompt, ChatPrompt):
            needed |= set() if self.prompt.template == PLAIN_TEMPLATE else {EXTENDED}
            needed |= set() if self.prompt.is_plain else {TOOLS}
        return frozenset(needed)
