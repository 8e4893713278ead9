"""Hooks of users: a hook that was registered on a parameter after wrapping
(register_post_accumulate_grad_hook) runs before the stage's own, like one from before wrapping.

Torch calls such hooks in the order of registration, and the stage's own hands the gradient over: a
later hook's change of .grad would be sent or not, by chance. A hook that sets .grad to None is
refused. At stages 1 to 3 a hook that changes .grad in a second pass is refused, too. In plain torch
it finds the sum there: at stages 2 and 3 that pass's gradient alone, and at stage 1 N times the
earlier average on the owner of a shard, and none of it on the others.

Seams: followed, backward_begins.
"""

from functools import partial

import torch

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook


@seams.at("followed")
def remember(reducer) -> None:
    hooks = {param: param._post_accumulate_grad_hooks for param in reducer.buckets_of}
    # the newest one is the reducer's (None: a learner's, which has none yet)
    reducer.own_hooks = {param: next(reversed(own)) for param, own in hooks.items() if own}
    for param in reducer.own_hooks:
        watch(reducer, hooks[param])


@seams.at("backward_begins")
def come_last(reducer) -> None:
    for param, own in reducer.own_hooks.items():
        hooks = param._post_accumulate_grad_hooks
        newest = next(reversed(hooks), own)
        if newest == own or own not in hooks:
            continue
        if not is_ours(hooks[newest]):  # our instruments only observe, after the stage
            hooks[own] = hooks.pop(own)  # not move_to_end(), which torch's C++ does not see
            watch(reducer, hooks)


def is_ours(hook) -> bool:
    return str(hook.__module__).startswith("zero_minimal.")


def watch(reducer, hooks: dict) -> None:
    """Check what each of the user's hooks does to .grad."""
    for key, hook in hooks.items():
        if not is_ours(hook):
            hooks[key] = WeakHook(partial(call, hook), reducer, left=hook)


def call(hook, reducer, param: torch.nn.Parameter) -> None:
    """Raises: RuntimeError for a change that the stage cannot handle."""
    name = getattr(param, "_zero_name", "")
    bucket, before = reducer.buckets_of[param][0], param.grad
    whole = getattr(bucket, "gradients", None)
    no_sum = reducer.passes and (whole is None or whole is not bucket.gradient_shard)
    version, values = before._version, before.clone() if no_sum else None
    if hook(param) is not None:  # the next hook would get it in the place of the parameter
        raise RuntimeError(
            f"a hook (register_post_accumulate_grad_hook) of parameter {name!r} returned "
            "something, and must return None: change param.grad in place"
        )
    if param.grad is None:
        raise RuntimeError(
            f"a hook has set .grad of parameter {name!r} to None before the stage has seen it: "
            "leave it there. zero.step() updates after backward, and zero.zero_grad() drops "
            "gradients, so an optimizer that steps in backward has no place here"
        )
    # a change through .data has no version
    if no_sum and not (
            param.grad is before and before._version == version and torch.allclose(
                before.to_dense(), values.to_dense(), rtol=0, atol=0, equal_nan=True)):
        raise RuntimeError(
            "a hook (register_post_accumulate_grad_hook) has changed .grad of parameter "
            f"{name!r} in a second backward pass before step(). It does not find the sum of both "
            "passes there, as in plain torch: call backward() once, on the sum of the losses; or "
            "change the gradient of each pass, param.register_hook(lambda gradient: …)"
        )
