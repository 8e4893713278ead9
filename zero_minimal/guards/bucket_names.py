"""Bucket names: what messages call a bucket: "bucket 3 of model 2 in backward 1 of step 5".

Seam: buckets_planned.
"""

import weakref

import torch.distributed as dist

from zero_minimal.core import seams

_models = weakref.WeakKeyDictionary()  # process group → how many models were wrapped over it


@seams.at("buckets_planned")
def name_buckets(stage, parts: list, *_) -> None:
    """A unit's bucket gets the unit's name, any other bucket a number. The model's number tells the
    buckets of several models apart: one batch may go through two models."""
    group = stage.group or dist.group.WORLD
    _models[group] = number = _models.get(group, 0) + 1
    unit_of = {bucket: part.name for part in parts for bucket in part.buckets}
    nameless = "the root unit" if hasattr(stage, "units") else "bucket {}"
    for place, bucket in enumerate(stage.all_buckets):
        bucket.name = unit_of[bucket] or nameless.format(place)
        bucket.model = f" of model {number}" if number > 1 else ""
        bucket.moment = ""  # when in training it is sent: "backward 1 of step 3"


def in_words(sent: object) -> str:
    """What a collective sends, in words."""
    if not hasattr(sent, "moment"):
        return str(sent)
    return f"{sent.name}{sent.model}" + (f" in {sent.moment}" if sent.moment else "")
