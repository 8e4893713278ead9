"""Gradients of one rank: naive.py's .grad is this rank's own until step() or clip_grad_norm_()
averages it. What changes it before that, changes it by each rank's own numbers.

Seams: naive_wrapped, naive_averages.
Mistakes: torch's clip_grad_norm_() after backward, zero.optimizer.step(), a backward pass after
step(), sparse gradients; another learning rate, another clip_grad_norm_(), or other parameters,
on one of the ranks.
"""

import zlib

import torch
import torch.distributed as dist

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards import changed_in_forward
from zero_minimal.guards.collective_fingerprint import NAIVE, UPDATED
from zero_minimal.guards.ownership import check_module
from zero_minimal.guards.training_moment import rate_of


@seams.at("naive_wrapped")
def watch(naive) -> None:
    check_module(naive.model)
    naive.arrived = {}  # parameter: its .grad as autograd left it
    for param in naive.params:
        param.register_post_accumulate_grad_hook(WeakHook(note_gradient, naive))
    naive.optimizer.register_step_pre_hook(WeakHook(refuse_step, naive))
    naive.whole, naive.steps = changed_in_forward.Frozen([*naive.model.parameters()]), 0
    naive.whole.group_index = 0
    naive.watched = changed_in_forward.ChangedInForward(naive.model, [naive.whole])
    count_step(naive)
    naive.optimizer.register_step_post_hook(WeakHook(count_step, naive))


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


def count_step(naive, *_) -> None:
    naive.steps += 1
    naive.used = {param: seen(param.grad) for param in naive.params}
    totals = [used[-1] for used in naive.used.values() if used]
    checksum = zlib.crc32(repr(totals).encode())
    naive.updated = f"{UPDATED}{checksum:08x}" if any(totals) else ""
    naive.whole.changed = naive.whole.edited = ""
    changed_in_forward.all_alike(naive.whole.params)


@seams.at("naive_averages")
def refuse_changed(naive) -> None:
    arrived, naive.arrived, naive.used = naive.arrived, {}, {}
    for param, before in arrived.items():
        if seen(param.grad) not in (before, None):  # None: dropped, as if it had not come
            raise RuntimeError(
                f"the .grad of a parameter of shape {tuple(param.shape)} was changed after "
                "backward(), before the ranks' gradients were averaged: clip with "
                "zero.clip_grad_norm_(), and change what zero.reduced_gradients() returns, alike "
                "on all ranks; or scale the loss"
            )
    say_more(naive)


def say_more(naive) -> None:
    """The first gradient tells the other ranks which step this is, the learning rate, and what else
    has changed the parameters."""
    alone = dist.get_world_size(naive.group) == 1
    for param in () if alone else naive.params[:1]:
        if param.grad is None:
            param.grad = torch.zeros_like(param)  # as average() does
        changed = naive.whole.changed or changed_in_forward.edited_by_hand(naive.whole)
        param.grad._zero_of = (f"{NAIVE}backward 1 of step {naive.steps}"
                               f"{rate_of(naive, naive.whole)}{naive.updated}{changed}")


def refuse_step(naive, *_) -> None:
    if not naive.averaged:
        raise RuntimeError("call zero.step(): zero.optimizer.step() alone would update by this "
                           "rank's own gradients. (In place of torch's GradScaler take Stage0 and "
                           "loss_scaler.LossScaler)")
    if any(seen(param.grad) != before for param, before in naive.used.items()):
        raise RuntimeError("call zero.zero_grad() after zero.step(): these gradients are new, and "
                           "were not averaged")
