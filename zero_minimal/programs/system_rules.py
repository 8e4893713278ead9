"""System rules: what a system of part B must keep to before its bytes count.

A small twin of the track's model is trained by it on real ranks, 3 of them or 2 × 2, for two budgets each; and the
same twin on simulated ones. It is legal if

    it learns       losses of all steps are those of stage 0, bit for bit
    it is ZeRO      optimizer state is 1/N on each rank, with padding
    it conducts     all ranks of a group start the same collectives, in the same order, and send as much in each step
    it stays        a later step holds no more than the one before, and at its end nothing is left that was not there
    it is itself    real ranks hold and send what simulated ones do, by the same lines of the file (system_watch.py)

Whoever judges runs two functions where the submission may run, and believes their plain numbers: `simulated_runs` in a
process without ranks, then `real_runs` on the twin's ranks; `faults` compares.
"""

import functools
import gc
import math
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.mesh import make_mesh
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.quantities import size_text
from zero_minimal.programs import system_watch
from zero_minimal.programs.budget import Track, bound, simulated
from zero_minimal.programs.cases import Budget
from zero_minimal.programs.simulation import simulate
from zero_minimal.stage0 import Stage0
from zero_minimal.tensor_parallel import ParallelGPT
from zero_minimal.workload.model import GPT, GPTConfig

STEPS = 3
STATES = ("parameters", "gradients", "optimizer")
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-3, fused=True)  # eps: the gradients' size shows
SMALL = GPTConfig(layers=2, hidden=64, heads=4, sequence=16, vocabulary=212, dropout=0.0, recompute=True)
SHARES = (0.95, 1.6)  # of what the twin needs, and of the least it can send: its budgets


def twins(track: Track) -> list[Track]:
    """The track with a small model, on 3 ranks or 2 × 2, and two budgets."""
    parallel = 2 if track.model_parallel > 1 else 1
    twin = replace(track, model=SMALL, ranks=4 if parallel > 1 else 3, model_parallel=parallel)
    whole = bound(twin)
    if track.memory is not None:
        return [replace(twin, memory=int(share * whole.need)) for share in SHARES]
    return [replace(twin, sent=int(share * 1.2 * whole.least_sent)) for share in SHARES]


def budget_of(twin: Track) -> Budget:
    return replace(twin.budget, options=dict(OPTIONS))


# ------------------------------------------------------------------------------------------- where the submission runs


def simulated_runs(build: Callable, path: str, track: Track, big: bool = True) -> dict:
    """The twins and, if `big`, the track itself on simulated ranks. Plain numbers: {"twins", "figures", "lines",
    "fault"}."""
    lines, found, faults = system_watch.Lines(path), [], []
    around = gathered_only(faults)
    with lines.followed():
        for twin in twins(track):
            case = replace(twin.case(build=build, name="system"), budget=budget_of(twin))
            report = simulate(case, around=around).report
            memory = report["memory"]
            found.append({"states": [memory[state] for state in STATES], "peak": memory["peak"],
                          "sent": report["traffic"]["sent_bytes"], "budget": [twin.memory, twin.sent]})
        figures = asdict(simulated(track, build, watch=around)) if big else None
    return {"twins": found, "figures": figures, "lines": lines.listed, "fault": next(iter(faults), "")}


def gathered_only(faults: list[str]) -> Callable:
    """For simulate(around=…): what reads a parameter that was not gathered is added to `faults`, in words."""

    @contextmanager
    def around(model, zero):
        gathered = system_watch.Gathered(model, zero)
        with gathered.watching():
            yield
        faults.extend([gathered.fault] if gathered.fault else [])

    return around


def real_runs(build: Callable, path: str, track: Track, budgets: list) -> dict:
    """The twins on these real ranks, and stage 0. Plain numbers of this rank: {"runs", "losses", "lines"}."""
    lines, found = system_watch.Lines(path), []
    mesh = make_mesh(2) if track.model_parallel > 1 else None
    group = mesh.data_group if mesh else None
    plain = twin_model(mesh, meta=False)
    losses = _steps(plain, Stage0(plain, AdamW, group=group, **OPTIONS), mesh)
    del plain
    for memory, sent in budgets:
        budget = Budget(memory, sent, 1, SMALL.sequence, dict(OPTIONS))
        with lines.followed():
            found.append(_real_run(build, mesh, group, budget))
    return {"runs": found, "losses": losses, "lines": lines.listed}


