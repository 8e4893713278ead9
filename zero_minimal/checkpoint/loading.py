"""Loading: the newest undamaged checkpoint, into any stage on any number of ranks."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.checkpoint import as_json, local_chunks, state_folder
from zero_minimal.checkpoint.local_chunks import Holding, LocalChunk
from zero_minimal.checkpoint.state_folder import Contents, Damaged
from zero_minimal.core import random_state

SHOWN = 10  # names in a message


def candidates(folder: Path, group: dist.ProcessGroup | None = None) -> list[Path]:
    """The checkpoints in a folder, the newest first, as rank 0 of the group sees them. Raises:
    Damaged, on all ranks, if it cannot read the folder."""
    try:
        found = [state_folder.finished(folder)]
    except Damaged as error:
        found = [str(error)]
    if group:
        dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    if isinstance(found[0], str):
        raise Damaged(found[0])
    return found[0]


def newest_good(folder: Path, group: dist.ProcessGroup | None = None) -> Contents:
    """The newest undamaged checkpoint in a folder: each byte is as it was written. The ranks of the
    group share the reading. Rank 0 warns of the checkpoints that are passed over.

    Raises: Damaged, on all ranks, if there is none.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    paths, problems = candidates(folder, group), []
    for path in paths:
        contents, found = None, [None] * ranks  # of each rank: a checksum, or what is wrong
        try:
            contents = state_folder.read_contents(path)
            for name in list(contents.files)[rank::ranks]:
                state_folder.check_file(contents, name)
            found[rank] = contents.crc32
        except Damaged as error:
            found[rank] = str(error)
        if group:
            dist.all_gather_object(found, found[rank], group=group)
        problem = next((one for one in found if isinstance(one, str)), None)
        if problem is None and len(set(found)) > 1:
            other = next(number for number, one in enumerate(found) if one != found[0])
            problem = (f"{path} is not the same on rank 0 and on rank {other}: give all ranks a "
                       "folder on one disk, or the same copy")
        if problem is None:
            return contents
        problems.append(problem)
        state_folder.pass_over(path)
        if rank == 0 and path != paths[-1]:
            warnings.warn(f"{problem}. The checkpoint before it is taken", stacklevel=4)
    raise Damaged("\n".join(problems) if problems else f"there is no checkpoint in {folder}")


def read_alone(contents: Contents, wanted: list[LocalChunk]) -> None:
    """Fill the chunks, in one process without ranks."""
    from zero_minimal.checkpoint.resharding import ChunkLoader, Reader

    reader, planner = Reader(contents), ChunkLoader(wanted)
    planner.set_up_planner({}, reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner)


# ----------------------------------------------------------------------------- the same model?


def check(saved: dict, here: dict) -> None:
    """Compare the facts of a checkpoint with the model's, with the same result on all ranks.

    Raises: ValueError, which lists the parameters and buffers whose names, shapes, dtypes or groups
        differ, or how the optimizers do.
    """
    if saved["optimizer"] is None:  # weights alone do not show which tensors are buffers
        before = {name: one for name, one in saved["parameters"].items()
                  if here["also"].get(name) not in saved["parameters"]}
        found = _differences("weights", before, here["parameters"] | here["buffers"], {
            "shape": "other shapes", "dtype": "other dtypes, in which weights alone must be"})
        found += _listed("two weights that are one here", _untied(saved, here))
    else:
        found = _differences("parameters", saved["parameters"], here["parameters"], {
            "shape": "other shapes", "dtype": "other dtypes", "group": "other optimizer groups"})
        found += _differences("buffers", saved["buffers"], here["buffers"], {
            "shape": "other shapes", "dtype": "other dtypes"})
        found += _differences("modules with an extra state", saved.get("extra_states", {}),
                              here["extra_states"], {})
        if saved["optimizer"] != here["optimizer"]:
            found.append(f"its optimizer was {saved['optimizer']}, and is {here['optimizer']} here")
        if len(saved["groups"]) != len(here["groups"]):
            found.append(f"its optimizer had {len(saved['groups'])} groups, and has "
                         f"{len(here['groups'])} here")
    if found and saved.get("kind", here["kind"]) != here["kind"]:
        found.insert(0, f"it was saved by {saved['kind']}, and {here['kind']} has other optimizer "
                        "groups: go on with what saved it, or take its weights alone, by export "
                        "and import")
    if found:
        raise ValueError("this checkpoint is not of this model: " + "; ".join(found))


