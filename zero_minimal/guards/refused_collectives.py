"""A collective with an unknown op, or with sizes that do not fit, is refused before it sends
anything.

Seam: collective.
"""

from zero_minimal.core import seams
from zero_minimal.core.work import Call

OPS = {"reduce_scatter": ("sum", "avg"), "all_reduce": ("sum", "avg", "max")}


@seams.at("collective")
def check_arguments(moment: str, call: Call) -> None:
    """Raises: ValueError."""
    if moment != "start":
        return
    op, known = call.options.get("op", "avg"), OPS.get(call.name, ())
    if known and op not in known:
        raise ValueError(f"unknown op {op!r}: use {' or '.join(known)}")
    if call.name in ("reduce_scatter", "all_gather"):
        output = call.options.get("output", call.tensors[0])
        input = call.options.get("input", call.tensors[-1])
        sides = [("input", input.numel()), ("output", output.numel())]
        (_, whole), (name, part) = sides if call.name == "reduce_scatter" else reversed(sides)
        if whole != call.group.size() * part:
            raise ValueError(f"{call.name}: {whole} elements are not {call.group.size()} times the "
                             f"{name}'s {part}")
