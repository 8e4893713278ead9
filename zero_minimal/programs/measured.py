"""Measured: what a model of somebody else's keeps and computes, for `plan`: no formula of ours knows its inside.

Two passes on fake tensors, which have sizes and no memory:

    forward               what it keeps for backward without recomputation, by torch's saved_tensors_hooks; operations
    forward, backward     the most activations at each moment of a step, under the memory ledger
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zero_minimal.core.units import Unit, find_units
from zero_minimal.guards.outputs import tensors_in
from zero_minimal.meters.memory import Ledger
from zero_minimal.paper.fakes import without_values
from zero_minimal.paper.moments import Parts, Work
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
    blocks: tuple[str, ...]  # names of the lists that hold them
    largest_unit: int
    root: int  # what is in no unit
    head: int  # the largest matrix of the root: of the embedding, or the head
    tied: bool  # embedding and head are one
    largest_matrix: int  # in a unit
    all: int  # that blocks and root keep for backward if nothing is recomputed
    checkpoints: int  # inputs of the units
    logits: int  # the most activations while the loss is computed, with what the blocks keep
    with_head: int  # as the gradient of the head comes
    top: int  # while backward is in the last unit
    bottom: int  # in the first one
    embedding: int  # after it
    matrix_operations: int
    attention_operations: int  # of whole products
    attention: str  # which one ran
    dropout: bool  # whether the model dropped what its file says


@dataclass(frozen=True)
class MeasuredWork(Work):
    """What a plan asks of our GPT's formulas, measured. config: a ForeignModel."""

    @functools.cached_property
    def found(self) -> Measured:
        return measure(self.config, self.batch, self.dtype, self.attention)

    def activations(self) -> dict[str, float]:
        found = self.found
        return {"all": found.all, "checkpoints": found.checkpoints, "logits": found.logits,
                "block_at_work": found.bottom}

    def at_moments(self) -> dict[str, float]:
        found = self.found
        return {"logits": found.logits, "head": found.with_head, "top block": found.top, "bottom block": found.bottom,
                "embedding": found.embedding, "update": 0}

    def parts(self) -> Parts:
        """For the update two copies in fp32, and which of their elements were edited."""
        found = self.found
        return Parts(found.parameters, found.largest_unit, found.root, found.head, found.largest_matrix,
                     bucketed=found.parameters, tied=found.tied, update_bytes=9)

    def operations(self) -> tuple[float, float]:
        """A causal kernel that is fused skips half of attention; an encoder's needs all of it."""
        found, times = self.found, self.accumulate
        skips = found.attention == "fused" and not self.config.masked
        return (times * found.matrix_operations,
                times * (found.attention_operations / 2 if skips else found.attention_operations))

    def sent_meanwhile(self) -> tuple[float, float, float]:
        return 0, 0, 0

    def described(self) -> dict:
        found, sizes = self.found, self.config.sizes
        return {"model": self.config.file, "name": sizes["name"], "vocabulary": sizes["vocabulary"],
                "parameters": found.parameters, "parameters_of_rank": found.parameters, "layers": found.units,
                "blocks": found.blocks, "tied": found.tied, "root": found.root, "largest_unit": found.largest_unit,
                "attention_measured": found.attention, "dropout_measured": found.dropout}


def measure(model: ForeignModel, batch: int, dtype: str, attention: str = "fused") -> Measured:
    """What a step of this model with `batch` sequences takes on one rank. Raises: ValueError for a kind of attention
    that the library cannot compute for it."""
    with torch.enable_grad(), without_values():
        how, whole, kept, inputs, counts = built(model, batch, dtype, attention)
        sizes = shapes(whole, model)
        head = 2 * batch * model.sequence * sizes["head"]
        found = kind_of(how["attention"], counts)
        again = model.recompute or found == "recomputed"
        counted = operations(counts, head, model.recompute, again, found)
        return Measured(**sizes, **counted, all=kept, checkpoints=inputs, attention=found, dropout=how["dropout"],
                        **step(model.build(DTYPES[dtype], **how), model, batch))


def built(model: ForeignModel, batch: int, dtype: str, attention: str) -> tuple:
    """How the model was built, without recomputation of blocks, so that its attention is the one asked for, if there is
    a way; it; and what its forward kept and counted."""
    name = {"fused": "sdpa", "unfused": "eager", "recomputed": "recomputed"}[attention]
    ways = [{"attention": name, "dropout": True}]
    if attention == "fused":  # torch's fused kernel for CPUs, which is counted here, has no dropout
        ways += [{"attention": name, "dropout": False}, {"attention": "eager", "dropout": True}]
    for number, how in enumerate(ways):
        try:
            whole = dataclasses.replace(model, recompute=False).build(DTYPES[dtype], **how)
        except ValueError:  # the library says that it has none
            if number == len(ways) - 1:
                raise
            continue
        counter = FlopCounterMode(display=False, custom_mapping=FUSED)
        with counter:
            kept, inputs = saved(whole, model, batch)
        counts = counter.get_flop_counts()["Global"]
        if number == len(ways) - 1 or kind_of(name, counts) == "fused":
            return how, whole, kept, inputs, counts


