"""Plan: what a model needs on each device, by stage, before anybody starts a run. Formulas only; `simulate` runs code.

    python -m zero_minimal plan --params 7.5B --ranks 64 --hardware V100-32GB
"""

import argparse

from zero_minimal.paper import formulas
from zero_minimal.paper.hardware import GPUS, NETWORK
from zero_minimal.paper.moments import CHECKPOINTS, Work
from zero_minimal.paper.quantities import count_text, plural, seconds_text, size, size_text, size_unit
from zero_minimal.paper.shapes import add_shape, read_shape
from zero_minimal.pictures import style
from zero_minimal.pictures.plan_chart import draw_plan
from zero_minimal.programs import deepspeed_written, plan_markdown, plan_model, plan_offload, plan_options, report
from zero_minimal.programs.models import chosen
from zero_minimal.programs.planning import NAMES, Speeds, check_replicate, check_work, plan
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import DTYPES, Parser, output_file, picture_file, positive


def describe(told: dict, hardware: str = "") -> str:
    """The tables for a reader, at most 80 columns wide. hardware: the name of the device, if it has one."""
    foreign = "model" in told
    return "\n".join((
        "", (plan_model.heading if foreign else heading)(told, hardware), *filter(None, [plan_options.notes(told)]),
        "", report.table(state_rows(told)), "", state_notes(told),
        "", report.table(step_rows(told)), "", verdict(told), "", step_notes(told),
        "", (plan_model.activation_notes if foreign else activation_notes)(told),
        "", time_notes(told), "", report.table(time_rows(told)),
        *(["", plan_offload.describe(told)] if "offload" in told else []),
    ))


def heading(told: dict, hardware: str) -> str:
    """Which model, on what."""
    ranks, shared, device = told["ranks"], told["model_parallel"], size_text(told["device_bytes"])
    groups = "" if shared == 1 else (
        f" = {ranks // shared:,} × {shared} that share a model: N in formulas is {told['shards']:,}, Ψ a rank's share,"
        f" {told['parameters_of_rank']:,}")
    return paragraph(
        f"{'Ψ = ' if shared == 1 else ''}{told['parameters']:,} parameters in {told['dtype']} on "
        f"{plural(ranks, 'rank')}{groups}.",
        f"{plural(told['layers'], 'block')} of width {told['hidden']}, {plural(told['heads'], 'head')}, vocabulary "
        f"{told['vocabulary']}; {told['batch']} × {sequence_text(told)} tokens a {'rank' if shared == 1 else 'group'}, "
        f"{'blocks recomputed' if told['recompute'] else 'nothing recomputed'}.",
        "GB are 10⁹ bytes, as in the paper;", f"{hardware or 'a device'} counts as {device}.")


# --------------------------------------------------------------------------------------------------------------- memory


def state_rows(told: dict) -> list[list[str]]:
    """Model states alone, as the paper counts them."""
    unit, scale = size_unit(max(row["together"] for row in told["rows"]))
    rows = [[f"model states, {unit}", *formulas.STATES, "together", "fewest", "largest"]]
    for row in told["rows"]:
        sizes = [row[name] for name in (*formulas.STATES, "states")]
        rows.append([f"  {row['stage']}  {row['name']}", *(f"{size / scale:,.2f}" for size in sizes),
                     ranks_text(row["fewest_data_parallel_ranks_for_states"], told), count_text(row["largest_model"])])
    return rows


def state_notes(told: dict) -> str:
    """What the columns mean, and what another program counts."""
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


