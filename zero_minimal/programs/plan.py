"""Plan: what a model needs on each device, by stage, before a run. It uses only formulas; `simulate` runs code.

    python -m zero_minimal plan --params 7.5B --ranks 64 --hardware V100-32GB
    python -m zero_minimal plan --model config.json --ranks 64 --hardware A100-80GB --dtype bf16
"""

import argparse

from zero_minimal.paper import formulas
from zero_minimal.paper.hardware import GPUS, NETWORK
from zero_minimal.paper.moments import CHECKPOINTS
from zero_minimal.paper.quantities import count_text, plural, seconds_text, size, size_text, size_unit
from zero_minimal.pictures.plan_chart import draw_plan
from zero_minimal.programs import deepspeed_written, plan_markdown, report
from zero_minimal.programs.models import add_flags, chosen, sizes_text
from zero_minimal.programs.plan_markdown import ranks_text, sent
from zero_minimal.programs.planning import LINKS, NAMES, PLACES, Speeds, plan
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import Parser, positive

HOW = ("checkpoints", "accumulate", "attention", "sequence_parallel", "replicate", "optimizer_bytes")  # fields of Work


def describe(told: dict, hardware: str = "") -> str:
    """The tables for a reader, at most 80 columns wide. hardware: the name of the device, if it has one."""
    return "\n".join((
        "", heading(told, hardware), *map(paragraph, options(told)),
        "", report.table(state_rows(told)), "", state_notes(told),
        "", report.table(step_rows(told)), "", verdict(told), "", step_notes(),
        "", activation_notes(told),
        "", time_notes(told), "", report.table(time_rows(told)),
        *(["", offload_notes(told["offload"])] if "offload" in told else []),
    ))


def heading(told: dict, hardware: str) -> str:
    """The model and its devices."""
    ranks, shared = told["ranks"], told["model_parallel"]
    groups = "" if shared == 1 else (
        f" = {ranks // shared:,} × {shared} that share a model: N in formulas is {told['shards']:,}, Ψ a rank's share,"
        f" {told['parameters_of_rank']:,}")
    shape = f"{groups}. {sizes_text(told)}" if "model" not in told else (
        f": {told['name']} of {told['model']}, {plural(told['layers'], 'block')}, vocabulary {told['vocabulary']:,}")
    return paragraph(
        f"{'Ψ = ' if shared == 1 else ''}{told['parameters']:,} parameters in {told['dtype']} on "
        f"{plural(ranks, 'rank')}{shape};",
        f"{told['batch']} × {sequence_text(told)} tokens a {'rank' if shared == 1 else 'group'},",
        f"{'blocks recomputed' if told['recompute'] else 'nothing recomputed'}.",
        f"GB are 10⁹ bytes, as in the paper; {hardware or 'a device'} counts as {size_text(told['device_bytes'])}.")


def options(told: dict) -> list[str]:
    """Paragraphs about the other options."""
    lines, together, dtype = [], told["sequence_parallel"], told["dtype"]
    if told["accumulate"] > 1:
        lines.append(f"A step is {told['accumulate']} micro-batches. Stages 0 and 1 reduce gradients once, since they "
                     "keep them whole; stage 2 each time, and stage 3 gathers parameters each time, too.")
    if told["attention"] != "fused" and "model" not in told:  # for a model of transformers, the measured one is named
        again = told["attention"] == "recomputed" or told["recompute"]
        lines.append(f"Attention is not fused: scores are {size_text(told['activations']['scores'])} a block, "
                     f"{'computed again in backward' if again else 'kept in each'}, and three such matrices are there "
                     "for a moment.")
    if told["gradient_bytes"] == 4 and dtype != "fp32":
        lines.append("Gradients are kept and reduced in fp32: 18 bytes a parameter instead of 16 (Megatron Core's "
                     "distributed optimizer: 6 + 12/N).")
    if together > 1:
        lines.append(f"{plural(together, 'rank')} share each sequence (DeepSpeed-Ulysses, arXiv:2309.14509): each has "
                     f"{told['sequence'] // together:,} of {told['sequence']:,} tokens, and of attention some heads. "
                     f"Model states are cut over all ranks{' of a group' * (told['replicate'] > 1)}.")
    if told["replicate"] > 1:
        lines.append(f"{plural(told['replicate'], 'group')} of ranks each keep all states, as in HSDP "
                     f"(arXiv:2304.11277): N in formulas is {told['shards']:,}. All is sent within a group; between "
                     "groups, once a step, an all-reduce of the gradient shard.")
    return lines


