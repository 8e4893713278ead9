"""Wrong submissions of lesson 11: each is a fallacy, runs, and must be told so. And right ones, written otherwise."""

from submissions import Wrong, function

HEAD = "def card_{:02d}(lab) -> tuple[str, float]:"


def card(number, *lines):
    """A card written anew, in the place of the reference's."""
    return {f"card_{number:02d}": function(HEAD.format(number), "\n".join(lines))}


RUN, NUMBER, VERDICT = "test_the_run", "test_the_number", "test_the_verdict"
SMALL = "alike = dict(ranks=1, dtype='bf16')"

WRONG = {
    "the page's number, and nothing was run": Wrong(
        8, RUN, r"card 8 ran nothing: its lab's journal is empty\. 4\.267 is the number of the page's run, copied",
        card(8, 'return "true if", 4.267')),
    "the page's number, though nothing was run, has no points either": Wrong(
        8, NUMBER, r"card 8 ran nothing", card(8, 'return "true if", 4.267')),
    "the page's number, after a run": Wrong(
        13, NUMBER, r"1\.449 is the number of the page's run, copied: here other sizes are drawn, . ranks, seed \d+",
        card(13, "lab.train(2)", 'return "false", 1.449216')),
    "nothing was run for a figure": Wrong(
        24, RUN, r"card 24 ran nothing", card(24, 'return "false", 1.9')),
    "one seed": Wrong(
        1, RUN, r"card 1: one seed: a difference between two runs could be chance",
        card(1, "plain, zero = lab.train(0), lab.train(2)", "again = lab.train(2, model=plain.model)",
             'return "false", plain.validation - again.validation')),
    "two seeds": Wrong(
        5, RUN, r"card 5: 2 seeds: a difference between two runs could be chance",
        card(5, """
            total = 0.0
            for seed in lab.seeds[:2]:
                small, large = lab.train(0, seed=seed), lab.train(0, seed=seed, batch=2 * lab.batch)
                lab.train(2, seed=seed, batch=2 * lab.batch)
                total += (small.validation - large.validation) / 2
            return "not shown", total
            """)),
    "the same object ran twice": Wrong(
        1, RUN, r"card 1: the same object ran twice: stage 2 went on with the model of an earlier run",
        card(1, """
            gains = []
            for seed in lab.seeds:
                plain = lab.train(0, seed=seed)
                gains.append(plain.validation - lab.train(2, seed=seed, model=plain.model).validation)
            return "true", mean(gains)
            """)),
    "what the same object gained is taken for ZeRO's": Wrong(
        1, VERDICT, r"\"true\" is not what the run shows: the same object ran twice: what went on learning got better",
        card(1, """
            gains = []
            for seed in lab.seeds:
                plain, zero = lab.train(0, seed=seed), lab.train(2, seed=seed)
                gains.append(plain.validation - lab.train(2, seed=seed, model=plain.model).validation)
            return "true", mean(gains)
            """)),
    "the difference of two fresh runs": Wrong(
        1, NUMBER, r"card 1: 0 nats is not what is found .* that is by how much ZeRO lowers it, with a new model",
        card(1, """
            for seed in lab.seeds:
                plain, zero = lab.train(0, seed=seed), lab.train(2, seed=seed)
                lab.train(2, seed=seed, model=plain.model)
            return "false", plain.validation - zero.validation
            """)),
    "the configuration never ran": Wrong(
        2, RUN, r"card 2: no arguments were made .*: did the thing that the claim speaks of run at all",
        card(2, "first, second = lab.train(0), lab.train(2)",
             'return "false", (first.states - second.states) / 1e6')),
    "the peak was never reset": Wrong(
        3, RUN, r"card 3: the peak was never reset between stage 0 and stage 3: a meter that only rises",
        card(3, "plain, zero = lab.train(0), lab.train(3)", 'return "true", (plain.peak - zero.peak) / 1e6')),
    "the number of a meter that was never reset": Wrong(
        3, NUMBER, r"card 3: 0 MB is not what is found .* the peak was never reset: the second run shows that of the",
        card(3, "plain, zero = lab.train(0), lab.train(3)", 'return "true", (plain.peak - zero.peak) / 1e6')),
    "ZeRO ran first, and the peak was not reset": Wrong(
        17, RUN, r"card 17: the peak was never reset between stage 3 and stage 2",
        card(17, "lab.reset_peak()", "three, two = lab.train(3), lab.train(2)",
             'return "false", (two.peak - three.peak) / 1e6')),
    "the batch is confounded with ZeRO": Wrong(
        5, RUN, r"card 5: the batch is confounded with the stage: no two of your runs have one batch",
        card(5, """
            lowers = []
            for seed in lab.seeds:
                small, large = lab.train(0, seed=seed), lab.train(2, seed=seed, batch=2 * lab.batch)
                lowers.append(small.validation - large.validation)
            return "true", mean(lowers)
            """)),
    "a claim about evidence is refuted by other evidence": Wrong(
        5, VERDICT, r"\"false\" is not what the run shows: the claim is about what was shown",
        card(5, """
            lowers = []
            for seed in lab.seeds:
                small, large = lab.train(0, seed=seed), lab.train(0, seed=seed, batch=2 * lab.batch)
                lab.train(2, seed=seed, batch=2 * lab.batch)
                lowers.append(small.validation - large.validation)
            return "false", mean(lowers)
            """)),
    "N ranks in the place of one": Wrong(
        4, RUN, r"card 4: N = 1 is what the claim speaks of, and this ran on \d ranks",
        card(4, "plain, zero = lab.train(0, dtype='bf16'), lab.train(2, dtype='bf16')",
             'return "true", (plain.states - zero.states) / 1e6')),
    "N = 1 saves": Wrong(
        4, VERDICT, r"N = 1 \"saves\": with one rank each partition is the whole",
        card(4, SMALL, "plain, zero = lab.train(0, **alike), lab.train(2, **alike)",
             "host = lab.train(2, offload=True, **alike)", 'return "true", (plain.states - host.states) / 1e6')),
    "one device, and its host forgotten": Wrong(
        4, RUN, r"card 4: N = 1 alone says nothing yet: there is another way to run ZeRO on one device",
        card(4, SMALL, "plain, zero = lab.train(0, **alike), lab.train(2, **alike)",
             'return "false", (plain.states - zero.states) / 1e6')),
    "a limit taken for the value at this N": Wrong(
        8, NUMBER, r"card 8: 8 times is not what the reference finds on your setting\. A limit is taken for the",
        card(8, "for devices in (lab.devices, 1024):",
             "    run = [lab.simulate(stage, ranks=devices) for stage in (0, 2)]", 'return "true if", 8.0')),
    "one N alone": Wrong(
        8, RUN, r"card 8: 8 is a limit, and only N = \d+ was looked at",
        card(8, "whole, cut = lab.simulate(0), lab.simulate(2)", 'return "false", whole.states / cut.states')),
    "true in the limit only": Wrong(
        8, VERDICT, r"\"true\" for what holds in the limit only: at this N it is less",
        card(8, "whole, cut = lab.simulate(0), lab.simulate(2)", "far = lab.simulate(2, ranks=1024)",
             'return "true", whole.states / cut.states')),
    "N times": Wrong(
        6, NUMBER, r"card 6: \d+ times is not what the reference finds on your setting\. N is the claim's own number",
        card(6, "whole, cut = lab.simulate(0), lab.simulate(1)", 'return "false", float(lab.devices)')),
    "bytes for numbers": Wrong(
        7, NUMBER, r"Units are mixed: 16Ψ are bytes",
        card(7, "run = lab.simulate(0, parameters=lab.parameters, layers=12, sequence=8, steps=1)",
             'return "true", run.states / 1e9')),
    "MiB for MB": Wrong(
        9, NUMBER, r"Units are mixed: it is MiB in the place of MB",
        card(9, "full, mixed = lab.train(0), lab.train(0, dtype='bf16')",
             'return "true if", mixed.memory["optimizer"] / 2**20')),
    "bytes for MB": Wrong(
        13, NUMBER, r"Units are mixed: it is off by a million",
        card(13, "run = lab.train(2)", 'return "false", run.collectives["all_gather"]["bytes"]')),
    "masters forgotten": Wrong(
        9, NUMBER, r"card 9: .* that is with fp32: in mixed precision the optimizer also holds the masters",
        card(9, "full, mixed = lab.train(0), lab.train(0, dtype='bf16')",
             'return "true if", full.memory["optimizer"] / 1e6')),
    "another stage 1 is refuted": Wrong(
        11, RUN, r"card 11: no stage 1 that all-reduces .*: to run it refutes a claim that nobody made",
        card(11, "plain, sharded = lab.train('DDP'), lab.train(1)",
             'return "true", (sharded.sent - plain.sent) / 1e6')),
    "what is held, for what is gathered": Wrong(
        12, NUMBER, r"card 12: .* that is the optimizer's state of all ranks, which is held",
        card(12, "run = lab.train(1, dtype='bf16')",
             'return "true", run.memory["optimizer"] * lab.ranks / 1e6')),
    "one rank's shards, for what is gathered": Wrong(
        12, NUMBER, r"card 12: .* that is what this rank holds of the optimizer's state",
        card(12, "run = lab.train(1, dtype='bf16')", 'return "false", run.memory["optimizer"] / 1e6')),
    "stage 3 in the place of stage 2": Wrong(
        13, RUN, r"card 13: no training at stage 2",
        card(13, "run = lab.train(3)", 'return "true", run.collectives["all_gather"]["bytes"] / 1e6')),
    "one batch": Wrong(
        16, RUN, r"card 16: with one batch alone nobody sees whether a payload depends on it",
        card(16, "run = lab.train(2)", 'return "false", run.collectives["reduce_scatter"]["bytes"] / 1e6')),
    "only forward": Wrong(
        18, RUN, r"card 18: no all-reduce was seen: did X want a gradient, and was backward run inside",
        card(18, "layer = ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden)", "with lab.watch() as seen:",
             "    layer(torch.ones(lab.batch, lab.sequence, lab.hidden))", 'return "false", 0.0')),
    "the example refutes a claim that nobody made": Wrong(
        19, VERDICT, r"\"false\" is not what the run shows: this refutes a claim that nobody made",
        card(19, "dice = torch.Generator().manual_seed(lab.seed + lab.rank.rank)",
             "part = torch.randn(lab.hidden * lab.sequence, generator=dice)", "with lab.watch():",
             "    apart = g(part).relu() - g(part.relu())",
             'return "false", 100 * (apart.abs() > 1e-5).float().mean().item()')),
    "elements of a bucket taken for bytes": Wrong(
        23, NUMBER, r"Units are mixed: 33.6 billion are elements, and in fp16 each has two bytes",
        card(23, 'shape, _ = lab.published("figure 7")["100B"]',
             "size = dict(config='C2', ranks=lab.row, model_parallel=lab.row, hidden=shape.hidden, heads=shape.heads)",
             "for layers in (1, 2):",
             "    lab.simulate(layers=layers, steps=1, batch=shape.batch, sequence=1024, **size)",
             'return "false", shape.layers * shape.hidden * shape.batch * 1024 / lab.row / 1e9')),
    "a tolerance wider than the effect": Wrong(
        24, VERDICT, r"a tolerance wider than the effect: the mean is below 40",
        card(24, 'points = lab.published("figure 4")', "mean = sum(points.values()) / len(points)",
             'return "true" if abs(mean - 40) < 2 else "false", points[lab.without] - mean')),
    "the claim's number for the mean": Wrong(
        24, NUMBER, r"40 is the claim's number: the mean of the points is another one",
        card(24, 'points = lab.published("figure 4")', 'return "false", points[lab.without] - 40')),
    "the other baseline": Wrong(
        27, NUMBER, r"that is over the smaller baseline, 20B",
        card(27, 'baselines = lab.published("baselines")', 'lab.published("figure 2")',
             'return "true if", lab.largest / min(baselines.values())')),
    "the verdict in other words": Wrong(
        25, VERDICT, r"card 25: the verdict is 'it depends', and one of these four is asked for: true, true if, false",
        card(25, 'points = lab.published("figure 3")', 'return "it depends", points[400] / points[lab.gpus]')),
    "a number alone": Wrong(
        25, NUMBER, r"card 25 must return two things, a verdict and a number",
        card(25, 'points = lab.published("figure 3")', "return points[400] / points[lab.gpus]")),
    "f was never run": Wrong(
        18, RUN, r"card 18: no forward pass of a ColumnParallelLinear was watched: what f does to X is seen",
        card(18, "with lab.watch() as seen:", "    torch.distributed.all_reduce(torch.zeros(1))",
             'return "false", lab.batch * lab.sequence * lab.hidden * 4 / 1e3')),
    "forward outside of the watch": Wrong(
        18, RUN, r"card 18: no forward pass of a ColumnParallelLinear was watched",
        card(18, "x = torch.ones(lab.batch, lab.sequence, lab.hidden, requires_grad=True)",
             "y = ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden)(x).sum()", "with lab.watch() as seen:",
             "    y.backward()", 'return "false", seen.collectives["all_reduce"]["bytes"] / 1e3')),
    "an X of another size": Wrong(
        18, RUN, r"card 18: what was watched had all_reduce of \d+ bytes, and what f adds up has the size of X",
        card(18, "layer = ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden)", "with lab.watch():",
             "    layer(torch.ones(1, lab.hidden, requires_grad=True)).sum().backward()",
             'return "false", lab.batch * lab.sequence * lab.hidden * 4 / 1e3')),
    "what a ring sends, for the payload": Wrong(
        18, NUMBER, r"card 18: .* kB is not what is found on 3 ranks\. that is what a ring sends \(sent\)",
        card(18, "layer = ColumnParallelLinear(lab.hidden, lab.ranks * lab.hidden)",
             "x = torch.ones(lab.batch, lab.sequence, lab.hidden, requires_grad=True)", "with lab.watch() as seen:",
             "    layer(x).sum().backward()", 'return "false", seen.sent / 1e3')),
    "one number is summed, for an example": Wrong(
        19, RUN, r"card 19: what was watched had all_reduce of 4 bytes, and sums of mixed and of positive numbers",
        card(19, "dice = torch.Generator().manual_seed(lab.seed + lab.rank.rank)", "with lab.watch():",
             "    torch.distributed.all_reduce(torch.zeros(1))", 'return "true", 50.0')),
    "one reduce-scatter": Wrong(
        14, RUN, r"card 14: two reduce-scatters are asked for, that of torch.distributed and that of this course",
        card(14, "whole = torch.ones(lab.ranks, lab.hidden * 1000)", "part = torch.empty_like(whole[0])",
             "with lab.watch():", "    dist.all_reduce(whole.clone())", "with lab.watch() as of_torch:",
             "    dist.reduce_scatter(part, list(whole))", 'return "true if", (of_torch.wire or 0) / 1e6')),
    "nothing late was trained": Wrong(
        2, RUN, r"card 2: no run had arguments whose zero was written after they were made",
        card(2, "lab.arguments()", "first, second = lab.train(0), lab.train(2)",
             'return "false", (first.states - second.states) / 1e6')),
    "late arguments, and nothing to compare them with": Wrong(
        2, RUN, r"card 2: no run had arguments that were made with their configuration",
        card(2, "late = lab.arguments()", 'late.zero = {"stage": 2}',
             "first, second = lab.train(arguments=late), lab.train(2)",
             'return "false", (first.states - second.states) / 1e6')),
    "late, and of another batch": Wrong(
        2, RUN, r"card 2: it ran with batch \d+, and lab.batch is \d+\. The card names the lab's sizes",
        card(2, "late = lab.arguments()", 'late.zero = {"stage": 2}',
             "first = lab.train(arguments=late, batch=2 * lab.batch)",
             'second = lab.train(arguments=lab.arguments(zero={"stage": 2}))',
             'return "false", (first.states - second.states) / 1e6')),
    "late, and of another seed": Wrong(
        2, RUN, r"card 2: between the run with configured later, stage 0 and the one with .* differs than that: seed",
        card(2, "late = lab.arguments()", 'late.zero = {"stage": 2}',
             "first = lab.train(arguments=late, seed=lab.seed + 1)",
             'second = lab.train(arguments=lab.arguments(zero={"stage": 2}))',
             'return "false", (first.states - second.states) / 1e6')),
    "one device, without plain ZeRO": Wrong(
        4, RUN, r"card 4: no run of a new model with stage 2, offload False, ranks 1, dtype bf16: what is compared",
        card(4, SMALL, "plain, host = lab.train(0, **alike), lab.train(2, offload=True, **alike)",
             'return "true if", (plain.states - host.states) / 1e6')),
    "one device, and steps differ": Wrong(
        4, RUN, r"card 4: between the run with stage 0.* more differs than that: steps\. Which of them is the cause",
        card(4, SMALL, "plain, zero = lab.train(0, **alike), lab.train(2, **alike)",
             "host = lab.train(2, offload=True, steps=2, **alike)",
             'return "true if", (plain.states - host.states) / 1e6')),
    "stages with steps of their own": Wrong(
        15, RUN, r"card 15: between the run with stage 0 and the one with stage 3 more differs than that: steps",
        card(15, "sent = [lab.train(stage, steps=1 if stage == 3 else 2).sent for stage in range(4)]",
             'return "true if", (sent[3] - sent[0]) / 1e6')),
    "a width of one's own": Wrong(
        15, RUN, r"card 15: it ran with hidden 64, and lab.hidden is \d+\. .* no sizes of your own",
        card(15, "sent = [lab.train(stage, hidden=64, steps=1).sent for stage in range(4)]",
             'return "true if", (sent[3] - sent[0]) / 1e6')),
    "a simulated width of one's own": Wrong(
        6, RUN, r"card 6: stage 0 was simulated with hidden=64, and the card asks for hidden=\d+: no sizes of your own",
        card(6, "whole, cut = lab.simulate(0, hidden=64), lab.simulate(1, hidden=64)",
             'return "false", whole.states / cut.states')),
    "ranks of one's own": Wrong(
        7, RUN, r"card 7: stage 0 was simulated with ranks=2, and the card asks for ranks=\d+: no sizes of your own",
        card(7, "run = lab.simulate(0, ranks=2, parameters=lab.parameters, layers=12, sequence=8, steps=1)",
             'return "false", run.memory["parameters"] / 1e9 + run.memory["optimizer"] / 4e9')),
    "one rank alone trains": Wrong(
        13, RUN, r"all ranks run a card, alike",
        card(13, "if lab.rank.rank:", "    return 'false', 1.0", "run = lab.train(2)",
             'return "false", run.collectives["all_gather"]["bytes"] / 1e6'), hangs=True),
}
SHORT = {"f was never run", "a tolerance wider than the effect", "the peak was never reset"}

RIGHT: dict = {}  # whole files, in right/
