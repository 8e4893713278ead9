"""Batches: what a rank sends in a step, by the size of the batch, for two ways to share the work."""

from matplotlib.figure import Figure

from zero_minimal.pictures.style import PAGE, SENT, STAGE_COLOURS, bars, figure, name_bars, words_above


def draw_sent_by_batch(sent: dict[int, int], of_data: int) -> Figure:
    """Bars for tensor parallelism, and a line for data parallelism.

    Args: sent {sequences in a batch: bytes}; of_data, bytes that data parallelism sends with any batch.
    """
    result, axes = figure(1, 1, 0.6 * PAGE, 3.0)
    axis, places = axes[0][0], range(len(sent))
    heights = [count / 1e6 for count in sent.values()]
    bars(axis, places, heights, SENT, label="tensor parallelism")
    words_above(axis, places, heights, [f"{height:.2f}" for height in heights], fontsize=9)
    axis.axhline(of_data / 1e6, color=STAGE_COLOURS[0], linestyle="--", label="data parallelism")
    axis.set_ylabel("MB that a rank sends in a step", fontsize=9)
    axis.set_ylim(0, 1.25 * max(*heights, of_data / 1e6))
    name_bars(axis, places, [f"batch of {size}" for size in sent])
    axis.legend(fontsize=9, frameon=False, loc="upper left")
    return result
