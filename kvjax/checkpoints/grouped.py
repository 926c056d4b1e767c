"""A checkpoint with fewer kv heads: each is the mean of a group of the model's (GQA, 2305.13245, section 2.1)."""

from __future__ import annotations

import numpy as np

from kvjax.checkpoints.source import TensorSource
from kvjax.errors import ModelError
from kvjax.types import Family, ParamSpec


def pooled_heads(source: TensorSource, family: Family, kv_heads: int) -> TensorSource:
    """The source with `kv_heads` kv heads: weights and biases of k and v are means over neighbouring heads.

    The paper trains such a model on for some percent of its pretraining; as it is, it is a beginning, not an
    equivalent.

    Args:
      source: an open checkpoint; the result closes it.
      family: the family that runs it.
      kv_heads: a divisor of the number that it has; the same number changes nothing.

    Raises:
      ModelError: the family has no kv heads of their own, or theirs cannot be grouped so.
    """
    config = family.config(source.config, None)
    layers = family.abstract(config)["layers"]
    specs = [layer[part] for layer in layers for part in ("kv", "kv_bias") if part in layer]
    if not all("kv" in layer and len(layer["kv"].names) == 2 for layer in layers):
        reason = "its checkpoints have no projections to k and to v of their own, as those of Llama have"
        raise ModelError(f"--kv-heads cannot convert {_architecture(source)} of the family {family.name}: {reason}.")
    heads = config.kv_heads
    if kv_heads < 1 or heads % kv_heads:
        possible = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ModelError(f"--kv-heads {kv_heads}: the {heads} kv heads of this model can be pooled to {possible}.")
    return source if kv_heads == heads else GroupedSource(source, _stored(source, family, specs), heads, kv_heads)


def _architecture(source: TensorSource) -> str:
    return str((source.config.get("architectures") or ["the model"])[0])


def _stored(source: TensorSource, family: Family, specs: list[ParamSpec]) -> frozenset[str]:
    """Names of the tensors as this checkpoint has them: one that was saved from the bare model has no prefix."""
    present = set(source.names())
    return frozenset(
        name if name in present else name.removeprefix(family.prefix) for spec in specs for name in spec.names
    )


class GroupedSource(TensorSource):
    """Another source, with the rows of some tensors averaged over groups of heads."""

    def __init__(self, source: TensorSource, pooled: frozenset[str], heads: int, kv_heads: int):
        """pooled: tensors whose rows are `heads` heads, of which `kv_heads` are made."""
        self._source, self._pooled = source, pooled
        self._heads, self._group = heads, heads // kv_heads
        self.config = {**source.config, "num_key_value_heads": kv_heads}
        self.generation_config = source.generation_config
        self.tokenizer_source = source.tokenizer_source

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        if name not in self._pooled:
            return shape
        if not shape or shape[0] % self._heads:
            rows = f"the rows of {self._heads} heads are needed"
            raise ModelError(f"Tensor {name} of {self._source.describe()} has shape {shape}, but {rows}.")
        return (shape[0] // self._group, *shape[1:])

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name not in self._pooled or start >= stop:
            return self._source.read_rows(name, start, stop)
        dim = self._source.shape(name)[0] // self._heads
        first, last = start // dim, -(-stop // dim)  # heads that these rows are of
        step = self._group * dim
        read = self._source.read_rows(name, first * step, last * step)
        grouped = read.reshape(last - first, self._group, dim, *read.shape[1:])
        mean = grouped.astype(np.float32).mean(axis=1).reshape(-1, *read.shape[1:])
        return mean[start - first * dim : stop - first * dim].astype(read.dtype)

    def describe(self) -> str:
        return f"{self._source.describe()}, pooled to {self._heads // self._group} kv heads"

    def close(self) -> None:
        self._source.close()
