"""Copies: whether copies to the host and back overlap with computation.

    offload        gradients leave during backward, parameters return (offload.py, offloading/pinned_link.py)
    checkpoints    P_a+cpu: a block's input leaves during the forward of later blocks (offloading/host.py)

CUDA's events say when each copy of the bus ran; torch's profiler says when each kernel ran, and on which stream.
"""

from dataclasses import replace

import torch

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.meters import device_trace, gpu
from zero_minimal.meters.crossings import BusMeter
from zero_minimal.meters.timing import draw_batches
from zero_minimal.offload import Offloaded2, Offloaded3
from zero_minimal.processes import ranks
from zero_minimal.programs.gpu.place import BUCKET, Check, Place, result
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

WARM = 2  # steps before measuring: the first one allocates pinned memory
CLOSE = 1e-3  # relative: bf16
HIDDEN = 0.5  # the share of the copies that should overlap with kernels


def offload(place: Place) -> dict:
    """The part: stages 2 and 3 offloaded, on one GPU."""
    rows = place.run(watch_offload, 1, place.settings(steps=WARM + 1), place.trace)[0]
    checks = []
    for row in rows:
        name = row["name"]
        checks.append(share(f"{name}: gradients leave beside kernels", row["hidden"]["DtoH"]))
        if name.startswith("stage 3"):  # they wait for the host's update, which is long compared with a step
            back = share(f"{name}: parameters come back beside kernels", row["hidden"]["HtoD"])
            checks.append(replace(back, wanted="more where the host updates faster than the GPU computes", ok=None))
        events = row["events"]
        checks.append(Check(f"{name}: bytes that crossed, against the formula 2Ψ/N each way",
                            f"{row['sent'] / 1e6:,.1f} and {row['received'] / 1e6:,.1f} MB",
                            f"{row['formula'] / 1e6:,.1f} MB", row["sent"] == row["received"] == row["formula"]))
        if events:
            checks.append(Check(f"{name}: copies to the host that began before backward had ended, by CUDA's events",
                                f"{events['in_backward']} of {events['copies']}", "all but the last bucket's",
                                events["in_backward"] >= events["copies"] - 2))
    return result(checks, rows=rows)


def checkpoints(place: Place) -> dict:
    """The part: checkpoints on the host, on one GPU."""
    rows = place.run(watch_checkpoints, 1, place.settings(steps=WARM + 1))[0]
    here, there = rows
    checks = [share("checkpoints leave beside kernels", there["hidden"]["DtoH"]),
              Check("the GPU's memory between forward and backward, with checkpoints on the host",
                    f"{there['between'] / 1e6:,.1f} MB", f"less than {here['between'] / 1e6:,.1f} MB, as without",
                    there["between"] < here["between"] if here["between"] else None),
              same_losses(here["losses"], there["losses"])]
    return result(checks, rows=rows)


def same_losses(here: list[float], there: list[float]) -> Check:
    """The first loss precedes any backward, so its bits are the same. Backward of fused attention adds in any order, so
    later losses are only close. (The part `nccl` compares all bits, with attention that adds in one order.)"""
    apart = max(abs(one - other) / one for one, other in zip(here, there, strict=True))
    return Check("losses with and without", f"the first {'the same' if here[0] == there[0] else 'another'}, all within "
                 f"{apart:.1g}", f"the same, and within {CLOSE}", here[0] == there[0] and apart <= CLOSE)


def share(what: str, hidden: float | None) -> Check:
    """Check the share of time that was hidden."""
    if hidden is None:
        return Check(what, "nothing of it in the trace", f"at least {HIDDEN:.0%}", None)
    return Check(what, f"{hidden:.0%} of their time", f"at least {HIDDEN:.0%}", hidden >= HIDDEN)


def hidden_of(work: list[device_trace.Work]) -> dict:
    """For the JSON: the hidden share in each direction, and the seconds of copies and kernels."""
    kernels = device_trace.computation(work)
    ways = {way: device_trace.copies(work, way) for way in ("DtoH", "HtoD")}
    return {"hidden": {way: device_trace.hidden(some, kernels) for way, some in ways.items()},
            "seconds": {way: device_trace.seconds(some) for way, some in ways.items()}
            | {"kernels": device_trace.seconds(kernels)}}


# ---------------------------------------------------------------------------------------------------------- on the rank


def warmed(stage, settings: Settings, rank: ranks.Rank, more: int) -> tuple:
    """A stage after WARM steps, and `more` further batches, on the rank's device."""
    zero = loop.build(stage, settings, rank, bucket_bytes=BUCKET)
    batches = list(draw_batches(settings, rank, WARM + more))
    for batch in batches[:WARM]:
        step(zero, batch)
    return zero, batches[WARM:]


