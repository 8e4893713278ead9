"""Layout: parameters in flat tensors, cut into buckets that travel as one, cut into shards that ranks own.

    flat       | b₂ | w₂ ······································· | b₁ | w₁ ············ | padding |
    buckets    |        0 [padded]        |        1 [padded]        |        2 [padded]          |   bucket_bytes each
    shards     | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | rank 2   |   [padded / N] each

The last parameter comes first, since backward finishes it first. Buckets and shards begin and end where they like, in
the middle of a parameter too: so ZeRO needs an element-wise optimizer, a large parameter needs no larger buffer (at
stage 3 a bucket is a whole unit), and shards are equal whatever the sizes of the parameters are.

Parameters and shards start on multiples of 16 elements, 64 bytes in fp32. Vectorised kernels then treat an element
alike in every layout; without this, some round the last few elements of a tensor differently.
"""

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.foundations import collectives

ALIGNMENT = 16  # elements


class Flat:
    """Parameters of one optimizer group, dtype and device, one after the other in a tensor [size]."""

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
        """Where the parameters are now: those of a model on the meta device come to a real one later."""
        return next(iter(self.offsets)).device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [size]. Zeros, so that the padding never holds garbage."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def view(self, tensor: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """The place of a parameter in such a tensor, in its shape."""
        return tensor[self.offsets[param] :][: param.numel()].view(param.shape)


@dataclass(eq=False)
class Bucket:
    """A stretch of a flat, [padded] elements from `start`, and the tensors that a stage keeps for it."""

    flat: Flat
    start: int
    padded: int
    world_size: int
    group_index: int  # the optimizer's parameter group; -1: not trained
    name: str = ""

    parameters: torch.Tensor | None = None  # [padded] whole; the model's parameters are views of it and its neighbours
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

    @property
    def device(self) -> torch.device:
        """Where the parameters are now."""
        return self.flat.device

    def zeros(self) -> torch.Tensor:
        """A new tensor, [padded]."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.device)

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's part of a tensor [padded]: a view, [padded / N]."""
        return tensor.view(self.world_size, -1)[rank]

    def put_gradient(self, param: nn.Parameter) -> None:
        """Copy the piece of param.grad that lies in this bucket to its place in `gradients`."""
        begin, end = self._piece(param)
        place = self.flat.offsets[param] + begin - self.start
        self.gradients[place : place + end - begin] = _dense(param.grad).reshape(-1)[begin:end]

    def zero_missing(self) -> None:
        """A parameter without a gradient in this step counts as one whose gradient is zero."""
        for param in self.params:
            if param.grad is None:
                begin, end = self._piece(param)
                self.gradients[self.flat.offsets[param] + begin - self.start :][: end - begin].zero_()

    def _piece(self, param: nn.Parameter) -> tuple[int, int]:
        """Which elements of the parameter lie here: from, to."""
        offset = self.flat.offsets[param]
        return max(0, self.start - offset), min(param.numel(), self.start + self.padded - offset)


def pack(params, groups: list[dict], world_size: int, bucket_bytes: int | None, name: str = "") -> list[Bucket]:
    """Buckets of bucket_bytes (None: as large as their flat), in the order in which backward fills them.

    Args:
        params: in the order of forward; backward finishes them the other way round.
        groups: the optimizer's groups. A parameter of no group is not trained: its bucket has group_index -1.
    Parameters of different groups, dtypes or devices lie in different flats.
    """
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: at least one byte is needed")
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    position = {param: place for place, param in enumerate(reversed(list(params)))}
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
    """Move the parameters into their flats, and free their own memory; `parameters` of each bucket is its stretch."""
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


def make_gradients(buckets: list[Bucket]) -> None:
    """Whole gradients, for the stages that keep them: `gradients` of each bucket is its stretch of a flat."""
    for flat, stretches in _by_flat(buckets):
        flat.gradients = flat.zeros()
        for bucket in stretches:
            bucket.gradients = flat.gradients[bucket.start : bucket.start + bucket.padded]


def keep_gradient(param: nn.Parameter, buckets: list[Bucket]) -> None:
    """Let param.grad be a view of the whole gradients; autograd adds those of later micro-batches in place."""
    flat = buckets[0].flat
    view = flat.view(flat.gradients, param)
    if not same_storage(param.grad, view):
        view.copy_(_dense(param.grad))
        param.grad = view


def show_missing(buckets: list[Bucket]) -> None:
    """Let param.grad of parameters without a gradient show their zeros, so that later backward passes add to them."""
    for bucket in buckets:
        for param in bucket.params:
            if param.grad is None:
                param.grad = bucket.flat.view(bucket.flat.gradients, param)


