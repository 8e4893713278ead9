"""Planning: the calculation behind `plan`. Formulas only; `simulate` runs code, and a test holds the two together."""

import itertools
import math
from dataclasses import dataclass

from zero_minimal.core.mesh import divisors
from zero_minimal.paper import formulas, moments, operations
from zero_minimal.paper.expressions import exported
from zero_minimal.paper.hardware import GPU, GPUS, NETWORK
from zero_minimal.paper.kernels import ATTENTION
from zero_minimal.paper.moments import CHECKPOINTS, Work
from zero_minimal.paper.shapes import check_heads, parameter_count
from zero_minimal.workload.model import GPTConfig

NAMES = ("data parallel", "P_os", "P_os+g", "P_os+g+p")
UTILISATION = 0.4  # of the operations that a GPU could do: what good training runs reach
MOST_RANKS = 2**30
PAPERS = GPUS["V100-32GB"]
NO_BUS = {"to_host": 0, "to_device": 0}


@dataclass(frozen=True)
class Speeds:
    """Of a device: operations a second; bytes a second that it sends inside a node of so many devices, and outside; and
    to its host, or from it."""

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
        """Bytes a second in a ring of neighbours, with which `ranks` ranks are filled: it is as fast as its slowest
        link, so a ring that leaves the node goes at the network's rate."""
        return self.link if ranks <= self.node else self.network