def watch_offload(settings: Settings, trace: str) -> list[dict]:
    """A step of each of the two, and the next forward, in which stage 3's parameters return."""
    rows = []
    for number, stage in ((2, Offloaded2), (3, Offloaded3)):
        with ranks.start() as rank:
            zero, (batch, following) = warmed(stage, settings, rank, 2)
            bus, meter = zero.host.bus, BusMeter(zero)
            bus.copies = []
            with device_trace.recorded() as profiler:
                with meter.step():
                    moments = step(zero, batch)
                loss = zero.model(*following)
                loss.item()
            crossed = meter.crossed()
            shards = sum(bucket.parameter_shard.nbytes for bucket in zero.buckets)
            work = device_trace.work_in(profiler, trace if number == 3 else None)
            rows.append({"name": f"stage {number}, offloaded", "sent": crossed["to_host"],
                         "received": crossed["to_device"], "formula": shards,
                         "events": by_events(bus.copies, moments, gpu.of(rank.device)), **hidden_of(work)})
            bus.copies = None
            zero.host.end()
            del zero, loss, batch, following
    return rows


def step(zero, batch: tuple) -> tuple:
    """A training step. Returns the moments at which backward began and ended."""
    meter = gpu.of(batch[0].device)
    zero.zero_grad()
    loss = zero.model(*batch)
    began = meter.now()
    loss.backward()
    ended = meter.now()
    zero.step()
    return began, ended


def by_events(copies: list, moments: tuple, meter) -> dict | None:
    """How many copies to the host began before the end of backward, and their seconds. None without a GPU."""
    if not meter.is_there:
        return None
    meter.synchronize()
    leaving = [copy for copy in copies if copy.leaves]
    in_backward = sum(meter.seconds(copy.start, moments[1]) > 0 for copy in leaving)
    return {"copies": len(leaving), "in_backward": in_backward, "backward": meter.seconds(*moments),
            "leaving": sum(meter.seconds(copy.start, copy.end) for copy in leaving),
            "returning": sum(meter.seconds(copy.start, copy.end) for copy in copies if not copy.leaves)}


def watch_checkpoints(settings: Settings) -> list[dict]:
    """Train with checkpoints on the GPU, and with checkpoints on the host."""
    rows = []
    for to_host in (False, True):
        with ranks.start() as rank:
            meter = gpu.of(rank.device)
            zero = loop.build(Stage2, settings, rank)
            checkpoint_blocks(zero.model, to_host=to_host)
            batches, losses = list(draw_batches(settings, rank, WARM + 1)), []
            for batch in batches:
                zero.zero_grad()
                meter.synchronize()
                before = meter.allocated()
                with device_trace.recorded() as profiler:
                    loss = zero.model(*batch)
                meter.synchronize()
                between = meter.allocated() - before
                losses.append(loss.item())
                loss.backward()
                zero.step()
            work = device_trace.work_in(profiler)
            rows.append({"to_host": to_host, "between": between, "losses": losses, **hidden_of(work)})
            del zero, loss, batch, batches
    return rows


# ------------------------------------------------------------------------------------------------- messages and kernels


def overlap(place: Place) -> dict:
    """The part: how much of NCCL's time overlaps with kernels, on a rank for each GPU."""
    world_size = 1 if place.dry else place.gpus
    rows = place.run(watch_messages, world_size, place.settings(steps=WARM + 1), place.trace)[0]
    checks = [share(f"{row['name']}: NCCL beside kernels", row["hidden"]) for row in rows]
    return result(checks, ranks=world_size, rows=rows)


def watch_messages(settings: Settings, trace: str) -> list[dict]:
    """A step of stages 2 and 3 under the profiler. Rank 0 saves the trace of stage 3."""
    rows = []
    for number, stage in ((2, Stage2), (3, Stage3)):
        with ranks.start() as rank:
            zero, (batch,) = warmed(stage, settings, rank, 1)
            gpu.of(rank.device).synchronize()
            torch.distributed.barrier()
            with device_trace.recorded() as profiler:
                step(zero, batch)
            work = device_trace.work_in(profiler, trace if number == 3 and rank.rank == 0 else None)
            sent, kernels = device_trace.messages(work), device_trace.computation(work)
            rows.append({"name": f"stage {number}", "hidden": device_trace.hidden(sent, kernels),
                         "seconds": {"nccl": device_trace.seconds(sent), "kernels": device_trace.seconds(kernels)}})
            del zero, batch
    return rows
