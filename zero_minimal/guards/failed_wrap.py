"""A wrap that fails on all ranks leaves a model that can be wrapped again. (Its values may be
rank 0's by then.)

Seam: wrap_failed.
"""

import contextlib

from zero_minimal.core import seams
from zero_minimal.core.units import gather_anew, is_released


@seams.at("wrap_failed")
def make_whole(stage) -> None:
    lost = [bucket for bucket in stage.all_buckets if any(map(is_released, bucket.params))]
    with contextlib.suppress(RuntimeError):  # other ranks may be elsewhere, or gone
        gather_anew(lost, stage.group)
