"""Claims about ZeRO, each settled by a run in a Lab: card_01 to card_28.

A card is a function of a lab (programs/lab.py). It runs something that could refute its claim, and returns a verdict
and a number, as in `return "true if", 3.75`. The verdict is "true", "true if", "false" or "not shown". The card says
what the number is, and its unit: GB are 10⁹ bytes and MB 10⁶. All sizes come from the lab; every rank runs the card.
"""

from statistics import mean

import torch
import torch.distributed as dist

from zero_minimal.core import collectives
from zero_minimal.tensor_parallel import ColumnParallelLinear, g

# Write your name and grade this file once: the grader names your eight cards. The name also draws the sizes that they
# run with. Write no other card.
NAME = ""

# Three answers in words, for your teacher: at least 40 words each. The grader counts the words, and reads none.

# Which of your eight claims did you believe, or would others? Which of its words make it believable, and on which rung
# of the page's ladder does it fall? If it is true: on which rung did you expect it to fall?
BELIEVED = ""

# One of your cards has evidence that is not enough. Which experiment should its author have made? What differs and what
# is alike, how many seeds, and which result would make you say "false", and which one "true"?
DESIGNED = ""

# Which of your own eight runs is the weakest? Name what else could explain its number, or what this machine cannot
# show, and the run on a larger one that would decide.
WEAKEST = ""


def card_01(lab) -> tuple[str, float]:
    """Claim: with ZeRO a model reaches a lower loss than without it, in training and in validation.

    Refuted by: pairs of runs, alike in all but ZeRO, whose losses are the same.
    Run: for each of lab.seeds stage 0, and stage 2 with a new model; then stage 2 once more, which goes on with
    the model of stage 0.
    Number, in nats: by how much the validation loss of that last run is below that of stage 0; mean of the seeds.
    """
    # card 1: for three seeds: a run without ZeRO, one with ZeRO and a new model, and one with ZeRO
    # that goes on with the model of the first. All with one batch.
    # - lab.train(stage, seed=…, model=…): a Run. model=None: a new model; model=run.model: it goes
    #   on with that one
    # - run.validation: loss on text that was held out, in nats, mean of the ranks
    raise NotImplementedError("card 1: card_01")


def card_02(lab) -> tuple[str, float]:
    """Claim: `arguments.zero = {"stage": 2}`, written below the line that made the arguments, turns stage 2 on.

    Refuted by: a run with such arguments that is a run without ZeRO.
    Run: train(arguments=…) with arguments to which the configuration was given later, and with arguments that were
    made with it.
    Number, in MB: of model states that the first holds on this rank beyond the second.
    """
    # card 2: two runs, with arguments whose configuration came late, and with arguments that were
    # made with it.
    # - lab.arguments(zero=…): arguments, with a configuration such as {"stage": 2}.
    #   lab.train(arguments=…) does what they plan.
    # - run.stage: the stage that it really was. run.states: bytes of all model states on this rank
    raise NotImplementedError("card 2: card_02")


def card_03(lab) -> tuple[str, float]:
    """Claim: stage 3 was run after stage 0, in one process, and the meter showed no lower peak. This shows that stage 3
    saves no memory.

    Refuted by: a meter that would have shown the same if stage 3 saved much.
    Run: stage 0, then stage 3, and whatever it takes to see the peak of each by itself.
    Number, in MB: by how much the peak of stage 3 is below that of stage 0 (negative where it is above).
    """
    # card 3: stages 0 and 3 ran with new models, and the meter began at zero before each.
    # - lab.reset_peak(): the meter begins at zero
    # - run.peak: bytes that the meter shows when this run has ended
    raise NotImplementedError("card 3: card_03")


def card_04(lab) -> tuple[str, float]:
    """Claim: ZeRO makes the memory that model states take on a single device smaller.

    Refuted by: one rank by itself whose model states are as large with ZeRO as without it, in each way to run it.
    Run: with ranks=1 and dtype="bf16": stage 0, stage 2, and stage 2 with offload=True.
    Number, in MB: the most that one of the two runs of stage 2 takes off the model states on the device.
    """
    # card 4: one rank by itself ran stage 0, stage 2, and stage 2 with offload=True; all in bf16.
    # - lab.train(stage, ranks=1, dtype="bf16", offload=…): each rank by itself. offload=True:
    #   optimizer state and update are on the host
    # - run.states: bytes of model states on the device
    raise NotImplementedError("card 4: card_04")


