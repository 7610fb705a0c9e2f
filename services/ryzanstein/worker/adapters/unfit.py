"""Why an adapter cannot be served."""

from __future__ import annotations

MERGE = "merge the adapter into its model, with merge_and_unload of peft, and serve that"


class AdapterUnfit(Exception):
    """An adapter that cannot be served as it is. `where` is the tensor, or the field of adapter_config.json, at fault."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where, self.message = where, message
