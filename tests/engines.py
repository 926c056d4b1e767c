"""What tests need to run the engine on the tiny golden models, or on any Model, without the façade."""

from __future__ import annotations

import functools
import pathlib
import tempfile

import golden_models
import jax.numpy as jnp
import numpy as np

from kvjax import job
from kvjax.checkpoints.place import load_model
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.models import FAMILIES, family_of
from kvjax.plans import Model, Options, Request
from kvjax.sampling_params import SamplingParams

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def goldens(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def tiny(name: str, *, stacked: bool = False, storage: str = "float32") -> Model:
    """A golden model, through the real checkpoint reader; its tokens are single bytes."""
    with tempfile.TemporaryDirectory() as folder:
        golden_models.write_checkpoint(name, folder)
        with open_checkpoint(folder, FAMILIES) as source:
            family = family_of(source.config)
            config = family.config(source.config, None)
            params = load_model(source, family, config, dtype=jnp.float32, stacked=stacked)
    token_bytes = [bytes([token % 256]) for token in range(config.vocab)]
    return Model(family, config, params, (), token_bytes, "float32", storage, stacked)


def requests(prompts, params: SamplingParams | list[SamplingParams], first: int = 0) -> list[Request]:
    """One request a prompt; its number is its place in the list."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    return [
        Request(first + i, 0, tuple(int(t) for t in prompt), p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]


def outputs(model: Model, asked: list[Request], seed: int = 0, **options) -> list[job.Output]:
    """Runs a job to its end; outputs in the order of the requests."""
    done = {}
    for report in job.run(model, asked, Options(**{"rows": 8, "segment_seconds": 0.2, **options}), seed=seed):
        done.update({(o.request.index, o.request.sample): o for o in report.finished})
    return [done[r.index, r.sample] for r in asked]


def tokens(model: Model, prompts, params: SamplingParams | list[SamplingParams], **options) -> list[list[int]]:
    return [list(o.tokens) for o in outputs(model, requests(prompts, params), **options)]