def card_05(lab) -> tuple[str, float]:
    """Claim: ZeRO with batch 2b reached another loss than no ZeRO with batch b. This shows what ZeRO does to the loss.

    Refuted by: something else that differed, and makes this difference alone.
    Run: for each of lab.seeds stage 0 with lab.batch, stage 0 with twice that, and stage 2 with twice that.
    Number, in nats: by how much the larger batch alone lowers the validation loss; mean of the seeds.
    """
    # card 5: for three seeds: both batches without ZeRO, and the larger one with ZeRO.
    # - lab.train(stage, seed=…, batch=…): a Run of a new model
    # - run.validation: loss on text that was held out, in nats, mean of the ranks
    raise NotImplementedError("card 5: card_05")


def card_06(lab) -> tuple[str, float]:
    """Claim: on N devices stage 1 makes model states N times smaller.

    Refuted by: a factor that stays far below N.
    Run: one rank of lab.devices, simulated at stages 0 and 1, in 16 bit.
    Number: by which factor model states are smaller at stage 1.
    """
    # card 6: one rank of lab.devices was simulated at stages 0 and 1.
    # - lab.simulate(stage, steps=1): a Run of one rank of lab.devices, without values: its bytes
    #   are exact
    # - run.states: bytes of all model states
    raise NotImplementedError("card 6: card_06")


def card_07(lab) -> tuple[str, float]:
    """Claim: in mixed precision Ψ + Ψ + 12Ψ = 16Ψ: a device without ZeRO holds 16 numbers for each parameter.

    Refuted by: another count of numbers, where each has as many bytes as its dtype says.
    Run: simulate stage 0 in fp16, with parameters=lab.parameters, layers=12 (more blocks take long, and change nothing
    here), sequence=8 and steps=1. The optimizer's numbers are fp32.
    Number, in billions: of numbers in the model states of the device.
    """
    # card 7: stage 0 was simulated with lab.parameters, in fp16.
    # - lab.simulate(stage, parameters=…, layers=12, sequence=8, steps=1): a Run of one rank of
    #   lab.devices, in fp16
    # - run.memory: {"parameters": …, "gradients": …, "optimizer": …}, bytes
    # - run.parameters: elements of the model, a count
    raise NotImplementedError("card 7: card_07")


def card_08(lab) -> tuple[str, float]:
    """Claim: stage 1 makes model states 4 times smaller, stage 2 makes them 8 times smaller.

    Refuted by: factors that stay far from 4 and 8, however many devices there are.
    Run: simulate stages 0 and 2 on lab.devices, and both again on 1024 devices (ranks=1024).
    Number: by which factor model states are smaller at stage 2, on lab.devices.
    """
    # card 8: stages 0 and 2 were simulated on lab.devices, and on 1024 devices.
    # - lab.simulate(stage, ranks=…, steps=1): a Run of one rank of so many, in fp16; None: of
    #   lab.devices
    # - run.states: bytes of all model states
    raise NotImplementedError("card 8: card_08")


def card_09(lab) -> tuple[str, float]:
    """Claim: Adam keeps two numbers for each parameter, so that the optimizer's memory is 2Ψ numbers in fp32.

    Refuted by: an optimizer that holds more than 8Ψ bytes in both dtypes, some hundred bytes of padding aside.
    Run: stage 0 with dtype="fp32" and with dtype="bf16".
    Number, in MB: what the optimizer holds in the run with bf16.
    """
    # card 9: stage 0 ran in fp32 and in bf16.
    # - lab.train(stage, dtype=…): a Run of a new model
    # - run.memory["optimizer"]: bytes on this rank. run.parameters: elements of the model, a count
    raise NotImplementedError("card 9: card_09")


def card_10(lab) -> tuple[str, float]:
    """Claim: at stage 3, on N devices, each needs 1/N of the memory that one alone needs for the same model.

    Refuted by: nothing on a device that becomes N times smaller.
    Run: stage 0 with ranks=1, and stage 3 on all ranks, each with its own peak.
    Number: by which factor the peak is lower at stage 3.
    """
    # card 10: stage 0 ran on one rank by itself and stage 3 on all; the meter began at zero before
    # each.
    # - lab.train(stage, ranks=1): each rank by itself; ranks=None: all together
    # - lab.reset_peak(): the meter begins at zero
    # - run.peak: bytes that the meter shows. run.states: bytes of all model states on this rank
    raise NotImplementedError("card 10: card_10")


