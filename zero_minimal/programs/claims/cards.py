"""Cards: all claims by their numbers, and what is known of each answer without running it."""

from collections.abc import Callable

from zero_minimal.foundations import ranks
from zero_minimal.programs.claims import communication, formulas, model_parallelism, paper, replication
from zero_minimal.programs.lab import Lab
from zero_minimal.programs.setting import Setting

VERDICTS = ("true", "true if", "false", "not shown")
MODULES = (replication, formulas, communication, model_parallelism, paper)
CARDS: dict[int, Callable] = {int(name[5:]): value for module in MODULES for name, value in vars(module).items()
                              if name.startswith("card_")}


def examine(number: int, setting: Setting) -> tuple[str, float, list[dict]]:
    """In a rank: the card's verdict and number, and the journal of what it ran."""
    with ranks.start() as rank:
        lab = Lab(setting, rank)
        verdict, found = CARDS[number](lab)
        return verdict, found, lab.journal