def _untied(saved: dict, here: dict) -> Iterable[str]:
    """Names that are one weight in the model, but have two values in a file."""
    given = saved["parameters"]
    return (f"{first} and {name}" for name, first in here["also"].items()
            if name in given and first in given and given[name] != given[first])


def _differences(kind: str, before: dict, now: dict, facts: dict[str, str]) -> list[str]:
    """In words. facts: those to compare, and what to call each if it differs."""
    found = _listed(f"{kind} that it alone has", (name for name in before if name not in now))
    found += _listed(f"{kind} that the model alone has", (name for name in now
                                                          if name not in before))
    for fact, words in facts.items():
        found += _listed(words, (
            f"{name} ({_said(before[name][fact])}, and {_said(now[name][fact])} here)"
            for name in before if name in now and before[name][fact] != now[name][fact]))
    return found


def _said(fact) -> str:
    return "frozen" if fact is None else str(fact)  # it is in no group


def _listed(words: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{words}: {in_short(names)}"] if names else []


def in_short(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


# ------------------------------------------------------------------------------------ into a stage


def to_fill(holding: Holding, contents: Contents) -> tuple[dict, list[LocalChunk]]:
    """A state for stage.load_state_dict(), in new memory, and the chunks of it that are to be
    read."""
    stage, wanted = holding.stage, []
    state = stage.state_dict()
    for key in ("frozen", "buffers"):
        state[key] = {name: in_own_memory(tensor) for name, tensor in state[key].items()}
    state["shards"] = [torch.zeros_like(shard) for shard in state["shards"]]
    masters = [param for group in stage.optimizer.param_groups for param in group["params"]]
    of_number = {}
    for bucket, shard in zip(stage.all_buckets, state["shards"], strict=True):
        wanted += local_chunks.in_bucket(holding, bucket, "model", shard)
        if bucket.trained:
            number = next(n for n, param in enumerate(masters) if param is bucket.master)
            names = [holding.names[param] for param in bucket.params if param.numel()]
            of_number[number] = once_for(names, contents)
            for kind in kinds_for(names, contents):
                dtype = _dtype(contents, f"{kind}/{names[0]}")
                of_number[number][kind.split("/")[1]] = held = torch.zeros_like(shard, dtype=dtype)
                wanted += local_chunks.in_bucket(holding, bucket, kind, held)
    here = {buffer: name for name, buffer in stage.model.named_buffers()}
    buffers = local_chunks.persistent_buffers(stage.model)
    whole = state["frozen"] | {name: state["buffers"][here[buffer]] for name, buffer in buffers}
    for name, own in whole.items():
        kind, place = _kind(name, contents), holding.places.get(name)
        wanted += local_chunks.chunks_of_whole(kind, name, own, place)
    state["optimizer"] = optimizer_state(
        {number: own for number, own in of_number.items() if own}, contents, state["optimizer"])
    return state, wanted


def in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be written, even of an expanded tensor."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _kind(name: str, contents: Contents) -> str:
    """The kind of a tensor that no optimizer updates."""
    return "buffer" if f"buffer/{name}" in contents.tensors else "model"


def kinds_for(names: list[str], contents: Contents) -> list[str]:
    """What the optimizer keeps for each element of these parameters: "optimizer/exp_avg", …

    Raises: ValueError if it differs among them.
    """
    every = [[kind for kind in contents.kinds if f"{kind}/{name}" in contents.tensors]
             for name in names]
    odd = next((name for name, own in zip(names, every, strict=True) if own != every[0]), None)
    if odd is not None:
        raise ValueError(f"the optimizer had other state for {odd} than for {names[0]}, and here "
                         "both lie in one bucket")
    return every[0] if every else []


def _dtype(contents: Contents, name: str) -> torch.dtype:
    return as_json.dtype_of(contents.tensors[name]["dtype"])


def once_for(names: list[str], contents: Contents) -> dict:
    """What the optimizer keeps once for a shard that holds these parameters.

    Raises: ValueError if it differs among them.
    """
    numbers = contents.facts["numbers"]
    if not names:
        return {}
    odd = next((name for name in names if numbers.get(name) != numbers.get(names[0])), None)
    if odd is not None:
        raise ValueError(f"the optimizer had counted otherwise for {odd} than for {names[0]}, and "
                         "here both lie in one bucket")
    return as_json.decoded(numbers.get(names[0], {}))


def optimizer_state(of_number: dict, contents: Contents, here: dict) -> dict:
    """What torch's load_state_dict() takes. Options come from the checkpoint, or from `here` if
    that has weights alone; the parameters' numbers come from `here`."""
    groups = here["param_groups"]
    if contents.facts["optimizer"] is not None:
        groups = [{**as_json.decoded(options), "params": group["params"]}
                  for options, group in zip(contents.facts["groups"], groups, strict=True)]
    return {**here, "state": of_number, "param_groups": groups}


# ---------------------------------------------------------------------- into plain torch


def plain_to_fill(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, contents: Contents
) -> tuple[dict | None, dict[str, torch.Tensor], list[LocalChunk]]:
    """For a model and an optimizer without a stage: what optimizer.load_state_dict() takes, new
    buffers, and the chunks to read for both and for the parameters."""
    named = dict(model.named_parameters())
    tensors = [("model", name, param.data) for name, param in named.items()]
    buffers = {name: in_own_memory(buffer)
               for name, buffer in local_chunks.persistent_buffers(model)}
    tensors += [(_kind(name, contents), name, buffer) for name, buffer in buffers.items()]
    state = None
    if optimizer is not None:
        names = {param: name for name, param in named.items()}
        order = [names[param] for group in optimizer.param_groups for param in group["params"]]
        of_number = {}
        for number, name in enumerate(order):
            own = once_for([name], contents)
            is_empty = not named[name].numel()
            for kind in contents.kinds if is_empty else kinds_for([name], contents):
                dtype = named[name].dtype if is_empty else _dtype(contents, f"{kind}/{name}")
                own[kind.split("/")[1]] = held = torch.zeros_like(named[name], dtype=dtype)
                tensors.append((kind, name, held.data))
            if own:
                of_number[number] = own
        state = optimizer_state(of_number, contents, optimizer.state_dict())
    wanted = [local for entry in tensors for local in local_chunks.chunks_of_whole(*entry)]
    return state, buffers, wanted


def fill_extra_states(model: nn.Module, contents: Contents) -> None:
    """What a module's get_extra_state() returned goes to its set_extra_state()."""
    for path, value in contents.facts.get("extra_states", {}).items():
        model.get_submodule(path).set_extra_state(as_json.decoded(value))


def plain_facts(model: nn.Module, optimizer: torch.optim.Optimizer | None, saved: dict) -> dict:
    """Like local_chunks.facts_of(), for check(). What only training needs is the checkpoint's."""
    groups = {} if optimizer is None else {
        param: number for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]}

    def group_of(name, param):
        before = saved["parameters"].get(name, {}).get("group")
        ours = optimizer is not None and param.requires_grad and param.numel()
        return groups.get(param) if ours else before

    return {"kind": None} | saved | {
        "parameters": {name: local_chunks.described(param, group=group_of(name, param))
                       for name, param in model.named_parameters()},
        "buffers": local_chunks.facts_of_buffers(model),
        "extra_states": local_chunks.extra_states(model),
        "also": local_chunks.second_names(model),
    } | ({} if optimizer is None else {"optimizer": type(optimizer).__name__,
                                       "groups": optimizer.param_groups})


# ---------------------------------------------------------------------------------- random state


def restore_random_state(facts: dict, data_rank: int) -> None:
    """This rank's random numbers continue. If there are more ranks now than before, each new one
    begins at a seed of its own, made from what was saved."""
    states = {own["data_rank"]: own["random"] for own in facts["ranks_own"] if own}
    if data_rank in states:
        random_state.set_random_state(as_json.decoded(states[data_rank]))
    elif states:  # weights alone have none
        random_state.seed_from(as_json.decoded(states[data_rank % len(states)]), data_rank)
