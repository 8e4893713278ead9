"""Cards: all claims by number, their texts, and how they are examined."""

import inspect
import re
from collections.abc import Callable

from zero_minimal.processes import ranks
from zero_minimal.programs.claims import communication, memory_formulas, model_parallelism, paper, published_runs
from zero_minimal.programs.lab import Lab
from zero_minimal.programs.setting import Setting

VERDICTS = ("true", "true if", "false", "not shown")
MODULES = (published_runs, memory_formulas, communication, model_parallelism, paper)
CARDS: dict[int, Callable] = {int(name[5:]): value for module in MODULES for name, value in vars(module).items()
                              if name.startswith("card_")}


def words(number: int) -> dict[str, str]:
    """The parts of a card's docstring: "claim", "refuted by", "run", "number", and the number's "unit"."""
    text = " ".join(inspect.getdoc(CARDS[number]).split())
    found = re.fullmatch(r"Claim: (.*) Refuted by: (.*) Run: (.*) Number(?:, in ([^:]*))?: (.*)", text)
    claim, refuted, run, unit, what = found.groups()
    units = {"percent": "%", "billions": "billion", "billions of parameters": "billion"}
    return {"claim": claim, "refuted by": refuted, "run": run, "number": what, "unit": units.get(unit, unit or "×")}


def examine(number: int, setting: Setting) -> tuple[str, float, list[dict]]:
    """Run in a rank: the card's verdict and number, and the journal of its runs."""
    with ranks.start() as rank:
        lab = Lab(setting, rank)
        verdict, found = CARDS[number](lab)
        return verdict, found, lab.journal