# --------------------------------------------------------------------------------------------------------------- memory


def state_rows(told: dict) -> list[list[str]]:
    """Only model states, as the paper counts them."""
    unit, scale = size_unit(max(row["together"] for row in told["rows"]))
    rows = [[f"model states, {unit}", *formulas.STATES, "together", "fewest", "largest"]]
    for row in told["rows"]:
        sizes = [row[name] for name in (*formulas.STATES, "states")]
        rows.append([f"  {row['stage']}  {row['name']}", *(f"{size / scale:,.2f}" for size in sizes),
                     ranks_text(row["fewest_data_parallel_ranks_for_states"], told), count_text(row["largest_model"])])
    return rows


def state_notes(told: dict) -> str:
    """The meaning of the columns, and what another program counts."""
    adams = told["optimizer_bytes"] is None and told["dtype"] != "fp32"
    notes = [paragraph("Fewest: ranks on which these fit; largest: the model whose states do, on as many ranks as "
                       "here. What ran in the paper's Table 2 was 62% to 82% of its largest.")]
    if adams:
        notes.append(paragraph(
            "DeepSpeed's estimator has 2Ψ + 18Ψ/N at stage 2 where the paper has 2Ψ + 14Ψ/N: it counts gradients in "
            f"fp32 besides, here {size_text(4 * told['parameters_of_rank'] / told['shards'])}. This code turns one "
            "bucket at a time into fp32. At stage 3 its 18Ψ/N is more than 16Ψ/N for the same reason; 4 bytes for each "
            "parameter of the largest module come on top, which here stand under passing."))
    return "\n".join(notes)


def step_rows(told: dict) -> list[list[str]]:
    """The peak of a step."""
    unit, scale = size_unit(max(row["together"] for row in told["rows"]))
    rows = [[f"step, {unit}", "highest at", "states", "activations", "passing", "together", "fits?", "fewest"]]
    for row in told["rows"]:
        sizes = [row[name] for name in ("states_there", "activations", "passing", "together")]
        fits = ("yes" if row["fits"] else "a step" if row["step_fits"] else "states" if row["states_fit"] else "no")
        rows.append([f"  {row['stage']}", row["moment"], *(f"{size / scale:,.2f}" for size in sizes), fits,
                     ranks_text(row["fewest_data_parallel_ranks"], told)])
    return rows


def step_notes() -> str:
    """The meaning of the columns, and what they leave out."""
    return paragraph(
        "Passing: parameters and gradients that are whole for a moment (units at stage 3, gradients before they are "
        "reduced), copies in fp32. At logits and top block, where backward begins, stages 2 and 3 have no gradients "
        "yet. On top come fragmentation and what belongs to no tensor, such as CUDA's context and NCCL's buffers. "
        "Nothing is counted for dropout.")


