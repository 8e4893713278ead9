"""What comes out of `replicate`: the report's table, the factorial, and whose the gain is.

All is computed from the JSON file: what the page, the picture and the terminal say has one source.
"""

from zero_minimal.meters.rounds import ratios
from zero_minimal.programs import report
from zero_minimal.programs.replicate_plan import NEW, OFFLOADED, SAME, STANDARD, ZERO
from zero_minimal.programs.words import paragraph

LOSSES = {"training_loss": "training loss", "validation_loss": "validation loss"}
BITS = ("losses", "weights")


def of_part(content: dict, part: str) -> list[dict]:
    """Its sessions."""
    return [session for session in content["sessions"].values() if session["part"] == part]


def passes(content: dict, part: str, **wanted) -> list[dict]:
    """All passes of a part that are as wanted, each with what its session says, its number there, and the pass before
    it: "first" is that pass, and "before" its kind, None if there is none."""
    found = []
    for session in of_part(content, part):
        befores = ({"kind": None}, *session["passes"])
        for number, (first, each) in enumerate(zip(befores, session["passes"], strict=False)):
            row = session | each | {"number": number, "first": first, "before": first["kind"]}
            if all(row[name] == value for name, value in wanted.items()):
                found.append(row)
    return found


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows by what they have under these names, in the order in which they come."""
    found: dict = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def tables(content: dict, model: str) -> dict[str, list[list[dict]]]:
    """{size: [seed][pass]} of the report's script, with the SAME object, or with NEW models."""
    found = [session for session in of_part(content, "table") if session["passes"][-1]["model"] == model]
    return {size: [session["passes"] for session in seeds] for (size,), seeds in grouped(found, "size").items()}


# -------------------------------------------------------------------------------------------------------- the factorial


def twins(content: dict) -> list[tuple[dict, dict]]:
    """Passes that only ZeRO, offload or which came first tells apart: each beside the first one of its group, which has
    the same ranks, the same seed and the same model, new or trained before."""
    groups = grouped(passes(content, "factorial"), "ranks", "seed", "model")
    return [(one, other) for one, *others in groups.values() for other in others]


def same_bits(pairs: list[tuple[dict, dict]]) -> int:
    """Pairs in which each loss of each step, and each trained parameter, are the same to the last bit."""
    return sum(all(one[name] == other[name] for name in BITS) for one, other in pairs)


def by_seed(content: dict, ranks: int, before: str | None, kind: str, model: str, figure: str) -> list[float]:
    """[seed]: a figure of one cell of the factorial."""
    found = passes(content, "factorial", ranks=ranks, before=before, kind=kind, model=model)
    return [each[figure] for each in found]


def in_order(content: dict, ranks: int, first: str, second: str, figure: str) -> list[tuple[float, float]]:
    """[seed]: a figure after the first pass, and after the second with the same object."""
    found = passes(content, "factorial", ranks=ranks, before=first, kind=second, model=SAME)
    return [(each["first"][figure], each[figure]) for each in found]


def wins(content: dict, ranks: int, first: str, second: str, figure: str) -> tuple[int, int]:
    """Seeds in which the second pass, with the same object, ends with a lower figure than the first; and all seeds."""
    pairs = in_order(content, ranks, first, second, figure)
    return sum(after < before for before, after in pairs), len(pairs)


# ------------------------------------------------------------------------------------- the attribution, memory, times


def attribution(content: dict, figure: str) -> dict[str, list[float]]:
    """{whose: [seed]}: by how much each lowers a figure, on the way from the report's first row to its last one, with
    ZeRO and twice the batch. Together they are "all"."""
    told, afresh = (next(iter(tables(content, model).values())) for model in (SAME, NEW))
    ways = [[new[0][figure], new[1][figure], new[2][figure], same[2][figure]]
            for same, new in zip(told, afresh, strict=True)]
    found = {whose: [way[step] - way[step + 1] for way in ways]
             for step, whose in enumerate(("ZeRO", "twice the batch", "earlier training"))}
    return found | {"all": [same[0][figure] - same[2][figure] for same in told]}


