"""The calculator: the paper's own numbers, units as people write them, shapes of models, and the command plan."""

import argparse
import json

import pytest
import torch
from matplotlib.image import imread

from zero_minimal import __main__ as program
from zero_minimal.paper import formulas, published
from zero_minimal.paper.hardware import GPUS, NETWORK
from zero_minimal.paper.quantities import count, count_text, seconds_text, size, size_text
from zero_minimal.paper.shapes import block_parameters, parameter_count, root_parameters, shape_for, usual_shape
from zero_minimal.pictures.plan_chart import there
from zero_minimal.programs import plan as plan_program
from zero_minimal.programs import reproduce
from zero_minimal.programs import simulate as simulate_program
from zero_minimal.programs.plan import describe
from zero_minimal.programs.planning import Speeds, plan
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Parser, add_settings


def words(told):
    """What is printed, without its lines."""
    return " ".join(describe(told).split())


@pytest.fixture
def command(tmp_path, capsys):
    """A function that runs plan with these flags: what it prints, without its lines, and its JSON."""

    def run(flags):
        program.main(["plan", *flags.split(), f"--json={tmp_path / 'plan.json'}"])
        return " ".join(capsys.readouterr().out.split()), json.loads((tmp_path / "plan.json").read_text())

    return run


FIGURE_1 = shape_for(7_500_000_000, 1024, recompute=True)
BIG = GPTConfig(layers=125, hidden=8192, heads=64, sequence=1024, vocabulary=50257, dropout=0.0, recompute=True)


# ----------------------------------------------------------------------------------------------------------- formulas


def test_the_worked_example_of_7_billion_on_8_ranks():
    sizes = [sum(formulas.model_states(stage, 7_000_000_000, 8, "fp16").values()) / 1e9 for stage in range(4)]
    assert sizes == [112, 38.5, 26.25, 14]


@pytest.mark.parametrize(("ranks", "savings"), [(8, (2.91, 4.27, 8)), (64, (3.82, 7.21, 64))])
def test_savings_reach_4_and_8_only_with_many_ranks(ranks, savings):
    whole = formulas.bytes_a_parameter(0, ranks, "bf16")
    assert whole == 16
    for stage, saving in zip((1, 2, 3), savings, strict=True):
        assert whole / formulas.bytes_a_parameter(stage, ranks, "bf16") == pytest.approx(saving, abs=0.005)
    assert 16 / formulas.bytes_a_parameter(1, 10**9, "bf16") == pytest.approx(4)
    assert 16 / formulas.bytes_a_parameter(2, 10**9, "bf16") == pytest.approx(8)


def test_another_optimizer_has_another_k():
    states = formulas.model_states(1, 1000, 10, "fp16", optimizer_bytes=8)  # momentum and master
    assert states == {"parameters": 2000, "gradients": 2000, "optimizer": 800}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("parameters", [1e9, 7.5e9, 100e9, 1e12])
def test_the_fewest_ranks_are_enough_and_one_less_is_not(stage, parameters):
    def fit(ranks):
        return sum(formulas.model_states(stage, int(parameters), ranks, "fp16").values()) <= 32e9

    fewest = formulas.fewest_ranks(stage, int(parameters), 32e9, "fp16")
    assert not fit(10**9) if fewest is None else fit(fewest) and (fewest == 1 or not fit(fewest - 1))


def test_the_bold_cells_of_table_1_are_the_first_that_fit():
    """Of its powers of 4: 7.5B at 64, 16, 4; 128B and 1T at stage 3 alone, with 64 and 1024."""
    fewest = [[formulas.fewest_ranks(stage, size, 32e9, "fp16") for stage in (1, 2, 3)]
              for size in (7_500_000_000, 128 * 10**9, 10**12)]
    assert fewest == [[45, 7, 4], [None, None, 64], [None, None, 500]]


@pytest.mark.parametrize("stage", range(4))
def test_the_largest_model_just_fits(stage):
    largest = formulas.largest_model(stage, 32e9, 64, "fp16")
    for parameters, fits in ((largest, True), (largest * 1.001, False)):
        assert (formulas.bytes_a_parameter(stage, 64, "fp16") * parameters <= 32e9) == fits
    assert formulas.largest_model(stage, 32e9, 64, "fp16", 16) == pytest.approx(16 * largest, rel=1e-9)


