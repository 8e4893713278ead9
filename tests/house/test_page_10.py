"""Lesson 10's pages, and what the manual has of its system: a run or a formula gave each figure, and today's run gives
the same."""

import json

import pages
import pytest

from zero_minimal.classroom.lessons import HOUSE, found
from zero_minimal.core.mesh import make_mesh
from zero_minimal.pictures.mesh_chart import draw_worth
from zero_minimal.processes import ranks
from zero_minimal.programs import budget, system_rules
from zero_minimal.programs import ways as program
from zero_minimal.programs.simulation import Case, simulate
from zero_minimal.workload.model import GPTConfig

LESSON = found()["10_whole_system"]
PAGE, BUDGET, TEACHER, MANUAL = ((LESSON.folder / name).read_text() for name in (
    "README.md", "budget.md", "teacher.md", "../manual/zero-r.md"))
PROSE, BUDGETS, MANUALS = (" ".join(page.split()) for page in (PAGE, BUDGET, MANUAL))  # wherever lines are broken
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
LADDER, WORTH, LARGE = (MEASURED[name] for name in ("ladder", "worth", "worth_large"))
CONFIGS = ("C1", "C2", "C3", "C4", "C5")
MB, GB = 1e6, 1e9
INPUT = 4 * 8 * program.SIZES.sequence * program.SIZES.hidden  # bytes of a block's input on the mesh


def more(rows, name):
    """MB by which a part raises the peak."""
    return (rows[name]["peak"] - rows["none"]["peak"]) / MB


# -------------------------------------------------------------------------------------------------------- the figures


def test_the_table_has_each_way_and_all_that_is_there():
    assert list(LADDER) == list(program.LADDER)
    for row in LADDER.values():
        assert sum(row["peak_by_category"].values()) == row["peak"]


def test_the_model_of_the_page():
    sizes = program.SIZES
    whole = LADDER["data parallel"]["states"]["parameters"]
    assert f"{sizes.layers} blocks of width {sizes.hidden}, fp32, {whole / MB:.1f} MB" in PROSE
    assert f"read {program.SEQUENCES} sequences of {sizes.sequence} tokens" in PROSE
    assert f"b·s·h are {INPUT // 4:,} numbers, {INPUT / MB:.2f} MB" in PROSE
    assert f"Buckets have {MEASURED['bucket'] / 2**20:g} MiB" in PROSE


@pytest.mark.thorough
def test_what_the_first_command_shows():
    """A simulated rank has the bytes of a real one."""
    shape = GPTConfig(sequence=64, dropout=0.0)
    case = Case(shape, ranks=4, model_parallel=2, dtype="fp32", batch=4, config="C4", bucket_bytes=4 * 2**20)
    held = simulate(case).report["memory"]
    assert f"rank 0 holds {held['parameters'] / MB:.2f} MB of parameters, {held['gradients'] / MB:.2f} of gradients " \
           f"and {held['optimizer'] / MB:.2f} of Adam's state" in PROSE
    whole = 4 * case.parameters
    assert f"The whole model has {whole / MB:.2f} MB of parameters" in PROSE
    replicated = 4 * (shape.layers * 6 + 2 + shape.sequence) * shape.hidden  # norms, biases, positions
    assert held["parameters"] == (whole - replicated) / 2 + replicated == 2 * held["gradients"] == held["optimizer"]
    assert f"that is {replicated / MB:.2f} of {whole / MB:.2f} MB, so a rank has ({whole / MB:.2f} − " \
           f"{replicated / MB:.2f})/2 + {replicated / MB:.2f} = {held['parameters'] / MB:.2f}. C4 keeps 1/D of their " \
           f"gradients, {held['parameters'] / MB:.2f}/2" in PROSE


def test_the_rule_is_of_the_run():
    peaks = LADDER["model parallel"]["peak"], WORTH["none"]["peak"], LADDER["C4"]["peak"]
    none, some, all_of_c4 = (f"{peak / MB:.1f}" for peak in peaks)
    told = f"P_os+g lowers the peak from {none} to {some} MB, and C4's slabs and buffers raise it again, to {all_of_c4}"
    assert told in PROSE
    assert f"On the left below, bars start from {peaks[1] / MB:.1f} MB" in PROSE


