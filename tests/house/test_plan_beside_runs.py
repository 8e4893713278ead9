"""The plan beside running code: what `plan` calculates is what `simulate` counts, over a grid of models and stages, and
of what both take besides: micro-batches, kinds of attention, gradients in fp32, ranks that share a sequence.

Stated bound: the code's peak is at most 1% above the plan's, and at most 8% below."""

import dataclasses
import itertools
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import FSDP2_RUNS_ON_THE_CPU
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from zero_minimal import __main__ as program
from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.core.units import find_units
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper import formulas, kernels
from zero_minimal.paper.fakes import without_values
from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.moments import Work
from zero_minimal.paper.quantities import size_text
from zero_minimal.processes import ranks
from zero_minimal.programs import deepspeed_written
from zero_minimal.programs.cases import CONSTANT, Case
from zero_minimal.programs.measured import FUSED
from zero_minimal.programs.planning import plan
from zero_minimal.programs.registry import STAGES
from zero_minimal.programs.simulation import simulate
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

LEAST, MOST = 0.92, 1.01  # the code's peak over the plan's


def shape(layers, hidden, sequence, vocabulary):
    return GPTConfig(layers, hidden, heads=8, sequence=sequence, vocabulary=vocabulary, dropout=0.0)


LONG = shape(6, 256, 512, 256)
SHAPES = {  # and sequences of a batch. The first four are highest each at another moment
    "many tokens": (shape(6, 256, 1024, 256), 8),
    "a large vocabulary": (shape(3, 256, 256, 30000), 4),
    "few tokens": (shape(4, 256, 32, 30000), 1),
    "wide blocks": (shape(4, 1024, 64, 1000), 1),
    "long": (LONG, 8),
    "wide": (shape(4, 512, 128, 1000), 16),
}
GRID = [(name, stage, *rest, {}) for name, stage in itertools.product([*SHAPES][:4], range(4))
        for rest in ((64, 1, "fp16", True), (4, 4, "bf16", False))]
GRID += [("many tokens", 2, 64, 8, "fp16", False, {}), ("many tokens", 0, 2, 1, "fp32", False, {}),
         ("many tokens", 3, 64, 2, "bf16", True, {}), ("wide blocks", 3, 1, 1, "fp16", True, {}),
         ("wide blocks", 2, 1, 2, "fp32", False, {})]
GRID += [(name, stage, 64, 1, "fp16", recompute, {"attention": attention}) for name in ("long", "wide")
         for attention, recompute, stage in (
             ("unfused", False, 0), ("unfused", False, 2), ("unfused", True, 1),
             ("recomputed", False, 3), ("recomputed", True, 2), ("recomputed", True, 3))]
GRID += [("long", stage, 64, 1, "fp16", False, {"accumulate": 3}) for stage in range(4)]


@pytest.mark.parametrize("name, stage, ranks, parallel, dtype, recompute, options", GRID)
def test_the_plan_is_what_running_code_peaks_at(name, stage, ranks, parallel, dtype, recompute, options):
    config, batch = SHAPES[name]
    config = dataclasses.replace(config, recompute=recompute)
    report = simulate(Case(config, stage, ranks * parallel, dtype, batch, parallel, **options)).report
    memory, traffic = report["memory"], report["traffic"]

    def row(device):
        return plan(config, ranks * parallel, device, dtype, batch, parallel, **options)["rows"][stage]

    assert LEAST < memory["peak"] / row(32e9)["together"] < MOST
    needed = max(memory["peak"], memory["construction_peak"])
    assert [row(device)["fits"] for device in (needed / LEAST, needed / MOST / 1.001)] == [True, False]
    sent = row(32e9)["sent_bytes"]
    assert sent == traffic["theory_bytes"]
    if name == "long" and stage == 3:  # the root and the last block are not gathered again for backward
        assert 0.85 * sent < traffic["sent_bytes"] < sent
    elif stage < 3 and parallel == 1:
        assert traffic["sent_bytes"] - traffic["padding_bytes"] == pytest.approx(sent, rel=1e-6)


