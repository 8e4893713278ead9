"""Grad placeholder: what a parameter's .grad is once its gradient lives in shards. Reading it is an
error.

Seams: followed, backward_begins, gradients_reduced, gradients_asked, gradients_dropped.

At stages 1 to 3 no rank holds the averaged gradient of a whole parameter. If .grad were None,
torch's clip_grad_norm_ would find no gradient and clip nothing. If it were this rank's own
gradient, each rank would clip by another norm. Neither raises an error. So between a backward pass
and zero_grad(), .grad has a class of its own: a program may ask whether it is there, and for its
shape, but not for its values.
"""

import weakref

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.layout import Flat
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.ownership import name_of
from zero_minimal.guards.reads_of_freed_parameters import ALLOWED
from zero_minimal.guards.used_gradients import note_pass, refuse_used


class GradPlaceholder(torch.Tensor):
    """Stands in for the gradient of a parameter."""

    why = ("a rank holds no whole gradient after backward, only its shards of the average, so "
           ".grad cannot be read or changed. Clip with zero.clip_grad_norm_(max_norm), which "
           "returns the norm; drop a batch with zero.zero_grad(); read, or change in place and by "
           "numbers that all ranks have, what zero.reduced_gradients() returns (not with "
           "offload); or change a parameter's gradient on its way: "
           "param.register_hook(lambda gradient: …)")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError(cls.why)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"a gradient of shape {tuple(self.shape)}, handed over"


class MasterGradPlaceholder(GradPlaceholder):
    """Stands in for the gradient of a shard in zero.optimizer, which has one during its update."""

    why = ("the shards in zero.optimizer have a gradient only while zero.step() updates them. Clip "
           "with zero.clip_grad_norm_(max_norm), which returns the norm; read, or change in place, "
           "what zero.reduced_gradients() returns (not with offload); call zero.step() in place of "
           "zero.optimizer.step(). In fp16, take loss_scaler.LossScaler in the place of torch's "
           "GradScaler")


def has_gradient(param: nn.Parameter) -> bool:
    """Whether .grad holds a gradient."""
    return param.grad is not None and not isinstance(param.grad, GradPlaceholder)


class Left:
    """What the last backward pass left in .grad of a stage's parameters: what the stage put there,
    or a GradPlaceholder where it put nothing. It looks for changes by the user when gradients are
    asked for, and when the next pass begins.

    flats: the Flat of each parameter; None for an assignment's own kind of bucket.
    """

    def __init__(self, stage, flats: dict[nn.Parameter, Flat | None]):
        self.stage, self._flats = stage, flats
        self._grads: dict[nn.Parameter, torch.Tensor] = {}
        self._stand_ins: dict[nn.Parameter, GradPlaceholder] = {}  # made once
        self._aside = False  # whether .grad is None during a forward
        # the model may outlive the stage, and must not keep placeholders
        weakref.finalize(self, _take_away, self._grads).atexit = False

    def leave(self) -> None:
        """The pass is over, and the stage has set .grad: put placeholders where it is None."""
        for param, flat in self._flats.items():
            if flat is not None and param.grad is None:
                if param not in self._stand_ins:
                    self._stand_ins[param] = flat.placeholder(param).as_subclass(GradPlaceholder)
                param.grad = self._grads[param] = self._stand_ins[param]
            elif flat is not None and param.grad is not None and flat.gradients is not None:
                self._grads[param] = param.grad
        for bucket in self.stage.buckets:
            if bucket.master.grad is None:
                nothing = bucket.master.detach().new_zeros(()).expand(bucket.master.shape)
                bucket.master.grad = nothing.as_subclass(MasterGradPlaceholder)

    def look(self) -> None:
        """Check what .grad is now. If all are None, the user called model.zero_grad(), and means
        zero.zero_grad(). Raises: RuntimeError if one was replaced."""
        self.come_back()
        if self._grads and all(param.grad is None for param in self._grads):
            self.stage.zero_grad()
            self._grads.clear()
        away = getattr(self.stage.buckets[0], "away", None) is not None  # offloaded
        in_hand = "" if away else "change them in place, in zero.reduced_gradients(); "
        for param, left in self._grads.items():
            if param.grad is not left:
                raise RuntimeError(
                    f"the gradient of {name_of(param)} was replaced after backward, and "
                    "the one that is reduced is elsewhere. Drop all gradients with "
                    f"zero.zero_grad(); {in_hand}or change one on its way: "
                    "param.register_hook(lambda gradient: …)"
                )

    def before_forward(self, *_) -> None:
        """Put placeholders aside: torch.compile reads .grad of every parameter that it meets."""
        self.look()
        for param in self._grads:
            if not has_gradient(param):
                param.grad, self._aside = None, True

    def come_back(self) -> None:
        """Put them back after that forward."""
        if self._aside:
            for param, left in self._grads.items():
                param.grad = left
            self._aside = False

    def take_away(self) -> None:
        """The next pass begins, and adds to gradients that are there; or zero_grad(): remove
        placeholders."""
        _take_away(self._grads)
        self._grads.clear()
        self._aside = False


def _take_away(grads: dict[nn.Parameter, torch.Tensor]) -> None:
    for param in grads:
        if not has_gradient(param):
            param.grad = None


@seams.at("followed")
def follow(reducer) -> None:
    flats = {param: buckets[0].flat for param, buckets in reducer.buckets_of.items()}
    reducer.left = left = Left(reducer.stage, flats)
    reducer.stage.model.register_forward_pre_hook(WeakHook(Left.before_forward, left))
    reducer.stage.model.register_forward_hook(WeakHook(lambda left, *_: left.come_back(), left))


@seams.at("backward_begins")
def next_pass(reducer) -> None:
    reducer.left.look()
    refuse_used(reducer)
    note_pass(reducer)
    reducer.left.take_away()


@seams.at("gradients_asked")
def look(reducer) -> None:
    reducer.left.look()


@seams.at("gradients_reduced")
def leave(reducer) -> None:
    reducer.left.leave()


@seams.at("gradients_dropped")
def take_away(reducer) -> None:
    reducer.left.take_away()
