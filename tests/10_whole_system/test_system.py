"""The budget, part B of lesson 10: the bound, what is legal, the scores, and a class's board."""

import csv
import functools
import io
import itertools
import random
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import toys
from thorough import sample

from zero_minimal.classroom import board, open_part
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.bound import Bound
from zero_minimal.processes import ranks
from zero_minimal.programs import budget, system_rules, system_watch
from zero_minimal.programs.budget import TRACKS, Figures, Score, score
from zero_minimal.programs.simulate import main as simulate_command
from zero_minimal.programs.simulate import read_system
from zero_minimal.programs.simulation import simulate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "systems"))
from wrong import WRONG  # noqa: E402

KEPT = HERE / "systems" / "kept_units.py"
GIVEN_BACK = HERE / "systems" / "own_schedule.py"  # silver and bronze
OTHERWISE = HERE / "systems" / "refuses_to_free.py"
MEMORY, TRAFFIC, MESH = TRACKS


# ----------------------------------------------------------------------------------------------------------- the bound


def test_a_byte_of_memory_costs_a_byte_of_traffic():
    bound = Bound(parameters=6400, ranks=64, need=8000.0, others=100.0)
    assert bound.least_sent == 2 * 6400 * 63 / 64
    assert bound.sent(9000) == bound.sent(8000) == 100 + bound.least_sent
    assert bound.sent(7000) == bound.sent(8000) + 1000
    assert bound.memory(bound.sent(7000)) == 7000
    with pytest.raises(ValueError, match="no system sends only"):
        bound.memory(100 + bound.least_sent - 1)


def test_no_knapsack_of_whole_units_is_better():
    """Every choice of units of every small model: what stays costs memory, what does not is sent again."""
    draw = random.Random(0)
    for _ in range(20):
        sizes, n = [16 * draw.randint(1, 40) for _ in range(8)], draw.choice([2, 4, 16])
        rest = draw.randint(0, 500)
        whole = sum(sizes)
        bound = Bound(whole, n, whole * (n - 1) / n + whole / n + 6 * whole / n + rest)
        for count in range(9):
            for kept in itertools.combinations(sizes, count):
                peak = sum(kept) * (n - 1) / n + whole / n + 6 * whole / n + rest
                sent = 2 * whole * (n - 1) / n + (whole - sum(kept)) * (n - 1) / n
                assert sent >= bound.sent(peak) - 1e-6


SMALL = replace(MEMORY, model=system_rules.SMALL, ranks=16)


@functools.cache
def of_stage(number):
    report = simulate(SMALL.case(stage=number)).report
    return Figures(report["memory"]["peak"], 0, report["traffic"]["sent_bytes"])


@pytest.mark.thorough
@pytest.mark.parametrize("number", [2, 3])
def test_no_stage_is_below_the_bound(number):
    found = of_stage(number)
    assert found.sent >= budget.bound(SMALL).sent(found.peak)


@pytest.mark.thorough
@pytest.mark.parametrize("share", sample([0.8, 0.9, 1.0, 1.1, 1.5], [0.9]))
@pytest.mark.parametrize("file", sample([KEPT, GIVEN_BACK, OTHERWISE], [KEPT]))
def test_no_known_system_is_below_the_bound(file, share):
    track = replace(SMALL, memory=int(share * budget.bound(SMALL).need))
    found = budget.simulated(track, read_system(str(file))[1])
    assert found.sent >= budget.bound(track).sent(found.peak)


def test_known_figures_are_of_the_tracks():
    assert TRAFFIC.sent == 2 * budget.bound(TRAFFIC).parameters == 2 * 2 * budget.TRACKS[0].case().parameters
    for track in TRACKS:
        rows = [Figures(**budget.known()[track.name][f"stage {number}"]) for number in (2, 3)]
        two, three = rows
        assert two.sent < three.sent and two.peak > three.peak
        for row in rows:
            assert row.sent >= budget.bound(track).sent(row.peak) - budget.bound(track).others
        if track.memory:
            assert three.peak < track.memory < two.peak


@pytest.mark.thorough
def test_known_bounds_are_computed():
    for track in (MEMORY, MESH):
        assert asdict(budget.computed_bound(track)) == budget.known()[track.name]["bound"]


# ---------------------------------------------------------------------------------------------------------- the scores


