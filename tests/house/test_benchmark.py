"""The benchmark: what it reports and refuses. Never how long something took."""

import functools
import itertools
import json

import pytest
import torch
import toys
from torch.optim import AdamW
from tqdm import tqdm

from zero_minimal.meters import timing
from zero_minimal.pictures.benchmark import CURVES, draw_benchmark, run_look
from zero_minimal.processes import ranks
from zero_minimal.programs import bench, peers, progress, scaling
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")  # not on the CPU with torch 2.6
RUN = ["DDP", "stage 3", "ZeroRedundancy", *(["FSDP2 kept", "FSDP2"] if FSDP2_RUNS else []), "floor"]
TINY = ["--model", "1x32", "--sequence", "16", "--batch", "2", "--steps", "2", "--warm-up", "1", "--repeats", "2"]

WATCHED = {"parameters": 1, "theory_stage": 1, "device": "cpu", "backend": "gloo", "traffic": {"sent_bytes": 5},
           "memory": {"peak": 7}}  # what a rank reports, made up
TIMED = {"seconds": [0.1], "losses": [1.0], "wire_bytes": None, "resident_bytes": None, "machine_seconds": None}


# ------------------------------------------------------------------------------------------------------------ the runs


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What one small run of the command printed and wrote."""
    folder = tmp_path_factory.mktemp("bench")
    only = ", ".join(RUN).upper()
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(progress.Lines, "write", lambda self, text: printed.append(text))
        flags = [*TINY, "--only", only, "--json", str(folder / "f.json"), "--plot", str(folder / "f.png")]
        assert bench.main(flags) is None
    rows = json.loads((folder / "f.json").read_text())["rows"]
    return {row["name"]: row for row in rows}, "\n".join(printed), folder


def test_a_row_for_each_contender_in_our_order(report):
    rows, printed, folder = report
    assert list(rows) == RUN
    for name in rows:
        assert f"\n{name} " in printed
    assert (folder / "f.png").read_bytes().startswith(b"\x89PNG")


def test_rows_say_what_was_measured(report):
    rows, _, _ = report
    assert len({row["parameters"] for row in rows.values()}) == 1
    for row in rows.values():
        assert (row["ranks"], row["layers"], row["hidden"], row["sequence_tokens"]) == (2, 1, 32, 16)
        assert (row["batch_sequences_per_rank"], row["timed_steps"], row["rounds"]) == (2, 2, 2)
        assert len(row["step_seconds_by_round"]) == 2 and len(row["losses"]) == 3
        assert min(row["step_seconds_by_round"]) <= row["step_seconds"] <= max(row["step_seconds_by_round"])
        assert row["tokens_per_second"] == pytest.approx(2 * 2 * 16 / row["step_seconds"])
        assert 0 < row["peak_ledger_bytes"]


def test_ratios_are_taken_round_by_round(report):
    rows, _, _ = report
    assert list(rows["stage 3"]["ratios"]) == (["DDP", "FSDP2"] if FSDP2_RUNS else ["DDP"])
    for name, other in itertools.product(rows, ["DDP", "FSDP2"]):
        if other in rows[name]["ratios"]:
            own, theirs = (rows[one]["step_seconds_by_round"] for one in (name, other))
            ratio, both = rows[name]["ratios"][other], [a / b for a, b in zip(own, theirs, strict=True)]
            assert (ratio["min"], ratio["max"]) == pytest.approx((min(both), max(both)))
            assert ratio["min"] <= ratio["lower_quartile"] <= ratio["median"] <= ratio["upper_quartile"] <= ratio["max"]


def test_traffic_of_a_row(report):
    rows, _, _ = report
    whole = 4 * rows["DDP"]["parameters"]
    assert rows["DDP"]["sent_bytes_per_step"] == rows["DDP"]["theory_bytes_per_step"] == whole
    assert rows["stage 3"]["theory_bytes_per_step"] == 1.5 * whole
    assert rows["ZeroRedundancy"]["sent_bytes_per_step"] > rows["ZeroRedundancy"]["theory_bytes_per_step"] == whole
    if FSDP2_RUNS:
        assert rows["FSDP2"]["theory_bytes_per_step"] == 1.5 * whole
        assert rows["FSDP2 kept"]["theory_bytes_per_step"] == whole
    assert rows["floor"]["sent_bytes_per_step"] == rows["floor"]["theory_bytes_per_step"] == 0
    for row in rows.values():  # what the loopback counts may be anybody's, too; it is never less than what is sent
        assert row["wire_bytes_per_step"] is None or row["wire_bytes_per_step"] >= 0.9 * row["sent_bytes_per_step"]


def test_all_start_from_the_same_model_and_data(report):
    rows, _, _ = report
    first = rows["DDP"]["losses"]
    for name, row in rows.items():
        alike = 1 if name == "floor" else None  # without communication each rank goes its own way
        assert row["losses"][:alike] == pytest.approx(first[:alike], rel=1e-5), name
    assert rows["floor"]["losses"][1:] != first[1:]


# ------------------------------------------------------------------------------------------------------- different work


class Confused(Stage2):
    """A stage that steps the wrong way."""

    theory_stage = 2

    def step(self):
        self.gradient_scale = -1.0
        super().step()


class Absent(peers.DDP):
    """A peer that cannot run."""

    def __init__(self, *args, **options):
        raise ImportError("no such thing here")


def test_who_computes_something_else_is_an_error(monkeypatch):
    monkeypatch.setitem(bench.CONTENDERS, "stage 2", Confused)
    message = bench.main([*TINY, "--only", "stage2"])
    assert message.startswith("error: stage 2 computes something else than DDP") and "step 1" in message


def test_a_peer_that_does_not_run_is_left_out(monkeypatch):
    monkeypatch.setitem(bench.CONTENDERS, "FSDP2", Absent)
    written = []
    monkeypatch.setattr(tqdm, "write", staticmethod(lambda text, **_: written.append(text)))
    [point] = scaling.points(["1x32"], 1, Settings(sequence=16, batch=2, steps=1), [])
    with tqdm(disable=True) as progress:
        rows = bench.measure(point, ["DDP", "FSDP2"], 1, 1, "cpu", progress)
    assert [row["name"] for row in rows] == ["DDP"]
    assert "FSDP2 does not run here" in written[0] and "no such thing here" in written[0]


def result(*losses):
    return {"losses": list(losses)}


def test_losses_are_compared_rank_by_rank_and_step_by_step():
    bench.check_losses("stage 1", [result(3.0, 2.0)], [result(3.00002, 2.0)])
    for wrong in ([result(3.0, 2.0), result(3.0, 2.001)], [result(float("nan"), 2.0), result(3.0, 2.0)]):
        with pytest.raises(ValueError, match="stage 1 computes something else than DDP.* on rank"):
            bench.check_losses("stage 1", wrong, [result(3.0, 2.0), result(3.0, 2.0)])


def test_the_floor_is_compared_until_its_ranks_part():
    right = [result(3.0, 2.0), result(3.5, 2.0)]
    bench.check_losses("floor", [result(3.0, 1.5), result(3.5, 1.7)], right)
    with pytest.raises(ValueError, match="rank 1 its loss in step 0"):
        bench.check_losses("floor", [result(3.0, 1.5), result(3.6, 1.7)], right)
    with pytest.raises(ValueError, match="step 1"):
        bench.check_losses("floor", [result(3.0, 1.5)], [result(3.0, 2.0)])  # one rank: it is plain training


# --------------------------------------------------------------------------------------------------------- arithmetic


def test_a_step_is_as_long_as_on_the_slowest_rank():
    results = [{"seconds": [1.0, 5.0, 2.0]}, {"seconds": [3.0, 1.0, 1.0]}]
    assert timing.run_seconds(results) == 3.0, "median of 3, 5 and 2"


def test_the_spread_of_ratios():
    named = dict(min=1.0, lower_quartile=2.0, median=3.0, upper_quartile=4.0, max=9.0)
    assert timing.ratios([4.0, 2.0, 9.0, 6.0, 1.0], [1.0, 2.0, 1.0, 2.0, 0.5]) == named
    assert set(timing.ratios([4.0], [2.0]).values()) == {2.0}


def test_over_rounds_and_ranks():
    timed = [[{"x": 1}, {"x": 5}], [{"x": 2}, {"x": 1}], [{"x": 3}, {"x": 3}]]
    assert bench.over_rounds("x", timed) == 3, "median of 5, 2 and 3"
    assert bench.over_rounds("x", [[{"x": None}, {"x": None}]]) is None


def test_share_of_other_programs(monkeypatch):
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    rank = {"elapsed_seconds": 10.0, "cpu_seconds": 8.0, "machine_seconds": 18.0}
    assert bench.others_share([[rank, rank]]) == pytest.approx((18 - 16) / 20)
    assert bench.others_share([[rank | {"machine_seconds": None}]]) is None


# ------------------------------------------------------------------------------------------------------------- peers


def update_on_the_floor():
    """Which elements one step changes, and the rank's parameters, in the model's order; [parameters] each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    before = torch.cat([param.detach().clone().view(-1) for param in model.parameters()])
    floor = peers.Floor(model, AdamW, lr=0.1, fused=True)
    model(torch.ones(2, 5)).square().sum().backward()
    floor.step()
    floor.zero_grad()
    after = torch.cat([param.detach().view(-1) for param in model.parameters()])
    return before != after, after


