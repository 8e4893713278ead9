"""Plan of a model: what `plan --model config.json` says. Its sizes are measured (measured.py); the rest is calculated
as for our GPT: model states, units and buckets that are whole for a moment, traffic, time.

    python -m zero_minimal plan --model config.json --ranks 64 --hardware A100-80GB --dtype bf16
"""

import bisect
from dataclasses import dataclass

from zero_minimal.paper import formulas
from zero_minimal.paper.moments import BUCKET, Moment
from zero_minimal.paper.quantities import plural, seconds_text, size_text
from zero_minimal.programs import plan_offload
from zero_minimal.programs.measured import Measured, measure
from zero_minimal.programs.planning import MOST_RANKS, NAMES, UTILISATION, Speeds
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.foreign import ForeignModel


@dataclass(frozen=True)
class Run:
    """What a step is to be, beside the model and its ranks."""

    dtype: str
    optimizer_bytes: float | None = None
    accumulate: int = 1  # micro-batches
    gradient_bytes: int | None = None  # 4: gradients in fp32 beside 16-bit parameters
    replicate: int = 1  # groups of ranks that each keep all states (HSDP)


def plan(model: ForeignModel, ranks: int, device_bytes: float, dtype: str, batch: int, speeds: Speeds,
         optimizer_bytes: float | None = None, accumulate: int = 1, attention: str = "fused",
         gradient_bytes: int | None = None, offload: str | None = None, replicate: int = 1) -> dict:
    """The whole calculation, as planning.plan has it; with offload "cpu" or "disk" also that of plan_offload.py,
    as "offload".

    Raises: ValueError for a model without blocks, for an attention that the library has not for it, and for gradients
        in fp32 that are offloaded or beside fp32 parameters.
    """
    if gradient_bytes and (offload or dtype == "fp32"):
        raise ValueError("gradients in fp32 are for 16-bit parameters that are not offloaded")
    run = Run(dtype, optimizer_bytes, accumulate, gradient_bytes, replicate)
    shards = ranks // replicate
    found = measure(model, batch, dtype, attention)
    computes = computing(model, found, speeds, accumulate)
    rows = [row(stage, found, ranks, device_bytes, run, speeds, computes["compute_seconds"]) for stage in range(4)]
    fitting = [row["stage"] for row in rows if row["fits"]]
    told = {
        "model": model.file, "name": model.sizes["name"], "vocabulary": model.sizes["vocabulary"],
        "parameters": found.parameters, "parameters_of_rank": found.parameters, "layers": found.units,
        "blocks": found.blocks, "tied": found.tied, "root": found.root, "largest_unit": found.largest_unit,
        "sequence": model.sequence, "batch": batch, "recompute": model.recompute, "checkpoints": "whole",
        "ranks": ranks, "model_parallel": 1, "replicate": replicate, "shards": shards,
        "dtype": dtype, "optimizer_bytes": optimizer_bytes,
        "accumulate": accumulate, "attention": attention, "attention_measured": found.attention,
        "dropout_measured": found.dropout, "sequence_parallel": 1,
        "gradient_bytes": gradient_bytes or formulas.BYTES[dtype][1],
        "offloaded": False, "device_bytes": device_bytes, "rows": rows,
        "first_stage_that_fits": fitting[0] if fitting else None,
        "activations": {"all": found.all, "checkpoints": found.checkpoints, "logits": found.logits,
                        "block_at_work": found.bottom},
        **computes, "model_parallel_seconds": 0, "model_parallel_bytes": 0,
        "inside_a_node": shards <= speeds.node, "wire": speeds.wire(shards), "wire_between": speeds.wire(ranks),
        "network": speeds.network, "link": speeds.link, "node": speeds.node, "bus": speeds.bus,
    }
    if offload:
        told["offload"] = {"place": offload, "accumulate": accumulate, "rows": [
            plan_offload.row(stage, plan_offload.Sizes(found.parameters, shards, dtype), device_bytes, offload,
                     accumulate, optimizer_bytes, highest(stage, found, shards, run, offloaded=True).total,
                     construction(stage, found, dtype)) for stage in (1, 2, 3)]}
    return told


