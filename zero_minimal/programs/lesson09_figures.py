"""Offloading: the figures and the pictures of lesson 09's page.

    python -m zero_minimal.programs.lesson09_figures lessons/09_offload

writes measured.json into that folder, and from it bus.png, ladder.png and boxes.png. measured.json has

    ladder    a report for each rung, of one rank: programs/offload_ladder.py says what is in it
    bus       how much of the transfer is hidden, at several speeds of the bus:
        gpu, utilisation, bus    whose computation and whose bus (bytes a second) stand for "PCIe-like"
        operations_a_byte        that this GPU does while its bus carries one byte one way
        ranks, dtype, parameters, operations (of a rank in a step)
        runs    for each stage "stage", what meters/overlap.py says of it: suits, bytes, seconds, speeds;
                and "hidden", "hidden_by_waits": the shares at the speed `suits`, which is PCIe-like here

Bytes are the same on every machine. Times are not: a busy machine makes the curve uneven. All speeds are timed in turns
in one run, so that what slows the machine for a while slows all of them.
"""

from dataclasses import replace

from matplotlib.figure import Figure

from zero_minimal.meters import overlap
from zero_minimal.offload import Offloaded2, Offloaded3
from zero_minimal.paper import operations
from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.quantities import size_text
from zero_minimal.paper.shapes import parameter_count
from zero_minimal.pictures.offload_chart import draw_boxes, draw_bus, draw_ladder
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.programs.offload_ladder import RUNGS, stand_on
from zero_minimal.programs.planning import UTILISATION
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload.settings import Settings

LADDER = Settings(layers=6, hidden=512, heads=8, sequence=16, batch=1, steps=3, dtype="bf16", bucket_mb=1)
GPU = "V100-32GB"  # of a DGX-2, as in the papers of ZeRO and of ZeRO-Offload
BUS_RANKS = 2
BUS = Settings(layers=8, hidden=128, heads=4, sequence=64, batch=32, dtype="bf16", bucket_mb=0.25)
STAGES = {2: (Stage2, Offloaded2), 3: (Stage3, Offloaded3)}
MULTIPLES = (0.25, 0.5, 1, 2, 4, 16)  # of the speed that is PCIe-like here; and a bus without a limit
ROUNDS = 9  # at most


def rank_operations(settings: Settings) -> float:
    """Of a rank in a step; attention's are those of a kernel that skips what is masked."""
    config = settings.model_config()
    own = operations.matrices(config.layers, config.hidden, config.vocabulary, settings.batch * config.sequence, False)
    return own + operations.attention(config.layers, config.hidden, settings.batch, config.sequence, False) / 2


def course(stage: int, settings: Settings = BUS, multiples: tuple = MULTIPLES, rounds: int = ROUNDS) -> overlap.Course:
    """What is timed of a stage."""
    gpu = GPUS[GPU]
    a_byte = gpu.rate(settings.dtype) * UTILISATION / gpu.bus
    return overlap.Course(*STAGES[stage], settings, rank_operations(settings), a_byte, multiples, rounds)


def hidden_of(stage: int, timed: overlap.Course) -> dict:
    """The entry of `runs`."""
    found = ranks.run(overlap.time_speeds, BUS_RANKS, timed, device="cpu", timeout=900)[0]
    said = overlap.what_they_say(timed, found)
    shares = {by: overlap.hidden_at(said, said["suits"], by) for by in ("hidden", "hidden_by_waits")}
    return {"stage": stage} | said | shares


def measure() -> dict:
    """All that the page and its pictures need."""
    with progress.bar(name="lesson 09", total=len(RUNGS) + len(STAGES), unit="run") as bar:
        ladder = []
        for rung in RUNGS:
            ladder.append(ranks.run(stand_on, 1, rung, LADDER, device="cpu", timeout=300)[0])
            bar.update()
        runs = []
        for stage in STAGES:
            runs.append(hidden_of(stage, course(stage)))
            bar.update()
    one = course(2)
    return {"ladder": ladder, "bus": {
        "gpu": GPU, "utilisation": UTILISATION, "bus": GPUS[GPU].bus, "operations_a_byte": one.operations_a_byte,
        "ranks": BUS_RANKS, "dtype": BUS.dtype, "parameters": parameter_count(BUS.model_config()),
        "operations": one.operations, "runs": runs,
    }}


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    return {"bus.png": draw_bus(measured["bus"]), "ladder.png": draw_ladder(measured["ladder"]),
            "boxes.png": draw_boxes(measured["ladder"][-1])}


def table(measured: dict) -> str:
    """What was measured."""
    return "\n\n".join((report.table(ladder_rows(measured["ladder"])),
                        *(bus_table(run) for run in measured["bus"]["runs"])))


def ladder_rows(ladder: list[dict]) -> list[list[str]]:
    """Bytes a parameter: by formula, by the ledger, by the system."""
    rows = [["bytes a parameter", "device: formula", "tensors", "resident", "host: formula", "tensors", "resident",
             "bus, each way"]]
    for rung in ladder:
        def each(size: float | None, rung: dict = rung) -> str:
            return "?" if size is None else f"{size / rung['parameters']:.2f}"

        resident = rung["resident"] or {"device": None, "host": None}
        rows.append([rung["name"], str(rung["formula"]["device"]), each(sum(rung["ledger"].values())),
                     each(resident["device"]), str(rung["formula"]["host"]), each(rung["host"]), each(resident["host"]),
                     f"{each(rung['bus']['to_host'])}, {each(rung['bus']['to_device'])}"])
    return rows


def bus_table(run: dict) -> str:
    """Of one stage: what each speed of the bus costs."""
    rows = [["bus a second", "transfer, ms", "a step, ms", "longer by", "hidden", "waited in forward", "backward",
             "step()", "hidden, by waits"]]
    for each in run["speeds"]:
        waited = [f"{each['waited'][part] * 1e3:.0f}" for part in overlap.PARTS]
        rows.append([size_text(each["bus"]), f"{each['transfer'] * 1e3:.0f}", f"{each['seconds'] * 1e3:.0f}",
                     f"{each['more'] * 1e3:.0f}", f"{each['hidden']:.0%}", *waited, f"{each['hidden_by_waits']:.0%}"])
    alone, unlimited = (run["seconds"][name] * 1e3 for name in (overlap.NO_OFFLOAD, overlap.UNLIMITED))
    return "\n".join((
        report.table(rows),
        f"stage {run['stage']}: a step takes {alone:.0f} ms without offload, {unlimited:.0f} ms with a bus that takes "
        f"no time; PCIe-like is {size_text(run['suits'])}/s, where {run['hidden']:.0%} of the transfer is hidden "
        f"({run['hidden_by_waits']:.0%} by what the rank waited)"))


def quick(stage: int) -> dict:
    """A small run of a few seconds, for tests."""
    small = replace(BUS, layers=4, hidden=64, heads=2, batch=8, bucket_mb=0.02)
    return hidden_of(stage, course(stage, small, (0.25, 1), 2))


main = figures.program("09_offload", measure, pictures, table)

if __name__ == "__main__":
    main()
