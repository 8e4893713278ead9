"""Optimizers that cannot update a shard, and calls of the optimizer that bypass the stage, are
refused.

Seams: optimizer_given, wrapped, update_begins.
Mistakes: Muon, LBFGS or Adafactor, which look at whole matrices; an optimizer that counts its own
steps, skips a step, asks for a group's number or for an attribute of a parameter; optimizer.step(),
add_param_group(), optimizer.state[param] and torch.distributed.checkpoint's get_state_dict(), of
which the stage would not know.
"""

import weakref
from collections import defaultdict

import torch
from torch import nn
from torch.optim import Optimizer, optimizer
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.layout import same_storage
from zero_minimal.core.optimizers import update
from zero_minimal.guards.grad_placeholder import GradPlaceholder, has_gradient
from zero_minimal.guards.same_on_all_ranks import in_numbers
from zero_minimal.guards.trained_by import called_from

TRIED_WITH = {"lr": 0.1, "capturable": False}
STEPS = 20  # of the trial: some optimizers begin like SGD, and look at whole matrices later

# (class, its options): one trial of each is enough for a process, and which attributes it asked for
_passed: dict[tuple, set[str]] = {}


class Sample(nn.Parameter):
    """A parameter of a trial. `asked` gets the names that an optimizer asks it for in vain."""

    def __getattr__(self, name: str):
        vars(self).get("asked", set()).add(name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


class NotInTurn(GradPlaceholder):
    """Stands in for the gradients of a trial's other parts while one part is updated."""

    why = ("step() must go over self.param_groups, which holds one shard at a time, and not over a "
           "list of its own")


def check_element_wise(
    optimizer_class: type[Optimizer], options: dict, group: dict | None = None
) -> set[str]:
    """Try the optimizer on two small matrices in two groups, as they are, and on parts that step
    separately: both must agree. `group`: options of a single group of parameters. Returns the names
    of the attributes that it asked its parameters for, and that no parameter has.

    Raises: TypeError for an optimizer that is not a class, or options it does not take; ValueError
        if the parts and the whole end differently, or if it counts its steps outside its state, or
        cannot step without a closure or on a flat tensor.
    """
    if not isinstance(optimizer_class, type):
        raise TypeError("give the optimizer's class and its options: "
                        "Stage2(model, torch.optim.AdamW, lr=3e-4)")
    name, group = optimizer_class.__name__, group or {}
    refusal = (f"{name} is not element-wise, so it cannot update a shard: use AdamW, Adam, SGD or "
               "another that is")
    try:
        # the user's options, as they are
        optimizer_class([group | {"params": [nn.Parameter(torch.ones(4, 8))]}], **options)
    except TypeError as error:
        raise TypeError(f"{name} does not take these options: {error}") from None
    # with tiny steps no difference would show; and a trial runs on the CPU
    options, group = (each | {name: value for name, value in TRIED_WITH.items() if name in each}
                      for each in (options, group))
    trial = (optimizer_class, repr(options), repr(group))
    if trial in _passed:
        return _passed[trial]
    asked: set[str] = set()
    for kind, gradients in _gradients().items():
        try:
            with torch.device("cpu"):  # whatever the user's default is
                whole, in_parts, counted = _tried(
                    optimizer_class, options, group, gradients, asked)
        except Exception as error:
            raise ValueError(f"{refusal} (its step() on a flat shard, without arguments, {kind}, "
                             f"raised {type(error).__name__}: {error})") from None
        if counted:
            raise ValueError(f"{name} goes by what it keeps of its steps in {counted[0]}, for all "
                             "parameters, and here its step() is called once for each bucket: let "
                             "it keep that in self.state[param], as Adam does")
        farthest = whole.nan_to_num(0, 0, 0).abs().max().item()
        if not torch.allclose(whole, in_parts, 1e-3, 1e-3 * farthest, equal_nan=True):
            raise ValueError(f"{refusal}: one that does to a flat part of a parameter what it does "
                             "to the whole, asks for no shape, norm or mean, nor for the number "
                             "of its group, and skips no step: leave zero.step() out where "
                             "zero.clip_grad_norm_() returns what is not finite. (What showed it: "
                             f"a trial {kind}.)")
    _passed[trial] = asked
    return asked


def _gradients() -> dict[str, list[torch.Tensor]]:
    """Gradients [2, 4, 8] of the trials' steps, for two matrices: by what is found with them."""
    generator = torch.Generator().manual_seed(0)
    # whatever the user's defaults are
    kind = dict(generator=generator, dtype=torch.float32, device="cpu")
    random = [torch.randn(2, 4, 8, **kind) * 10 ** (step % 3 - 1) for step in range(STEPS)]
    for gradient in random[::2]:  # what is large for one half is not for the other
        gradient[:, 2:] *= 10
    infinite = random[0].clone()
    infinite[1, 0, 0] = float("inf")
    return {
        "with random gradients": random,
        "with gradients of zero": [torch.zeros_like(infinite)] * 2,  # decay alone
        "with a gradient that is infinite": [infinite, random[1]],
    }


def _tried(
    optimizer_class: type[Optimizer], options: dict, group: dict, gradients: list[torch.Tensor],
    asked: set[str],
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """How far two matrices move, [2, 4, 8], as they are, and the second one in two halves; and
    where the optimizer keeps what was equal before both trials, and differs after them. `asked`
    gets the names of the attributes that it asked for in vain."""
    start = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    matrices = [Sample(matrix.clone()) for matrix in start]
    parts = [Sample(part.clone()) for part in start.view(-1).split([32, 16, 16])]
    for sample in (*matrices, *parts):
        sample.asked = asked
    on_matrices, on_parts = (
        optimizer_class([group | {"params": params} for params in (held[:1], held[1:])], **options)
        for held in (matrices, parts))
    begun = [_kept(each) for each in (on_matrices, on_parts)]
    waiting = [part.detach().as_subclass(NotInTurn) for part in parts]
    for gradient in gradients:
        for matrix, its_gradient in zip(matrices, gradient, strict=True):
            matrix.grad = its_gradient.clone()
        on_matrices.step()
        for number, (part, its_gradient) in enumerate(
                zip(parts, gradient.view(-1).split([32, 16, 16]), strict=True)):
            for other, placeholder in zip(parts, waiting, strict=True):
                other.grad = placeholder
            update(on_parts, on_parts.param_groups[min(number, 1)], part, its_gradient.clone())
    ended = [_kept(each) for each in (on_matrices, on_parts)]
    counted = [repr(kept) for kept in ended[0] | ended[1]
               if begun[0].get(kept) == begun[1].get(kept)
               and ended[0].get(kept) != ended[1].get(kept)]
    counted += [f"self.state[{key!r}]" for key in on_matrices.state if not isinstance(key, Sample)]
    moved = (torch.cat([param.detach().view(-1) for param in params]).view(2, 4, 8) - start
             for params in (matrices, parts))
    return *moved, counted


def _kept(optimizer: Optimizer) -> dict[str, list]:
    """The numbers and words in an optimizer's attributes, and in the options of its last group."""
    kept = vars(optimizer) | optimizer.param_groups[-1]
    return {name: [leaf for leaf in map(in_numbers, tree_leaves(value)) if leaf is not None]
            for name, value in kept.items() if name not in ("state", "param_groups", "params")}


@seams.at("optimizer_given")
def check_optimizer(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict]
) -> None:
    check_element_wise(optimizer_class, options)
    check_groups(optimizer_class, options, groups)


def check_groups(optimizer_class: type[Optimizer], options: dict, groups: list[dict]) -> None:
    """Make the optimizer with the user's groups, over a few elements of each dtype and device. It
    raises what it would raise over the shards, but here the model is still unchanged. Try each
    group's options, too: one may make the optimizer look at whole matrices."""
    samples = []
    for group in groups:
        # another rate needs no other trial: a trial uses a rate of its own
        own = {name: value for name, value in group.items() if name not in ("params", "lr")}
        asked = check_element_wise(optimizer_class, options, own)
        seen = [name for param in group["params"] for name in vars(param) if name in asked]
        if seen:
            raise ValueError(f"{optimizer_class.__name__} reads {seen[0]!r} of a parameter, and a "
                             "shard holds pieces of several parameters: let it read this in its "
                             f"group, param_groups=[{{'params': […], {seen[0]!r}: …}}, …]")
        kinds = {(torch.float32 if param.element_size() < 4 else param.dtype,
                  torch.get_default_device() if param.is_meta else param.device)
                 for param in group["params"]}
        params = [nn.Parameter(torch.zeros(16, dtype=dtype, device=device))
                  for dtype, device in sorted(kinds, key=str)]
        samples.append({**group, "params": params})
    optimizer_class(samples, **options)


@seams.at("wrapped")
def refuse_in_optimizer(stage) -> None:
    """Let the optimizer refuse what only a stage can do."""
    optimizer, drop = stage.optimizer, weakref.WeakMethod(stage.zero_grad)
    params = {id(param) for param in stage.model.parameters()}

    def guard_state(optimizer):
        optimizer.state = StateOfShards(dict, optimizer.state, params)

    guard_state(optimizer)
    optimizer.register_load_state_dict_post_hook(guard_state)  # torch puts in another one
    optimizer.register_state_dict_pre_hook(refuse_checkpoint)
    optimizer.register_load_state_dict_pre_hook(refuse_checkpoint)
    optimizer.register_step_pre_hook(refuse_checkpoint)
    optimizer.register_step_pre_hook(refuse_step)
    optimizer.register_step_pre_hook = optimizer.register_step_post_hook = refuse_hook
    optimizer.add_param_group = refuse_group
    for swap in ("eval", "train"):  # of schedule-free optimizers
        if hasattr(optimizer, swap) and not all(
                _is_seen(bucket, hasattr(stage, "units")) for bucket in stage.buckets):
            setattr(optimizer, swap, refuse_swap)
    optimizer.zero_grad = lambda set_to_none=True: drop()()
    optimizer._step_supports_amp_scaling = True  # so torch's GradScaler comes to refuse_step()


def refuse_step(optimizer, *_):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if not has_gradient(param):  # then torch leaves it alone
            param.grad = None
    if all(param.grad is None for param in params):
        raise RuntimeError("call zero.step(): zero.optimizer.step() alone sees no gradient, and "
                           "sends no parameter. (In fp16, take loss_scaler.LossScaler in the place "
                           "of torch's GradScaler)")


def refuse_group(group):
    raise RuntimeError("a group cannot be added to zero.optimizer after wrapping, since no bucket "
                       "belongs to it: name all groups in param_groups= when you wrap")


def _is_seen(bucket, gathered: bool) -> bool:
    """Whether the model has what the optimizer changes outside of step(): its master is the shard
    itself, and that is all of the bucket, or is gathered for each turn (stage 3)."""
    whole = gathered or bucket.parameter_shard.numel() == bucket.padded
    return whole and same_storage(bucket.master, bucket.parameter_shard)


def refuse_swap():
    raise RuntimeError("this optimizer's eval() and train() change weights outside of step(), and "
                       "the model would not see it, or only this rank's shard: train in fp32 at "
                       "stage 0 or 3; or keep averages.Average(zero), and evaluate under its "
                       "in_place()")


def refuse_hook(hook):
    raise RuntimeError("zero.optimizer takes no step hooks: it steps once for each bucket, on the "
                       "host under offload, and a hook would see one shard, so that norms and "
                       "counts would be wrong. Call what you need before or after zero.step()")


def refuse_checkpoint(*_):
    if called_from("torch.distributed.checkpoint.state_dict"):
        raise RuntimeError("get_state_dict() and set_state_dict() of torch.distributed.checkpoint "
                           "take shards for whole parameters: call saved_state.save(zero, folder) "
                           "and load(), or zero.state_dict()")


class StateOfShards(defaultdict):
    """optimizer.state, by masters of shards. A parameter of the model as its key is an error.
    `params`: their id()s."""

    def __init__(self, factory=dict, state=(), params=frozenset()):
        super().__init__(factory, state)
        self.params = params

    def _checked(self, key):
        if id(key) in self.params:
            raise KeyError("zero.optimizer keeps state of shards, and each of them holds pieces of "
                           "several parameters: it has none of this parameter. To begin afresh, "
                           "wrap the model anew")
        return key

    def __missing__(self, key):
        return super().__missing__(self._checked(key))

    def __contains__(self, key):
        return super().__contains__(self._checked(key))

    def __setitem__(self, key, value):
        super().__setitem__(self._checked(key), value)

    def setdefault(self, key, *default):
        return super().setdefault(self._checked(key), *default)

    def get(self, key, *default):
        return super().get(self._checked(key), *default)

    def pop(self, key, *default):
        return super().pop(self._checked(key), *default)


@seams.at("update_begins")
def refuse_hooks_of_all_optimizers(bucket) -> None:
    """Those of torch's profiler and of our ledger may run once for each bucket."""
    for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        if any(not str(getattr(hook, "__module__", "")).startswith(("torch.", "zero_minimal."))
               for hook in hooks.values()):
            raise RuntimeError("torch's global step hooks would run once for each bucket, and see "
                               "one shard: remove them, and call what you need before or after "
                               "zero.step()")
