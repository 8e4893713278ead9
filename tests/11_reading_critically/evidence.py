"""Evidence: what a run of a card shows of how it was examined, and which fallacy is behind what is wrong.

A rule of a card says what its lab must have run (its journal tells), how near the number must come to that of the
reference on the same setting, and which numbers and verdicts well-known fallacies lead to. RULES is in rules.py.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "lessons" / Path(__file__).parent.name / "measured.json"
SEEDS = 3  # fewer could be chance
UNITS = {
    2: "twice", 4: "4 times", 8: "8 times", 0.5: "half of", 0.25: "a quarter of", 0.125: "an eighth of"}
BINARY = {1e9 / 2**30: "GiB in the place of GB", 1e6 / 2**20: "MiB in the place of MB"}
BINARY |= {1 / ratio: words.split(" in ")[0].replace("i", "") + " in the place of " + words.split(" in ")[0]
           for ratio, words in BINARY.items()}
PREFIX = {1e3: "thousand", 1e6: "million", 1e9: "billion"}


@dataclass(frozen=True)
class Case:
    """A learner's run of a card, beside the reference's."""

    card: int
    setting: object
    ranks: int
    found: list  # of each rank (verdict, number, journal)
    right: tuple  # the reference's: verdict, number, journal

    @property
    def verdict(self):
        return self.found[0][0]

    @property
    def number(self):
        return self.found[0][1]

    @property
    def journal(self) -> list[dict]:
        return self.found[0][2]

    def entries(self, kind, **like) -> list[dict]:
        """Of the journal, of this kind, with these values; a set is a choice of them."""
        return [entry for entry in self.journal if entry["kind"] == kind and all(
            entry.get(key) in value if isinstance(value, set) else entry.get(key) == value
            for key, value in like.items())]

    def where(self) -> str:
        """By whom the right number is found."""
        if any(entry["kind"] in ("train", "watch") for entry in self.right[2]):
            return f"is found on {self.ranks} ranks"
        return "the reference finds on your setting"


@dataclass(frozen=True)
class Rule:
    """How a card is judged.

    needs: in this order, each case -> "" or what is missing, in words.
    known: case -> {number: the fallacy that leads to it}.
    verdicts: {a wrong verdict: why it is none}.
    """

    unit: str
    needs: tuple[Callable, ...] = ()
    known: Callable = lambda case: {}
    verdicts: dict[str, str] = field(default_factory=dict)
    near: float = 0.02  # of the number
    zero: float = 1e-9  # where the right number is 0
    small: bool = False  # the unit leaves no doubt of factors


# ----------------------------------------------------------------------------------------------------- the three checks


def of_the_run(case: Case, any_run: bool = False) -> str:
    """What its journal lacks. any_run: only whether there was one."""
    from rules import RULES

    if not [entry for entry in case.journal if entry["kind"] != "reset_peak"]:
        return (f"card {case.card} ran nothing: its lab's journal is empty. {copied(case)}The verdict of a card comes "
                "from a run: lab.train, lab.simulate, lab.published or lab.watch")
    if any_run:
        return ""
    return next(filter(None, (need(case) for need in RULES[case.card].needs)), "")


def of_the_number(case: Case) -> str:
    from rules import RULES

    rule, number, wanted = RULES[case.card], case.number, case.right[1]
    if is_near(rule, number, wanted):
        return ""
    told = f"card {case.card}: {number:.6g} {rule.unit} is not what {case.where()}. "
    for value, fallacy in rule.known(case).items():
        if is_near(rule, number, value) and not is_near(rule, value, wanted):
            return told + fallacy
    if said := copied(case):
        return told + said.strip()
    return told + (wrong_unit(case, rule, number, wanted) or plainly(case, rule, number, wanted))


def of_the_verdict(case: Case) -> str:
    from rules import RULES

    if case.verdict == case.right[0]:
        return ""
    why = RULES[case.card].verdicts.get(case.verdict) or GENERAL[case.verdict, case.right[0]]
    return f"card {case.card}: \"{case.verdict}\" is not what the run shows: {why}"


GENERAL = {
    ("true", "true if"): "it holds under a condition that is not said. In which run does it fail?",
    ("true", "false"): "what the claim says does not happen in a run that keeps to its own conditions",
    ("true", "not shown"): "something else changed in what was shown, so it cannot tell, whatever is true",
    ("true if", "true"): "it holds as it stands: which run under its own conditions refutes it?",
    ("true if", "false"): "under which condition does it hold? None that the claim allows",
    ("true if", "not shown"): "a condition would have to be tried by itself, and in what was shown it was not",
    ("false", "true"): "this refutes a claim that nobody made: what exactly is said, and of what?",
    ("false", "true if"): "there is a condition under which it holds, and this run has it or has it not: \"false\" is "
                          "for what holds under none",
    ("false", "not shown"): "the claim may be true; it is what was shown for it that cannot tell",
    ("not shown", "false"): "your run can tell: it keeps to the claim's conditions, and what is said does not happen",
    ("not shown", "true"): "your run can tell, and it agrees",
    ("not shown", "true if"): "your run can tell: with the condition it holds, without it it does not",
}


# ------------------------------------------------------------------------------------------------------------- numbers


def is_near(rule: Rule, number: float, wanted: float, near: float | None = None) -> bool:
    return math.isclose(number, wanted, rel_tol=rule.near if near is None else near, abs_tol=rule.zero)


def of_the_page(card: int) -> float | None:
    """The number of the page's own run; None where that is not known."""
    if not PAGE.exists():  # a teacher has taken it out of the learners' copy
        return None
    return next(entry["value"] for entry in json.loads(PAGE.read_text())["cards"] if entry["card"] == card)