def test_medals():
    least = budget.limit_and_least(MEMORY)[1]

    def medal(sent, peak=MEMORY.memory, **more):
        return score(MEMORY, Figures(peak, 0, round(sent), **more)).medal

    stage_3 = budget.better_reference(MEMORY)
    assert stage_3[0] == "stage 3" and budget.better_reference(TRAFFIC)[0] == "stage 2"
    assert medal(1.019 * least) == "gold" and medal(1.021 * least) == "silver"
    assert medal(stage_3[1] - 1) == "silver" and medal(stage_3[1]) == "bronze"
    assert medal(stage_3[1], peak=MEMORY.memory + 1) == medal(0.99 * least) == medal(least + 1, host=1) == ""
    assert [budget.POINTS[name] for name in ("", "bronze", "silver", "gold")] == [0, 6, 12, 20]


@pytest.mark.parametrize("name, figures", [
    ("the budget is met for model states", Figures(MEMORY.memory + 10**9, 0, 38 * 10**9)),
    ("memory under another name", Figures(MEMORY.memory, 0, 38 * 10**9, host=10**6)),
    ("less than can be", Figures(MEMORY.memory, 0, 30 * 10**9)),
])
def test_a_wrong_score_says_why(name, figures):
    found = score(MEMORY, figures)
    assert found.points == 0 and re.search(WRONG[name].message, found.words)


def test_a_score_is_a_sentence():
    silver = score(MEMORY, Figures(9_620_000_000, 0, 37_700_000_000)).words
    assert silver == ("it sends 37.7 GB, 3.0% above the bound of 36.62 GB; its peak is 9.62 of 10 GB. Gold is within "
                      "2%")
    bronze = score(MESH, Figures(15 * 10**9, 0, 56_569_310_400)).words
    assert bronze.endswith("its peak is 15 of 20 GB. Stage 3 sends 56.57 GB: silver is below that")
    assert score(TRAFFIC, Figures(5 * 10**9, 0, 43 * 10**9)).words == (
        "it sends 43 GB, and the limit is 29.84 GB: it sends too much")


def test_construction_counts():
    found = score(MEMORY, Figures(5 * 10**9, 30 * 10**9, 40 * 10**9))
    assert not found.medal and "its peak while it is built is 30 GB, and the limit is 10 GB" in found.words


@pytest.mark.thorough
def test_a_score_is_the_same_in_each_run():
    build = read_system(str(KEPT))[1]
    track = replace(SMALL, memory=int(budget.bound(SMALL).need))
    assert budget.simulated(track, build) == budget.simulated(track, build)


@pytest.mark.thorough
@pytest.mark.parametrize("file, track, medal", [
    (KEPT, MEMORY, "gold"), (KEPT, TRAFFIC, "gold"), (KEPT, MESH, "gold"), (OTHERWISE, TRAFFIC, "gold"),
    (GIVEN_BACK, MEMORY, "silver"),
], ids=lambda value: getattr(value, "name", value))
def test_systems_and_their_medals(file, track, medal):
    found = score(track, budget.simulated(track, read_system(str(file))[1]))
    assert found.medal == medal, found


# -------------------------------------------------------------------------------------------------------- what is legal


OF_TEXT = [name for name, wrong in WRONG.items() if wrong.seen == "text"]
OF_SIMULATED = [name for name, wrong in WRONG.items() if wrong.seen == "simulated"]
OF_REAL = [name for name, wrong in WRONG.items() if wrong.seen == "real"]


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_text_that_could_cheat_is_refused(name):
    assert re.search(WRONG[name].message, system_watch.unwanted(WRONG[name].text))


@pytest.mark.parametrize("file", [KEPT, GIVEN_BACK, OTHERWISE, open_part.part().folder / "system.py"],
                         ids=lambda file: file.stem)
def test_a_text_that_is_right_is_not(file):
    assert system_watch.unwanted(file.read_text()) == ""


@pytest.mark.thorough
def test_each_line_of_full_size_must_run_in_the_twin(tmp_path):
    """An honest system that counts with absolute sizes hears what the twin is."""
    head = "def build(model, group, budget):"
    counts = "\n    for _ in range(int((budget.memory - 3.6e9) // 1e9)):\n        budget.memory.bit_length()"
    (file := tmp_path / "system.py").write_text(KEPT.read_text().replace(head, head + counts))
    big, small = replace(SMALL, memory=10**10), system_rules.twins(MEMORY)
    lines = [watched(file, track)["lines"] for track in (big, replace(SMALL, memory=small[0].memory))]
    found = [{"budget": [twin.memory, twin.sent]} for twin in small]
    words = system_watch.alone(*lines, system_rules.twin_in_words(MEMORY, found))
    assert re.search(r"line \d+, in build, runs .* with the twin \(2 blocks of width 64, bf16, a .memory of 713,840 "
                     r"and [\d,]+ bytes\) it never ran. .* depend on absolute sizes", words), words


