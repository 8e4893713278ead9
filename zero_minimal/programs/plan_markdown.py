"""Markdown: a plan as one table for a design document, with its assumptions below: for `plan --markdown`, and for the
counts of `simulate --markdown`."""

from zero_minimal.paper.formulas import STATES
from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.quantities import count_text, seconds_text, size_text


def sent(row: dict) -> str:
    """What a rank sends in a step: "44.3 GB", or within its group and between groups: "39.4 GB + 1.88 GB"."""
    between = row["between_bytes"]
    return size_text(row["sent_bytes"] - between) + (f" + {size_text(between)}" if between else "")


def ranks_text(data_parallel: int | None, told: dict) -> str:
    """The total number of ranks, as text."""
    return "none" if data_parallel is None else f"{data_parallel * told['model_parallel']:,}"


def of_plan(told: dict, hardware: str = "") -> str:
    """A row for each stage. told: the result of plan()."""
    sends = "sent a step" if told["replicate"] == 1 else "sent a step, within + between"
    head = ["stage", "shards", *STATES, "activations", "passing", "peak", "fits?", "fewest ranks",
            sends, "step, at least", "step, at most"]
    rows = []
    for row in told["rows"]:
        rows.append([
            str(row["stage"]), row["name"], *(size_text(row[name]) for name in (*STATES, "activations", "passing")),
            f"{size_text(row['together'])} ({row['moment']})", "yes" if row["fits"] else "no",
            ranks_text(row["fewest_data_parallel_ranks"], told), sent(row),
            seconds_text(row["least_seconds"]), seconds_text(row["most_seconds"]),
        ])
    notes = [f"- {line}" for line in assumed(told, hardware)]
    return "\n".join([f"**{title(told)}**", "", *table(head, rows), "", *notes])


def title(told: dict) -> str:
    """The model and its ranks."""
    shared = f", {told['model_parallel']} share a model" if told["model_parallel"] > 1 else ""
    shared += f", shards within {told['replicate']} groups" if told["replicate"] > 1 else ""
    return f"{count_text(told['parameters'])} parameters in {told['dtype']} on {told['ranks']:,} ranks{shared}"


def assumed(told: dict, hardware: str) -> list[str]:
    """What a reader must know to trust the table, or to reproduce it."""
    recomputed = f"blocks recomputed, their inputs kept {told['checkpoints']}"
    parallel = told["ranks"] // told["model_parallel"] // told["sequence_parallel"]
    tokens = parallel * told["batch"] * told["sequence"] * told["accumulate"]
    shares = f", a sequence on {told['sequence_parallel']} ranks" if told["sequence_parallel"] > 1 else ""
    shape = (f"{told['name']} of {told['model']}, {told['layers']} blocks" if "model" in told else
             f"{told['layers']} blocks of width {told['hidden']}, {told['heads']} heads")
    attention = f"{told['attention_measured']}, as measured" if "model" in told else told["attention"]
    lines = [
        f"{shape}, vocabulary {told['vocabulary']:,}; {told['parameters']:,} parameters",
        f"{told['batch']} × {told['sequence']:,} tokens in a micro-batch{shares}, {told['accumulate']} of these in a "
        f"step of {tokens:,} tokens",
        f"{recomputed if told['recompute'] else 'nothing recomputed'}; attention {attention}; gradients "
        f"{told['gradient_bytes']} bytes each" + ("; optimizer state on the host" if told["offloaded"] else ""),
        f"{hardware or 'device'}: {size_text(told['device_bytes'])}, {told['operations'] / 1e12:,.4g} TFLOP/s of which "
        f"{told['utilisation']:.0%} are reached; {size_text(told['link'])}/s inside a node of {told['node']}, "
        f"{size_text(told['network'])}/s between nodes",
    ]
    if hardware:
        lines.append(f"{hardware}: {GPUS[hardware].source}")
    return [*lines, "GB are 10⁹ bytes. At least: all communication is hidden; at most: none is. Not counted: "
            "fragmentation, CUDA's context, NCCL's buffers"]


def of_simulation(result: dict) -> str:
    """A row for each count. result: the report of a simulation."""
    memory, theory = result["memory"], result["theory"]
    rows = [[name, size_text(memory[name], 4), size_text(theory[name], 4)] for name in STATES]
    rows += [[f"{name}, at most", size_text(memory[name], 4), ""] for name in ("activations", "buffers")]
    rows += [[f"peak ({memory['peak_when']})", size_text(memory["peak"], 4), ""],
             ["sent in a step", size_text(result["traffic"]["sent_bytes"], 4),
              size_text(result["traffic"]["theory_bytes"], 4)]]
    if "bus" in result:
        rows += [["on the host", size_text(result["host_memory"], 4), ""],
                 ["to the host, a step", size_text(result["bus"]["to_host"], 4), ""]]
    settings = result["settings"]
    model = f"{count_text(result['parameters'])} parameters in {result['dtype']}"
    tokens = f"{settings['batch']} × {settings['model']['sequence']:,} tokens"
    return "\n".join([
        f"**{result['name']}, rank {result['rank']} of {result['ranks']:,}: {model}**", "",
        *table(["of this rank", "counted", "formula"], rows), "",
        f"- counted while the code ran on tensors without memory; {tokens}, {settings['accumulate']} micro-batches a "
        f"step, attention {settings['attention']}",
        "- GB are 10⁹ bytes"])


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
