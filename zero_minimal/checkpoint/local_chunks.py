"""Local chunks: a rank's part of the training state, as chunks of whole tensors, by parameter name.

    model/blocks.0.weight                the parameter; for a 16-bit one its fp32 master
    optimizer/exp_avg/blocks.0.weight    what the optimizer keeps for each of its elements
    buffer/norm.running_mean             a buffer

These names have no bucket, shard or padding: those only belong to this run. What an optimizer keeps
once for a shard (the number of steps) is saved for each parameter in it.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_minimal.checkpoint import as_json
from zero_minimal.checkpoint.chunks import Chunk, Place, chunks
from zero_minimal.checkpoint.sharded_state import in_no_bucket
from zero_minimal.core.layout import Bucket


@dataclass(eq=False)
class LocalChunk:
    """A chunk of a whole tensor, and where this rank has it."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    chunk: Chunk
    tensor: torch.Tensor  # [*chunk.sizes], a view: to read when saved, to fill when loaded
    bucket: Bucket | None = None  # whose update changes it


class FetchedChunk:
    """A chunk on the rank's host (offloaded_state.py), which is fetched when it is written. Used
    like a LocalChunk. `fetched`: the chunks of its bucket and kind, by here()."""

    def __init__(self, local: LocalChunk, number: int, fetched: "Fetched"):
        self.name, self.shape, self.chunk, self.bucket = (
            local.name, local.shape, local.chunk, local.bucket)
        self.number, self.fetched = number, fetched

    @property
    def tensor(self) -> torch.Tensor:
        return self.fetched.here()[self.number].tensor


class Fetched:
    """A bucket's tensor of one kind on its host, cut into chunks. `latest` are those that are here,
    two at most: chunks are written one by one, so the rank never holds more of the state."""

    def __init__(self, bucket: Bucket, name: str | None, cut: Callable, latest: deque["Fetched"]):
        self.bucket, self.name, self.cut, self.latest = bucket, name, cut, latest
        self._chunks: list[LocalChunk] | None = None

    def here(self) -> list[LocalChunk]:
        if self._chunks is None:
            if len(self.latest) == 2:
                self.latest.popleft()._chunks = None
            self._chunks = list(self.cut(self.bucket.away.fetch(self.name)))
            self.latest.append(self)
        return self._chunks


@dataclass
class Holding:
    """What is saved or loaded, and which ranks do so together.

    places: of the parameters that are cut over a model-parallel group, by name. Its ranks hold all
        others whole, and model_rank 0 saves those.
    kind: what saves it; each kind has optimizer groups of its own.
    also: second names of weights in the model of one process, with the first ones.
    """

    stage: object
    places: dict[str, Place] = field(default_factory=dict)
    group: object = None  # of ranks that save together
    data_rank: int = 0  # which data, and so which random numbers
    model_rank: int = 0
    also: dict[str, str] = field(default_factory=dict)
    kind: str = "a stage"

    def __post_init__(self):
        self.names = {param: name for name, param in self.stage.model.named_parameters()}

    def saves(self, name: str) -> bool:
        return name in self.places or self.model_rank == 0

    def shape(self, param: nn.Parameter) -> tuple[int, ...]:
        place = self.places.get(self.names[param])
        return place.shape if place else tuple(param.shape)


def holding_of(zero) -> Holding:
    """The Holding of a stage, or of a system around one, which makes its own. Raises: TypeError."""
    if hasattr(zero, "holding"):
        return zero.holding()
    if not hasattr(zero, "buckets"):
        raise TypeError("a checkpoint is a stage's: take Stage0 in place of Naive, or torch.save()")
    return Holding(zero, group=zero.group, data_rank=zero.rank)


