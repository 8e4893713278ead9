"""The plan beside running code: what `plan` calculates is what `simulate` counts, over a grid of models and stages.

Stated bound: the code's highest moment is at most 1% above the plan's, and at most 8% below."""

import dataclasses
import itertools

import pytest
import torch
from thorough import sample
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.paper import moments, operations
from zero_minimal.paper.fakes import without_values
from zero_minimal.programs.cases import CONSTANT, Case
from zero_minimal.programs.planning import plan
from zero_minimal.programs.simulation import simulate
from zero_minimal.workload.model import GPT, GPTConfig

pytestmark = pytest.mark.thorough

LEAST, MOST = 0.92, 1.01  # the code's peak over the plan's

def shape(layers, hidden, sequence, vocabulary):
    return GPTConfig(layers, hidden, heads=8, sequence=sequence, vocabulary=vocabulary, dropout=0.0)


SHAPES = {  # each is highest at another moment; and sequences of a batch
    "many tokens": (shape(6, 256, 1024, 256), 8),
    "a large vocabulary": (shape(3, 256, 256, 30000), 4),
    "few tokens": (shape(4, 256, 32, 30000), 1),
    "wide blocks": (shape(4, 1024, 64, 1000), 1),
}
GRID = [(name, stage, *rest) for name, stage in itertools.product(SHAPES, range(4))
        for rest in ((64, 1, "fp16", True), (4, 4, "bf16", False))]
GRID += [("many tokens", 2, 64, 8, "fp16", False), ("many tokens", 0, 2, 1, "fp32", False),
         ("many tokens", 3, 64, 2, "bf16", True), ("wide blocks", 3, 1, 1, "fp16", True),
         ("wide blocks", 2, 1, 2, "fp32", False)]
ALWAYS = [("many tokens", 2, 64, 8, "fp16", False), ("few tokens", 3, 64, 1, "fp16", True),
          ("wide blocks", 1, 4, 4, "bf16", False)]


@pytest.mark.parametrize(("name", "stage", "ranks", "parallel", "dtype", "recompute"), sample(GRID, ALWAYS))
def test_the_plan_is_what_running_code_peaks_at(name, stage, ranks, parallel, dtype, recompute):
    config, batch = SHAPES[name]
    config = dataclasses.replace(config, recompute=recompute)
    memory = simulate(Case(config, stage, ranks * parallel, dtype, batch, parallel)).report["memory"]
    row = plan(config, ranks * parallel, 32e9, dtype, batch, parallel)["rows"][stage]
    assert LEAST < memory["peak"] / row["together"] < MOST
    needed = max(memory["peak"], memory["construction_peak"])
    for device, fits in ((needed / LEAST, True), (needed / MOST / 1.001, False)):
        assert plan(config, ranks * parallel, device, dtype, batch, parallel)["rows"][stage]["fits"] == fits


@pytest.mark.parametrize(("name", "checkpoints"), sample([("C2", "P_a"), ("C5", "P_a+cpu")], [("C5", "P_a+cpu")]))
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
    row = plan(config, 1024, 1.5 * 2 * moments.rank_parameters(moments.Work(config, 1, "fp16")))["rows"][2]
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
# torch's counter knows the fused kernels of GPUs; what it says of them holds for the CPU's
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
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
    return (operations.matrices(*sizes, config.vocabulary, 2 * config.sequence, recompute)
            + operations.attention(*sizes, 2, config.sequence, recompute, fused))


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