def test_activations_are_those_of_the_paper():
    assert formulas.activations(48, 1600, 32, 1024, "fp16") / 1e9 == pytest.approx(60.4, abs=0.05)
    assert formulas.checkpoints(125, 8192, 32, 1024, "fp16") / 1e9 == pytest.approx(67.1, abs=0.05)
    assert formulas.checkpoints(125, 8192, 32, 1024, "fp16", cut=16) / 1e9 == pytest.approx(4.19, abs=0.005)


def test_p_a_adds_a_twelfth_to_megatrons_traffic():
    sent, with_p_a = (formulas.model_parallel_traffic(10, 64, 2, 32, "fp16", 4, partition)
                      for partition in (False, True))
    assert sent == 10 * 12 * 2 * 32 * 64 * 2 * 3 / 4
    assert with_p_a / sent == pytest.approx(13 / 12)
    assert formulas.model_parallel_traffic(10, 64, 2, 32, "fp16", 4, recompute=False) / sent == pytest.approx(8 / 12)
    assert formulas.model_parallel_traffic(10, 64, 2, 32, "fp16", 1) == 0


@pytest.mark.parametrize(("stage", "states", "within"), [
    (0, (15, 15, 90), 26.25), (1, (15, 15, 11.25), 26.25), (2, (15, 1.875, 11.25), 26.25),
    (3, (1.875, 1.875, 11.25), 39.375),
])
def test_groups_that_keep_all_states_shard_within_and_all_reduce_between(stage, states, within):
    """By pencil, 7.5B on 2 × 8 ranks: 2, 2 and 12 bytes an element, those that are cut in 8; 2 or 3 × 2Ψ·7/8 bytes
    within, 2 × 2(Ψ/8)/2 between: that and 2 × 2Ψ·7/8 are what one ring of 16 sends, 2 × 2Ψ·15/16."""
    told = plan(FIGURE_1, 16, 32e9, replicate=2)
    row, unit = told["rows"][stage], told["parameters"] / 7.5
    assert [row[name] / unit for name in formulas.STATES] == pytest.approx(states)
    assert row["between_bytes"] / unit == pytest.approx(1.875)
    assert (row["sent_bytes"] - row["between_bytes"]) / unit == pytest.approx(within)
    group, whole = (plan(FIGURE_1, ranks, 32e9)["rows"][stage] for ranks in (8, 16))
    assert row["together"] == group["together"] and row["fits"] == group["fits"]
    if stage < 3:
        assert row["sent_bytes"] == pytest.approx(whole["sent_bytes"])
    fewest = group["fewest_data_parallel_ranks"]
    assert row["fewest_data_parallel_ranks"] == (fewest and 2 * fewest)
    two, one = (plan(FIGURE_1, 8 * groups, 32e9, replicate=groups, offload="cpu")["offload"] for groups in (2, 1))
    assert two == one
    assert plan(FIGURE_1, 16, 32e9, replicate=1)["rows"][stage] == whole and whole["between_bytes"] == 0


def test_between_groups_gradients_go_at_the_networks_rate():
    speeds = Speeds(1e15, 400e9, 8, 10e9)
    told = plan(FIGURE_1, 64, 80e9, "bf16", speeds=speeds, replicate=8)
    for row in told["rows"]:
        within = row["sent_bytes"] - row["between_bytes"]
        assert row["send_seconds"] == pytest.approx(within / 400e9 + row["between_bytes"] / 10e9)
    assert "all of a group are inside one; between groups at 10 GB/s" in words(told)


# --------------------------------------------------------------------------------------------------------- quantities


@pytest.mark.parametrize(("read", "values"), [
    (count, {"7.5B": 7_500_000_000, "1T": 10**12, "1.5b": 1_500_000_000, "125M": 125_000_000, "3 K": 3000, "42": 42,
             "1e9": 10**9, "1_000": 1000, "7.5E9": 7_500_000_000, "1e+9": 10**9, "1e18": 10**18}),
    (size, {"32GB": 32 * 10**9, "32GiB": 32 * 2**30, "80 gb": 80 * 10**9, "512MiB": 2**29, "1TB": 10**12, "7B": 7}),
])
def test_counts_and_sizes_as_people_write_them(read, values):
    """Decimal, unless they say otherwise."""
    assert {text: read(text) for text in values} == values


