"""Paged attention by GPU kernels (Hopper): slots with one token, then those with more (prompt chunks, trees)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention import gpu_tiles as tiles
from kvjax.pallas_kernels.paged_attention.gpu_decode import attend_decode
from kvjax.pallas_kernels.paged_attention.gpu_prefill import attend_chunks
from kvjax.pallas_kernels.paged_attention.reference import query_slots
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

STORAGE = ("bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
LONGEST_TREE = 1024  # tokens: 64 rows with masks of as many bits take 9 KiB in each consumer


def check(layout: str, rows: int, storage: jnp.dtype) -> None:
    """Raises NotImplementedError, with the reason, for pages that the kernels cannot read."""
    if layout != "token_major":
        raise NotImplementedError(f"the GPU's kernels read pages of the layout 'token_major'; these are {layout!r}")
    if storage.name not in STORAGE:
        raise NotImplementedError(
            f"the GPU's kernels read {', '.join(STORAGE)}; these pages hold {storage.name}, "
            "which wgmma does not multiply"
        )
    if rows % 8 or (rows < tiles.BLOCK and tiles.BLOCK % rows) or (rows > tiles.BLOCK and rows % tiles.BLOCK):
        raise NotImplementedError(
            f"pages of {rows} rows: the GPU's kernels read {tiles.BLOCK} rows at once, from pages of 8, 16, 32 or a "
            f"multiple of {tiles.BLOCK}"
        )
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"the GPU's kernels need JAX 0.11 or newer; this is {jax.__version__}")


def check_heads(H: int, Hv: int, latent: bool, storage: jnp.dtype, queries: jnp.dtype) -> None:
    """Raises NotImplementedError, with the reason, for heads that the kernels cannot multiply.

    H and Hv are the numbers of a head's key and value.
    """
    for name, width in (("keys", H), ("values", Hv)):
        if width % 16:
            raise NotImplementedError(f"{name} of {width} numbers: wgmma multiplies 16 at once")
        if width * tiles.bits_of(storage) % 128:
            raise NotImplementedError(f"{name} of {width} {storage.name}: a GPU copies 16 bytes at once")
    if Hv < tiles.BLOCK:
        raise NotImplementedError(f"values of {Hv} numbers: wgmma's products have at least 64 rows")
    if Hv > H:
        raise NotImplementedError(
            f"values of {Hv} numbers, wider than keys of {H}: results are stored over the queries"
        )
    if Hv > 512:
        raise NotImplementedError(f"values of {Hv} numbers: two warpgroups hold 512 of them in registers")
    if latent and (Hv % tiles.BLOCK or H % tiles.BLOCK):
        raise NotImplementedError(f"latent keys of {H} with values of {Hv} numbers: they are cut by 64")
    if tiles.bits_of(storage) < 16 and queries == jnp.float16:
        raise NotImplementedError(f"{storage.name} pages with float16 queries: weights times scales underflow float16")


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    max_query: int,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    scales: jax.Array | None = None,
    *,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `kvjax.pallas_kernels.paged_attention.paged_attention`.

    Queries are multiplied in the dtype of the pages, or in bfloat16 over pages of codes.

    Raises:
      NotImplementedError: for what the kernels cannot do, with the reason.
    """
    check(spec.layout, k_pages.shape[1], k_pages.dtype)
    Hv = tiles.value_dim(v_pages, spec.latent)
    check_heads(k_pages.shape[-1], Hv, spec.latent is not None, k_pages.dtype, q.dtype)
    if tree is not None and max_query > LONGEST_TREE:
        raise NotImplementedError(f"trees of {max_query} tokens: shared memory holds masks of {LONGEST_TREE}")
    if interpret and jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"the GPU's kernels are interpreted by JAX 0.12 or newer; this is {jax.__version__}")
    how = tiles.interpret_params() if interpret else None
    T, B = q.shape[0], table.shape[0]
    codes = tiles.bits_of(k_pages.dtype) < 16
    queries = q.astype(jnp.bfloat16 if codes else k_pages.dtype)
    tokens = row_starts[1:] - row_starts[:-1]
    last = jnp.minimum(row_starts[:-1], T - 1)
    rows = jnp.where(tokens == 1, lengths, 0)
    if tree is not None:  # a token alone in its slot sees all before it, and itself if its mask says so
        rows = rows - jnp.where(tokens == 1, 1 - (tree[last, 0] & 1), 0)
    out, lse = attend_decode(
        queries[last], k_pages, v_pages, table, rows, spec, slopes=slopes, scales=scales, interpret=how
    )
    if sinks is not None:
        total = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks[None, :]))
        out = out * jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - total))[..., None]
        lse = total
    slots = query_slots(row_starts, T)
    safe = jnp.minimum(slots, B - 1)
    out, lse = out.astype(q.dtype)[safe], lse[safe]
    if max_query > 1:
        chunk_out, chunk_lse = attend_chunks(
            queries, k_pages, v_pages, table, lengths, row_starts, tokens > 1, spec,
            max_query=max_query, sinks=sinks, slopes=slopes, tree=tree, scales=scales, interpret=how,
        )  # fmt: skip
        alone = (tokens == 1)[safe][:, None]
        out = jnp.where(alone[..., None], out, chunk_out.astype(q.dtype))
        lse = jnp.where(alone, lse, chunk_lse)
    used = (slots < B)[:, None]
    out = jnp.where(used[..., None], out, jnp.zeros((), q.dtype))
    return out, jnp.where(used, lse, -jnp.inf) if with_lse else None
