"""The program of lesson 6: a step with and without P_a: what is kept for backward, what is sent, and the same result.

    torchrun --nproc-per-node 2 zero_minimal/activation_partitioning.py
"""

import torch
import torch.distributed as dist

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.foundations import host, interrupts, ranks
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.programs import progress
from zero_minimal.programs.report import say, table
from zero_minimal.workload.model import GPT, GPTConfig


@interrupts.program
def main() -> None:
    """Measure each mode; rank 0 prints the table."""
    with ranks.start() as rank:
        everybody = dist.group.WORLD
        modes = {"no checkpoints": None, "checkpoints": {}, "P_a": dict(group=everybody),
                 "P_a+cpu": dict(group=everybody, to_host=True)}
        bar = progress.bar(modes.items(), name="a step of each", total=len(modes), unit="mode", shown=rank.rank == 0)
        rows = [measure(name, options, rank.device) for name, options in bar]
        if rank.rank == 0:
            print(f"model-parallel group of {rank.world_size}; a block's input has 8 × 256 × 256 elements, 2.1 MB\n")
            head = ["kept for backward", "MB on the device", "in host memory", "MB sent", "loss",
                    "norm of the gradient"]
            print(table([head, *rows]))
            if rank.device.type == "cpu":
                say("\nWithout a GPU both are the same memory: it is counted as what it stands for.")


def measure(name: str, options: dict | None, device: torch.device) -> list[str]:
    """A step of a model that all ranks compute alike, as model-parallel ranks do: what is kept, sent, learned."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence=256, dropout=0.1)).to(device)
    tokens = torch.randint(256, (8, 257), device=device)
    if options is not None:
        checkpoint_blocks(model, **options)
    on_host = []

    def count(copy):
        on_host.append(copy.nbytes)
        ledger.claim(copy, "other")  # no activation of the device's

    with Ledger(device) as ledger, TrafficMeter() as meter:
        ledger.watch(model)
        with host.announced(count):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        kept = ledger.states()["activations"]
        loss.backward()
    norm = sum(param.grad.square().sum() for param in model.parameters()).sqrt()
    return [name, f"{kept / 1e6:.1f}", f"{sum(on_host) / 1e6:.1f}", f"{meter.sent_bytes / 1e6:.1f}", f"{loss:.6f}",
            f"{norm:.6f}"]