def test_model_states_are_those_of_the_formula():
    one, three = LADDER["C1"]["states"], LADDER["C3"]["states"]
    part = one["parameters"]
    assert one == {"parameters": part, "gradients": part, "optimizer": 2 * part // 2}
    assert three == {"parameters": part, "gradients": part // 2, "optimizer": part}
    told = f"After the step C1 holds {part / MB:.1f}, {part / MB:.1f} and {part / MB:.1f} MB, and C3 " \
           f"{part / MB:.1f}, {part / 2 / MB:.1f} and {part / MB:.1f}"
    assert told in PROSE


def test_traffic_is_zeros_and_the_blocks():
    part, layers = LADDER["C1"]["states"]["parameters"], program.SIZES.layers
    zero, blocks = 2 * part // 2, layers * 12 * INPUT // 2
    ends = LADDER["C1"]["sent"] - zero - blocks
    assert ends == 2 * INPUT + 3 * 4 * 8 * program.SIZES.sequence  # three numbers a token for the loss
    assert f"ZeRO sends {zero / MB:.1f} MB: 2 · {part / MB:.1f} · 1/2" in PROSE
    assert f"six blocks send {blocks / MB:.1f} MB: 6 · 6 all-reduces · 2 · 1/2 · {INPUT / MB:.2f}" in PROSE
    assert f"{ends / MB:.1f} MB more make it {LADDER['C1']['sent'] / MB:.1f}" in PROSE
    for with_p_a, without in (("C2", "C1"), ("C4", "C3"), ("C5", "C3")):
        assert LADDER[with_p_a]["sent"] - LADDER[without]["sent"] == layers * INPUT // 2
    assert f"P_a adds {layers * INPUT / 2 / MB:.1f} MB" in PROSE
    assert f"C5 has {LADDER['C5']['host'] / MB:.1f} MB in host memory" in PROSE
    assert LADDER["C5"]["host"] == layers * INPUT // 2


def test_the_order_of_the_peaks():
    peaks = [LADDER[name]["peak"] for name in CONFIGS]
    assert peaks == sorted(peaks, reverse=True)
    assert f"C2 and C3 are close: {(peaks[1] - peaks[2]) / MB:.1f} MB" in PROSE
    alone, three = LADDER["P_os+g"], LADDER["C3"]
    assert f"Less, {alone['peak'] / MB:.1f} MB to {three['peak'] / MB:.1f}. And it sends " \
           f"{alone['sent'] / MB:.1f} MB in place of {three['sent'] / MB:.1f}" in PROSE
    assert LADDER["P_os+g+p"]["peak"] < LADDER["C4"]["peak"]


def test_what_each_part_is_worth():
    alt = next(words for words, file in pages.IMAGE.findall(PAGE) if file == "worth.png")
    small = {name: f"{abs(more(WORTH, name)):.1f}" for name in WORTH}
    assert f"C_B adds {small['C_B']}, M_D for gradients {small['M_D, gradients']}, M_D for checkpoints " \
           f"{small['M_D, checkpoints']}, P_a takes {small['P_a']} off, P_a+cpu {small['P_a+cpu']}" in alt
    assert f"C4 is {small['all: C4']} higher, C5 {small['all: C5']}" in alt
    assert f"C_B adds {more(LARGE, 'C_B'):.1f} and C4 is {more(LARGE, 'all: C4'):.1f} higher" in alt
    assert [name for name in WORTH if more(WORTH, name) < 0] == ["P_a", "P_a+cpu"]
    for rows, size in ((WORTH, MEASURED["bucket"]), (LARGE, MEASURED["large"])):
        assert more(rows, "C_B") == pytest.approx(size / MB, rel=0.02), "one bucket"
    assert "it costs one bucket, 0.5 or 4.2 MB" in PROSE


def test_why_p_a_alone_spares_less():
    none, alone = (WORTH[name]["peak_by_category"] for name in ("none", "P_a"))
    together = (LADDER["C1"]["peak"] - LADDER["C2"]["peak"]) / MB
    assert f"P_a saves {together:.2f} MB from C1 to C2, and {-more(WORTH, 'P_a'):.2f} alone" in PROSE
    less, extra = ((none[name] - alone[name]) / MB for name in ("activations", "gradients"))
    assert f"with {less:.2f} MB less of activations and {-extra:.2f} more of gradients" in PROSE


def test_losses_and_speed():
    losses = {name: row["losses"] for name, row in LADDER.items()}
    assert all(losses[name] == losses["C1"] for name in CONFIGS)
    assert "2 parts in ten million apart" in PROSE
    assert losses["data parallel"] == pytest.approx(losses["C1"], rel=2.5e-7)
    recorded = json.loads((HOUSE / "lessons/pictures/configs.json").read_text())["rows"]
    speeds = [row["tokens_per_second"] for row in recorded]
    assert f"C1 to C5 did {min(speeds):,.0f} to {max(speeds):,.0f} tokens in a second, all within 2%" in MANUALS
    assert max(speeds) / min(speeds) < 1.02


def test_the_table_of_part_b():
    for track in budget.TRACKS:
        _, least = budget.limit_and_least(track)
        cells = [f"{budget.bound(track).need / GB:.2f} GB"]
        for stage in (2, 3):
            figures = budget.Figures(**json.loads(budget.KNOWN.read_text())[track.name][f"stage {stage}"])
            cells.append(f"{figures.peak / GB:.2f} GB, {figures.sent / GB:.2f} GB")
        what = "sent" if track.memory is not None else "held"
        row = [f"track {track.number}", *cells, f"{least / GB:.2f} GB {what}"]
        assert "| " + " | ".join(row) + " |" in BUDGET
        assert f"| track {track.number}, {track.name} |" in BUDGET
    assert f".sent`: 2Ψ elements, {budget.TRACKS[1].sent / GB:.2f} GB" in BUDGETS
    for shape, words in ((budget.SMALL, "7.5B has {} blocks of width {:,} and {} heads"),
                         (budget.LARGE, "40B has {} of width {:,} and {} heads")):
        assert words.format(shape.layers, shape.hidden, shape.heads) in BUDGETS
        assert f"a vocabulary of {shape.vocabulary:,}" in BUDGETS
        assert f"one sequence of {shape.sequence:,} tokens" in BUDGETS
    first, second, third = map(budget.bound, budget.TRACKS)
    least, sent = budget.limit_and_least(budget.TRACKS[0])[1], budget.TRACKS[1].sent
    assert f"In track 1 that is {first.least_sent / GB:.2f} + {first.need / GB:.2f}, and with a peak of " \
           f"{budget.TRACKS[0].memory / GB:g} GB at least {least / GB:.2f} GB are sent" in BUDGETS
    assert f"In track 2 {sent / GB:.2f} GB may be sent, {(sent - second.least_sent) / GB:.2f} more" in BUDGETS
    assert f'"sent" holds {third.others / GB:.2f} GB of model parallelism' in BUDGETS
    for medal, points in budget.POINTS.items():
        assert not medal or f"**{medal.title()}**, {points} points" in BUDGET
    assert f"within {budget.GOLD - 1:.0%} of the bound" in BUDGETS


def test_each_track_has_its_command():
    given = [words for words in pages.commands(BUDGET) if "simulate" in words]
    for words, track in zip(given, budget.TRACKS, strict=True):
        options = dict(zip(words, words[1:], strict=False))
        shape = track.model
        assert [int(options[f"--{name}"]) for name in ("layers", "hidden", "heads", "ranks")] == [
            shape.layers, shape.hidden, shape.heads, track.ranks]
        assert int(options.get("--mp", 1)) == track.model_parallel and "--recompute" in words
        name, limit = ("memory", track.memory) if track.memory else ("sent", track.sent)
        assert 0.999 * limit < float(options[f"--budget-{name}"].removesuffix("GB")) * GB <= limit


def test_the_twin_of_part_b():
    small, large = system_rules.twins(budget.TRACKS[0])
    sizes = system_rules.SMALL
    told = f"has {sizes.layers} blocks of width {sizes.hidden}, in bf16: {small.case().parameters:,}"
    assert told in BUDGETS
    assert f"trained with {small.memory:,} bytes" in BUDGETS and f"and with {large.memory:,}, where" in BUDGETS
    assert small.memory < budget.bound(small).need < large.memory


def test_what_a_class_gets_wrong():
    told = " ".join(TEACHER.split())
    assert "C_B adds {C_B:.1f} MB, M_D for gradients {M_D, gradients:.1f} and M_D for checkpoints " \
           "{M_D, checkpoints:.1f}".format_map({name: more(WORTH, name) for name in WORTH}) in told
    halves = program.SIZES.layers * INPUT / 2 / MB
    assert f"P_a alone takes {-more(WORTH, 'P_a'):.1f} off, where six half inputs are {halves:.1f}" in told
    three, alone = LADDER["C3"], LADDER["P_os+g"]
    assert f"it takes {three['peak'] / MB:.1f} MB to {alone['peak'] / MB:.1f}, and sends " \
           f"{three['sent'] / MB:.1f} MB to {alone['sent'] / MB:.1f}" in told


def test_the_exam():
    part = 40 / 16
    assert f"{part:g}B parameters. Parameters {2 * part:g} GB" in " ".join(TEACHER.split())
    assert f"12 · {part:g} / 25 = {12 * part / 25:g} GB" in TEACHER and 2 * part / 25 == 0.2
    for squares, norm in ((9 + 7 + 9, "5"), (9 + 7 + 18, "5.83"), (9 + 7, "4"), (9 + 9, "4.24")):
        assert f"{squares**0.5:.3g}" == norm and norm in TEACHER


# -------------------------------------------------------------------------------------------------- as they are today


def seen_today(names):
    with ranks.start() as rank:
        meshes = {True: make_mesh(2), False: make_mesh(1)}
        ways = {name: program.LADDER[name] for name in names}
        return {name: program.seen(way, meshes[way.shares_a_model], rank.device) for name, way in ways.items()}


@pytest.mark.thorough
def test_a_run_of_today_is_the_same():
    names = ("P_os+g", "C1", "C5")
    today = ranks.run(seen_today, 4, names, device="cpu", timeout=300)[0]
    for name in names:
        losses = today[name].pop("losses")
        before = dict(LADDER[name])
        assert losses == pytest.approx(before.pop("losses"), rel=1e-5)
        assert today[name] == before


SHAPE = GPTConfig(layers=12, hidden=8192, heads=64, vocabulary=50257, sequence=1024, dropout=0.0)


def simulated(config):
    return simulate(Case(SHAPE, ranks=64, model_parallel=16, dtype="fp16", batch=8, config=config,
                         bucket_bytes=64 * 2**20)).report


@pytest.mark.thorough
def test_the_simulators_table():
    peaks, columns = {}, ("gradients", "activations", "buffers", "host", "peak")
    for config in CONFIGS:
        report = simulated(config)
        memory, peaks[config] = report["memory"], report["memory"]["peak"] / GB
        cells = [f"{size / GB:.2f}" for size in (*(memory[name] for name in columns), report["traffic"]["sent_bytes"])]
        assert "| " + " | ".join([config, *cells]) + " |" in MANUAL
    assert f"P_a saves {peaks['C1'] - peaks['C2']:.2f} GB, and P_os+g in place of P_os " \
           f"{peaks['C1'] - peaks['C3']:.2f}. P_a+cpu saves {peaks['C4'] - peaks['C5']:.2f} more" in MANUALS
    parameters = memory["parameters"] / 2
    assert f"A fused fp32 buffer would take {4 * parameters / GB:.2f} GB" in MANUALS
    assert f"C_B's two take {2 * 64 * 2**20 / GB:.2f}" in MANUALS
    assert f"such a buffer takes {4 * parameters / GB:.2f} GB, C_B takes {2 * 64 * 2**20 / GB:.2f}, and P_a saves " \
           f"{peaks['C1'] - peaks['C2']:.2f}" in PROSE


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_pictures_show_what_the_page_says():
    numbers = [text.get_text() for text in draw_worth({"": WORTH}).axes[0].texts]
    assert numbers == [f"{more(WORTH, name):+.1f}" for name in list(WORTH)[1:][::-1]]
