"""What if: the calculation of `plan` with sliders, in a notebook (notebook/slider_cell.py) and on a page.

    python -m zero_minimal sliders what-if.html

A setting is a dict, as from `setting`. `asked` calculates it in Python; `expressions` are the same formulas for a page,
recorded automatically (paper/expressions.py).
"""

import functools
import json
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from zero_minimal import pictures
from zero_minimal.paper.expressions import writing
from zero_minimal.paper.formulas import BYTES, STATES, formula, volume
from zero_minimal.paper.hardware import GPUS, NETWORK
from zero_minimal.paper.moments import CHECKPOINTS, Work
from zero_minimal.paper.shapes import parameter_count, usual_shape
from zero_minimal.pictures.plan_chart import there
from zero_minimal.pictures.style import LOOKS, ON_THE_WIRE, PLAIN, SENT
from zero_minimal.programs import report
from zero_minimal.programs.planning import NAMES, Speeds, computing, plan, row, waiting
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Parser, output_file

TEMPLATE = Path(pictures.__file__).with_name("what_if.html")
COLOURS = LOOKS | {"sent": SENT, "wire": ON_THE_WIRE, "plain": PLAIN}
SIZE, DEVICE = 7.5e9, "V100-32GB"  # the paper's example, on 64 devices: a page's initial values
SIZES = (5e6, 30e6, 125e6, 350e6, 760e6, 1.5e9, 2.5e9, 4e9, 7.5e9, 13e9, 20e9, 30e9, 40e9, 60e9, 80e9, 100e9, 128e9,
         170e9, 250e9, 500e9, 1e12)  # parameters, the stops of the page's slider
SHARES = tuple(2**power for power in range(7))  # model-parallel ranks, the stops of their slider
KEPT = ("all", *CHECKPOINTS)  # the blocks' activations: all, or checkpoints in one of these ways
OFFLOADS = ("none", "cpu")  # where the optimizer's state is kept and updated, at stages 1 to 3
SHAPE = ("layers", "hidden", "heads", "vocabulary", "sequence")
SPEEDS = tuple(field.name for field in fields(Speeds))
NUMBERS = (*SHAPE, "batch", "data_parallel", "model_parallel", "optimizer_bytes", "device_bytes", *SPEEDS)
ROW = (*STATES, "states", "moment", "states_there", "activations", "passing", "together", "construction", "states_fit",
       "step_fits", "fits", "fewest_data_parallel_ranks_for_states", "largest_model", "sent_bytes", "send_seconds",
       "host_bytes", "bus_bytes", "bus_seconds", "least_seconds", "most_seconds")


def setting(
    parameters: float = SIZE, data_parallel: int = 64, model_parallel: int = 1, dtype: str = "fp16",
    kept: str = "whole", batch: int = 1, sequence: int = 1024, device: str = DEVICE, memory: float | None = None,
    network: float = NETWORK, offload: str = "none",
) -> dict:
    """A complete setting from a reader's choices. memory: of a device, instead of the GPU's.

    Raises: ValueError if there is no such model.
    """
    shape, gpu = usual_shape(int(parameters), sequence, model_parallel, kept != "all"), GPUS[device]
    return {
        **{name: getattr(shape, name) for name in SHAPE}, "batch": batch, "data_parallel": data_parallel,
        "model_parallel": model_parallel, "dtype": dtype, "kept": kept, "offload": offload,
        "optimizer_bytes": BYTES[dtype][2], "device_bytes": memory or gpu.memory, **vars(Speeds.of(gpu, dtype)),
        "network": network,
    }


def asked(chosen: dict) -> dict:
    """The result of `plan` for a setting. Raises: ValueError, saying what is accepted, if it cannot be planned."""
    config = GPTConfig(**{name: chosen[name] for name in SHAPE}, dropout=0.0, recompute=chosen["kept"] != "all")
    return plan(
        config, chosen["data_parallel"] * chosen["model_parallel"], chosen["device_bytes"], chosen["dtype"],
        chosen["batch"], chosen["model_parallel"], Speeds(*(chosen[name] for name in SPEEDS)),
        chosen["offload"] != "none", optimizer_bytes=chosen["optimizer_bytes"],
        checkpoints="whole" if chosen["kept"] == "all" else chosen["kept"],
    )


# ---------------------------------------------------------------------------------------------------------- for a page


@functools.cache
def expressions() -> dict:
    """The formulas: "nodes"; the names of the "figures", with a stage's number if they are a stage's: "3 together"; and
    in "results" their nodes, in this order, {choices, as from `case`: [node]}."""
    with writing() as book:
        unknown = {name: book.unknown(name) for name in NUMBERS}
        results = {}
        for choices in product(("fp32", "fp16"), KEPT, OFFLOADS):
            figures = written(unknown, *choices)
            results[case(*choices)] = [book.write(value) for value in figures.values()]
    return {"nodes": book.nodes, "figures": list(figures), "results": results}


