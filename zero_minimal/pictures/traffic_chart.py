"""Traffic: the bytes that a rank sends, with the formula: by run, by stage, and against the number of ranks."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.pictures import style


def traffic_panel(axis: Axes, rows: list[dict], positions: Sequence[float]) -> None:
    """Bytes that a rank sends in a step: counted, measured, and by the formula. rows: reports of runs."""
    sent = [row["traffic"]["sent_bytes"] / 1e6 for row in rows]
    wire = [(row["traffic"]["wire_bytes"] or 0) / 1e6 for row in rows]
    crossed = "on the wire" + (": not known here" if not any(wire) else "")
    style.bars(axis, [position - 0.18 for position in positions], sent, style.SENT, "sent, as a ring sends", width=0.34)
    style.bars(axis, [position + 0.18 for position in positions], wire, style.ON_THE_WIRE, crossed, width=0.34)
    style.formula_marks(axis, positions, [row["traffic"]["theory_bytes"] / 1e6 for row in rows])
    axis.set_title("Traffic of a rank in a step", fontsize=11)
    axis.set_ylabel("MB")
    style.legend(axis, columns=2, headroom=0.2)


def draw_sent_by_stage(sent: dict[str, float], formula: dict[str, float]) -> Figure:
    """Bytes that a rank sends in a step at each stage, with the formula."""
    result, ((axis,),) = style.figure(1, 1, 6.0, 3.4)
    positions = range(len(sent))
    heights = [count / 1e6 for count in sent.values()]
    drawn = style.bars(axis, positions, heights, style.SENT, "sent, measured", width=0.5)
    axis.bar_label(drawn, [f"{height:.1f}" for height in heights], label_type="center",
                   bbox=style.WHITE | {"pad": 1.5}, fontsize=9)
    style.formula_marks(axis, positions, [count / 1e6 for count in formula.values()], width=0.7)
    style.name_bars(axis, positions, list(sent))
    axis.set_ylabel("MB that a rank sends in a step")
    style.legend(axis, columns=2, headroom=0.2)
    return result


def draw_ring_traffic(measured: dict[str, dict[int, float]], formulas: dict[str, Callable[[float], float]]) -> Figure:
    """Bytes that a rank sends, in payloads, against the number of ranks: measured (marks), by formula (lines).

    Args: measured {algorithm: {ranks: share of the payload}}; formulas {algorithm: function of the number of ranks}.
    """
    result, ((axis,),) = style.figure(1, 1, 6.4, 3.4)
    fine = [1 + step / 50 for step in range(7 * 50 + 1)]
    for index, (name, points) in enumerate(measured.items()):
        axis.plot(fine, [formulas[name](count) for count in fine], color="black", linewidth=1.0,
                  linestyle=("-", "--", ":")[index % 3], label=f"formula, {name}")
        axis.plot(list(points), list(points.values()), linestyle="", marker=style.MARKERS[index], markersize=8,
                  markerfacecolor=style.SENT[0], markeredgecolor="black", label=f"measured, {name}")
    axis.set_xlabel("ranks N")
    axis.set_ylabel("sent by a rank, payloads")
    axis.set_xticks(range(1, 9))
    axis.set_ylim(0, 2.1)
    axis.legend(fontsize=9, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.25))
    return result
