"""Gradients of one rank: naive.py's .grad is this rank's own until step() or clip_grad_norm_()
averages it. What changes it before that, changes it by each rank's own numbers.

Seams: naive_wrapped, naive_averages.
Mistakes: torch's clip_grad_norm_() after backward, zero.optimizer.step(), a backward pass after
step(), sparse gradients.
"""

import torch

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook


@seams.at("naive_wrapped")
def watch(naive) -> None:
    naive.arrived = {}  # parameter: its .grad as autograd left it
    for param in naive.params:
        param.register_post_accumulate_grad_hook(WeakHook(note_gradient, naive))
    naive.optimizer.register_step_pre_hook(WeakHook(refuse_step, naive))


def note_gradient(naive, param: torch.nn.Parameter) -> None:
    if naive.averaged:
        raise RuntimeError("call zero.zero_grad() before the next backward(): the gradients were "
                           "averaged already")
    if param.grad.layout != torch.strided:
        raise RuntimeError(f"a gradient of shape {tuple(param.shape)} is sparse, and here ranks "
                           "average whole ones: build the nn.Embedding with sparse=False")
    naive.arrived[param] = seen(param.grad)


def seen(gradient: torch.Tensor | None) -> tuple | None:
    """What a change of it would change. On a GPU the sum is left out: the CPU would wait for it."""
    if gradient is None:
        return None
    total = repr(gradient.detach().sum().item()) if gradient.is_cpu else ""
    return id(gradient), gradient._version, total


@seams.at("naive_averages")
def refuse_changed(naive) -> None:
    arrived, naive.arrived = naive.arrived, {}
    for param, before in arrived.items():
        if seen(param.grad) not in (before, None):  # None: dropped, as if it had not come
            raise RuntimeError(
                f"the .grad of a parameter of shape {tuple(param.shape)} was changed after "
                "backward(), before the ranks' gradients were averaged: clip with "
                "zero.clip_grad_norm_(), and change what zero.reduced_gradients() returns, alike "
                "on all ranks; or scale the loss"
            )


def refuse_step(naive, *_) -> None:
    if not naive.averaged:
        raise RuntimeError("call zero.step(): zero.optimizer.step() alone would update by this "
                           "rank's own gradients. (In place of torch's GradScaler take Stage0 and "
                           "loss_scaler.LossScaler)")
