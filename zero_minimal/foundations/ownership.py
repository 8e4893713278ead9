"""Ownership: a model belongs to one stage, and all ranks hold the same one.

Here are the checks that it is so, and what keeps equal on all ranks whatever no bucket holds. (In
this file `groups` and `param_groups` are the optimizer's, a single `group` argument is of ranks.)
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from zero_minimal.foundations import collectives, values
from zero_minimal.foundations.changed_in_forward import all_alike
from zero_minimal.foundations.layout import Bucket, same_storage
from zero_minimal.foundations.released import Released
from zero_minimal.foundations.ties import LEFT_BEHIND, Mark, trained_by
from zero_minimal.foundations.wrappers import refuse_wrapped


def parameter_groups(model: nn.Module, param_groups: Iterable | None = None) -> list[dict]:
    """What the user asked to train, as torch.optim takes it: dicts with "params" and options.
    Frozen parameters are left out.

    Raises: TypeError if `model` is not a module; RuntimeError if there are no ranks; ValueError for
        a model that has a stage already or nothing to train, two parameters over the same memory,
        a parameter of another model, or one that stands in two groups.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a stage takes an nn.Module, and was given a {type(model).__name__}")
    if not dist.is_initialized():
        raise RuntimeError("there are no ranks yet: put the program under `with ranks.start():` "
                           "and start it with torchrun, or call it through "
                           "ranks.run(function, world_size)")
    refuse_wrapped(model)
    for name, param in model.named_parameters():
        if (stage := trained_by(param)) is not None:
            raise ValueError(f"this model belongs to a {type(stage).__name__} already: wrap it "
                             "once, or build a new one (`del zero` gives it back at stages 0 to 2)")
        if isinstance(param, Released):
            raise ValueError(f"parameter {name!r} is released: {LEFT_BEHIND}")
        _refuse_odd("parameter", name, param)
    for name, buffer in model.named_buffers():
        _refuse_odd("buffer", name, buffer)
    _refuse_shared_memory(model)
    given = list(model.parameters() if param_groups is None else param_groups)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [dict(group) for group in given]
    own, seen = set(model.parameters()), set()
    for group in groups:
        params = group["params"]
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        # torch.optim takes (name, parameter) pairs too
        listed = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
        for param in listed:
            if param not in own:
                raise ValueError("param_groups holds a parameter that the model does not have")
            if param in seen:
                raise ValueError("a parameter stands twice in param_groups")
            seen.add(param)
        group["params"] = [param for param in listed if param.requires_grad]
    if not any(group["params"] for group in groups):
        raise ValueError("the model has no parameter to train: it is empty, or all of them are "
                         "frozen")
    return groups


def _refuse_odd(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for what cannot lie in a flat tensor or travel."""
    if is_lazy(tensor):
        raise ValueError(f"{kind} {name!r} has no shape yet: run a batch through the model, then "
                         "wrap it")
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} {name!r} is sparse, and ranks exchange dense tensors: make it "
                         "dense, or let it be no part of the model")
    if tensor.is_inference():
        raise ValueError(f"{kind} {name!r} was made under torch.inference_mode(), and cannot be "
                         "changed any more: build the model outside of it")


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise ValueError if a parameter that is trained lies in the same memory as another tensor of
    the model: each would get memory of its own, and from then on other values."""
    named = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    known = {tensor for _, _, tensor in named}
    named += [("attribute", f"{prefix}.{name}".lstrip("."), tensor)
              for prefix, module in model.named_modules() for name, value in vars(module).items()
              if not name.startswith("_") and name not in _made_anew(module)
              for tensor in _kept_in(value)
              if tensor not in known and tensor.layout == torch.strided]
    places: dict[int, list[tuple]] = {}
    for kind, name, tensor in named:
        if tensor.numel():
            there = places.setdefault(tensor.untyped_storage()._cdata, [])
            there.append((tensor, f"{kind} {name!r}"))
    for there in places.values():
        for (one, words), (other, others_words) in itertools.combinations(there, 2):
            if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                raise ValueError(f"{words} and {others_words} share memory, and here each would "
                                 "get its own, and other values in training: make them one "
                                 "parameter (head.weight = embedding.weight; in forward, write "
                                 ".t() or a slice of it), or clone() one of them")


def _made_anew(module: nn.Module) -> set[str]:
    """Attributes that a hook makes anew before each forward, as torch.nn.utils.spectral_norm does:
    what they hold now is never read."""
    return {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()}


def _kept_in(value) -> Iterator[torch.Tensor]:
    """The tensors in an attribute: itself, or inside of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _kept_in(inner)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors over the same storage, transposed or strided in any way: whether an element of
    one is an element of the other."""
    begins = [tensor.storage_offset() * tensor.itemsize for tensor in (one, other)]
    ends = [begin + tensor.itemsize * (1 + sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())))
            for begin, tensor in zip(begins, (one, other))]
    if ends[0] <= begins[1] or ends[1] <= begins[0]:
        return False
    if one.dtype != other.dtype or one.is_contiguous() and other.is_contiguous():
        return True
    places = torch.arange(max(ends) // one.itemsize)  # of the elements in their storage
    taken, asked = (places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                    for tensor in (one, other))
    return bool(torch.isin(taken.flatten(), asked.flatten()).any())


def check_member(group=None) -> None:
    """Raise RuntimeError if this rank is none of the group's."""
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"this rank, {dist.get_rank()} of the world, is not in group=: wrap the "
                           "model on the ranks of the group alone")