def chunks_of_whole(
    kind: str, name: str, tensor: torch.Tensor, place: Place | None = None
) -> Iterator[LocalChunk]:
    """The chunks of a tensor that this rank has whole, or of its part of one that is cut."""
    if tensor.numel():
        tensor = tensor.detach() if tensor.ndim else tensor.detach().view(1)
        chunk = Chunk(tuple(0 for _ in tensor.shape), tuple(tensor.shape))
        yield from _placed(f"{kind}/{name}", chunk.sizes, chunk, tensor, place)


def _placed(
    name: str, shape: tuple[int, ...], chunk: Chunk, own: torch.Tensor, place: Place | None,
    bucket: Bucket | None = None,
) -> Iterator[LocalChunk]:
    """A chunk `own`, in parts if the tensor is cut over a model-parallel group."""
    if place is None:
        yield LocalChunk(name, shape, chunk, own, bucket)
    else:
        for inside, whole in place.chunks(chunk):
            yield LocalChunk(name, place.shape, whole, inside.of(own), bucket)


def parameter_of(name: str) -> str:
    """Whose chunk it is: "optimizer/exp_avg/norm.weight" → "norm.weight"."""
    return name.split("/", 2)[2] if name.startswith("optimizer/") else name.split("/", 1)[1]


def in_bucket(
    holding: Holding, bucket: Bucket, kind: str, held: torch.Tensor
) -> Iterator[LocalChunk]:
    """The chunks in `held`: a bucket, [padded], or this rank's shard of one, [padded / N]."""
    is_shard = held.numel() < bucket.padded
    start = bucket.start + (holding.stage.rank * held.numel() if is_shard else 0)  # in the flat
    for param in bucket.params:
        offset = bucket.flat.offsets[param]
        low = max(start, offset)
        high = min(start + held.numel(), offset + param.numel())
        if low < high:
            name, shape = holding.names[param], tuple(param.shape)
            stretch = held[low - start : high - start]
            for chunk in chunks(shape, low - offset, high - offset):
                own, stretch = stretch[: chunk.numel].view(chunk.sizes), stretch[chunk.numel :]
                yield from _placed(f"{kind}/{name}", shape or (1,), chunk, own,
                                   holding.places.get(name), bucket if bucket.trained else None)


def to_save(holding: Holding) -> list[LocalChunk]:
    """All that this rank writes, in the order in which step() updates it. These are views of the
    state, not copies; only buffers are copied, since a forward pass may change them."""
    stage, found, latest = holding.stage, [], deque()
    for bucket in stage.all_buckets:
        own = bucket.master.data if bucket.trained else bucket.parameter_shard
        tensors = {"model": own, **_of_elements(stage, bucket)}
        for kind, tensor in tensors.items():
            cut = functools.partial(in_bucket, holding, bucket, kind)
            if bucket.away is not None:
                name = kind.split("/")[1] if "/" in kind else None
                fetched = Fetched(bucket, name, cut, latest)
                found += [FetchedChunk(local, number, fetched)
                          for number, local in enumerate(cut(tensor))]
                continue
            if tensor.numel() == bucket.padded:  # stage 0 has all of it: each rank writes a part
                tensor = bucket.shard(tensor, stage.rank)
            found += cut(tensor)
    whole = [("model", name, values) for name, values in in_no_bucket(stage).items()]
    whole += [("buffer", name, buffer.clone()) for name, buffer in persistent_buffers(stage.model)]
    for number, (kind, name, tensor) in enumerate(whole):
        if number % stage.world_size == stage.rank:  # alike on all ranks: they take turns
            found += chunks_of_whole(kind, name, tensor, holding.places.get(name))
    return [local for local in found if holding.saves(parameter_of(local.name))]


def _of_elements(stage, bucket: Bucket) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for each element of a bucket: kind → tensor."""
    state = _state(stage, bucket)
    return {f"optimizer/{name}": value for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == bucket.master.shape}


def _state(stage, bucket: Bucket) -> dict:
    if bucket.away is not None:
        return bucket.away.state()
    return stage.optimizer.state.get(bucket.master, {}) if bucket.trained else {}


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that are a part of model.state_dict(), with their first names there."""
    first = {}
    for name, buffer in _every_persistent_buffer(model):
        first.setdefault(buffer, name)
    return [(name, buffer) for buffer, name in first.items()]


