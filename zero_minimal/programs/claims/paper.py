"""Claims 23 to 28: what the paper says of its own figures. lab.published() has these figures."""


def card_23(lab) -> tuple[str, float]:
    """Claim: partitioned over 16 ranks, the checkpoints of the paper's 100B model take 2 GB in place of 33 GB (§6.1).

    Refuted by: checkpoints in fp16, one for each block, that are not 33 GB.
    Run: "figure 7" has the model's shape. Simulate C2 with one and with two of its blocks, on lab.row ranks that all
    share the model, steps=1: the difference in `kept` is one block's checkpoint.
    Number, in GB: of all blocks' checkpoints, partitioned over lab.row ranks.
    """
    shape, _ = lab.published("figure 7")["100B"]
    size = dict(hidden=shape.hidden, heads=shape.heads, batch=shape.batch, sequence=1024)
    one, two = (lab.simulate(config="C2", ranks=lab.row, model_parallel=lab.row, layers=layers, steps=1, **size)
                for layers in (1, 2))
    cut = shape.layers * (two.kept - one.kept)
    return "true" if abs(cut * lab.row - 33e9) < 3e9 else "false", cut / 1e9


def card_24(lab) -> tuple[str, float]:
    """Claim: without model parallelism, models of up to 13B parameters ran at more than 40 TFLOP/s a GPU on average.

    Refuted by: a mean of the figure's points that is 40 or less.
    Run: "figure 4" has TFLOP/s a GPU by billions of parameters, read off the chart.
    Number, in TFLOP/s: by how much the model of lab.without billions is above that mean (negative: below it).
    """
    points = lab.published("figure 4")
    mean = sum(points.values()) / len(points)
    return "true" if mean > 40 else "false", points[lab.without] - mean


def card_25(lab) -> tuple[str, float]:
    """Claim: speed grows faster than the number of GPUs.

    Refuted by: no smaller number of GPUs from which it holds.
    Run: "figure 3" has TFLOP/s a GPU by GPUs. Look at the way to 400 from each of the smaller numbers.
    Number: how many times faster all 400 together are than lab.gpus of them, over how many times more GPUs that is.
    """
    points = lab.published("figure 3")
    faster = {gpus: points[400] / points[gpus] > 1 for gpus in points if gpus < 400}
    verdict = "true" if all(faster.values()) else "true if" if any(faster.values()) else "false"
    return verdict, points[400] / points[lab.gpus]


def card_26(lab) -> tuple[str, float]:
    """Claim: the largest models that stage 1 trained are as large as the theory says, within a tenth.

    Refuted by: a row in which more than a tenth is missing.
    Run: "table 2" has, for each model-parallel degree, theory for stages 0 to 3 and measurement for stages 0 and 1.
    Number, in billions of parameters: how much the measured model of stage 1 lacks, in the row of lab.row.
    """
    table, lacks = lab.published("table 2"), {}
    for row, (theory, measured) in table.items():
        lacks[row] = float(theory[1]) - float(measured[1]), 0.1 * float(theory[1])
    return "true" if all(lack < tenth for lack, tenth in lacks.values()) else "false", lacks[lab.row][0]


def card_27(lab) -> tuple[str, float]:
    """Claim: the largest model that ran, 170B, is 8 times as large as what could be trained before.

    Refuted by: no size of what could be trained before, in the source, that is an eighth of it.
    Run: "figure 2" has the models by billions of parameters; "baselines" has what the paper calls the largest before,
    in two places.
    Number: how many times as large the model of lab.largest billions is as the larger one of these.
    """
    baselines = lab.published("baselines").values()
    holds = [max(lab.published("figure 2")) / baseline >= 8 for baseline in baselines]
    verdict = "true" if all(holds) else "true if" if any(holds) else "false"
    return verdict, lab.largest / max(baselines)


def card_28(lab) -> tuple[str, float]:
    """Claim: Figure 7's bars for the 40B model with P_a are the sum of three parts: model states, checkpoints, buffers.

    Refuted by: a fourth part, of known size, that is in the bar. Shown by: three parts that add up to the bar.
    Run: simulate the 40B model of "figure 7" in lab.config on 400 ranks, cached=True: what CUDA's allocator takes.
    Number, in GB: by how much the paper's bar is higher than what the simulated rank takes.
    """
    shape, bars = lab.published("figure 7")["40B"]
    run = lab.simulate(
        config=lab.config, ranks=400, model_parallel=shape.model_parallel, layers=shape.layers, hidden=shape.hidden,
        heads=shape.heads, batch=shape.batch, sequence=1024, vocabulary=50257, cached=True,
    )
    gap = bars[lab.config] - run.cached / 1e9
    return "true" if abs(gap) < 2 else "not shown", gap
