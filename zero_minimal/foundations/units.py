"""Units: the pieces of a model that stage 3 gathers and frees as wholes.

Every element of every nn.ModuleList is a unit (the blocks of a transformer), the rest of the model is the root unit. A
parameter belongs to the innermost unit around it; one that two units share belongs to the root.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from zero_minimal.foundations import collectives
from zero_minimal.foundations.layout import Bucket
from zero_minimal.foundations.precision import keep_changes


@dataclass(eq=False)
class Unit:
    """A module, the parameters gathered for it, and whether they are here."""

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    around: list["Unit"] = field(default_factory=list)  # the units that enclose this one, which stay while it works
    buckets: list[Bucket] = field(default_factory=list)
    whole: bool = False  # its parameters can be read
    gathering: list = field(default_factory=list)  # all-gathers under way


def find_units(model: nn.Module, units=None) -> list[Unit]:
    """The model's units in the order of registration, the root first.

    Args: units: modules to take instead of the elements of module lists.
    Raises: ValueError if one of them is not a part of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    modules = list(_elements(model) if units is None else units)
    strangers = [module for module in modules if module not in names]
    if strangers:
        raise ValueError(f"units= holds a {type(strangers[0]).__name__} that is not a part of the model")
    root = Unit("", model)
    found = {model: root}
    for module in sorted(set(modules), key=list(names).index):
        found.setdefault(module, Unit(names[module], module))
    for unit in found.values():
        unit.around = [other for other in found.values() if other is not unit and unit.module in other.module.modules()]
    for param, owners in _owners(found).items():
        (owners[0] if len(owners) == 1 else root).params.append(param)
    return [unit for unit in found.values() if unit.params or unit is root]


def _elements(model: nn.Module):
    """What module lists hold. A list within a list (or a dict) is no unit, as nobody calls it; what it holds is."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList):
            yield from _callable(container)


def _callable(container: nn.Module):
    for element in container.children():
        if isinstance(element, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable(element)
        else:
            yield element


def _owners(found: dict) -> dict:
    """parameter → the innermost units that hold it."""
    owners: dict = {}

    def visit(module, unit, seen):
        unit = found.get(module, unit)
        if (module, unit) in seen:
            return
        seen.add((module, unit))
        for param in module.parameters(recurse=False):
            if unit not in owners.setdefault(param, []):
                owners[param].append(unit)
        for child in module.children():
            visit(child, unit, seen)

    visit(next(iter(found)), None, set())
    return owners


class Turns:
    """Which unit comes after this one? Probably the one that came after it in the last pass of this kind."""

    def __init__(self):
        self._passes: dict = {"forward": [], "backward": []}
        self.begin("forward")

    def begin(self, kind: str) -> None:
        """A "forward" or "backward" pass begins."""
        self._last = self._passes[kind]
        self._now = self._passes[kind] = []

    def working(self, unit: Unit) -> bool:
        """Whether it is this unit's turn already."""
        return self._now[-1:] == [unit]

    def take(self, unit: Unit) -> Unit | None:
        """It is this unit's turn. Returns the next one, or None where the last pass does not tell."""
        place = len(self._now)
        self._now.append(unit)
        as_before = self._last[place : place + 1] == [unit]
        return self._last[place + 1] if as_before and place + 1 < len(self._last) else None


_placeholders: dict = {}


def placeholder(param: nn.Parameter) -> torch.Tensor:
    """What a released parameter points to: one NaN, shown in the parameter's shape.

    Reading it is harmless and visible; reading the freed memory itself would crash the process.
    """
    key = (param.dtype, param.device)
    if key not in _placeholders:
        _placeholders[key] = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
    return _placeholders[key].expand(param.shape)


@torch.no_grad()
def show_whole(bucket: Bucket, group=None) -> None:
    """Gather a bucket's parameters for the user, in memory of its own: what the caller keeps of it stays valid."""
    whole = bucket.zeros()
    collectives.all_gather(whole, bucket.parameter_shard, group=group)
    for param in bucket.params:
        param.data = bucket.view(whole, param)


@torch.no_grad()
def keep_shard(bucket: Bucket, rank: int) -> None:
    """Take what the user may have edited back into this rank's shard."""
    whole = bucket.zeros()
    for param in bucket.params:
        bucket.view(whole, param).copy_(param.data)
    bucket.parameter_shard.copy_(bucket.shard(whole, rank))
    if bucket.master is not None:
        keep_changes(bucket)


def refuse_state_dict(model: nn.Module, unless) -> None:
    """A state dict of placeholders would be a checkpoint of NaN: an error says what to do, unless they are whole."""

    def refuse(*_):
        if not unless():
            raise RuntimeError("at stage 3 a rank holds shards only: put model.state_dict() or model.load_state_dict() "
                               "under `with zero.gather_parameters():`, on every rank")

    model.register_state_dict_pre_hook(refuse)
    model.register_load_state_dict_pre_hook(refuse)