@pytest.mark.parametrize(("name", "checkpoints"), [("C2", "P_a"), ("C5", "P_a+cpu")])
def test_checkpoints_that_are_cut(name, checkpoints):
    """A slab is as large as all checkpoints; the constant buffers come on top."""
    config, batch = SHAPES["many tokens"]
    run = simulate(Case(config, ranks=64, batch=batch, model_parallel=4, config=name)).report
    recomputed = dataclasses.replace(config, recompute=True)
    told = plan(recomputed, 64, 32e9, batch=batch, model_parallel=4, checkpoints=checkpoints)["rows"][run["stage"]]
    buffers = run["memory"]["peak_by_category"]["buffers"]
    assert LEAST < (run["memory"]["peak"] - buffers) / told["together"] < MOST


def test_without_recomputation_a_block_keeps_16_and_model_parallelism_divides_12_of_them():
    """75 GB were said to fit where the code peaked at 86: 12 were counted, and M divided nothing."""
    config, batch = SHAPES["many tokens"]
    unit = batch * config.sequence * config.hidden * 2
    for parallel, kept in ((1, 16), (2, 10), (8, 5.5)):
        told = plan(config, 64, 32e9, batch=batch, model_parallel=parallel)
        assert told["activations"]["all"] / unit / config.layers == pytest.approx(kept, rel=0.02)


def test_a_step_that_fits_is_of_no_use_if_the_model_cannot_be_built():
    """Stages 0 to 2 copy the model into flat memory: for a moment there are two."""
    config, _ = SHAPES["wide blocks"]
    config = dataclasses.replace(config, recompute=True)
    row = plan(config, 1024, 1.5 * 2 * Work(config).parts().whole)["rows"][2]
    assert row["step_fits"] and row["states_fit"] and not row["fits"] and row["fewest_data_parallel_ranks"] is None
    memory = simulate(Case(config, 2, 1024)).report["memory"]
    assert memory["peak"] < memory["construction_peak"] == pytest.approx(row["construction"], rel=0.01)


@pytest.mark.parametrize("layers", [2, 6])
def test_constant_buffers_do_not_grow_with_the_model(layers):
    config = GPTConfig(layers=layers, hidden=2048, heads=16, sequence=8, vocabulary=1000, dropout=0.0)
    told = simulate(Case(config, ranks=32, model_parallel=2, config="C4")).report
    assert told["bucket_bytes"] == CONSTANT and told["parameters_of_rank"] * 2 > CONSTANT
    assert 2 * CONSTANT <= told["memory"]["peak_by_category"]["buffers"] < 2.1 * CONSTANT


# ----------------------------------------------------------------------------------------------------------- operations

SMALL = GPTConfig(layers=3, hidden=64, heads=4, sequence=32, vocabulary=40, dropout=0.0)
KERNELS = FUSED | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v),
}


def counted(config: GPTConfig, device: str, ours: bool = False) -> int:
    """Operations of a forward and a backward pass of 2 sequences, as torch counts them."""
    with torch.device(device):
        model = GPT(config)
        tokens = torch.zeros(2, config.sequence, dtype=torch.int64)
    if ours:
        checkpoint_blocks(model)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


def formula(config: GPTConfig, recompute: bool, fused: bool = True) -> int:
    sizes = (config.layers, config.hidden)
    return (formulas.matrix_operations(*sizes, config.vocabulary, 2 * config.sequence, recompute)
            + formulas.attention_operations(*sizes, 2, config.sequence, recompute, fused))


@pytest.mark.parametrize("sequence", [32, 512])
def test_operations_are_what_torch_counts(sequence):
    config = dataclasses.replace(SMALL, sequence=sequence)
    with without_values():
        assert counted(config, "cpu") == formula(config, recompute=False)
    assert counted(config, "meta") == formula(config, recompute=False, fused=False)  # there attention is not fused


def test_operations_with_recomputation_are_what_torch_counts():
    """Our own checkpoint runs all of forward again; torch's leaves out a block's last product, [t, 4h] × [4h, h]."""
    assert counted(SMALL, "cpu", ours=True) == formula(SMALL, recompute=True)
    last = 2 * (2 * SMALL.sequence) * 4 * SMALL.hidden**2 * SMALL.layers
    assert counted(dataclasses.replace(SMALL, recompute=True), "cpu") == formula(SMALL, recompute=True) - last