def case(dtype: str, kept: str, offload: str) -> str:
    """The name of choices that have their own formulas: all 16-bit types share one."""
    return f"{BYTES[dtype][0]} {kept} {offload}"


def written(unknown: dict, dtype: str, kept: str, offload: str) -> dict:
    """{name: Symbol} of all figures."""
    config = SimpleNamespace(**{name: unknown[name] for name in SHAPE}, recompute=kept != "all")
    work = Work(config, unknown["batch"], dtype, unknown["model_parallel"], "whole" if kept == "all" else kept,
                optimizer_bytes=unknown["optimizer_bytes"])
    speeds, ranks = Speeds(*(unknown[name] for name in SPEEDS)), unknown["data_parallel"] * unknown["model_parallel"]
    return flat({
        "parameters": parameter_count(config), "parameters_of_rank": work.parts().whole, **computing(work, speeds),
        **waiting(work, speeds), "wire": speeds.wire(ranks), "activations": work.activations(),
        "rows": [row(stage, work, ranks, unknown["device_bytes"], speeds, offload != "none") for stage in range(4)]})


def flat(told: dict) -> dict:
    """The result of `plan` under a page's names, in which the figures of a row begin with the stage's number."""
    result = {name: value for name, value in told.items() if not isinstance(value, dict | list)}
    result |= {f"activations {name}": value for name, value in told["activations"].items()}
    for figures in told["rows"]:
        result |= {f"{figures['stage']} {name}": figures[name] for name in ROW}
        result[f"{figures['stage']} gradients_there"] = there(figures, "gradients")
    return result


def shapes() -> list[list]:
    """[parameters, {model-parallel ranks: [layers, hidden, heads, vocabulary]}] for each stop of the slider; without
    numbers of ranks that cannot share such a small model."""
    table = []
    for parameters in SIZES:
        shared = {}
        for ranks in SHARES:
            try:
                shape = usual_shape(int(parameters), 1024, ranks, True)
            except ValueError:
                continue
            shared[ranks] = [getattr(shape, name) for name in SHAPE[:4]]
        table.append([int(parameters), shared])
    return table


def devices() -> dict:
    """{name: [bytes, operations a second in 16 bit and in fp32, bytes a second of a link, devices of a node, bytes a
    second of its bus]}"""
    return {name: [gpu.memory, gpu.operations, gpu.operations_fp32, gpu.link, gpu.node, gpu.bus]
            for name, gpu in GPUS.items()}


def content(parameters: float = SIZE, device: str = DEVICE, **start) -> dict:
    """All data of the page; for its initial values see `setting`."""
    return {
        "first": setting(parameters, device=device, **start), "size": int(parameters) if parameters in SIZES else None,
        "device": device, "names": NAMES, "states": STATES,
        "words": {dtype: [[formula(stage, state, dtype) for state in STATES] for stage in range(4)] for dtype in BYTES},
        "volumes": [volume(stage) for stage in range(4)], "bytes": BYTES,
        "shares": SHARES, "shapes": shapes(), "devices": devices(),
        "cases": {dtype: {kept: {offload: case(dtype, kept, offload) for offload in OFFLOADS} for kept in KEPT}
                  for dtype in BYTES},
        "formulas": expressions(),
    }


def page(**start) -> str:
    """The complete page, which needs no other files; for its initial values see `setting`."""
    looks = " ".join(f"--{name}: {colour};" for name, (colour, _) in COLOURS.items())
    return (TEMPLATE.read_text(encoding="utf-8").replace("__LOOKS__", looks)
            .replace("__CONTENT__", in_lines(content(**start))))


def in_lines(value: object) -> str:
    """JSON (without commas in its texts) in lines of about 120 characters, for editors and git."""
    lines = [""]
    for part in json.dumps(value, ensure_ascii=False, separators=(",", ":")).split(","):
        if len(lines[-1]) + len(part) > 118:
            lines.append("")
        lines[-1] += f"{part},"
    return "\n".join(lines).removesuffix(",")


def main(arguments: list[str]) -> None:
    """The command sliders: write the page, and say how to open it."""
    parser = Parser(prog="python -m zero_minimal sliders",
                    description="The plan with sliders, as one HTML file for a browser: no network, no server.")
    parser.add_argument("file", type=output_file, metavar="FILE.html", help="where to write it")
    file: Path = parser.parse_args(arguments).file
    report.write(page(), file)
    print(f"open in a browser: {file.resolve().as_uri()}")