def check_place(param: nn.Parameter, parameters: torch.Tensor) -> None:
    """Raise RuntimeError if a parameter is not where its stage put it: what is updated would not be what is trained."""
    if not same_storage(param, parameters):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is not where its stage put it. It was moved or replaced "
            "after wrapping (model.to, load_state_dict(assign=True)): do that before. Or, at stage 3, it was used "
            "outside the forward of its unit, where it reads as NaN: name a module around that use in units="
        )


def parameter_groups(model: nn.Module, param_groups=None) -> list[dict]:
    """What the user asked to train, in the form that torch.optim takes: dicts with "params" and options.

    Frozen parameters are left out. Raises: TypeError if `model` is not a module; RuntimeError if there are no ranks;
    ValueError for a model that has a stage already or nothing to train, a parameter of another model, or one that
    stands in two groups.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a stage takes an nn.Module, and was given a {type(model).__name__}")
    if not dist.is_initialized():
        raise RuntimeError("there are no ranks yet: put the program under `with ranks.start():` and start it with "
                           "torchrun, or call it through ranks.run(function, world_size)")
    for param in model.parameters():
        if hasattr(param, "_zero_stage"):
            raise ValueError(f"this model belongs to a {param._zero_stage} already: wrap it once, or build a new one")
    given = list(model.parameters() if param_groups is None else param_groups)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [dict(group) for group in given]
    own, seen = set(model.parameters()), set()
    for group in groups:
        params = group["params"]
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        listed = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]  # (name, parameter) pairs
        for param in listed:
            if param not in own:
                raise ValueError("param_groups holds a parameter that the model does not have")
            if param in seen:
                raise ValueError("a parameter stands twice in param_groups")
            seen.add(param)
        group["params"] = [param for param in listed if param.requires_grad]
    if not any(group["params"] for group in groups):
        raise ValueError("the model has no parameter to train: it is empty, or all of them are frozen")
    return groups


def trained(model: nn.Module, groups: list[dict]) -> list[nn.Parameter]:
    """The parameters that are trained, in the order of the model."""
    chosen = {param for group in groups for param in group["params"]}
    return [param for param in model.parameters() if param in chosen]


def adopt(stage, model: nn.Module, buckets: list[Bucket], group=None) -> None:
    """Tie a model to its stage, and make sure that all ranks hold the same kind of model in the same buckets.

    Raises: RuntimeError on every rank if they do not.
    """
    facts = [(name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in model.named_parameters()]
    facts += [(bucket.name, bucket.group_index, bucket.start, bucket.padded, bucket.numel) for bucket in buckets]
    # not hash(): it is salted anew in every process
    digests = numbers_of_all_ranks([zlib.crc32(repr((type(stage).__name__, facts)).encode())], group)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise RuntimeError(f"the model of rank {odd[0]} differs from rank 0's in names, shapes or dtypes, or its "
                           "stage, param_groups, units or bucket_bytes do: build the same on every rank")
    for param in model.parameters():
        param._zero_stage = type(stage).__name__


def numbers_of_all_ranks(numbers: list[int], group=None) -> list[list[int]]:
    """Every rank's list of whole numbers, rank 0's first. The lists are of one length."""
    own = torch.tensor(numbers, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    everybody = own.new_empty(dist.get_world_size(group) * len(numbers))
    collectives.all_gather(everybody, own, group=group)
    return everybody.view(-1, len(numbers)).tolist()


def check_owner(model: nn.Module) -> None:
    """Raise RuntimeError if the model has a parameter that its stage does not know."""
    for name, param in model.named_parameters():
        if not hasattr(param, "_zero_stage"):
            raise RuntimeError(f"parameter {name!r} was moved or replaced after wrapping, perhaps by "
                               "load_state_dict(assign=True), so the stage does not train it: do that before")


def broadcast_rest(model: nn.Module, buckets: list[Bucket], group=None) -> None:
    """Rank 0's values for what no bucket holds: parameters that are not trained, and buffers."""
    packed = {param for bucket in buckets for param in bucket.params}
    for param in model.parameters():
        if param not in packed:
            collectives.broadcast(param.data, group=group)
    for buffer in model.buffers():
        collectives.broadcast(buffer, group=group)


def broadcast_statistics(model: nn.Module, group=None) -> None:
    """Rank 0's running statistics (batch-norm's) for all, as torch's DDP does: each rank's come from its own data.

    Masks and tables do not change, and counters change alike on every rank: neither is sent.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                collectives.broadcast(buffer, group=group)


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