@pytest.mark.thorough
@pytest.mark.parametrize("name", sample(OF_SIMULATED, OF_SIMULATED[1:2]))
def test_a_system_that_cheats_simulated_ranks(name, tmp_path):
    assert system_watch.unwanted(WRONG[name].text) == ""
    (file := tmp_path / "system.py").write_text(WRONG[name].text)
    twin = replace(system_rules.twins(MEMORY)[1], ranks=64)
    found = watched(file, twin)
    real = watched(file, replace(twin, ranks=3))  # lines that three ranks run: here simulated, too
    words = found["fault"]
    lines = system_watch.alone(found["lines"], real["lines"])
    assert re.search(WRONG[name].message, words) or re.search(WRONG[name].message, lines), (words, lines)


def watched(file, track):
    """What a system does on simulated ranks: its lines, and the first parameter that it reads wrongly."""
    lines, faults = system_watch.Lines(str(file.resolve())), []
    around = functools.partial(system_watch.gathered_only, faults)
    with lines.followed():
        budget.simulated(track, read_system(str(file))[1], watch=around)
    return {"lines": lines.listed, "fault": next(iter(faults), "")}


def on_real_ranks(texts, budgets):
    """Each text as a system, on these ranks: its numbers."""
    found = {}
    for name, text in texts.items():
        file = Path(f"{name.replace(' ', '_')}.py").resolve()
        module = type(toys)("system")
        exec(compile(text, str(file), "exec"), vars(module))
        found[name] = system_rules.real_runs(module.build, str(file), MEMORY, budgets)
    return found


def in_simulation(name, text, tmp_path):
    (file := tmp_path / f"{name.replace(' ', '_')}.py").write_text(text)
    return system_rules.simulated_runs(read_system(str(file))[1], str(file), MEMORY, big=False)


@pytest.mark.thorough
def test_real_ranks_catch_the_rest(tmp_path):
    right = {"right": KEPT.read_text(), "otherwise": OTHERWISE.read_text()}
    texts = {name: WRONG[name].text for name in OF_REAL} | right
    assert not any(map(system_watch.unwanted, texts.values()))
    simulated = {name: in_simulation(name, text, tmp_path) for name, text in texts.items()}
    real = toys.run(on_real_ranks, 3, texts, [simulated["right"]["twins"][0]["budget"]])
    for name in texts:
        first = simulated[name] | {"twins": simulated[name]["twins"][:1]}
        words = system_rules.fault(MEMORY, first, [rank[name] for rank in real])
        if name not in right:
            assert re.search(WRONG[name].message, words), (name, words)
        else:
            assert not words.startswith("with a small model"), words


RUN = {"losses": [1.0, 2.0, 3.0], "dtypes": ["torch.bfloat16"], "states": [[1, 2, 3]] * 3, "elements": 100,
       "tensors": 1, "log": [["all_gather", 80, 3]], "sent": [9, 7, 7], "rest": [5, 5, 5], "peaks": [90, 100, 106],
       "largest": 1}
TWIN = {"states": [1, 2, 3], "sent": 7, "peak": 94}


