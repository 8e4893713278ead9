"""Eight cards for Ada Lovelace: loops, dicts, and arithmetic that the runs confirm."""

NAME = "Ada Lovelace"
BELIEVED = DESIGNED = WEAKEST = ""


def card_02(lab):
    made_with, late = lab.arguments(zero={"stage": 2}), lab.arguments(zero=None)
    late.zero = {"stage": 2}
    zero, other = (sum(lab.train(arguments=given).memory.values()) for given in (made_with, late))
    return ("false" if other > zero else "true"), (other - zero) / 1e6


def card_06(lab):
    runs = {stage: lab.simulate(stage, ranks=lab.devices) for stage in (1, 0)}
    assert abs(runs[0].states / runs[0].parameters - 16) < 1
    factor = runs[0].states / runs[1].states
    return "false" if factor < lab.devices / 2 else "true", round(factor, 3)


def card_09(lab):
    held = {dtype: lab.train(0, dtype=dtype).memory["optimizer"] for dtype in ("bf16", "fp32")}
    return "true if" if held["bf16"] > 1.2 * held["fp32"] else "true", held["bf16"] / 10**6


def card_12(lab):
    run = lab.train(1, dtype="bf16", steps=6)
    arithmetic = 2 * run.parameters / 1e6  # parameters of 16 bits, all of them
    gathered = run.collectives["all_gather"]["bytes"] / 1e6
    assert abs(gathered - arithmetic) < 0.1 * arithmetic
    return "false", gathered


def card_13(lab):
    runs = [lab.train(stage, steps=6) for stage in (2, 3)]
    early = ["all_gather" in run.when["forward"] for run in runs]
    return "false" if early == [False, True] else "true", runs[0].collectives["all_gather"]["bytes"] / 1e6


def card_16(lab):
    payloads = {}
    for batch in (3 * lab.batch, lab.batch):
        payloads[batch] = lab.train(2, batch=batch, steps=6).collectives["reduce_scatter"]["bytes"]
    return "false" if len(set(payloads.values())) == 1 else "true", payloads[lab.batch] / 1e6


def card_20(lab):
    def kept(config, parallel):
        run = lab.simulate(2, config=config, ranks=lab.devices, model_parallel=parallel, hidden=192,
                           sequence=lab.sequence, batch=1)
        return run.kept

    here = kept("C1", lab.model_parallel) - kept("C2", lab.model_parallel)
    all_share = kept("C1", lab.devices) - kept("C2", lab.devices)
    return ("true if" if all_share > here else "false"), here / 1000


def card_25(lab):
    printed = lab.published("figure 3")
    together = {gpus: gpus * speed for gpus, speed in printed.items()}
    faster = together[400] / together[lab.gpus]
    return "true if", faster / (400 / lab.gpus)