def plan(
    config: GPTConfig, ranks: int, device_bytes: float, dtype: str = "fp16", batch: int = 1, model_parallel: int = 1,
    optimizer_bytes: float | None = None, checkpoints: str = "whole", speeds: Speeds | None = None,
    offloaded: bool = False, accumulate: int = 1, attention: str = "fused", sequence_parallel: int = 1,
    gradient_bytes: int | None = None, replicate: int = 1,
) -> dict:
    """The whole calculation, as JSON (bytes and seconds); "rows" has an entry for each stage.

    Args:
        optimizer_bytes: the paper's K (None: Adam's).
        checkpoints: "whole", "P_a" or "P_a+cpu", where config.recompute keeps only these.
        speeds: None: those of the paper's V100, in this dtype.
        offloaded: at stages 1 to 3 the ranks' hosts keep and update the optimizer's state.
        accumulate: micro-batches in a step.
        attention: "fused", "unfused" or "recomputed" (paper/kernels.py).
        sequence_parallel: so many of the data-parallel ranks share each sequence, as in DeepSpeed-Ulysses.
        gradient_bytes: 4 for gradients in fp32 beside 16-bit parameters; None: as the dtype has it.
        replicate: so many groups of the data-parallel ranks each keep all states (HSDP).
    Raises: ValueError if ranks are not groups of model_parallel, if these cannot share the heads, or for P_a without
        them; and for gradients in fp32 that are offloaded.
    """
    check(config, ranks, model_parallel, checkpoints)
    work = Work(config, batch, dtype, model_parallel, checkpoints, accumulate, attention, sequence_parallel,
                gradient_bytes, replicate)
    check_work(work, ranks, offloaded)
    speeds = speeds or Speeds.of(PAPERS, dtype)
    rows = [row(stage, work, ranks, device_bytes, optimizer_bytes, speeds, offloaded)
            | {"fewest_data_parallel_ranks": fewest_ranks(stage, work, device_bytes, optimizer_bytes, offloaded)}
            for stage in range(4)]
    for each, name in itertools.product(rows, ("fewest_data_parallel_ranks", "fewest_data_parallel_ranks_for_states")):
        if each[name] is not None:  # in each group that keeps all; whole groups that share sequences
            whole = math.lcm(replicate, sequence_parallel)
            each[name] = -(-each[name] * replicate // whole) * whole
    fitting = [row["stage"] for row in rows if row["fits"]]
    return {
        "parameters": parameter_count(config),
        "parameters_of_rank": moments.rank_parameters(work),
        "layers": config.layers, "hidden": config.hidden, "heads": config.heads, "vocabulary": config.vocabulary,
        "sequence": config.sequence, "batch": batch, "recompute": config.recompute, "checkpoints": checkpoints,
        "ranks": ranks, "model_parallel": model_parallel, "replicate": replicate, "shards": work.shards(ranks),
        "dtype": dtype, "optimizer_bytes": optimizer_bytes, "offloaded": offloaded, "device_bytes": device_bytes,
        "accumulate": accumulate, "attention": attention,
        "sequence_parallel": sequence_parallel, "gradient_bytes": gradient_bytes or formulas.BYTES[dtype][1],
        "rows": rows,
        "first_stage_that_fits": fitting[0] if fitting else None,
        "activations": activations(work),
        **computing(work, speeds),
        **waiting(work, speeds),
        "inside_a_node": ranks / replicate <= speeds.node,
        "wire": speeds.wire(ranks / replicate), "wire_between": speeds.wire(ranks),
        "network": speeds.network, "link": speeds.link, "node": speeds.node, "bus": speeds.bus,
    }


def check(config: GPTConfig, ranks: int, model_parallel: int, checkpoints: str) -> None:
    """Raises: ValueError, saying what is accepted, for what cannot be planned."""
    check_divides(model_parallel, ranks, f"{ranks} ranks are not groups of {model_parallel} that share a model")
    if checkpoints not in CHECKPOINTS:
        raise ValueError(f"checkpoints must be one of {', '.join(CHECKPOINTS)}, not {checkpoints!r}")
    if checkpoints != "whole" and (model_parallel == 1 or not config.recompute):
        raise ValueError(f"{checkpoints} cuts the checkpoints of model-parallel ranks: it needs --mp, and --recompute")
    check_heads(config, model_parallel)


def check_divides(parts: int, ranks: int, refusal: str) -> None:
    """Raises: ValueError(refusal), and which numbers are accepted, if `ranks` cannot be cut in so many parts."""
    if ranks % parts:
        raise ValueError(f"{refusal}; accepted: {', '.join(map(str, divisors(ranks)))}")


def check_replicate(replicate: int, ranks: int) -> None:
    """The same for groups of data-parallel ranks that each keep all states."""
    check_divides(replicate, ranks, f"{ranks} data-parallel ranks are not {replicate} groups of equal size")


def check_work(work: Work, ranks: int, offloaded: bool) -> None:
    """The same for what Work has beside that."""
    together, parts = work.sequence_parallel, ranks // work.model_parallel
    if work.attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, not {work.attention!r}")
    check_divides(together, parts, f"{parts} data-parallel ranks are not groups of {together} that share a sequence")
    check_replicate(work.replicate, parts)
    if work.config.sequence % together or work.config.heads % (together * work.model_parallel):
        raise ValueError(f"{together} ranks that share a sequence need {together} × M to divide "
                         f"{work.config.heads} heads, and {together} to divide {work.config.sequence} tokens")
    if work.gradient_bytes and (offloaded or work.dtype == "fp32"):
        raise ValueError("gradients in fp32 are for 16-bit parameters that are not offloaded")


@exported
def row(stage: int, work: Work, ranks: int, device_bytes: float, optimizer_bytes: float | None, speeds: Speeds,
        offloaded: bool = False) -> dict:
    """What a stage needs: model states, the peak of a step, traffic, time. Formulas that a page can have, too
    (expressions.py)."""
    shards, elements = work.shards(ranks), moments.rank_parameters(work)
    away = offloaded and stage > 0  # stage 0 has no shards that could leave
    gradients, times = work.gradient_bytes, work.accumulate
    states = formulas.states_on_device(stage, elements, shards, work.dtype, away, optimizer_bytes, gradients)
    moment = moments.highest(stage, work, shards, optimizer_bytes, away)
    built = moments.construction(stage, work)
    sent = formulas.traffic(stage, elements, shards, work.dtype, times, gradients)
    between = formulas.traffic_between(elements, shards, work.replicate, work.dtype, gradients)
    sends = sent / speeds.wire(ranks / work.replicate) + (between / speeds.wire(ranks) if between else 0)
    bus = formulas.bus_bytes(stage, elements, shards, work.dtype, times) if away else NO_BUS
    crosses, both_ways = bus["to_host"], bus["to_host"] + bus["to_device"]
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
        "fewest_data_parallel_ranks_for_states": formulas.fewest_ranks(
            stage, elements, device_bytes, work.dtype, optimizer_bytes, away, gradients),
        "largest_model": formulas.largest_model(
            stage, device_bytes, shards, work.dtype, work.model_parallel, optimizer_bytes, away, gradients),
        "sent_bytes": sent + between, "between_bytes": between, "send_seconds": sends,
        "host_bytes": formulas.host_bytes(elements, shards, work.dtype, optimizer_bytes) if away else 0,
        "bus_bytes": crosses, "bus_seconds": both_ways / speeds.bus,
        "least_seconds": max(sends, computes, both_ways / speeds.bus) + waits,
        "most_seconds": sends + computes + both_ways / speeds.bus + waits,
    }