def step_notes(told: dict) -> str:
    """What the columns mean, and what they leave out."""
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
    """What activations take, with what is done about them."""
    sizes, shared = told["activations"], told["model_parallel"]
    elements = "16·b·s·h" if shared == 1 else f"(4 + 12/{shared})·b·s·h"
    partitioned = (f"{size_text(sizes['P_a'])} with P_a, none on the device with P_a+cpu" if shared > 1
                   else "P_a needs model parallelism (--mp)")
    return "\n".join((
        paragraph(f"Activations of {told['batch']} × {sequence_text(told)} tokens:"),
        paragraph(f"{size_text(sizes['all'])} if all are kept: {elements} a block in this project's GPT (the paper's "
                  f"estimate is 12·b·s·h, {size_text(sizes['papers_estimate'])})", indent=2, hang=2),
        paragraph(f"{size_text(sizes['checkpoints'])} as one checkpoint a block (--recompute); {partitioned}",
                  indent=2, hang=2),
        paragraph(f"{size_text(sizes['block_at_work'])} for the block at work; before that "
                  f"{size_text(sizes['logits'])} for logits and loss", indent=2, hang=2),
        *([paragraph("Attention is taken to be fused: it keeps no matrix of scores, which would be "
                     f"{size_text(sizes['scores'])} a block, and several of them.", indent=2, hang=2)]
          if told["attention"] == "fused" else []),
    ))


def sequence_text(told: dict) -> str:
    """A rank's tokens of a sequence."""
    own = told["sequence"] // told["sequence_parallel"]
    return str(own) if own == told["sequence"] else f"{own} of {told['sequence']}"


def ranks_text(data_parallel: int | None, told: dict) -> str:
    """A number of ranks, all of them."""
    return "none" if data_parallel is None else f"{data_parallel * told['model_parallel']:,}"


# ----------------------------------------------------------------------------------------------------------------- time


def time_notes(told: dict) -> str:
    """What a rank computes and what it waits for."""
    if "model" in told:
        return "\n".join([plan_model.compute_note(told), wire_note(told)])
    computes, of_attention = told["compute_seconds"], told["attention_seconds"]
    of_it = f"Attention is {of_attention / computes:.0%} of it"
    lines = [paragraph(
        f"A step computes for {seconds_text(computes)}, at {told['utilisation']:.0%} of "
        f"{told['operations'] / 1e12:,.4g} TFLOP/s, the device's in {told['dtype']}.",
        f"{of_it} if its kernel skips what is masked; if not, a step is {seconds_text(computes + of_attention)}."
        if told["attention"] == "fused" else f"{of_it}: nothing is skipped.")]
    lines += filter(None, [plan_options.waits(told)])
    if told["model_parallel"] > 1:
        inside = told["model_parallel_inside_a_node"]
        speed = (f"{size_text(told['link'])}/s, a link inside a node" if inside
                 else f"{size_text(told['network'])}/s, the network")
        again = "since blocks are recomputed" if told["recompute"] else "since nothing is recomputed"
        more = f" (P_a sends another {size_text(told['P_a_bytes'])})" if told["recompute"] else ""
        lines.append(paragraph(
            f"It waits {seconds_text(told['model_parallel_seconds'])} for the all-reduces of model parallelism, which "
            f"nothing overlaps: {size_text(told['model_parallel_bytes'])}, {again}{more}, at {speed}."))
    return "\n".join([*lines, wire_note(told)])


def wire_note(told: dict) -> str:
    """At which speed gradients and parameters travel, and why."""
    if told["inside_a_node"]:
        of_group = "of a group " if told["replicate"] > 1 else ""
        why = f"a link: a node has {told['node']} devices, so all {of_group}are inside one"
    else:
        why = ("the network: a ring that leaves the node is as fast as its slowest link (a node has "
               f"{told['node']} devices)")
    between = f"; between groups at {size_text(told['wire_between'])}/s" if told["replicate"] > 1 else ""
    return paragraph(f"Data-parallel ranks send at {size_text(told['wire'])}/s, {why}{between}:")


