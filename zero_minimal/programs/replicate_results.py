"""What comes out of `replicate`: the report's table, the factorial, and whose the gain is.

All is computed from the JSON file: what the page, the picture and the terminal say has one source.
"""

import itertools
from collections.abc import Iterator

from zero_minimal.meters.rounds import ratios, spread
from zero_minimal.programs import report
from zero_minimal.programs.replicate_plan import NEW, OFFLOADED, SAME, STANDARD, ZERO
from zero_minimal.programs.words import paragraph

LOSSES = {"training_loss": "training loss", "validation_loss": "validation loss"}
BITS = ("losses", "weights")


def of_part(content: dict, part: str) -> Iterator[dict]:
    """Its sessions."""
    return (session for session in content["sessions"].values() if session["part"] == part)


def tables(content: dict, model: str) -> dict[str, list[list[dict]]]:
    """{size: [seed][pass]} of the report's script, with the SAME object, or with NEW models."""
    found: dict = {}
    for session in of_part(content, "table"):
        if session["passes"][-1]["model"] == model:
            found.setdefault(session["size"], []).append(session["passes"])
    return found


# -------------------------------------------------------------------------------------------------------- the factorial


def cells(content: dict) -> Iterator[tuple[tuple, dict]]:
    """Of the factorial: ((ranks, seed, kind of the pass before, kind, model), a pass); before the first is None."""
    for session in of_part(content, "factorial"):
        before = None
        for each in session["passes"]:
            yield (session["ranks"], session["seed"], before, each["kind"], each["model"]), each
            before = each["kind"]


def twins(content: dict) -> list[tuple[dict, dict]]:
    """Passes that only ZeRO, offload or which came first tells apart: each beside the first one of its group, which has
    the same ranks, the same seed and the same model, new or trained before."""
    groups: dict = {}
    for (world_size, seed, _, _, model), each in cells(content):
        groups.setdefault((world_size, seed, model), []).append(each)
    return [(group[0], other) for group in groups.values() for other in group[1:]]


def furthest(pairs: list[tuple[dict, dict]], figure: str) -> float:
    """The largest difference of a figure in the pairs."""
    return max(abs(one[figure] - other[figure]) for one, other in pairs)


def same_bits(pairs: list[tuple[dict, dict]]) -> int:
    """Pairs in which each loss of each step, and each trained parameter, are the same to the last bit."""
    return sum(all(one[name] == other[name] for name in BITS) for one, other in pairs)


def by_seed(content: dict, ranks: int, before: str | None, kind: str, model: str, figure: str) -> list[float]:
    """[seed]: a figure of one cell of the factorial."""
    wanted = (ranks, before, kind, model)
    found = {seed: each[figure] for (world_size, seed, *rest), each in cells(content) if (world_size, *rest) == wanted}
    return [found[seed] for seed in sorted(found)]


def in_order(content: dict, ranks: int, first: str, second: str, figure: str) -> list[tuple[float, float]]:
    """[seed]: a figure after the first pass, and after the second with the same object."""
    walks = [session["passes"] for session in of_part(content, "factorial") if session["ranks"] == ranks]
    return [(one[figure], other[figure]) for walk in walks for one, other in itertools.pairwise(walk)
            if (one["kind"], other["kind"], other["model"]) == (first, second, SAME)]


def wins(content: dict, ranks: int, first: str, second: str, figure: str) -> tuple[int, int]:
    """Seeds in which the second pass, with the same object, ends with a lower figure than the first; and all seeds."""
    pairs = in_order(content, ranks, first, second, figure)
    return sum(after < before for before, after in pairs), len(pairs)


# ------------------------------------------------------------------------------------------------------ the attribution


def attribution(content: dict, figure: str) -> dict[str, list[float]]:
    """{whose: [seed]}: by how much each lowers a figure, on the way from the report's first row to its last one, with
    ZeRO and twice the batch. Together they are "all"."""
    size = next(iter(tables(content, SAME)))
    found: dict = {"ZeRO": [], "twice the batch": [], "earlier training": [], "all": []}
    for told, afresh in zip(tables(content, SAME)[size], tables(content, NEW)[size], strict=True):
        way = [afresh[0][figure], afresh[1][figure], afresh[2][figure], told[2][figure]]
        for name, before, after in zip(found, way, way[1:], strict=False):
            found[name].append(before - after)
        found["all"].append(told[0][figure] - told[2][figure])
    return found


