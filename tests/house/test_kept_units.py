"""Kept units: the last ones stay whole from forward to their turn in backward, and less is sent.

That they have the bits of stage 3 is in test_late_gather.py.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import in_ranks
from torch import nn, optim

from zero_minimal.core import seams
from zero_minimal.kept_units import Kept3
from zero_minimal.meters.traffic import TrafficMeter

pytestmark = pytest.mark.thorough

BLOCKS = 5


def keeping(count):
    return functools.partial(Kept3, keep_units=count)


def there(zero):
    """Names of the units that lie whole in memory."""
    return {unit.name for unit in zero.units
            if any(bucket.parameters.untyped_storage().nbytes() for bucket in unit.buckets)}


def watched(counts):
    """Of each stage: what lies whole after the second step's forward, at each turn of its backward, after its update,
    in an evaluation's last turn and after it; and the bytes sent in the step."""
    rank, found = dist.get_rank(), []
    for count in counts:
        model = toys.build(functools.partial(toys.Transformer, BLOCKS), rank)
        zero = keeping(count)(model, optim.AdamW)
        turns = []
        for step in range(2):
            with TrafficMeter() as meter:
                loss = model(*toys.tokens(rank, step))
                after_forward = there(zero)
                def note(_, unit, zero=zero, turns=turns):
                    turns.append((unit.name, there(zero)))

                with seams.heard_by("unit_turned", note):
                    loss.backward()
                backward, turns[:] = list(turns), []
                zero.step()
            after_update = there(zero)
            zero.zero_grad()
        with torch.no_grad():
            model(*toys.tokens(rank, 0))
        size = [sum(bucket.padded * bucket.dtype.itemsize for bucket in unit.buckets) for unit in zero.units]
        found.append((after_forward, backward, after_update, there(zero), meter.sent_bytes, size))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_last_units_stay_until_their_turn_in_backward_and_are_not_sent_again(world_size):
    counts = (1, 2, 3, 5)
    for found in toys.run(watched, world_size, counts):
        usual = found[0][4]  # of stage 3, which keeps the unit that forward ends with
        for count, row in zip(counts, found, strict=True):
            after_forward, backward, after_update, after_evaluation, sent, size = row
            kept = {f"blocks.{number}" for number in range(BLOCKS - count, BLOCKS)}
            assert after_forward == {"", *kept}
            assert after_update == after_evaluation == set()
            # in its turn block k computes, the one before it comes, and all that is kept below stays
            blocks = [whole - {""} for name, whole in backward if name]
            for number, whole in zip(reversed(range(BLOCKS)), blocks, strict=True):
                below = {f"blocks.{one}" for one in range(number) if f"blocks.{one}" in kept}
                coming = {f"blocks.{number - 1}"} - {"blocks.-1"}
                assert whole == {f"blocks.{number}", *coming, *below}
            again = sum(size[1 + BLOCKS - count : BLOCKS])  # not gathered a second time
            assert usual - sent == pytest.approx(again * (world_size - 1) / world_size, abs=64)


@in_ranks(1)
def test_a_number_of_units_is_not_negative():
    for wrong in (-1, 2.5):
        with pytest.raises(ValueError, match=f"keep_units={wrong}: give their number, 0 or more"):
            Kept3(nn.Linear(3, 3), optim.SGD, keep_units=wrong)