def time_rows(told: dict) -> list[list[str]]:
    """What data-parallel ranks send, and the least and the most that a step takes."""
    sent = "sent in a step" if told["replicate"] == 1 else "within + between"
    rows = [["stage", sent, "takes", "a step, all overlaps", "a step, nothing does"]]
    for row in told["rows"]:
        rows.append([f"  {row['stage']}", plan_options.sent(row), *(
            seconds_text(row[time]) for time in ("send_seconds", "least_seconds", "most_seconds"))])
    return rows


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
    add = result.add_argument
    add("--ranks", type=positive, default=64, metavar="N", help="all of them (default: 64)")
    add("--model", metavar="config.json", help="a configuration of the transformers library, in the place of our GPT "
        "(needs that library); its sizes are measured")
    add("--mp", "--model-parallel", type=positive, default=1, metavar="M", dest="model_parallel",
        help="ranks that share one model (default: 1)")
    add("--hardware", default="V100-32GB", choices=tuple(GPUS), metavar="GPU",
        help=f"one of {', '.join(GPUS)} (default: V100-32GB, the paper's)")
    add("--memory", type=size, metavar="SIZE", help="of a device, such as 24GB, instead of the GPU's")
    add("--dtype", default="fp16", choices=tuple(DTYPES), help="default: fp16")
    add("--optimizer-bytes", type=rate, metavar="K", help="optimizer state a parameter (default: Adam's, 12, or 8 in "
        "fp32)")
    add("--tflops", type=rate, help="10¹² operations a second of a device, instead of the GPU's")
    add("--node", type=positive, metavar="GPUS", help="devices of a node, instead of the GPU's usual")
    add("--link", type=size, metavar="SIZE", help="that a device sends inside a node in a second, instead of the GPU's")
    add("--network", type=size, default=int(NETWORK), metavar="SIZE",
        help="that a device sends to other nodes in a second (default: 12.5GB, the paper's network)")
    add("--checkpoints", default="whole", choices=CHECKPOINTS,
        help="how the blocks' inputs are kept on model-parallel ranks (default: whole)")
    add("--offload", choices=plan_offload.PLACES, help="also with optimizer state and update on the host, or on a disk")
    plan_options.add_flags(result)
    add("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw memory by stage and by ranks")
    deepspeed_written.add_flags(result)
    add_shape(result)
    return result


def of_model(flags: argparse.Namespace, device: float, speeds: Speeds) -> dict:
    """The plan of --model. Raises: ValueError for flags that it does not take."""
    if flags.model_parallel > 1 or flags.checkpoints != "whole":
        raise ValueError("a model of transformers is not cut over ranks here: give it without --mp and --checkpoints")
    if flags.sequence_parallel > 1:
        raise ValueError("what ranks that share sequences keep is a formula of our GPT's attention, and the code of a "
                         "model of transformers sends no sequences: give it without --sequence-parallel")
    check_replicate(flags.replicate, flags.ranks)
    return plan_model.plan(chosen(flags), flags.ranks, device, flags.dtype, flags.batch, speeds, flags.optimizer_bytes,
                           flags.accumulate, flags.attention, 4 if flags.gradients else None, flags.offload,
                           flags.replicate)


def main(arguments: list[str]) -> None:
    """The command: read the flags, calculate, print, write JSON and picture."""
    asked = parser()
    flags = asked.parse_args(arguments)
    gpu = GPUS[flags.hardware]
    speeds = Speeds(flags.tflops * 1e12 if flags.tflops else gpu.rate(flags.dtype), flags.link or gpu.link,
                    flags.node or gpu.node, flags.network)
    device = flags.memory or gpu.memory
    try:
        told = of_model(flags, device, speeds) if flags.model else plan(
            read_shape(flags), flags.ranks, device, flags.dtype, flags.batch, flags.model_parallel,
            flags.optimizer_bytes, flags.checkpoints, speeds, **plan_options.of(flags))
        if flags.offload and not flags.model:
            work = Work(read_shape(flags), flags.batch, flags.dtype, flags.model_parallel, flags.checkpoints,
                        **plan_options.of(flags))
            check_work(work, flags.ranks, offloaded=True)
            told["offload"] = plan_offload.offloaded(work, flags.ranks, device, flags.offload, flags.accumulate,
                                             flags.optimizer_bytes)
        written = deepspeed_written.write(flags, None if flags.model else read_shape(flags), told)
    except ValueError as error:
        asked.error(str(error))
    shown = plan_markdown.of_plan if flags.markdown else describe
    print(shown(told, "" if flags.memory else flags.hardware) + written)
    if flags.json:
        report.write_json(told, flags.json)
    if flags.plot:
        style.save(draw_plan(told), flags.plot)
