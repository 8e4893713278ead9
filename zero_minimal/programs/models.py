"""Models: which one the flags of `plan` and `simulate` ask for."""

import argparse

from zero_minimal.paper.shapes import read_shape
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.model import GPTConfig


def chosen(flags: argparse.Namespace) -> GPTConfig | ForeignModel:
    """What --model names, or a GPT of the sizes asked for. Raises: ValueError, saying what is accepted."""
    if not flags.model:
        return read_shape(flags)
    if flags.params or flags.layers or flags.hidden or flags.heads or flags.vocabulary:
        raise ValueError("the sizes of --model are those of its file: give no others but --sequence and --batch")
    return ForeignModel(flags.model, flags.sequence, flags.recompute)