def check_forward(model: nn.Module) -> None:
    """Raise ValueError if the model's forward changes its parameters: on each rank by its own
    batch, so that ranks would drift apart."""
    for name, module in model.named_modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and module.max_norm is not None:
            raise ValueError(f"{name or 'the model'} has max_norm={module.max_norm:g}, with which "
                             "forward changes its weight, on each rank by its own batch: set "
                             "max_norm to None, and after step() call weight.renorm_(2, 0, "
                             "maxnorm) under torch.no_grad() and zero.gather_parameters()")


def trained(model: nn.Module, groups: list[dict]) -> list[nn.Parameter]:
    """The parameters that are trained, in the order of the model."""
    chosen = {param for group in groups for param in group["params"]}
    return [param for param in model.parameters() if param in chosen]


def adopt(
    stage, model: nn.Module, buckets: list[Bucket], optimizer_class: type, options: list[dict],
    group=None,
) -> None:
    """Tie a model to its stage, after a check that all ranks agree on its names, shapes, dtypes and
    buckets, and on the optimizer and its options. (The model's values need not agree: set_up
    broadcasts rank 0's.)

    Raises: RuntimeError on every rank if it is not.
    """
    facts = [(name, tuple(param.shape), param.dtype, param.requires_grad)
             for name, param in model.named_parameters()]
    facts += [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()]
    facts += [(bucket.name, bucket.group_index, bucket.start, bucket.padded, bucket.numel)
              for bucket in buckets]
    simple = (int, float, str, tuple, type(None))  # others may be written with their address
    chosen = [optimizer_class.__name__] + [
        sorted((name, repr(value)) for name, value in each.items() if isinstance(value, simple))
        for each in options]
    # not hash(), which differs from process to process
    own = [zlib.crc32(repr(each).encode()) for each in ((type(stage).__name__, facts), chosen)]
    digests = numbers_of_all_ranks(own, group)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd and digests[odd[0]][0] == digests[0][0]:
        raise RuntimeError(f"the optimizer of rank {odd[0]} differs from rank 0's in its class or "
                           "an option: give the same on every rank, or shards are updated in "
                           "different ways")
    if odd:
        raise RuntimeError(f"the model of rank {odd[0]} differs from rank 0's in names, shapes or "
                           "dtypes, or its stage, param_groups, units or bucket_bytes do: build "
                           "the same on every rank")
    for name, param in model.named_parameters():
        param._zero_name, param._zero_trained = name, param.requires_grad


def mark(stage, model: nn.Module) -> None:
    """From now on the model belongs to the stage, as long as that lives."""
    for param in model.parameters():
        param._zero_stage = Mark(stage)
    all_alike(model.parameters())


