"""Outputs: the tensors in what a module returns, however deeply they are nested."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn


def tensors_in(value, seen: set | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a module's output: the output itself, or those in tuples, lists, dicts,
    dataclasses and other plain objects. (Not in a generator: that would start it.)"""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (nn.Module, type)):
        seen.add(id(value))
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, (tuple, list, set, frozenset)):
            inner = list(value)
        elif dataclasses.is_dataclass(value):
            inner = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
        else:
            inner = list(getattr(value, "__dict__", {}).values())
            slots = {name for kind in type(value).__mro__ for name in _slots(kind)}
            inner += [getattr(value, name) for name in slots if hasattr(value, name)]
        for item in inner:
            yield from tensors_in(item, seen)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
