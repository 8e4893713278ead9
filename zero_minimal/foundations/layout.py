"""Layout: parameters packed into flat buckets that divide evenly among the ranks.

    bucket      | w₁ ········ | b₁ · ‖ w₂ ················ | b₂ ‖ padding |      one flat tensor, [padded]
    shards      |      rank 0      |      rank 1      |      rank 2       |      N equal parts, [padded / N] each

A shard begins and ends where it likes, in the middle of a parameter too: so ZeRO needs an element-wise optimizer.
One reduce-scatter and one all-gather a bucket then serve all stages, even whatever the sizes of the parameters are.

Parameters start on 64-byte boundaries, as in memory of their own, and so do shards. Vectorised kernels then treat an
element alike in every bucket; without this, some round the last few elements of a tensor differently.
"""

import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.foundations import collectives

ALIGNMENT = 16  # elements


@dataclass(eq=False)
class Bucket:
    """Parameters that travel together, where each one lies, and the tensors that a stage keeps for them."""

    params: list[nn.Parameter]
    world_size: int
    group_index: int = 0  # the optimizer's parameter group
    name: str = ""

    parameters: torch.Tensor | None = None  # [padded] whole; the model's parameters are views of it
    parameter_shard: torch.Tensor | None = None  # [padded / N] the part this rank updates
    gradients: torch.Tensor | None = None  # [padded] whole
    gradient_shard: torch.Tensor | None = None  # [padded / N]
    master: nn.Parameter | None = None  # [padded / N] in fp32, what the optimizer updates
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self):
        end = 0
        for param in self.params:
            self.offsets.append(end)
            end = _round_up(end + param.numel(), ALIGNMENT)
        self.padded = _round_up(max(end, 1), self.world_size * ALIGNMENT)
        self.numel = sum(param.numel() for param in self.params)
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.trained = self.group_index >= 0
        self.index_of = {param: index for index, param in enumerate(self.params)}

    def zeros(self) -> torch.Tensor:
        """A new flat tensor, [padded]. Zeros, so that the padding never holds garbage."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.device)

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's part of a flat tensor: a view, [padded / N]."""
        return flat.view(self.world_size, -1)[rank]

    def view(self, flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """The piece of a flat tensor that belongs to `param`, in its shape."""
        index = self.index_of[param]
        return flat[self.offsets[index] :][: param.numel()].view(param.shape)

    def flatten(self) -> torch.Tensor:
        """Move the parameters into one flat tensor; each becomes a view of it, and its own memory is freed."""
        flat = self.zeros()
        for param in self.params:
            view = self.view(flat, param)
            view.copy_(param.data)
            param.data = view
        return flat

    def put_gradient(self, param: nn.Parameter) -> torch.Tensor:
        """Copy param.grad to its place in `gradients`, unless it lies there already; return that place."""
        if not same_storage(param, self.parameters):
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is not where its stage put it. It was moved or replaced "
                "after wrapping (model.to, load_state_dict(assign=True)): do that before. Or, at stage 3, it was used "
                "outside the forward of its unit, where it reads as NaN: name a module around that use in units="
            )
        gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
        view = self.view(self.gradients, param)
        if not same_storage(gradient, view):
            view.copy_(gradient)
        return view

    def zero_missing(self) -> None:
        """A parameter without a gradient in this step counts as one whose gradient is zero."""
        for param in self.params:
            if param.grad is None:
                self.view(self.gradients, param).zero_()


def pack(params, groups: list[dict], world_size: int, bucket_bytes: float, name: str = "") -> list[Bucket]:
    """Buckets of at most bucket_bytes (a larger parameter has one alone), in the order in which backward fills them.

    Args:
        params: in the order of forward; backward finishes them the other way round.
        groups: the optimizer's groups. A parameter of no group is not trained: its bucket has group_index -1.
    Parameters of different groups, dtypes or devices never share a bucket.
    """
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    position = {param: place for place, param in enumerate(reversed(list(params)))}
    filling: dict = {}
    packed: list[list] = []
    for param in position:
        key = (group_of.get(param, -1), param.dtype, param.device)
        members = filling.get(key)
        if members is None or sum(member.nbytes for member in members) + param.nbytes > bucket_bytes:
            members = filling[key] = []
            packed.append(members)
        members.append(param)
    packed.sort(key=lambda members: position[members[-1]])  # by the gradient that completes it
    return [Bucket(members, world_size, group_of.get(members[0], -1), name) for members in packed]


def parameter_groups(model: nn.Module, param_groups=None) -> list[dict]:
    """What the user asked to train, in the form that torch.optim takes: dicts with "params" and options.

    Frozen parameters are left out. Raises ValueError for an empty model, a parameter that is not the model's, or one in
    two groups.
    """
    if param_groups is None:
        param_groups = [{"params": model.parameters()}]
    groups = [dict(group) if isinstance(group, dict) else {"params": group} for group in param_groups]
    own, seen = set(model.parameters()), set()
    for group in groups:
        given = group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
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


def adopt(stage, model: nn.Module, group=None) -> None:
    """Tie a model to its stage, once, and make sure that all ranks hold the same kind of model.

    Raises: TypeError if `model` is not a module, ValueError if it or a part of it belongs to a stage already,
    RuntimeError on every rank if the ranks' models differ in names, shapes or dtypes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(stage).__name__} takes an nn.Module, and was given a {type(model).__name__}")
    if not dist.is_initialized():
        raise RuntimeError("there are no ranks yet: put the program under `with ranks.start():` and start it with "
                           "torchrun, or call it through ranks.run(function, world_size)")
    for param in model.parameters():
        owner = getattr(param, "_zero_stage", None)
        if owner:
            raise ValueError(f"this model belongs to a {owner} already: wrap a model once, or build a new one")
    facts = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    digest = torch.tensor([zlib.crc32(repr(facts).encode())], device=_device(model))
    digests = digest.new_empty(dist.get_world_size(group))
    collectives.all_gather(digests, digest, group=group)
    odd = [rank for rank, other in enumerate(digests.tolist()) if other != digests[0].item()]
    if odd:
        raise RuntimeError(f"the model of rank {odd[0]} differs from rank 0's in names, shapes or dtypes: "
                           "build the same model on every rank")
    for param in model.parameters():
        param._zero_stage = type(stage).__name__


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

    Buffers that are not floating-point or not saved (masks, tables) never change, and are not sent.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                collectives.broadcast(buffer, group=group)


def _device(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
