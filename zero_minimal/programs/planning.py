"""Planning: the calculation behind `plan`, for our GPT and for a model of transformers, whose sizes are measured
(measured.py). It uses only formulas; `simulate` runs code, and a test compares the two."""

import bisect
import math
from dataclasses import dataclass

from zero_minimal.paper import formulas, moments, published
from zero_minimal.paper.expressions import exported
from zero_minimal.paper.hardware import GPU, GPUS, NETWORK
from zero_minimal.paper.kernels import ATTENTION
from zero_minimal.paper.moments import CHECKPOINTS, Work
from zero_minimal.paper.shapes import check_divides, check_heads
from zero_minimal.programs.measured import MeasuredWork
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.model import GPTConfig

NAMES = ("data parallel", *published.STAGES)
UTILISATION = 0.4  # share of a GPU's peak operations that good training runs reach
MOST_RANKS = 2**30
PAPERS = GPUS["V100-32GB"]
PLACES = ("cpu", "disk")  # where offloaded states are kept
LINKS = (12e9, 25e9, 64e9, 900e9)  # bytes a second: reached by PCIe 3, 4 and 5, and by a dedicated link (both ways)


@dataclass(frozen=True)
class Speeds:
    """A device's operations per second, and its bytes per second inside a node of `node` devices, to other nodes, and
    to or from its host."""

    operations: float
    link: float
    node: int
    network: float = NETWORK
    bus: float = PAPERS.bus

    @classmethod
    def of(cls, gpu: GPU, dtype: str) -> "Speeds":
        return cls(gpu.rate(dtype), gpu.link, gpu.node, bus=gpu.bus)

    @exported
    def wire(self, ranks: int) -> float:
        """Bytes per second of a ring of `ranks` neighbours: its slowest link decides, so a ring that leaves the node
        has the network's rate."""
        return self.link if ranks <= self.node else self.network


