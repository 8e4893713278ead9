"""ZeRO on one page: data parallelism and its three stages (arXiv:1910.02054), on plain PyTorch.

    torchrun --nproc-per-node 2 zero_minimal/one_page.py

N ranks train one model, each on its own batch. A model of Ψ parameters takes 4Ψ bytes of fp32
parameters, 4Ψ of gradients and 8Ψ of Adam's state, and data parallelism keeps all of it N times.

              bytes a rank holds                    numbers that a
              parameters   gradients   optimizer   rank sends in a step
    Naive     4Ψ           4Ψ          8Ψ          2Ψ(N−1)/N
    Stage1    4Ψ           4Ψ          8Ψ/N        2Ψ(N−1)/N
    Stage2    4Ψ           4Ψ/N        8Ψ/N        2Ψ(N−1)/N
    Stage3    4Ψ/N         4Ψ/N        8Ψ/N        3Ψ(N−1)/N

A block is an element of an nn.ModuleList, such as a transformer layer. A unit is a block, or the
rest: all that is in no block. (The unit at work is whole. Stage3 sends the rest only twice.) n is
how many numbers a unit has, with padding to a multiple of N. The optimizer must be element-wise, as
Adam and SGD are: a shard may begin in the middle of a parameter.

The stage files add what is left out here: buckets, overlap, prefetch, accumulation, clipping,
parameter groups, groups of ranks, running statistics, sums of 16-bit gradients in fp32, shards of
frozen parameters, freeing after an evaluation, most refusals, models too large for one rank.
"""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

# PyTorch 2.13 has renamed these two
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ------------------------------------------------------------------------------- three collectives


def all_reduce(vector: Tensor) -> None:
    """[n] on every rank → the mean of all, [n], on every rank, in place."""
    dist.all_reduce(vector)
    vector /= dist.get_world_size()


