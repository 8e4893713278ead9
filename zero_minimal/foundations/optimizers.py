"""torch's own optimizers on shards.

An optimizer is element-wise if what it does to an element depends on that element's value, gradient
and history alone. It may then be given any slice of the parameters: a shard. Adam, AdamW, SGD,
RMSprop and Adagrad are; LBFGS, Adafactor, Muon and LAMB are not: they look at norms, rows or whole
matrices.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_minimal.foundations import precision, values
from zero_minimal.foundations.layout import Bucket, wait_until_left

STEPS = 32  # of the trial: some optimizers begin like SGD, and look at whole matrices later


def check_element_wise(
    optimizer_class: type[Optimizer], options: dict, group: dict | None = None
) -> None:
    """Try the optimizer on a small matrix, whole and in two halves that step by themselves: both
    must agree. `group`: options of a single group of parameters.

    Raises: TypeError for an optimizer that is not a class, or options it does not take; ValueError
        if the halves go another way than the whole, or if it cannot step without a closure or on a
        flat tensor.
    """
    if not values.present():
        return
    if not isinstance(optimizer_class, type):
        raise TypeError("give the optimizer's class and its options: "
                        "Stage2(model, torch.optim.AdamW, lr=3e-4)")
    name, group = optimizer_class.__name__, group or {}
    refusal = (f"{name} is not element-wise, so it cannot update a shard: use AdamW, Adam, SGD or "
               "another that is")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 8, generator=generator)
    gradients = [torch.randn(4, 8, generator=generator) * 10 ** (step % 3 - 1)
                 for step in range(STEPS)]
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.view(-1).split(16)]
    try:
        # the user's options, as they are
        optimizer_class([group | {"params": [nn.Parameter(start.clone())]}], **options)
    except TypeError as error:
        raise TypeError(f"{name} does not take these options: {error}") from None
    # tiny steps would hide it
    visible, group = ({**each, "lr": 0.1} if "lr" in each else each for each in (options, group))
    try:
        on_whole = optimizer_class([group | {"params": [whole]}], **visible)
        on_halves = optimizer_class([group | {"params": halves}], **visible)
        for gradient in gradients:
            whole.grad = gradient.clone()
            on_whole.step()
            for half, its_gradient in zip(halves, gradient.view(-1).split(16), strict=True):
                update(on_halves, on_halves.param_groups[0], half, its_gradient.clone())
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{refusal} ({error})") from None
    moved = whole.detach() - start
    in_halves = torch.cat([half.detach() for half in halves]).view(4, 8) - start
    if not torch.allclose(moved, in_halves, rtol=1e-3, atol=1e-3 * moved.abs().max().item()):
        raise ValueError(refusal)


def check_groups(optimizer_class: type[Optimizer], options: dict, groups: list[dict]) -> None:
    """Make the optimizer with the user's groups, over a few elements of each dtype and device. It
    raises what it will raise over the shards, but now the model is still as it was. Try the options
    of each group, too: one of them may make it look at whole matrices."""
    if not values.present():
        return
    samples, tried = [], {repr({"lr": 0})}
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        if (kind := repr({**own, "lr": 0})) not in tried:
            check_element_wise(optimizer_class, options, own)
            tried.add(kind)
        kinds = {(torch.float32 if param.element_size() < 4 else param.dtype,
                  torch.get_default_device() if param.is_meta else param.device)
                 for param in group["params"]}
        params = [nn.Parameter(torch.zeros(16, dtype=dtype, device=device))
                  for dtype, device in sorted(kinds, key=str)]
        samples.append({**group, "params": params})
    optimizer_class(samples, **options)


def over_shards(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict], buckets: list[Bucket]
) -> Optimizer:
    """The user's optimizer, with the user's options and groups, in which this rank's shards stand
    in the place of the parameters."""
    shards = [{**group, "params": [b.master for b in buckets if b.group_index == index]}
              for index, group in enumerate(groups)]
    return optimizer_class(shards, **options)


def on_shards(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict], buckets: list[Bucket],
    over_shards: Callable = over_shards,
) -> Optimizer:
    """What over_shards() makes. It refuses what only a stage can do. The user's step hooks run once
    for each bucket."""
    optimizer = over_shards(optimizer_class, options, groups, buckets)

    def refuse(optimizer, *_):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if all(param.grad is None for param in params):
            raise RuntimeError("call zero.step(): zero.optimizer.step() alone sees no gradient, "
                               "and sends no parameter. (In fp16, take precision.LossScaler in "
                               "the place of torch's GradScaler)")

    def refuse_group(group):
        raise RuntimeError("a group cannot be added to zero.optimizer after wrapping, since no "
                           "bucket belongs to it: name all groups in param_groups= when you wrap")

    optimizer.register_step_pre_hook(refuse)
    optimizer.add_param_group = refuse_group
    optimizer._zero_given = [_simple(group) for group in optimizer.param_groups]
    optimizer._step_supports_amp_scaling = True  # so torch's GradScaler comes as far as refuse()
    return optimizer


def rate_of(stage, bucket) -> str:
    """In words, with which learning rate a bucket will be updated, and with which other options, if
    they were changed after wrapping. Nothing of tensors: to read one may take a wait for a GPU."""
    group = stage.optimizer.param_groups[bucket.group_index]
    rate, given = group.get("lr"), getattr(stage.optimizer, "_zero_given", ())
    words = [f"lr {rate}"] if isinstance(rate, (int, float)) else []
    if given:  # none in an assignment
        words += [f"{name}={value!r}".replace(" ", "") for name, value in _simple(group).items()
                  if given[bucket.group_index].get(name, value) != value]
    return f" with {' '.join(words)}" if words else ""


def _simple(group: dict) -> dict:
    def of_tensors(value):
        return isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value)

    return {name: value for name, value in group.items()
            if name != "lr" and isinstance(value, (int, float, tuple, str))
            and not of_tensors(value)}


def tell_autograd(bucket: Bucket) -> None:
    """The parameters have changed where autograd does not see it. A backward pass through an older
    graph is an error now, as in plain torch; and autocast must not go on with copies that it has
    kept."""
    for param in bucket.params:
        torch.autograd.graph.increment_version(param)
        if hasattr(param, "_zero_edits"):  # this is none (changed_in_forward.py)
            param._zero_edits += 1
    torch.clear_autocast_cache()


def changes_parameters(update: Callable) -> Callable:
    """Decorator of a function(optimizer, bucket, …) that updates a bucket's shard. Before, what a
    user edited in the model goes into the fp32 master, and a checkpoint that is being written gets
    the bucket as it was; afterwards autograd is told."""

    @functools.wraps(update)
    def told(optimizer, bucket, *args, **kwargs):
        wait_until_left(bucket)
        precision.keep_changes(bucket)
        update(optimizer, bucket, *args, **kwargs)
        tell_autograd(bucket)

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
    for the moment this group alone, and in it this parameter: the user's step hooks run each time.
    """
    groups, params = optimizer.param_groups, param_group["params"]
    optimizer.param_groups, param_group["params"] = [param_group], [param]
    param.grad = gradient
    try:
        optimizer.step()
    finally:
        param.grad = None
        optimizer.param_groups, param_group["params"] = groups, params
