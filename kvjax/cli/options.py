"""Options that several commands take, declared once: how to load a model, and how to sample."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.interrupts import import_engine
from kvjax.errors import RequestError
from kvjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvjax.llm import LLM

ANY_VOCABULARY = 2**31 - 1
Seed = Annotated[int, typer.Option(help="Of the random numbers", min=0, max=2**32 - 1)]


class Dtype(enum.StrEnum):
    """Number formats that parameters can have."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Layers(enum.StrEnum):
    """How the program goes through the layers."""

    unrolled = "unrolled"
    scanned = "scanned"


@dataclasses.dataclass(frozen=True)
class Loading:
    """The arguments of `kvjax.load`, None where the user gave none."""

    model: str | None = None
    context: int | None = None
    dtype: Dtype | None = None
    kv_dtype: str | None = None
    rope: str | None = None
    layers: Layers = Layers.unrolled
    mesh: str | None = None
    evict: str | None = None
    keep: str | None = None
    evict_every: int = 32

    def load(self, **options: Any) -> LLM:
        """Loads the model; what XLA compiles for it is kept for the next process."""
        from kvjax.cli.runtime import keep_compiled

        keep_compiled()
        from kvjax.eviction_options import keep_of
        from kvjax.llm import load

        axes = _mesh_axes(self.mesh) or self._default_axes()
        return load(
            self.model,
            context=self.context,
            dtype=self.dtype and self.dtype.value,
            kv_dtype=self.kv_dtype,
            layers=self.layers.value,
            rope=self.rope,
            mesh=_mesh(axes),
            evict=self.evict,
            keep=keep_of(self.keep),
            evict_every=self.evict_every,
            **options,
        )

    def _default_axes(self) -> dict[str, int]:
        """Without --mesh: none in one process; in several, all devices divide the heads, where they can."""
        from kvjax import processes

        if processes.count() == 1:
            return {}
        import jax

        from kvjax.checkpoints.resolve import open_checkpoint
        from kvjax.models import FAMILIES, config_of, family_of

        with open_checkpoint(self.model, FAMILIES) as source:
            config = config_of(family_of(source.config), source.config, self.context, self.rope)
        devices, heads = jax.device_count(), getattr(config, "heads", 0)
        if heads % devices:
            raise RequestError(
                f"The {heads} heads of the model cannot be divided by {devices} devices: say how to use them, such as "
                f"--mesh data={devices} for as many engines, each with the whole model."
            )
        return {"model": devices}


