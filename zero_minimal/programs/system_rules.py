"""System rules: the rules that a system of part B must follow before its bytes count.

It trains a small twin of the track's model on real ranks, 3 or 2 × 2, for two budgets each, and on simulated ranks. It
is legal if

    it learns       losses of all steps are those of stage 0, bit for bit
    it is ZeRO      optimizer state is 1/N on each rank, with padding
    it conducts     all ranks of a group start the same collectives in the same order, and each step sends the same
    it stays        a step holds no more than the previous one, and leaves nothing new behind
    it is itself    real ranks hold and send what simulated ones do, with the same lines of the file (system_watch.py)

The judge runs two functions in the sandbox and uses their plain numbers: `simulated_runs` in a process without ranks,
then `real_runs` on the twin's ranks; `faults` compares them.
"""

import functools
import gc
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.mesh import make_mesh
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.fakes import new_tensors_in
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
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-3, fused=True)  # large eps: gradient scale matters
SMALL = GPTConfig(layers=2, hidden=64, heads=4, sequence=16, vocabulary=212, dropout=0.0, recompute=True)
SHARES = (0.95, 1.6)  # budgets, as shares of what the twin needs, or must send at least


def twins(track: Track) -> list[Track]:
    """The track with a small model, on 3 or 2 × 2 ranks, with each of two budgets."""
    parallel = 2 if track.model_parallel > 1 else 1
    twin = replace(track, model=SMALL, ranks=4 if parallel > 1 else 3, model_parallel=parallel)
    whole = bound(twin)
    if track.memory is not None:
        return [replace(twin, memory=int(share * whole.need)) for share in SHARES]
    return [replace(twin, sent=int(share * 1.2 * whole.least_sent)) for share in SHARES]


# ------------------------------------------------------------------------------------------- where the submission runs


def simulated_runs(build: Callable, path: str, track: Track, big: bool = True) -> dict:
    """Run the twins and, if `big`, the track itself on simulated ranks. Plain numbers: {"twins", "figures", "lines",
    "fault"}."""
    lines, found, faults = system_watch.Lines(path), [], []
    around = functools.partial(system_watch.gathered_only, faults)
    with lines.followed():
        for twin in twins(track):
            budget = replace(twin.budget, options=dict(OPTIONS))
            case = replace(twin.case(build=build, name="system"), budget=budget)
            report = simulate(case, around=around).report
            memory = report["memory"]
            found.append({"states": [memory[state] for state in STATES], "peak": memory["peak"],
                          "sent": report["traffic"]["sent_bytes"], "budget": [twin.memory, twin.sent]})
        figures = asdict(simulated(track, build, watch=around)) if big else None
    return {"twins": found, "figures": figures, "lines": lines.listed, "fault": next(iter(faults), "")}


def real_runs(build: Callable, path: str, track: Track, budgets: list) -> dict:
    """Run the twins and stage 0 on these real ranks. Plain numbers of this rank: {"runs", "losses", "lines"}."""
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
                losses += _steps(model, zero, mesh, [number])
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
    """Wait for gloo's threads, which release tensors slightly late."""
    least = math.inf
    for _ in range(10):
        gc.collect()
        if ledger.total >= least:
            break
        least = ledger.total
        time.sleep(0.005)


def _steps(model: nn.Module, zero, mesh, steps: Iterable[int] = range(STEPS)) -> list[float]:
    """Training steps on this rank's own data; each keeps its gradients."""
    losses, data_rank = [], mesh.data_rank if mesh else dist.get_rank()
    for number in steps:
        zero.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + data_rank)
        tokens = torch.randint(SMALL.vocabulary, (1, SMALL.sequence), generator=generator)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses


def twin_model(mesh, meta: bool) -> nn.Module:
    """The twin, in bf16. The parameters' names seed its values, so they are the same wherever they are drawn."""
    with new_tensors_in(torch.bfloat16), torch.device("meta" if meta else "cpu"):
        model = ParallelGPT(SMALL, mesh.model_group) if mesh else GPT(SMALL)
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


# ---------------------------------------------------------------------------------------------------------- the judge