def row(stage: int, found: Measured, ranks: int, device_bytes: float, run: Run, speeds: Speeds,
        computes: float) -> dict:
    """What a stage needs."""
    def at(count: int) -> Moment:
        return highest(stage, found, count, run)

    shards, elements, gradients = ranks // run.replicate, found.parameters, run.gradient_bytes
    moment = at(shards)
    states = formulas.model_states(stage, elements, shards, run.dtype, run.optimizer_bytes, gradients)
    built = construction(stage, found, run.dtype)
    sent = formulas.traffic(stage, elements, shards, run.dtype, run.accumulate, gradients)
    between = formulas.traffic_between(elements, shards, run.replicate, run.dtype, gradients)
    sends = sent / speeds.wire(shards) + between / speeds.wire(ranks)
    enough = bisect.bisect_left(range(1, MOST_RANKS), True, key=lambda count: at(count).total <= device_bytes) + 1
    fewest = formulas.fewest_ranks(stage, elements, device_bytes, run.dtype, run.optimizer_bytes,
                                   gradient_bytes=gradients)
    return {
        "stage": stage, "name": NAMES[stage], **states, "states": sum(states.values()),
        "moment": moment.name, "states_there": moment.states, "activations": moment.activations,
        "passing": moment.passing, "together": moment.total, "construction": built,
        "whole": [state for state in formulas.STATES if stage < formulas.SHARDED_FROM[state]],
        "states_fit": sum(states.values()) <= device_bytes, "step_fits": moment.total <= device_bytes,
        "fits": max(moment.total, built) <= device_bytes,
        "fewest_data_parallel_ranks_for_states": fewest and fewest * run.replicate,
        "fewest_data_parallel_ranks": None if built > device_bytes or enough == MOST_RANKS else enough * run.replicate,
        "largest_model": formulas.largest_model(stage, device_bytes, shards, run.dtype, 1, run.optimizer_bytes,
                                                gradient_bytes=gradients),
        "sent_bytes": sent + between, "between_bytes": between, "send_seconds": sends,
        "least_seconds": max(sends, computes), "most_seconds": sends + computes,
    }


def construction(stage: int, found: Measured, dtype: str) -> int:
    """Bytes for a moment before the first step: stages 0 to 2 copy the model into flat memory."""
    return 0 if stage == 3 else 2 * found.parameters * formulas.BYTES[dtype][0]


def highest(stage: int, found: Measured, ranks: int, run: Run, offloaded: bool = False) -> Moment:
    """The peak of a step. offloaded: the ranks' hosts keep and update the optimizer's state."""
    return max(moments(stage, found, ranks, run, offloaded), key=lambda moment: moment.total)


def moments(stage: int, found: Measured, ranks: int, run: Run, offloaded: bool = False) -> list[Moment]:
    """Where a step may be highest (paper/moments.py has them for our GPT)."""
    states = formulas.states_on_device(stage, found.parameters, ranks, run.dtype, offloaded, run.optimizer_bytes,
                                       run.gradient_bytes)
    all_states = sum(states.values())
    # gradients come with backward, but for those of micro-batches before
    before = all_states - (states["gradients"] if stage >= 2 and run.accumulate == 1 else 0)
    passing = (units if stage == 3 else buckets)(stage, found, ranks, run.dtype)
    return [Moment("logits", before, found.logits, passing["logits"]),
            Moment("head", before, found.with_head, passing["head"]),
            Moment("top block", before, found.top, passing["block"]),
            Moment("bottom block", all_states, found.bottom, passing["block"]),
            Moment("embedding", all_states, found.embedding, passing["embedding"]),
            Moment("update", all_states, 0, 0 if offloaded else passing["update"])]


def buckets(stage: int, found: Measured, ranks: int, dtype: str) -> dict[str, float]:
    """Stages 0 to 2: bytes of gradients that come parameter by parameter; an embedding's waits for the head's where
    they are one; stage 2 copies them into buckets."""
    size = formulas.BYTES[dtype][0]
    head, largest = found.head * size, found.largest_matrix * size
    filled = min(2 * BUCKET, found.parameters * size) if stage == 2 else 0
    waiting = head if found.tied else 0
    return {"logits": 0, "head": head, "block": waiting + largest * (2 if stage == 2 else 1) + filled,
            "embedding": head + 2 * waiting + filled,
            "update": in_fp32(min(BUCKET / size, found.parameters), dtype) / (ranks if stage else 1)}