def card_11(lab) -> tuple[str, float]:
    """Claim: stage 1 may all-reduce its gradients as data parallelism does: it sends no more for that.

    Refuted by: such a stage 1 that sends more than data parallelism.
    Run: "DDP", and "ZeroRedundancy", which is DDP with a sharded optimizer.
    Number, in MB: what a rank of "ZeroRedundancy" sends in a step beyond one of "DDP", on a ring.
    """
    # card 11: data parallelism ran, and a stage 1 on top of it.
    # - lab.train("DDP"), lab.train("ZeroRedundancy"): Runs of torch's own
    # - run.sent: bytes that a rank of a ring sends in a step
    raise NotImplementedError("card 11: card_11")


def card_12(lab) -> tuple[str, float]:
    """Claim: at stage 1 the ranks gather the shards of optimizer state for the update.

    Refuted by: a step that gathers less than the shards of all ranks together.
    Run: stage 1 with dtype="bf16", where the optimizer's state and the parameters have different sizes.
    Number, in MB: the payload of all that is gathered in a step.
    """
    # card 12: stage 1 ran in bf16.
    # - run.collectives: of a step, such as {"all_gather": {"calls": 1, "bytes": 1447296}, …}. Its
    #   bytes are the payload
    # - run.memory["optimizer"]: bytes of this rank's shards. lab.ranks: how many ranks have some
    raise NotImplementedError("card 12: card_12")


def card_13(lab) -> tuple[str, float]:
    """Claim: at stage 2 the ranks gather a layer's parameters before they run it.

    Refuted by: a forward and a backward pass in which nothing is gathered.
    Run: stage 2; `when` of a run says what was sent in forward, backward and update.
    Number, in MB: the payload of all that stage 2 gathers in a step.
    """
    # card 13: stage 2 ran.
    # - run.when: payload by phase, such as {"forward": {}, "backward": {"reduce_scatter": 1447296},
    #   "update": {…}}
    # - run.collectives["all_gather"]["bytes"]: the payload of a step
    raise NotImplementedError("card 13: card_13")


def card_14(lab) -> tuple[str, float]:
    """Claim: a reduce-scatter sends half of what an all-reduce of the same payload sends.

    Refuted by: no reduce-scatter, of any library, that sends half.
    Run: under lab.watch(), with a payload of lab.ranks * lab.hidden * 1000 numbers in fp32: an all-reduce, a
    reduce-scatter of torch.distributed, and one of this course (core/collectives.py). `wire` is what the
    system counted; it says nothing where there is no Linux.
    Number, in MB: what this rank really sent for the reduce-scatter of torch.distributed.
    """
    # card 14: an all-reduce and two reduce-scatters of one payload were watched, each by itself.
    # - with lab.watch() as seen: measures what runs inside. Afterwards seen.wire are the bytes that
    #   this process wrote, and seen.sent those that a ring sends
    # - dist.all_reduce(tensor): in place. dist.reduce_scatter(output [s], a list of N tensors [s])
    # - collectives.reduce_scatter(output [s], input [N·s], op="sum")
    raise NotImplementedError("card 14: card_14")


def card_15(lab) -> tuple[str, float]:
    """Claim: ZeRO makes ranks send more than data parallelism does.

    Refuted by: no stage that sends more.
    Run: stages 0, 1, 2 and 3.
    Number, in MB: what a rank sends in a step of stage 3 beyond one of stage 0, on a ring.
    """
    # card 15: all four stages ran.
    # - lab.train(stage): a Run of a new model
    # - run.sent: bytes that a rank of a ring sends in a step
    raise NotImplementedError("card 15: card_15")


def card_16(lab) -> tuple[str, float]:
    """Claim: at the start of a step the batch is reduce-scattered, so that each rank gets its part of the data.

    Refuted by: a payload of the reduce-scatters that is the same for any batch.
    Run: stage 2 with lab.batch, and with twice that.
    Number, in MB: the payload of all reduce-scatters of a step.
    """
    # card 16: stage 2 ran with two batches.
    # - lab.train(stage, batch=…): a Run of a new model
    # - run.collectives["reduce_scatter"]["bytes"]: the payload of a step
    raise NotImplementedError("card 16: card_16")


def card_17(lab) -> tuple[str, float]:
    """Claim: the peak of stage 3 is below that of stage 2 because its gradients are reduce-scattered.

    Refuted by: reduce-scatters of the same payload at both, but for some hundred bytes of padding.
    Run: stages 2 and 3, each with its own peak.
    Number, in MB: by how much the peak of stage 3 is lower.
    """
    # card 17: stages 2 and 3 ran, and the meter began at zero before each.
    # - lab.reset_peak(): the meter begins at zero
    # - run.peak: bytes that the meter shows
    # - run.collectives["reduce_scatter"]["bytes"]: the payload of a step
    raise NotImplementedError("card 17: card_17")


