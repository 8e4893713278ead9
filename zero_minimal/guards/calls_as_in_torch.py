"""Calls as in torch: arguments that torch.optim and torch.nn.utils take, and a stage does not.
Those that change nothing are dropped; for the others an error says what to write instead.

Seam: wrapped.
Mistakes: zero.step(closure), zero.clip_grad_norm_(zero.model.parameters(), 1.0), …
"""

import functools
import inspect
import weakref
from collections.abc import Callable

from zero_minimal.core import seams
from zero_minimal.core.reducer import Hooks

CHANGES_NOTHING = {  # a missing gradient counts as zero: momentum still moves the parameter
    "set_to_none": (True, False), "foreach": (None, True, False), "closure": (None,),
    "norm_type": (2,), "error_if_nonfinite": (False,),
}
INSTEAD = {
    "step": "zero.step() takes no closure: call loss.backward() before it. An optimizer that needs "
            "the loss again and again, LBFGS say, is not element-wise",
    "zero_grad": "zero.zero_grad() takes nothing, and drops all gradients",
    "clip_grad_norm_": "zero.clip_grad_norm_(max_norm) knows the parameters, and clips by their "
                       "Euclidean norm. Look at what it returns: if not norm.isfinite(), raise, or "
                       "drop the batch with zero.zero_grad()",
}


@seams.at("wrapped")
def answer(stage) -> None:
    """Wrap the methods that our classes define; a learner's or a user's own stay as they are. The
    wrappers go on the stage, so its class stays unchanged."""
    for name in INSTEAD:
        method = getattr(type(stage), name, None)
        if method is not None and method.__module__.startswith("zero_minimal."):
            setattr(stage, name, answering(method, weakref.ref(stage)))


def refuse_call(stage, *_, **__):
    """Raises: TypeError, since a stage is no module, as DDP is."""
    raise TypeError("call the model, zero.model(x): a stage only follows it")


class NoGroups:
    """What a stage has as param_groups, for which torch's GradScaler asks, unless it keeps its own
    under this name. Raises: AttributeError, since a stage is no optimizer."""

    def __get__(self, stage, kind):
        raise AttributeError("a stage is no optimizer: schedulers take zero.optimizer; in the "
                             "place of torch's GradScaler take loss_scaler.LossScaler")


Hooks.__call__, Hooks.param_groups = refuse_call, NoGroups()


def answering(method: Callable, owner: weakref.ref) -> Callable:
    """The method, wrapped. It raises TypeError, with advice, for arguments it does not take."""
    takes = inspect.signature(method)

    @functools.wraps(method)
    def call(*given, **options):
        unknown = {name for name in options if name not in takes.parameters
                   and options[name] in CHANGES_NOTHING.get(name, ())}
        options = {name: options[name] for name in options.keys() - unknown}
        try:
            takes.bind(owner(), *given, **options)
        except TypeError as error:
            raise TypeError(f"{error}: {INSTEAD[method.__name__]}") from None
        return method(owner(), *given, **options)

    return call