def units(stage: int, found: Measured, ranks: int, dtype: str) -> dict[str, float]:
    """Stage 3: bytes of the root, which is whole; of the unit at work, the next one, and their gradients."""
    size = formulas.BYTES[dtype][0]
    head, root, unit = found.head * size, found.root * size, found.largest_unit * size
    return {"logits": root + unit, "head": root + unit + head, "block": root + head + 4 * unit,
            "embedding": root + 3 * head + 3 * unit,
            "update": in_fp32(max(found.largest_unit, found.root), dtype) / ranks}


def in_fp32(elements: float, dtype: str) -> float:
    """Bytes for the update of so many 16-bit elements: two copies in fp32, and which of them were edited."""
    return 0 if dtype == "fp32" else 9 * elements


def computing(model: ForeignModel, found: Measured, speeds: Speeds, times: int) -> dict:
    """Operations of a rank in so many micro-batches, and seconds. A causal kernel that is fused skips half of
    attention; an encoder's needs all of it."""
    skips = found.attention == "fused" and not model.masked
    attention = times * (found.attention_operations / 2 if skips else found.attention_operations)
    matrices, rate = times * found.matrix_operations, speeds.operations * UTILISATION
    return {"matrix_operations": matrices, "attention_operations": attention,
            "compute_seconds": (matrices + attention) / rate, "attention_seconds": attention / rate,
            "operations": speeds.operations, "utilisation": UTILISATION}


# --------------------------------------------------------------------------------------------------------------- words


def heading(told: dict, hardware: str) -> str:
    """Which model, on what."""
    return paragraph(
        f"Ψ = {told['parameters']:,} parameters in {told['dtype']} on {plural(told['ranks'], 'rank')}: {told['name']} "
        f"of {told['model']}, {plural(told['layers'], 'block')}, vocabulary {told['vocabulary']:,};",
        f"{told['batch']} × {told['sequence']} tokens a rank,",
        f"{'blocks recomputed' if told['recompute'] else 'nothing recomputed'}.",
        "GB are 10⁹ bytes, as in the paper;",
        f"{hardware or 'a device'} counts as {size_text(told['device_bytes'])}.")


def activation_notes(told: dict) -> str:
    """What activations take."""
    sizes = told["activations"]
    return "\n".join((
        paragraph(f"Activations of {told['batch']} × {told['sequence']} tokens, counted while the model's own code ran "
                  "on tensors without memory:"),
        paragraph(f"{size_text(sizes['all'])} if all are kept, {size_text(sizes['checkpoints'])} as one checkpoint a "
                  "block (--recompute)", indent=2, hang=2),
        paragraph(f"at most {size_text(sizes['logits'])} while the loss is computed, and "
                  f"{size_text(sizes['block_at_work'])} while backward is in the first block", indent=2, hang=2),
        paragraph(*attention_words(told), indent=2, hang=2),
    ))


def attention_words(told: dict) -> list[str]:
    """Which attention was measured, and why it is another one than was asked for."""
    measured, asked = told["attention_measured"], told["attention"]
    words = {
        "fused": "Attention measured: the library's sdpa, which ran torch's fused kernel and keeps no scores.",
        "unfused": "Attention measured: unfused, which keeps the scores of each block.",
        "recomputed": "Attention measured: the library's own unfused code, computed again in backward.",
    }
    lines = [words[measured]]
    if measured != asked:
        lines.insert(0, "The library has no fused attention for this model.")
    if not told["dropout_measured"]:
        lines.append("Dropout was off, since the kernel that is counted here has none: its masks are not counted.")
    return lines


def compute_note(told: dict) -> str:
    """What a rank computes."""
    share = told["attention_seconds"] / told["compute_seconds"]
    return paragraph(
        f"A step computes for {seconds_text(told['compute_seconds'])}, at {told['utilisation']:.0%} of "
        f"{told['operations'] / 1e12:,.4g} TFLOP/s, the device's in {told['dtype']}. Attention is {share:.0%} of it.")
