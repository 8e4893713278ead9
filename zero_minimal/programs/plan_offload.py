"""Plan of offload: what `plan --offload` says of device, host and disk, and of the bus between them."""

from dataclasses import dataclass

from zero_minimal.paper import formulas, moments
from zero_minimal.paper.moments import Work
from zero_minimal.paper.quantities import count_text, seconds_text, size_text, size_unit
from zero_minimal.programs import report
from zero_minimal.programs.words import paragraph

LINKS = (12e9, 25e9, 64e9, 900e9)  # bytes a second: what PCIe 3, 4 and 5 reach, and a link made for it (both ways)
PLACES = ("cpu", "disk")


def offloaded(work: Work, ranks: int, device_bytes: float, place: str, accumulate: int = 1,
              optimizer_bytes: float | None = None) -> dict:
    """The calculation, as JSON: bytes, and seconds at each link. place: of PLACES. optimizer_bytes: K, instead of
    Adam's. Stage 0 has no shards that could leave.

    {"place", "accumulate", "rows": for each stage 1 to 3 {"stage", "device": of model states, "host", "disk",
     "to_host", "to_device": of a step, "link_seconds": of both ways at each of LINKS, "together": the peak of
     a step, "states_fit", "fits", "largest_model": whose states fit}}
    """
    sizes = Sizes(moments.rank_parameters(work), work.shards(ranks), work.dtype, work.model_parallel)
    return {"place": place, "accumulate": accumulate, "rows": [
        row(stage, sizes, device_bytes, place, accumulate, optimizer_bytes,
            moments.highest(stage, work, sizes.ranks, offloaded=True).total, moments.construction(stage, work))
        for stage in (1, 2, 3)]}


@dataclass(frozen=True)
class Sizes:
    """Of a model, on each of its data-parallel ranks."""

    elements: int
    ranks: int
    dtype: str
    model_parallel: int = 1


def row(stage: int, sizes: Sizes, device_bytes: float, place: str, accumulate: int, optimizer_bytes: float | None,
        highest: float, construction: float) -> dict:
    """What a stage needs. highest: bytes on the device at the peak of a step; construction: before it."""
    parts = (sizes.elements, sizes.ranks, sizes.dtype)
    device = sum(formulas.states_on_device(stage, *parts, offloaded=True).values())
    leaves = formulas.host_bytes(*parts, optimizer_bytes)
    crosses = formulas.bus_bytes(stage, *parts, accumulate)
    return {
        "stage": stage, "device": device, "host": leaves if place == "cpu" else 0,
        "disk": leaves if place == "disk" else 0, **crosses,
        "link_seconds": [sum(crosses.values()) / link for link in LINKS],
        "together": highest, "states_fit": device <= device_bytes,
        "fits": max(highest, construction) <= device_bytes,
        "largest_model": formulas.largest_model(stage, device_bytes, sizes.ranks, sizes.dtype, sizes.model_parallel,
                                                 offloaded=True),
    }


def describe(told: dict) -> str:
    """The tables. told: what plan() gave, with the above as "offload"."""
    away = told["offload"]
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