@pytest.mark.parametrize(("read", "accepted", "wrong"), [
    *((count, "K, M, B and T", wrong)
      for wrong in ("", "B", "7.5Q", "-1B", "0", "seven", "1 2B", "32GB", "nan", "1e999", "1e19")),
    *((size, "32GB", wrong) for wrong in ("32G", "-1GB", "0GB", "lots", "2e6TB")),
])
def test_others_are_answered_with_what_is_accepted(read, accepted, wrong):
    with pytest.raises(argparse.ArgumentTypeError, match=accepted):
        read(wrong)


def test_numbers_as_text():
    assert [count_text(value) for value in (7.5e9, 1e12, 128e9, 999, 14_422_535_211)] == ["7.5B", "1T", "128B", "999",
                                                                                          "14.4B"]
    assert [size_text(value) for value in (31.4e9, 16e12, 1500, 12)] == ["31.4 GB", "16 TB", "1.5 KB", "12 B"]
    times = [seconds_text(value) for value in (0.0123, 1.5, 90, 7200, 400_000)]
    assert times == ["12 ms", "1.5 s", "90 s", "2 h", "4.6 d"]


# ------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("asked", [3e6, 125e6, 1.5e9, 7.5e9, 128e9, 1e12])
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_shape_hits_the_size_that_is_asked_for(asked, parallel):
    config = shape_for(int(asked), 64, parallel)
    assert parameter_count(config) == pytest.approx(asked, rel=1e-3)
    assert config.heads % parallel == 0


@pytest.mark.parametrize("config", [shape_for(3_000_000, 64), GPTConfig(layers=3, hidden=40, heads=4, vocabulary=77)])
def test_the_size_of_a_shape_is_that_of_the_model(config):
    with torch.device("meta"):
        model = GPT(config)
    assert parameter_count(config) == sum(param.numel() for param in model.parameters())
    assert block_parameters(config) == sum(param.numel() for param in model.blocks[0].parameters())
    assert root_parameters(config) == parameter_count(config) - config.layers * block_parameters(config)


@pytest.mark.parametrize("asked", [125e6, 1e9, 7.5e9, 100e9])
def test_another_sequence_asks_for_the_same_model(asked):
    """But for its positions. Nor do model-parallel ranks ask for another one, if they can share its width."""
    first, *others = (usual_shape(int(asked), sequence, parallel, recompute=True)
                      for sequence in (1024, 64, 8192, 131072) for parallel in (1, 2, 8))
    for other in others:
        assert (other.layers, other.hidden, other.vocabulary) == (first.layers, first.hidden, first.vocabulary)
        assert parameter_count(other) - parameter_count(first) == (other.sequence - 1024) * first.hidden
    assert parameter_count(first) == pytest.approx(asked, rel=1e-3)


@pytest.mark.parametrize("parallel", [3, 5, 16, 64])
def test_model_parallel_ranks_share_the_heads_of_a_usual_shape(parallel):
    config = usual_shape(7_500_000_000, 2048, parallel, recompute=True)
    assert config.heads % parallel == 0 and config.hidden // config.heads >= 32


def test_a_shape_can_have_few_blocks():
    assert abs(shape_for(10**12, 8, layers=12).layers - 12) < 4


# --------------------------------------------------------------------------------------------------------------- plan


def test_the_plan_is_figure_1_and_says_which_stage_fits():
    told = plan(FIGURE_1, 64, 32e9)
    assert [row["states"] / 1e9 for row in told["rows"]] == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert [row["states_fit"] for row in told["rows"]] == [False, True, True, True]
    assert [row["fits"] for row in told["rows"]] == [False, False, True, True]  # 31.4 GB leave no room for more
    assert told["first_stage_that_fits"] == 2 and "the states alone: stage 1" in words(told)
    assert plan(BIG, 128, 32e9)["first_stage_that_fits"] == 3
    assert plan(BIG, 16, 32e9)["first_stage_that_fits"] is None


