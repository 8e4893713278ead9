"""Optimizers that cannot update a shard, and calls of the optimizer that bypass the stage, are
refused.

Seams: optimizer_given, wrapped.
Mistakes: Muon, LBFGS or Adafactor, which look at whole matrices; an optimizer that counts its own
steps; optimizer.step() and add_param_group(), of which the stage would not know.
"""

import weakref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.optimizers import update
from zero_minimal.guards.same_on_all_ranks import in_numbers

STEPS = 32  # of the trial: some optimizers begin like SGD, and look at whole matrices later

_passed: set[tuple] = set()  # (class, its options): one trial of each is enough for a process


def check_element_wise(
    optimizer_class: type[Optimizer], options: dict, group: dict | None = None
) -> None:
    """Try the optimizer on a small matrix, whole and in two halves that step separately: both must
    agree. `group`: options of a single group of parameters.

    Raises: TypeError for an optimizer that is not a class, or options it does not take; ValueError
        if the halves and the whole end differently, or if it counts its steps outside its state, or
        cannot step without a closure or on a flat tensor.
    """
    if not isinstance(optimizer_class, type):
        raise TypeError("give the optimizer's class and its options: "
                        "Stage2(model, torch.optim.AdamW, lr=3e-4)")
    name, group = optimizer_class.__name__, group or {}
    trial = (optimizer_class, repr(options), repr(group))
    if trial in _passed:
        return
    refusal = (f"{name} is not element-wise, so it cannot update a shard: use AdamW, Adam, SGD or "
               "another that is")
    try:
        # the user's options, as they are
        optimizer_class([group | {"params": [nn.Parameter(torch.ones(4, 8))]}], **options)
    except TypeError as error:
        raise TypeError(f"{name} does not take these options: {error}") from None
    # with tiny steps no difference would show
    options, group = ({**each, "lr": 0.1} if "lr" in each else each for each in (options, group))
    try:
        moved, in_halves, counted = _tried(optimizer_class, options, group)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{refusal} (its step() on a flat shard, without arguments, raised: "
                         f"{error})") from None
    if counted:
        raise ValueError(f"{name} goes by what it keeps of its steps in {counted[0]!r}, for all "
                         "parameters, and here its step() is called once for each bucket: let "
                         "it keep that in self.state[param], as Adam does")
    if not torch.allclose(moved, in_halves, rtol=1e-3, atol=1e-3 * moved.abs().max().item()):
        raise ValueError(f"{refusal}: one that does to a flat part of a parameter what it does to "
                         "the whole, and asks for no shape, norm or mean")
    _passed.add(trial)


def _tried(
    optimizer_class: type[Optimizer], options: dict, group: dict
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """How far a matrix [4, 8] moves in STEPS steps, whole and in two halves; and the names of the
    optimizer's attributes and options that were equal before both trials, and differ after them."""
    generator = torch.Generator().manual_seed(0)
    kind = dict(generator=generator, dtype=torch.float32)  # whatever the user's default is
    start = torch.randn(4, 8, **kind)
    gradients = [torch.randn(4, 8, **kind) * 10 ** (step % 3 - 1) for step in range(STEPS)]
    for gradient in gradients[::2]:  # what is large for one half is not for the other
        gradient[2:] *= 10
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.view(-1).split(16)]
    on_whole = optimizer_class([group | {"params": [whole]}], **options)
    on_halves = optimizer_class([group | {"params": halves}], **options)
    begun = [_kept(each) for each in (on_whole, on_halves)]
    for gradient in gradients:
        whole.grad = gradient.clone()
        on_whole.step()
        for half, its_gradient in zip(halves, gradient.view(-1).split(16), strict=True):
            update(on_halves, on_halves.param_groups[0], half, its_gradient.clone())
    ended = [_kept(each) for each in (on_whole, on_halves)]
    counted = [kept for kept in ended[0] | ended[1]
               if begun[0].get(kept) == begun[1].get(kept)
               and ended[0].get(kept) != ended[1].get(kept)]
    in_halves = torch.cat([half.detach() for half in halves]).view(4, 8)
    return whole.detach() - start, in_halves - start, counted


def _kept(optimizer: Optimizer) -> dict[str, list]:
    """The numbers and words in an optimizer's attributes, and in the options of its group."""
    kept = vars(optimizer) | optimizer.param_groups[0]
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
        check_element_wise(optimizer_class, options, own)
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
    from zero_minimal.guards.grad_placeholder import has_gradient  # which listens later

    def refuse(optimizer, *_):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            if not has_gradient(param):  # then torch leaves it alone
                param.grad = None
        if all(param.grad is None for param in params):
            raise RuntimeError("call zero.step(): zero.optimizer.step() alone sees no gradient, "
                               "and sends no parameter. (In fp16, take loss_scaler.LossScaler in "
                               "the place of torch's GradScaler)")

    def refuse_group(group):
        raise RuntimeError("a group cannot be added to zero.optimizer after wrapping, since no "
                           "bucket belongs to it: name all groups in param_groups= when you wrap")

    def refuse_hook(hook):
        raise RuntimeError("zero.optimizer takes no step hooks: it steps once for each bucket, on "
                           "the host under offload, and a hook would see one shard, so that norms "
                           "and counts would be wrong. Call what you need before or after "
                           "zero.step()")

    optimizer, drop = stage.optimizer, weakref.WeakMethod(stage.zero_grad)
    optimizer.register_step_pre_hook(refuse)
    optimizer.register_step_pre_hook = optimizer.register_step_post_hook = refuse_hook
    optimizer.add_param_group = refuse_group
    optimizer.zero_grad = lambda set_to_none=True: drop()()
    optimizer._step_supports_amp_scaling = True  # so torch's GradScaler comes as far as refuse()

