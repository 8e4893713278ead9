"""Plain: what the stages must agree with. One process plays all ranks, each with a model and a torch optimizer of its
own, and averages their gradients; nothing of ZeRO is in it.

The ranks are threads that take turns: one runs until it has to meet the others (in step(), say), then the next.
"""

import contextlib
import copy
import threading

import torch
from torch import nn


class Turn:
    """A rank's seat at the table."""

    def __init__(self, table, rank):
        self.table, self.rank, self.size, self.meetings = table, rank, table.size, 0

    def meet(self, value) -> list:
        """Give a value, and get those of all ranks when the last has come."""
        met = self.table.met.setdefault(self.meetings, {})
        self.meetings += 1
        met[self.rank] = value
        state = torch.get_rng_state()  # there is one for all threads
        self.table.next_after(self.rank)
        self.table.wait_for(self.rank)
        torch.set_rng_state(state)
        if len(met) < self.size:
            raise RuntimeError("another rank has ended already")
        return [met[rank] for rank in range(self.size)]


class Table:
    def __init__(self, size):
        self.size, self.turn, self.met, self.ended = size, 0, {}, []
        self.changed = threading.Condition()

    def wait_for(self, rank):
        with self.changed:
            if not self.changed.wait_for(lambda: self.turn == rank, timeout=60):
                raise TimeoutError(f"it is never rank {rank}'s turn")

    def next_after(self, rank):
        others = [(rank + distance) % self.size for distance in range(1, self.size + 1)]
        with self.changed:
            self.turn = next((other for other in others if other not in self.ended), None)
            self.changed.notify_all()


def play_in_turn(play, size: int) -> list:
    """play(turn) as each rank; the results, rank 0's first."""
    table, results = Table(size), [None] * size

    def run(rank):
        torch.set_num_threads(1)
        table.wait_for(rank)
        results[rank] = play(Turn(table, rank))
        table.ended.append(rank)
        table.next_after(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


class Plain:
    """The stages' interface, over plain PyTorch. 16-bit parameters have fp32 masters. A parameter without a gradient
    counts as one whose gradient is zero."""

    def __init__(self, turn, model, optimizer_class, *, param_groups=None, bucket_bytes=None, group=None, **options):
        self.turn, self.model = turn, model
        own = [*model.parameters(), *model.buffers()]
        for tensor, first in zip(own, turn.meet([tensor.detach().clone() for tensor in own])[0], strict=True):
            tensor.data.copy_(first)
        self.params = [param for param in model.parameters() if param.requires_grad]
        groups = [dict(group) for group in param_groups or [{"params": self.params}]]
        self.masters = {param: nn.Parameter(param.detach().float()) if param.element_size() < 4 else param
                        for param in self.params}
        for group in groups:
            listed = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
            group["params"] = [self.masters[param] for param in listed if param.requires_grad]
        trained = {param for group in groups for param in group["params"]}
        self.params = [param for param in self.params if self.masters[param] in trained]
        self.optimizer = optimizer_class(groups, **options)
        self.scale = 1.0  # clipping and loss scale

    def no_sync(self):
        return contextlib.nullcontext()

    def average(self):
        """Average .grad over the ranks. Once more does no harm: an average of equal gradients is what they are."""
        given = self.turn.meet([None if p.grad is None else p.grad.to_dense().clone() for p in self.params])
        for param, grads in zip(self.params, zip(*given, strict=True), strict=True):
            present = [grad for grad in grads if grad is not None]
            param.grad = sum(present, torch.zeros_like(param)) / len(grads)

    def clip_grad_norm_(self, max_norm):
        self.average()
        wide = [param.grad.to(self.masters[param].dtype) * self.scale for param in self.params]
        norm = nn.utils.get_total_norm(wide)
        self.scale = self.scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def step(self):
        self.average()
        before = {param: param.grad for param in self.params}
        for param, master in self.masters.items():
            if param.grad is not None:
                if master is not param:  # edits of the model are kept
                    edited = param.data != master.data.to(param.dtype)
                    master.data[edited] = param.data[edited].float()
                master.grad = param.grad.to(master.dtype) * self.scale
        self.optimizer.step()
        for param, master in self.masters.items():
            if master is not param:
                param.data.copy_(master.data)
        for param, grad in before.items():
            param.grad = grad
        self._share_statistics()

    def _share_statistics(self):
        kept = self.model.state_dict().keys()
        own = [buffer for name, buffer in self.model.named_buffers()
               if buffer.is_floating_point() and name in kept]
        for buffer, first in zip(own, self.turn.meet([buffer.clone() for buffer in own])[0], strict=True):
            buffer.copy_(first)

    def zero_grad(self):
        self.scale = 1.0
        for param in self.model.parameters():
            param.grad = None

    def reduced_gradients(self):
        self.average()
        return [param.grad for param in self.params]

    def gather_parameters(self):
        return contextlib.nullcontext()

    def state_dict(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                              "masters": [master.data for master in self.masters.values()]})

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self.masters.values(), state["masters"], strict=True):
            master.data.copy_(saved)


class PlainScaler:
    """A loss scale, as torch.amp.GradScaler's."""

    def __init__(self, scale, growth_interval=2000):
        self.value, self.growth_interval, self.good, self.unscaled, self.skipped = scale, growth_interval, 0, 0, False

    def scale(self, loss):
        return loss * self.value

    def unscale_(self, zero):
        if not self.unscaled:
            zero.scale = zero.scale / self.value
            self.unscaled = True

    def step(self, zero):
        self.unscale_(zero)
        zero.average()
        self.skipped = not all(param.grad.isfinite().all() for param in zero.params)
        if not self.skipped:
            zero.step()
        return not self.skipped

    def update(self):
        self.value = self.value / 2 if self.skipped else self.value
        self.good = 0 if self.skipped else self.good + 1
        if self.good and self.good % self.growth_interval == 0:
            self.value *= 2
        self.unscaled = False
