"""Tables: what `python -m zero_minimal reproduce` prints. What does not agree with the paper is marked with !."""

from zero_minimal.paper import formulas, published
from zero_minimal.paper.quantities import count_text
from zero_minimal.programs import report


def describe(name: str, result: dict) -> str:
    """A table, and what there is to say about it. `name` and `result` as in programs/reproduce.py."""
    head, rows = TABLES[name](result)
    notes = [f"- {note}" for note in result["notes"]]
    return "\n".join([f"\n{head}", "", report.table(rows), "", *notes])


def table1(result: dict) -> tuple[str, list[list[str]]]:
    """For each size and N: paper, formula, code and the difference, at stages 1 to 3."""
    rows = [["model, N", *(column for name in published.STAGES for column in (name, "formula", "code", "off"))]]
    cells = {(cell["model"], cell["ranks"], cell["stage"]): cell for cell in result["cells"]}
    for model, ranks in dict.fromkeys(key[:2] for key in cells):
        row = [f"{model}, {ranks}"]
        for stage in (1, 2, 3):
            cell = cells[model, ranks, stage]
            difference = cell["code_gb"] - float(cell["paper"])
            row += [cell["paper"], f"{cell['formula_gb']:,.2f}", f"{cell['code_gb']:,.2f}",
                    f"{difference:+.2f}{'' if cell['agrees'] else ' !'}"]
        rows.append(row)
    agree = sum(cell["agrees"] for cell in result["cells"])
    return ("Table 1: GB of model states on a device: the paper's number, the formula, the running code, and how far "
            f"this is off the paper; {agree} of {len(result['cells'])} cells agree"), rows


def figure1(result: dict) -> tuple[str, list[list[str]]]:
    """For each stage: its model states by kind."""
    rows = [["stage", *formulas.STATES, "code", "formula", "paper", "difference"]]
    for bar in result["bars"]:
        states, code = bar["states"], sum(bar["states"].values()) / 1e9
        rows.append([
            f"{bar['stage']}", *(f"{states[state] / 1e9:.2f}" for state in formulas.STATES), f"{code:.3f}",
            f"{sum(bar['formula'].values()) / 1e9:.3f}", bar["paper"], f"{code - float(bar['paper']):+.3f}",
        ])
    return "Figure 1: GB of model states on a device, 7.5B parameters on 64 ranks", rows


def table2(result: dict) -> tuple[str, list[list[str]]]:
    """For each MP and stage: the largest model."""
    rows = [["MP, stage", "GPUs", "paper", "formula", "code", "code / paper", "runs", "paper measured"]]
    for cell in result["cells"]:
        measured = cell["paper_measured"]
        rows.append([
            f"{cell['model_parallel']}, {cell['stage']}", str(cell["ranks"]), f"{cell['paper']:g}B",
            count_text(cell["formula"], 4), count_text(cell["code"], 4),
            f"{cell['code'] / 1e9 / cell['paper']:.3f}{'' if cell['agrees'] else ' !'}", str(cell["runs"]),
            "" if measured is None else f"{measured:g}B",
        ])
    return "Table 2: the largest model whose states fit into 32 GB, on 64 ranks for each MP rank", rows


def figure7(result: dict) -> tuple[str, list[list[str]]]:
    """For each size and config: cached and allocated, and by category what is allocated."""
    rows = [["model, config", "paper, cached", "code, cached", "code, allocated", "paper − cached", "parameters",
             "gradients", "optimizer", "activations", "buffers", "on the host"]]
    for bar in result["bars"]:
        printed, categories = bar["paper_cached_gb"], bar["by_category_gb"]
        rows.append([
            f"{bar['model']}, {bar['config']}", "no bar" if printed is None else f"{printed:.1f}",
            f"{bar['cached_gb']:.1f}", f"{bar['allocated_gb']:.1f}",
            "" if printed is None else f"{printed - bar['cached_gb']:+.1f}",
            *(f"{categories[name]:.2f}" for name in (*formulas.STATES, "activations", "buffers")),
            f"{bar['host_gb']:.2f}",
        ])
    return "Figure 7: GB on a device at the highest moment of a step, MP 16, 400 GPUs, fp16", rows


def figure2(result: dict) -> tuple[str, list[list[str]]]:
    """For each size: memory and speed of ZeRO and the baseline."""
    rows = [["name", "12·L·h²", "Ψ", "ZeRO: MP", "states, GB", "estimate", "paper", "baseline: MP", "states, GB",
             "at MP 16, GB", "estimate", "paper", "speed-up"]]
    for row in result["rows"]:
        rows.append([
            f"{row['name_billions']:g}B", count_text(row["matrices"]), count_text(row["parameters"]),
            str(row["zero_model_parallel"]), f"{row['zero_states_gb']:.1f}", f"{row['zero_estimate']:.1f}",
            f"{row['zero_paper']:.1f}", str(row["baseline_model_parallel"]), f"{row['baseline_states_gb']:.1f}",
            f"{row['baseline_states_inside_a_node_gb']:.1f}", f"{row['baseline_estimate']:.1f}",
            f"{row['baseline_paper']:.1f}", f"{row['speed_up_paper']:.1f}x",
        ])
    return "Figure 2: its models by arithmetic; TFLOP/s a GPU are the paper's", rows


TABLES = {"table1": table1, "table2": table2, "figure1": figure1, "figure2": figure2, "figure7": figure7}