def verdict(told: dict) -> str:
    """Which stage fits, in a sentence."""
    stage, device, rows = told["first_stage_that_fits"], size_text(told["device_bytes"]), told["rows"]
    if stage is not None:
        alone = next(row["stage"] for row in rows if row["states_fit"])
        return paragraph(f"stage {stage}, {NAMES[stage]}, is the first that fits into {device}"
                         f"{'' if alone == stage else f' (the states alone: stage {alone})'}")
    too_large = f"no stage fits into {device}"
    enough = [(row["fewest_data_parallel_ranks"], row["stage"]) for row in rows if row["fewest_data_parallel_ranks"]]
    if enough:
        fewest, stage = min(enough)
        return paragraph(f"{too_large} on so few ranks: stage {stage} does on {ranks_text(fewest, told)}; or --mp")
    with_states = [row for row in rows if row["states_fit"]]
    if not with_states:
        return paragraph(f"{too_large} on so few ranks: more --ranks, or --mp")
    last = with_states[-1]
    if last["step_fits"]:
        return paragraph(f"{too_large}: a step of stage {last['stage']} does, but its model is copied into flat memory "
                         f"before the first, for which there must be {size_text(last['construction'])}: more --ranks "
                         "and stage 3, or --mp")
    if last["activations"] < last["passing"]:
        return paragraph(f"{too_large}: the states do, but not the units that stage 3 gathers whole beside them: more "
                         "--mp, or more and narrower blocks")
    ways = [f"a smaller {'--batch' if told['batch'] > 1 else '--sequence'}", "--mp"]
    ways += [] if told["recompute"] else ["--recompute"]
    ways += ["--checkpoints P_a"] if told["recompute"] and told["checkpoints"] == "whole" else []
    return paragraph(f"{too_large}, since the activations are too many: {', '.join(ways[:-1])} or {ways[-1]}")


def activation_notes(told: dict) -> str:
    """The memory of activations, and the options that reduce it."""
    counted = ", counted while the model's own code ran on tensors without memory" if "model" in told else ""
    items = (of_a_model if "model" in told else of_our_gpt)(told)
    return "\n".join([paragraph(f"Activations of {told['batch']} × {sequence_text(told)} tokens{counted}:"),
                      *(paragraph(item, indent=2, hang=2) for item in items)])


def of_our_gpt(told: dict) -> list[str]:
    """Activations of our GPT."""
    sizes, shared = told["activations"], told["model_parallel"]
    elements = "16·b·s·h" if shared == 1 else f"(4 + 12/{shared})·b·s·h"
    partitioned = (f"{size_text(sizes['P_a'])} with P_a, none on the device with P_a+cpu" if shared > 1
                   else "P_a needs model parallelism (--mp)")
    items = [f"{size_text(sizes['all'])} if all are kept: {elements} a block in this project's GPT (the paper's "
             f"estimate is 12·b·s·h, {size_text(sizes['papers_estimate'])})",
             f"{size_text(sizes['checkpoints'])} as one checkpoint a block (--recompute); {partitioned}",
             f"{size_text(sizes['block_at_work'])} for the block at work; before that {size_text(sizes['logits'])} for "
             "logits and loss"]
    if told["attention"] == "fused":
        items.append("Attention is taken to be fused: it keeps no matrix of scores, which would be "
                     f"{size_text(sizes['scores'])} a block, and several of them.")
    return items


def of_a_model(told: dict) -> list[str]:
    """Activations of a model of transformers; which attention was measured, and why not the requested one."""
    sizes = told["activations"]
    measured = {
        "fused": "the library's sdpa, which ran torch's fused kernel and keeps no scores.",
        "unfused": "unfused, which keeps the scores of each block.",
        "recomputed": "the library's own unfused code, computed again in backward.",
    }[told["attention_measured"]]
    other = told["attention_measured"] != told["attention"]
    return [f"{size_text(sizes['all'])} if all are kept, {size_text(sizes['checkpoints'])} as one checkpoint a block "
            "(--recompute)",
            f"at most {size_text(sizes['logits'])} while the loss is computed, and {size_text(sizes['block_at_work'])} "
            "while backward is in the first block",
            ("The library has no fused attention for this model. " if other else "") + f"Attention measured: {measured}"
            + ("" if told["dropout_measured"] else
               " Dropout was off, since the kernel that is counted here has none: its masks are not counted.")]


def sequence_text(told: dict) -> str:
    """A rank's tokens of a sequence."""
    own = told["sequence"] // told["sequence_parallel"]
    return str(own) if own == told["sequence"] else f"{own} of {told['sequence']}"


