"""Reading: figures and pictures of lesson 11's page: every card at the page's setting, on real ranks.

    python -m zero_minimal.programs.reading lessons/11_reading_critically

writes measured.json into that folder, and from it card.png and verdicts.png. Verdicts and numbers do not depend on the
machine's load; the seconds do.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from zero_minimal.pictures import style
from zero_minimal.pictures.claims import draw_card, draw_verdicts, valued
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.programs.claims.cards import CARDS, examine, words
from zero_minimal.programs.lab import Lab
from zero_minimal.programs.setting import Setting
from zero_minimal.workload.settings import Parser

RANKS = 2
PAGE = Setting()
EXAMPLE = 3  # the card that is drawn


def meters_shown(setting: Setting) -> list[float]:
    """Run in a rank: what a meter shows, in MB, after stage 0, after stage 3, and after another stage 3 with a reset
    meter."""
    with ranks.start() as rank:
        lab = Lab(setting, rank)
        shown = [lab.train(0).peak, lab.train(3).peak]
        lab.reset_peak()
        return [peak / 1e6 for peak in (*shown, lab.train(3).peak)]


def measure() -> dict:
    """{"ranks", "setting", "cards": [a card's words, its "verdict", its number as "value", "seconds"], "meter": the
    result of meters_shown()}."""
    cards = []
    with progress.bar(name="lesson 11", total=len(CARDS) + 1, unit="card") as bar:
        for number in sorted(CARDS):
            start = time.perf_counter()
            verdict, value, _ = ranks.run(examine, RANKS, number, PAGE, device="cpu", timeout=300)[0]
            seconds = round(time.perf_counter() - start, 1)
            group = CARDS[number].__module__.rpartition(".")[2]
            cards.append({"card": number, "group": group, **words(number), "verdict": verdict, "value": value,
                          "seconds": seconds})
            bar.update()
        meter = ranks.run(meters_shown, RANKS, PAGE, device="cpu", timeout=300)[0]
        bar.update()
    return {"ranks": RANKS, "setting": asdict(PAGE), "cards": cards, "meter": meter}


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by name, from the result of measure()."""
    (card,) = (card for card in measured["cards"] if card["card"] == EXAMPLE)
    names = ("stage 0, first", "stage 3, after it", "stage 3, meter reset")
    bars = list(zip(names, measured["meter"], (True, True, False), strict=True))
    return {"card.png": draw_card(card, bars, "what the meter shows, MB"),
            "verdicts.png": draw_verdicts(measured["cards"])}


def table(measured: dict) -> str:
    """A table of verdicts and numbers."""
    lines = [["card", "verdict", "number", "seconds"]]
    for card in measured["cards"]:
        lines.append([str(card["card"]), card["verdict"], valued(card), f"{card['seconds']:.1f}"])
    return report.table(lines)


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = Parser(description="Measure the figures of the page of lesson 11, and draw its pictures.")
    parser.add_argument("folder", type=Path, help="the lesson's folder: lessons/11_reading_critically")
    parser.add_argument("--draw", action="store_true", help="only draw, from the existing figures")
    flags = parser.parse_args(arguments)
    file = flags.folder / "measured.json"
    if not flags.folder.is_dir():
        parser.error(f"there is no folder {flags.folder}: name the lesson's, lessons/11_reading_critically")
    if flags.draw and not file.exists():
        parser.error(f"there is no {file} to draw from: leave --draw out, and it is measured")
    if not flags.draw:
        file.write_text(figures.on_few_lines(measure()), encoding="utf-8")
    measured = json.loads(file.read_text(encoding="utf-8"))
    for name, picture in pictures(measured).items():
        style.save(picture, flags.folder / name)
    report.say(table(measured))


if __name__ == "__main__":
    main()
