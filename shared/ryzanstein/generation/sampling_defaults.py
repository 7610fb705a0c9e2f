"""What a model's generation_config.json says of sampling: it counts where a request says nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ryzanstein.generation.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own values; None: that of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def said(self) -> dict[str, float]:
        """The values that the model has, by name."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with these values for those that the request left out. None is left out then."""
        own = {name: value for name, value in self.said.items() if name in params.unset}
        return replace(params, **own, unset=frozenset())  # type: ignore[arg-type]


NO_DEFAULTS = SamplingDefaults()
NAMES = tuple(each.name for each in fields(SamplingDefaults))