def copied(case: Case) -> str:
    """Said of a number that stands on the page."""
    of_page, number = of_the_page(case.card), case.number
    if not isinstance(number, (int, float)) or not of_page or not math.isclose(number, of_page, rel_tol=5e-3):
        return ""
    return (f"{number:.4g} is the number of the page's run, copied: here other sizes are drawn, {in_words(case)}, and "
            "what is found differs. ")


def in_words(case: Case) -> str:
    setting = case.setting
    return f"{case.ranks} ranks, seed {setting.seed}, hidden {setting.hidden}; to simulate, N = {setting.devices}"


def wrong_unit(case: Case, rule: Rule, number: float, wanted: float) -> str:
    """Which mix of units explains the factor between the two."""
    if not number or not wanted or rule.small:
        return ""
    ratio = number / wanted
    close = lambda value: math.isclose(ratio, value, rel_tol=min(rule.near, 0.01))  # noqa: E731
    for value, words in BINARY.items():
        if math.isclose(ratio, value, rel_tol=0.004):
            return f"Units are mixed: it is {words}. Here GB are 10⁹ bytes and MB 10⁶, as in the paper"
    for value, words in PREFIX.items():
        if close(value) or close(1 / value):
            return f"Units are mixed: it is off by a {words}. {rule.unit} is asked for"
    if close(-1):
        return "Its sign is wrong: what is subtracted from what?"
    for value, words in UNITS.items():
        if close(value):
            return (f"It is {words} what is right. Units are mixed: are these elements or bytes, and how many bytes "
                    "has an element?")
    for value, words in ((case.ranks, "N times"), (1 / case.ranks, "1/N of")):
        if close(value):
            return f"It is {words} what is right, N = {case.ranks}: is it of one rank, or of all?"
    if close(100) or close(0.01):
        return "It is off by a hundred: a share of 1, or percent?"
    return ""


def plainly(case: Case, rule: Rule, number: float, wanted: float) -> str:
    if not wanted:
        return "What is right is 0 exactly: what differs between your two runs, besides what the claim is about?"
    if not number:
        return "0 is what two runs of the same thing give. What must differ between them?"
    if number * wanted < 0:
        return "Its sign is wrong: what is subtracted from what?"
    factor = number / wanted
    if 0.9 < factor < 1.1:
        return (f"It is off by {abs(factor - 1):.1%}, and {rule.near:.1%} is allowed, which is less than the effect. "
                "Which run, step or moment is it of?")
    return (f"It is {factor:.3g} times what the run that the card asks for gives. Read on the card what the number is, "
            "and its unit")
