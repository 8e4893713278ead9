"""Measured: what a model of transformers keeps and computes, for `plan`, since our formulas do not cover it.

Two passes on fake tensors, which have sizes and no memory:

    forward               bytes kept for backward without recomputation, by torch's saved_tensors_hooks; operations
    forward, backward     the most activations at each moment of a step, under the memory ledger
"""

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

# torch's counter knows only the fused attention of GPUs; the same counts hold for the CPU's
FUSED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
BACKWARD_OF_ATTENTION = 5 / 2  # fused: five products, where forward has two


@dataclass(frozen=True)
class Measured:
    """Elements of parameters; bytes of activations; operations of a step."""

    parameters: int
    units: int  # blocks, each of which stage 3 gathers as a whole
    blocks: tuple[str, ...]  # names of the lists that hold them
    largest_unit: int
    root: int  # all that is outside the blocks
    head: int  # the largest matrix of the root: the embedding's or the head's
    tied: bool  # embedding and head share one weight
    largest_matrix: int  # in a unit
    all: int  # bytes that blocks and root keep for backward without recomputation
    checkpoints: int  # inputs of the units
    logits: int  # peak of activations while the loss is computed, including what blocks keep
    with_head: int  # when the head's gradient is computed
    top: int  # while backward is in the last block
    bottom: int  # in the first block
    embedding: int  # after the first block
    matrix_operations: int
    attention_operations: int  # of whole products
    attention: str  # the kind that ran
    dropout: bool  # whether the model ran with its file's dropout


@dataclass(frozen=True)
class MeasuredWork(Work):
    """Measured values in place of the formulas for our GPT. config: a ForeignModel."""

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
        """The update needs two copies in fp32, and a flag for edited elements."""
        found = self.found
        return Parts(found.parameters, found.largest_unit, found.root, found.head, found.largest_matrix,
                     bucketed=found.parameters, tied=found.tied, update_bytes=9)

    def operations(self) -> tuple[float, float]:
        """A fused causal kernel skips half of attention; an encoder's computes all of it."""
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
    """Measure a step of this model with `batch` sequences on one rank. Raises: ValueError for a kind of attention that
    the library does not have for it."""
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
    """Build the model without recomputation of blocks, if possible with the requested attention. Returns the options
    used, the model, and what its forward kept and counted."""
    name = {"fused": "sdpa", "unfused": "eager", "recomputed": "recomputed"}[attention]
    ways = [{"attention": name, "dropout": True}]
    if attention == "fused":  # the CPU's fused kernel, which is counted here, has no dropout
        ways += [{"attention": name, "dropout": False}, {"attention": "eager", "dropout": True}]
    for number, how in enumerate(ways):
        try:
            whole = dataclasses.replace(model, recompute=False).build(DTYPES[dtype], **how)
        except ValueError:  # the library has no such attention
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
    """Which kind of attention ran, according to the counted operators."""
    if any("scaled_dot_product" in str(operator) for operator in counts):
        return "fused"
    return "recomputed" if name == "recomputed" else "unfused"


def shapes(model: nn.Module, foreign: ForeignModel) -> dict:
    """The numbers of elements in the model's parts."""
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
    """The matrices of embedding and head: only one if they are tied."""
    return [param for param in root.params if param.ndim == 2 and param.shape[0] == foreign.config.vocab_size]


def saved(model: nn.Module, foreign: ForeignModel, batch: int) -> tuple[int, int]:
    """Bytes kept for backward, each storage once, without parameters and buffers; and those of units' inputs."""
    not_kept = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept, inputs = {}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in not_kept:
            kept[storage._cdata] = storage  # keep it alive, so that no other storage gets its address
        return tensor

    for unit in find_units(model)[1:]:
        unit.module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({id(module): next(tensors_in((args, kwargs)))}),
            with_kwargs=True)
    tokens = torch.zeros(batch, foreign.sequence, dtype=torch.int64)
    not_kept.add(tokens.untyped_storage()._cdata)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens)
    del loss
    return sum(storage.nbytes() for storage in kept.values()), sum(tensor.nbytes for tensor in inputs.values())


def operations(forward: dict, head: int, recompute: bool, again: bool, kind: str) -> dict:
    """Operations of a step, computed from those of forward by operator: each product has two gradients of the same
    size; recomputed blocks repeat all but the head's, recomputed attention (`again`) only its own."""
    ours = "attention" if kind == "fused" else "bmm"  # unfused attention uses only batched products
    attention = sum(count for operator, count in forward.items() if ours in str(operator))
    matrices = sum(forward.values()) - attention
    backward = BACKWARD_OF_ATTENTION if kind == "fused" else 2
    return {"matrix_operations": 3 * matrices + (matrices - head if recompute else 0),
            "attention_operations": round(attention * (1 + backward + (1 if again else 0)))}


def step(model: nn.Module, foreign: ForeignModel, batch: int) -> dict:
    """The peak of activations at each moment. The model keeps hooks: it is made for this step alone."""
    ledger, marks = Ledger(), []
    units = [unit.module for unit in find_units(model)[1:]]

    def mark(name: str) -> None:
        marks.append((name, ledger.trace[-1].seconds))

    def mark_in_backward(tensors, name: str) -> None:
        first = next(tensors_in(tensors))
        if first.requires_grad and torch._C._current_graph_task_id() == -1:  # not in recomputation
            first.register_hook(lambda gradient: mark(name))

    def after(number: int):
        def hook(module, args, output):
            if number == len(units) - 1 and not marks:
                mark("logits")
            mark_in_backward(output, f"unit {number}")
        return hook

    for number, unit in enumerate(units):
        unit.register_forward_hook(after(number))
    units[0].register_forward_pre_hook(
        lambda module, args, kwargs: mark_in_backward((args, kwargs), "input"), with_kwargs=True)
    with ledger:
        ledger.watch(model)
        with HeadsGradient(over_words(find_units(model)[0], foreign), ledger, mark):
            tokens = torch.zeros(batch, foreign.sequence, dtype=torch.int64)
            model(tokens, tokens).backward()
            mark("end")
    windows = {"logits": ("logits", f"unit {len(units) - 1}"), "top": (f"unit {len(units) - 1}", None),
               "bottom": ("unit 0", None), "embedding": ("input", "end"), "with_head": ("head", None)}
    timeline = ledger.timeline
    return {name: highest_between(timeline, marks, *window) for name, window in windows.items()}


class HeadsGradient(TorchDispatchMode):
    """Marks when the head's gradient is computed. Tied embedding and head have two gradients, which autograd adds up:
    neither reaches the parameter by itself, so the ledger, which would count them as activations, is told.
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


def highest_between(timeline: list, marks: list, start: str, end: str | None) -> int:
    """Peak bytes of activations from one mark to another; None: to the next one. 0 without the first mark."""
    names = [name for name, _ in marks]
    if start not in names:
        return 0
    place = names.index(start)
    begins = marks[place][1]
    ends = marks[names.index(end) if end else place + 1][1]
    return max((moment.bytes["activations"] for moment in timeline if begins <= moment.seconds <= ends), default=0)
