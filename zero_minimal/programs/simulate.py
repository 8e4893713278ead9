"""Simulate: what one rank of many holds and sends, counted while the stages' own code runs (simulation.py).

    python -m zero_minimal simulate --params 1T --ranks 1024 --stage 3 --dtype fp16
"""

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from torch.optim import AdamW

from zero_minimal.paper import formulas
from zero_minimal.paper.moments import BUCKET as DEFAULT
from zero_minimal.paper.quantities import plural, size, size_text, size_unit
from zero_minimal.pictures.plan_chart import draw_simulation
from zero_minimal.programs import plan_markdown, progress, report
from zero_minimal.programs.cases import BUCKETS, Budget, Case, phases
from zero_minimal.programs.models import add_flags, chosen, sizes_text
from zero_minimal.programs.registry import CONFIGS
from zero_minimal.programs.simulation import Living, Simulation, simulate
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import Parser, positive


def describe(simulation: Simulation) -> str:
    """Ledger and formula, the peak and what is alive there, traffic; at most 80 columns wide."""
    result = simulation.report
    memory = result["memory"]
    parts = [
        "", heading(result), "", report.table(_state_rows(result)), "",
        *([report.table(_host_rows(result)), ""] if "bus" in result else []),
        paragraph(f"Highest moment of a step: {size_text(memory['peak'], 4)}, in {memory['peak_when']}, reached by "
                  f"{memory['peak_what'].split(',')[0]}. Alive there:"),
        *_living_lines(simulation.at_peak),
        f"Highest moment of construction: {size_text(memory['construction_peak'], 4)}",
    ]
    if memory["host"] and "bus" not in result:
        parts.append(f"In host memory, at most: {size_text(memory['host'], 4)}")
    return "\n".join([*parts, bucket_note(result), "", *traffic_lines(result)])


def heading(result: dict) -> str:
    """The rank and its model."""
    case, parallel = result["settings"], result["model_parallel"]
    model, of, whole, share = case["model"], f"N = {plural(result['ranks'], 'rank')}", "Ψ = ", ""
    if parallel > 1:
        data_parallel = result["ranks"] // parallel
        of, whole = f"{result['ranks']:,} = {data_parallel:,} × {parallel} that share a model", "The model: "
        share = f"N in the formulas is {data_parallel:,}, Ψ this rank's share, {result['parameters_of_rank']:,}."
    sizes = f"as {model['file']} says" if "file" in model else sizes_text(model)
    recomputed = ", recomputed block by block" if model["recompute"] or result["config"] else ""
    return paragraph(
        f"{result['name']}, rank {result['rank']} of {of}; simulated on fake tensors, {result['dtype']}.",
        f"{whole}{result['parameters']:,} parameters: {sizes}; {case['batch']} × {model['sequence']} tokens "
        f"a rank{recomputed}.", share, f"Sizes are decimal: GB are 10⁹ bytes. Attention is {case['attention']}.",
        f"A step is {case['accumulate']} micro-batches." if case["accumulate"] > 1 else "")


def bucket_note(result: dict) -> str:
    """The size of buckets, and the reason."""
    size = size_text(result["bucket_bytes"])
    if result["config"]:
        return paragraph(f"Buckets of {size}; where C_B keeps two for all, these do not grow with the model.")
    if result["stage"] == 3:
        return f"Buckets of {size} (not used: a unit is a bucket)"
    grown = result["settings"]["bucket_bytes"] is None and result["bucket_bytes"] > DEFAULT
    why = f", which makes {BUCKETS} of them: with the 4 MiB of training there would be too many to simulate"
    return paragraph(f"Buckets of {size}{why if grown else ''}")


def traffic_lines(result: dict) -> list[str]:
    """What a ring sends in a step, with the formulas, and a step's collectives. A learner's own system has no
    formula."""
    traffic, stage = result["traffic"], result["stage"]
    own = not result["config"] and result["name"] != f"stage {stage}"
    parallel = (f"; of model parallelism's blocks: {size_text(traffic['model_parallel_theory_bytes'], 4)}"
                if result["model_parallel"] > 1 else "")
    words = paragraph(f"Sent in a step, as a ring sends: {size_text(traffic['sent_bytes'], 4)}. "
                      f"{'For comparison, stage 3' if own else f'Stage {stage}'} by the formula: "
                      f"{traffic['theory_volume']}Ψ(N−1)/N, {size_text(traffic['theory_bytes'], 4)}{parallel}")
    return [words, *(f"  {counts['calls']:,} × {name}, of {size_text(counts['bytes'], 4)} in all"
                     for name, counts in sorted(traffic["collectives"].items()))]


def _state_rows(result: dict) -> list[list[str]]:
    """Rows on what the rank holds."""
    memory, theory, padding = (result[part] for part in ("memory", "theory", "padding"))
    unit, scale = size_unit(max(theory.values()))
    rows = [[f"{unit} of this rank", "ledger", "formula", "", "padding, B", "unexplained, B"]]
    for state in formulas.STATES:
        itself = formulas.formula(result["stage"], state, result["dtype"]) if theory[state] else "on the host"
        rows.append(_explained(scale, state, memory[state], theory[state], itself, padding[state]))
    total, formula = (sum(part[state] for state in formulas.STATES) for part in (memory, theory))
    rows.append(["  together", f"{total / scale:,.3f}", f"{formula / scale:,.3f}", "", "", ""])
    return rows + [[f"  {part}, at most", f"{memory[part] / scale:,.3f}", "", "", "", ""]
                   for part in ("activations", "buffers")]


