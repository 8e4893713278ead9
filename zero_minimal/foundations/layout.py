"""Layout: parameters in flat tensors, cut into buckets that travel as one, cut into shards that
ranks own.

    flat       | b₂ | w₂ ······································· | b₁ | w₁ ············ | padding |
    buckets    |        0 [padded]        |        1 [padded]        |        2 [padded]          |   bucket_bytes each
    shards     | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | rank 2   |   [padded / N] each

The last parameter comes first, since backward finishes it first. Buckets and shards begin and end
where they like, in
the middle of a parameter too: so ZeRO needs an element-wise optimizer, a large parameter needs no
larger buffer (at stage 3 a bucket is a whole unit), and shards are equal whatever the sizes of the
parameters are.

Parameters and shards start on multiples of 16 elements, 64 bytes in fp32. Vectorised kernels then
treat an element alike in every layout; without this, some round the last few elements of a tensor
differently.
"""

from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 16  # elements


class Flat:
    """Parameters of one optimizer group, dtype and device, one after the other in a tensor
    [size]."""

    def __init__(self, params: list[nn.Parameter], world_size: int):
        self.offsets, end = {}, 0
        for param in params:
            self.offsets[param] = end
            end = _round_up(end + param.numel(), ALIGNMENT)
        self.size = _round_up(max(end, 1), world_size * ALIGNMENT)
        self.dtype = params[0].dtype
        self.gradients: torch.Tensor | None = None  # [size] whole, at the stages that keep them

    @property
    def device(self) -> torch.device:
        """Where the parameters are now: those of a model on the meta device come to a real one
        later."""
        return next(iter(self.offsets)).device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [size]. Zeros, so that the padding never holds garbage."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def view(self, tensor: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Where a parameter lies in such a tensor, in its shape."""
        return tensor[self.offsets[param] :][: param.numel()].view(param.shape)

    def keep_gradient(self, param: nn.Parameter) -> None:
        """Let param.grad be a view of the whole gradients; autograd adds those of later
        micro-batches in place."""
        view = self.view(self.gradients, param)
        if not same_storage(param.grad, view):
            view.copy_(_dense(param.grad))
            param.grad = view