@pytest.mark.parametrize("rank, changed, says", [
    (1, {}, ""),
    (1, {"losses": [1.0, 2.5, 3.0]}, r"the loss of step 2 on rank 1 is 2\.5, and 2\.0 at stage 0"),
    (2, {"dtypes": ["torch.float32"]}, r"parameters are torch\.float32, and were torch\.bfloat16"),
    (1, {"states": [[1, 2, 3]] * 2 + [[1, 2, 12 * 66]]}, r"rank 1 keeps 792 B of optimizer state; 12Ψ/N are 400 B"),
    (1, {"states": [[1, 2, 3]] * 2 + [[1, 2, 12 * 65]]}, ""),
    (1, {"log": [["all_gather", 81, 3]]}, r"rank 0's collective number 1 is all_gather of 80 .*, and rank 1's .* 81"),
    (2, {"log": [*RUN["log"], ["broadcast", 8, 3]]}, r"number 2 is nothing more, and rank 2's is broadcast of 8 bytes"),
    (2, {"sent": [7, 9, 7]}, r"rank 2 sends 7, 9, 7 bytes in steps 1 to 3"),
    (1, {"rest": [9, 5, 6]}, r"rank 1 holds 6 bytes at the end of step 3, and 5 at the end of step 2"),
    (1, {"peaks": [90, 100, 107]}, r"rank 1's peak is 107 bytes in step 3, and 100 in step 2"),
    (0, {"states": [[1, 2, 3], [1, 4, 3], [1, 2, 3]]}, "real ranks hold 4 bytes of gradients, and simulated ones 2"),
    (0, {"sent": [9, 8, 8]}, "real ranks send 8 bytes in step 2, and simulated ones 7"),
    (0, {"peaks": [90, 101, 101]}, "real ranks hold 101 bytes at the peak of step 2, and simulated ones 94"),
    (0, {"peaks": [90, 93, 93]}, "real ranks hold 93 bytes at the peak"),
])
def test_each_rule_has_its_words(rank, changed, says):
    runs = [RUN | changed if number == rank else RUN for number in range(3)]
    words = next(system_rules.faults(MEMORY, TWIN, runs, [RUN["losses"]] * 3), "")
    assert re.search(says, words) if says else not words, words


def whole_on_rank_0(model, group, limits):
    from torch.optim import AdamW

    from zero_minimal.stage3 import Stage3

    class OneKeeps(Stage3):
        def _release(self, unit):
            if self.rank or not torch.is_grad_enabled():  # in forward it is
                super()._release(unit)

    return OneKeeps(model, AdamW, group=group, **limits.options)


@pytest.mark.thorough
def test_a_unit_kept_whole_on_one_rank_only():
    with pytest.raises(ranks.RankError, match="in another|while rank|all_gather|reduce_scatter"):
        toys.run(system_rules.real_runs, 3, whole_on_rank_0, "", MEMORY, [[10**6, None]])


