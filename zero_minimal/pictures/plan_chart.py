"""Plan: memory on a device by the formulas, for each stage, and how it falls with the number of ranks."""

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
