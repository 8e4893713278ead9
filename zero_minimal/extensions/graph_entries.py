"""Graph entries: the ways by which backward comes to a unit of stage 3 other than the unit's
output.

    modules inside a unit     they may be called by themselves: an encoder, the head
    attributes                an auxiliary loss that a module keeps, or a list of them
    external parameters       a penalty on a weight (external_parameters.py)
    saved tensors             any way that cannot be followed (saved_tensors.py)

What stage 3 cannot serve is refused: create_graph=True, torch.func around a forward, a forward in
another thread, a selective checkpoint around a unit, one backward through two forward passes with a
backward between them.

Seams: units_followed, unit_called, unit_begins, unit_ends, unit_returned, part_returned,
unit_is_whole, backward_at_unit, left_behind.
"""

import sys
import threading
import types
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_modes

from zero_minimal.core import seams
from zero_minimal.core.execution_order import ExecutionOrder, in_backward, ordered
from zero_minimal.core.layout import same_storage
from zero_minimal.core.units import Unit
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.extensions import external_parameters
from zero_minimal.extensions.saved_tensors import FUNC_REFUSES, SavedTensors
from zero_minimal.guards.outputs import tensors_in
from zero_minimal.guards.reads_of_freed_parameters import refuse_left_behind
from zero_minimal.guards.trained_by import LEFT_BEHIND

NO_SECOND = ("stage 3 frees parameters after each turn, and cannot serve create_graph=True: train "
             "at stage 2, where torch.autograd.grad(loss, parameters, create_graph=True) works")
JOINT = (
    "this backward() goes through two forward passes, and a backward() came between them: at stage "
    "3 call backward() on each loss by itself, or run both forward passes before the first one"
)
OTHER_THREAD = (
    "the model is called in another thread than before, where autograd counts anew, and stage 3 "
    "goes by that count: call it in one thread"
)
UNDER_FUNC = (
    "torch.func (vmap, grad, jacrev, jvp) around a forward finds no parameters at stage 3, which "
    "frees them after each turn: copy the model, `with zero.gather_parameters(): whole = "
    "copy.deepcopy(model)`, on all ranks, and call it on the copy; or train at stage 2"
)
FUNC_INSIDE = (
    "torch.func (grad, vjp, jacrev, hessian) inside a forward does not go with stage 3, which "
    "follows what autograd saves there: write torch.autograd.grad(…), or train at stage 2"
)
SELECTIVE = (
    "a selective checkpoint (context_fn=) is around a unit of stage 3, and would save and count "
    "the operations that gather it, too: put the checkpoint inside the unit's own forward, leave "
    "out context_fn=, or train at stage 2"
)


@seams.at("units_followed")
def follow_more(order: ExecutionOrder) -> None:
    order.saved = SavedTensors(order.stage.units, WeakHook(saved_is_read, order))
    order.thread = None  # in which the model is called
    for unit in order.stage.units:
        for module in inner_owners(unit):
            order.follow(unit, module)


def inner_owners(unit: Unit) -> list[nn.Module]:
    """Modules inside the unit's module that hold parameters of the unit."""
    params = set(unit.params)
    return [module for module in unit.module.modules() if module is not unit.module
            and not params.isdisjoint(module.parameters(recurse=False))]