def takes(*sampling: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of `Loading` and some of `SamplingParams`.

    Args:
      *sampling: names of fields; the command gets those that the user gave as a dict `sampling`, and `loading`.
    """
    added = [*_LOADING.values(), *(_SAMPLING[name] for name in sampling)]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(function, eval_str=True).parameters.values()
            if p.name not in ("loading", "sampling")
        ]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            loading = Loading(**{name: given.pop(name) for name in _LOADING})
            values = {name: given.pop(name) for name in sampling}
            chosen = {name: value for name, value in values.items() if value is not None and value != []}
            parsed = _parsed(chosen)
            _mesh_axes(loading.mesh)
            import_engine()
            function(**given, loading=loading, sampling=parsed)

        # Typer reads the options from these two, and leaves the order to the signature.
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return command

    return decorate


def _mesh_axes(text: str | None) -> dict[str, int]:
    """{"seq": 4, "model": 2} of "seq=4,model=2". Raises RequestError."""
    axes: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        name, _, size = part.strip().partition("=")
        if name not in ("data", "seq", "expert", "model") or name in axes or not size.isdecimal() or not int(size):
            remedy = "give axes out of data, seq, expert and model, each once, with their sizes: seq=4,model=2"
            raise RequestError(f"--mesh is {text!r}: {remedy}.")
        axes[name] = int(size)
    return axes


def _mesh(axes: dict[str, int]) -> Any:
    """A mesh over the devices of all processes; None without axes. Raises RequestError."""
    if not axes:
        return None
    import jax

    from kvjax import processes

    needed, there = math.prod(axes.values()), jax.device_count()
    if needed > there or (needed < there and processes.count() > 1):
        of = f"there are {there}" if processes.count() == 1 else f"the processes have {there} together, to be used all"
        text = ",".join(f"{name}={size}" for name, size in axes.items())
        raise RequestError(f"--mesh {text} has {needed} devices, and {of}: give a mesh of {there}.")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:needed])


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    """Checks what can be checked before a model is loaded."""
    if "logit_bias" in values:
        values["logit_bias"] = dict(_bias(text) for text in values["logit_bias"])
    params = SamplingParams.from_dict(values)
    dataclasses.replace(params, logit_bias=None, stop_token_ids=()).validate(ANY_VOCABULARY)  # ids: by the model's own
    return values


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise RequestError(f"--logit-bias is {text!r}: give TOKEN=NUMBER, such as 42=-1.5.") from None


def _option(name: str, kind: Any, text: str, *flags: str, default: Any = None, panel: str) -> inspect.Parameter:
    kind = kind if default is not None else kind | None
    annotation = Annotated[
        kind, typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default is not None)
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _table(panel: str, rows: Sequence[tuple[Any, ...]]) -> dict[str, inspect.Parameter]:
    return {name: _option(name, kind, text, *flags, panel=panel) for name, kind, text, *flags in rows}


_LOADING = _table(
    "Model",
    [
        ("model", str, "Hugging Face repo id, folder, .gguf file or gs://… (default: SmolLM2-135M)", "--model", "-m"),
        ("context", int, "Longest prompt with output to serve, in tokens (default: the model's own)"),
        ("dtype", Dtype, "Of parameters and activations (default: float32 on CPUs, else bfloat16)"),
        ("kv_dtype", str, "Of cached keys and values: int8, kivi4, int8/int4, … (default: as --dtype)"),
        (
            "rope",
            str,
            "Scale RoPE beyond the trained length: yarn:4, ntk:2, dynamic:4, linear:2, longrope:FILE, default",
        ),
        ("mesh", str, "Divide the work over devices: axes data, seq, expert and model, such as seq=4,model=2"),
        ("evict", str, "Let go of cached rows by a policy: snapkv, h2o, tova, streaming:sinks=4, knorm+adakv, …"),
        ("keep", str, "What each head keeps then: rows, such as 1024, or a share, such as 50%"),
    ],
) | {
    "evict_every": _option("evict_every", int, "Tokens generated between two evictions", default=32, panel="Model"),
    "layers": _option(
        "layers",
        Layers,
        "Unrolled layers run faster, scanned ones compile once for all",
        default=Layers.unrolled,
        panel="Model",
    ),
}

_SAMPLING = _table(
    "Sampling",
    [
        ("max_new_tokens", int, "Tokens to generate at most"),
        ("min_new_tokens", int, "Do not end before so many tokens"),
        ("temperature", float, "0 takes the most likely token each time (default: 0)"),
        ("top_k", int, "Sample from the k most likely tokens"),
        ("top_p", float, "Sample from the likeliest tokens that together reach this probability"),
        ("min_p", float, "Sample from tokens at least so many times as likely as the likeliest"),
        ("repetition_penalty", float, "Over 1 discourages tokens of prompt and output"),
        ("presence_penalty", float, "Subtracted from the logits of tokens already generated"),
        ("frequency_penalty", float, "Subtracted once for every time a token was generated"),
        ("logit_bias", list[str], "TOKEN=NUMBER, added to that token's logit; repeatable", "--logit-bias"),
        ("stop", list[str], "Text that ends the output and is not part of it; repeatable", "--stop"),
        ("stop_token_ids", list[int], "Token id that ends the output; repeatable", "--stop-token-id"),
        ("ignore_eos", bool, "Go on beyond end-of-sequence tokens", "--ignore-eos"),
        ("logprobs", int, "Log-probabilities: 0 for the output's tokens, n for the n likeliest as well"),
        ("n", int, "Independent samples of each prompt", "--samples", "-n"),
    ],
)
ONE_SAMPLE = tuple(name for name in _SAMPLING if name not in ("logprobs", "n"))
ALL = tuple(_SAMPLING)
