"""Wrong and cheating systems for the budget: where each is caught, and the words that must be heard.

seen    "text"        before a line of it runs
        "simulated"   on simulated ranks: the small twins, and a model on 64 of them
        "real"        on three real ranks, beside these
        "score"       by the track's limit, or the bound
"""

from dataclasses import dataclass

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from zero_minimal.stage3 import Stage3


class Mine(Stage3):
    {methods}


def build(model, group, budget):
    {first}
    return Mine(model, AdamW, group=group, **budget.options)
"""


def system(methods="pass", first="pass", top=""):
    """The text of a system: Stage3 with some methods of its own."""
    indented = methods.strip().replace("\n", "\n    ")
    return top + HEAD.format(methods=indented, first=first)


RESTORE = "from zero_minimal.core.units import restore\n"
FILLED = """
def fill(self, unit):  # memory for its parameters, and nothing that comes there
    for bucket in unit.buckets if unit else ():
        bucket.parameters.untyped_storage().resize_(bucket.padded * 2)
        for param in bucket.params:
            restore(param, bucket.flat.view(bucket.parameters, param))
        unit.whole = True
"""


@dataclass(frozen=True)
class Wrong:
    seen: str
    message: str  # a pattern
    text: str


WRONG = {
    "asks for the backend": Wrong("text", "uses get_backend: it could tell simulated ranks from real", system(
        first="fake = dist.get_backend() == 'fake'")),
    "asks whether there are values": Wrong("text", "imports zero_minimal.core.seams", system(
        top="from zero_minimal.core.seams import tell\n")),
    "asks by a module": Wrong("text", "imports zero_minimal.core", system(
        top="from zero_minimal.core import seams as s\n")),
    "looks for fake tensors": Wrong("text", "imports|uses", system(
        top="from torch._subclasses.fake_tensor import FakeTensor\n")),
    "looks by a computed name": Wrong("text", "with a computed name: write the name", system(
        first="fake = getattr(dist, 'get_' + 'backend')() == 'fake'")),
    "looks by a name in a text": Wrong("text", "uses get_backend", system(
        first="fake = getattr(dist, 'get_backend')() == 'fake'")),
    "memory in numpy": Wrong("text", "line 1 imports numpy", system(top="import numpy\n")),
    "memory in a tensor's numpy": Wrong("text", "uses numpy: the ledger does not see", system(
        first="kept = torch.zeros(8).numpy()")),
    "memory in C": Wrong("text", "imports ctypes", system(top="import ctypes\n")),
    "work in threads": Wrong("text", "imports threading", system(top="import threading\n")),
    "activations on the host": Wrong("text", "uses save_on_cpu: the ledger does not see", system(
        first="hooks = torch.autograd.graph.save_on_cpu()")),
    "a part of the course that moves things to the host": Wrong("text", "imports zero_minimal.offloading", system(
        top="from zero_minimal.offloading import host\n")),
    "a store for messages": Wrong("text", "uses TCPStore: the meter does not see", system(
        first="store = dist.TCPStore('localhost', 0)")),
    "process groups of its own": Wrong("text", "uses new_group: the meter does not see", system(
        first="own = dist.new_group([0])")),
    "text that is run": Wrong("text", "uses exec", system(first="exec('pass')")),

    "gathers less on many ranks": Wrong(
        "simulated", r"line \d+, in Mine.(fill|_gather), runs on simulated ranks and not on real", system(FILLED + """
def _gather(self, unit):
    if self.world_size > 8 and self.reducer.running and not unit.whole:
        self.fill(unit)
    super()._gather(unit)
""", top=RESTORE)),
    "gathers less, by arithmetic": Wrong(
        "simulated", "no collective has brought it since the last step", system(FILLED + """
def _gather(self, unit):
    for one in [unit] * min(1, self.world_size // 8 * self.reducer.running * (not unit.whole)):
        self.fill(one)
    super()._gather(unit)
""", first="Mine.fill(None, None)", top=RESTORE)),
    "keeps the values of the first step": Wrong("simulated", "no collective has brought it since the last step", system(
        "def _release(self, unit):\n    self._arrive(unit)")),

    "gradients summed": Wrong("real", "the loss of step 2 on rank 0 is .* at stage 0: they must agree bit", system(
        "def _wait(self):\n    if self.reducing:\n        shard = self.reducing.shard\n"
        "        self.reducing.pending.wait()\n        shard *= self.world_size\n    super()._wait()")),
    "masters in 16 bit": Wrong("real", "the loss of step [23] on rank 0", system(
        "def own(self, bucket):\n    super().own(bucket)\n"
        "    bucket.master = nn.Parameter(bucket.parameter_shard.clone())")),
    "something of each step stays": Wrong("real", "at the end of step 3, and .* something of each step stays", system(
        "def step(self):\n    super().step()\n"
        "    self.past = (self.past if hasattr(self, 'past') else []) + [torch.zeros(100)]")),
    "a later step sends more": Wrong("real", "bytes in steps 1 to 3: a step must send what the second sends", system(
        "def step(self):\n    super().step()\n    self.count = (self.count if hasattr(self, 'count') else 0) + 1\n"
        "    if self.count == 3:\n        dist.all_reduce(torch.zeros(64))")),
    "optimizer state twice": Wrong("real", r"keeps .* of optimizer state; 12Ψ/N are", system(
        "def step(self):\n    super().step()\n    for bucket in self.buckets:\n"
        "        state = self.optimizer.state[bucket.master]\n"
        "        if 'again' not in state:\n            state['again'] = torch.zeros_like(bucket.master)")),

    "the budget is met for model states": Wrong("score", "its peak is .*, and the limit .*: it does not fit", ""),
    "memory under another name": Wrong("score", "it keeps .* in host memory", ""),
    "less than can be": Wrong("score", "no system that trains this model can do with less", ""),
}
