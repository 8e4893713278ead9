"""Ownership: a model belongs to one stage, and its parameters stay where that stage has put them.

Seams: model_given, buckets_planned, wrapped, gradient_arrives, gradients_asked, pass_ends,
parameter_moves.
Mistakes: a model that is wrapped twice; a parameter that was added, moved, replaced, tied, removed,
frozen or unfrozen after wrapping.
"""

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.layout import same_storage
from zero_minimal.guards.reads_of_freed_parameters import FreedParameter
from zero_minimal.guards.refused_collectives import NO_RANKS
from zero_minimal.guards.trained_by import LEFT_BEHIND, Mark, home_of, is_released, trained_by


@seams.at("model_given")
def refuse_taken(model: nn.Module, group, *_) -> None:
    """Raises: TypeError if it is not a module; RuntimeError if there are no ranks, or this rank is
    not in the group; ValueError for a model that has a stage already, or lost its parameters with
    an earlier stage."""
    check_module(model)
    if not dist.is_initialized():
        raise RuntimeError(NO_RANKS)
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"this rank, {dist.get_rank()} of the world, is not in group=: wrap the "
                           "model on the ranks of the group alone")
    for name, param in model.named_parameters():
        if (stage := trained_by(param)) is not None and stage.model is not model:
            raise ValueError(f"parameter {name!r} belongs to a {type(stage).__name__} already, "
                             f"with another model, a {type(stage.model).__name__}. A parameter has "
                             "one stage: wrap one module that holds both models")
        if stage is not None:
            raise ValueError(f"this model belongs to a {type(stage).__name__} already: wrap it "
                             "once, or build a new one (`del zero` gives it back at stages 0 to 2; "
                             "at stage 3 wrap a copy.deepcopy(model), made on all ranks under "
                             "`with zero.gather_parameters():`)")
        if isinstance(param, FreedParameter):
            raise ValueError(f"parameter {name!r} is released: {LEFT_BEHIND}")


def check_module(model) -> None:
    """Raises: TypeError for what is no module, or lists other parameters than it names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a stage takes an nn.Module, and was given a {type(model).__name__}")
    listed, named = set(model.parameters()), {param for _, param in model.named_parameters()}
    if listed != named:
        raise TypeError(f"{type(model).__name__}.parameters() lists {len(listed)} parameters, and "
                        f"named_parameters() {len(named)}: leave both as nn.Module has them. To "
                        "train a part, param.requires_grad_(False) for the others, or param_groups")


@seams.at("buckets_planned")
def name_parameters(stage, *_) -> None:
    for name, param in stage.model.named_parameters():
        param._zero_name, param._zero_trained = name, param.requires_grad


@seams.at("wrapped")
def mark(stage) -> None:
    """From now on the model belongs to the stage, as long as the stage exists."""
    for param in stage.model.parameters():
        param._zero_stage = Mark(stage)
    stage.home_of = {param: (unit, bucket) for unit in getattr(stage, "units", ())
                     for bucket in unit.buckets for param in bucket.params}


def name_of(param: nn.Parameter) -> str:
    """Its name in the model, in words."""
    return f"parameter {getattr(param, '_zero_name', '')!r}"


@seams.at("gradient_arrives")
def check_arrived(reducer, param: nn.Parameter, buckets: list) -> None:
    check_place(param, buckets[0].parameters, reducer.by_turns)


@seams.at("gradients_asked")
def check_all(reducer) -> None:
    check_trained(reducer.stage.model)
    if not reducer.by_turns:  # at stage 3 execution order knows where they are
        for bucket in reducer.stage.buckets:
            for param in bucket.params:
                check_place(param, bucket.parameters, at_stage_3=False)


@seams.at("pass_ends")
def check_owned(reducer) -> None:
    """Raise RuntimeError if the model has a parameter that its stage does not know, or has lost one
    that the stage knows."""
    if not hasattr(reducer.stage, "all_buckets"):  # a learner's own set-up marks no parameter
        return
    there = dict(reducer.stage.model.named_parameters())
    for name, param in there.items():
        if trained_by(param) is None:
            raise RuntimeError(f"parameter {name!r} was added, moved or replaced after wrapping, "
                               "perhaps by load_state_dict(assign=True), so the stage does not "
                               "train it: do that before, or `del zero` and wrap again")
    held = set(there.values())
    for param in (param for param in reducer.buckets_of if param not in held):
        raise RuntimeError(f"{name_of(param)} is in the model no more: its module was removed "
                           "after wrapping, or another parameter stands in its place (weights that "
                           "were tied, say). Do that before, or `del zero` and wrap again")


@seams.at("parameter_moves")
def check_left(param: nn.Parameter) -> None:
    """At stage 3, before a parameter is released. Raise RuntimeError if it points elsewhere, to
    other values: they would be lost."""
    unit, bucket = home_of(param)
    if unit is None or not unit.whole or is_released(param):
        return  # it has no values to lose
    if same_storage(param, bucket.parameters):
        return
    kept = bucket.flat.view(bucket.parameters, param)
    if param.dtype != kept.dtype or not torch.equal(param.data, kept):
        raise RuntimeError(
            f"{name_of(param)} points to other memory (param.data = …), and its new values would "
            "be lost when stage 3 frees it: change it in place, param.data.copy_(…) or "
            "param.data.mul_(…).add_(…), alike on all ranks; or under `with "
            "zero.gather_parameters():`, on all ranks"
        )


def check_trained(model: nn.Module) -> None:
    """Raise RuntimeError if a parameter was frozen or unfrozen since wrapping."""
    for name, param in model.named_parameters():
        if param.requires_grad != getattr(param, "_zero_trained", param.requires_grad):
            word = "unfrozen" if param.requires_grad else "frozen"
            raise RuntimeError(f"parameter {name!r} was {word} after wrapping, and the stage's "
                               "buckets are as they were: set requires_grad before, and build "
                               "model and stage anew to change it (load_state_dict() takes the "
                               "weights over)")


def check_place(param: nn.Parameter, parameters: torch.Tensor, at_stage_3: bool) -> None:
    """Raise RuntimeError if a parameter is no longer in `parameters`, which its stage updates."""
    if not same_storage(param, parameters):
        or_else = (
            " Or this gradient comes from something that was computed inside gather_parameters(), "
            "or inside a unit that does not return it: compute it after that unit's turn, or "
            "return it")
        raise RuntimeError(
            f"{name_of(param)}, of shape {tuple(param.shape)}, is not where its stage put it. It "
            "was moved or replaced after wrapping (model.to, load_state_dict(assign=True), "
            "param.data = …): do that before, and change values in place, param.data.copy_(…)."
            f"{or_else if at_stage_3 else ''}"
        )
