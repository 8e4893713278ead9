"""Latency: the time of a message on this machine before its first byte, and its effect on a tensor sent in pieces.

    python -m zero_minimal latency --json lessons/pictures/latency.json --plot lessons/pictures/latency.png

regenerates the figures of lesson 00, whose page takes them from that file (tests/house/test_page_00.py).
"""

from zero_minimal.meters import latency_probe
from zero_minimal.paper.quantities import size_text
from zero_minimal.pictures.latency_chart import draw_latency, time_text
from zero_minimal.processes import ranks
from zero_minimal.programs import progress, report
from zero_minimal.workload.settings import Parser, output_file, picture_file

PIECES, BYTES = (1, 4, 16, 64), 2**20  # of an all-reduce
RANKS = 2


def run() -> dict:
    """Measure on two new ranks, and fit.

    Returns: "ranks"; "points" [[bytes, seconds]]; "alpha" in seconds, "beta" in seconds a byte; "all_reduce", with its
    "bytes" and "pieces" {number: seconds}.
    """
    points, pieces = ranks.run(lambda: (latency_probe.measure(), latency_probe.measure_pieces(PIECES, BYTES)), RANKS,
                               device="cpu")[0]
    alpha, beta = latency_probe.fit(points)
    return {"ranks": RANKS, "points": list(map(list, points)), "alpha": alpha, "beta": beta,
            "all_reduce": {"bytes": BYTES, "pieces": {str(count): seconds for count, seconds in pieces.items()}}}


def describe(result: dict) -> str:
    """Tables of the messages with the fitted line, and of the pieces."""
    cost = latency_probe.Cost(result["alpha"], result["beta"])
    messages = [["message", "one way", "α + β·bytes"]]
    for bytes, seconds in result["points"]:
        messages.append([size_text(bytes), time_text(seconds), time_text(cost.seconds(bytes))])
    speed = size_text(1 / cost.beta, 2) + " a second" if cost.beta else "∞"
    line = f"α = {time_text(cost.alpha)}, 1/β = {speed}\nn½ = α/β = {size_text(cost.half, 2)}"
    all_reduce = result["all_reduce"]
    pieces = [["pieces", "all-reduce of " + size_text(all_reduce["bytes"])]]
    pieces += [[count, time_text(seconds)] for count, seconds in all_reduce["pieces"].items()]
    return "\n".join((f"\ntwo ranks on the CPU, gloo\n{line}", "", report.table(messages), "", report.table(pieces)))


def main(arguments: list[str]) -> None:
    """The command: measure, print, write JSON and picture."""
    parser = Parser(prog="python -m zero_minimal latency",
                    description="Time messages between two ranks of this machine, and an all-reduce in pieces.")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the measurements to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw it")
    flags = parser.parse_args(arguments)
    progress.announce("starting 2 ranks …")
    result = run()
    report.say(describe(result))
    report.keep(flags, result, lambda: draw_latency(result["points"], result["alpha"], result["beta"]))
