"""Ownership: which model belongs to which stage, what of it is trained, and that all ranks hold the
same one."""

import zlib

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.foundations import collectives, values
from zero_minimal.foundations.layout import Bucket, same_storage


def parameter_groups(model: nn.Module, param_groups=None) -> list[dict]:
    """What the user asked to train, in the form that torch.optim takes: dicts with "params" and
    options.

    Frozen parameters are left out. Raises: TypeError if `model` is not a module; RuntimeError if
    there are no ranks; ValueError for a model that has a stage already or nothing to train, a
    parameter of another model, or one that stands in two groups.
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
        # (name, parameter) pairs
        listed = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
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
    """Tie a model to its stage, and make sure that all ranks hold the same kind of model in the
    same buckets.

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
    if not values.present():
        return [numbers] * dist.get_world_size(group)
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
    """Rank 0's running statistics (batch-norm's) for all, as torch's DDP does: each rank's come
    from its own data.

    Masks and tables do not change, and counters change alike on every rank: neither is sent.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                collectives.broadcast(buffer, group=group)


def check_place(param: nn.Parameter, parameters: torch.Tensor) -> None:
    """Raise RuntimeError if a parameter is not where its stage put it: what is updated would not be
    what is trained."""
    if not same_storage(param, parameters):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is not where its stage put it. It was moved or replaced "
            "after wrapping (model.to, load_state_dict(assign=True)): do that before. Or, at stage 3, it was used "
            "outside the forward of its unit, where it reads as NaN: name a module around that use in units="
        )