def test_the_plan_counts_attention():
    """Of a model of 1B at 131,072 tokens it is most of the work, of which a causal kernel does half."""
    config = GPTConfig(layers=39, hidden=1408, heads=11, sequence=131072, vocabulary=49750, dropout=0.0, recompute=True)
    told = plan(config, 8, 80e9)
    both = told["matrix_operations"] + 2 * told["attention_operations"]
    with without_values():
        two_layers = dataclasses.replace(config, layers=2, recompute=False)
        assert counted(two_layers, "cpu") == formula(two_layers, recompute=False)
    assert both == formula(config, recompute=True) / 2  # of one sequence
    assert told["attention_operations"] > 5 * told["matrix_operations"]
    assert told["compute_seconds"] * 0.4 * 125e12 == pytest.approx(both - told["attention_operations"])
    shared = plan(dataclasses.replace(config, heads=16, hidden=1408), 16, 80e9, model_parallel=8)
    assert shared["compute_seconds"] == pytest.approx(told["compute_seconds"] / 8)


# ------------------------------------------------------------------------------------------------------------ attention


def test_selective_recomputation_spares_the_scores_of_all_blocks_but_one():
    """What Korthikanti et al. call so: blocks keep what they keep with a fused kernel."""
    unfused, recomputed, fused = (plan(LONG, 64, 32e9, batch=8, attention=kind)["activations"]["all"]
                                  for kind in ("unfused", "recomputed", "fused"))
    scores = Work(LONG, 8, "fp16").scores()
    assert scores == 8 * 8 * 512**2 * 2
    assert unfused - recomputed == LONG.layers * scores
    assert recomputed == pytest.approx(fused, rel=0.01)  # without the fused kernel's statistics