def offload_notes(away: dict) -> str:
    """What is on device, host and disk, and what crosses the bus between them. away: the plan's "offload"."""
    words = "the host" if away["place"] == "cpu" else "a disk"
    unit, scale = size_unit(max(max(row["device"], row["host"], row["disk"], row["together"]) for row in away["rows"]))
    states = [[f"offloaded, {unit}", "device", "host", "disk", "a step", "fits?", "largest"]]
    bus = [["bus, a step", "to the host", "back", *(f"at {link / 1e9:,.0f} GB/s" for link in LINKS)]]
    for row in away["rows"]:
        fits = "yes" if row["fits"] else "states" if row["states_fit"] else "no"
        sizes = (row["device"], row["host"], row["disk"], row["together"])
        states.append([f"  stage {row['stage']}", *(f"{size / scale:,.2f}" for size in sizes), fits,
                       count_text(row["largest_model"])])
        bus.append([f"  stage {row['stage']}", size_text(row["to_host"]), size_text(row["to_device"]),
                    *map(seconds_text, row["link_seconds"])])
    micro = ("" if away["accumulate"] == 1 else
             f" {away['accumulate']} micro-batches a step: gradients cross once at stage 1, each time at 2 and 3.")
    notes = [paragraph(f"Masters, optimizer state and gradients on {words}, of each rank. Device: model states there; "
                       "a step: its peak; largest: the model whose states fit.")]
    if away["place"] == "disk":
        notes.append(paragraph("The host's memory is what --host-budget says, whatever the model is."))
    return "\n".join((report.table(states), "", *notes, "", report.table(bus), "",
                      paragraph("Seconds of both ways, one after the other, if nothing went on beside them." + micro)))


# ----------------------------------------------------------------------------------------------------------------- time


def time_notes(told: dict) -> str:
    """What a rank computes and what it waits for."""
    computes, of_attention = told["compute_seconds"], told["attention_seconds"]
    skipped = "." if "model" in told else ": nothing is skipped." if told["attention"] != "fused" else (
        f" if its kernel skips what is masked; if not, a step is {seconds_text(computes + of_attention)}.")
    lines = [f"A step computes for {seconds_text(computes)}, at {told['utilisation']:.0%} of "
             f"{told['operations'] / 1e12:,.4g} TFLOP/s, the device's in {told['dtype']}. "
             f"Attention is {of_attention / computes:.0%} of it{skipped}"]
    if told["sequence_parallel"] > 1:
        lines.append(f"It waits {seconds_text(told['sequence_parallel_seconds'])} for the all-to-alls of ranks that "
                     f"share a sequence: {size_text(told['sequence_parallel_bytes'])}.")
    if told["model_parallel"] > 1:
        inside = told["model_parallel_inside_a_node"]
        speed = (f"{size_text(told['link'])}/s, a link inside a node" if inside
                 else f"{size_text(told['network'])}/s, the network")
        again = "since blocks are recomputed" if told["recompute"] else "since nothing is recomputed"
        more = f" (P_a sends another {size_text(told['P_a_bytes'])})" if told["recompute"] else ""
        lines.append(f"It waits {seconds_text(told['model_parallel_seconds'])} for the all-reduces of model "
                     f"parallelism, which nothing overlaps: {size_text(told['model_parallel_bytes'])}, {again}{more}, "
                     f"at {speed}.")
    return "\n".join(map(paragraph, [*lines, wire_note(told)]))


def wire_note(told: dict) -> str:
    """The speed at which gradients and parameters travel, and why."""
    if told["inside_a_node"]:
        of_group = "of a group " if told["replicate"] > 1 else ""
        why = f"a link: a node has {told['node']} devices, so all {of_group}are inside one"
    else:
        why = ("the network: a ring that leaves the node is as fast as its slowest link (a node has "
               f"{told['node']} devices)")
    between = f"; between groups at {size_text(told['wire_between'])}/s" if told["replicate"] > 1 else ""
    return f"Data-parallel ranks send at {size_text(told['wire'])}/s, {why}{between}:"