# -------------------------------------------------------------------------------------------------------- memory, times


def times(content: dict) -> dict[int, dict[str, dict[str, float]]]:
    """{ranks: {what: spread of its time over standard's at batch 8}}: of a step; of all data, for batch 16."""
    found = {}
    for session in of_part(content, "times"):
        rows: dict = {}
        for each in session["passes"]:
            rows.setdefault((each["kind"], each["batch"]), []).append(each["step_seconds"] * 8 / each["batch"])
        standard = rows.pop((STANDARD, 8))
        names = {(ZERO, 8): ZERO, (OFFLOADED, 8): OFFLOADED, (STANDARD, 16): "batch 16"}
        found[session["ranks"]] = {names[what]: ratios(own, standard) for what, own in rows.items()}
    return found


def peaks(content: dict) -> dict[tuple[int, int, str], int]:
    """{(ranks, batch, kind): bytes}: the highest moment of rank 0, counted anew for each pass."""
    return {(session["ranks"], each["batch"], each["kind"]): each["peak"]
            for session in of_part(content, "memory") for each in session["passes"]}


# -------------------------------------------------------------------------------------------------------- for a picture


def drawn(content: dict) -> dict:
    """What draw_replication() takes: the first size's tables, and the factorial at N = 1."""
    size = next(iter(tables(content, SAME)))
    runs = {words: tables(content, model)[size] for words, model in (("one object", SAME), ("new models", NEW))}
    gain = {figure: attribution(content, figure) for figure in LOSSES}
    return {
        "passes": [(each["kind"], each["batch"]) for each in runs["one object"][0]],
        "losses": {name: {words: [[each[figure] for each in passes] for passes in seeds]
                          for words, seeds in runs.items()} for figure, name in LOSSES.items()},
        "orders": {name: [((first, second), in_order(content, 1, first, second, figure))
                          for first, second in ((STANDARD, ZERO), (ZERO, STANDARD))]
                   for figure, name in LOSSES.items()},
        "gain": {name: {whose: values for whose, values in gain[figure].items() if whose != "all"}
                 for figure, name in LOSSES.items()},
    }


# ------------------------------------------------------------------------------------------------------------- in words


def describe(content: dict) -> str:
    """All of it, for a terminal."""
    size = next(iter(tables(content, SAME)))
    return "\n\n".join((
        "", about_data(content),
        "1. The report's table: one model object, one pass after the other; seed 0", report_table(content, SAME),
        "What would you conclude?",
        "2. The same passes, each with a new model; seed 0", report_table(content, NEW),
        f"3. Two passes, {size}: mean of the seeds, and from the lowest to the highest", factorial_table(content),
        about_twins(content),
        "4. Whose is the gain from the table's first row to its third?", attribution_table(content),
        "5. At another learning rate", rates_table(content),
        "6. Memory of rank 0, and time", peaks_table(content), times_table(content),
    ))


def about_data(content: dict) -> str:
    """What was read, and the trap in it."""
    data = content["data"]
    right, wrong = data["shuffled"], data["position"]
    (session,) = of_part(content, "position")
    return paragraph(
        f"{data['name']}: {right['training']:,} sentences to train with, {right['held_out']:,} held out,",
        f"{right['held_out_positive']:.0%} of them positive; naive Bayes on words finds {right['naive_bayes']:.1%}.",
        f"Split by position, without shuffling, {wrong['training_positive']:.1%} of the first part would be positive,",
        f"and {wrong['held_out_positive']:.1%} of what is held out: a model trained so finds the class of",
        f"{session['passes'][0]['accuracy']:.1%}, and who says \"negative\" to all has",
        f"{1 - wrong['held_out_positive']:.1%} right.")


def report_table(content: dict, model: str) -> str:
    """The table that the report printed: a line for each pass, by size."""
    lines = [["layers × width, system, batch", "training loss", "validation loss", "accuracy", "peak, MB", "seconds",
              "parameters"]]
    for size, seeds in tables(content, model).items():
        for each in seeds[0]:
            peak = each["peak_never_reset" if model == SAME else "peak"]
            lines.append([f"{size}  {each['kind']}, {each['batch']}", f"{each['training_loss']:.4f}",
                          f"{each['validation_loss']:.4f}", f"{each['accuracy']:.1%}", f"{peak / 1e6:.2f}",
                          f"{each['seconds']:.1f}", f"{each['parameters']:,}"])
    return report.table(lines)


