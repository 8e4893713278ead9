"""torch's own optimizers on shards.

An optimizer is element-wise if what it does to an element depends on that element's value, gradient
and history alone. It may then be given any slice of the parameters: a shard. Adam, AdamW, SGD,
RMSprop and Adagrad are; LBFGS, Adafactor, Muon and LAMB are not: they look at norms, rows or whole
matrices.
"""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_minimal.core import precision, seams
from zero_minimal.core.layout import Bucket


def over_shards(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict], buckets: list[Bucket]
) -> Optimizer:
    """The user's optimizer, with the user's options and groups, over this rank's shards in place of
    the parameters."""
    shards = [{**group, "params": [b.master for b in buckets if b.group_index == index]}
              for index, group in enumerate(groups)]
    return optimizer_class(shards, **options)


def changes_parameters(update: Callable) -> Callable:
    """Decorator of a function(optimizer, bucket, …) that updates a bucket's shard. First the user's
    edits are copied into the fp32 master."""

    @functools.wraps(update)
    def told(optimizer, bucket, *args, **kwargs):
        seams.tell("update_begins", bucket)
        precision.keep_changes(bucket)
        update(optimizer, bucket, *args, **kwargs)
        seams.tell("update_ends", bucket)  # a listener tells autograd, which did not see the change

    return told


@changes_parameters
def update_shard(
    optimizer: Optimizer, bucket: Bucket, gradient_scale: precision.Scale = None
) -> None:
    """Step on one bucket's shard alone: so its parameters can be sent while the next is updated.

    16-bit gradients become fp32 for it, one bucket at a time; the fp32 master is rounded to the
    parameters' dtype. `gradient_scale` (clipping, loss scale), a number or a 0-dim tensor,
    multiplies the gradient; bucket.gradient_shard itself stays as it is.
    """
    gradient = bucket.gradient_shard.to(bucket.master.dtype)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    update(optimizer, optimizer.param_groups[bucket.group_index], bucket.master, gradient)
    if bucket.master.dtype != bucket.dtype:
        bucket.parameter_shard.copy_(bucket.master.data)


def update(optimizer: Optimizer, param_group: dict, param: nn.Parameter, gradient: Tensor) -> None:
    """optimizer.step() for one parameter of one of its groups, with this gradient.

    There is one optimizer, and step() updates all that it holds. To go bucket by bucket, it holds
    only this group, and in it only this parameter, for a moment: step hooks run each time.
    """
    groups, params = optimizer.param_groups, param_group["params"]
    optimizer.param_groups, param_group["params"] = [param_group], [param]
    param.grad = gradient
    try:
        optimizer.step()
    finally:
        param.grad = None
        optimizer.param_groups, param_group["params"] = groups, params
