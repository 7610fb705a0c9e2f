"""The state of one choice while it runs, and of the group of choices that share a prompt.

The engine creates them from a SubmitGroup, the scheduler gives and takes their blocks, and the
model sees only plan and rows.

Accounts count how much each tenant has been served. They are virtual token counters (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024): every tenant has a counter of the tokens that
were computed for it, weighted by what they cost. The waiting tenant with the least counter is next. A
tenant whose queue was empty is lifted to the least counter of those that wait, so that no tenant saves
up service by staying away.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from heapq import nsmallest
from operator import attrgetter

from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.messages import Pool, SubmitGroup
from ryzanstein.worker.engine.plan import SampleRow, TokenConstraint

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2  # a generated token occupies a place in the batch for a whole step; the weights of the paper
_by_counter = attrgetter("counter")


class Account:
    """A tenant's counter in one priority class, in weighted tokens.

    `num_groups` have not ended.
    """

    __slots__ = ("counter", "num_groups", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.counter = 0
        self.num_groups = 0


class Accounts:
    """The accounts of one priority class.

    At most `max_idle` accounts of idle tenants are kept. The ones with the least counters are
    dropped first: they would be lifted anyway when they come back.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}
        self._last_counter = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, tenant: str, waiting: Collection[Account]) -> Account:
        """Returns the account that a new group is charged to. Pair with `close`.

        `waiting` are the accounts that have a queue.
        """
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant)
        self._idle.pop(tenant, None)
        account.num_groups += 1
        if account not in waiting:
            account.counter = max(account.counter, min(map(_by_counter, waiting), default=self._last_counter))
        return account

    def close(self, account: Account) -> None:
        """Records that one of its groups has ended."""
        account.num_groups -= 1
        if account.num_groups == 0:
            self._idle[account.tenant] = account
            if len(self._idle) > self._max_idle:
                self._forget(len(self._idle) - self._max_idle // 2)

    def left_line(self, account: Account) -> None:
        """Records that nothing of the account waits any more.

        A tenant that joins an empty queue starts at the counter of the last one that left it.
        """
        self._last_counter = account.counter

    def _forget(self, num: int) -> None:
        for account in nsmallest(num, self._idle.values(), key=_by_counter):
            del self._idle[account.tenant], self._accounts[account.tenant]


Order = tuple[int, int]
MAX_SCORED = 128  # prompt tokens of one sequence that a step scores


class BlockTable:
    """A sequence's blocks in one group of layers.

    The first `num_lasting` hold the lasting pages before page `first`, the others the pages from
    there on.
    """

    __slots__ = ("blocks", "first", "num_lasting")

    def __init__(self, first: int = 0, blocks: list[int] | None = None, num_lasting: int = 0) -> None:
        self.first, self.num_lasting = first, num_lasting
        self.blocks: list[int] = [] if blocks is None else blocks

    @property
    def end(self) -> int:
        """The page after the last one."""
        return self.first + len(self.blocks) - self.num_lasting

    def block(self, page: int) -> int:
        """Returns the block of a page from `first` on."""
        return self.blocks[self.num_lasting + page - self.first]


class SequenceState:
    """The slots of a sequence's state, where layers keep one.

    `source` holds it after the computed tokens, None before the first step; `source_is_shared`: it is a
    snapshot, which must not change, and which is evicted first when it is let go if `source_goes_soon`.
    The next step writes to `target`. While a step is computed, `written` are the slots that it writes,
    each with the number of tokens after which it does; `ends_worthwhile`: the last one becomes a snapshot.
    """

    __slots__ = ("ends_worthwhile", "source", "source_goes_soon", "source_is_shared", "target", "written")

    def __init__(self, source: int | None, target: int) -> None:
        self.source, self.target = source, target
        self.source_is_shared = source is not None
        self.source_goes_soon = False
        self.written: list[tuple[int, int]] = []
        self.ends_worthwhile = False


class SequenceGroup:
    """A group: the choices of one prompt.

    `followers` wait until another choice has computed the prompt, then share its blocks. `account`
    is charged for its tokens. `fresh`: no work was done for it, and no earlier attempt was
    accepted. `num_scored` prompt tokens have been scored, or need not be. `accepted`: load shedding
    has already found its wait acceptable once. `pool`: a vector is made of the prompt and no token.
    `arrived` is monotonic seconds, `arrival` a sequence
    number.
    """

    __slots__ = (
        "accepted",
        "account",
        "arrival",
        "arrived",
        "followers",
        "fresh",
        "id",
        "live",
        "message",
        "num_prompt",
        "num_scored",
        "pool",
        "priority",
        "stop_ids",
    )

    def __init__(self, message: SubmitGroup, arrival: int, arrived: float, account: Account) -> None:
        self.id = message.group
        self.message = message
        self.arrival = arrival
        self.arrived = arrived
        self.account = account
        self.fresh = not (message.accepted_before or any(message.generated))
        self.accepted = False
        self.priority = message.priority
        self.num_prompt = len(message.prompt_ids)
        self.num_scored = self.num_prompt if message.sampling.prompt_logprobs is None else 1
        self.pool = None if message.pooling is None else Pool(message.pooling, self.num_prompt)
        self.stop_ids = frozenset(message.stop_token_ids)
        self.live: dict[int, Sequence] = {}
        self.followers: list[Sequence] = []

    @property
    def num_top(self) -> int:
        """Returns how many alternatives are wanted for each scored prompt token."""
        return self.message.sampling.prompt_logprobs or 0


class Sequence:
    """A sequence: one choice of a group.

    Tokens 0..num_computed-1 of prompt and generated tokens are in the KV cache, as far as layers
    still read them, in `tables`: one for each group of layers, then one of hot pages if blocks are
    compressed; none while it does not run.

    `order` sorts a tenant's queue: arrival, then choice. `rank` sorts the running sequences:
    priority, then order of first admission; the last is paused first. `num_charged` is the number
    of tokens charged to its account in advance, `num_uncached` the number that it is expected to
    compute before its first token. `keys` are the prefix keys of full pages known so far; the
    first `num_published` pages can be found under them, and the agent knows the first
    `num_reported`, where the group reports its pages. At its start, layers that read all tokens
    knew its first `num_known` pages. It came with `num_at_start` tokens. `state` has slots while it runs, where
    layers keep a state.
    """

    __slots__ = (
        "cached_tokens",
        "choice",
        "generated",
        "group",
        "keys",
        "num_at_start",
        "num_charged",
        "num_computed",
        "num_known",
        "num_published",
        "num_reported",
        "num_tokens",
        "num_uncached",
        "order",
        "rank",
        "row",
        "state",
        "tables",
    )

    def __init__(self, group: SequenceGroup, choice: int, constraint: TokenConstraint | None = None) -> None:
        message = group.message
        self.group = group
        self.choice = choice
        self.order: Order = (group.arrival, choice)
        self.rank: Order = (-group.priority, sys.maxsize)
        self.num_charged = 0
        self.num_uncached: int | None = None
        self.generated = list(message.generated[choice])
        self.num_tokens = self.num_at_start = group.num_prompt + len(self.generated)
        self.num_computed = 0
        self.num_published = 0
        self.num_known = 0
        self.num_reported = 0
        self.tables: list[BlockTable] = []
        self.state: SequenceState | None = None
        self.keys: list[bytes] = []
        self.cached_tokens: int | None = None
        self.row = SampleRow(
            message.sampling, choice, len(self.generated), message.prompt_ids, self.generated, constraint=constraint
        )
        self.row.allowed_ids = message.sampling.allowed_token_ids
        self._ban()

    @property
    def failure(self) -> str:
        """Returns why its constraint can no longer be followed, or an empty string."""
        return "" if self.row.constraint is None else self.row.constraint.failure

    @property
    def num_pending(self) -> int:
        """Returns the tokens to compute before the next one can be sampled; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Returns the tokens that may come from the prefix cache.

        The last token must be computed to get its logits, and so must those whose logits score the
        prompt, and those whose hidden states are wanted.
        """
        if self.group.pool is not None:
            return self.group.pool.first
        scored = self.group.num_scored
        return (self.num_tokens if scored == self.group.num_prompt else scored) - 1

    @property
    def most_at_once(self) -> int:
        """Returns how many tokens one step may feed. Scores need logits, which take much memory."""
        return MAX_SCORED if self.group.num_scored < self.group.num_prompt else self.num_tokens

    @property
    def num_begun(self) -> int:
        """Returns the number of tokens generated here, without those of earlier attempts."""
        return len(self.generated) - len(self.group.message.generated[self.choice])

    @property
    def ready(self) -> bool:
        """Whether its next token can be drawn in the next step."""
        return self.row.constraint is None or self.row.constraint.ready

    @property
    def num_allowed(self) -> int:
        """Returns the number of tokens that it may still generate."""
        return self.group.message.max_tokens - len(self.generated)

    def tokens(self, start: int, end: int) -> list[int]:
        """Returns the token ids at positions start..end-1, prompt and generated."""
        num_prompt = self.group.num_prompt
        if end <= num_prompt:
            return self.group.message.prompt_ids[start:end]
        generated = self.generated[max(start - num_prompt, 0) : end - num_prompt]
        return self.group.message.prompt_ids[start:] + generated if start < num_prompt else generated

    def append(self, token_id: int) -> FinishReason | None:
        """Appends a sampled token; returns the reason why the choice ends with it, or None."""
        self.generated.append(token_id)
        self.num_tokens += 1
        self.row.index += 1
        if self.row.constraint is not None:
            self.row.constraint.accept(token_id)
        if self.row.banned_ids or self.group.message.bad_sequences:
            self._ban()
        return self.end_reason()

    def end_reason(self) -> FinishReason | None:
        """Returns the reason to end, or None.

        STOP after a stop token that was allowed or where a constraint lets nothing follow, LENGTH
        after the last requested token.
        """
        num_generated = len(self.generated)
        message = self.group.message
        if self.row.constraint is not None and self.row.constraint.finished:
            return FinishReason.STOP
        if num_generated > message.sampling.min_tokens and self.generated[-1] in self.group.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= message.max_tokens else None

    def _ban(self) -> None:
        """Bans the stop tokens until `min_tokens`, and the last token of each bad word that has begun."""
        message, generated = self.group.message, self.generated
        stops = message.stop_token_ids if len(generated) < message.sampling.min_tokens else ()
        ends = [bad[-1] for bad in message.bad_sequences if _ends_with(generated, bad[:-1])]
        self.row.banned_ids = [*stops, *ends] if ends else stops


def _ends_with(token_ids: list[int], end: list[int]) -> bool:
    return not end or token_ids[-len(end) :] == end
