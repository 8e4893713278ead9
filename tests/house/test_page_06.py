"""Lesson 06's page: a formula agrees with what was measured, and so does a run of today."""

import pytest
from house.lesson_pages import texts_of

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.processes import ranks
from zero_minimal.programs.cases import Case
from zero_minimal.programs.lesson06_program import BATCH, CONFIG, INPUT, step_of
from zero_minimal.programs.simulation import simulate
from zero_minimal.workload.model import GPTConfig

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("06_activation_partitioning")
BLOCKS = CONFIG.layers
MB = 1e6


def step(world_size, mode):
    return MEASURED[{2: "two", 4: "four"}[world_size]][mode]


def units(world_size, kind="fused"):
    """What autograd saves in a block, [shape, in inputs of a block]."""
    return MEASURED["saved"][f"{world_size} ranks"][kind == "dropout"]


# -------------------------------------------------------------------------------------------------------- the figures


def test_the_model_of_the_page():
    assert f"has {BLOCKS} blocks and a width of {CONFIG.hidden}, in fp32" in PROSE
    assert f"reads {BATCH} sequences of {CONFIG.sequence} tokens: b·s·h are {INPUT // 4:,} numbers" in PROSE
    assert f"numbers, {INPUT / MB:.2f} MB." in PROSE and MEASURED["input"] == INPUT


def test_what_is_kept_is_the_formula_and_the_ends():
    ends = step(2, "checkpoints")["kept"] - BLOCKS * INPUT
    assert step(2, "P_a")["kept"] - BLOCKS * INPUT / 2 == ends == step(2, "P_a+cpu")["kept"]
    assert f"about {ends / MB:.0f} MB more" in PROSE
    block = sum(size for _, size in units(2))
    assert step(2, "no checkpoints")["kept"] == pytest.approx(ends + BLOCKS * block * INPUT, rel=1e-3)
    losses = {round(found["loss"], 6) for found in (*MEASURED["two"].values(), *MEASURED["four"].values())}
    assert len(losses) == 1, "checkpoints change nothing that is computed"
    assert f"MB are {BLOCKS * block * INPUT / MB:.1f} MB; with checkpoints" in PROSE
    assert f"6 · {INPUT / MB:.2f} = {BLOCKS * INPUT / MB:.1f} MB, with P_a {BLOCKS * INPUT / 2 / MB:.1f} MB" in PROSE
    for world_size in (2, 4):
        assert step(world_size, "P_a")["kept"] - step(world_size, "P_a+cpu")["kept"] == BLOCKS * INPUT / world_size


def test_what_the_page_says_of_the_highest_moment_and_of_traffic():
    falls = step(2, "checkpoints")["highest"] - step(2, "P_a")["highest"]
    spared = BLOCKS * INPUT / 2
    assert falls == spared - INPUT, "the block that runs again has its whole input beside its part"
    rounded = [round(step(2, mode)["highest"] / MB, 1) for mode in ("checkpoints", "P_a")]
    assert f"By {falls / MB:.1f} MB on two ranks (the table's {rounded[0] - rounded[1]:.1f} is rounding)" in PROSE
    assert f"not by {spared / MB:.1f}. Six parts save {spared / MB:.1f} MB." in PROSE
    assert f"its whole input, {INPUT / MB:.2f} MB." in PROSE
    blocks = step(2, "checkpoints")["sent"] - ends_of_the_model()
    more = step(2, "P_a")["sent"] - step(2, "checkpoints")["sent"]
    assert (blocks, more) == (12 * BLOCKS * INPUT / 2, BLOCKS * INPUT / 2)
    assert f"six blocks send {blocks / MB:.1f} MB with checkpoints, and {more / MB:.1f} MB more with P_a" in PROSE


def ends_of_the_model():
    """Bytes that embedding, head and loss send on two ranks: what no checkpoint changes."""
    return step(2, "no checkpoints")["sent"] - 8 * BLOCKS * INPUT / 2


def test_twelve_messages_a_block_and_then_the_thirteenth():
    assert MEASURED["counts"] == {"no checkpoints": 8, "checkpoints": 12, "P_a": 13}
    assert all(size == INPUT for calls in MEASURED["messages"].values() for *_, size in calls)
    phases = [phase for phase, *_ in MEASURED["messages"]["P_a"]]
    assert phases == ["forward"] * 2 + ["gather"] + ["again"] * 2 + ["backward"] * 2
    assert "| no checkpoints | (4 + 12/M)·b·s·h | 8:" in PAGE and "one block sends 8 times b·s·h" in PROSE
    assert "Twelve, and then the thirteenth" in PAGE.split("What was measured</summary>")[1], "it is asked, then told"
    assert "Twelve, and" not in PAGE.split("What was measured</summary>")[0]


