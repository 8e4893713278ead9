"""Layout: parameters lie in flat tensors. Flats are cut into buckets, buckets into shards, one for
each rank. A bucket is a stretch of a flat; a parameter's part in it is a piece. The N shards
of a bucket are equal stretches of it, shard r for rank r; "whole" means all of them.

    flat     [size]        | b₂ | w₂ ····························· | b₁ | w₁ ···· | padding |
    buckets  [padded]      |         0          |         1          |         2          |
    shards   [padded / N]  |rank 0|rank 1|rank 2|rank 0|rank 1|rank 2|rank 0|rank 1|rank 2|

The last parameter comes first, since backward finishes it first. A bucket is of bucket_bytes,
rounded up to a multiple of 16·N elements (the last one of a flat may be smaller; at stage 3 a
bucket is a whole flat). Buckets and shards may begin and end in the middle of a parameter. So a
large parameter needs no larger buffer, and the shards of a bucket are of equal size; but the
optimizer must be element-wise.

Parameters, buckets and shards start on multiples of 16 elements, 64 bytes in fp32. Vectorised
kernels then treat an element alike in every layout; without this, some round the last few elements
of a tensor differently.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 16  # elements
PaddedSize = Callable[[int, int], int]


def padded_size(elements: int, world_size: int) -> int:
    """`elements`, rounded up so that a vector can be cut into world_size equal shards, each a
    multiple of ALIGNMENT."""
    shard = -(-elements // (world_size * ALIGNMENT)) * ALIGNMENT
    return world_size * shard


def shard_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's shard, [padded / N], of a vector [padded]: a view, in the same memory."""
    return whole.view(world_size, -1)[rank]


