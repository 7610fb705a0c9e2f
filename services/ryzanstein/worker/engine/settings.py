"""The bounds of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.sampling import MAX_CHOICES
from ryzanstein.worker.engine.extents import AllLasting, Extents, Windows


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine.

    A sequence may be as long as `num_blocks` hold. The engine may use `borrowable_blocks` more while
    its limit allows it. `token_budget` bounds the tokens of one step, `max_sequences` the sequences in it, `max_waiting`
    the sequences that wait. `fair`: tenants of one priority get equal shares; otherwise first come,
    first served. `ttft_objective_s`: a group that would wait longer for its first token is refused.
    `tpot_objective_s`: prompts are cut so that steps which decode take no longer. 0: no objective.
    `max_idle_tenants` counters of idle tenants are kept. `windows` and `lasting`: see `Extents`.
    Blocks are compressed if there are `hot_pages`; a token sees `hot_tokens` in full precision.
    """

    num_blocks: int
    block_size: int = 16
    max_sequences: int = 64
    token_budget: int = 512
    max_waiting: int = 1024
    fair: bool = True
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    max_idle_tenants: int = 4096
    borrowable_blocks: int = 0
    windows: Windows = (None,)
    hot_tokens: int = 0
    hot_pages: int = 0
    lasting: AllLasting = ()

    def __post_init__(self) -> None:
        """Raises ValueError for sizes with which a sequence could starve."""
        if min(self.num_blocks, self.block_size, self.max_sequences) < 1:
            raise ValueError(f"num_blocks, block_size and max_sequences must be at least 1: {self}")
        if self.num_blocks < len(self.windows):
            raise ValueError(f"num_blocks {self.num_blocks} must be at least {len(self.windows)}: one for each group of layers")
        if 0 < self.hot_pages < (least := self.extents.hot_pages_for(self.max_sequences)):
            raise ValueError(f"hot_pages {self.hot_pages} must be at least {least}: running sequences must never lack one")
        if self.borrowable_blocks < 0:
            raise ValueError(f"borrowable_blocks must be at least 0: {self.borrowable_blocks}")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget {self.token_budget} must be at least max_sequences {self.max_sequences}: "
                "every running sequence decodes in every step"
            )
        if self.max_waiting < MAX_CHOICES:
            raise ValueError(f"max_waiting {self.max_waiting} must be at least {MAX_CHOICES}, the choices of one request")

    @property
    def extents(self) -> Extents:
        """How many blocks sequences hold."""
        hot_tokens = self.hot_tokens if self.hot_pages else None
        return Extents(self.windows, self.block_size, self.token_budget, hot_tokens, self.lasting)
