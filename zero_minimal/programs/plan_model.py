"""Plan of a model: what `plan --model config.json` says. Its sizes are measured (measured.py); the rest is calculated
as for our GPT: model states, units and buckets that are whole for a moment, traffic, time.

    python -m zero_minimal plan --model config.json --ranks 64 --hardware A100-80GB --dtype bf16
"""

import bisect

from zero_minimal.paper import formulas
from zero_minimal.paper.moments import BUCKET, Moment
from zero_minimal.paper.quantities import plural, seconds_text, size_text
from zero_minimal.programs import plan_options
from zero_minimal.programs.measured import Measured, measure
from zero_minimal.programs.planning import MOST_RANKS, NAMES, UTILISATION, Speeds
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.foreign import ForeignModel


def plan(model: ForeignModel, ranks: int, device_bytes: float, dtype: str, batch: int, speeds: Speeds,
         optimizer_bytes: float | None = None) -> dict:
    """The whole calculation, as planning.plan has it. Raises: ValueError for a model without blocks."""
    found = measure(model, batch, dtype)
    computes = computing(model, found, speeds)
    rows = [row(stage, found, ranks, device_bytes, dtype, optimizer_bytes, speeds, computes["compute_seconds"])
            for stage in range(4)]
    fitting = [row["stage"] for row in rows if row["fits"]]
    return {
        "model": model.file, "name": model.sizes["name"], "vocabulary": model.sizes["vocabulary"],
        "parameters": found.parameters, "parameters_of_rank": found.parameters, "layers": found.units,
        "sequence": model.sequence, "batch": batch, "recompute": model.recompute, "checkpoints": "whole",
        "ranks": ranks, "model_parallel": 1, "dtype": dtype, "optimizer_bytes": optimizer_bytes,
        **plan_options.NONE, "offloaded": False, "device_bytes": device_bytes, "rows": rows,
        "first_stage_that_fits": fitting[0] if fitting else None,
        "activations": {"all": found.all, "checkpoints": found.checkpoints, "logits": found.logits,
                        "block_at_work": found.bottom},
        **computes, "model_parallel_seconds": 0, "model_parallel_bytes": 0,
        "inside_a_node": ranks <= speeds.node, "wire": speeds.wire(ranks),
        "network": speeds.network, "link": speeds.link, "node": speeds.node, "bus": speeds.bus,
    }


def row(stage: int, found: Measured, ranks: int, device_bytes: float, dtype: str, optimizer_bytes: float | None,
        speeds: Speeds, computes: float) -> dict:
    """What a stage needs."""
    def at(count: int) -> Moment:
        return max(moments(stage, found, count, dtype, optimizer_bytes), key=lambda moment: moment.total)

    elements, moment = found.parameters, at(ranks)
    states = formulas.model_states(stage, elements, ranks, dtype, optimizer_bytes)
    built = 0 if stage == 3 else 2 * elements * formulas.BYTES[dtype][0]
    sent = formulas.traffic(stage, elements, ranks, dtype)
    sends = sent / speeds.wire(ranks)
    enough = bisect.bisect_left(range(1, MOST_RANKS), True, key=lambda count: at(count).total <= device_bytes) + 1
    return {
        "stage": stage, "name": NAMES[stage], **states, "states": sum(states.values()),
        "moment": moment.name, "states_there": moment.states, "activations": moment.activations,
        "passing": moment.passing, "together": moment.total, "construction": built,
        "whole": [state for state in formulas.STATES if stage < formulas.SHARDED_FROM[state]],
        "states_fit": sum(states.values()) <= device_bytes, "step_fits": moment.total <= device_bytes,
        "fits": max(moment.total, built) <= device_bytes,
        "fewest_data_parallel_ranks_for_states": formulas.fewest_ranks(
            stage, elements, device_bytes, dtype, optimizer_bytes),
        "fewest_data_parallel_ranks": None if built > device_bytes or enough == MOST_RANKS else enough,
        "largest_model": formulas.largest_model(stage, device_bytes, ranks, dtype, 1, optimizer_bytes),
        "sent_bytes": sent, "send_seconds": sends,
        "least_seconds": max(sends, computes), "most_seconds": sends + computes,
    }


def moments(stage: int, found: Measured, ranks: int, dtype: str, optimizer_bytes: float | None) -> list[Moment]:
    """Where a step may be highest (paper/moments.py has them for our GPT)."""
    states = formulas.model_states(stage, found.parameters, ranks, dtype, optimizer_bytes)
    all_states = sum(states.values())
    before = all_states - (states["gradients"] if stage >= 2 else 0)  # gradients come with backward
    passing = (units if stage == 3 else buckets)(stage, found, ranks, dtype)
    return [Moment("logits", before, found.logits, passing["logits"]),
            Moment("top block", before, found.top, passing["block"]),
            Moment("bottom block", all_states, found.bottom, passing["block"]),
            Moment("embedding", all_states, found.embedding, passing["embedding"]),
            Moment("update", all_states, 0, passing["update"])]


def buckets(stage: int, found: Measured, ranks: int, dtype: str) -> dict[str, float]:
    """Stages 0 to 2: bytes of gradients that come parameter by parameter; an embedding's waits for the head's where
    they are one; stage 2 copies them into buckets."""
    size = formulas.BYTES[dtype][0]
    head, largest = found.head * size, found.largest_matrix * size
    filled = min(2 * BUCKET, found.parameters * size) if stage == 2 else 0
    waiting = head if found.tied else 0
    return {"logits": 0, "block": waiting + largest * (2 if stage == 2 else 1) + filled,
            "embedding": head + 2 * waiting + filled,
            "update": in_fp32(min(BUCKET / size, found.parameters), dtype) / (ranks if stage else 1)}


def units(stage: int, found: Measured, ranks: int, dtype: str) -> dict[str, float]:
    """Stage 3: bytes of the root, which is whole; of the unit at work, the next one, and their gradients."""
    size = formulas.BYTES[dtype][0]
    head, root, unit = found.head * size, found.root * size, found.largest_unit * size
    return {"logits": root + unit, "block": root + head + 4 * unit, "embedding": root + 3 * head + 3 * unit,
            "update": in_fp32(max(found.largest_unit, found.root), dtype) / ranks}


def in_fp32(elements: float, dtype: str) -> float:
    """Bytes for the update of so many 16-bit elements: two copies in fp32, and which of them were edited."""
    return 0 if dtype == "fp32" else 9 * elements


def computing(model: ForeignModel, found: Measured, speeds: Speeds) -> dict:
    """Operations of a rank, and seconds. A causal kernel skips half of attention; an encoder's needs all of it."""
    attention = found.attention_operations if model.masked else found.attention_operations / 2
    rate = speeds.operations * UTILISATION
    return {"matrix_operations": found.matrix_operations, "attention_operations": attention,
            "compute_seconds": (found.matrix_operations + attention) / rate, "attention_seconds": attention / rate,
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
        paragraph("Attention is what the library chooses here, torch's fused one if it can.", indent=2, hang=2),
    ))


def compute_note(told: dict) -> str:
    """What a rank computes."""
    share = told["attention_seconds"] / told["compute_seconds"]
    return paragraph(
        f"A step computes for {seconds_text(told['compute_seconds'])}, at {told['utilisation']:.0%} of "
        f"{told['operations'] / 1e12:,.4g} TFLOP/s, the device's in {told['dtype']}. Attention is {share:.0%} of it.")
