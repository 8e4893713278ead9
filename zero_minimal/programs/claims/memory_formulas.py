"""Claims 7 to 10: formulas for memory, and what they leave out."""


def card_07(lab) -> tuple[str, float]:
    """Claim: in mixed precision Ψ + Ψ + 12Ψ = 16Ψ: a device without ZeRO holds 16 numbers for each parameter.

    Refuted by: another count of numbers, where each has as many bytes as its dtype says.
    Run: simulate stage 0 in fp16, with parameters=lab.parameters, layers=12 (more blocks take long, and change nothing
    here), sequence=8 and steps=1. The optimizer's numbers are fp32.
    Number, in billions: of numbers in the model states of the device.
    """
    run = lab.simulate(0, parameters=lab.parameters, layers=12, sequence=8, steps=1)
    numbers = run.memory["parameters"] / 2 + run.memory["gradients"] / 2 + run.memory["optimizer"] / 4
    return "true" if numbers > 15 * run.parameters else "false", numbers / 1e9


def card_08(lab) -> tuple[str, float]:
    """Claim: stage 1 makes model states 4 times smaller, stage 2 makes them 8 times smaller.

    Refuted by: factors that stay far from 4 and 8, however many devices there are.
    Run: simulate stages 0 and 2 on lab.devices, and both again on 1024 devices (ranks=1024).
    Number: by which factor model states are smaller at stage 2, on lab.devices.
    """
    here, far = (lab.simulate(0, ranks=ranks, steps=1).states / lab.simulate(2, ranks=ranks, steps=1).states
                 for ranks in (lab.devices, 1024))
    if here > 0.97 * 8:
        return "true", here
    return "true if" if far > 0.97 * 8 else "false", here


def card_09(lab) -> tuple[str, float]:
    """Claim: Adam keeps two numbers for each parameter, so that the optimizer's memory is 2Ψ numbers in fp32.

    Refuted by: an optimizer that holds more than 8Ψ bytes in both dtypes, some hundred bytes of padding aside.
    Run: stage 0 with dtype="fp32" and with dtype="bf16".
    Number, in MB: what the optimizer holds in the run with bf16.
    """
    full, mixed = lab.train(0), lab.train(0, dtype="bf16")
    two = 8 * full.parameters
    holds = [abs(run.memory["optimizer"] - two) < 0.05 * two for run in (full, mixed)]
    verdict = "true" if all(holds) else "true if" if any(holds) else "false"
    return verdict, mixed.memory["optimizer"] / 1e6


def card_10(lab) -> tuple[str, float]:
    """Claim: at stage 3, on N devices, each needs 1/N of the memory that one alone needs for the same model.

    Refuted by: nothing on a device that becomes N times smaller.
    Run: stage 0 with ranks=1, and stage 3 on all ranks, each with its own peak.
    Number: by which factor the peak is lower at stage 3.
    """
    lab.reset_peak()
    alone = lab.train(0, ranks=1)
    lab.reset_peak()
    shared = lab.train(3)
    factor, of_states = alone.peak / shared.peak, alone.states / shared.states
    if factor > 0.95 * lab.ranks:
        return "true", factor
    return "true if" if of_states > 0.95 * lab.ranks else "false", factor
