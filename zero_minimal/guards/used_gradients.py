"""After step() or clipping, no backward pass may add to the gradients before zero_grad(). No pass
may begin inside another one, and no gradient may come twice.

Seams: followed, gradient_arrives, gradients_dropped. grad_placeholder.py calls the rest when a pass
begins.
"""

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.outputs import tensors_in


@seams.at("followed")
def follow(reducer) -> None:
    reducer.begun = False  # a pass has begun since the last zero_grad()
    reducer.skipped = False  # the loss scaler has skipped the step of these gradients
    reducer.task = None  # autograd's number for the pass under way
    reducer.stage.model.register_forward_hook(WeakHook(watch_output, reducer))


@seams.at("gradients_dropped")
def forget(reducer) -> None:
    reducer.begun = reducer.skipped = False


def accumulated(reducer) -> bool:
    """Whether there are gradients that no step() has used."""
    return reducer.begun and not reducer.needs_zero_grad


def watch_output(reducer, module, inputs, output) -> None:
    in_func = torch._C._functorch.peek_interpreter_stack() is not None  # its passes are its own
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None and not in_func:
            tensor.grad_fn.register_prehook(WeakHook(refuse_second, reducer))


def refuse_second(reducer, *_) -> None:
    """Raises: RuntimeError if another pass has not ended."""
    if reducer.running and reducer.task != torch._C._current_graph_task_id():
        raise RuntimeError(
            "a backward pass begins while another one has not ended. If that one failed, call "
            "zero.zero_grad() first; if torch.utils.checkpoint is around the whole model, it "
            "needs use_reentrant=False"
        )


def refuse_used(reducer) -> None:
    """Raises: RuntimeError if there are gradients to which no pass may add. A model that is frozen
    for this pass, as a GAN's critic in the generator's turn, gets none."""
    params = (param for bucket in reducer.stage.buckets for param in bucket.params)
    if not any(param.requires_grad for param in params):
        return
    if reducer.needs_zero_grad:
        which = getattr(reducer.stage.buckets[0], "model", "") or " of model 1"
        raise RuntimeError(f"call zero.zero_grad() after zero.step(){which}, a "
                           f"{type(reducer.stage.model).__name__}: this backward() comes to its "
                           "parameters, and step() has used their gradients already")
    if reducer.reduced and reducer.stage.gradient_scale is not None:
        raise RuntimeError("the gradients were clipped or unscaled already, and what step() "
                           "multiplies them with, gradient_scale, does not hold for another "
                           "backward pass: call zero.clip_grad_norm_() and scaler.unscale_() "
                           "once, after the last micro-batch; or drop the gradients with "
                           "zero.zero_grad(), also after a step that the scaler has skipped")


def note_pass(reducer) -> None:
    reducer.begun, reducer.skipped = True, False
    reducer.task = torch._C._current_graph_task_id()


@seams.at("gradient_arrives")
def refuse_graph(reducer, param: nn.Parameter, buckets: list) -> None:
    """Raises: RuntimeError if its gradient has a graph, which a bucket cannot keep."""
    if param.grad is not None and param.grad.requires_grad:
        raise RuntimeError("backward(create_graph=True) leaves gradients with a graph in .grad, "
                           "and here they are copied into buckets, without it: write gradients = "
                           "torch.autograd.grad(loss, [*model.parameters()], create_graph=True), "
                           "add what you make of them to the loss, and call backward() on that")


@seams.at("gradient_arrives")
def refuse_late(reducer, param: nn.Parameter, buckets: list) -> None:
    """Raises: RuntimeError if a bucket of this parameter was handed over, or counted it already."""
    waits_for = getattr(reducer, "waits_for", None)  # an assignment may count differently
    counts = waits_for is None or all(param in waits_for.get(bucket, ()) for bucket in buckets)
    if not reducer.accumulating and not counts:
        hooks = [hook for hook in (param._post_accumulate_grad_hooks or {}).values()
                 if isinstance(hook, WeakHook) and reducer in [owner() for owner in hook.owners]]
        if len(hooks) > 1:  # an assignment's mistake
            raise RuntimeError(f"a parameter has {len(hooks)} hooks of the reducer, which counts "
                               "each gradient as often: let it have one, in however many buckets "
                               "it lies")
        raise RuntimeError(
            f"a gradient of shape {tuple(param.shape)} came after its bucket was handed over, of "
            f"parameter {getattr(param, '_zero_name', '')!r}. If it was its second one in this "
            "pass: torch.utils.checkpoint around a module used several times needs "
            "use_reentrant=False, and activation_partitioning.checkpoint cannot be around it; a "
            "torch.autograd.Function that runs a backward of its own (a reversible block) must "
            "return its parameters' gradients, by torch.autograd.grad"
        )