def kind_of(name: str, counts: dict) -> str:
    """Which attention ran, by the operators that were counted."""
    if any("scaled_dot_product" in str(operator) for operator in counts):
        return "fused"
    return "recomputed" if name == "recomputed" else "unfused"


def batch_of(model: ForeignModel, batch: int) -> torch.Tensor:
    return torch.zeros(batch, model.sequence, dtype=torch.int64)


def shapes(model: nn.Module, foreign: ForeignModel) -> dict:
    """How many elements lie where."""
    root, *units = find_units(model)
    sizes = [sum(param.numel() for param in unit.params) for unit in units]
    heads = [param.numel() for param in over_words(root, foreign)]
    return {
        "parameters": sum(param.numel() for param in model.parameters()), "units": len(units),
        "blocks": tuple(dict.fromkeys(unit.name.rpartition(".")[0] for unit in units)),
        "largest_unit": max(sizes, default=0), "root": sum(param.numel() for param in root.params),
        "head": max(heads, default=0), "tied": len(heads) < 2,
        "largest_matrix": max((param.numel() for unit in units for param in unit.params), default=0),
    }


def over_words(root: Unit, foreign: ForeignModel) -> list[nn.Parameter]:
    """The matrices of embedding and head: one if they are tied."""
    return [param for param in root.params if param.ndim == 2 and param.shape[0] == foreign.config.vocab_size]


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


def operations(forward: dict, head: int, recompute: bool, again: bool, kind: str) -> dict:
    """Operations of a step, from those of its forward, by operator: each product has two gradients of the same size,
    and all but the head's is computed again if blocks are, attention alone if that is recomputed (`again`)."""
    ours = "attention" if kind == "fused" else "bmm"  # unfused, its products are the ones of batches of matrices
    attention = sum(count for operator, count in forward.items() if ours in str(operator))
    matrices = sum(forward.values()) - attention
    backward = BACKWARD_OF_ATTENTION if kind == "fused" else 2
    return {"matrix_operations": 3 * matrices + (matrices - head if recompute else 0),
            "attention_operations": round(attention * (1 + backward + (1 if again else 0)))}


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
        undo.enter_context(HeadsGradient(over_words(find_units(model)[0], foreign), ledger, mark))
        tokens = batch_of(foreign, batch)
        model(tokens, tokens).backward()
        mark("end")
    windows = {"logits": ("logits", f"unit {len(units) - 1}"), "top": (f"unit {len(units) - 1}", None),
               "bottom": ("unit 0", None), "embedding": ("input", "end"), "head": ("head", None)}
    timeline = ledger.timeline
    found = {name: highest_between(timeline, marks, *window) for name, window in windows.items()}
    found["with_head"] = found.pop("head")
    return found


class HeadsGradient(TorchDispatchMode):
    """Tells when the gradient of the head comes. Where embedding and head are one they have two gradients, which
    autograd adds up: neither is ever handed to the parameter, and the ledger, that takes them for activations, is told.
    """

    PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.embedding_dense_backward)

    def __init__(self, matrices: list[nn.Parameter], ledger: Ledger, mark):
        super().__init__()
        self.ledger, self.mark, self.tied = ledger, mark, len(matrices) == 1
        self.sizes = {param.untyped_storage()._cdata: sorted(param.shape) for param in matrices}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1 and operator.overloadpacket in self.PRODUCTS:
            of_input = any(arg.untyped_storage()._cdata in self.sizes for arg in tensors_in(args))
            if not of_input and sorted(result.shape) in self.sizes.values():
                if self.tied:
                    self.ledger.claim(result, "gradients")
                if operator.overloadpacket is torch.ops.aten.mm:
                    self.mark("head")
        return result


def watch_input(mark):
    """A hook that marks when backward has left the first unit."""

    def hook(module, args, kwargs):
        first = next(tensors_in((args, kwargs)))
        if first.requires_grad and torch._C._current_graph_task_id() == -1:
            first.register_hook(lambda gradient: mark("input"))

    return hook


def highest_between(timeline: list, marks: list, start: str, end: str | None) -> int:
    """The most bytes of activations from one mark to another; None: to the next one. 0 if nobody marked it."""
    names = [name for name, _ in marks]
    if start not in names:
        return 0
    place = names.index(start)
    begins = marks[place][1]
    ends = marks[names.index(end) if end else place + 1][1]
    return max((moment.bytes["activations"] for moment in timeline if begins <= moment.seconds <= ends), default=0)
