"""`kvjax plan`: does a model fit on which chips, with what context and batch? No weight is read, no chip is used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli.interrupts import exit_at_once
from kvjax.cli.options import Dtype

if TYPE_CHECKING:
    from kvjax.planner import Model


def plan(
    model: Annotated[str, typer.Argument(help="A name such as llama-3.1-70b, a folder, config.json, .gguf or repo id")],
    chips: Annotated[str, typer.Option(help="Kind and number or topology: v5e:16, v5p:4x4x4, 7x:8, h100:8")],
    context: Annotated[
        str | None, typer.Option(help="Tokens of a sequence: 131072, 128k, 1M (default: the model's)")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once", min=1)] = 1,
    kv: Annotated[str | None, typer.Option(help="Storage of K and V: int8, kivi4, … (default: as --dtype)")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and activations")] = Dtype.bfloat16,
    mesh: Annotated[str | None, typer.Option(help="Such as seq=16,model=4 (default: the best that is found)")] = None,
    rows: Annotated[int | None, typer.Option(help="Tokens that a page holds on each device", min=1)] = None,
    packed: Annotated[int, typer.Option(help="Tokens of a step that computes prompts", min=1)] = 512,
    compiled: Annotated[bool, typer.Option("--compile", help="Ask the compiler as well")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
) -> None:
    """Does it fit? Bytes per chip, the largest context and batch, and how long it would take at best."""
    with exit_at_once():
        import kvjax.models  # noqa: F401
        from kvjax import planner
        from kvjax.planner import report

    made = planner.plan(
        model_of(model, None if context is None else planner.parse_tokens(context)),
        context=context,
        batch=batch,
        chips=chips,
        mesh=mesh,
        storage=kv,
        dtype=dtype.value,
        rows=rows,
        packed=packed,
    )
    account = planner.compile_for(made) if compiled else None
    print(json.dumps(report.as_dict(made, account), indent=1) if as_json else report.table(made, account))


def model_of(what: str, context: int | None = None) -> Model:
    """The model that a user names, for `kvjax.planner.plan`.

    Args:
      what: see `kvjax.planner.source.config_json`.
      context: tokens to serve; what the checkpoint promises if None.

    Raises:
      ModelError: there is no such model, or no family runs it.
    """
    from kvjax.models import FAMILIES, config_of, family_of
    from kvjax.planner import Model
    from kvjax.planner.source import config_json

    hf = config_json(what, FAMILIES)
    family = family_of(hf)
    return Model(what, family, config_of(family, hf, context))