class Flat:
    """Parameters of one optimizer group, dtype and device, side by side in a tensor [size]."""

    def __init__(self, params: list[nn.Parameter], world_size: int, padded_size: PaddedSize):
        self.offsets, self._shapes, end = {}, {}, 0
        for param in params:
            self.offsets[param], self._shapes[param] = end, param.shape
            end = _round_up(end + param.numel(), ALIGNMENT)
        self.size = padded_size(max(end, 1), world_size)
        _check_padded(self.size, max(end, 1), world_size)
        self.dtype = params[0].dtype
        self.gradients: torch.Tensor | None = None  # [size] whole, at stages 0 and 1
        self._nothing: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the parameters are now: those on the meta device come to a real one later."""
        return next(iter(self.offsets)).device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [size]. Zeros, so that the padding never holds garbage."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def view(self, tensor: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """The parameter's part of a tensor [size]: a view, in the parameter's shape."""
        start, shape = self.offsets[param], self._shapes[param]
        return tensor[start : start + shape.numel()].view(shape)

    def placeholder(self, param: nn.Parameter) -> torch.Tensor:
        """What a parameter points to while its memory is freed: one NaN, in the parameter's shape.

        A parameter read at the wrong time then shows as NaN; freed memory would crash the process.
        """
        if not self._nothing:
            nothing = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
            number = torch.full((), nothing, dtype=self.dtype, device=self.device)
            self._nothing = {each: number.expand(shape) for each, shape in self._shapes.items()}
        return self._nothing[param]

    def keep_gradient(self, param: nn.Parameter) -> None:
        """Move param.grad into the whole gradients, and let it be a view of them. Autograd adds the
        gradients of later passes to it in place."""
        view = self.view(self.gradients, param)
        if not same_storage(param.grad, view):
            view.copy_(_dense(param.grad))
            param.grad = view


@dataclass(eq=False)
class Bucket:
    """A stretch of a flat, [padded] elements from `start`, and what a stage keeps for it. (At stage
    0 "shard" in the names below is all of the bucket.)"""

    flat: Flat
    start: int
    padded: int
    world_size: int
    group_index: int  # among the optimizer's groups; -1: not trained
    name: str = ""  # for messages (guards/bucket_names.py)

    parameters: torch.Tensor | None = None  # [padded] whole; the model's lie here
    parameter_shard: torch.Tensor | None = None  # [padded / N] what this rank updates
    gradients: torch.Tensor | None = None  # [padded] whole, at stages 0 and 1
    gradient_shard: torch.Tensor | None = None  # [padded / N]
    # [padded / N] what the optimizer updates: for 16-bit parameters an fp32 copy of the shard, for
    # wider ones the shard itself, in the same memory
    master: nn.Parameter | None = None
    # says that the master and its optimizer state are on a host (offloading/offloaded_state.py);
    # what stands in its place then has no memory
    away: object = None

    def __post_init__(self):
        self._pieces = {}  # parameter: which elements lie here (from, to), and where they begin
        for param, offset in self.flat.offsets.items():
            begin = max(0, self.start - offset)
            end = min(param.numel(), self.start + self.padded - offset)
            if begin < end:
                self._pieces[param] = begin, end, offset + begin - self.start
        self.params = list(self._pieces)
        self.numel = sum(end - begin for begin, end, _ in self._pieces.values())  # without padding
        self.trained = self.group_index >= 0
        self.dtype = self.flat.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are now."""
        return self.flat.device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [padded]."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.device)

    def whole_gradients(self) -> torch.Tensor:
        """The bucket's stretch, [padded], of the flat's whole gradients (stages 0 and 1)."""
        if self.flat.gradients is None:
            self.flat.gradients = self.flat.zeros()
        return self.flat.gradients[self.start : self.start + self.padded]

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's shard of a tensor [padded]: a view, [padded / N]."""
        return shard_of(tensor, rank, self.world_size)

    def fuse_gradients(self, whole: torch.Tensor) -> None:
        """Copy the pieces of .grad that lie in this bucket side by side into `whole`, [padded].
        Where a parameter has none, `whole` stays as it is."""
        for param in self.params:
            if (gradient := param.grad) is not None:
                begin, end, _ = self._pieces[param]
                self._place(whole, param).copy_(_dense(gradient).reshape(-1)[begin:end])

    def zero_missing(self) -> None:
        """Before the reduction: a parameter without a gradient counts as one whose gradient is
        zero."""
        for param in self.params:
            if param.grad is None:
                self._place(self.gradients, param).zero_()

    def show_gradients(self) -> None:
        """Let .grad of each parameter that has none be its view of the whole gradients, so that
        later passes add to them."""
        for param in self.params:
            if param.grad is None:
                param.grad = self.flat.view(self.flat.gradients, param)

    def _place(self, whole: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Where the parameter's piece lies in a tensor [padded] of this bucket: a view, flat."""
        begin, end, start = self._pieces[param]
        return whole[start : start + end - begin]


def pack(
    params: Iterable[nn.Parameter], groups: list[dict], world_size: int,
    bucket_bytes: int | None, padded_size: PaddedSize = padded_size,
) -> list[Bucket]:
    """Plan buckets of bucket_bytes (None: as large as their flat), in the order in which backward
    fills them. Parameters of different optimizer groups, dtypes or devices lie in different flats.

    Args:
        params: in the order of forward; backward finishes them the other way round.
        groups: the optimizer's. A parameter of no group is not trained: its bucket has
            group_index -1.
        padded_size: how long flats and buckets are.
    Raises: ValueError if padded_size gives too few, or not a multiple of N.
    """
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    position = {param: number for number, param in enumerate(reversed(list(params)))}
    alike: dict = {}
    for param in position:
        alike.setdefault((group_of.get(param, -1), param.dtype, param.device), []).append(param)
    buckets = []
    for (group_index, dtype, _), members in alike.items():
        flat = Flat(members, world_size, padded_size)
        elements = flat.size if bucket_bytes is None else math.ceil(bucket_bytes / dtype.itemsize)
        size = padded_size(elements, world_size)
        _check_padded(size, elements, world_size)
        for start in range(0, flat.size, size):
            padded = min(size, flat.size - start)
            buckets.append(Bucket(flat, start, padded, world_size, group_index))
    # a bucket is complete when the last of its parameters has a gradient
    return sorted(buckets, key=lambda bucket: max(map(position.get, bucket.params), default=0))


def flatten(buckets: list[Bucket]) -> None:
    """Move the parameters into their flats, which frees their own memory, and set `parameters` of
    each bucket to its stretch of that."""
    for flat in dict.fromkeys(bucket.flat for bucket in buckets):
        vector = flat.zeros()  # [size]
        for param in flat.offsets:
            view = flat.view(vector, param)
            view.copy_(param.data)
            param.data = view
        for bucket in buckets:
            if bucket.flat is flat:
                bucket.parameters = vector[bucket.start : bucket.start + bucket.padded]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself, or a dense copy: nn.Embedding(sparse=True) makes sparse ones."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if torch.strided is not one.layout or torch.strided is not other.layout:
        return False  # sparse tensors have no storage of their own
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _check_padded(size: int, elements: int, world_size: int) -> None:
    if size < elements or size % world_size:
        raise ValueError(f"padded_size({elements}, {world_size}) is {size}: it must be a multiple "
                         f"of {world_size}, and not less than {elements}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
