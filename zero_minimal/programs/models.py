"""Models: the flags that `plan` and `simulate` share, and the model that they choose."""

import argparse

from zero_minimal.paper.kernels import ATTENTION
from zero_minimal.paper.quantities import count, plural
from zero_minimal.paper.shapes import VOCABULARY, usual_heads, usual_shape
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import DTYPES, Parser, output_file, picture_file, positive


def add_flags(parser: Parser, picture: str) -> None:
    """Give the parser the flags. picture: what --plot draws."""
    add = parser.add_argument
    add("--ranks", type=positive, default=64, metavar="N", help="all ranks (default: 64)")
    add("--mp", "--model-parallel", type=positive, default=1, metavar="M", dest="model_parallel",
        help="ranks that share one model (default: 1)")
    add("--dtype", default="fp16", choices=tuple(DTYPES), help="default: fp16")
    add("--accumulate", type=positive, default=1, metavar="K", help="micro-batches in a step (default: 1)")
    add("--attention", default="fused", choices=ATTENTION, help="fused: no matrix of scores is kept (default); "
        "unfused: it is; recomputed: attention alone is computed again in backward (selective recomputation)")
    add("--markdown", action="store_true", help="print one table for a design document instead")
    add("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    add("--plot", type=picture_file, metavar="FILE.png", help=f"draw {picture}")
    add = parser.add_argument_group("model: --params, or its sizes, or --model").add_argument
    add("--params", type=count, metavar="Ψ", help="parameters, such as 7.5B, with positions for 1024 tokens: a usual "
        "shape is chosen, the same for every --sequence")
    add("--layers", type=positive, help="blocks")
    add("--hidden", type=positive, help="width")
    add("--heads", type=positive, help="attention heads (default: of size 128, 64 or less, so that --mp divides them)")
    add("--vocabulary", type=positive, help=f"tokens (default: {VOCABULARY}, GPT-2's)")
    add("--model", metavar="config.json", help="a configuration of the transformers library, instead of our GPT "
        "(needs that library); its sizes are measured")
    add("--sequence", type=positive, default=1024, help="tokens in a sequence (default: 1024)")
    add("--batch", type=positive, default=1, help="sequences per rank and micro-batch (default: 1)")
    add("--recompute", action=argparse.BooleanOptionalAction, default=False, help="keep only each block's input, and "
        "recompute its inside in backward (default: no, as in training)")


def chosen(flags: argparse.Namespace) -> GPTConfig | ForeignModel:
    """The model that --model names, or a GPT of the given sizes. Raises: ValueError, saying what is accepted."""
    sizes = flags.layers or flags.hidden or flags.heads or flags.vocabulary
    if flags.model:
        if flags.params or sizes:
            raise ValueError("the sizes of --model are those of its file: give no others but --sequence and --batch")
        return ForeignModel(flags.model, flags.sequence, flags.recompute)
    shares = flags.model_parallel * getattr(flags, "sequence_parallel", 1)  # ranks that divide the heads
    if flags.params and sizes:
        raise ValueError("give --params, or --layers and --hidden, not both")
    if flags.params:
        return usual_shape(flags.params, flags.sequence, shares, flags.recompute)
    if not (flags.layers and flags.hidden):
        raise ValueError("which model? Give --params 7.5B, or --layers and --hidden")
    heads = flags.heads or usual_heads(flags.hidden, shares)
    return GPTConfig(layers=flags.layers, hidden=flags.hidden, heads=heads, sequence=flags.sequence, dropout=0.0,
                     vocabulary=flags.vocabulary or VOCABULARY, recompute=flags.recompute)


def sizes_text(model: dict) -> str:
    """"48 blocks of width 1600, 25 heads, vocabulary 50257"."""
    return (f"{plural(model['layers'], 'block')} of width {model['hidden']}, {plural(model['heads'], 'head')}, "
            f"vocabulary {model['vocabulary']}")
