"""Claims 1 to 6: what one GPU, one script and one table of results are said to have shown."""

from statistics import mean


def card_01(lab) -> tuple[str, float]:
    """Claim: with ZeRO a model reaches a lower loss than without it, in training and in validation.

    Refuted by: pairs of runs, alike in all but ZeRO, whose losses are the same.
    Run: for each of lab.seeds stage 0, and stage 2 with a new model; then stage 2 once more, which goes on with
    the model of stage 0.
    Number, in nats: by how much the validation loss of that last run is below that of stage 0; mean of the seeds.
    """
    lower, gains = [], []
    for seed in lab.seeds:
        plain, zero = lab.train(0, seed=seed), lab.train(2, seed=seed)
        lower.append(plain.validation - zero.validation)
        gains.append(plain.validation - lab.train(2, seed=seed, model=plain.model).validation)
    return "true" if mean(lower) > 0.01 * mean(gains) else "false", mean(gains)


def card_02(lab) -> tuple[str, float]:
    """Claim: `arguments.zero = {"stage": 2}`, written below the line that made the arguments, turns stage 2 on.

    Refuted by: a run with such arguments that is a run without ZeRO.
    Run: train(arguments=…) with arguments to which the configuration was given later, and with arguments that were
    made with it.
    Number, in MB: of model states that the first holds on this rank beyond the second.
    """
    late = lab.arguments()
    late.zero = {"stage": 2}
    first, second = lab.train(arguments=late), lab.train(arguments=lab.arguments(zero={"stage": 2}))
    return "true" if first.states == second.states else "false", (first.states - second.states) / 1e6


def card_03(lab) -> tuple[str, float]:
    """Claim: stage 3 was run after stage 0, in one process, and the meter showed no lower peak. This shows that stage 3
    saves no memory.

    Refuted by: a meter that would have shown the same if stage 3 saved much.
    Run: stage 0, then stage 3, and whatever it takes to see the peak of each by itself.
    Number, in MB: by how much the peak of stage 3 is below that of stage 0 (negative where it is above).
    """
    lab.reset_peak()
    plain = lab.train(0)
    lab.reset_peak()
    zero = lab.train(3)
    return "true" if zero.peak >= plain.peak else "not shown", (plain.peak - zero.peak) / 1e6


def card_04(lab) -> tuple[str, float]:
    """Claim: ZeRO makes the memory that model states take on a single device smaller.

    Refuted by: one rank by itself whose model states are as large with ZeRO as without it, in each way to run it.
    Run: with ranks=1 and dtype="bf16": stage 0, stage 2, and stage 2 with offload=True.
    Number, in MB: the most that one of the two runs of stage 2 takes off the model states on the device.
    """
    alone = dict(ranks=1, dtype="bf16")
    plain, zero, offloaded = lab.train(0, **alone), lab.train(2, **alone), lab.train(2, offload=True, **alone)
    saved = plain.states - offloaded.states
    if zero.states < 0.95 * plain.states:
        return "true", saved / 1e6
    return "true if" if saved > 0.05 * plain.states else "false", saved / 1e6


def card_05(lab) -> tuple[str, float]:
    """Claim: ZeRO with batch 2b reached another loss than no ZeRO with batch b. This shows what ZeRO does to the loss.

    Refuted by: something else that differed, and makes this difference alone.
    Run: for each of lab.seeds stage 0 with lab.batch, stage 0 with twice that, and stage 2 with twice that.
    Number, in nats: by how much the larger batch alone lowers the validation loss; mean of the seeds.
    """
    by_zero, by_batch = [], []
    for seed in lab.seeds:
        small, large = lab.train(0, seed=seed), lab.train(0, seed=seed, batch=2 * lab.batch)
        zero = lab.train(2, seed=seed, batch=2 * lab.batch)
        by_zero.append(large.validation - zero.validation)
        by_batch.append(small.validation - large.validation)
    return "true" if abs(mean(by_zero)) > 0.99 * abs(mean(by_batch)) else "not shown", mean(by_batch)


def card_06(lab) -> tuple[str, float]:
    """Claim: on N devices stage 1 makes model states N times smaller.

    Refuted by: a factor that stays far below N.
    Run: one rank of lab.devices, simulated at stages 0 and 1, in 16 bit.
    Number: by which factor model states are smaller at stage 1.
    """
    factor = lab.simulate(0, steps=1).states / lab.simulate(1, steps=1).states
    return "true" if factor > 0.9 * lab.devices else "false", factor