def fewest_ranks(stage: int, work: Work, device_bytes: float, optimizer_bytes: float | None,
                 offloaded: bool = False) -> int | None:
    """The smallest data-parallel group on which all of a step fits; None if no number is enough."""
    def fits(ranks: int) -> bool:
        return moments.highest(stage, work, ranks, optimizer_bytes, offloaded and stage > 0).total <= device_bytes

    if moments.construction(stage, work) > device_bytes or not fits(MOST_RANKS):
        return None
    too_few, enough = 0, MOST_RANKS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def activations(work: Work) -> dict:
    """Bytes of what a rank may keep for backward, in the ways there are, and of what is there for a moment."""
    config = work.config
    batch = moments.shared(work.batch, work.sequence_parallel)
    run = (config.layers, config.hidden, batch, config.sequence, work.dtype)
    return {
        "all": config.layers * work.block(),
        "papers_estimate": formulas.activations(*run),
        "checkpoints": formulas.checkpoints(*run),
        "P_a": formulas.checkpoints(*run, cut=work.model_parallel),
        "P_a+cpu": 0,
        "block_at_work": work.at_work(),
        "logits": work.logits(),
        "scores": work.scores(),
    }


def computing(work: Work, speeds: Speeds) -> dict:
    """Operations of a rank in a step, and seconds. A fused kernel of attention skips what is masked."""
    config = work.config
    batch = work.batch * work.accumulate
    share = work.model_parallel * work.sequence_parallel
    own = operations.matrices(config.layers, config.hidden, config.vocabulary, batch * config.sequence,
                              config.recompute) / share
    again = config.recompute or work.attention == "recomputed"
    whole = operations.attention(config.layers, config.hidden, batch, config.sequence, again,
                                 work.attention == "fused") / share
    rate, attends = speeds.operations * UTILISATION, whole / 2 if work.attention == "fused" else whole
    return {
        "matrix_operations": own, "attention_operations": attends,
        "compute_seconds": (own + attends) / rate,
        "attention_seconds": attends / rate,  # of these; if it is fused, so much again if nothing is skipped
        "operations": speeds.operations, "utilisation": UTILISATION,
    }


def waiting(work: Work, speeds: Speeds) -> dict:
    """What model parallelism and ranks that share sequences send in a step; nothing can be computed meanwhile."""
    config, batch = work.config, work.batch * work.accumulate
    shared = moments.shared(batch, work.sequence_parallel)
    run = (config.layers, config.hidden, shared, config.sequence, work.dtype, work.model_parallel)
    across = 0 if work.sequence_parallel == 1 else formulas.sequence_parallel_traffic(
        config.layers, config.hidden, batch, config.sequence, work.dtype, work.sequence_parallel,
        config.recompute) / work.model_parallel
    sent, with_p_a = (formulas.model_parallel_traffic(*run, partition=partition, recompute=config.recompute)
                      for partition in (False, True))
    return {
        "model_parallel_bytes": sent,
        "P_a_bytes": with_p_a - sent,
        "model_parallel_inside_a_node": work.model_parallel <= speeds.node,
        "model_parallel_seconds": (sent if work.checkpoints == "whole" else with_p_a) / speeds.wire(
            work.model_parallel),
        "sequence_parallel_bytes": across,
        "sequence_parallel_seconds": across / speeds.wire(work.model_parallel * work.sequence_parallel),
    }
