"""Verdict: what came of a program at a stage, beside plain PyTorch.

    equal     the same numbers            refused   by a sentence of ours, the same on every rank
    neither   plain PyTorch refuses, too  finding   anything else
"""

import re

from house.scenarios.stand import _compare

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
OURS = ("ValueError", "RuntimeError", "TypeError")
SYMPTOMS = re.compile("not in the same collective|onnection closed|imed out|storage of size 0|has finished, and rank")


def judged(program: dict, ours: list, plain: list) -> tuple[str, str]:
    """The verdict, and why. ours, plain: an Outcome a rank."""
    errors = [outcome.error for outcome in ours]
    if all(errors):
        if all(outcome.error for outcome in plain):
            return "neither", _words(plain[0].error)
        said = {_words(error) for error in errors}
        if len(said) == 1 and all(map(_is_refusal, ours)):
            return "refused", said.pop()
    if any(errors):
        return "finding", "\n".join(f"rank {rank}: {o.error or 'no error'}\n{o.where}" for rank, o in enumerate(ours))
    for outcome in plain:
        if outcome.error:
            return "finding", f"goes on, and plain PyTorch does not: {outcome.error}\n{outcome.where}"
    tolerance = _tolerance(program)
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        for part in ("notes", "parameters", "buffers"):
            letter, why = _compare(getattr(mine, part), getattr(theirs, part), tolerance)
            if letter != "A":
                return "finding", f"rank {rank}, {part}: {why}"
    return "equal", ""


def _words(error: str) -> str:
    """A message without what differs from rank to rank."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'…'", error))


def _is_refusal(outcome) -> bool:
    """Whether it was raised on purpose: in a line of the package that says so."""
    kind = outcome.error.partition(":")[0]
    last = outcome.where.rstrip().rsplit("  File ", 1)[-1].split("\n")
    meant = "zero_minimal/" in last[0] and last[1].strip().startswith("raise ")
    return kind in OURS and meant and not SYMPTOMS.search(outcome.error)


def _tolerance(program: dict) -> float:
    return max(TOLERANCES[block.get("dtype", "float64")] for block in program["model"]["blocks"])
