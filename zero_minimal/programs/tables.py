"""Tables: the output of `python -m zero_minimal reproduce`. Disagreements with the paper are marked with !. And Figure
7's notes, which are more than a line."""

from collections.abc import Callable

from zero_minimal.paper import formulas, published
from zero_minimal.paper.quantities import count_text, size_text
from zero_minimal.programs import report

GB = 1e9
Described = tuple[str, *tuple[list[list[str]], ...]]  # a head, and tables: rows of cells


def describe(tell: Callable[[dict], Described], result: dict) -> str:
    """A table with its notes. `tell`: one of the functions below; `result` as in programs/reproduce.py."""
    head, *tables = tell(result)
    parts = [f"\n{head}", *map(report.table, tables), "\n".join(f"- {note}" for note in result["notes"])]
    return "\n\n".join(parts)


def table1(result: dict) -> Described:
    """For each stage, size and N: paper, formula, code and the difference."""
    tables = []
    for stage, name in enumerate(published.STAGES, start=1):
        rows = [[f"{name}: model, N", "paper", "formula", "code", "off"]]
        for cell in result["cells"]:
            if cell["stage"] == stage:
                difference = cell["code_gb"] - float(cell["paper"])
                rows.append([f"{cell['model']}, {cell['ranks']}", cell["paper"], f"{cell['formula_gb']:,.2f}",
                             f"{cell['code_gb']:,.2f}", f"{difference:+.2f}{'' if cell['agrees'] else ' !'}"])
        tables.append(rows)
    agree = sum(cell["agrees"] for cell in result["cells"])
    return ("Table 1: GB of model states on a device: the paper's number, the formula, the running code, and how far "
            f"this is off the paper; {agree} of {len(result['cells'])} cells agree", *tables)


def figure1(result: dict) -> Described:
    """For each stage: its model states by kind."""
    rows = [["stage", *formulas.STATES, "code", "formula", "paper", "difference"]]
    for bar in result["bars"]:
        states, code = bar["states"], sum(bar["states"].values()) / 1e9
        rows.append([
            f"{bar['stage']}", *(f"{states[state] / 1e9:.2f}" for state in formulas.STATES), f"{code:.3f}",
            f"{sum(bar['formula'].values()) / 1e9:.3f}", bar["paper"], f"{code - float(bar['paper']):+.3f}",
        ])
    return "Figure 1: GB of model states on a device, 7.5B parameters on 64 ranks", rows


def table2(result: dict) -> Described:
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


def figure7(result: dict) -> Described:
    """For each size and config: cached and allocated bytes, and allocated ones by category."""
    totals = [["model, config", "paper, cached", "code, cached", "code, allocated", "paper − code, cached"]]
    parts = [["code, allocated", *formulas.STATES, "activations", "buffers", "on the host"]]
    for bar in result["bars"]:
        name, printed, categories = f"{bar['model']}, {bar['config']}", bar["paper_cached_gb"], bar["by_category_gb"]
        totals.append([
            name, "no bar" if printed is None else f"{printed:.1f}", f"{bar['cached_gb']:.1f}",
            f"{bar['allocated_gb']:.1f}", "" if printed is None else f"{printed - bar['cached_gb']:+.1f}",
        ])
        shares = (categories[category] for category in (*formulas.STATES, "activations", "buffers"))
        parts.append([name, *(f"{share:.2f}" for share in shares), f"{bar['host_gb']:.2f}"])
    return "Figure 7: GB on a device at the peak of a step, MP 16, 400 GPUs, fp16", totals, parts


def figure2(result: dict) -> Described:
    """For each size: memory and speed of ZeRO and the baseline."""
    sizes = [["name", "12·L·h²", "Ψ", "speed-up"]]
    zero = [["ZeRO", "MP", "states, GB", "estimate", "paper"]]
    baseline = [["baseline", "MP", "states, GB", "at MP 16, GB", "estimate", "paper"]]
    for row in result["rows"]:
        name = f"{row['name_billions']:g}B"
        sizes.append([name, count_text(row["matrices"]), count_text(row["parameters"]),
                      f"{row['speed_up_paper']:.1f}x"])
        zero.append([name, str(row["zero_model_parallel"]), f"{row['zero_states_gb']:.1f}",
                     f"{row['zero_estimate']:.1f}", f"{row['zero_paper']:.1f}"])
        baseline.append([
            name, str(row["baseline_model_parallel"]), f"{row['baseline_states_gb']:.1f}",
            f"{row['baseline_states_inside_a_node_gb']:.1f}", f"{row['baseline_estimate']:.1f}",
            f"{row['baseline_paper']:.1f}",
        ])
    return "Figure 2: its models by arithmetic; TFLOP/s a GPU are the paper's", sizes, zero, baseline


