"""Plan: what a model needs on each device, by stage, before anybody starts a run. Formulas only; `simulate` runs code.

    python -m zero_minimal plan --params 7.5B --ranks 64 --hardware V100-32GB
"""

import argparse

from zero_minimal.foundations.mesh import divisors
from zero_minimal.paper import formulas, shapes
from zero_minimal.paper.hardware import GPUS, NETWORK
from zero_minimal.paper.quantities import count_text, plural, seconds_text, size, size_text
from zero_minimal.paper.shapes import add_shape, check_heads, parameter_count, read_shape
from zero_minimal.pictures import style
from zero_minimal.pictures.plan import draw_plan
from zero_minimal.programs import report
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import DTYPES, Parser, output_file, picture_file, positive

NAMES = ("data parallel", "P_os", "P_os+g", "P_os+g+p")
UTILISATION = 0.4  # of the operations that a GPU could do: what good training runs reach


def plan(
    config: GPTConfig, ranks: int, device_bytes: float, dtype: str = "fp16", batch: int = 1, model_parallel: int = 1,
    optimizer_bytes: float | None = None, operations: float | None = None, network: float = NETWORK,
    checkpoints: str = "whole", link: float | None = None, node: int | None = None,
) -> dict:
    """The whole calculation, as JSON (bytes and seconds); "rows" has an entry for each stage.

    Args:
        optimizer_bytes: the paper's K.
        operations: a second, of a device; network: bytes a second that a device sends to other nodes; link: inside a
            node of so many devices (None: those of the paper's V100, in this dtype).
        checkpoints: "whole", "P_a" or "P_a+cpu", where config.recompute keeps only these.
    Raises: ValueError if ranks are not groups of model_parallel, if these cannot share the heads, or for P_a without
        them.
    """
    paper = GPUS["V100-32GB"]
    operations, link, node = operations or paper.rate(dtype), link or paper.link, node or paper.node
    if ranks % model_parallel:
        raise ValueError(f"{ranks} ranks are not groups of {model_parallel} that share a model; accepted: "
                         f"{', '.join(map(str, divisors(ranks)))}")
    if checkpoints != "whole" and (model_parallel == 1 or not config.recompute):
        raise ValueError(f"{checkpoints} cuts the checkpoints of model-parallel ranks: it needs --mp, and --recompute")
    check_heads(config, model_parallel)
    elements, data_parallel = parameter_count(config), ranks // model_parallel
    run = (config.layers, config.hidden, batch, config.sequence, dtype)
    activations = _activations(config, run, model_parallel)
    kept = activations[("checkpoints" if config.recompute else "all") if checkpoints == "whole" else checkpoints]
    at_work = activations["block_at_work"] if config.recompute else 0
    kept += max(at_work, activations["logits"])  # never together: logits go before backward comes to a block
    units = (shapes.block_parameters(config), shapes.root_parameters(config), dtype, model_parallel)
    tokens = batch * config.sequence
    operations_of_step = formulas.step_operations(elements // model_parallel, tokens, config.recompute)
    compute = operations_of_step / (operations * UTILISATION)
    rows = [
        _row(stage, elements // model_parallel, data_parallel, device_bytes, dtype, optimizer_bytes, kept,
             formulas.gathered(stage, *units))
        | {"largest_model": formulas.largest_model(stage, device_bytes, data_parallel, dtype, model_parallel,
                                                 optimizer_bytes)}
        for stage in range(4)
    ]
    for row in rows:
        row["send_seconds"] = row["sent_bytes"] / network
    traffic = formulas.model_parallel_traffic(*run, model_parallel, recompute=config.recompute)
    with_p_a = formulas.model_parallel_traffic(*run, model_parallel, partition=True, recompute=config.recompute)
    inside = model_parallel <= node
    waited = (traffic if checkpoints == "whole" else with_p_a) / (link if inside else network)
    fitting = [row["stage"] for row in rows if row["fits"]]
    return {
        "parameters": elements,
        "layers": config.layers, "hidden": config.hidden, "heads": config.heads, "vocabulary": config.vocabulary,
        "sequence": config.sequence, "batch": batch,
        "ranks": ranks, "model_parallel": model_parallel, "dtype": dtype, "optimizer_bytes": optimizer_bytes,
        "device_bytes": device_bytes,
        "rows": rows,
        "first_stage_that_fits": fitting[0] if fitting else None,
        "checkpoints": checkpoints,
        "activations": activations,
        "recompute": config.recompute,
        "model_parallel_bytes": traffic,
        "P_a_bytes": with_p_a - traffic,
        "model_parallel_inside_a_node": inside,
        "model_parallel_seconds": waited,
        "compute_seconds": compute,
        "operations": operations, "network": network, "link": link,
        "utilisation": UTILISATION,
    }


def _activations(config: GPTConfig, run: tuple, model_parallel: int) -> dict:
    """Bytes of what a rank may keep for backward, in the ways there are, and of what is there for a moment."""
    _, _, batch, sequence, _ = run
    return {
        "all": formulas.activations(*run),
        "checkpoints": formulas.checkpoints(*run),
        "P_a": formulas.checkpoints(*run, cut=model_parallel),
        "P_a+cpu": 0,
        "block_at_work": formulas.activations(1, *run[1:]),
        "logits": formulas.logits(batch, sequence, config.vocabulary, model_parallel),
    }


def _row(stage, elements, data_parallel, device_bytes, dtype, optimizer_bytes, activations, units) -> dict:
    states = formulas.model_states(stage, elements, data_parallel, dtype, optimizer_bytes)
    total, beside = sum(states.values()), activations + units
    # how many ranks a model's states must be cut over to fit: beside all the rest, and with the device to themselves
    fewest = formulas.fewest_ranks(stage, elements, device_bytes - beside, dtype, optimizer_bytes)
    fewest_for_states = formulas.fewest_ranks(stage, elements, device_bytes, dtype, optimizer_bytes)
    return {
        "stage": stage, "name": NAMES[stage], **states, "states": total, "activations": activations,
        "units": units, "together": total + beside,
        "whole": [state for state in formulas.STATES if stage < formulas.SHARDED_FROM[state]],
        "states_fit": total <= device_bytes,
        "fits": total + beside <= device_bytes,
        "fewest_data_parallel_ranks": fewest,
        "fewest_data_parallel_ranks_for_states": fewest_for_states,
        "sent_bytes": formulas.traffic(stage, elements, data_parallel, dtype),
    }


def describe(told: dict, hardware: str = "") -> str:
    """The tables for a reader."""
    shared, parallel = told["model_parallel"], told["ranks"] // told["model_parallel"]
    groups = "" if shared == 1 else (
        f" = {parallel:,} × {shared} that share a model: N in formulas is {parallel:,}, Ψ is 1/{shared}")
    device = size_text(told["device_bytes"])
    rows = [["GB on each device", *formulas.STATES, "states", "+ activations", "+ units", "together", f"in {device}?",
             "fewest ranks", "… for states", "largest model"]]
    for row in told["rows"]:
        sizes = [row[name] for name in (*formulas.STATES, "states", "activations", "units", "together")]
        fits = "yes" if row["fits"] else "states only" if row["states_fit"] else "no"
        fewest = [row[name] for name in ("fewest_data_parallel_ranks", "fewest_data_parallel_ranks_for_states")]
        rows.append([f"  {row['stage']}  {row['name']}", *map(gigabytes, sizes), fits,
                     *("none" if number is None else f"{number * shared:,}" for number in fewest),
                     count_text(row["largest_model"])])
    return "\n".join((
        f"\nΨ = {told['parameters']:,} parameters ({plural(told['layers'], 'block')} of width {told['hidden']}, "
        f"vocabulary {told['vocabulary']}), {told['dtype']}, on {plural(told['ranks'], 'rank')}{groups}",
        f"GB are 10⁹ bytes, as in the paper{f'; {hardware} counts as {device}' if hardware else ''}. Units: what stage "
        "3 holds whole in backward, parameters and",
        "gradients of two blocks and of what is outside the blocks. The last two columns count states alone, as the "
        "paper does;", "what ran in its Table 2 was 62% to 82% of that.", "",
        report.table(rows), "", verdict(told), "", activation_lines(told), "", time_lines(told),
    ))


def verdict(told: dict) -> str:
    """Which stage fits, in a sentence."""
    stage, device = told["first_stage_that_fits"], size_text(told["device_bytes"])
    if stage is not None:
        alone = next(row["stage"] for row in told["rows"] if row["states_fit"])
        return (f"stage {stage}, {NAMES[stage]}, is the first that fits into {device}"
                f"{'' if alone == stage else f' (the states alone: stage {alone})'}.\nBuffers, such as those of "
                "reductions, and fragmentation come on top: `simulate` shows the buffers.")
    with_states = [row for row in told["rows"] if row["states_fit"]]
    if not with_states:
        return f"no stage fits into {device} on so few ranks: more --ranks, or --mp"
    last = with_states[-1]
    if last["activations"] < last["units"]:
        return (f"no stage fits into {device}: the states do, but not the units that stage 3 gathers whole beside "
                "them: more --mp, or more and narrower blocks")
    return (f"no stage fits into {device}, since the activations are too many: a smaller --batch, --mp, or "
            "--checkpoints P_a")


def activation_lines(told: dict) -> str:
    """What activations take, with what is done about them."""
    sizes, is_shared = told["activations"], told["model_parallel"] > 1
    inside = ", whose inside --mp cuts besides" if is_shared else ""
    partitioned = (f"{size_text(sizes['P_a'])} with P_a, none of it on the device with P_a+cpu" if is_shared
                   else "P_a needs model parallelism (--mp)")
    return (f"activations of {told['batch']} × {told['sequence']} tokens: {size_text(sizes['all'])} if all are kept "
            "(12·b·s·h a block, the paper's estimate: this project's GPT keeps about 16 of them)\n"
            f"  {size_text(sizes['checkpoints'])} as one checkpoint a block, and {size_text(sizes['block_at_work'])} "
            f"for the block at work{inside}; of the checkpoints {partitioned}\n"
            f"  {size_text(sizes['logits'])} for logits and loss, before a block is at work: the larger of both "
            "counts")


def time_lines(told: dict) -> str:
    """What a step takes at least, if sending and computing overlap, and at most."""
    lines = [f"a step computes for {seconds_text(told['compute_seconds'])} (at {told['utilisation']:.0%} of "
             f"{told['operations'] / 1e12:,.4g} TFLOP/s, the device's in {told['dtype']})"]
    waited = told["model_parallel_seconds"]
    if told["model_parallel"] > 1:
        wire, speed = "network", told["network"]
        if told["model_parallel_inside_a_node"]:
            wire, speed = "link inside a node", told["link"]
        lines.append(f"and waits {seconds_text(waited)} for the all-reduces of model parallelism, which nothing "
                     f"overlaps (at {size_text(speed)}/s, the {wire}):")
        again = "blocks are recomputed" if told["recompute"] else "nothing is recomputed"
        more = f"; P_a sends another {size_text(told['P_a_bytes'])}" if told["recompute"] else ""
        lines.append(f"  {size_text(told['model_parallel_bytes'])}, since {again}{more}")
    lines.append(f"and for data parallelism it sends (at {size_text(told['network'])}/s, the network) for")
    for row in told["rows"]:
        slower = max(row["send_seconds"], told["compute_seconds"]) + waited
        both = row["send_seconds"] + told["compute_seconds"] + waited
        lines.append(f"  stage {row['stage']}: {seconds_text(row['send_seconds'])} for {size_text(row['sent_bytes'])}: "
                     f"a step of {seconds_text(slower)} (all of it overlaps) to {seconds_text(both)} (nothing does)")
    return "\n".join(lines)


def gigabytes(count: float) -> str:
    """With as many digits as the paper prints at most."""
    return f"{count / 1e9:,.2f}"


def rate(text: str) -> float:
    """The type of a flag: a number above 0, at most 10¹⁸."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e18:
        raise argparse.ArgumentTypeError(f"a number above 0, at most 10¹⁸, is wanted, not {text!r}")
    return value


def main(arguments: list[str]) -> None:
    """The command: read the flags, calculate, print, write JSON and picture."""
    parser = Parser(prog="python -m zero_minimal plan", description="What a model needs on each device, by stage.")
    parser.add_argument("--ranks", type=positive, default=64, metavar="N", help="all of them (default: 64)")
    parser.add_argument("--mp", "--model-parallel", type=positive, default=1, metavar="M", dest="model_parallel",
                        help="ranks that share one model (default: 1)")
    parser.add_argument("--hardware", default="V100-32GB", choices=tuple(GPUS), metavar="GPU",
                        help=f"one of {', '.join(GPUS)} (default: V100-32GB, the paper's)")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of a device, such as 24GB, instead of the GPU's")
    parser.add_argument("--dtype", default="fp16", choices=tuple(DTYPES), help="default: fp16")
    parser.add_argument("--optimizer-bytes", type=rate, metavar="K",
                        help="optimizer state a parameter (default: Adam's, 12, or 8 in fp32)")
    parser.add_argument("--tflops", type=rate, help="10¹² operations a second of a device, instead of the GPU's")
    parser.add_argument("--network", type=size, default=int(NETWORK), metavar="SIZE",
                        help="that each device sends in a second (default: 12.5GB, the paper's network)")
    parser.add_argument("--checkpoints", default="whole", choices=("whole", "P_a", "P_a+cpu"),
                        help="how the blocks' inputs are kept on model-parallel ranks (default: whole)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw memory by stage and by ranks")
    add_shape(parser)
    flags = parser.parse_args(arguments)
    gpu = GPUS[flags.hardware]
    try:
        told = plan(
            read_shape(flags), flags.ranks, flags.memory or gpu.memory, flags.dtype, flags.batch, flags.model_parallel,
            flags.optimizer_bytes, flags.tflops * 1e12 if flags.tflops else gpu.rate(flags.dtype), flags.network,
            flags.checkpoints, gpu.link, gpu.node,
        )
    except ValueError as error:
        parser.error(str(error))
    print(describe(told, "" if flags.memory else flags.hardware))
    if flags.json:
        report.write_json(told, flags.json)
    if flags.plot:
        style.save(draw_plan(told), flags.plot)