def test_the_floor_updates_its_share_and_no_more():
    [(changed, alone)] = ranks.run(update_on_the_floor, 1)
    assert changed.all()
    for world_size in (2, 3):
        results = ranks.run(update_on_the_floor, world_size)
        assert torch.stack([moved for moved, _ in results]).sum(0).eq(1).all(), "each element is one rank's"
        shares = [int(moved.sum()) for moved, _ in results]
        assert max(shares) - min(shares) <= 1
        for moved, parameters in results:
            assert torch.equal(parameters[moved], alone[moved])


def test_deepspeed_takes_part_only_where_it_is_installed(monkeypatch):
    for installed in (False, True):
        monkeypatch.setattr(peers.DeepSpeed, "is_installed", staticmethod(lambda installed=installed: installed))
        assert ("DeepSpeed 2" in bench.available()) is installed


def test_resident_memory_is_counted_from_the_start():
    device = torch.device("cpu")
    size = 64 * 2**20
    seen = []
    for _ in range(3):  # a system may take back idle pages of this process meanwhile
        freed = torch.ones(size // 4)
        del freed  # a peak before the start is not counted
        before = timing.start_of_memory(device)
        if before is None:
            pytest.skip("this system does not tell")
        at_once = timing.peak_of_memory(device) - before
        torch.ones(size // 4)
        seen.append((at_once, timing.peak_of_memory(device) - before))
    assert any(at_once < size // 2 < later < 2 * size for at_once, later in seen), seen


# ---------------------------------------------------------------------------------------------------- points and flags


def test_models_have_the_size_that_they_are_named_for():
    for name, (layers, hidden) in scaling.MODELS.items():
        parameters = 12 * layers * hidden**2
        assert parameters / 1e6 == pytest.approx(float(name.removesuffix("M")), rel=0.06)
        assert scaling.of_size(Settings(), name).model_config().heads == hidden // 64


def test_sweeps():
    settings = Settings(batch=4, sequence=128)
    [plain] = scaling.points(["11M"], 2, settings, [])
    assert plain.sweeps == ("",)
    swept = scaling.points(["5M"], 2, settings, ["ranks", "size", "sequence"])
    along = {curve: [point for point in swept if curve in point.sweeps] for curve in CURVES}
    assert [(point.ranks, point.settings.batch) for point in along["weak"]] == [(1, 4), (2, 4), (4, 4)]
    assert sorted(point.ranks * point.settings.batch for point in along["strong"]) == [8, 8, 8]
    assert [point.model for point in along["size"]] == list(scaling.MODELS)
    assert sorted(point.settings.sequence for point in along["sequence"]) == list(scaling.SEQUENCES)
    assert all(point.ranks == 2 for point in along["size"] + along["sequence"])
    assert len(swept) == len(set(swept)) == 3 + 2 + 4 + 3, "points on several curves are measured once"


def test_one_size_of_buckets_for_all(tmp_path, monkeypatch):
    """Each contender gets it, in the runs that are timed and in the one that is watched, and rows say so."""
    given = []

    def pretend(function, world_size, contender, settings, *args, timeout, device, bucket_bytes=None, **options):
        given.append((contender, function, bucket_bytes))
        return [WATCHED | TIMED | {"losses": [1.0] * settings.steps}] * world_size

    monkeypatch.setattr(ranks, "run", pretend)
    for flags, size in ([], None), (["--bucket-mb", "25"], 25):
        given.clear()
        assert bench.main([*TINY, *flags, "--only", "stage1,fsdp2", "--json", str(tmp_path / "f.json")]) is None
        assert {(contender, function) for contender, function, _ in given} == {
            (bench.CONTENDERS[name], function) for name in ("DDP", "stage 1", "FSDP2")
            for function in (timing.time_steps, timing.watch_steps)}
        assert {each for _, _, each in given} == {size and size * 2**20}
        assert {row["bucket_mib"] for row in json.loads((tmp_path / "f.json").read_text())["rows"]} == {size}


def test_a_bucket_size_comes_to_the_stage():
    settings = Settings(layers=1, hidden=32, heads=1, sequence=16, batch=2, steps=1)
    run = functools.partial(toys.run, count_buckets, 2, settings, fresh=True)  # time_steps ties a process to a core
    assert run(2**13)[0] > run(2**20)[0] == 1


def count_buckets(settings, bucket_bytes):
    made = []

    def remembered(*args, **options):
        made.append(Stage2(*args, **options))
        return made[0]

    timing.time_steps(remembered, settings, 1, bucket_bytes=bucket_bytes)
    return len(made[0].buckets)


WRONG = {
    "--bucket-mb 0": "from 1 up",
    "--model 12Q": "'12Q' is no model: choose from 5M, 11M",
    "--model 0x32": "'0x32' is no model",
    "--ranks 0": "from 1 up",
    "--repeats x": "a whole number is wanted",
    "--only stage9": "'stage9' is no contender here: choose from ddp, stage0",
    "--sweep width": "'width' is no sweep: choose from ranks, size, sequence",
    "--sweep ranks --batch 3": "choose --batch so that 1 and 2 and 4 divide them",
    "--sequence 9999999": "too short for sequences of 9999999",
    "--plot /nowhere/f.png": "cannot be written",
    "--device tpu": "invalid choice",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_are_refused_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "run", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(SystemExit) as end:
        bench.main(flags.split())
    assert end.value.code == 2
    assert WRONG[flags] in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ pictures


def made_up_row(name: str, point: scaling.Point) -> dict:
    """A row as the benchmark writes it; its figures mean nothing."""
    elements = point.settings.layers * point.settings.hidden**2
    return bench.row(point, name, elements, [WATCHED], [[TIMED]] * 3, {name: [0.2, 0.1, 0.3], "DDP": [0.2, 0.2, 0.2]})


@pytest.mark.parametrize("sweeps", [[], ["ranks", "size", "sequence"]], ids=["models", "sweeps"])
def test_every_contender_can_be_drawn_and_told_apart(sweeps):
    points = scaling.points(["5M", "11M"], 2, Settings(batch=2), sweeps)
    rows = [made_up_row(name, point) for point in points for name in bench.CONTENDERS]
    picture = draw_benchmark(rows)
    picture.draw_without_rendering()
    looks = [json.dumps(run_look(name), sort_keys=True) for name in bench.CONTENDERS]
    assert len(set(looks)) == len(looks)
    if sweeps:
        drawn = [words for curve, (_, words, _) in CURVES.items() if curve != "link"]  # --link makes that
        assert [axis.get_xlabel() for axis in picture.axes[::2]] == drawn
        assert all(axis.get_legend_handles_labels()[1] for axis in picture.axes[::2])


def test_what_is_not_known_is_a_question_mark():
    [point] = scaling.points(["5M"], 2, Settings(batch=2), [])
    table = bench.describe([made_up_row("DDP", point)])
    assert "?" in table and "Other programs" not in table