def test_units_of_stage_3_can_be_too_large_for_a_device():
    huge = GPTConfig(layers=113, hidden=27136, heads=212, sequence=1024, vocabulary=52504, dropout=0.0, recompute=True)
    told = plan(huge, 1024, 32e9)
    row = told["rows"][3]
    assert row["states"] / 1e9 == pytest.approx(15.6, abs=0.05) and row["states_fit"]  # Table 1
    assert row["together"] / 1e9 == pytest.approx(96.7, rel=0.03)  # what `simulate` counts
    assert not row["fits"] and told["first_stage_that_fits"] is None and "gathers whole" in words(told)
    assert row["fewest_data_parallel_ranks"] is None and row["fewest_data_parallel_ranks_for_states"] == 500
    assert all(other["passing"] < row["passing"] / 5 for other in told["rows"][:3])
    assert plan(huge, 16384, 32e9, model_parallel=4)["first_stage_that_fits"] == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fewest_ranks_are_the_fewest_on_which_all_fits(stage):
    fewest = plan(FIGURE_1, 64, 32e9)["rows"][stage]["fewest_data_parallel_ranks"]
    fits = [plan(FIGURE_1, ranks, 32e9)["rows"][stage]["fits"] for ranks in (fewest - 1, fewest)]
    assert fits == [False, True]


def test_activations_count_too():
    told = plan(BIG, 400, 32e9, batch=32, model_parallel=16)
    assert told["first_stage_that_fits"] is None and told["rows"][2]["states_fit"]
    assert "too many" in words(told)
    assert told["activations"]["checkpoints"] / told["activations"]["P_a"] == 16
    cut = plan(BIG, 400, 32e9, batch=32, model_parallel=16, checkpoints="P_a")
    assert cut["first_stage_that_fits"] == 2
    spared = cut["rows"][2]["activations"] - plan(
        BIG, 400, 32e9, batch=32, model_parallel=16, checkpoints="P_a+cpu")["rows"][2]["activations"]
    assert spared == told["activations"]["P_a"]


@pytest.mark.parametrize("recompute", [True, False])
def test_model_parallelism_sends_less_where_nothing_is_recomputed(recompute):
    config = GPTConfig(layers=4, hidden=256, heads=8, sequence=64, dropout=0.0, recompute=recompute)
    told = plan(config, 32, 32e9, batch=2, model_parallel=4)
    assert told["model_parallel_bytes"] == (12 if recompute else 8) * 4 * 2 * 64 * 256 * 2 * 3 / 4
    assert ("since blocks are recomputed" if recompute else "since nothing is recomputed") in words(told)


@pytest.mark.parametrize(("parallel", "speed"), [(8, 100e9), (32, 10e9)])
def test_a_step_waits_for_model_parallelism_over_the_link_inside_a_node_or_the_network(parallel, speed):
    speeds = Speeds(125e12, link=100e9, node=16, network=10e9)
    told = plan(BIG, 64, 32e9, model_parallel=parallel, speeds=speeds)
    waited = told["model_parallel_bytes"] / speed
    assert told["model_parallel_seconds"] == pytest.approx(waited, rel=1e-9)
    parts = (told["compute_seconds"], told["rows"][3]["send_seconds"])
    bounds = [seconds_text(waited + part) for part in (max(parts), sum(parts))]
    assert describe(told).splitlines()[-1].endswith(f"  {bounds[0]:>20}  {bounds[1]:>20}")
    partitioned = plan(BIG, 64, 32e9, model_parallel=parallel, speeds=speeds, checkpoints="P_a")
    assert partitioned["model_parallel_seconds"] == pytest.approx(13 / 12 * waited, rel=1e-9)


def test_a_device_is_slower_in_fp32(command):
    seconds = []
    for dtype, rate in (("fp16", "125 TFLOP/s"), ("fp32", "15.7 TFLOP/s")):
        text, told = command(f"--params=1.5B --dtype={dtype}")
        assert f"40% of {rate}, the device's in {dtype}" in text and "at 12.5 GB/s, the network" in text
        seconds.append(told["compute_seconds"])
    assert seconds[1] / seconds[0] == pytest.approx(125 / 15.7)
    assert all(gpu.operations_fp32 < gpu.operations for gpu in GPUS.values())


@pytest.mark.parametrize("parallel", (1, 16, 64))
def test_heads_that_nobody_gave_are_such_that_model_parallel_ranks_can_share_them(parallel, command):
    assert command(f"--layers=48 --hidden=1600 --mp={parallel}")[1]["heads"] % parallel == 0