def _every_persistent_buffer(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """With all names: a buffer of two modules has two."""
    left_out = {f"{path}.{name}".lstrip(".")
                for path, module in model.named_modules(remove_duplicate=False)
                for name in module._non_persistent_buffers_set}
    named = model.named_buffers(remove_duplicate=False)
    return [(name, buffer) for name, buffer in named if name not in left_out]


# -------------------------------------------------------------------------- what no tensor can hold


def facts_of(holding: Holding) -> dict:
    """What must be the same where a state is loaded, and what is kept once for each parameter."""
    stage, groups = holding.stage, {}
    for bucket in stage.buckets:
        groups.update(dict.fromkeys(bucket.params, bucket.group_index))
    parameters = {
        # group: of the optimizer; None: not trained, or there is nothing in it
        name: described(param, shape=list(holding.shape(param)),
                        group=groups.get(param) if param.numel() else None)
        for param, name in holding.names.items()
    }
    return {
        "kind": holding.kind,
        "stage": type(stage).__name__,
        "ranks": stage.world_size,
        "parameters": parameters,
        "also": second_names(stage.model) | holding.also,
        "buffers": facts_of_buffers(stage.model),
        "extra_states": extra_states(stage.model),
        "optimizer": type(stage.optimizer).__name__,
        "groups": [options_of(group) for group in stage.optimizer.param_groups],
        "numbers": _numbers(holding),
    }


def described(tensor: torch.Tensor, **more) -> dict:
    """What the facts say of a tensor."""
    return {"shape": list(tensor.shape), "dtype": as_json.name_of(tensor.dtype)} | more


def second_names(model: nn.Module) -> dict[str, str]:
    """For parameters and buffers with two names: {the second: the first}."""
    first = {held: name for name, held in [*model.named_parameters(), *persistent_buffers(model)]}
    every = [*model.named_parameters(remove_duplicate=False), *_every_persistent_buffer(model)]
    return {name: first[held] for name, held in every if name != first[held]}


def facts_of_buffers(model: nn.Module) -> dict[str, dict]:
    return {name: described(buffer) for name, buffer in persistent_buffers(model)}


def extra_states(model: nn.Module) -> dict[str, object]:
    """What modules return from get_extra_state(), by the module's name. Rank 0's is saved."""
    given = {path: module.get_extra_state() for path, module in model.named_modules()
             if type(module).get_extra_state is not nn.Module.get_extra_state}
    return {path: as_json.encoded(value, f"get_extra_state() of {path or 'the model'}")
            for path, value in given.items()}


def options_of(group: dict) -> dict:
    """An optimizer group's options, without its parameters."""
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return as_json.encoded(own, "an option of zero.optimizer.param_groups")


def _numbers(holding: Holding) -> dict[str, dict]:
    """What the optimizer keeps once for a shard, by parameter."""
    numbers = {}
    for bucket in holding.stage.buckets:
        of_elements = _of_elements(holding.stage, bucket)
        once = {key: value for key, value in _state(holding.stage, bucket).items()
                if f"optimizer/{key}" not in of_elements}
        for key, value in once.items():
            for each in tree_leaves(value):  # of a list, too: each rank's has other numbers
                if isinstance(each, torch.Tensor) and each.numel() != 1:
                    raise ValueError(
                        f"{type(holding.stage.optimizer).__name__} keeps {key!r} of "
                        f"{list(each.shape)} for a shard of {list(bucket.master.shape)}: only "
                        "single numbers, and tensors of the shard's shape that lie directly in "
                        "self.state[param], can be saved")
        for param in bucket.params:
            numbers[holding.names[param]] = as_json.encoded(once, "zero.optimizer.state")
    return numbers
