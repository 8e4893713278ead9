"""Weak hooks: a model calls its stage, and does not keep it alive. A model may live longer than its
stage, and is copied and saved without it:

    del zero                 frees shards and optimizer state at once: a hook holds its stage weakly
    copy.deepcopy(model)     is a plain model: the copy of a hook does nothing
    torch.save(model, file)  the same, when it is loaded
"""

import weakref
from collections.abc import Callable

import torch


def nothing(*_) -> None:
    """What a copied hook does, or one whose stage is gone."""


# WeakHook._call, not traced by torch.compile. Made with the first hook: that imports the compiler
_outside: list[Callable] = []


class WeakHook:
    """A hook: function(*owners, *what the hook is given), as long as all owners live; then
    left(*what the hook is given). torch.compile calls it, and does not look inside."""

    def __init__(self, function: Callable = nothing, *owners, left: Callable = nothing):
        self.function, self.left = function, left
        self.owners = [weakref.ref(owner) for owner in owners]
        if not _outside:
            _outside.append(torch.compiler.disable(WeakHook._call))
            _outside[0]._torchdynamo_disable_msg = "hooks of ZeRO: compile without fullgraph=True"

    def __call__(self, *given):
        return _outside[0](self, *given)

    def _call(self, *given):
        owners = [owner() for owner in self.owners]
        if None in owners:
            return self.left(*given)
        return self.function(*owners, *given)

    def __reduce__(self):  # for copies, and for pickle
        return WeakHook, ()