def test_the_kernels_compute_what_torchs_does():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 24, 8, requires_grad=True) for _ in range(3))
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(query, key, value, is_causal=True).square().sum(),
                                 (query, key, value))
    for kind in kernels.ATTENTION:
        result = kernels.kernel(kind)(query, key, value, dropout_p=0.0, is_causal=True)
        for one, other in zip(torch.autograd.grad(result.square().sum(), (query, key, value)), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_computed_again_is_what_torch_counts():
    """Attention alone: its two products once more."""
    model, tokens = GPT(SMALL), torch.zeros(2, 32, dtype=torch.int64)
    for block in model.blocks:
        block.attention.attend = kernels.kernel("recomputed")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    last = 2 * 2 * 32**2 * 64 * 3  # torch's own checkpoint leaves out the last product
    assert counter.get_total_flops() == (formulas.matrix_operations(3, 64, 40, 64, False)
                                         + formulas.attention_operations(3, 64, 2, 32, True, fused=False) - last)
    told = plan(SMALL, 1, 32e9, batch=2, attention="recomputed")
    assert told["attention_operations"] == formulas.attention_operations(3, 64, 2, 32, True, fused=False)


# ------------------------------------------------------------------------------------------------------ micro-batches


def test_micro_batches_of_an_offloaded_rank_cross_the_bus_each_time():
    bus = simulate(Case(LONG, 2, 64, "fp16", 1, accumulate=3, offload="cpu")).report["bus"]
    rows = plan(LONG, 64, 32e9, "fp16", accumulate=3, offloaded=True)["rows"]
    assert rows[2]["bus_bytes"] == pytest.approx(bus["to_host"], rel=2e-3)  # the code pads
    assert bus["to_host"] == 3 * bus["to_device"] and rows[2]["bus_bytes"] == 3 * rows[1]["bus_bytes"]


# ----------------------------------------------------------------------------------------------------- fp32 gradients


@pytest.mark.parametrize("parallel", [1, 8, 64])
def test_fp32_gradients_make_18_bytes_as_megatron_says(parallel):
    """Megatron Core's user guide, "Distributed Optimizer": 18, and 6 + 12/d; and 2Ψ + 16Ψ/N if they are sharded."""
    states = [sum(formulas.model_states(stage, 1000, parallel, "bf16", gradient_bytes=4).values())
              for stage in range(4)]
    assert states == pytest.approx([18000, 6000 + 12000 / parallel, 2000 + 16000 / parallel, 18000 / parallel])


def fsdp2_sends(lines, settings):
    """What a step of FSDP2's lines sends, and how many elements the model has."""
    with ranks.start() as rank:
        model, batches = GPT(settings.model_config()), iter(loop.training_batches(settings, rank.rank))
        found = {"model": model, "batches": batches}
        elements = sum(param.numel() for param in model.parameters())
        set_up, step = lines.split("\n\nfor micro")
        exec(set_up, found)
        exec("for micro" + step, found)
        with TrafficMeter() as meter:
            exec("for micro" + step, found)
        return meter.sent_bytes, elements


def test_fp32_gradients_are_what_fsdp2_sends():
    """The lines that plan prints, with gradients in fp32: bf16 gathered twice, and fp32 reduced."""
    settings = Settings(layers=3, hidden=64, heads=4, sequence=32, batch=2)
    told = plan(dataclasses.replace(settings.model_config(), vocabulary=256), 2, 32e9, "bf16", 2, gradient_bytes=4)
    for row in told["rows"]:
        states = formulas.model_states(row["stage"], told["parameters"], 2, "bf16", gradient_bytes=4)
        assert {name: row[name] for name in states} == states
        assert row["sent_bytes"] == formulas.traffic(row["stage"], told["parameters"], 2, "bf16", gradient_bytes=4)
    lines = deepspeed_written.fsdp2(told, 3)
    assert "reduce_dtype=torch.float32" in lines
    sent, elements = ranks.run(fsdp2_sends, 2, lines, settings, device="cpu", timeout=60)[0]
    assert sent == pytest.approx(formulas.traffic(3, elements, 2, "bf16", gradient_bytes=4), rel=0.1)
    assert sent > 1.1 * formulas.traffic(3, elements, 2, "bf16")
    content = deepspeed_written.deepspeed(settings.model_config(), told, 3)
    assert content["communication_data_type"] == content["data_types"]["grad_accum_dtype"] == "fp32"


def test_what_reduces_in_fp32_sends_more_at_each_stage():
    sent = [[formulas.traffic(stage, 100, 2, "bf16", 3, gradient_bytes=size) for stage in range(4)]
            for size in (None, 4)]
    assert sent == [[200, 200, 400, 900], [400, 300, 700, 1200]]


# ---------------------------------------------------------------------------------- groups that each keep all states


def two_groups():
    """2 groups of 2 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def fsdp2s_hsdp(model):
    """An optimizer over the model, which FSDP2 has cut, a block at a time."""
    mesh = two_groups()
    for unit in find_units(model)[1:]:
        fully_shard(unit.module, mesh=mesh)
    return torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters(), lr=1e-2)


def of_rank(rank, step=0):
    """Each rank's own tokens."""
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(10 * step + rank.rank))


def hsdp_step():
    """States and traffic of FSDP2's HSDP in fp32."""
    with ranks.start() as rank, Ledger() as ledger:
        model = GPT(GPTConfig(layers=3, hidden=64, sequence=32))
        elements, of_root = (sum(param.numel() for param in params)
                             for params in (model.parameters(), find_units(model)[0].params))
        optimizer, tokens = fsdp2s_hsdp(model), of_rank(rank)
        ledger.watch(model, optimizer)
        with TrafficMeter() as meter:
            model(tokens, tokens).backward()
            optimizer.step()
        shards = sum(param.to_local().untyped_storage().nbytes() for param in model.parameters())
        return elements, of_root, ledger.states() | {"parameters": shards}, meter.collectives, meter.sent_bytes