def _real_run(build: Callable, mesh, group, budget: Budget) -> dict:
    ledger, meters, states, peaks, rest = Ledger(), [], [], [], []
    with ledger:
        strangers = ledger.total
        model = twin_model(mesh, meta=True)
        ledger.watch(somebody := nn.Module())
        zero = build(model, group, budget)
        ledger.watch(model, zero)
        losses = []
        for number in range(STEPS):
            ledger.reset()
            with (meter := TrafficMeter()):
                losses += _steps(model, zero, mesh, number, 1)
            meters.append(meter)
            _settle(ledger)
            states.append([ledger.states()[state] for state in STATES])
            rest.append(ledger.total - strangers)
            peaks.append(ledger.peak.total - strangers)
    del somebody
    largest = max((size for _, size, _ in meters[-1].log), default=0)
    elements = sum(param.numel() for param in model.parameters())
    return {"losses": losses, "log": [list(entry) for entry in meters[-1].log], "states": states, "peaks": peaks,
            "rest": rest, "sent": [meter.sent_bytes for meter in meters], "largest": largest, "elements": elements,
            "tensors": len(list(model.parameters())), "dtypes": sorted({str(p.dtype) for p in model.parameters()})}


def _settle(ledger: Ledger) -> None:
    """gloo's threads let go of a tensor a moment late."""
    least = math.inf
    for _ in range(10):
        gc.collect()
        if ledger.total >= least:
            break
        least = ledger.total
        time.sleep(0.005)


def _steps(model: nn.Module, zero, mesh, first: int = 0, count: int = STEPS) -> list[float]:
    """Training steps on this rank's own data; at the end of each the gradients are still there."""
    losses = []
    for number in range(first, first + count):
        zero.zero_grad()
        tokens = _tokens(mesh, number)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses


def _tokens(mesh, number: int) -> torch.Tensor:
    data_rank = mesh.data_rank if mesh else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + data_rank)
    return torch.randint(SMALL.vocabulary, (1, SMALL.sequence), generator=generator)


def twin_model(mesh, meta: bool) -> nn.Module:
    """The twin, in bf16. Its values go by the parameters' names: so they are the same wherever they are drawn."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta" if meta else "cpu"):
            model = ParallelGPT(SMALL, mesh.model_group) if mesh else GPT(SMALL)
    finally:
        torch.set_default_dtype(before)
    names = {param: name for name, param in model.named_parameters()}
    alike = set(model.replicated()) if mesh else set(names)

    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            seed = zlib.crc32(names[param].encode()) + (0 if param in alike else mesh.model_rank)
            values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
            param.copy_(values * 0.05 + (1 if names[param].endswith("norm.weight") else 0))

    model.initialise = initialise
    for module in () if meta else model.modules():
        initialise(module)
    for block in model.blocks if mesh else ():
        block.forward = functools.partial(checkpoint, block.inside, use_reentrant=False)
    return model


# ------------------------------------------------------------------------------------------------------ who judges it


def fault(track: Track, simulated_ones: dict, real_ones: list[dict]) -> str:
    """Why it is not legal, in one sentence; "" if it is. real_ones: of each rank."""
    groups = _groups(track, real_ones)
    for number, twin in enumerate(simulated_ones["twins"]):
        runs = [rank["runs"][number] for rank in real_ones]
        words = (_learns(runs, real_ones) or _is_zero(track, runs) or _conducts(number, groups)
                 or _stays(runs) or _is_itself(runs[0], twin))
        if words:
            memory, sent = twin["budget"]
            limit = f"memory {size_text(memory)}" if memory is not None else f"traffic {size_text(sent)}"
            return f"with a small model and a budget of {limit}: {words}"
    if simulated_ones["fault"]:
        return simulated_ones["fault"]
    return system_watch.alone(simulated_ones["lines"], [place for rank in real_ones for place in rank["lines"]],
                         twin_in_words(track, simulated_ones["twins"]))


def twin_in_words(track: Track, twins: list[dict]) -> str:
    """Which model the real ranks train, and for which budgets."""
    limit = "memory" if track.memory is not None else "sent"
    sizes = " and ".join(f"{twin['budget'][limit == 'sent']:,}" for twin in twins)
    return f"the twin ({SMALL.layers} blocks of width {SMALL.hidden}, bf16, a .{limit} of {sizes} bytes)"


def _groups(track: Track, ranks: list[dict]) -> list[list[tuple[int, dict]]]:
    """The ranks that share a model's states, with their numbers."""
    numbered, apart = list(enumerate(ranks)), 2 if track.model_parallel > 1 else 1
    return [numbered[first::apart] for first in range(apart)]


