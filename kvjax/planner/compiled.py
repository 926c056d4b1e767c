"""The compiler's own account of a plan, to stand beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.errors import RequestError
from kvjax.planner.memory import MemoryAccount

if TYPE_CHECKING:
    from kvjax.planner import Plan


def compile_for(plan: Plan) -> MemoryAccount:
    """Compiles the loop of a plan for its chips, which need not be there, and reads off what it needs.

    Raises:
      RequestError: always, for now: the loop over a mesh cannot be compiled yet.
    """
    raise RequestError(
        f"The loop of {plan.model} over the mesh {plan.axes} cannot be compiled yet: leave out --compile, "
        "the sizes computed without it stand."
    )