def card_18(lab) -> tuple[str, float]:
    """Claim: before a column-parallel layer, f splits its input X: each rank gets a part of X.

    Refuted by: a layer whose weight, on each rank, has a column for each of the lab.hidden numbers of a token in X.
    Run: under lab.watch(), forward and then backward of a ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden);
    X is [lab.batch, lab.sequence, lab.hidden], in fp32, and wants a gradient.
    Number, in kB: the payload of what f sends in the two passes.
    """
    # card 18: both passes of the layer were watched.
    # - with lab.watch() as seen: afterwards seen.collectives has what ran inside, as {name:
    #   {"calls": …, "bytes": …}}; its bytes are the payload
    # - layer.weight [outputs of this rank, inputs]: a column for each input
    raise NotImplementedError("card 18: card_18")


def card_19(lab) -> tuple[str, float]:
    """Claim: ReLU of a sum is not the sum of ReLUs, so partial results must be added before it; an example that is to
    show this needs numbers of both signs.

    Refuted by: positive numbers that show it, or mixed ones that do not.
    Run: rank r draws torch.randn(lab.hidden * lab.sequence) with a generator of seed lab.seed + r: its partial
    results. g of tensor_parallel.py adds over the ranks: under lab.watch(), compare ReLU of the sum with the sum of
    ReLUs. Then the same with absolute values.
    Number, in percent: of the elements for which it matters (by more than 1e-5), where signs are mixed.
    """
    # card 19: partial results of both signs, and positive ones, were added over the ranks while the
    # lab watched.
    # - lab.rank.rank: the number of this rank
    # - g(tensor): the sum over the ranks
    # - with lab.watch(): the journal notes what runs inside
    raise NotImplementedError("card 19: card_19")


def card_20(lab) -> tuple[str, float]:
    """Claim: P_a makes the checkpoints of activations as many times smaller as there are devices.

    Refuted by: a smaller factor, however many ranks share the model.
    Run: simulate C1, and C2, which is C1 with P_a, on lab.devices: both with model_parallel=lab.model_parallel, and
    both with model_parallel=lab.devices. All four with hidden=192, sequence=lab.sequence, batch=1 and steps=1. P_a
    saves the difference between C1 and C2 in `kept`.
    Number, in kB: by how much P_a makes them smaller with lab.model_parallel.
    """
    # card 20: C1 and C2 were simulated with lab.model_parallel and with lab.devices model-parallel
    # ranks: four runs.
    # - lab.simulate(config=…, model_parallel=…, hidden=192, sequence=…, batch=1, steps=1): a Run of
    #   one rank of lab.devices, in fp16
    # - run.kept: bytes of activations that live from forward to backward
    raise NotImplementedError("card 20: card_20")


def card_21(lab) -> tuple[str, float]:
    """Claim: a configuration's bucket size of 500_000_000 elements takes 500 MB.

    Refuted by: a peak that rises by another number of MB.
    Run: with buckets of lab.elements elements of fp16: simulate stage 2 on 256 ranks, with 6 * lab.elements parameters
    in 12 layers, sequence=8 and steps=1; then with buckets 20 times smaller.
    Number, in GB: by how much the large buckets raise the peak.
    """
    # card 21: stage 2 was simulated with buckets of two sizes, and all else alike.
    # - lab.simulate(2, ranks=…, bucket_bytes=…, parameters=…, …): a Run. bucket_bytes are bytes,
    #   and an element of fp16 has two
    # - run.peak: bytes, of this run alone
    raise NotImplementedError("card 21: card_21")


def card_22(lab) -> tuple[str, float]:
    """Claim: between forward and backward a model of 32 blocks of width 4096 (7 billion parameters) keeps 10 to 20 GB
    of activations for 32 sequences of 2048 tokens, in 16 bit.

    Refuted by: blocks that keep more, in each way to run them.
    Run: simulate models of 2 and of 4 blocks with hidden=4096 and steps=1, with recompute=True and with
    recompute=False. At any stage the difference in `kept` is what two blocks keep (peak holds more).
    Number, in GB: what 32 blocks keep without recomputation, for lab.sequences of lab.tokens tokens.
    """
    # card 22: models of 2 and of 4 blocks were simulated, with recomputation and without it.
    # - lab.simulate(stage, layers=…, hidden=…, recompute=…, batch=…, sequence=…, steps=1): a Run,
    #   in fp16
    # - run.kept: bytes of activations that live from forward to backward
    raise NotImplementedError("card 22: card_22")


