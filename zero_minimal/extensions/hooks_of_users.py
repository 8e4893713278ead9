"""Hooks of users: one that was registered on a parameter after wrapping
(register_post_accumulate_grad_hook) runs before the stage's own, as one from before wrapping does.

Torch calls such hooks in the order in which they were registered, and the stage's own hands the
gradient over: what a later hook changed in .grad would travel or not, by chance.

Seams: followed, backward_begins.
"""

from zero_minimal.core import seams


@seams.at("followed")
def remember(reducer) -> None:
    hooks = {param: param._post_accumulate_grad_hooks for param in reducer.buckets_of}
    # the newest one is the reducer's (None: a learner's, which has none yet)
    reducer.own_hooks = {param: next(reversed(own)) for param, own in hooks.items() if own}


@seams.at("backward_begins")
def come_last(reducer) -> None:
    for param, own in reducer.own_hooks.items():
        hooks = param._post_accumulate_grad_hooks
        newest = next(reversed(hooks), own)
        if newest == own or own not in hooks:
            continue
        # our instruments look on, after the stage
        if not str(hooks[newest].__module__).startswith("zero_minimal."):
            hooks[own] = hooks.pop(own)  # not move_to_end(), which torch's C++ does not see