def factorial_table(content: dict) -> str:
    """Tables of all cells, with the mean of the seeds and their lowest and highest."""
    found = dict.fromkeys((ranks, model, before, kind) for (ranks, _, before, kind, model), _ in cells(content))
    parts = []
    for (ranks, model), group in itertools.groupby(sorted(found, key=str), key=lambda cell: cell[:2]):
        lines = [[f"N = {ranks}, {model} {'model' if model == NEW else 'object'}", *LOSSES.values(), "accuracy"]]
        for _, _, before, kind in group:
            told = [by_seed(content, ranks, before, kind, model, figure) for figure in (*LOSSES, "accuracy")]
            lines.append([f"{kind} after {before or 'nothing'}", *map(spread_text, told[:2]),
                          f"{sum(told[2]) / len(told[2]):.1%}"])
        parts.append(report.table(lines))
    return "\n\n".join(parts)


def about_twins(content: dict) -> str:
    """How far ZeRO, offload and the order move anything."""
    pairs = twins(content)
    lines = [paragraph(
        f"{len(pairs)} pairs of passes differ only in ZeRO, in offload or in what came first. In {same_bits(pairs)} "
        f"all losses and all trained parameters are the same bits; the largest difference in training loss is "
        f"{furthest(pairs, 'training_loss'):g}, in validation loss {furthest(pairs, 'validation_loss'):g}.")]
    for first, second in ((STANDARD, ZERO), (ZERO, STANDARD)):
        (training, of), (validation, _) = (wins(content, 1, first, second, figure) for figure in LOSSES)
        lines.append(paragraph(
            f"{first} first, then {second} with the same object, N = 1: {second} has the lower training loss in "
            f"{training} of {of} seeds, the lower validation loss in {validation}."))
    return "\n".join(lines)


def attribution_table(content: dict) -> str:
    """By how much each lowers the losses."""
    told = [attribution(content, figure) for figure in LOSSES]
    lines = [["lowers by", *LOSSES.values()]]
    lines += [[whose, *(spread_text(each[whose], signed=True) for each in told)] for whose in told[0]]
    return report.table(lines)


def rates_table(content: dict) -> str:
    """The report's three passes with one object at the faster rate, over the seeds."""
    found = list(of_part(content, "rates"))
    lines = [[f"rate {found[0]['rate']:g}", "batch", *LOSSES.values()]]
    for number, each in enumerate(found[0]["passes"]):
        told = [[session["passes"][number][figure] for session in found] for figure in LOSSES]
        lines.append([f"{number + 1}. {each['kind']}", str(each["batch"]), *map(spread_text, told)])
    return report.table(lines)


def peaks_table(content: dict) -> str:
    """Bytes of one rank."""
    found = peaks(content)
    kinds = list(dict.fromkeys(kind for *_, kind in found))
    lines = [["highest moment, MB", *kinds]]
    for ranks, batch in dict.fromkeys((ranks, batch) for ranks, batch, _ in found):
        cells_ = [found.get((ranks, batch, kind)) for kind in kinds]
        lines.append([f"N = {ranks}, batch {batch}", *(f"{cell / 1e6:.2f}" if cell else "–" for cell in cells_)])
    return report.table(lines)


def times_table(content: dict) -> str:
    """Ratios, measured in turn."""
    lines = [["time × standard's, batch 8", "", "median", "min", "max"]]
    for ranks, rows in times(content).items():
        for what, ratio in rows.items():
            lines.append([f"N = {ranks}", what, *(f"{ratio[name]:.2f}" for name in ("median", "min", "max"))])
    return report.table(lines)


def spread_text(values: list[float], signed: bool = False) -> str:
    """ "0.510 (0.501 – 0.522)": the mean, the lowest and the highest."""
    form = "+.3f" if signed else ".3f"
    low, high = spread(values)["min"], spread(values)["max"]
    if signed and low == high == 0:
        return "exactly 0"
    return f"{sum(values) / len(values):{form}} ({low:{form}} – {high:{form}})"
