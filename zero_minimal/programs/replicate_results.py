"""The results of `replicate`: the report's table, the factorial, and the causes of the gain.

All is computed from the JSON file, which is the only source for the page, the picture and the terminal.
"""

from itertools import pairwise

from zero_minimal.meters.timing import ratios
from zero_minimal.programs import report
from zero_minimal.programs.replicate_plan import NEW, OFFLOADED, SAME, STANDARD, ZERO
from zero_minimal.programs.words import paragraph

LOSSES = {"training_loss": "training loss", "validation_loss": "validation loss"}
BITS = ("losses", "weights")
ORDERS = (STANDARD, ZERO), (ZERO, STANDARD)  # which first, which second


def passes(content: dict, part: str, **wanted) -> list[dict]:
    """All passes of a part with these values, each with its session's entries, its number, and the previous pass:
    "first" is that pass, and "before" its kind, None if there is none."""
    found = []
    for session in content["sessions"].values():
        for number, (first, each) in enumerate(pairwise(({"kind": None}, *session["passes"]))):
            row = session | each | {"number": number, "first": first, "before": first["kind"]}
            if (wanted | {"part": part}).items() <= row.items():
                found.append(row)
    return found


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows grouped by their values for these names, in their original order."""
    found: dict = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def tables(content: dict, model: str) -> dict[str, list[list[dict]]]:
    """{size: [seed][pass]} of the report's script, with the SAME object, or with NEW models."""
    found: dict = {}
    for (size, _), own in grouped(passes(content, "table"), "size", "name").items():
        if own[-1]["model"] == model:
            found.setdefault(size, []).append(own)
    return found


def first_size(content: dict, model: str) -> list[list[dict]]:
    """[seed][pass] of the plan's first size, the only one with several seeds."""
    return next(iter(tables(content, model).values()))


def twins(content: dict) -> list[tuple[dict, dict]]:
    """Pairs of passes that differ only in ZeRO, offload or order: each with the first of its group, which has the same
    ranks, the same seed and the same kind of model, new or already trained."""
    groups = grouped(passes(content, "factorial"), "ranks", "seed", "model")
    return [(one, other) for one, *others in groups.values() for other in others]


def same_bits(pairs: list[tuple[dict, dict]]) -> int:
    """The number of pairs whose losses of all steps, and all trained parameters, are the same to the last bit."""
    return sum(all(one[name] == other[name] for name in BITS) for one, other in pairs)


def in_order(content: dict, ranks: int, first: str, second: str, figure: str) -> list[tuple[float, float]]:
    """[seed]: a figure after the first pass, and after the second with the same object."""
    found = passes(content, "factorial", ranks=ranks, before=first, kind=second, model=SAME)
    return [(each["first"][figure], each[figure]) for each in found]


def attribution(content: dict, figure: str) -> dict[str, tuple[float, ...]]:
    """{cause: [seed]}: how much each cause lowers a figure, from the report's first row to its last one, with ZeRO and
    twice the batch. Their sum is "all"."""
    lowered = []
    for same, new in zip(first_size(content, SAME), first_size(content, NEW), strict=True):
        way = [each[figure] for each in (new[0], new[1], new[2], same[2])]
        steps = [before - after for before, after in pairwise(way)]
        lowered.append((*steps, same[0][figure] - same[2][figure]))
    return dict(zip(("ZeRO", "twice the batch", "earlier training", "all"), zip(*lowered, strict=True), strict=True))


def times(content: dict) -> dict[int, dict[str, dict[str, float]]]:
    """{ranks: {what: spread of its time divided by standard's at batch 8}}: per step; for batch 16, of all data."""
    found: dict = {}
    for (ranks,), rows in grouped(passes(content, "times"), "ranks").items():
        seconds = {what: [each["step_seconds"] * 8 / each["batch"] for each in own]
                   for what, own in grouped(rows, "kind", "batch").items()}
        names = {ZERO: (ZERO, 8), OFFLOADED: (OFFLOADED, 8), "batch 16": (STANDARD, 16)}
        found[ranks] = {name: ratios(seconds[what], seconds[STANDARD, 8]) for name, what in names.items()}
    return found


def peaks(content: dict) -> dict[tuple[int, int, str], int]:
    """{(ranks, batch, kind): bytes}: the peak of rank 0, reset for each pass."""
    return {(each["ranks"], each["batch"], each["kind"]): each["peak"] for each in passes(content, "memory")}


def drawn(content: dict) -> dict:
    """The argument of draw_replication(): the first size's tables, and the factorial at N = 1."""
    runs = {"one object": first_size(content, SAME), "new models": first_size(content, NEW)}
    return {
        "passes": [(each["kind"], each["batch"]) for each in runs["one object"][0]],
        "losses": {name: {words: [[each[figure] for each in passes] for passes in seeds]
                          for words, seeds in runs.items()} for figure, name in LOSSES.items()},
        "orders": {name: [(order, in_order(content, 1, *order, figure)) for order in ORDERS]
                   for figure, name in LOSSES.items()},
        "gain": {name: {whose: values for whose, values in attribution(content, figure).items() if whose != "all"}
                 for figure, name in LOSSES.items()},
    }


# ------------------------------------------------------------------------------------------------------------- in words


