"""Plan's options: the flags of `plan` beside model, ranks and device, and what is said of them."""

import argparse

from zero_minimal.paper.kernels import ATTENTION
from zero_minimal.paper.quantities import plural, seconds_text, size_text
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import positive

NONE = {"accumulate": 1, "attention": "fused", "sequence_parallel": 1, "gradient_bytes": None,
        "replicate": 1}  # what of() gives then


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags."""
    add = parser.add_argument
    add("--accumulate", type=positive, default=1, metavar="K", help="micro-batches in a step (default: 1)")
    add("--attention", default="fused", choices=ATTENTION, help="fused: no matrix of scores is kept (default); "
        "unfused: it is; recomputed: attention alone is computed again in backward (selective recomputation)")
    add("--gradients", default="", choices=("fp32",), metavar="fp32", help="kept, added up and reduced in fp32 beside "
        "16-bit parameters, as in Megatron (default: in the dtype of the parameters)")
    add("--sequence-parallel", type=positive, default=1, metavar="S", help="of the data-parallel ranks so many share "
        "each sequence, as in DeepSpeed-Ulysses (default: 1)")
    add("--replicate", type=positive, default=1, metavar="R", help="so many groups of the data-parallel ranks each "
        "keep all states in shards, as in HSDP: give the number of nodes (default: 1)")
    add("--markdown", action="store_true", help="print one table for a design document instead")


def of(flags: argparse.Namespace) -> dict:
    """What plan() takes of them."""
    return {"accumulate": flags.accumulate, "attention": flags.attention, "sequence_parallel": flags.sequence_parallel,
            "gradient_bytes": 4 if flags.gradients else None, "replicate": flags.replicate}


def notes(told: dict) -> str:
    """Lines about those that were asked for, "" if none was."""
    lines = []
    if told["accumulate"] > 1:
        lines.append(f"A step is {told['accumulate']} micro-batches. Stages 0 and 1 reduce gradients once, since they "
                     "keep them whole; stage 2 each time, and stage 3 gathers parameters each time, too.")
    if told["attention"] != "fused" and "model" not in told:  # plan_model.py says which one was measured
        size, again = size_text(told["activations"]["scores"]), told["attention"] == "recomputed"
        lines.append(f"Attention is not fused: scores are {size} a block, "
                     + ("computed again in backward" if again or told["recompute"] else "kept in each")
                     + ", and three such matrices are there for a moment.")
    if told["gradient_bytes"] == 4 and told["dtype"] != "fp32":
        lines.append("Gradients are kept and reduced in fp32: 18 bytes a parameter instead of 16 (Megatron Core's "
                     "distributed optimizer: 6 + 12/N).")
    if told["sequence_parallel"] > 1:
        lines.append(f"{plural(told['sequence_parallel'], 'rank')} share each sequence (DeepSpeed-Ulysses, "
                     f"arXiv:2309.14509): each has {told['sequence'] // told['sequence_parallel']:,} of "
                     f"{told['sequence']:,} tokens, and of attention some heads. Model states are cut over all ranks"
                     f"{' of a group' * (told['replicate'] > 1)}.")
    if told["replicate"] > 1:
        lines.append(f"{plural(told['replicate'], 'group')} of ranks each keep all states, as in HSDP "
                     f"(arXiv:2304.11277): N in formulas is {told['shards']:,}. All is sent within a group; between "
                     "groups, once a step, an all-reduce of the gradient shard.")
    return "\n".join(map(paragraph, lines))


def sent(row: dict) -> str:
    """What a rank sends in a step: "44.3 GB", or within its group and between groups, "39.4 GB + 1.88 GB"."""
    between = row["between_bytes"]
    return size_text(row["sent_bytes"] - between) + (f" + {size_text(between)}" if between else "")


def waits(told: dict) -> str:
    """What ranks that share sequences wait for; "" if none do."""
    if told["sequence_parallel"] == 1:
        return ""
    return paragraph(f"It waits {seconds_text(told['sequence_parallel_seconds'])} for the all-to-alls of ranks that "
                     f"share a sequence: {size_text(told['sequence_parallel_bytes'])}.")
