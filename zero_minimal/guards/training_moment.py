"""Training moment: what a bucket's fingerprint says about training, so that ranks that differ get
an error: the backward and step, what the last step() did, the learning rate, and edits.

Seams: wrapped, followed, backward_begins, bucket_complete, unit_turn, gradients_reduced,
gradients_asked, gradients_dropped; gather_parameters() asks, too.
Mistakes: a scheduler, clip_grad_norm_(), step() or a load_state_dict() on one rank alone; groups
removed from optimizer.param_groups.
"""

import torch

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.changed_in_forward import changes_of
from zero_minimal.guards.collective_fingerprint import LOADED, SCALED
from zero_minimal.guards.same_on_all_ranks import in_numbers


@seams.at("wrapped")
def remember_options(stage) -> None:
    stage.optimizer._zero_given = [_simple(group) for group in stage.optimizer.param_groups]


@seams.at("backward_begins", "gradients_asked")
def check_groups_are_there(reducer) -> None:
    groups = reducer.stage.optimizer.param_groups
    given = len(getattr(reducer.stage.optimizer, "_zero_given", groups))
    if len(groups) != given:
        raise RuntimeError(f"zero.optimizer had {given} groups when the model was wrapped, and has "
                           f"{len(groups)}: no group can be added or removed, since its buckets "
                           "would have no options. To let one rest, set its lr to 0")


@seams.at("gradients_asked")
def note_rates(reducer) -> None:
    """The update may go by another rate than backward told: then the next backward tells it. (A
    rank without a backward tells its rate right now; and after step() none will be used.)"""
    if reducer.reduced and not reducer.needs_zero_grad:
        of_group = {bucket.group_index: bucket for bucket in reducer.stage.buckets}
        reducer.stepped = {index: rate_of(reducer.stage, bucket)
                           for index, bucket in of_group.items()}


@seams.at("followed")
def count(reducer) -> None:
    reducer.steps = reducer.passes = 0  # step() calls; passes that handed over since
    reducer.loads = 0  # load_state_dict() calls, of the stage or of its optimizer
    reducer.scaled = ""  # in words, how the last step() scaled gradients
    # by group, in words: the rate that the last backward told, and that of the update after it
    reducer.told, reducer.stepped = {}, {}
    if hasattr(reducer.stage, "optimizer"):  # an assignment may make it later
        # a scheduler keeps the optimizer when the stage is gone
        reducer.stage.optimizer.register_load_state_dict_post_hook(WeakHook(count_load, reducer))


def count_load(reducer, _) -> None:
    reducer.loads += 1


@seams.at("gradients_reduced")
def count_pass(reducer) -> None:
    reducer.passes += 1


@seams.at("gradients_dropped")
def count_step(reducer) -> None:
    stepped = reducer.needs_zero_grad
    reducer.scaled = _scale_in_words(reducer.stage.gradient_scale) if stepped else ""
    reducer.steps, reducer.passes = reducer.steps + stepped, 0


def steps_taken(stage) -> int:
    """How often step() has run; 0 or 1 where the guards are off, and nothing counts."""
    return getattr(stage.reducer, "steps", 0) + stage.reducer.needs_zero_grad


def date_gather(stage) -> None:
    """gather_parameters() begins: at stage 3 it sends buckets."""
    for bucket in stage.all_buckets if hasattr(stage, "units") else ():
        bucket.moment = f"gather_parameters() after {steps_taken(stage)} steps"


@seams.at("bucket_complete")
def date_bucket(reducer, bucket) -> None:
    index, rate = bucket.group_index, rate_of(reducer.stage, bucket)
    told, reducer.told[index] = reducer.told.get(index), rate
    if (stepped := reducer.stepped.pop(index, told)) != told:
        rate += stepped.replace(" with lr ", " lr_in_the_last_step=")
    loaded = f"{LOADED}{reducer.loads}" if reducer.loads else ""
    bucket.moment = (f"backward {reducer.passes + 1} of step {reducer.steps + 1}"
                     f"{reducer.scaled}{rate}{loaded}{changes_of(reducer, bucket)}")
    bucket.values = reducer.values


@seams.at("unit_turn")
def date_units(stage, *units) -> None:
    reducer, step = stage.reducer, steps_taken(stage) + 1
    moment = f"forward of step {step}" if torch.is_grad_enabled() else f"evaluation, step {step}"
    if reducer.running:
        moment = f"backward {reducer.passes + 1} of step {step}"
    for unit in units:
        for bucket in unit.buckets if unit else ():
            bucket.moment = moment


def _scale_in_words(scale) -> str:
    """Empty if step() did not scale. It leaves out a number on a GPU: the CPU would have to wait
    for it."""
    if scale is None:
        return ""
    return f"{SCALED} ({float(scale):.6g})" if torch.as_tensor(scale).is_cpu else SCALED


def rate_of(stage, bucket) -> str:
    """In words, the learning rate with which a bucket will be updated, and the options that were
    changed after wrapping."""
    options = _simple(stage.optimizer.param_groups[bucket.group_index])
    rate, given = options.pop("lr", None), getattr(stage.optimizer, "_zero_given", ())
    words = [f"lr {rate}"] if isinstance(rate, (int, float)) else []
    if given:  # none in an assignment
        words += [f"{name}={value!r}".replace(" ", "") for name, value in options.items()
                  if given[bucket.group_index].get(name, value) != value]
    return f" with {' '.join(words)}" if words else ""


def _simple(group: dict) -> dict:
    plain = {name: in_numbers(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in plain.items() if value is not None}
