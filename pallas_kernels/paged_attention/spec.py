"""The static half of a paged-attention call."""

from __future__ import annotations

import dataclasses

from kvjax.pallas_kernels.joined import Lanes
from kvjax.pallas_kernels.packed import Codes


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes; hashable, part of the compiled program.

    Attributes:
      scale: multiplies q·k.
      window: keys a query sees, itself included; None sees all before it.
      soft_cap: c in c·tanh(logit / c) (Gemma 2); None leaves the logits as they are.
      latent: None where V has pages of its own; else Hv, and the values are the first Hv numbers of the keys (MLA).
      layout: of the pages, one of `kvjax.pallas_kernels.LAYOUTS`.
      lanes: where heads lie in the rows of the joined layout; None in the others.
      sink_rows: the first rows of a slot that stay visible behind the window (StreamingLLM, 2309.17453).
      codes: what the bytes of packed pages stand for (`kvjax.pallas_kernels.packed`); None: pages hold numbers, or
        codes that do not share bytes.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    latent: int | None = None
    layout: str = "head_major"
    lanes: Lanes | None = None
    sink_rows: int = 0
    codes: Codes | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it counts the query's own key, so it is at least 1")
        if (self.layout == "joined") != (self.lanes is not None):
            raise ValueError("lanes say where heads lie in the joined layout: give both or neither")
