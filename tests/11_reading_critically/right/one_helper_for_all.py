"""Eight cards for Mary Somerville, with helpers that the cards share."""

NAME = "Mary Somerville"
BELIEVED = DESIGNED = WEAKEST = ""


def fresh_peak(lab, stage, **options):
    lab.reset_peak()
    return lab.train(stage, **options)


def grows(lab, layers, **options):
    """How activations at the peak grow from so many layers to more of them, a layer."""
    few, many = (lab.simulate(layers=count, steps=1, **options).at_peak["activations"] for count in layers)
    return (many - few) / (layers[1] - layers[0])


def card_03(lab):
    peaks = [fresh_peak(lab, stage).peak for stage in (0, 3)]
    return "not shown", (peaks[0] - peaks[1]) / 1e6


def card_07(lab):
    run = lab.simulate(0, parameters=lab.parameters, layers=12, sequence=8, steps=1, dtype="fp16")
    return "false", (run.states - run.memory["optimizer"]) / 2e9 + run.memory["optimizer"] / 4e9


def card_12(lab):
    run = lab.train(1, dtype="bf16")
    gathered = run.collectives["all_gather"]["bytes"]
    return "false" if gathered < run.memory["optimizer"] else "true", gathered / 1e6  # one rank's shards are enough


def card_17(lab):
    three, two = fresh_peak(lab, 3), fresh_peak(lab, 2)
    same = three.collectives["reduce_scatter"]["bytes"] < 1.2 * two.collectives["reduce_scatter"]["bytes"]
    return ("false" if same else "true"), (two.peak - three.peak) / 1e6


def card_22(lab):
    size = dict(hidden=4096, batch=lab.sequences, sequence=lab.tokens)
    kept = {recompute: 32 * grows(lab, (1, 3), recompute=recompute, stage=1, **size) for recompute in (True, False)}
    return "true if" if kept[True] < 20e9 < kept[False] else "false", kept[False] / 1e9


def card_23(lab):
    shape = lab.published("figure 7")["100B"][0]
    one = grows(lab, (1, 3), config="C2", ranks=lab.row, model_parallel=lab.row, hidden=shape.hidden,
                heads=shape.heads, batch=shape.batch, sequence=1024)
    return "false", shape.layers * one / 1e9


def card_24(lab):
    points = lab.published("figure 4")
    mean = sum(points.values()) / len(points)
    return "false" if mean <= 40 else "true", points[lab.without] - mean


def card_27(lab):
    largest, baselines = max(lab.published("figure 2")), sorted(lab.published("baselines").values())
    assert largest / baselines[0] >= 8 > largest / baselines[1]
    return "true if", lab.largest / baselines[1]