def fault(track: Track, simulated_ones: dict, real_ones: list[dict]) -> str:
    """Why a system is not legal, in one sentence; "" if it is. real_ones: from each rank."""
    for number, twin in enumerate(simulated_ones["twins"]):
        runs = [rank["runs"][number] for rank in real_ones]
        for words in faults(track, twin, runs, [rank["losses"] for rank in real_ones]):
            memory, sent = twin["budget"]
            limit = f"memory {size_text(memory)}" if memory is not None else f"traffic {size_text(sent)}"
            return f"with a small model and a budget of {limit}: {words}"
    if simulated_ones["fault"]:
        return simulated_ones["fault"]
    return system_watch.alone(simulated_ones["lines"], [place for rank in real_ones for place in rank["lines"]],
                              twin_in_words(track, simulated_ones["twins"]))


def twin_in_words(track: Track, twins: list[dict]) -> str:
    """The model that the real ranks train, and its budgets, in words."""
    limit = "memory" if track.memory is not None else "sent"
    sizes = " and ".join(f"{twin['budget'][limit == 'sent']:,}" for twin in twins)
    return f"the twin ({SMALL.layers} blocks of width {SMALL.hidden}, bf16, a .{limit} of {sizes} bytes)"


def faults(track: Track, twin: dict, runs: list[dict], losses: list[list[float]]) -> Iterator[str]:
    """How real ranks' runs of one twin break rules, compared with its simulation and with stage 0's losses."""
    for rank, (run, plain) in enumerate(zip(runs, losses, strict=True)):  # it learns
        for step, (ours, theirs) in enumerate(zip(run["losses"], plain, strict=True), 1):
            if ours != theirs:
                yield (f"the loss of step {step} on rank {rank} is {ours!r}, and {theirs!r} at stage 0: they must "
                       "agree bit for bit")
        if run["dtypes"] != ["torch.bfloat16"]:
            yield f"the model's parameters are {', '.join(run['dtypes'])}, and were torch.bfloat16"
    ranks, apart = (2, 2) if track.model_parallel > 1 else (3, 1)  # ranks that share states; distance between them
    for rank, run in enumerate(runs):  # it is ZeRO
        state, padding = run["states"][-1][2], 16 + 16  # per tensor, at most
        if state > 12 * (run["elements"] / ranks + run["tensors"] * padding):
            yield (f"rank {rank} keeps {size_text(state)} of optimizer state; 12Ψ/N are "
                   f"{size_text(12 * run['elements'] / ranks)}, with N = {ranks} ranks that share a model")
    groups = [list(enumerate(runs))[first::apart] for first in range(apart)]
    for (first, one), *others in groups:  # it conducts
        for rank, other in others:
            for place, (a, b) in enumerate(zip_longest(one["log"], other["log"]), 1):
                if a != b:
                    yield (f"in a step rank {first}'s collective number {place} is {_named(a)}, and rank {rank}'s is "
                           f"{_named(b)}: all ranks must start the same")
    for rank, run in chain.from_iterable(groups):
        if len(set(run["sent"][1:])) > 1:
            yield (f"rank {rank} sends {', '.join(f'{size:,}' for size in run['sent'])} bytes in steps 1 to {STEPS}: a "
                   "step must send what the second sends")
    for rank, run in enumerate(runs):  # it stays
        rest, peaks = run["rest"], run["peaks"]
        for step in range(2, STEPS):
            if rest[step] > rest[1]:
                yield (f"rank {rank} holds {rest[step]:,} bytes at the end of step {step + 1}, and {rest[1]:,} at the "
                       "end of step 2: something of each step stays")
            if peaks[step] > peaks[1] + _scratch(run):
                yield (f"rank {rank}'s peak is {peaks[step]:,} bytes in step {step + 1}, and {peaks[1]:,} in step 2: a "
                       "later step may not be higher")
    real, must = runs[0], "a system must be the same in both"  # it is itself
    for name, ours, theirs in zip(STATES, real["states"][1], twin["states"], strict=True):
        if ours != theirs:
            yield f"after step 2 real ranks hold {ours:,} bytes of {name}, and simulated ones {theirs:,}: {must}"
    sent, peak = real["sent"][1], real["peaks"][1]
    if sent != twin["sent"]:
        yield f"real ranks send {sent:,} bytes in step 2, and simulated ones {twin['sent']:,}: {must}"
    if not 0 <= peak - twin["peak"] <= _scratch(real):
        yield f"real ranks hold {peak:,} bytes at the peak of step 2, and simulated ones {twin['peak']:,}: {must}"


def _named(entry: list | None) -> str:
    return "nothing more" if entry is None else f"{entry[0]} of {entry[1]:,} bytes among {entry[2]}"


def _scratch(run: dict) -> float:
    """Bytes that only gloo needs, not simulated ranks: parts that arrive, and all of them and their sum in fp32."""
    return 6 * run["largest"]