def test_a_step_takes_as_long_as_arithmetic_says():
    told = plan(BIG, 64, 32e9, batch=2, speeds=Speeds(100e12, link=150e9, node=16, network=10e9))
    sizes = (BIG.layers, BIG.hidden)
    on_weights = formulas.matrix_operations(*sizes, BIG.vocabulary, 2 * 1024, recompute=True)
    assert on_weights == pytest.approx(8 * parameter_count(BIG) * 2 * 1024, rel=0.01)  # 8Ψ a token: forward runs twice
    attention = formulas.attention_operations(*sizes, 2, 1024, recompute=True) / 2
    assert told["compute_seconds"] == pytest.approx((on_weights + attention) / 40e12, rel=1e-6)
    once, thrice = (plan(BIG, 64, 32e9, accumulate=count)["compute_seconds"] for count in (1, 3))
    assert thrice == pytest.approx(3 * once)
    assert told["rows"][3]["send_seconds"] == pytest.approx(3 * 2 * parameter_count(BIG) * 63 / 64 / 10e9, rel=1e-6)


@pytest.mark.parametrize(("ranks", "speed", "why"), [(8, 300e9, "all are inside one"), (16, NETWORK, "the network")])
def test_data_parallelism_goes_over_the_link_where_all_ranks_share_a_node(ranks, speed, why):
    """At the network's rate it was 24 times too slow on 8 A100."""
    told = plan(BIG, ranks, 80e9, "bf16", speeds=Speeds.of(GPUS["A100-80GB"], "bf16"))
    for row in told["rows"]:
        assert row["send_seconds"] == pytest.approx(row["sent_bytes"] / speed)
    assert why in words(told) and f"{size_text(speed)}/s" in words(told)


def test_speeds_can_be_given(command):
    text, told = command("--params=1B --ranks=4 --node=2 --link=10GB --network=1GB --mp=2")
    assert told["rows"][2]["send_seconds"] == told["rows"][2]["sent_bytes"] / 1e9
    assert told["model_parallel_seconds"] == told["model_parallel_bytes"] / 10e9
    assert "a node has 2 devices" in text


def test_a_link_has_one_speed_everywhere():
    """One direction, of NVLink's two: the paper's 300 GB/s are both."""
    assert GPUS["V100-32GB"].link == GPUS["V100-16GB"].link == 150e9
    assert not hasattr(published, "INSIDE")
    assert "at 150 GB/s inside" in " ".join(reproduce.figure2()["notes"])


def test_it_says_what_deepspeeds_estimator_counts_besides():
    told = plan(FIGURE_1, 64, 32e9)
    assert "2Ψ + 18Ψ/N at stage 2 where the paper has 2Ψ + 14Ψ/N" in words(told)
    more = (2 + 18 / 64 - 2 - 14 / 64) * told["parameters"]
    assert f"gradients in fp32 besides, here {size_text(more)}" in words(told)
    assert "DeepSpeed" not in words(plan(BIG, 64, 32e9, "fp32"))


def test_it_says_that_attention_is_fused():
    told = plan(BIG, 16, 32e9, batch=2, model_parallel=4)
    scores = 2 * 64 / 4 * 1024**2 * 2
    assert told["activations"]["scores"] == scores
    assert f"Attention is taken to be fused: it keeps no matrix of scores, which would be {size_text(scores)}" in (
        words(told))


def test_it_says_on_how_many_ranks_it_would_fit():
    told = plan(FIGURE_1, 2, 32e9)
    fewest = min(row["fewest_data_parallel_ranks"] or 99 for row in told["rows"])
    assert f"no stage fits into 32 GB on so few ranks: stage 3 does on {fewest}; or --mp" in words(told)
    assert plan(FIGURE_1, fewest, 32e9)["first_stage_that_fits"] == 3


def test_the_picture_is_of_the_moment_that_the_table_shows():
    told = plan(BIG, 400, 32e9, batch=32, model_parallel=16)
    for row in told["rows"]:
        parts = sum(there(row, part) for part in (*formulas.STATES, "activations", "passing"))
        assert parts == pytest.approx(row["together"])


