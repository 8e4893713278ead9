"""Plan: what a model needs on each device, by stage, before anybody starts a run. Formulas only; `simulate` runs code.

    python -m zero_minimal plan --params 7.5B --ranks 64 --hardware V100-32GB
"""

import argparse

from zero_minimal.instruments import plots, report, theory
from zero_minimal.instruments.hardware import GPUS, NETWORK
from zero_minimal.instruments.quantities import count_text, seconds_text, size, size_text
from zero_minimal.instruments.shapes import add_shape, parameters_of, read_shape
from zero_minimal.tensor_parallel import divisors
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import DTYPES, Parser, output_file, positive

NAMES = ("data parallel", "P_os", "P_os+g", "P_os+g+p")
UTILISATION = 0.4  # of the operations that a GPU could do: what good training runs reach


def plan(
    config: GPTConfig, ranks: int, device_bytes: float, dtype: str = "fp16", batch: int = 1, model_parallel: int = 1,
    optimizer_bytes: float | None = None, operations: float = 125e12, network: float = NETWORK,
    checkpoints: str = "whole",
) -> dict:
    """The whole calculation, as JSON (bytes and seconds); "rows" has an entry for each stage.

    Args:
        optimizer_bytes: the paper's K.
        operations: a second, of a device; network: bytes a second, of a device.
        checkpoints: "whole", "P_a" or "P_a+cpu", where config.recompute keeps only these.
    Raises: ValueError if ranks are not groups of model_parallel, or for P_a without these.
    """
    if ranks % model_parallel:
        raise ValueError(f"{ranks} ranks are not groups of {model_parallel} that share a model; accepted: "
                         f"{', '.join(map(str, divisors(ranks)))}")
    if checkpoints != "whole" and (model_parallel == 1 or not config.recompute):
        raise ValueError(f"{checkpoints} cuts the checkpoints of model-parallel ranks: it needs --mp, and --recompute")
    elements, data_parallel = parameters_of(config), ranks // model_parallel
    run = (config.layers, config.hidden, batch, config.sequence, dtype)
    kept = {
        "whole": theory.checkpoints(*run) if config.recompute else theory.activations(*run),
        "P_a": theory.checkpoints(*run, cut=model_parallel),
        "P_a+cpu": 0,
    }[checkpoints]
    block = theory.activations(1, *run[1:]) if config.recompute else 0  # the one that backward works on
    tokens = batch * config.sequence
    compute = theory.step_operations(elements // model_parallel, tokens, config.recompute) / (operations * UTILISATION)
    rows = [
        _row(stage, elements // model_parallel, data_parallel, device_bytes, dtype, optimizer_bytes, kept + block)
        for stage in range(4)
    ]
    for row in rows:
        row["largest_model"] = theory.largest_model(
            row["stage"], device_bytes, data_parallel, dtype, model_parallel, optimizer_bytes
        )
        row["send_seconds"] = row["sent_bytes"] / network
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
        "activations": {
            "all": theory.activations(*run),
            "checkpoints": theory.checkpoints(*run),
            "P_a": theory.checkpoints(*run, cut=model_parallel),
            "P_a+cpu": 0,
            "block_at_work": theory.activations(1, *run[1:]),
        },
        "model_parallel_bytes": theory.model_parallel_traffic(*run, model_parallel),
        "P_a_bytes": theory.model_parallel_traffic(*run, model_parallel, partition=True)
        - theory.model_parallel_traffic(*run, model_parallel),
        "compute_seconds": compute,
        "utilisation": UTILISATION,
    }


def _row(stage, elements, data_parallel, device_bytes, dtype, optimizer_bytes, activations) -> dict:
    states = theory.model_states(stage, elements, data_parallel, dtype, optimizer_bytes)
    total = sum(states.values())
    return {
        "stage": stage, "name": NAMES[stage], **states, "states": total, "activations": activations,
        "whole": [state for state in theory.STATES if stage < theory.SHARDED_FROM[state]],
        "states_fit": total <= device_bytes,
        "fits": total + activations <= device_bytes,
        "fewest_data_parallel_ranks": theory.fewest_ranks(stage, elements, device_bytes, dtype, optimizer_bytes),
        "sent_bytes": theory.traffic(stage, elements, data_parallel, dtype),
    }


def describe(told: dict, hardware: str = "") -> str:
    """The tables for a reader."""
    mp, parallel = told["model_parallel"], told["ranks"] // told["model_parallel"]
    groups = "" if mp == 1 else f" = {parallel} × {mp} that share a model: N in formulas is {parallel}, Ψ is 1/{mp}"
    device = size_text(told["device_bytes"])
    rows = [["GB on each device", *theory.STATES, "states", "+ activations", f"in {device}?", "fewest ranks",
             f"largest model in {device}"]]
    for row in told["rows"]:
        sizes = [row[state] for state in (*theory.STATES, "states")] + [row["states"] + row["activations"]]
        fits = "yes" if row["fits"] else "states only" if row["states_fit"] else "no"
        fewest = row["fewest_data_parallel_ranks"]
        rows.append([f"  {row['stage']}  {row['name']}", *map(gigabytes, sizes), fits,
                     "no number" if fewest is None else f"{fewest * mp:,}", count_text(row["largest_model"])])
    return "\n".join((
        f"\nΨ = {told['parameters']:,} parameters ({told['layers']} blocks of width {told['hidden']}, vocabulary "
        f"{told['vocabulary']}), {told['dtype']}, on {told['ranks']:,} ranks{groups}",
        f"GB are 10⁹ bytes, as in the paper{f'; {hardware} counts as {device}' if hardware else ''}. The last two "
        "columns count states alone; what ran in the paper's Table 2 was 62% to 82% of that.", "",
        report.table(rows), "", verdict(told), "", activation_lines(told), "", time_lines(told),
    ))


def verdict(told: dict) -> str:
    """Which stage fits, in a sentence."""
    stage, device = told["first_stage_that_fits"], size_text(told["device_bytes"])
    if stage is not None:
        return (f"stage {stage}, {NAMES[stage]}, is the first that fits into {device}. Buffers, gathered units of "
                "stage 3 and fragmentation come on top: `simulate` shows them.")
    if any(row["states_fit"] for row in told["rows"]):
        return (f"no stage fits into {device}, since the activations are too many: a smaller --batch, --mp, or "
                "--checkpoints P_a")
    return f"no stage fits into {device} on so few ranks: more --ranks, or --mp"


def activation_lines(told: dict) -> str:
    """What activations take, with what is done about them."""
    sizes, mp = told["activations"], told["model_parallel"]
    partitioned = (f"{size_text(sizes['P_a'])} with P_a, none of it on the device with P_a+cpu" if mp > 1
                   else "P_a needs model parallelism (--mp)")
    return (f"activations of {told['batch']} × {told['sequence']} tokens: {size_text(sizes['all'])} if all are kept; "
            f"{size_text(sizes['checkpoints'])} as one checkpoint a block, and {size_text(sizes['block_at_work'])} for "
            f"the block at work; of the checkpoints {partitioned}")


def time_lines(told: dict) -> str:
    """What a step takes at least, if sending and computing overlap, and at most."""
    lines = [f"a step computes for {seconds_text(told['compute_seconds'])} (at {told['utilisation']:.0%} of what the "
             "device can do), and sends for"]
    for row in told["rows"]:
        slower = max(row["send_seconds"], told["compute_seconds"])
        both = row["send_seconds"] + told["compute_seconds"]
        lines.append(f"  stage {row['stage']}: {seconds_text(row['send_seconds'])} for {size_text(row['sent_bytes'])}: "
                     f"a step of {seconds_text(slower)} (all of it overlaps) to {seconds_text(both)} (nothing does)")
    if told["model_parallel"] > 1:
        lines.append(f"model parallelism sends {size_text(told['model_parallel_bytes'])} more, inside a node, if "
                     f"blocks are recomputed, and P_a another {size_text(told['P_a_bytes'])}")
    return "\n".join(lines)


def gigabytes(count: float) -> str:
    """With as many digits as the paper prints at most."""
    return f"{count / 1e9:,.2f}"


def rate(text: str) -> float:
    """The type of a flag: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is wanted, not {text!r}")
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
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="draw memory by stage and by ranks")
    add_shape(parser)
    flags = parser.parse_args(arguments)
    gpu = GPUS[flags.hardware]
    try:
        told = plan(
            read_shape(flags), flags.ranks, flags.memory or gpu.memory, flags.dtype, flags.batch, flags.model_parallel,
            flags.optimizer_bytes, flags.tflops * 1e12 if flags.tflops else gpu.operations, flags.network,
            flags.checkpoints,
        )
    except ValueError as error:
        parser.error(str(error))
    print(describe(told, "" if flags.memory else flags.hardware))
    if flags.json:
        report.write_json(told, flags.json)
    if flags.plot:
        plots.save(plots.plan(told), flags.plot)
