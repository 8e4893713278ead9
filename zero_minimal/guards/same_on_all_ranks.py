"""Every rank has the same model, buckets and optimizer when a stage is made, and the same
parameters at the end of gather_parameters().

Seams: buckets_planned, parameters_edited.
Mistakes: a model that depends on the rank's number; weights that only one rank has loaded.
"""

import zlib

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core import collectives, seams


@seams.at("buckets_planned")
def compare_plans(stage, parts: list, optimizer_class: type, options: list[dict]) -> None:
    """Check that all ranks agree on names, shapes, dtypes and buckets of the model, and on the
    optimizer and its options. (Values need not agree: set_up broadcasts rank 0's.)

    Raises: RuntimeError on every rank if they do not.
    """
    model = stage.model
    facts = [(name, tuple(param.shape), param.dtype, param.requires_grad)
             for name, param in model.named_parameters()]
    facts += [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()]
    facts += [(bucket.name, bucket.group_index, bucket.start, bucket.padded, bucket.numel)
              for bucket in stage.all_buckets]
    chosen = [optimizer_class.__module__ + optimizer_class.__qualname__] + [
        sorted((name, repr(in_numbers(value))) for name, value in each.items())
        for each in options]
    # not hash(), which differs from process to process
    own = [zlib.crc32(repr(each).encode()) for each in ((type(stage).__name__, facts), chosen)]
    digests = numbers_of_all_ranks(own, stage.group)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd and digests[odd[0]][0] == digests[0][0]:
        raise RuntimeError(f"the optimizer of rank {odd[0]} differs from rank 0's in its class or "
                           "an option: give the same on every rank, or shards are updated in "
                           "different ways")
    if odd:
        raise RuntimeError(f"the model of rank {odd[0]} differs from rank 0's in names, shapes or "
                           "dtypes, or its stage, param_groups, units or bucket_bytes do: build "
                           "the same on every rank")


def in_numbers(option):
    """An optimizer's option, with tensors as numbers. None if it has another type, or if the CPU
    would have to wait for a GPU."""
    if isinstance(option, torch.Tensor):
        return option.item() if option.is_cpu and option.numel() == 1 else None
    if isinstance(option, (tuple, list)):
        parts = tuple(map(in_numbers, option))
        return None if None in parts else parts
    return option if isinstance(option, (int, float, str)) else None


@seams.at("parameters_edited")
def check_alike(model: nn.Module, group=None) -> None:
    """Raise RuntimeError, on every rank, if a rank's values of a parameter differ from rank 0's:
    only one rank has loaded weights, say."""
    names, params = zip(*model.named_parameters(), strict=True)
    sums = numbers_of_all_ranks([checksum(param) for param in params], group,
                                of="checksums at the end of gather_parameters()")
    for rank, theirs in enumerate(sums):
        odd = [names[place] for place, one in enumerate(theirs) if one != sums[0][place]]
        if odd:
            more = f" and {len(odd) - 1} more" if odd[1:] else ""
            raise RuntimeError(
                f"rank {rank} leaves gather_parameters() with other values of {odd[0]!r}{more} "
                "than rank 0: load or edit alike on every rank (gradients, too). If rank 0 alone "
                "has the values, let it send them at the end of the block, on all ranks: "
                "`for param in model.parameters(): collectives.broadcast(param.data)`"
            )


def numbers_of_all_ranks(numbers: list[int], group=None, of: str = "") -> list[list[int]]:
    """Every rank's list of whole numbers, rank 0's first. All lists have the same length. `of`
    names this collective in the error if a rank is elsewhere."""
    own = torch.tensor(numbers, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    everybody = own.new_empty(dist.get_world_size(group) * len(numbers))
    collectives.all_gather(everybody, own, group=group, of=of)
    return everybody.view(-1, len(numbers)).tolist()


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """A checksum of every bit of a tensor, continued from the checksum `before`."""
    # a clone: memory that NumPy has seen cannot be resized any more
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return zlib.crc32(whole.view(-1).view(torch.uint8).numpy(), before)