def describe(content: dict) -> str:
    """All results as text for a terminal."""
    whose = [attribution(content, figure) for figure in LOSSES]
    rates = grouped(passes(content, "rates"), "rate", "number", "kind", "batch")
    held = peaks(content)
    kinds = list(dict.fromkeys(kind for *_, kind in held))
    return "\n\n".join((
        "", about_data(content),
        "1. The report's table: one model object, one pass after the other; seed 0", report_table(content, SAME),
        "What would you conclude?",
        "2. The same passes, each with a new model; seed 0", report_table(content, NEW),
        f"3. Two passes, {next(iter(tables(content, SAME)))}: mean of the seeds, and from the lowest to the highest",
        *factorial_tables(content), about_twins(content),
        "4. Whose is the gain from the table's first row to its third?",
        report.table([["lowers by", *LOSSES.values()], *(
            [cause, *(spread_text(each[cause], "+.3f") if any(each[cause]) else "exactly 0" for each in whose)]
            for cause in whose[0])]),
        "5. At another learning rate",
        report.table([[f"rate {next(iter(rates))[0]:g}", "batch", *LOSSES.values()], *(
            [f"{number + 1}. {kind}", str(batch), *losses_text(rows)]
            for (_, number, kind, batch), rows in rates.items())]),
        "6. Memory of rank 0, and time",
        report.table([["peak, MB", *kinds], *(
            [f"N = {ranks}, batch {batch}", *(
                f"{held[ranks, batch, kind] / 1e6:.2f}" if (ranks, batch, kind) in held else "–" for kind in kinds)]
            for ranks, batch in dict.fromkeys((ranks, batch) for ranks, batch, _ in held))]),
        report.table([["time × standard's, batch 8", "", "median", "min", "max"], *(
            [f"N = {ranks}", what, *(f"{ratio[name]:.2f}" for name in ("median", "min", "max"))]
            for ranks, rows in times(content).items() for what, ratio in rows.items())]),
    ))


def about_data(content: dict) -> str:
    """The data, and the trap in them."""
    data = content["data"]
    right, wrong = data["shuffled"], data["position"]
    (trapped,) = passes(content, "position")
    return paragraph(
        f"{data['name']}: {right['training']:,} sentences to train with, {right['held_out']:,} held out,",
        f"{right['held_out_positive']:.0%} of them positive; naive Bayes on words finds {right['naive_bayes']:.1%}.",
        f"Split by position, without shuffling, {wrong['training_positive']:.1%} of the first part would be positive,",
        f"and {wrong['held_out_positive']:.1%} of what is held out: a model trained so finds the class of",
        f"{trapped['accuracy']:.1%}, and who says \"negative\" to all has {1 - wrong['held_out_positive']:.1%} right.")


def report_table(content: dict, model: str) -> str:
    """The table that the report printed: a line for each pass, by size."""
    peak = "peak_never_reset" if model == SAME else "peak"
    lines = [["layers × width, system, batch", *LOSSES.values(), "accuracy", "peak, MB", "seconds", "parameters"]]
    for size, (seed_0, *_) in tables(content, model).items():
        lines += [[f"{size}  {each['kind']}, {each['batch']}", *(f"{each[figure]:.4f}" for figure in LOSSES),
                   f"{each['accuracy']:.1%}", f"{each[peak] / 1e6:.2f}", f"{each['seconds']:.1f}",
                   f"{each['parameters']:,}"] for each in seed_0]
    return report.table(lines)


def factorial_tables(content: dict) -> list[str]:
    """All cells, with mean, minimum and maximum over the seeds."""
    parts: dict = {}
    cells = grouped(passes(content, "factorial"), "ranks", "model", "before", "kind")
    for (ranks, model, before, kind), rows in sorted(cells.items(), key=str):
        lines = parts.setdefault((ranks, model), [
            [f"N = {ranks}, {model} {'model' if model == NEW else 'object'}", *LOSSES.values(), "accuracy"]])
        lines.append([f"{kind} after {before or 'nothing'}", *losses_text(rows),
                      f"{sum(row['accuracy'] for row in rows) / len(rows):.1%}"])
    return [report.table(lines) for lines in parts.values()]


def about_twins(content: dict) -> str:
    """How much ZeRO, offload and the order change the results."""
    pairs = twins(content)
    training, validation = (max(abs(one[name] - other[name]) for one, other in pairs) for name in LOSSES)
    lines = [paragraph(
        f"{len(pairs)} pairs of passes differ only in ZeRO, in offload or in what came first. In {same_bits(pairs)} "
        "all losses and all trained parameters are the same bits; the largest difference in training loss is "
        f"{training:g}, in validation loss {validation:g}.")]
    for first, second in ORDERS:
        training, validation = ([after < before for before, after in in_order(content, 1, first, second, figure)]
                                for figure in LOSSES)
        lines.append(paragraph(
            f"{first} first, then {second} with the same object, N = 1: {second} has the lower training loss in "
            f"{sum(training)} of {len(training)} seeds, the lower validation loss in {sum(validation)}."))
    return "\n".join(lines)


def losses_text(rows: list[dict]) -> list[str]:
    """The spread of each loss over the seeds."""
    return [spread_text([row[name] for row in rows]) for name in LOSSES]


def spread_text(values: list[float], form: str = ".3f") -> str:
    """ "0.510 (0.501 – 0.522)": the mean, the lowest and the highest."""
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} – {max(values):{form}})"