def hidden_traffic():
    """Ways to send that are not ours, each under a meter: what it counted."""
    import torch.distributed as dist

    rank, n, found = dist.get_rank(), dist.get_world_size(), {}
    numbers = torch.zeros(64)
    ways = {
        "send": lambda: dist.send(numbers, 1 - rank) if rank == 0 else dist.recv(numbers, 0),
        "objects": lambda: dist.broadcast_object_list([numbers] * (rank == 0) or [None], 0),
        "gather": lambda: dist.gather(numbers, [torch.zeros(64) for _ in range(n)] if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(numbers, [torch.zeros(64) for _ in range(n)] if rank == 0 else None, 0),
    }
    for name, way in ways.items():
        with (meter := TrafficMeter()):
            way()
        found[name] = meter.sent_bytes
    return found


def test_the_meter_sees_what_is_not_a_collective_of_ours():
    first = toys.run(hidden_traffic, 2)[0]
    assert first["send"] == 256 and first["gather"] >= 128 and first["scatter"] >= 128 and first["objects"] > 256 / 2


# ------------------------------------------------------------------------------------------------ the grader, the board


@pytest.mark.thorough
def test_the_starter_has_no_points():
    """It is stage 2, which cannot begin on the meta device."""
    build = read_system(str(open_part.part().folder / "system.py"))[1]
    with pytest.raises(ValueError, match="is on the meta device: only stage 3 can bring a model into being"):
        system_rules.simulated_runs(build, "", MEMORY, big=False)


def test_each_track_says_why_though_the_words_are_the_same(capsys):
    grades = open_part.TrackGrades(open_part.part())
    for step in grades.lesson.steps:
        grades.add(step.number, "gold", 0, False, "it cannot begin")
        grades.show(step)
    told = capsys.readouterr().out
    assert told.count("it cannot begin") == 3 and re.findall(r"^(\w+) \d", told, re.M) == ["track"] * 3


def test_each_medal_says_how_far_from_the_bound_it_is(monkeypatch, capsys):
    gold, silver = (score(MEMORY, Figures(MEMORY.memory, 0, sent)) for sent in (37 * 10**9, 38 * 10**9))
    grades = open_part.TrackGrades(open_part.part())
    monkeypatch.setattr(open_part, "judge", lambda file, tracks, show: [show(gold), show(replace(silver, track=2))])
    open_part.grade(Path("system.py"), grades, grades.show)
    told = " ".join(capsys.readouterr().out.split())
    assert "track 1 20 of 20 7.5B in 10 GB: the fewest bytes gold: it sends 37 GB, 1.0% above the bound" in told
    assert "track 2 12 of 20 7.5B with 2Ψ: the lowest peak silver: it sends 38 GB, 3.8% above the bound" in told
    assert [grades.is_right(step) for step in grades.lesson.steps[:2]] == [True, False]


def test_simulate_says_in_one_line_why_a_system_cannot_begin(capsys):
    starter = open_part.part().folder / "system.py"
    with pytest.raises(SystemExit):
        simulate_command(["--stage", str(starter), "--layers", "2", "--hidden", "64", "--heads", "4", "--ranks", "4"])
    assert re.search(r"error: line \d+ of .*system.py: 'token_embedding.weight' is on the meta device",
                     capsys.readouterr().err)


@pytest.mark.thorough
def test_simulate_gives_a_system_its_budget(tmp_path, capsys):
    (file := tmp_path / "system.py").write_text(KEPT.read_text().replace(
        "def build(model, group, budget):",
        "def build(model, group, budget):\n    print('given', budget.memory, budget.sent)"))
    simulate_command(["--stage", str(file), "--layers", "2", "--hidden", "64", "--heads", "4", "--ranks", "4",
                      "--dtype", "bf16", "--budget-memory", "10MB"])
    assert "given 10000000 None" in capsys.readouterr().out

def medals(*names):
    return [Score(track.number, name, 38 * 10**9 if name else None, 37 * 10**9 if name else None,
                  "it sends enough" if name else "it | does\n<b>not</b> fit") for track, name in
            zip(TRACKS, names, strict=True)]


def class_of(tmp_path):
    for who in ("Ada", "Bob", "=Eve", "Zoe"):
        (tmp_path / who).mkdir()
        (tmp_path / who / "system.py").write_text(who)

    def judged(file):
        who = file.read_text()
        if who == "Bob":
            raise RuntimeError("ranks are broken")
        return medals(*{"Ada": ("silver", "", "bronze"), "=Eve": ("gold",) * 3, "Zoe": ("gold",) * 3}[who])

    return board.rows_of(tmp_path, judged)


def test_a_board_is_sorted_and_a_broken_submission_is_a_row(tmp_path):
    rows = class_of(tmp_path)
    assert [(row.who, row.points) for row in rows] == [("=Eve", 60), ("Zoe", 60), ("Ada", 18), ("Bob", 0)]
    assert [line[0] for line in board.table(rows)] == ["1", "1", "3", "4"]
    assert rows[-1].faults == "track 1, 2, 3: it could not be judged: RuntimeError: ranks are broken"


def test_a_board_in_three_forms(tmp_path):
    rows = class_of(tmp_path)
    lines = board.as_markdown(rows).splitlines()
    assert len(lines) == 6 and {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {8}
    assert "gold, 38 GB, +2.7%" in lines[2]
    page = board.as_html(rows)
    assert "&lt;b&gt;not" in page and "<b>not" not in page and page.count("class=gold") == 6
    table = list(csv.reader(io.StringIO(board.as_csv(rows))))
    assert {len(line) for line in table} == {16}
    assert table[1][1] == "'=Eve" and table[1][3:6] == ["gold", "20", str(38 * 10**9)]


def test_broken_files_have_a_reason(tmp_path):
    for name, text, says in (("a", "def build(", "the file is not Python, line 1"), ("b", "x = 1", "has no build"),
                             ("c", "import threading\n", "line 1 imports threading")):
        (tmp_path / f"{name}.py").write_text(text)
        scores = open_part.judge(tmp_path / f"{name}.py")
        assert [one.points for one in scores] == [0, 0, 0] and says in scores[0].words
    rows = board.rows_of(tmp_path)
    assert [row.who for row in rows] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="holds no submission"):
        board.submissions_in(tmp_path / "none")


@pytest.mark.thorough
@pytest.mark.timeout(480)  # 141 s where nothing else runs
def test_one_track_through_the_whole_grader(tmp_path):
    (file := tmp_path / "system.py").write_text(KEPT.read_text())
    found = open_part.judge(file, TRACKS[:1])[0]
    assert found.medal == "gold", found
