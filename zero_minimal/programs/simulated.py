"""Simulated: a simulation that a rank requests.

A simulation makes its own ranks, and a process can belong to only one world. So rank 0 starts another process
(offloading/host_process.py), which runs it, and all ranks get its result. Without ranks it runs in this process.
"""

import gc
import os

import torch
import torch.distributed as dist

from zero_minimal.meters.allocator import CachingAllocator, replay
from zero_minimal.offloading.host_link import Bus
from zero_minimal.offloading.host_process import Host
from zero_minimal.paper.shapes import shape_for, usual_heads, usual_shape
from zero_minimal.programs.cases import Case
from zero_minimal.programs.simulation import simulate
from zero_minimal.workload.model import GPTConfig

OF_CASE = ("batch", "dtype", "model_parallel", "config", "offload", "bucket_bytes", "steps")
OF_MODEL = ("parameters", "layers", "hidden", "heads", "vocabulary", "sequence", "recompute")
_host: Host | None = None  # of this process, if started


def on_first_rank(stage: int, ranks: int, small: dict, options: dict) -> dict:
    """The result of a case: the fields of a Run. All ranks must call this.

    Args:
        small: layers, hidden, heads of the model, if not in options.
        options: from OF_CASE and OF_MODEL; cached=True also replays its allocations.
    Raises: ValueError, on all ranks, if this cannot be simulated.
    """
    case, cached = case_of(stage, ranks, small, options), options.get("cached", False)
    if not dist.is_initialized():
        return figures(case, cached)
    found = [None]
    if dist.get_rank() == 0:
        found = [_beside().ask("figures", case, cached)]
    dist.broadcast_object_list(found)
    return found[0]


def _beside() -> Host:
    """This rank's process for simulations. It is started once: its imports take longer than a small simulation."""
    global _host
    if _host is None or _host.ended or _host.gone.is_set() or _host.pid != os.getpid():
        _host = Host(serve, 0, torch.device("cpu"), None)
    return _host


def case_of(stage: int, ranks: int, small: dict, options: dict) -> Case:
    """The Case of these options. Raises: ValueError for an unknown option, or if it cannot be simulated."""
    unknown = set(options) - {*OF_CASE, *OF_MODEL, "cached"}
    if unknown:
        raise ValueError(f"simulate() has no {', '.join(sorted(unknown))}: it has {', '.join(OF_CASE + OF_MODEL)}")
    sequence, recompute = options.get("sequence", 64), options.get("recompute", True)
    parallel = options.get("model_parallel", 1)
    if "parameters" in options and "layers" in options:
        model = shape_for(options["parameters"], sequence, parallel, options["layers"], recompute=recompute)
    elif "parameters" in options:
        model = usual_shape(options["parameters"], sequence, parallel, recompute)
    else:
        hidden = options.get("hidden", small["hidden"])
        model = GPTConfig(
            layers=options.get("layers", small["layers"]), hidden=hidden, sequence=sequence, dropout=0.0,
            heads=options.get("heads") or usual_heads(hidden, parallel), recompute=recompute,
            vocabulary=options.get("vocabulary", 256),
        )
    of_case = {name: options[name] for name in OF_CASE if name in options}
    return Case(model, stage, ranks, buckets=32, **of_case)  # as many as usual would take long


def figures(case: Case, cached: bool) -> dict:
    """Run a case; return the fields of a Run."""
    run = simulate(case)
    found, memory = run.report, run.report["memory"]
    backward = dict(run.phases)[f"backward {case.steps}"]
    between = [moment for moment in run.timeline if moment.seconds <= backward][-1]
    return {
        "name": found["name"], "stage": found["theory_stage"], "ranks": found["ranks"], "dtype": case.dtype,
        "batch": case.batch, "seed": None, "parameters": found["parameters"],
        "memory": {name: memory[name] for name in ("parameters", "gradients", "optimizer")},
        "peak": memory["peak"], "at_peak": memory["peak_by_category"],
        "kept": between.bytes["activations"], "collectives": found["traffic"]["collectives"],
        "sent": found["traffic"]["sent_bytes"],
        "cached": replay(run.trace, CachingAllocator(2**62)).peak_reserved if cached else None,
    }


def serve(bus: Bus) -> None:
    """The work of the process for simulations."""
    gc.freeze()  # the ledger searches all objects for tensors; those of libraries hold none
    while (parcel := bus.receive()).words[0] != "end":
        bus.send((figures(*parcel.words[1:]),))