def _learns(runs: list[dict], ranks: list[dict]) -> str:
    for rank, (run, own) in enumerate(zip(runs, ranks, strict=True)):
        for step, (ours, theirs) in enumerate(zip(run["losses"], own["losses"], strict=True), 1):
            if ours != theirs:
                return (f"the loss of step {step} on rank {rank} is {ours!r}, and {theirs!r} at stage 0: they must "
                        "agree bit for bit")
        if run["dtypes"] != ["torch.bfloat16"]:
            return f"the model's parameters are {', '.join(run['dtypes'])}, and were torch.bfloat16"
    return ""


def _is_zero(track: Track, runs: list[dict]) -> str:
    ranks = 2 if track.model_parallel > 1 else 3
    for rank, run in enumerate(runs):
        most = 12 * (run["elements"] / ranks + run["tensors"] * (16 + 16))  # padding: of each tensor, at most
        if run["states"][-1][2] > most:
            return (f"rank {rank} keeps {size_text(run['states'][-1][2])} of optimizer state; 12Ψ/N are "
                    f"{size_text(12 * run['elements'] / ranks)}, with N = {ranks} ranks that share a model")
    return ""


def _conducts(number: int, groups: list) -> str:
    for group in groups:
        (first, one), *others = group
        for rank, other in others:
            ours, theirs = (each["runs"][number]["log"] for each in (one, other))
            if ours != theirs:
                place = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                             min(len(ours), len(theirs)))
                a, b = (_named(log[place]) if place < len(log) else "nothing more" for log in (ours, theirs))
                return (f"in a step rank {first}'s collective number {place + 1} is {a}, and rank {rank}'s is {b}: all "
                        "ranks must start the same")
    for group in groups:
        for rank, each in group:
            sent = each["runs"][number]["sent"]
            if len(set(sent[1:])) > 1:
                return (f"rank {rank} sends {', '.join(f'{size:,}' for size in sent)} bytes in steps 1 to {STEPS}: a "
                        "step must send what the second sends")
    return ""


def _named(entry: list) -> str:
    return f"{entry[0]} of {entry[1]:,} bytes among {entry[2]}"


def _stays(runs: list[dict]) -> str:
    for rank, run in enumerate(runs):
        for step in range(2, STEPS):
            if run["rest"][step] > run["rest"][1]:
                return (f"rank {rank} holds {run['rest'][step]:,} bytes at the end of step {step + 1}, and "
                        f"{run['rest'][1]:,} at the end of step 2: something of each step stays")
            if run["peaks"][step] > run["peaks"][1] + _scratch(run):
                return (f"rank {rank}'s peak is {run['peaks'][step]:,} bytes in step {step + 1}, and "
                        f"{run['peaks'][1]:,} in step 2: a later step may not be higher")
    return ""


def _scratch(run: dict) -> float:
    """Bytes that gloo needs, and simulated ranks do not: parts that arrive, and all of them and their sum in fp32."""
    return 6 * run["largest"]


def _is_itself(real: dict, twin: dict) -> str:
    for name, ours, theirs in zip(STATES, real["states"][1], twin["states"], strict=True):
        if ours != theirs:
            return (f"after step 2 real ranks hold {ours:,} bytes of {name}, and simulated ones {theirs:,}: a system "
                    "must be the same in both")
    if real["sent"][1] != twin["sent"]:
        return (f"real ranks send {real['sent'][1]:,} bytes in step 2, and simulated ones {twin['sent']:,}: a system "
                "must be the same in both")
    if not 0 <= real["peaks"][1] - twin["peak"] <= _scratch(real):
        return (f"real ranks hold {real['peaks'][1]:,} bytes at the peak of step 2, and simulated ones "
                f"{twin['peak']:,}: a system must be the same in both")
    return ""