def test_what_a_block_saves():
    for world_size, column in ((1, 0), (2, 1)):
        sizes = [size for _, size in units(world_size)]
        large = [size for size in sizes if size >= 0.5]
        norms, inside = [size for size in large if size == 1.0][:4], sum(large) - 4
        assert len(norms) == 4 and inside == 12 / world_size, "4 + 12/M"
        rest = sum(sizes) - sum(large)
        lines = [("two norms: the input of each, and its output", "4", "4"),
                 ("attention: queries, keys, values", "3", "1.5"), ("attention: its result", "1", "0.5"),
                 ("MLP: before and after GELU", "8", "4")]
        assert sum(float(line[1 + column]) for line in lines) == sum(large)
        assert all("| " + " | ".join(line) + " |" in PAGE for line in lines)
        cells = [line.split("|")[2 + column].strip() for line in PAGE.splitlines()
                 if line.startswith(("| a few numbers", "| together"))]
        assert cells == [f"{rest:.2f}", f"{sum(sizes):.2f}"]


def test_what_the_scores_would_be():
    matrices = [size for shape, size in units(1, "dropout") if shape[-1] == shape[-2] == CONFIG.sequence]
    assert len(matrices) == 3 and set(matrices) == {CONFIG.heads * CONFIG.sequence / CONFIG.hidden}
    assert f"heads·s/h units more, {matrices[0]:.1f} with the {CONFIG.heads} heads" in PROSE
    fused, dropout = (sum(size for _, size in units(1, kind)) for kind in ("fused", "dropout"))
    fused_has, dropout_has = ([shape for shape, _ in units(1, kind)] for kind in ("fused", "dropout"))
    masks = dropout_has.count([BATCH, CONFIG.sequence, CONFIG.hidden]) - fused_has.count(
        [BATCH, CONFIG.sequence, CONFIG.hidden])
    (own,) = [size for shape, size in units(1) if shape == [BATCH, CONFIG.heads, CONFIG.sequence]]
    assert masks == 2, "those of the two dropouts outside of attention"
    assert dropout == pytest.approx(fused + sum(matrices) + masks - own)


def test_the_copies_of_the_picture():
    world_size = len(MEASURED["copies"])
    for rank, held in enumerate(MEASURED["copies"]):
        all_of_it, part = [0, INPUT // 4], INPUT // 4 // world_size
        assert held["checkpoints"] == [all_of_it, all_of_it, all_of_it, [0, 0]]
        assert held["P_a"] == [all_of_it, [rank * part, part], all_of_it, [0, 0]]


def test_the_stairs_lead_to_what_is_kept():
    for mode, stairs in MEASURED["stairs"].items():
        assert stairs["activations"][stairs["backward"] - 1] == step(2, mode)["kept"]


def test_the_exam():
    model, ranks_ = 32 * 1024 * 8192 * 2, 16
    assert f"{model / 2 / 1e6:.0f} million numbers, {model / 1e6:.0f} MB" in TEACHER
    assert f"times 125 are {125 * model / 1e9:.1f} GB, and {125 * model / ranks_ / 1e9:.1f} GB with P_a" in TEACHER
    assert f"125 · 537 MB · 15/16 = {125 * model * 15 / 16 / 1e9:.1f} GB" in TOLD
    assert f"{125 * model / 2 / 1e9:.1f} billion is the count" in TOLD


# -------------------------------------------------------------------------------------------------- as they are today


def step_of_today():
    with ranks.start() as rank:
        return step_of("P_a", checkpoint_blocks, rank.device)._replace(timeline=0, backward=0)._asdict()


@pytest.mark.thorough
def test_a_step_of_today_is_the_same():
    """Messages, copies and what is saved are looked at when the notebook is run, too: its outputs are compared."""
    found = ranks.run(step_of_today, 2, device="cpu", timeout=200)[0]
    assert found == pytest.approx(step(2, "P_a") | {"timeline": 0, "backward": 0}, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("config, kept", [
    ("C3, no P_a", "12 × {whole:.1f} MB"), ("C4, P_a", "12 parts, {parts:.1f} MB together"), ("C5, P_a+cpu", "none")])
def test_the_simulators_table(config, kept):
    model = GPTConfig(layers=12, hidden=8192, heads=64, vocabulary=50257, sequence=1024, dropout=0.0)
    report = simulate(Case(model, ranks=64, dtype="fp16", batch=8, model_parallel=16, config=config[:2],
                           bucket_bytes=64 * 2**20)).report
    whole, parts = 2 * 8 * 1024 * 8192, 12 * 2 * 8 * 1024 * 8192 / 16
    memory, sent = report["memory"], report["traffic"]["sent_bytes"]
    host = memory.get("host", 0)
    assert host == (parts if config.endswith("cpu") else 0)
    cells = [config, kept.format(whole=whole / MB, parts=parts / MB), f"{memory['activations'] / 1e9:.3f} GB",
             f"{host / MB:.1f} MB" * bool(host), f"{sent / 1e9:.2f} GB"]
    assert "| " + " | ".join(cells).replace("|  |", "| |") + " |" in PAGE
