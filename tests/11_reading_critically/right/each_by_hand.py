"""Eight cards for Katherine Johnson: one line after the other, ZeRO first, torch called directly."""

import torch
import torch.distributed as dist

from zero_minimal.core import collectives

NAME = "  katherine   JOHNSON "
BELIEVED = "I believed card 10, since model states do shrink by N, and the claim does not say of what it speaks at all."
DESIGNED = "Card 3 needs a meter that begins anew. I would run each stage in a process of its own, with three seeds."
WEAKEST = ""


def card_03(lab):
    zero = lab.train(3)
    print("stage 3 by itself:", zero.peak)
    lab.reset_peak()
    plain = lab.train(0)
    return "not shown", (plain.peak - zero.peak) / 1e6


def card_07(lab):
    run = lab.simulate(parameters=lab.parameters, stage=0, layers=12, sequence=8, steps=1)
    sizes = {"parameters": 2, "gradients": 2, "optimizer": 4}
    numbers = sum(run.memory[name] / size for name, size in sizes.items())
    return "false", torch.tensor(numbers / 1e9, dtype=torch.float64)


def card_08(lab):
    factors = []
    for devices in (lab.devices, 100 * lab.devices):
        none = lab.simulate(0, ranks=devices)
        both = lab.simulate(2, ranks=devices)
        factors.append(none.states / both.states)
    assert factors[0] < 7.9 < 16 / 2
    return "true if", factors[0]


def card_10(lab):
    shared = lab.train(3)
    first = shared.peak
    lab.reset_peak()
    alone = lab.train(ranks=1)
    assert alone.states > 1.9 * shared.states
    return "true if", alone.peak / first


def card_14(lab):
    numbers = torch.arange(1000.0 * lab.ranks * lab.hidden)
    with lab.watch() as whole:
        dist.all_reduce(numbers)
    into = torch.zeros(1000 * lab.hidden)
    with lab.watch() as ours:
        collectives.reduce_scatter(into, numbers, op="sum")
    with lab.watch() as torchs:
        dist.reduce_scatter(into, list(numbers.chunk(lab.ranks)))
    assert ours.wire < 0.6 * whole.wire < torchs.wire
    return "true if", torchs.wire / 1e6


def card_15(lab):
    sent = [lab.train(stage, steps=6).sent for stage in (3, 2, 1, 0)][::-1]
    return "true if", (sent[3] - sent[0]) / 1e6


def card_21(lab):
    peaks = []
    for elements in (lab.elements, lab.elements // 20):
        run = lab.simulate(2, ranks=256, bucket_bytes=2 * elements, parameters=6 * lab.elements, layers=12, sequence=8,
                           steps=1)
        peaks.append(run.peak)
    return "false", (peaks[0] - peaks[1]) / 1e9


def card_26(lab):
    theory, measured = lab.published("table 2")[lab.row]
    lacks = float(theory[1]) - float(measured[1])
    return "false" if lacks > float(theory[1]) / 10 else "true", lacks
