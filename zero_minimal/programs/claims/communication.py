"""Claims 11 to 17: who sends what, when, and how much."""

import torch
import torch.distributed as dist

from zero_minimal.core import collectives


def card_11(lab) -> tuple[str, float]:
    """Claim: stage 1 may all-reduce its gradients as data parallelism does: it sends no more for that.

    Refuted by: such a stage 1 that sends more than data parallelism.
    Run: "DDP", and "ZeroRedundancy", which is DDP with a sharded optimizer.
    Number, in MB: what a rank of "ZeroRedundancy" sends in a step beyond one of "DDP", on a ring.
    """
    plain, sharded = lab.train("DDP"), lab.train("ZeroRedundancy")
    more = sharded.sent - plain.sent
    return "true" if more < 0.05 * plain.sent else "false", more / 1e6


def card_12(lab) -> tuple[str, float]:
    """Claim: at stage 1 the ranks gather the shards of optimizer state for the update.

    Refuted by: a step that gathers less than the shards of all ranks together.
    Run: stage 1 with dtype="bf16", where the optimizer's state and the parameters have different sizes.
    Number, in MB: the payload of all that is gathered in a step.
    """
    run = lab.train(1, dtype="bf16")
    gathered, state = run.collectives["all_gather"]["bytes"], run.memory["optimizer"] * lab.ranks
    return "true" if gathered >= state else "false", gathered / 1e6


def card_13(lab) -> tuple[str, float]:
    """Claim: at stage 2 the ranks gather a layer's parameters before they run it.

    Refuted by: a forward and a backward pass in which nothing is gathered.
    Run: stage 2; `when` of a run says what was sent in forward, backward and update.
    Number, in MB: the payload of all that stage 2 gathers in a step.
    """
    run = lab.train(2)
    early = [run.when[phase].get("all_gather", 0) for phase in ("forward", "backward")]
    return "true" if any(early) else "false", run.collectives["all_gather"]["bytes"] / 1e6


def card_14(lab) -> tuple[str, float]:
    """Claim: a reduce-scatter sends half of what an all-reduce of the same payload sends.

    Refuted by: no reduce-scatter, of any library, that sends half.
    Run: under lab.watch(), with a payload of lab.ranks * lab.hidden * 1000 numbers in fp32: an all-reduce, a
    reduce-scatter of torch.distributed, and one of this course (core/collectives.py). `wire` is what the
    system counted; it says nothing where there is no Linux.
    Number, in MB: what this rank really sent for the reduce-scatter of torch.distributed.
    """
    whole = torch.ones(lab.ranks, lab.hidden * 1000)
    part = torch.empty_like(whole[0])
    with lab.watch() as reduced:
        dist.all_reduce(whole.clone())
    with lab.watch() as of_torch:
        dist.reduce_scatter(part, list(whole))
    with lab.watch() as of_course:
        collectives.reduce_scatter(part, whole.view(-1), op="sum")
    if reduced.wire is None:
        return "not shown", 0.0
    is_half = [seen.wire < 0.6 * reduced.wire for seen in (of_torch, of_course)]
    return "true" if all(is_half) else "true if" if any(is_half) else "false", of_torch.wire / 1e6


def card_15(lab) -> tuple[str, float]:
    """Claim: ZeRO makes ranks send more than data parallelism does.

    Refuted by: no stage that sends more.
    Run: stages 0, 1, 2 and 3.
    Number, in MB: what a rank sends in a step of stage 3 beyond one of stage 0, on a ring.
    """
    runs = [lab.train(stage) for stage in range(4)]
    more = [run.sent > 1.05 * runs[0].sent for run in runs[1:]]
    return "true" if all(more) else "true if" if any(more) else "false", (runs[3].sent - runs[0].sent) / 1e6


def card_16(lab) -> tuple[str, float]:
    """Claim: at the start of a step the batch is reduce-scattered, so that each rank gets its part of the data.

    Refuted by: a payload of the reduce-scatters that is the same for any batch.
    Run: stage 2 with lab.batch, and with twice that.
    Number, in MB: the payload of all reduce-scatters of a step.
    """
    runs = [lab.train(2, batch=batch) for batch in (lab.batch, 2 * lab.batch)]
    first, second = (run.collectives["reduce_scatter"]["bytes"] for run in runs)
    return "true" if second > first else "false", first / 1e6


def card_17(lab) -> tuple[str, float]:
    """Claim: the peak of stage 3 is below that of stage 2 because its gradients are reduce-scattered.

    Refuted by: reduce-scatters of the same payload at both, but for some hundred bytes of padding.
    Run: stages 2 and 3, each with its own peak.
    Number, in MB: by how much the peak of stage 3 is lower.
    """
    lab.reset_peak()
    two = lab.train(2)
    lab.reset_peak()
    three = lab.train(3)
    payloads = [run.collectives["reduce_scatter"]["bytes"] for run in (two, three)]
    return "true" if payloads[1] > 1.05 * payloads[0] else "false", (two.peak - three.peak) / 1e6