# ---------------------------------------------------------------------------------------------------- Figure 7 in words


def figure7_notes(bars: list[dict]) -> list[str]:
    """The notes below Figure 7: how far the paper's bars are from the code's, and what explains the difference. bars:
    as in programs/reproduce.py."""
    whole, cut = checkpoints_of("100B")
    return [
        "The paper's bars are read off a chart (±0.3), and are memory cached by PyTorch's allocator: what it took from "
        "the GPU. \"Cached\" here replays the code's allocations in a model of that allocator without a limit; "
        "\"allocated\" is the sum of tensors at the peak.",
        *distances(bars),
        *causes(bars),
        "§6.1 says that P_a takes the checkpoints of the 100B model from \"33 GB\" to 2 GB. 33.6 billion is their "
        f"number: in fp16 they are {whole / GB:.3g} GB, and {cut / GB:.2g} GB over 16 ranks.",
    ]


def causes(bars: list[dict]) -> list[str]:
    """What is known and unknown about the bars that disagree, those of 40B with P_a."""
    scores = [f"{shape.batch * shape.heads // shape.model_parallel * 1024**2 * 2 / GB:.2g} GB at {name}"
              for name, (shape, _) in published.FIGURE7.items()]
    buffers = " or ".join(dict.fromkeys(size_text(bar["bucket_bytes"]) for bar in bars))
    whole, cut = checkpoints_of("40B")
    return [
        "Why the paper's 40B bars with P_a (C2, C4, C5) are so much higher is not known. None of these explains it by "
        f"itself. Constant buffers, whose size the paper does not give (ours are two of {buffers}): the paper has them "
        "in C1 and C3 too, where the bars agree. Attention's matrices of scores, which were kept in 2019 and are not "
        f"in ours ({' and '.join(scores)} each): at 100B they are larger, and there the bars with P_a agree. An "
        "allocator that keeps what it once took: so does the model of it, and \"cached\" counts it.",
        f"What is known: by the formula of §6.1 P_a takes {(whole - cut) / GB:.1f} GB off the checkpoints of the 40B "
        "model, and so it does in the code; off the paper's bars it takes less than half of that. Either something is "
        "there with P_a that is neither there without it nor at 100B, or two differences cancel in C1 and C3: the bars "
        "cannot tell.",
    ]


def checkpoints_of(name: str) -> tuple[float, float]:
    """Bytes of the blocks' inputs by the formula: whole, and divided among the model-parallel ranks."""
    shape, _ = published.FIGURE7[name]
    run = (shape.layers, shape.hidden, shape.batch, 1024, "fp16")
    return formulas.checkpoints(*run), formulas.checkpoints(*run, cut=shape.model_parallel)


def distances(bars: list[dict]) -> list[str]:
    """In words: how far the bars are from the paper's."""
    notes = []
    for name in dict.fromkeys(bar["model"] for bar in bars):
        own = [bar for bar in bars if bar["model"] == name]
        off = ", ".join(f"{bar['config']} {bar['paper_cached_gb'] - bar['cached_gb']:+.1f}" for bar in own
                        if bar["paper_cached_gb"])
        notes.append(f"{name}: the paper's bars less what the code caches, GB: {off}.")
        absent = [bar for bar in own if bar["paper_cached_gb"] is None]
        if absent:
            words = [f"{bar['config']} (its largest model is {published.LARGEST[bar['config']]}; the code allocates "
                     f"{bar['allocated_gb']:.0f} GB)" for bar in absent]
            notes.append(f"{name}: the paper has no bar for {', '.join(words)}.")
        printed = {bar["config"]: bar["paper_cached_gb"] for bar in own}
        code = {bar["config"]: bar["cached_gb"] for bar in own}
        for whole, cut in (("C1", "C2"), ("C3", "C4")):
            if printed.get(whole) and printed.get(cut):
                notes.append(f"{name}, {whole} → {cut}: P_a takes {code[whole] - code[cut]:.1f} GB off what the code "
                             f"caches, and {printed[whole] - printed[cut]:.1f} GB off the paper's bar.")
    return notes