def _host_rows(result: dict) -> list[list[str]]:
    """Rows on what an offloaded rank's host keeps, and what crosses the bus in each direction."""
    parts = report.of_host(result, result["parameters_of_rank"], result["ranks"] // result["model_parallel"])
    unit, scale = size_unit(max(measured for _, measured, *_ in parts))
    return [[f"{unit} of its host", "counted", "formula", "", "padding, B", "unexplained, B"],
            *(_explained(scale, *part) for part in parts)]


def _explained(scale: int, words: str, measured: float, formula: float, itself: str, padding: float) -> list[str]:
    return [f"  {words}", f"{measured / scale:,.3f}", f"{formula / scale:,.3f}",
            *report.explained(measured, formula, itself, padding)[2:]]


def _living_lines(groups: list[Living], most: int = 6) -> list[str]:
    """The largest groups, and the rest in one line."""
    lines = [f"  {size_text(group.bytes * group.count, 4):>9}  {group.category}: {group.count:,} × "
             f"{size_text(group.bytes, 4)}" for group in groups[:most]]
    rest = sum(group.bytes * group.count for group in groups[most:])
    return lines + ([f"  {size_text(rest, 4):>9}  in smaller ones"] if rest else [])


# ----------------------------------------------------------------------------------------------- a learner's own stage


def read_system(path: str) -> tuple[str, Callable]:
    """Run a file; return (its name, build(model, group, budget)). The file has a function `build`, or a single class
    with step() and zero_grad(), which is called like a stage: Class(model, AdamW, group=…, **options).

    Raises: ValueError, in one sentence, for a file that has neither.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path} is not a file: give 0, 1, 2 or 3, or a Python file with build(model, group, budget)")
    try:
        ast.parse(text := file.read_text())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python: {error}") from None
    spec = importlib.util.spec_from_loader(file.stem, loader=None, origin=str(file))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules.setdefault(file.stem, module)  # dataclasses look it up there
    exec(compile(text, str(file.resolve()), "exec"), vars(module))
    return file.stem, build_of(module, path)


def build_of(module, path: str) -> Callable:
    """The function build(model, group, budget) of a module, or one that calls its class."""
    if inspect.isfunction(build := getattr(module, "build", None)):
        if len(inspect.signature(build).parameters) != 3:
            raise ValueError(f"build in {path} must take three arguments: build(model, group, budget)")
        return build
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
           and hasattr(kind, "step") and hasattr(kind, "zero_grad")]
    if len(own) != 1:
        names = ", ".join(kind.__name__ for kind in own) or "none"
        raise ValueError(f"{path} must have a function build(model, group, budget), or one class with step() and "
                         f"zero_grad(); classes of that kind: {names}")
    return lambda model, group, budget: own[0](model, AdamW, group=group, **budget.options)


# ------------------------------------------------------------------------------------------------------------- command


def main(arguments: list[str]) -> None:
    """The command: read the flags, simulate, print, write JSON and picture."""
    asked = parser()
    flags = asked.parse_args(arguments)
    if flags.config and (flags.stage != "3" or "--no-recompute" in asked.given):
        asked.error("--config chooses a stage, and recomputes: give it without --stage and --no-recompute")
    flags.recompute |= bool(flags.config)
    if (flags.budget_memory or flags.budget_sent) and flags.stage in ("0", "1", "2", "3"):
        asked.error("a budget is for build() of a file: give it with --stage FILE.py")
    try:
        name, build = ("", None) if flags.stage in ("0", "1", "2", "3") else read_system(flags.stage)
        case = Case(
            chosen(flags), 3 if build else int(flags.stage), flags.ranks, flags.dtype, flags.batch,
            flags.model_parallel, flags.rank, accumulate=flags.accumulate, attention=flags.attention,
            offload=flags.offload, config=flags.config, build=build, name=name,
            bucket_bytes=flags.bucket_mb * 2**20 if flags.bucket_mb else None,
            budget=Budget(flags.budget_memory, flags.budget_sent, flags.batch, flags.sequence),
        )
        simulation = watched(case)
    except ValueError as error:
        asked.error(f"{place_of(error, flags.stage)}{error}")
    print(plan_markdown.of_simulation(simulation.report) if flags.markdown else describe(simulation))
    report.keep(flags, simulation.report, lambda: draw_simulation(simulation))


def parser() -> Parser:
    """The flags."""
    result = Parser(
        prog="python -m zero_minimal simulate",
        description="Run a stage's own code as one rank of many, on tensors that have a size and no memory, and count.",
    )
    add_flags(result, picture="memory over the steps")
    add = result.add_argument
    add("--stage", default="3", metavar="0…3|FILE.py",
        help="default: 3; or a file with build(model, group, budget), or with a class used like Stage3")
    add("--config", default="", choices=tuple(CONFIGS), metavar="C1…C5",
        help="instead of a stage: a system of zero_100b.py")
    add("--offload", default="", metavar="cpu", help="masters, optimizer state and the update on the rank's host, at "
        "stages 1 to 3")
    add("--rank", type=int, default=0, help="which rank to be (default: 0)")
    add("--bucket-mb", type=positive, metavar="MIB",
        help=f"size of the buckets (default: 4, or larger for at most {BUCKETS}; in a config: 64)")
    add("--budget-memory", type=size, metavar="SIZE", help="a file's budget.memory, e.g. 10GB")
    add("--budget-sent", type=size, metavar="SIZE", help="a file's budget.sent")
    return result


def place_of(error: ValueError, path: str) -> str:
    """The line of the file that raised the error: "line 20 of system.py: ", or ""."""
    file = str(Path(path).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {lines[-1]} of {path}: " if lines else ""


def watched(case: Case) -> Simulation:
    """Simulate, with a progress bar that names the current phase."""
    with progress.bar(name="simulate", total=len(phases(case)), unit="phase") as bar:
        def tell(phase: str) -> None:
            bar.note(phase)
            bar.update()

        return simulate(case, tell)
