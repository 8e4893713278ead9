"""Kept gradients: a program may keep the .grad of a step without a clone(), to compare it with the
next one, say. Plain PyTorch leaves it alone: zero_grad() only lets go of it.

At stages 0 and 1 .grad and reduced_gradients() lie in memory in which those of all later steps lie,
too. So where somebody holds one at zero_grad(), that memory stays theirs, and the stage takes new.

Seams: followed, gradients_dropped.
"""

import sys

from zero_minimal.core import seams
from zero_minimal.guards.views_from_outside import holders


@seams.at("followed")
def count_holders(reducer) -> None:
    stage = reducer.stage
    # a learner's stage may keep views, too, or have no own()
    ours = getattr(stage, "own", stage.step).__module__.startswith("zero_minimal.")
    flats = {bucket.flat: None for bucket in stage.buckets
             if ours and bucket.flat.gradients is not None}
    reducer.holders = {flat: held(reducer, flat) for flat in flats}


@seams.at("gradients_dropped")
def leave_to_holders(reducer) -> None:
    for param in reducer.buckets_of if reducer.holders else ():
        param.grad = None
    for flat, before in reducer.holders.items():
        if held(reducer, flat) > before:
            flat.gradients = None
            for bucket in buckets_in(reducer, flat):
                sharded = bucket.gradients is not bucket.gradient_shard
                bucket.gradients = whole = bucket.whole_gradients()
                bucket.gradient_shard = (bucket.shard(whole, reducer.stage.rank) if sharded
                                         else whole)


def held(reducer, flat) -> int:
    """How many tensors lie in the flat's gradients, and how often its buckets' are held."""
    shards = [sys.getrefcount(bucket.gradient_shard) for bucket in buckets_in(reducer, flat)]
    return holders(flat.gradients) + sum(shards)


def buckets_in(reducer, flat) -> list:
    return [bucket for bucket in reducer.stage.buckets if bucket.flat is flat]