@dataclass(eq=False)
class Bucket:
    """A stretch of a flat, [padded] elements from `start`, and the tensors that a stage keeps for
    it."""

    flat: Flat
    start: int
    padded: int
    world_size: int
    group_index: int  # the optimizer's parameter group; -1: not trained
    name: str = ""

    # [padded] whole; the model's parameters are views of it and its neighbours
    parameters: torch.Tensor | None = None
    parameter_shard: torch.Tensor | None = None  # [padded / N] the part this rank updates
    gradients: torch.Tensor | None = None  # [padded] whole
    gradient_shard: torch.Tensor | None = None  # [padded / N]
    master: nn.Parameter | None = None  # [padded / N] in fp32, what the optimizer updates

    def __post_init__(self):
        end = self.start + self.padded
        offsets = self.flat.offsets
        self.params = [p for p in offsets if offsets[p] < end and offsets[p] + p.numel() > self.start]
        self.numel = sum(p[1] - p[0] for p in map(self._piece, self.params))  # without padding
        self.trained = self.group_index >= 0
        self.dtype = self.flat.dtype
        self._nothing: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are now."""
        return self.flat.device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [padded]."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.device)

    def whole_gradients(self) -> torch.Tensor:
        """The bucket's stretch, [padded], of the flat's whole gradients, at the stages that keep
        them."""
        if self.flat.gradients is None:
            self.flat.gradients = self.flat.zeros()
        return self.flat.gradients[self.start : self.start + self.padded]

    def placeholder(self, param: nn.Parameter) -> torch.Tensor:
        """What a parameter points to while its memory is gone: one NaN, shown in the parameter's
        shape.

        Reading it is harmless and visible; reading the freed memory itself would crash the process.
        """
        if self._nothing is None:
            nothing = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
            self._nothing = torch.full((), nothing, dtype=self.dtype, device=self.device)
        return self._nothing.expand(param.shape)

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's part of a tensor [padded]: a view, [padded / N]."""
        return tensor.view(self.world_size, -1)[rank]

    def fuse_gradients(self, whole: torch.Tensor) -> None:
        """Copy .grad of the bucket's parameters, the pieces that lie here, side by side into
        `whole`, [padded]. Where there is none, `whole` stays as it is."""
        for param in self.params:
            if param.grad is not None:
                begin, end = self._piece(param)
                self._stretch(whole, param).copy_(_dense(param.grad).reshape(-1)[begin:end])

    def zero_missing(self) -> None:
        """A parameter without a gradient in this step counts as one whose gradient is zero."""
        for param in self.params:
            if param.grad is None:
                self._stretch(self.gradients, param).zero_()

    def _stretch(self, whole: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Where the parameter's piece lies in a tensor [padded] of this bucket: a view, flat."""
        begin, end = self._piece(param)
        start = self.flat.offsets[param] + begin - self.start
        return whole[start : start + end - begin]

    def _piece(self, param: nn.Parameter) -> tuple[int, int]:
        """Which elements of the parameter lie here: from, to."""
        offset = self.flat.offsets[param]
        return max(0, self.start - offset), min(param.numel(), self.start + self.padded - offset)


def pack(params, groups: list[dict], world_size: int, bucket_bytes: int | None, name: str = "") -> list[Bucket]:
    """Buckets of bucket_bytes (None: as large as their flat), in the order in which backward fills
    them.

    Args:
        params: in the order of forward; backward finishes them the other way round.
        groups: the optimizer's groups. A parameter of no group is not trained: its bucket has
            group_index -1.
    Parameters of different groups, dtypes or devices lie in different flats.
    """
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: at least one byte is needed")
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    position = {param: number for number, param in enumerate(reversed(list(params)))}
    alike: dict = {}
    for param in position:
        alike.setdefault((group_of.get(param, -1), param.dtype, param.device), []).append(param)
    buckets = []
    for (group_index, dtype, _), members in alike.items():
        flat = Flat(members, world_size)
        elements = flat.size if bucket_bytes is None else -(-bucket_bytes // dtype.itemsize)
        size = _round_up(elements, world_size * ALIGNMENT)
        for start in range(0, flat.size, size):
            buckets.append(Bucket(flat, start, min(size, flat.size - start), world_size, group_index, name))
    return sorted(buckets, key=lambda bucket: max((position[param] for param in bucket.params), default=0))


def flatten(buckets: list[Bucket]) -> None:
    """Move the parameters into their flats, and free their own memory; `parameters` of each bucket
    is its stretch."""
    for flat, stretches in _by_flat(buckets):
        whole = flat.zeros()
        for param in flat.offsets:
            if param.is_meta:
                raise ValueError("the model is on the meta device: only stage 3 can bring it into being, unit by unit")
            view = flat.view(whole, param)
            view.copy_(param.data)
            param.data = view
        for bucket in stretches:
            bucket.parameters = whole[bucket.start : bucket.start + bucket.padded]


def show_missing(buckets: list[Bucket]) -> None:
    """Let param.grad of parameters without a gradient show their zeros, so that later backward
    passes add to them."""
    for bucket in buckets:
        for param in bucket.params:
            if param.grad is None:
                param.grad = bucket.flat.view(bucket.flat.gradients, param)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """nn.Embedding(sparse=True) makes sparse ones."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _by_flat(buckets: list[Bucket]):
    flats: dict = {}
    for bucket in buckets:
        flats.setdefault(bucket.flat, []).append(bucket)
    return flats.items()


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if torch.strided is not one.layout or torch.strided is not other.layout:
        return False  # sparse tensors have no storage of their own
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
