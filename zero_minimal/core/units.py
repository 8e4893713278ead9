"""Units: the modules of a model that stage 3 gathers and frees as wholes.

Every element of every nn.ModuleList is a unit (the blocks of a transformer; where a list holds a
list, that one's elements), and the rest of the model is the root unit. A parameter belongs to the
innermost unit around it; one that two units share belongs to the root.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_minimal.core import collectives, seams
from zero_minimal.core.layout import Bucket
from zero_minimal.core.precision import keep_changes


@dataclass(eq=False)
class Unit:
    """A module, the parameters gathered for it, and whether they are here. It has several buckets
    if its parameters differ in optimizer group, dtype or device."""

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    parents: list["Unit"] = field(default_factory=list)  # those that enclose it: they stay with it
    buckets: list[Bucket] = field(default_factory=list)
    whole: bool = False  # its parameters can be read
    gathering: list = field(default_factory=list)  # all-gathers under way


def find_units(model: nn.Module, units: Iterable[nn.Module] | None = None) -> list[Unit]:
    """The model's units in the order of registration, the root first.

    Args: units: modules of the model to take instead of the elements of module lists.
    """
    modules = units if units is None else list(units)
    seams.tell("units_given", model, modules)
    modules = list(_elements(model)) if modules is None else modules
    names = {module: name for name, module in model.named_modules()}
    root = Unit("", model)
    found = {model: root}
    for module in sorted(set(modules), key=list(names).index):
        found.setdefault(module, Unit(names[module], module))
    for unit in found.values():
        unit.parents = [other for other in found.values()
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
    # no function that calls itself: it would keep units alive until the next garbage collection
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


def release(param: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Let the parameter point to a placeholder of its shape, since its values are freed for now."""
    restore(param, placeholder)
    param._zero_released = True
    seams.tell("parameter_released", param)


def restore(param: nn.Parameter, data: torch.Tensor) -> None:
    """Let it point to its values again."""
    seams.tell("parameter_moves", param)
    param.data, param._zero_released = data, False


@contextlib.contextmanager
def whole_parameters(buckets: list[Bucket], rank: int, group=None) -> Iterator[None]:
    """Context in which the parameters are whole, in new memory: what the caller keeps of it stays
    valid. At its end edits are carried over to this rank's shards; after an error they are not,
    since other ranks may have had no error. All ranks must enter it, and none may run backward."""
    gather_anew(buckets, group)
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
def gather_anew(buckets: list[Bucket], group=None) -> None:
    """Make the parameters whole again, in new memory, from all ranks' shards."""
    for bucket in buckets:
        whole = bucket.zeros()
        collectives.all_gather(whole, bucket.parameter_shard, group=group, of=bucket)
        for param in bucket.params:
            restore(param, bucket.flat.view(whole, param))
