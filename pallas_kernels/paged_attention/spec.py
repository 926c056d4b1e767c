"""The static half of a paged-attention call."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes; hashable, part of the compiled program.

    Attributes:
      scale: multiplies q·k.
      window: keys a query sees, itself included; None sees all before it.
      soft_cap: c in c·tanh(logit / c) (Gemma 2); None leaves the logits as they are.
      latent: None where V has pages of its own; else Hv, and the values are the first Hv numbers of the keys (MLA).
      layout: of the pages, one of `kvjax.pallas_kernels.LAYOUTS`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    latent: int | None = None
    layout: str = "head_major"

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it counts the query's own key, so it is at least 1")
