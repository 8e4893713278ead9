"""Units: the modules of a model that stage 3 gathers and frees as wholes.

Every element of every nn.ModuleList is a unit (the blocks of a transformer; of a list in a list,
its elements), and the rest of the model is the root unit. A parameter belongs to the innermost unit
around it; one that two units share belongs to the root.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_minimal.foundations import collectives
from zero_minimal.foundations.layout import Bucket
from zero_minimal.foundations.precision import keep_changes
from zero_minimal.foundations.released import refuse_left_behind, restore
from zero_minimal.foundations.ties import Tie
from zero_minimal.foundations.wrappers import refuse_script


@dataclass(eq=False)
class Unit:
    """A module, the parameters gathered for it, and whether they are here. Its buckets are several
    if its parameters differ in optimizer group, dtype or device."""

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    around: list["Unit"] = field(default_factory=list)  # those that enclose it: they stay with it
    buckets: list[Bucket] = field(default_factory=list)
    whole: bool = False  # its parameters can be read
    gathering: list = field(default_factory=list)  # all-gathers under way


def find_units(model: nn.Module, units: Iterable[nn.Module] | None = None) -> list[Unit]:
    """The model's units in the order of registration, the root first.

    Args: units: modules to take instead of the elements of module lists.
    Raises: TypeError if `model` is not a module, ValueError if a unit is not a part of it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a stage takes an nn.Module, and was given a {type(model).__name__}")
    refuse_script(model)
    names = {module: name for name, module in model.named_modules()}
    modules = list(_elements(model) if units is None else units)
    strangers = [module for module in modules if module not in names]
    if strangers:
        stranger = type(strangers[0]).__name__
        raise ValueError(f"units= holds a {stranger} that is not a part of the model")
    root = Unit("", model)
    found = {model: root}
    for module in sorted(set(modules), key=list(names).index):
        found.setdefault(module, Unit(names[module], module))
    for unit in found.values():
        unit.around = [other for other in found.values()
                       if other is not unit and unit.module in other.module.modules()]
    for param, owners in _owners(found).items():
        (owners[0] if len(owners) == 1 else root).params.append(param)
    return [unit for unit in found.values() if unit.params or unit is root]


def _elements(model: nn.Module):
    """What module lists hold. A list or dict within a list has no forward, so its elements are the
    units."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList):
            yield from _callable(container)


def _callable(container: nn.Module):
    for element in container.children():
        if type(element).forward is nn.Module.forward:
            yield from _callable(element)
        else:
            yield element


def _owners(found: dict) -> dict:
    """parameter → the innermost units that hold it."""
    owners, seen, to_visit = {}, set(), [(next(iter(found)), None)]
    # no function that calls itself: it would keep the units alive until the next garbage collection
    while to_visit:
        module, unit = to_visit.pop()
        unit = found.get(module, unit)
        if (module, unit) in seen:
            continue
        seen.add((module, unit))
        for param in module.parameters(recurse=False):
            if unit not in owners.setdefault(param, []):
                owners[param].append(unit)
        to_visit += [(child, unit) for child in reversed(list(module.children()))]
    return owners


@contextlib.contextmanager
def whole_parameters(buckets: list[Bucket], rank: int, group=None) -> Iterator[None]:
    """Context in which the parameters are whole, in new memory: what the caller keeps of it stays
    valid. At its end edits are carried over to this rank's shards, but not if it ends with an
    error: one rank may have had it alone. All ranks must enter it, and none may run backward
    inside."""
    give_back(buckets, group)
    yield
    with torch.no_grad():
        for bucket in buckets:
            whole = bucket.zeros()
            for param in bucket.params:
                bucket.flat.view(whole, param).copy_(param.data)
            bucket.parameter_shard.copy_(bucket.shard(whole, rank))
            if bucket.trained:
                keep_changes(bucket)


@torch.no_grad()
def give_back(buckets: list[Bucket], group=None) -> None:
    """Make the parameters whole again, in new memory, from all ranks' shards."""
    for bucket in buckets:
        whole = bucket.zeros()
        collectives.all_gather(whole, bucket.parameter_shard, group=group, of=bucket.name)
        for param in bucket.params:
            restore(param, bucket.flat.view(whole, param))


def refuse_state_dict(stage) -> None:
    """Let state_dict() and load_state_dict() of stage.model, and of each module in it, raise an
    error that says what to do, unless stage.shown: a state dict of placeholders would be a
    checkpoint of NaN."""

    def refuse(stage, module, *_):
        if not stage.shown and any(True for _ in module.parameters()):
            raise RuntimeError("at stage 3 a rank holds shards only: put model.state_dict() or "
                               "model.load_state_dict() under `with zero.gather_parameters():`, "
                               "on all ranks; or save zero.state_dict(), this rank's part")

    tie = Tie(refuse, stage, left=refuse_left_behind)
    for module in stage.model.modules():
        module.register_state_dict_pre_hook(tie)
        module.register_load_state_dict_pre_hook(tie)


def refuse_nested_tensors(stage) -> None:
    """Let each nn.TransformerEncoder of stage.model refuse what it would answer differently here.
    In evaluation it looks at its first layer's parameters: released, they turn off a fast path that
    leaves zeros where the padding is."""

    def refuse(stage, module, args, kwargs):
        padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        plain = module.training or torch.is_grad_enabled() or stage.shown
        if padding is not None and module.use_nested_tensor and not plain:
            raise RuntimeError("at stage 3 an evaluation with src_key_padding_mask would not put "
                               "zeros where the padding is, as nested tensors do: build "
                               "nn.TransformerEncoder(…, enable_nested_tensor=False), or evaluate "
                               "under `with zero.gather_parameters():`, on all ranks")

    for module in stage.model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(Tie(refuse, stage), with_kwargs=True)
