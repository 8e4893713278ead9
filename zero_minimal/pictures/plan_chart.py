"""Plan: memory on a device by the formulas, for each stage, and how it falls with the number of ranks; and the memory
of one simulated rank of many, from building the model to the last step."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.paper.formulas import STATES
from zero_minimal.paper.quantities import plural
from zero_minimal.pictures import style


def draw_plan(told: dict) -> Figure:
    """The figures of `python -m zero_minimal plan`: memory on a device by stage, and how it falls with more ranks."""
    result, axes = style.figure(1, 2, style.PAGE, 5.0)
    stages_panel(axes[0][0], told)
    ranks_panel(axes[0][1], told)
    result.suptitle(f"{told['parameters'] / 1e9:,.4g} billion parameters, {told['dtype']}, by formula",
                    fontsize=14)
    return result


def stages_panel(axis: Axes, told: dict) -> None:
    """A stack for each stage, at the peak of a step: model states, activations, temporary tensors; and a line at the
    device's memory. A peak before the gradients exist has none."""
    rows, positions, device = told["rows"], range(len(told["rows"])), told["device_bytes"] / 1e9
    labels = {name: name for name in (*STATES, "activations")} | {"passing": "whole for a moment"}
    looks = style.LOOKS | {"passing": style.LOOKS["buffers"]}
    tops = style.stacked_bars(axis, positions, [
        (label, looks[part], [there(row, part) / 1e9 for row in rows]) for part, label in labels.items()
    ])
    style.words_above(axis, positions, tops, [f"{top:,.4g}" for top in tops])
    axis.axhline(device, label=f"a device: {device:,.4g} GB", **style.DEVICE)
    style.name_bars(axis, positions, [f"stage {row['stage']}\n{row['name']}" for row in rows])
    axis.set_ylabel("GB on a device")
    axis.set_title(f"at the peak of a step, on {plural(told['ranks'], 'rank')}")
    style.legend(axis, columns=3, headroom=0.16)


def there(row: dict, part: str) -> float:
    """Bytes of a part at the peak."""
    absent = row["states"] - row["states_there"] if part == "gradients" else 0
    return row[part] - absent


def ranks_panel(axis: Axes, told: dict) -> None:
    """A line for each stage: a rank's model states on 1 to 1024 data-parallel ranks."""
    counts = [2**power for power in range(11)]
    for row in told["rows"]:
        whole = sum(row[state] for state in row["whole"]) / 1e9
        shared = (row["states"] / 1e9 - whole) * told["shards"]
        axis.plot(counts, [whole + shared / count for count in counts], color=style.STAGE_COLOURS[row["stage"]],
                  marker=style.MARKERS[row["stage"]], markersize=5, label=f"stage {row['stage']}")
    axis.axhline(told["device_bytes"] / 1e9, **style.DEVICE)
    style.log_ranks(axis, counts)
    axis.set_ylabel("GB on a device")
    axis.set_title("model states alone, on more or fewer ranks")
    axis.legend(fontsize=9, frameon=False)


# ----------------------------------------------------------------------------------------------------- a simulated rank


def draw_simulation(run) -> Figure:
    """Memory of a simulated rank, by category, with its phases and its peak.

    run: what programs/simulate.py returns: its report, its timeline and its phases (name, seconds at the start).
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 5.0)
    drawn = worth_drawing(run.timeline)
    categories = [category for category in style.LOOKS if category != "other"]
    levels = {name: [run.timeline[position].bytes[name] / 1e9 for position in drawn] for name in categories}
    style.stacked_areas(axis, drawn, levels)
    totals = [sum(level) for level in zip(*levels.values(), strict=True)]
    highest = max(range(len(drawn)), key=totals.__getitem__)
    axis.set_ylim(0, 1.3 * totals[highest])
    told = run.report
    for number, (name, begin) in enumerate(run.phases):
        start = next((position for position in drawn if run.timeline[position].seconds > begin), drawn[-1])
        axis.axvline(start, color="black", linewidth=0.7, linestyle=":")
        is_last, height = number == len(run.phases) - 1, (1.08, 1.15)[number % 2] * totals[highest]
        style.note(axis, name, (start, height), (-3 if is_last else 3, 0), ha="right" if is_last else "left",
                   bbox=style.WHITE)
    axis.plot(drawn[highest], totals[highest], color="black", marker="v", markersize=7, linestyle="none",
              label=f"highest: {totals[highest]:,.4g} GB")
    axis.set_xlim(drawn[0], drawn[-1])
    axis.set_xlabel("allocations and frees, in order")
    axis.set_ylabel("GB")
    if "bus" in told:
        draw_host(axis, drawn[-1], told)
    axis.legend(fontsize=9, framealpha=1, edgecolor="none", ncols=6, loc="upper left", borderaxespad=0.2)
    axis.set_title(f"{told['name']}: rank {told['rank']} of {told['ranks']:,}, {told['parameters'] / 1e9:,.4g} billion "
                   f"parameters in {told['dtype']}, simulated")
    return result


def draw_host(axis: Axes, end: int, told: dict) -> None:
    """What an offloaded rank's host keeps, as a bar after the last step, and what crosses the bus."""
    kept, there, back = (size / 1e9 for size in (told["host_memory"], told["bus"]["to_host"], told["bus"]["to_device"]))
    style.bars(axis, [1.05 * end], [kept], style.PLAIN, width=0.06 * end)
    style.words_above(axis, [1.05 * end], [kept], [f"its host:\n{kept:,.4g} GB"], fontsize=9)
    axis.set_xlim(right=1.1 * end)
    axis.set_ylim(top=max(axis.get_ylim()[1], 1.3 * kept))
    axis.set_xlabel(f"{axis.get_xlabel()}; over the bus, a step: {there:,.3g} GB there, {back:,.3g} GB back")


def worth_drawing(timeline: list, most: int = 1200) -> list[int]:
    """At most `most` positions in a timeline: the peak of each interval."""
    length = -(-len(timeline) // most)
    stretches = (range(start, min(start + length, len(timeline))) for start in range(0, len(timeline), length))
    return [max(stretch, key=lambda position: timeline[position].total) for stretch in stretches]