def time_rows(told: dict) -> list[list[str]]:
    """What data-parallel ranks send, and the shortest and longest time of a step."""
    ways = "sent in a step" if told["replicate"] == 1 else "within + between"
    return [["stage", ways, "takes", "a step, all overlaps", "a step, nothing does"]] + [
        [f"  {row['stage']}", sent(row),
         *(seconds_text(row[time]) for time in ("send_seconds", "least_seconds", "most_seconds"))]
        for row in told["rows"]]


# ------------------------------------------------------------------------------------------------------------- command


def rate(text: str) -> float:
    """The type of a flag: a number above 0, at most 10¹⁸."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e18:
        raise argparse.ArgumentTypeError(f"a number above 0, at most 10¹⁸, is wanted, not {text!r}")
    return value


def parser() -> Parser:
    """The flags."""
    result = Parser(prog="python -m zero_minimal plan", description="What a model needs on each device, by stage.")
    add_flags(result, picture="memory by stage and by ranks")
    add = result.add_argument
    add("--hardware", default="V100-32GB", choices=tuple(GPUS), metavar="GPU",
        help=f"one of {', '.join(GPUS)} (default: V100-32GB, the paper's)")
    add("--memory", type=size, metavar="SIZE", help="of a device, such as 24GB, instead of the GPU's")
    add("--optimizer-bytes", type=rate, metavar="K", help="optimizer state per parameter (default: Adam's, 12, or 8 in "
        "fp32)")
    add("--tflops", type=rate, help="10¹² operations per second of a device, instead of the GPU's")
    add("--node", type=positive, metavar="GPUS", help="devices per node, instead of the GPU's usual")
    add("--link", type=size, metavar="SIZE", help="that a device sends inside a node in a second, instead of the GPU's")
    add("--network", type=size, default=int(NETWORK), metavar="SIZE",
        help="that a device sends to other nodes per second (default: 12.5GB, the paper's network)")
    add("--checkpoints", default="whole", choices=CHECKPOINTS,
        help="how the blocks' inputs are kept on model-parallel ranks (default: whole)")
    add("--offload", choices=PLACES, help="also with optimizer state and update on the host, or on a disk")
    add("--gradients", default="", choices=("fp32",), metavar="fp32", help="kept, added up and reduced in fp32 with "
        "16-bit parameters, as in Megatron (default: in the dtype of the parameters)")
    add("--sequence-parallel", type=positive, default=1, metavar="S", help="number of data-parallel ranks that share "
        "each sequence, as in DeepSpeed-Ulysses (default: 1)")
    add("--replicate", type=positive, default=1, metavar="R", help="number of groups of data-parallel ranks that each "
        "keep all states in shards, as in HSDP: give the number of nodes (default: 1)")
    deepspeed_written.add_flags(result)
    return result


def main(arguments: list[str]) -> None:
    """The command: read the flags, calculate, print, write JSON and picture."""
    asked = parser()
    flags = asked.parse_args(arguments)
    gpu = GPUS[flags.hardware]
    speeds = Speeds(flags.tflops * 1e12 if flags.tflops else gpu.rate(flags.dtype), flags.link or gpu.link,
                    flags.node or gpu.node, flags.network)
    try:
        model = chosen(flags)
        told = plan(model, flags.ranks, flags.memory or gpu.memory, flags.dtype, flags.batch, flags.model_parallel,
                    speeds, offload=flags.offload, gradient_bytes=4 if flags.gradients else None,
                    **{name: getattr(flags, name) for name in HOW})
        written = deepspeed_written.write(flags, None if flags.model else model, told)
    except ValueError as error:
        asked.error(str(error))
    shown = plan_markdown.of_plan if flags.markdown else describe
    print(shown(told, "" if flags.memory else flags.hardware) + written)
    report.keep(flags, told, lambda: draw_plan(told))
