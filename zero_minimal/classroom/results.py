"""Results: what a rank sends back, in a format that runs no code: JSON, with the bytes of tensors in base64.

A pickle could run any code of a submission in the process that gives the points.
"""

import base64
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
    return json.dumps(_tree(value)).encode()


def _tree(value):
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().as_subclass(torch.Tensor).clone()
        raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(raw).decode()]
    if isinstance(value, dict):
        return ["dict", *([_tree(key), _tree(entry)] for key, entry in value.items())]
    if dataclasses.is_dataclass(value) and type(value).__module__ in MODULES:
        value, name = [getattr(value, entry.name) for entry in dataclasses.fields(value)], _name(type(value))
    elif isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields") and type(value).__module__ in MODULES
        name = _name(type(value)) if named else "list" if isinstance(value, list) else "tuple"
    else:
        raise TypeError(f"a number or a tensor was expected, and the submission gave a {type(value).__name__}")
    return [name, *map(_tree, value)]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def decode(data: bytes):
    """Decode. Raises: ValueError if the data are not from `encode`."""
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a rank answered with what no rank sends: {error}") from None


def _value(tree):
    if not isinstance(tree, list):
        return tree
    name, *parts = tree
    if name == "tensor":
        return _tensor(*parts)
    if name == "dict":
        return {_value(key): _value(entry) for key, entry in parts}
    values = [_value(part) for part in parts]
    if name in ("list", "tuple"):
        return values if name == "list" else tuple(values)
    module, _, label = name.partition(".")
    kind = getattr(sys.modules[module], label) if module in MODULES else None
    if not isinstance(kind, type) or not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        raise ValueError(f"{name} is no kind of result")
    return kind(*values)


def _tensor(name: str, shape: list, text: str) -> torch.Tensor:
    dtype, raw = getattr(torch, name), base64.b64decode(text)
    if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no tensor: {name} {shape}")
    if len(raw) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(raw)} bytes for a tensor: {name} {shape}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    plain = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (plain != 0 if dtype == torch.bool else plain.view(dtype)).reshape(shape)