@pytest.mark.skipif(not FSDP2_RUNS_ON_THE_CPU, reason="FSDP2 does not run on the CPU with this torch")
def test_groups_that_keep_all_states_hold_and_send_what_fsdp2s_hsdp_does():
    for elements, of_root, states, called, sent in ranks.run(hsdp_step, 4, device="cpu", timeout=60):
        for name, size in formulas.model_states(3, elements, 2, "fp32").items():
            assert states[name] == size, name
        between = formulas.traffic_between(elements, 2, 2, "fp32")
        assert 2 * called["all_reduce"]["bytes"] / 2 == between  # nothing else is all-reduced
        # FSDP2 keeps the root whole from forward to backward: it gathers that once
        assert sent - between == formulas.traffic(3, elements, 2, "fp32") - 4 * of_root / 2


def three_steps(kind):
    """Losses of HSDP, and what a rank sends within its group and between groups in the last of three steps. kind: of a
    stage, with the lines of questions.md; None: FSDP2's."""
    with ranks.start() as rank:
        torch.manual_seed(0)
        model, losses = GPT(GPTConfig(layers=3, hidden=64, sequence=32, dropout=0.0)), []
        elements = sum(param.numel() for param in model.parameters())
        mesh, within, between = two_groups(), TrafficMeter(), TrafficMeter()
        zero = kind(model, torch.optim.AdamW, lr=1e-2, group=mesh.get_group("shard")) if kind else fsdp2s_hsdp(model)
        for step in range(3):
            tokens, sent = of_rank(rank, step), (within.sent_bytes, between.sent_bytes)
            with within:
                losses.append(model(tokens, tokens))
                losses[-1].backward()
            if kind:
                with between:
                    for shard in zero.reduced_gradients():
                        dist.all_reduce(shard, group=mesh.get_group("replicate"))
                        shard /= mesh.size(0)
            with within:
                zero.step()
            zero.zero_grad()
        return elements, [loss.item() for loss in losses], within.sent_bytes - sent[0], between.sent_bytes - sent[1]


@pytest.mark.skipif(not FSDP2_RUNS_ON_THE_CPU, reason="FSDP2 does not run on the CPU with this torch")
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_one_all_reduce_between_groups_makes_hsdp_of_a_stage(stage):
    wanted, found = (ranks.run(three_steps, 4, kind, device="cpu", timeout=60) for kind in (None, STAGES[stage]))
    for (_, losses, *_), (elements, same, within, between) in zip(wanted, found, strict=True):
        assert same == pytest.approx(losses, rel=1e-6)
        assert between == formulas.traffic_between(elements, 2, 2, "fp32")
        by_formula = formulas.traffic(stage, elements, 2, "fp32")
        # at stage 3 the root and the last block are whole when backward begins, and are not gathered again
        assert within == by_formula if stage < 3 else 0.8 * by_formula < within < by_formula


# ---------------------------------------------------------------------------------------- ranks that share a sequence


def ulysses(query, key, value):
    """Attention of a rank's tokens [b, s/S, heads, size], as DeepSpeed-Ulysses has it: all tokens of some heads."""
    count = dist.get_world_size()

    def turn(x, cut, join):
        parts = [part.contiguous() for part in x.chunk(count, cut)]
        received = torch.empty_like(torch.stack(parts))
        dist.all_to_all_single(received, torch.stack(parts))
        return torch.cat(tuple(received), join)

    query, key, value = (turn(x, 2, 1).transpose(1, 2) for x in (query, key, value))  # [b, heads/S, s, size]
    return turn(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), 1, 2)


def ulysses_forward():
    with ranks.start() as rank:
        torch.manual_seed(0)
        whole = torch.randn(3, 2, 24, 4, 8)  # query, key, value of 2 sequences of 24 tokens, with 4 heads
        own = whole.chunk(rank.world_size, 2)[rank.rank]
        with TrafficMeter() as meter:
            result = ulysses(*own)
        wanted = F.scaled_dot_product_attention(*whole.transpose(2, 3), is_causal=True).transpose(1, 2)
        torch.testing.assert_close(result, wanted.chunk(rank.world_size, 1)[rank.rank])
        return meter.sent_bytes


