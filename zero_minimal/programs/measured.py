"""Measured: what a model of somebody else's keeps and computes, for `plan`: no formula of ours knows its inside.

Two passes on fake tensors, which have sizes and no memory:

    forward               what it keeps for backward without recomputation, by torch's saved_tensors_hooks; operations
    forward, backward     the most activations at each moment of a step, under the memory ledger
"""

import contextlib
import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zero_minimal.foundations.outputs import tensors_in
from zero_minimal.foundations.units import find_units
from zero_minimal.meters.memory import Ledger
from zero_minimal.paper.fakes import without_values
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.settings import DTYPES

# torch's counter knows the fused attention of GPUs; what it says of that holds for the CPU's
FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
BACKWARD_OF_ATTENTION = 5 / 2  # a fused one: five products where forward has two


@dataclass(frozen=True)
class Measured:
    """Elements of parameters; bytes of activations; operations of a step."""

    parameters: int
    units: int  # blocks, that stage 3 gathers as wholes
    largest_unit: int
    root: int  # what is in no unit
    head: int  # the largest matrix of the root: of the embedding, or the head
    tied: bool  # embedding and head are one
    largest_matrix: int  # in a unit
    all: int  # that blocks and root keep for backward if nothing is recomputed
    checkpoints: int  # inputs of the units
    logits: int  # the most activations while the loss is computed, with what the blocks keep
    top: int  # while backward is in the last unit
    bottom: int  # in the first one
    embedding: int  # after it
    matrix_operations: int
    attention_operations: int  # of whole products


def measure(model: ForeignModel, batch: int, dtype: str) -> Measured:
    """What a step of this model with `batch` sequences takes on one rank."""
    with torch.enable_grad(), without_values():
        whole = dataclasses.replace(model, recompute=False).build(DTYPES[dtype])
        counter = FlopCounterMode(display=False, custom_mapping=FUSED)
        with counter:
            kept, inputs = saved(whole, model, batch)
        sizes = shapes(whole, model)
        head = 2 * batch * model.sequence * sizes["head"]
        counted = operations(counter.get_flop_counts()["Global"], head, model.recompute)
        return Measured(**sizes, **counted, all=kept, checkpoints=inputs,
                        **step(model.build(DTYPES[dtype]), model, batch))


def batch_of(model: ForeignModel, batch: int) -> torch.Tensor:
    return torch.zeros(batch, model.sequence, dtype=torch.int64)


def shapes(model: nn.Module, foreign: ForeignModel) -> dict:
    """How many elements lie where."""
    root, *units = find_units(model)
    sizes = [sum(param.numel() for param in unit.params) for unit in units]
    over_words = [param.numel() for param in root.params
                  if param.ndim == 2 and param.shape[0] == foreign.config.vocab_size]
    return {
        "parameters": sum(param.numel() for param in model.parameters()), "units": len(units),
        "largest_unit": max(sizes, default=0), "root": sum(param.numel() for param in root.params),
        "head": max(over_words, default=0), "tied": len(over_words) < 2,
        "largest_matrix": max((param.numel() for unit in units for param in unit.params), default=0),
    }


def saved(model: nn.Module, foreign: ForeignModel, batch: int) -> tuple[int, int]:
    """Bytes kept for backward, each storage once, parameters and buffers left out; and of these, units' inputs."""
    not_kept = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept, inputs = {}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in not_kept:
            kept[storage._cdata] = storage  # which keeps it alive: so no other one gets its address
        return tensor

    for unit in find_units(model)[1:]:
        unit.module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({id(module): next(tensors_in((args, kwargs)))}),
            with_kwargs=True)
    tokens = batch_of(foreign, batch)
    not_kept.add(tokens.untyped_storage()._cdata)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens)
    del loss
    return sum(storage.nbytes() for storage in kept.values()), sum(tensor.nbytes for tensor in inputs.values())


def operations(forward: dict, head: int, recompute: bool) -> dict:
    """Operations of a step, from those of its forward, by operator: each product has two gradients of the same size,
    and all but the head's is computed again if blocks are."""
    attention = sum(count for operator, count in forward.items() if "attention" in str(operator))
    matrices = sum(forward.values()) - attention
    return {"matrix_operations": 3 * matrices + (matrices - head if recompute else 0),
            "attention_operations": round(attention * (1 + BACKWARD_OF_ATTENTION + (1 if recompute else 0)))}


def step(model: nn.Module, foreign: ForeignModel, batch: int) -> dict:
    """The most activations at each moment."""
    ledger, marks = Ledger(), []
    units = [unit.module for unit in find_units(model)[1:]]

    def mark(name: str) -> None:
        marks.append((name, ledger.trace[-1].seconds))

    def after(number: int):
        def hook(module, args, output):
            if number == len(units) - 1 and not marks:
                mark("logits")
            first = next(tensors_in(output))
            if first.requires_grad and torch._C._current_graph_task_id() == -1:  # not while it is recomputed
                first.register_hook(lambda gradient: mark(f"unit {number}"))
        return hook

    with contextlib.ExitStack() as undo:
        for number, unit in enumerate(units):
            undo.callback(unit.register_forward_hook(after(number)).remove)
        first = units[0].register_forward_pre_hook(watch_input(mark), with_kwargs=True)
        undo.callback(first.remove)
        undo.enter_context(ledger)
        ledger.watch(model)
        tokens = batch_of(foreign, batch)
        model(tokens, tokens).backward()
        mark("end")
    windows = {"logits": ("logits", f"unit {len(units) - 1}"), "top": (f"unit {len(units) - 1}", None),
               "bottom": ("unit 0", None), "embedding": ("input", "end")}
    timeline = ledger.timeline
    return {name: highest_between(timeline, marks, *window) for name, window in windows.items()}


def watch_input(mark):
    """A hook that marks when backward has left the first unit."""

    def hook(module, args, kwargs):
        first = next(tensors_in((args, kwargs)))
        if first.requires_grad and torch._C._current_graph_task_id() == -1:
            first.register_hook(lambda gradient: mark("input"))

    return hook


def highest_between(timeline: list, marks: list, start: str, end: str | None) -> int:
    """The most bytes of activations from one mark to another; None: to the next one."""
    names = [name for name, _ in marks]
    place = names.index(start)
    begins = marks[place][1]
    ends = marks[names.index(end) if end else place + 1][1]
    return max((moment.bytes["activations"] for moment in timeline if begins <= moment.seconds <= ends), default=0)