def plan(model: GPTConfig | ForeignModel, ranks: int, device_bytes: float, dtype: str = "fp16", batch: int = 1,
         model_parallel: int = 1, speeds: Speeds | None = None, offloaded: bool = False, offload: str | None = None,
         **how) -> dict:
    """The whole calculation, as JSON (bytes and seconds); "rows" has an entry for each stage.

    Args:
        speeds: None: those of the paper's V100 in this dtype.
        offloaded: at stages 1 to 3 the ranks' hosts keep and update the optimizer's state.
        offload: one of PLACES: adds "offload" to the result.
        how: the other fields of Work.
    Raises: ValueError, saying what is accepted, if this cannot be planned.
    """
    kind = MeasuredWork if isinstance(model, ForeignModel) else Work
    work = kind(model, batch, dtype, model_parallel, **how)
    check(work, ranks, offloaded or bool(offload))
    speeds, shards = speeds or Speeds.of(PAPERS, dtype), ranks / work.replicate
    rows = [row(stage, work, ranks, device_bytes, speeds, offloaded) for stage in range(4)]
    whole = math.lcm(work.replicate, work.sequence_parallel)  # groups that keep all states, or share a sequence
    for each in rows:
        each["fewest_data_parallel_ranks"] = fewest_ranks(each["stage"], work, device_bytes, offloaded)
        for name in ("fewest_data_parallel_ranks", "fewest_data_parallel_ranks_for_states"):
            each[name] = each[name] and -(-each[name] * work.replicate // whole) * whole
    return {
        **work.described(),
        "sequence": model.sequence, "batch": batch, "recompute": model.recompute, "checkpoints": work.checkpoints,
        "ranks": ranks, "model_parallel": model_parallel, "replicate": work.replicate, "shards": work.shards(ranks),
        "dtype": dtype, "optimizer_bytes": work.optimizer_bytes, "offloaded": offloaded, "device_bytes": device_bytes,
        "accumulate": work.accumulate, "attention": work.attention, "sequence_parallel": work.sequence_parallel,
        "gradient_bytes": work.gradient_bytes or formulas.BYTES[dtype][1],
        "rows": rows,
        "first_stage_that_fits": next((each["stage"] for each in rows if each["fits"]), None),
        "activations": work.activations(),
        **computing(work, speeds),
        **waiting(work, speeds),
        "inside_a_node": shards <= speeds.node, "wire": speeds.wire(shards), "wire_between": speeds.wire(ranks),
        "network": speeds.network, "link": speeds.link, "node": speeds.node, "bus": speeds.bus,
        **({"offload": away(work, ranks, device_bytes, speeds, offload)} if offload else {}),
    }


def check(work: Work, ranks: int, offloaded: bool) -> None:
    """Raises: ValueError, saying what is accepted, if this cannot be planned."""
    config, parallel, together = work.config, work.model_parallel, work.sequence_parallel
    if isinstance(config, ForeignModel):
        if parallel > 1 or work.checkpoints != "whole":
            raise ValueError("a model of transformers is not cut over ranks here: give it without --mp and "
                             "--checkpoints")
        if together > 1:
            raise ValueError("what ranks that share sequences keep is a formula of our GPT's attention, and the code "
                             "of a model of transformers sends no sequences: give it without --sequence-parallel")
    check_divides(parallel, ranks, f"{ranks} ranks are not groups of {parallel} that share a model")
    if work.checkpoints not in CHECKPOINTS:
        raise ValueError(f"checkpoints must be one of {', '.join(CHECKPOINTS)}, not {work.checkpoints!r}")
    if work.checkpoints != "whole" and (parallel == 1 or not config.recompute):
        raise ValueError(f"{work.checkpoints} cuts the checkpoints of model-parallel ranks: it needs --mp, and "
                         "--recompute")
    if parallel > 1:
        check_heads(config, parallel)
    if work.attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, not {work.attention!r}")
    parts = ranks // parallel
    check_divides(together, parts, f"{parts} data-parallel ranks are not groups of {together} that share a sequence")
    check_divides(work.replicate, parts,
                  f"{parts} data-parallel ranks are not {work.replicate} groups of equal size")
    if together > 1 and (config.sequence % together or config.heads % (together * parallel)):
        raise ValueError(f"{together} ranks that share a sequence need {together} × M to divide "
                         f"{config.heads} heads, and {together} to divide {config.sequence} tokens")
    if work.gradient_bytes and (offloaded or work.dtype == "fp32"):
        raise ValueError("gradients in fp32 are for 16-bit parameters that are not offloaded")


@exported
def row(stage: int, work: Work, ranks: int, device_bytes: float, speeds: Speeds, offloaded: bool = False) -> dict:
    """What a stage needs: model states, the peak of a step, traffic, time. These formulas can be exported to a page
    (expressions.py)."""
    shards, elements, dtype = work.shards(ranks), work.parts().whole, work.dtype
    away = offloaded and stage > 0  # stage 0 has no shards to offload
    kept, gradients, times = work.optimizer_bytes, work.gradient_bytes, work.accumulate
    options = {"offloaded": away, "optimizer_bytes": kept, "gradient_bytes": gradients}
    states = formulas.model_states(stage, elements, shards, dtype, **options)
    moment = moments.highest(stage, work, shards, away)
    built = moments.construction(stage, work)
    sent = formulas.traffic(stage, elements, shards, dtype, times, gradients)
    between = formulas.traffic_between(elements, shards, work.replicate, dtype, gradients)
    sends = sent / speeds.wire(ranks / work.replicate) + (between / speeds.wire(ranks) if between else 0)
    bus = formulas.bus_bytes(stage, elements, shards, dtype, times) if away else {"to_host": 0, "to_device": 0}
    both_ways = bus["to_host"] + bus["to_device"]
    waited, computes = waiting(work, speeds), computing(work, speeds)["compute_seconds"]
    waits = waited["model_parallel_seconds"] + waited["sequence_parallel_seconds"]
    return {
        "stage": stage, "name": NAMES[stage], **states, "states": sum(states.values()),
        "moment": moment.name, "states_there": moment.states, "activations": moment.activations,
        "passing": moment.passing, "together": moment.total, "construction": built,
        "whole": [state for state in formulas.STATES if stage < formulas.SHARDED_FROM[state]],
        "states_fit": sum(states.values()) <= device_bytes,
        "step_fits": moment.total <= device_bytes,
        "fits": max(moment.total, built) <= device_bytes,
        "fewest_data_parallel_ranks_for_states": formulas.fewest_ranks(stage, elements, device_bytes, dtype, **options),
        "largest_model": formulas.largest_model(stage, device_bytes, shards, dtype, work.model_parallel, **options),
        "sent_bytes": sent + between, "between_bytes": between, "send_seconds": sends,
        "host_bytes": formulas.host_bytes(elements, shards, dtype, kept) if away else 0,
        "bus_bytes": bus["to_host"], "bus_seconds": both_ways / speeds.bus,
        "least_seconds": max(sends, computes, both_ways / speeds.bus) + waits,
        "most_seconds": sends + computes + both_ways / speeds.bus + waits,
    }


def fewest_ranks(stage: int, work: Work, device_bytes: float, offloaded: bool = False) -> int | None:
    """The fewest ranks that must share the states so that a whole step fits; None if no number is enough."""
    def fits(shards: int) -> bool:
        return moments.highest(stage, work, shards, offloaded and stage > 0).total <= device_bytes

    if moments.construction(stage, work) > device_bytes or not fits(MOST_RANKS):
        return None
    return bisect.bisect_left(range(1, MOST_RANKS), True, key=fits) + 1


def away(work: Work, ranks: int, device_bytes: float, speeds: Speeds, place: str) -> dict:
    """A plan's part on offload to this place: {"place", "accumulate", "rows": for each stage 1 to 3 {"stage", "device":
    of model states, "host", "disk", "to_host", "to_device": per step, "link_seconds": of both ways at each of LINKS,
    "together": the peak of a step, "states_fit", "fits", "largest_model": whose states fit}}."""
    rows = []
    for stage in (1, 2, 3):
        there = row(stage, work, ranks, device_bytes, speeds, offloaded=True)
        crosses = formulas.bus_bytes(stage, work.parts().whole, work.shards(ranks), work.dtype, work.accumulate)
        rows.append({
            "stage": stage, "device": there["states"], "host": 0, "disk": 0,
            "host" if place == "cpu" else "disk": there["host_bytes"], **crosses,
            "link_seconds": [sum(crosses.values()) / link for link in LINKS],
            **{name: there[name] for name in ("together", "states_fit", "fits", "largest_model")},
        })
    return {"place": place, "accumulate": work.accumulate, "rows": rows}


def computing(work: Work, speeds: Speeds) -> dict:
    """Operations of a rank in a step, and seconds."""
    on_weights, attends = work.operations()
    rate = speeds.operations * UTILISATION
    return {
        "matrix_operations": on_weights, "attention_operations": attends,
        "compute_seconds": (on_weights + attends) / rate,
        "attention_seconds": attends / rate,  # part of these; twice as long if a fused kernel skips nothing
        "operations": speeds.operations, "utilisation": UTILISATION,
    }


def waiting(work: Work, speeds: Speeds) -> dict:
    """What model parallelism and ranks that share sequences send in a step, while computation must wait."""
    sent, with_p_a, across = work.sent_meanwhile()
    return {
        "model_parallel_bytes": sent,
        "P_a_bytes": with_p_a - sent,
        "model_parallel_inside_a_node": work.model_parallel <= speeds.node,
        "model_parallel_seconds": (sent if work.checkpoints == "whole" else with_p_a) / speeds.wire(
            work.model_parallel),
        "sequence_parallel_bytes": across,
        "sequence_parallel_seconds": across / speeds.wire(work.model_parallel * work.sequence_parallel),
    }
