"""Ways to train on a mesh, from data parallelism to C5, all on the same 16 sequences, and a rank's measurements of a
step. Lesson 10's notebook runs them on four ranks. Only bytes are counted, never time.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, optim

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.core import collectives
from zero_minimal.core.gradient_memory import GradientMemory
from zero_minimal.core.mesh import Mesh
from zero_minimal.defragmentation import Slab
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.offloading import host
from zero_minimal.paper.formulas import STATES
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.tensor_parallel import ParallelGPT
from zero_minimal.workload.model import GPTConfig
from zero_minimal.zero_100b import CONFIGS, ConstantMemory, System

SEQUENCES = 16  # all replicas together, per step
SIZES = GPTConfig(layers=6, hidden=240, heads=12, sequence=128, vocabulary=256, dropout=0.0)
CATEGORIES = (*STATES, "activations", "buffers")
BUCKET, LARGE = 2**19, 4 * 2**20  # bytes
OPTIONS = dict(lr=1e-3)


class BuffersAlone(ConstantMemory):
    """C_B without M_D: two constant buffers, and new memory for each shard."""

    def __init__(self, buckets, group=None):
        super().__init__(buckets, group)
        del self.slab, self.home_of

    shard = GradientMemory.shard


class SlabAlone(ConstantMemory):
    """M_D without C_B: shards in a slab, and new memory for each bucket of whole gradients."""

    def __init__(self, buckets, group=None):
        super().__init__(buckets, group)
        del self.constant_buffers

    whole, give_back = GradientMemory.whole, GradientMemory.give_back


@dataclass(frozen=True)
class Way:
    """One way to train on the mesh: how ranks share a model, and how replicas train."""

    stage: type = Stage0
    shares_a_model: bool = False  # over M ranks; otherwise M is 1, and each rank is a replica
    checkpoints: bool = True
    config: str = ""  # "C1" … "C5": that System instead of a stage
    partition: bool = False  # P_a
    to_host: bool = False  # P_a+cpu
    slab: bool = False  # M_D for checkpoints
    options: dict = field(default_factory=dict)  # options of the stage


LADDER: dict[str, Way] = {
    "data parallel": Way(checkpoints=False), "checkpoints": Way(), "P_os": Way(Stage1), "P_os+g": Way(Stage2),
    "P_os+g+p": Way(Stage3), "model parallel": Way(shares_a_model=True),
    **{name: Way(shares_a_model=True, config=name) for name in CONFIGS},
}
PLAIN = Way(Stage2, shares_a_model=True)
WORTH: dict[str, Way] = {  # P_os+g on a mesh, plus one part
    "none": PLAIN,
    "C_B": replace(PLAIN, options={"memory": BuffersAlone}),
    "M_D, gradients": replace(PLAIN, options={"memory": SlabAlone}),
    "M_D, checkpoints": replace(PLAIN, slab=True),
    "P_a": replace(PLAIN, partition=True),
    "P_a+cpu": replace(PLAIN, partition=True, to_host=True),
    "all: C4": LADDER["C4"],
    "all: C5": LADDER["C5"],
}
MESHES = {2: 2, 3: 3, 4: 2}  # {ranks: M}, if there are not the page's four


# ----------------------------------------------------------------------------------------------------------- in a rank


def batch(mesh: Mesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """The share of the SEQUENCES that this rank's replica reads: tokens and targets [SEQUENCES / D, sequence]."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZES.vocabulary, (SEQUENCES, SIZES.sequence + 1), generator=draw)
    mine = tokens.tensor_split(dist.get_world_size(mesh.data_group))[mesh.data_rank].to(device)
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def made(way: Way, mesh: Mesh, device: torch.device, bucket_bytes: int = BUCKET, system_class: type = System):
    """A stage, or the System of a config, with a model that starts the same for every way. system_class: the lesson's,
    or a learner's own."""
    torch.manual_seed(0)
    sequences = len(batch(mesh, device)[0])
    options = dict(bucket_bytes=bucket_bytes, **OPTIONS)
    if way.config:
        return system_class(way.config, SIZES, mesh, sequences, torch.float32, device, optim.AdamW, **options)
    model = ParallelGPT(SIZES, mesh.model_group).to(device)
    slab = None
    if way.slab:
        slab = Slab(sequences * SIZES.sequence * SIZES.hidden * SIZES.layers, device=device)
        model.register_forward_pre_hook(lambda *_: slab.reset())
    if way.checkpoints:
        checkpoint_blocks(model, group=mesh.model_group if way.partition else None, to_host=way.to_host,
                          place=slab.keep if slab else None)
    zero = way.stage(model, optim.AdamW, group=mesh.data_group, **way.options, **options)
    zero.slab = slab
    return zero


def seen(way: Way, mesh: Mesh, device: torch.device, bucket_bytes: int = BUCKET, system_class: type = System) -> dict:
    """The second step of a way, as measured on rank 0: bytes by category on the device at the peak, of model states
    after the step, of copies in host memory, bytes sent; the losses of both steps, averaged over the replicas. Tensors
    without a category are left out: tokens, and copies for the host, which on a CPU is the device."""
    tokens, copies, losses = batch(mesh, device), [], []

    def count(copy):
        copies.append(copy.nbytes)
        ledger.claim(copy, "other")

    with Ledger(device.type) as ledger:
        zero = made(way, mesh, device, bucket_bytes, system_class)
        ledger.watch(zero)
        for _ in range(2):
            ledger.reset()
            copies.clear()
            with host.announced(count), TrafficMeter() as meter:
                loss = zero.model(*tokens)
                loss.backward()
                kept_on_host = sum(copies)
                zero.step()
                zero.zero_grad()
            losses.append(loss.detach() * len(tokens[0]) / SEQUENCES)
        states = ledger.states()
        moments = [{name: moment.bytes[name] for name in CATEGORIES} for moment in ledger.timeline]
        peak = max(moments, key=lambda held: sum(held.values()))
    for value in losses:
        collectives.all_reduce(value, op="sum", group=mesh.data_group)
    return {"peak_by_category": peak, "peak": sum(peak.values()), "states": {name: states[name] for name in STATES},
            "host": kept_on_host, "sent": meter.sent_bytes, "losses": [value.item() for value in losses]}
