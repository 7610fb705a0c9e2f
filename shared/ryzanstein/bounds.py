"""Numbers with bounds, for the fields of frozen values. Where settings contain such a value, pydantic checks it.

A larger number is a mistake: no count, size or time comes near these, and sums of them stay exact.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LARGEST, LARGEST_S = 2**53, 1e9

Seconds = Annotated[float, Field(ge=0, le=LARGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LARGEST_S)]
Size = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveSize = Annotated[int, Field(ge=1, le=LARGEST)]
