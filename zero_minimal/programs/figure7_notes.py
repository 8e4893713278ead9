"""Figure 7 in words: how far the paper's bars are from the code's, and what explains the difference."""

from zero_minimal.paper import formulas, published
from zero_minimal.paper.quantities import size_text

GB = 1e9


def of(bars: list[dict]) -> list[str]:
    """The notes below the table. bars: as in programs/reproduce.py."""
    return [
        "The paper's bars are read off a chart (±0.3), and are memory cached by PyTorch's allocator: what it took from "
        "the GPU. \"Cached\" here replays the code's allocations in a model of that allocator without a limit; "
        "\"allocated\" is the sum of tensors at the peak.",
        *distances(bars),
        *causes(bars),
        _checkpoints_of_100b(),
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


def _checkpoints_of_100b() -> str:
    whole, cut = checkpoints_of("100B")
    return ("§6.1 says that P_a takes the checkpoints of the 100B model from \"33 GB\" to 2 GB. 33.6 billion is their "
            f"number: in fp16 they are {whole / GB:.3g} GB, and {cut / GB:.2g} GB over 16 ranks.")


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