def numbers_of_all_ranks(numbers: list[int], group=None, of: str = "") -> list[list[int]]:
    """Every rank's list of whole numbers, rank 0's first. The lists are of one length. `of` is for
    the error of a rank that is elsewhere."""
    if not values.present():
        return [numbers] * dist.get_world_size(group)
    own = torch.tensor(numbers, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    everybody = own.new_empty(dist.get_world_size(group) * len(numbers))
    collectives.all_gather(everybody, own, group=group, of=of)
    return everybody.view(-1, len(numbers)).tolist()


def check_alike(model: nn.Module, group=None) -> None:
    """Raise RuntimeError, on every rank, if a parameter has other values on a rank than on rank 0:
    one rank alone has loaded weights, say."""
    if not values.present():
        return
    names, params = zip(*model.named_parameters(), strict=True)
    sums = numbers_of_all_ranks([checksum(param) for param in params], group,
                                of="checksums at the end of gather_parameters()")
    for rank, theirs in enumerate(sums):
        odd = [names[place] for place, one in enumerate(theirs) if one != sums[0][place]]
        if odd:
            more = f" and {len(odd) - 1} more" if odd[1:] else ""
            raise RuntimeError(
                f"rank {rank} leaves gather_parameters() with other values of {odd[0]!r}{more} "
                "than rank 0: load or edit alike on every rank. If rank 0 alone has the values, "
                "let it send them at the end of the block, on all ranks: "
                "`for param in model.parameters(): collectives.broadcast(param.data)`"
            )
    all_alike(params)


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """Of every bit of a tensor's values, and of what came `before` them."""
    # a clone: memory that NumPy has seen cannot be resized any more
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return zlib.crc32(whole.view(-1).view(torch.uint8).numpy(), before)


def name_of(param: nn.Parameter) -> str:
    """Its name in the model, in words."""
    return f"parameter {getattr(param, '_zero_name', '')!r}"


def check_owner(model: nn.Module) -> None:
    """Raise RuntimeError if the model has a parameter that its stage does not know."""
    for name, param in model.named_parameters():
        if trained_by(param) is None:
            raise RuntimeError(f"parameter {name!r} was moved or replaced after wrapping, perhaps "
                               "by load_state_dict(assign=True), so the stage does not train it: "
                               "do that before")


def check_trained(model: nn.Module) -> None:
    """Raise RuntimeError if a parameter was frozen or unfrozen since wrapping."""
    for name, param in model.named_parameters():
        if param.requires_grad != getattr(param, "_zero_trained", param.requires_grad):
            word = "unfrozen" if param.requires_grad else "frozen"
            raise RuntimeError(f"parameter {name!r} was {word} after wrapping, and the stage's "
                               "buckets are as they were: set requires_grad before, and build "
                               "model and stage anew to change it (load_state_dict() takes the "
                               "weights over)")


def broadcast_rest(model: nn.Module, buckets: list[Bucket], group=None) -> None:
    """Rank 0's values for what no bucket holds: parameters that are not trained, and buffers."""
    packed = {param for bucket in buckets for param in bucket.params}
    for param in model.parameters():
        if param not in packed:
            collectives.broadcast(param.data, group=group)
    for buffer in model.buffers():
        collectives.broadcast(buffer, group=group)


def broadcast_statistics(model: nn.Module, group=None) -> None:
    """Broadcast rank 0's running statistics (batch-norm's): each rank's come from its own data.

    Every persistent floating-point buffer is taken for one. Others (counters, bool masks, what is
    made with persistent=False) are not sent: they are alike on every rank. A stage does this at the
    end of step(); torch's DDP, with all buffers, before forward.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            sent = buffer is not None and name not in module._non_persistent_buffers_set
            if sent and buffer.is_floating_point():
                collectives.broadcast(buffer, group=group, of=f"buffer {name!r}")


def check_place(param: nn.Parameter, parameters: torch.Tensor) -> None:
    """Raise RuntimeError if a parameter no longer lies in `parameters`, which its stage updates."""
    if not same_storage(param, parameters):
        raise RuntimeError(
            f"{name_of(param)}, of shape {tuple(param.shape)}, is not where its stage put it. It "
            "was moved or replaced after wrapping (model.to, load_state_dict(assign=True), "
            "param.data = …): do that before, and change values in place, param.data.copy_(…). Or, "
            "at stage 3, this gradient comes from something that was computed inside "
            "gather_parameters(), or inside a unit that does not return it: compute it after that "
            "unit's turn, or return it"
        )
