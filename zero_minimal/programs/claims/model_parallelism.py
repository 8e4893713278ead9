"""Claims 18 to 22: layers that are cut, and what else takes memory: activations, buffers."""

import torch

from zero_minimal.tensor_parallel import ColumnParallelLinear, g


def card_18(lab) -> tuple[str, float]:
    """Claim: before a column-parallel layer, f splits its input X: each rank gets a part of X.

    Refuted by: a layer whose weight, on each rank, has a column for each of the lab.hidden numbers of a token in X.
    Run: under lab.watch(), forward and then backward of a ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden);
    X is [lab.batch, lab.sequence, lab.hidden], in fp32, and wants a gradient.
    Number, in kB: the payload of what f sends in the two passes.
    """
    layer = ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden)
    x = torch.ones(lab.batch, lab.sequence, lab.hidden, requires_grad=True)
    with lab.watch() as seen:
        layer(x).sum().backward()
    is_split = layer.weight.shape[1] < lab.hidden
    return "true" if is_split else "false", seen.collectives["all_reduce"]["bytes"] / 1e3


def card_19(lab) -> tuple[str, float]:
    """Claim: ReLU of a sum is not the sum of ReLUs, so partial results must be added before it; an example that is to
    show this needs numbers of both signs.

    Refuted by: positive numbers that show it, or mixed ones that do not.
    Run: rank r draws torch.randn(lab.hidden * lab.sequence) with a generator of seed lab.seed + r: its partial
    results. g of tensor_parallel.py adds over the ranks: under lab.watch(), compare ReLU of the sum with the sum of
    ReLUs. Then the same with absolute values.
    Number, in percent: of the elements for which it matters (by more than 1e-5), where signs are mixed.
    """
    dice = torch.Generator().manual_seed(lab.seed + lab.rank.rank)
    mixed = torch.randn(lab.hidden * lab.sequence, generator=dice)
    differs = []
    with lab.watch():
        for part in (mixed, mixed.abs()):
            distance = g(part).relu() - g(part.relu())
            differs.append((distance.abs() > 1e-5).float().mean().item())
    return "true" if differs[0] > 0 and differs[1] == 0 else "false", 100 * differs[0]


def card_20(lab) -> tuple[str, float]:
    """Claim: P_a makes the checkpoints of activations as many times smaller as there are devices.

    Refuted by: a smaller factor, however many ranks share the model.
    Run: simulate C1, and C2, which is C1 with P_a, on lab.devices: both with model_parallel=lab.model_parallel, and
    both with model_parallel=lab.devices. All four with hidden=192, sequence=lab.sequence, batch=1 and steps=1. P_a
    saves the difference between C1 and C2 in `kept`.
    Number, in kB: by how much P_a makes them smaller with lab.model_parallel.
    """
    size = dict(hidden=192, sequence=lab.sequence, batch=1, steps=1)
    whole, saved = 2 * lab.layers * lab.sequence * 192, []  # bytes in fp16
    for parallel in (lab.model_parallel, lab.devices):
        plain, cut = (lab.simulate(config=config, model_parallel=parallel, **size) for config in ("C1", "C2"))
        saved.append(plain.kept - cut.kept)
    holds = [abs(each - whole * (1 - 1 / lab.devices)) < 0.01 * whole for each in saved]
    return "true" if all(holds) else "true if" if any(holds) else "false", saved[0] / 1e3


def card_21(lab) -> tuple[str, float]:
    """Claim: a configuration's bucket size of 500_000_000 elements takes 500 MB.

    Refuted by: a peak that rises by another number of MB.
    Run: with buckets of lab.elements elements of fp16: simulate stage 2 on 256 ranks, with 6 * lab.elements parameters
    in 12 layers, sequence=8 and steps=1; then with buckets 20 times smaller.
    Number, in GB: by how much the large buckets raise the peak.
    """
    model = dict(ranks=256, parameters=6 * lab.elements, layers=12, sequence=8, steps=1)
    large, small = (lab.simulate(2, bucket_bytes=2 * lab.elements // share, **model) for share in (1, 20))
    more = large.peak - small.peak
    return "true" if more < 1.1 * lab.elements else "false", more / 1e9


def card_22(lab) -> tuple[str, float]:
    """Claim: between forward and backward a model of 32 blocks of width 4096 (7 billion parameters) keeps 10 to 20 GB
    of activations for 32 sequences of 2048 tokens, in 16 bit.

    Refuted by: blocks that keep more, in each way to run them.
    Run: simulate models of 2 and of 4 blocks with hidden=4096 and steps=1, with recompute=True and with
    recompute=False. At any stage the difference in `kept` is what two blocks keep (peak holds more).
    Number, in GB: what 32 blocks keep without recomputation, for lab.sequences of lab.tokens tokens.
    """
    def kept(recompute, batch, sequence):
        size = dict(hidden=4096, recompute=recompute, batch=batch, sequence=sequence, steps=1)
        two, four = (lab.simulate(layers=layers, **size).kept for layers in (2, 4))
        return 16 * (four - two)

    fits = [kept(recompute, 32, 2048) < 20e9 for recompute in (False, True)]
    verdict = "true" if all(fits) else "true if" if any(fits) else "false"
    return verdict, kept(False, lab.sequences, lab.tokens) / 1e9