def card_23(lab) -> tuple[str, float]:
    """Claim: partitioned over 16 ranks, the checkpoints of the paper's 100B model take 2 GB in place of 33 GB (§6.1).

    Refuted by: checkpoints in fp16, one for each block, that are not 33 GB.
    Run: "figure 7" has the model's shape. Simulate C2 with one and with two of its blocks, on lab.row ranks that all
    share the model, steps=1: the difference in `kept` is one block's checkpoint.
    Number, in GB: of all blocks' checkpoints, partitioned over lab.row ranks.
    """
    # card 23: the shape was looked up, and C2 simulated with two numbers of blocks.
    # - lab.published("figure 7")["100B"]: (its Shape, the bars). A Shape has .layers, .hidden,
    #   .heads, .batch
    # - lab.simulate(config="C2", ranks=…, model_parallel=…, layers=…, hidden=…, heads=…, batch=…,
    #   sequence=1024, steps=1): a Run, in fp16
    # - run.kept: bytes of activations that live from forward to backward
    raise NotImplementedError("card 23: card_23")


def card_24(lab) -> tuple[str, float]:
    """Claim: without model parallelism, models of up to 13B parameters ran at more than 40 TFLOP/s a GPU on average.

    Refuted by: a mean of the figure's points that is 40 or less.
    Run: "figure 4" has TFLOP/s a GPU by billions of parameters, read off the chart.
    Number, in TFLOP/s: by how much the model of lab.without billions is above that mean (negative: below it).
    """
    # card 24: the figure was looked up.
    # - lab.published("figure 4"): {billions: TFLOP/s a GPU}
    raise NotImplementedError("card 24: card_24")


def card_25(lab) -> tuple[str, float]:
    """Claim: speed grows faster than the number of GPUs.

    Refuted by: no smaller number of GPUs from which it holds.
    Run: "figure 3" has TFLOP/s a GPU by GPUs. Look at the way to 400 from each of the smaller numbers.
    Number: how many times faster all 400 together are than lab.gpus of them, over how many times more GPUs that is.
    """
    # card 25: the figure was looked up.
    # - lab.published("figure 3"): {64: 25.7, …}, TFLOP/s a GPU by GPUs
    raise NotImplementedError("card 25: card_25")


def card_26(lab) -> tuple[str, float]:
    """Claim: the largest models that stage 1 trained are as large as the theory says, within a tenth.

    Refuted by: a row in which more than a tenth is missing.
    Run: "table 2" has, for each model-parallel degree, theory for stages 0 to 3 and measurement for stages 0 and 1.
    Number, in billions of parameters: how much the measured model of stage 1 lacks, in the row of lab.row.
    """
    # card 26: the table was looked up.
    # - lab.published("table 2"): {M: (theory for stages 0 to 3, measured for stages 0 and 1)},
    #   billions, as texts
    raise NotImplementedError("card 26: card_26")


def card_27(lab) -> tuple[str, float]:
    """Claim: the largest model that ran, 170B, is 8 times as large as what could be trained before.

    Refuted by: no size of what could be trained before, in the source, that is an eighth of it.
    Run: "figure 2" has the models by billions of parameters; "baselines" has what the paper calls the largest before,
    in two places.
    Number: how many times as large the model of lab.largest billions is as the larger one of these.
    """
    # card 27: models and baselines were looked up.
    # - lab.published("figure 2"): {billions: …}. lab.published("baselines"): {where it stands:
    #   billions}
    raise NotImplementedError("card 27: card_27")


def card_28(lab) -> tuple[str, float]:
    """Claim: Figure 7's bars for the 40B model with P_a are the sum of three parts: model states, checkpoints, buffers.

    Refuted by: a fourth part, of known size, that is in the bar. Shown by: three parts that add up to the bar.
    Run: simulate the 40B model of "figure 7" in lab.config on 400 ranks, cached=True: what CUDA's allocator takes.
    Number, in GB: by how much the paper's bar is higher than what the simulated rank takes.
    """
    # card 28: the bar was looked up, and its configuration simulated with the allocator.
    # - lab.published("figure 7")["40B"]: (its Shape, {configuration: GB}). A Shape has .layers,
    #   .hidden, .heads, .batch, .model_parallel
    # - lab.simulate(config=…, ranks=400, model_parallel=…, layers=…, hidden=…, heads=…, batch=…,
    #   sequence=1024, vocabulary=50257, cached=True): a Run
    # - run.cached: bytes that CUDA's allocator takes from the device
    raise NotImplementedError("card 28: card_28")
