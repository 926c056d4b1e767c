"""What is evicted of cached rows, and when: static, known to plans, scheduler and cache alike.

When depends on nothing but the request: after its prompt, and then every so many tokens. A prompt step never computes
across such a point, so a request that gave way and is computed again loses the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ModelError, UserError
from kvjax.eviction import Budget, Policy, scores, share_of
from kvjax.eviction.quest import LEAST
from kvjax.types import Family, Rotation

NEVER = 2**30
"""Tokens after which nothing is evicted."""


@dataclasses.dataclass(frozen=True)
class Eviction:
    """What is evicted, and when; static.

    Attributes:
      policy: which rows stay.
      budget: how many each head keeps.
      every: tokens generated between two evictions, where the policy evicts while it decodes.
      layers: "uniform" budgets, or "pyramid".
      heads: "uniform" budgets, or "adakv".
      rotations: of each layer, where the policy asks for them; `for_model` fills them in.

    Raises:
      UserError: a field is out of range, or the policy does not go with it.
    """

    policy: Policy
    budget: Budget
    every: int = 32
    layers: str = "uniform"
    heads: str = "uniform"
    rotations: tuple[Rotation | None, ...] = ()

    def __post_init__(self) -> None:
        if self.policy.score is None and self.policy.reads is None:
            raise UserError(f"Eviction policy {self.policy.name!r} evicts nothing: leave eviction out.")
        if self.every < 1:
            raise UserError(f"Rows are evicted every {self.every} tokens, but a number from 1 is needed.")
        for name, choices in (("layers", ("uniform", "pyramid")), ("heads", ("uniform", "adakv"))):
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                raise UserError(f"Budgets of {name} are {getattr(self, name)!r}, but {wanted} is needed.")
        if self.heads == "adakv" and self.policy.together:
            raise UserError(f"AdaKV divides rows among heads, but {self.policy.name!r} keeps the same rows in all.")
        apart = self.policy.whole or self.policy.reads is not None
        if apart and (self.layers, self.heads) != ("uniform", "uniform"):
            raise UserError(f"{self.policy.name!r} says what each head keeps: leave out +adakv and +pyramid.")
        if self.policy.positions == "slot":
            if self.policy.score is not scores.newest:
                raise UserError(
                    f"Eviction policy {self.policy.name!r} has positions='slot', which only sinks and the newest rows "
                    "can have: leave positions out."
                )
            if self.budget.rows is not None and self.budget.rows < self.least:
                raise UserError(
                    f"Of {self.budget.rows} rows, {self.policy.sinks} are sinks and none is left for the newest: "
                    f"give keep={self.least} or more."
                )

    @property
    def least(self) -> int:
        """Rows that stay whatever the budget says: with positions by place, the sinks, which have theirs for good, and
        one row behind them."""
        return self.policy.sinks + 1 if self.policy.positions == "slot" else 0

    def for_model(self, family: Family, config: Any) -> Eviction:
        """The same with what it has to know of the family. Raises ModelError."""
        if self.policy.whole:
            self._check_heads([spec.kv_heads for spec in family.kv_specs(config, "float32")])
        if self.policy.positions != "slot" and not self.policy.moments:
            return self
        if family.rotations is None:
            raise ModelError(
                f"Eviction policy {self.policy.name!r} turns queries by RoPE, and how {family.name} models turn them "
                "is not known: take another policy, or positions='token'."
            )
        return dataclasses.replace(self, rotations=family.rotations(config))

    def _check_heads(self, heads: list[int]) -> None:
        given = [len(layer) for layer in self.policy.whole]
        if given != heads:
            mine, its = (f"{len(x)} layers of {' or '.join(map(str, sorted(set(x))))}" for x in (given, heads))
            name = self.policy.name
            raise ModelError(f"The heads given to {name!r} are {mine}, the model's {its}: give those of this model.")

    def check_chips(self, parts: int, heads: int) -> None:
        """Raises UserError where heads that are divided over so many chips cannot decide each for itself."""
        policy = self.policy
        if parts > 1 and (
            self.heads == "adakv" or (policy.together and policy.score not in (scores.newest, scores.oldest))
        ):
            name = "AdaKV" if self.heads == "adakv" else f"Eviction policy {policy.name!r}"
            raise UserError(
                f"{name} compares heads, which lie on {parts} chips (mesh axis model): take a policy that keeps heads "
                "apart, without +adakv, or divide over the axis data."
            )
        looks = policy.watch != "none" or policy.moments or policy.reads is not None or policy.whole
        if parts > heads and looks:
            raise UserError(
                f"Eviction policy {policy.name!r} wants each kv head whole on one chip, and {heads} heads lie on "
                f"{parts} chips (mesh axis model): divide over no more than {heads}, or take knorm or streaming."
            )

    def whole_heads(self, layers: tuple[int, ...]) -> np.ndarray:
        """(L, K) bool of these layers, which have equal numbers of kv heads; (L, 1) of False where no head is whole."""
        return np.asarray([self.policy.whole[layer] if self.policy.whole else (False,) for layer in layers], bool)

    def policy_of(self, layer: int) -> Policy:
        """The policy, with the RoPE of a layer where its score asks for it."""
        score = self.policy.score
        if not isinstance(score, scores.ExpectedAttention) or score.frequencies is not None:
            return self.policy
        turned = self.rotations[layer] or Rotation((0.0,))
        score = dataclasses.replace(
            score, frequencies=turned.frequencies, factor=turned.factor, interleaved=turned.interleaved
        )
        return dataclasses.replace(self.policy, score=score)

    def kept(self, tokens: jax.Array) -> jax.Array:
        """Rows that stay of so many tokens, int32, in the mean of layers and of heads but those that keep every row."""
        if self.policy.score is None:
            return tokens
        return self.at_least(self.budget.count(tokens), tokens)

    def at_least(self, count: jax.Array, tokens: jax.Array) -> jax.Array:
        """A budget of so many tokens, both int32, but for the rows that stay whatever it says."""
        return jnp.minimum(jnp.maximum(count, self.least), tokens)

    def pages_read(self, used: jax.Array, rows: int) -> jax.Array:
        """How many of so many pages, int32 from 1, of R rows each, a query reads of a head."""
        assert self.policy.reads is not None
        wanted = share_of(used, self.budget.share or 0.0)
        if fixed := self._fixed_pages(rows):
            wanted = jnp.full_like(used, fixed)
        return jnp.minimum(used, jnp.maximum(wanted, LEAST))

    def most_pages(self, pages: int, rows: int) -> int:
        """The most that `pages_read` can be of up to so many pages."""
        wanted = self._fixed_pages(rows) or math.ceil(pages * (self.budget.share or 0.0))
        return min(pages, max(wanted, LEAST))

    def _fixed_pages(self, rows: int) -> int | None:
        assert self.policy.reads is not None
        return self.policy.reads.pages or (self.budget.rows and -(-self.budget.rows // rows))

    def _first(self, prompt: jax.Array) -> jax.Array:
        """Tokens after which rows go for the first time: the prompt, if it has more than the budget."""
        if self.policy.score is None:
            return jnp.full_like(prompt, NEVER)
        budget = prompt if self.budget.rows is None else jnp.full_like(prompt, self.budget.rows)
        target = share_of(prompt, self.budget.share) if self.budget.share is not None else budget
        later = target + self.every if self.policy.decode else jnp.full_like(prompt, NEVER)
        return jnp.where(prompt > target, prompt, later)

    def next_cut(self, prompt: jax.Array, computed: jax.Array) -> jax.Array:
        """Tokens after which rows are evicted next, once `computed` are in the cache; NEVER for not at all.

        Args:
          prompt: (B,) int32 tokens of the prompts.
          computed: (B,) int32.
        """
        first = ahead = self._first(prompt)
        if self.policy.within is not None:
            ahead = jnp.minimum(first, self.policy.within * (computed // self.policy.within + 1))
        if not self.policy.decode:
            return jnp.where(computed < first, ahead, NEVER)
        later = first + self.every * ((computed - first) // self.every + 1)
        return jnp.where(computed < first, ahead, later)

    def most_rows(self, prompt: jax.Array, limit: jax.Array, computed: jax.Array) -> jax.Array:
        """(B,) int32 rows that each head may come to hold, of requests that end with `limit` tokens, but for heads that
        keep every row."""
        first, last = self._first(prompt), limit - 1  # the last token of all needs no row
        before = jnp.minimum(first, last)
        if self.policy.within is not None:
            before = jnp.minimum(before, self.kept(before) + self.policy.within)
        if self.policy.decode:
            after = self.kept(last) + self.every
        else:
            after = self.kept(first) + jnp.maximum(last - first, 0)
        after = jnp.where(first < last, jnp.minimum(after, last), 0)
        return jnp.where(computed < first, jnp.maximum(before, after), after)