def times(content: dict) -> dict[int, dict[str, dict[str, float]]]:
    """{ranks: {what: spread of its time over standard's at batch 8}}: of a step; of all data, for batch 16."""
    names = {(ZERO, 8): ZERO, (OFFLOADED, 8): OFFLOADED, (STANDARD, 16): "batch 16"}
    found = {}
    for (ranks,), rows in grouped(passes(content, "times"), "ranks").items():
        seconds = {what: [each["step_seconds"] * 8 / each["batch"] for each in own]
                   for what, own in grouped(rows, "kind", "batch").items()}
        found[ranks] = {name: ratios(seconds[what], seconds[STANDARD, 8]) for what, name in names.items()}
    return found


def peaks(content: dict) -> dict[tuple[int, int, str], int]:
    """{(ranks, batch, kind): bytes}: the peak of rank 0, counted anew for each pass."""
    return {(each["ranks"], each["batch"], each["kind"]): each["peak"] for each in passes(content, "memory")}


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
    parts: dict = {}
    cells = grouped(passes(content, "factorial"), "ranks", "model", "before", "kind")
    for (ranks, model, before, kind), rows in sorted(cells.items(), key=str):
        lines = parts.setdefault((ranks, model), [
            [f"N = {ranks}, {model} {'model' if model == NEW else 'object'}", *LOSSES.values(), "accuracy"]])
        lines.append([f"{kind} after {before or 'nothing'}", *losses_text(rows),
                      f"{sum(row['accuracy'] for row in rows) / len(rows):.1%}"])
    return "\n\n".join(map(report.table, parts.values()))


def about_twins(content: dict) -> str:
    """How far ZeRO, offload and the order move anything."""
    pairs = twins(content)
    training, validation = (max(abs(one[name] - other[name]) for one, other in pairs) for name in LOSSES)
    lines = [paragraph(
        f"{len(pairs)} pairs of passes differ only in ZeRO, in offload or in what came first. In {same_bits(pairs)} "
        "all losses and all trained parameters are the same bits; the largest difference in training loss is "
        f"{training:g}, in validation loss {validation:g}.")]
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
    found = grouped(passes(content, "rates"), "rate", "number", "kind", "batch")
    lines = [[f"rate {next(iter(found))[0]:g}", "batch", *LOSSES.values()]]
    for (_, number, kind, batch), rows in found.items():
        lines.append([f"{number + 1}. {kind}", str(batch), *losses_text(rows)])
    return report.table(lines)


def peaks_table(content: dict) -> str:
    """Bytes of one rank."""
    found = peaks(content)
    kinds = list(dict.fromkeys(kind for *_, kind in found))
    lines = [["peak, MB", *kinds]]
    for ranks, batch in dict.fromkeys((ranks, batch) for ranks, batch, _ in found):
        own = [found.get((ranks, batch, kind)) for kind in kinds]
        lines.append([f"N = {ranks}, batch {batch}", *(f"{peak / 1e6:.2f}" if peak else "–" for peak in own)])
    return report.table(lines)


def times_table(content: dict) -> str:
    """Ratios, measured in turn."""
    lines = [[f"N = {ranks}", what, *(f"{ratio[name]:.2f}" for name in ("median", "min", "max"))]
             for ranks, rows in times(content).items() for what, ratio in rows.items()]
    return report.table([["time × standard's, batch 8", "", "median", "min", "max"], *lines])


def losses_text(rows: list[dict]) -> list[str]:
    """The spread of each loss over the seeds."""
    return [spread_text([row[name] for row in rows]) for name in LOSSES]


def spread_text(values: list[float], signed: bool = False) -> str:
    """ "0.510 (0.501 – 0.522)": the mean, the lowest and the highest."""
    form = "+.3f" if signed else ".3f"
    if signed and set(values) == {0}:
        return "exactly 0"
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} – {max(values):{form}})"