@pytest.mark.parametrize("parser", (plan_program.parser, simulate_program.parser))
@pytest.mark.parametrize("flags", ([], ["--recompute"]))
def test_what_is_not_asked_for_is_as_in_training(parser, flags):
    training = Parser()
    add_settings(training)
    for name in ("recompute", "accumulate"):
        assert getattr(parser().parse_args(flags), name) == getattr(training.parse_args(flags), name), name


SAID = {
    "--params=7.5B --ranks=64": ("120.00", "31.41", "16.64", "1.88", "stage 2, P_os+g, is the first that fits",
                                 "16·b·s·h a block", "10⁹ bytes"),
    "--params=1T --ranks=1024 --hardware=H200": ("H200 counts as 141 GB",),
    "--params=3M --ranks=2 --memory=10GiB": ("10.7 GB",),
    "--params=100B --mp=16 --ranks=400 --batch=32 --recompute --checkpoints=P_a": (),
    "--params=175B --mp=8 --ranks=1024 --sequence=131072 --batch=16 --no-recompute --hardware=A100-80GB": (),
    "--params=14B --ranks=2000 --memory=30GB": (),
    "--params=175B --mp=8 --ranks=1024 --replicate=16 --hardware=H100-80GB": (),
    "--params=1.5B --ranks=64 --dtype=bf16 --accumulate=4 --attention=recomputed --gradients=fp32 "
    "--sequence-parallel=8": ("A step is 4 micro-batches", "computed again in backward", "18 bytes a parameter",
                              "8 ranks share each sequence", "all-to-alls", "nothing is skipped"),
}


@pytest.mark.parametrize("flags", SAID)
def test_it_says_what_was_asked_for_in_lines_that_fit_a_terminal(flags, capsys):
    program.main(["plan", *flags.split()])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for said in SAID[flags]:
        assert said in " ".join(text.split()), said


def test_the_command_writes_and_draws(tmp_path, command):
    assert len(command(f"--params=7.5B --ranks=64 --plot={tmp_path / 'plan.png'}")[1]["rows"]) == 4
    pixels = imread(tmp_path / "plan.png")
    assert pixels.shape[0] > 700 and pixels[..., :3].std() > 0.1


REFUSED = {
    "plan --params=7.5Q": "K, M, B and T",
    "plan --params=0": "above 0",
    "plan --params=1B --hardware=V100": "V100-32GB",
    "plan --params=1B --memory=32Gb5": "units:",
    "plan --params=1B --ranks=0": "from 1 up",
    "plan --params=1B --ranks=6 --mp=4": "accepted: 1, 2, 3, 6",
    "plan --params=1B --ranks=12 --mp=2 --replicate=4": "6 data-parallel ranks are not 4 groups of equal size",
    "plan --params=1B --ranks=4 --replicate=2 --write-deepspeed-config=ds.json": "without --replicate",
    "plan --layers=2 --hidden=-4": "from 1 up",
    "plan --hidden=64": "--layers and --hidden",
    "plan --params=1B --optimizer-bytes=-1": "above 0",
    "plan --params=1B --dtype=fp8": "fp16",
    "plan --params=1B --checkpoints=P_a": "needs --mp",
    "plan --params=1e30": "at most 10¹⁸",
    "plan --params=1B --ranks=1000000000000": "to 10⁹",
    "plan --layers=48 --hidden=1600 --heads=25 --mp=16": "accepted: 1, 5, 25",
    "plan --layers=2 --hidden=100 --mp=64": "accepted: 1, 2, 4, 5",
    "plan --params=1B --plot=picture.txt": ".png, .svg",
    "simulate --params=1B --layers=2": "not both",
    "simulate --layers=2 --hidden=100 --heads=3": "accepted with it: 1, 2, 4, 5",
    "simulate --params=100 --sequence=32": "ask for more parameters",
    "simulate --params=1B --stage=4": "4 is not a file: give 0, 1, 2 or 3, or a Python file",
    "simulate --params=1B --config=C4 --stage=0": "without --stage and --no-recompute",
    "simulate --params=1B --config=C4 --no-recompute": "without --stage and --no-recompute",
}


@pytest.mark.parametrize("command", REFUSED)
def test_the_command_refuses(command, capsys):
    with pytest.raises(SystemExit):
        program.main(command.split())
    assert REFUSED[command] in capsys.readouterr().err
