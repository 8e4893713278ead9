"""Results: what a rank sends back, in a format that runs no code: JSON, followed by the bytes of tensors.

A pickle could run any code of a submission in the process that gives the points.
"""

import dataclasses
import json
import math
import sys

import torch

MODULES = ("toys", "checks")  # whose named tuples and dataclasses may be sent
MOST = 2**28  # bytes


def encode(value) -> bytes:
    """Encode plain numbers, text, tensors and containers of them; a submission's own classes cannot leave its rank.

    Raises: TypeError for anything else.
    """
    tensors: list[torch.Tensor] = []
    tree = _tree(value, tensors)
    table = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    head = json.dumps([tree, table]).encode()
    return b"\n".join([head, b"".join(map(_bytes, tensors))])


def _tree(value, tensors: list):
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().as_subclass(torch.Tensor).clone())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", *([_tree(key, tensors), _tree(entry, tensors)] for key, entry in value.items())]
    if dataclasses.is_dataclass(value) and type(value).__module__ in MODULES:
        value, name = [getattr(value, entry.name) for entry in dataclasses.fields(value)], _name(type(value))
    elif isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields") and type(value).__module__ in MODULES
        name = _name(type(value)) if named else "list" if isinstance(value, list) else "tuple"
    else:
        raise TypeError(f"a number or a tensor was expected, and the submission gave a {type(value).__name__}")
    return [name, *(_tree(entry, tensors) for entry in value)]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def decode(data: bytes):
    """Decode. Raises: ValueError if the data are not from `encode`."""
    try:
        head, _, raw = data.partition(b"\n")
        tree, table = json.loads(head)
        tensors, start = [], 0
        for name, shape in table:
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"no tensor: {name} {shape}")
            end = start + dtype.itemsize * math.prod(shape)
            tensors.append(_tensor(raw[start:end], dtype, shape))
            start = end
        if start != len(raw):
            raise ValueError(f"{len(raw)} bytes of tensors, {start} announced")
        return _value(tree, tensors)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a rank answered with what no rank sends: {error}") from None


def _tensor(raw: bytes, dtype: torch.dtype, shape: list) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    plain = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (plain != 0 if dtype == torch.bool else plain.view(dtype)).reshape(shape)


def _value(tree, tensors: list):
    if not isinstance(tree, list):
        return tree
    name, *parts = tree
    if name == "tensor":
        return tensors[parts[0]]
    if name == "dict":
        return {_value(key, tensors): _value(entry, tensors) for key, entry in parts}
    values = [_value(part, tensors) for part in parts]
    if name in ("list", "tuple"):
        return values if name == "list" else tuple(values)
    module, _, label = name.partition(".")
    kind = getattr(sys.modules[module], label) if module in MODULES else None
    if not isinstance(kind, type) or not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        raise ValueError(f"{name} is no kind of result")
    return kind(*values)