def reduce_scatter(whole: Tensor) -> Tensor:
    """[n] on every rank → rank r gets the mean over all ranks of part r, [n/N]."""
    shard = whole.new_empty(whole.numel() // dist.get_world_size())
    _reduce_scatter(shard, whole)
    return shard / dist.get_world_size()


def all_gather(whole: Tensor, shard: Tensor) -> None:
    """[n/N] on every rank → `whole` [n]: all parts in rank order, everywhere."""
    _all_gather(whole, shard.clone())  # a copy: in stages 1 and 2 the shard lies in `whole`


# ---------------------------------------------------------------------- what is sent as one vector


class Unit:
    """Parameters of a block, or the rest, side by side in one vector [n]. Rank r owns part r [n/N]:

    whole    | weight ······················ | bias ··· | padding |
    shards   |     rank 0     |     rank 1     |     rank 2     |
    """

    def __init__(self, module: nn.Module, params: list[nn.Parameter], keeps_whole: bool):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        assert len({param.dtype for param in params}) == 1, "parameters of a unit have one dtype"
        self.module, self.params = module, params  # the rest has the whole model as its module
        self.shapes = [param.shape for param in params]  # those of a freed parameter are lost
        # rounded up to a multiple of N
        self.n = -(-sum(param.numel() for param in params) // ranks) * ranks
        self.whole = torch.zeros(self.n, dtype=params[0].dtype, device=params[0].device)  # [n]
        for param, view in self.views(self.whole):
            view.copy_(param.data)
            param.data = view
        dist.broadcast(self.whole, 0)  # all ranks begin with rank 0's values
        own = self.whole.view(ranks, -1)[rank]
        self.shard = own if keeps_whole else own.clone()  # [n/N] what this rank updates
        # [n/N] for the optimizer: an fp32 copy of a 16-bit shard; else the shard itself, no copy
        self.master = nn.Parameter(self.shard.float() if self.whole.itemsize < 4 else self.shard)
        self.gradient: Tensor | None = None  # [n/N] the mean gradient of the shard
        self.missing = set(params)  # those without a gradient so far (Stage2)

    def views(self, vector: Tensor):
        """(parameter, its part of the vector in its shape) for each."""
        start = 0
        for param, shape in zip(self.params, self.shapes, strict=True):
            yield param, vector[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def reduce(self) -> None:
        """Every rank's .grad → `gradient`, [n/N]; then .grad is freed."""
        whole = torch.zeros(self.n, dtype=self.whole.dtype, device=self.whole.device)  # [n]
        for param, view in self.views(whole):
            if param.grad is not None:  # a missing gradient counts as zero
                view.copy_(param.grad)
            param.grad = None
        self.gradient = reduce_scatter(whole)
        self.missing = set(self.params)


def units_of(model: nn.Module, keeps_whole: bool) -> list[Unit]:
    """A unit for each block, which is an element of a module list, and one for the rest. What two
    blocks share is in the rest."""
    blocks: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
            blocks.append(child) if is_block else look(child)

    look(model)
    owners = Counter(param for block in blocks for param in set(block.parameters()))
    parts = [(model, [param for param in model.parameters() if owners[param] != 1])]
    parts += [(block, [param for param in block.parameters() if owners[param] == 1])
              for block in blocks]
    trained = [(module, [param for param in params if param.requires_grad])
               for module, params in parts]
    return [Unit(module, params, keeps_whole) for module, params in trained if params]


# ------------------------------------------------------------------------------------ four systems


class Naive:
    """Everything everywhere. In step(): all-reduce, update. (fp32 only: no fp32 copies.)"""

    def __init__(self, model: nn.Module, optimizer_class: type, **options):
        self.params = [param for param in model.parameters() if param.requires_grad]
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)
        self.optimizer = optimizer_class(self.params, **options)

    def step(self) -> None:
        for param in self.params:  # reduce
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            all_reduce(param.grad)
        self.optimizer.step()  # the same update on every rank
        self.optimizer.zero_grad()


class Stage1:
    """P_os, optimizer state partitioned. In step(): reduce-scatter, update, all-gather."""

    keeps_whole = True

    def __init__(self, model: nn.Module, optimizer_class: type, **options):
        self.units = units_of(model, self.keeps_whole)
        frozen = [param for param in model.parameters() if not param.requires_grad]
        for tensor in [*frozen, *model.buffers()]:  # these are in no unit
            dist.broadcast(tensor.data, 0)
        # the optimizer sees one of N shards, so it keeps 1/N of the state
        self.optimizer = optimizer_class([unit.master for unit in self.units], **options)

    def step(self) -> None:
        for unit in self.units:
            unit.reduce()
        self.update()
        for unit in self.units:
            all_gather(unit.whole, unit.shard)  # [n/N] → [n]

    @torch.no_grad()
    def update(self) -> None:
        for unit in self.units:
            unit.master.grad = unit.gradient.to(unit.master.dtype)  # [n/N]
        self.optimizer.step()
        for unit in self.units:
            unit.shard.copy_(unit.master)  # rounds, if parameters are in 16 bit
            unit.gradient = unit.master.grad = None


class Stage2(Stage1):
    """P_os+g, gradients partitioned too. When a unit has all its gradients, and the units before it
    in `waiting` are reduced, backward reduces them and frees .grad. In step(): update, all-gather.
    One backward a step."""

    def __init__(self, model: nn.Module, optimizer_class: type, **options):
        super().__init__(model, optimizer_class, **options)
        # to be reduced, in this order: the last block first, as backward goes; the rest at the end
        self.waiting = self.units[::-1]
        for unit in self.units:
            for param in unit.params:
                param.register_post_accumulate_grad_hook(partial(self.came, unit))

    def came(self, unit: Unit, param: nn.Parameter) -> None:
        """A gradient has come. All ranks must reduce in the same order, so a complete unit waits
        for those before it in `waiting`: another rank may have completed them first."""
        if unit not in self.waiting:
            raise RuntimeError("call step() after each backward, or use stage2.py, which adds up")
        unit.missing.discard(param)
        while self.waiting and not self.waiting[0].missing:
            self.reduce(self.waiting.pop(0))

    def reduce(self, unit: Unit) -> None:
        unit.reduce()

    def finish(self) -> None:
        """Reduce the units that still wait: they, or one before them, lack a gradient."""
        for unit in self.waiting:
            self.reduce(unit)
        self.waiting = self.units[::-1]

    def step(self) -> None:
        self.finish()
        self.update()
        for unit in self.units:
            all_gather(unit.whole, unit.shard)


class Stage3(Stage2):
    """P_os+g+p, parameters partitioned too. A block is whole while it works, or waits:

    forward    gather, compute, free          backward    gather, compute, reduce, free
    In step(): update. The rest is gathered in forward, and stays until it is reduced.
    All ranks must call the same blocks in the same order, with gradients for the same
    parameters. If they do not, this file hangs; stage3.py works, or says why not.
    """

    keeps_whole = False

    def __init__(self, model: nn.Module, optimizer_class: type, **options):
        super().__init__(model, optimizer_class, **options)
        for unit in self.units:
            self.free(unit)
            module, gather = unit.module, lambda *_, u=unit: self.gather(u)
            module.register_forward_pre_hook(gather)
            if module is not model:
                module.register_forward_hook(lambda *_, u=unit: self.after_forward(u))
                module.register_full_backward_pre_hook(gather)

    def gather(self, unit: Unit) -> None:
        """[n/N] on every rank → the unit's parameters, whole."""
        if unit.whole.untyped_storage().size() == 0:
            unit.whole.untyped_storage().resize_(unit.n * unit.whole.itemsize)
            all_gather(unit.whole, unit.shard)
            for param, view in unit.views(unit.whole):
                param.data = view

    def free(self, unit: Unit) -> None:
        """Only this rank's shard stays. Autograd has saved the parameters, or views of
        `whole`: gather() gives the same storage memory, and its values, again."""
        for param in unit.params:
            param.data = param.data.new_empty(0)
        unit.whole.untyped_storage().resize_(0)

    def after_forward(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() == -1:  # else backward recomputes
            self.free(unit)

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.free(unit)  # it has all gradients: backward needs it no more

    def step(self) -> None:
        self.finish()
        for unit in self.units:
            self.free(unit)  # an evaluation may have gathered it since
        self.update()


if __name__ == "__main__":
    from zero_minimal.programs.one_page_run import main

    main()