@pytest.mark.parametrize("world_size", (2, 4))
def test_all_to_alls_of_ranks_that_share_a_sequence_are_counted(world_size):
    """Forward is half of a step that recomputes nothing."""
    sent = ranks.run(ulysses_forward, world_size, device="cpu", timeout=60)[0]
    assert sent == formulas.sequence_parallel_traffic(1, 32, 2, 24, "fp32", world_size, recompute=False) / 2


def test_ranks_that_share_a_sequence_keep_what_shorter_ones_would():
    """Activations are those of s/S tokens, which stand beside code above; all ranks share states."""
    short = dataclasses.replace(LONG, sequence=128)
    shared, alone = Work(LONG, 8, "bf16", sequence_parallel=4), Work(short, 8, "bf16")
    for name in ("block", "kept", "logits", "at_work"):
        assert getattr(shared, name)() == getattr(alone, name)()
    assert shared.scores() == 4 * alone.scores()  # a quarter of the heads, and all tokens
    told, whole = (plan(LONG, 64, 32e9, "bf16", 8, sequence_parallel=count) for count in (4, 1))
    assert told["rows"][3]["states"] == whole["rows"][3]["states"]
    assert [count["rows"][3]["fewest_data_parallel_ranks"] for count in (told, whole)] == [4, 1]
    assert told["compute_seconds"] == pytest.approx(whole["compute_seconds"] / 4)
    for name, size in whole["activations"].items():
        assert told["activations"][name] == size / 4, name
    assert told["sequence_parallel_bytes"] == 8 * 6 * 8 * 512 * 256 / 4 * 2 * 3 / 4


@pytest.mark.parametrize(("options", "said"), [
    ({"sequence_parallel": 3}, "64 data-parallel ranks are not groups of 3"),
    ({"sequence_parallel": 16}, "8 heads"), ({"attention": "flash"}, "attention must be one of fused"),
    ({"gradient_bytes": 4, "dtype": "fp32"}, "for 16-bit parameters"),
    ({"gradient_bytes": 4, "offloaded": True}, "that are not offloaded"),
])
def test_what_cannot_be_planned_is_said(options, said):
    with pytest.raises(ValueError, match=said):
        plan(LONG, 64, 32e9, **options)


# -------------------------------------------------------------------------------------------------------- for a reader


def test_markdown_has_the_figures_of_the_plan(tmp_path, capsys):
    program.main(["plan", "--params=1.5B", "--ranks=64", "--dtype=bf16", "--accumulate=4", "--attention=recomputed",
                  "--gradients=fp32", "--sequence-parallel=8", "--hardware=H100-80GB", "--markdown",
                  f"--json={tmp_path / 'plan.json'}"])
    said, told = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line[:1] == "|"]
    assert {len(cells) for cells in lines} == {13} and set(lines[1]) == {"---"}
    assert [cells[0] for cells in lines[2:]] == list("0123")
    for cells, row in zip(lines[2:], told["rows"], strict=True):
        assert cells[2:5] == [size_text(row[name]) for name in formulas.STATES]
        assert cells[7].startswith(size_text(row["together"])) and cells[8] == ("yes" if row["fits"] else "no")
    for part in ("4 of these in a step of 32,768 tokens", "attention recomputed", "gradients 4 bytes",
                 "H100-80GB: 80 GB", "NVIDIA H100 Tensor Core GPU data sheet"):
        assert part in said


def test_markdown_of_a_simulation(capsys):
    program.main(["simulate", "--layers", "2", "--hidden", "64", "--vocabulary", "64", "--sequence", "64", "--ranks",
                  "8", "--stage", "2", "--accumulate", "2", "--attention", "unfused", "--markdown"])
    said = capsys.readouterr().out
    assert "| parameters | 216.6 KB | 216.6 KB |" in said and "2 micro-batches a step, attention unfused" in said
    assert {line.count("|") for line in said.splitlines() if line.startswith("|")} == {4}


def test_every_device_names_its_data_sheet():
    assert all("data sheet" in gpu.source or "white paper" in gpu.source for gpu in GPUS.values())
    assert {"T4", "L40S", "H200"} <= set(GPUS)
