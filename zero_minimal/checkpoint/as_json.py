"""As JSON: what a program keeps besides its tensors (a scheduler's numbers, a position in the
data), as text that people can read, and that holds no code.

torch.save() writes pickle, which may hold code, and runs it when the file is read. JSON has
numbers, strings, lists, and dicts with strings as keys. Any other value becomes a dict with "!" in
it: a tuple {"!": "tuple", "items": […]}, a tensor {"!": "tensor", …}.
"""

import base64
import collections

import torch


def encoded(value, place: str = "extra"):
    """A value that json.dumps takes, for None, numbers, strings, tensors (small ones: their bytes
    become letters), dtypes, and lists, tuples, dicts and Counters of these.

    Raises: TypeError for anything else; the message says where it is, as a path from `place`.
    """
    try:
        return _encoded(value, place)
    except RecursionError:
        raise TypeError(f"{place} holds itself, or is nested too deeply to be saved") from None


def _encoded(value, place: str):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encoded(one, f"{place}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"!": "tuple", "items": _encoded(list(value), place)}
    if isinstance(value, torch.dtype):
        return {"!": "dtype", "name": name_of(value)}
    if isinstance(value, torch.Tensor):
        return {"!": "tensor", "dtype": name_of(value.dtype), "shape": list(value.shape),
                "bytes": base64.b64encode(bytes_of(value.detach().cpu())).decode()}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        kind = "Counter" if type(value) is collections.Counter else "dict"
        is_json = "!" not in value and all(isinstance(key, str) for key in value)
        if kind == "dict" and is_json:
            return {key: _encoded(one, f"{place}[{key!r}]") for key, one in value.items()}
        pairs = [[key, one] for key, one in value.items()]
        return {"!": kind, "items": _encoded(pairs, place)}
    raise TypeError(f"{place} is a {type(value).__name__}, which cannot be saved: give numbers, "
                    "words, tensors, or lists, tuples and dicts of them")


def decoded(value):
    """The value that was encoded. Raises: ValueError for what encoded() never makes."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("!")
    if kind is None:
        return {key: decoded(one) for key, one in value.items()}
    if kind == "dtype":
        return dtype_of(value["name"])
    if kind == "tensor":
        held = bytearray(base64.b64decode(value["bytes"]))
        flat = torch.frombuffer(held, dtype=torch.uint8) if held else torch.empty(0).byte()
        return flat.view(dtype_of(value["dtype"])).view(value["shape"])
    items = decoded(value["items"])
    if kind == "tuple":
        return tuple(items)
    if kind in ("dict", "Counter"):
        made = {key: one for key, one in items}
        return collections.Counter(made) if kind == "Counter" else made
    raise ValueError(f"there is no {kind!r} in this format")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes: its own memory where it is contiguous, else a copy's."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def name_of(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """ "float32" → torch.float32. Raises: ValueError for what is no dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