@seams.at("unit_called")
def refuse_elsewhere(order: ExecutionOrder, unit: Unit) -> None:
    """Refuse calls in which the order of autograd's nodes, by which units are followed, is lost."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(UNDER_FUNC)
    if any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in current_modes()):
        raise RuntimeError(SELECTIVE)
    if torch.is_grad_enabled() and not in_backward():
        order.thread = order.thread or threading.get_ident()
        if order.thread != threading.get_ident():
            raise RuntimeError(OTHER_THREAD)


@seams.at("unit_begins")
def save_through_us(order: ExecutionOrder, unit: Unit) -> None:
    if not in_backward():  # one pair of hooks serves all units of the call
        if len(order.under_way) == 1:
            order.saved.end()  # the hooks of a forward that failed
        order.saved.begin(len(order.under_way))


@seams.at("unit_ends")
def save_no_more(order: ExecutionOrder, unit: Unit) -> None:
    if not in_backward():
        order.saved.end(len(order.under_way) + 1)
    lend(order, unit)


@seams.at("unit_ends")
def explain(order: ExecutionOrder, unit: Unit) -> None:
    """forward has failed: say it in our words, if we are the reason."""
    error = sys.exc_info()[1]
    if FUNC_REFUSES in str(error):
        error.args = (FUNC_INSIDE,)


# what a module returns, or keeps


@seams.at("unit_returned")
def look_at_unit(order: ExecutionOrder, unit: Unit, module: nn.Module, output) -> None:
    refuse_late(module, output)
    tensors = list(tensors_in(output))
    for tensor in tensors:
        if any(same_storage(tensor, bucket.parameters) for bucket in unit.buckets):
            raise RuntimeError(f"unit {unit.name or 'root'!r} returns a part of its own "
                               "parameters, which are freed after its turn: return a .clone() of "
                               "it")
    follow_kept(order, unit, module)
    if torch.is_grad_enabled():
        for node in nodes_of([*tensors, *kept(module)]):
            order.watch(node, order.innermost)


@seams.at("part_returned")
def look_at_part(order: ExecutionOrder, module: nn.Module, output) -> None:
    refuse_late(module, output)
    if order.under_way:
        began, at_work, _ = order.under_way[-1]
        follow_kept(order, at_work, module)
        for node in nodes_of([*tensors_in(output), *kept(module)]):
            order.watch(node, lambda number: at_work if number >= began else None)


def nodes_of(tensors: list[torch.Tensor]) -> list:
    """Where backward may come to them. A later operation in place on a view (y += x) takes the
    place of the view's node, and not of its base's."""
    bases = [tensor._base for tensor in tensors if tensor._is_view()]
    return [tensor.grad_fn for tensor in [*tensors, *bases]]


def refuse_late(module: nn.Module, output) -> None:
    if isinstance(output, (Iterator, types.FunctionType)):
        raise RuntimeError(f"a {type(module).__name__} returns a {type(output).__name__}, "
                           "which would read parameters after its turn: return tensors, in a "
                           "list or a dict")


def follow_kept(order: ExecutionOrder, unit: Unit, module: nn.Module) -> None:
    """A view of the unit's parameters that a module keeps may be read after the unit's turn."""
    for tensor in kept(module):
        if any(same_storage(tensor, bucket.parameters) for bucket in unit.buckets):
            external_parameters.follow_view(tensor, WeakHook(used, order, unit))


def kept(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module has put into attributes, or into lists there."""
    values = list(vars(module).values())
    values += [part for value in values if isinstance(value, (list, tuple)) for part in value]
    return [value for value in values if isinstance(value, torch.Tensor)]


# backward


@seams.at("backward_at_unit")
def refuse_graphs(order: ExecutionOrder, unit: Unit, number: int) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(NO_SECOND)
    reducer = order.stage.reducer
    has_handed_over = reducer.running and len(reducer.waits_for) < len(reducer.buckets)
    if number < order.since and has_handed_over:
        raise RuntimeError(JOINT)


def saved_is_read(order: ExecutionOrder, unit: Unit) -> None:
    """Backward, or code that inspects the graph, reads a saved parameter of the unit."""
    if not in_backward():
        raise RuntimeError(f"a saved parameter of unit {unit.name or 'root'!r} is read outside "
                           "of backward(): at stage 3 it is there in its unit's turn alone")
    if torch.is_grad_enabled():
        raise RuntimeError(NO_SECOND)
    if not unit.whole:
        order.stage.reducer.begin()  # for a loss that is not computed from the model's output
        # not a turn: other units stay whole, since one node may read from two units
        order.stage._gather(unit)
        order.stage._arrive(unit)


@seams.at("left_behind")
def refuse_alone(*what) -> None:
    """The stage is gone, but a module of its model is called, or backward comes to its graph."""
    if isinstance(what[0], nn.Module):
        refuse_left_behind(what[0])
    else:
        raise RuntimeError(f"backward() comes too late: {LEFT_BEHIND}")


# parameters that can be read while their unit is not at work


@seams.at("unit_is_whole")
def lend(order: ExecutionOrder, unit: Unit) -> None:
    at_work = {one for _, called, _ in order.under_way for one in (called, *called.parents)}
    for one in (unit, *unit.parents):
        if one in at_work:
            external_parameters.take_back(one.params)
        elif one.whole:
            external_parameters.lend(one.params, WeakHook(used, order, one))


def used(order: ExecutionOrder, unit: Unit, node, began: int) -> None:
    """Autograd has recorded an operation on a lent parameter: it counts as a call of its unit."""
    if "watched" not in node.metadata:
        # in a penalty, backward comes here before the model's output
        node.register_prehook(WeakHook(lambda order, *_: order.stage.reducer.begin(), order))
        order.note_call(unit, ordered(began))
        order.watch(node, lambda number: unit)
