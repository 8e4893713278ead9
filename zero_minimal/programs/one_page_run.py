"""One page's run: train a GPT with each of its four systems, and compare what they hold and send with the formulas."""

import torch

from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.one_page import Naive, Stage1, Stage2, Stage3
from zero_minimal.paper import formulas
from zero_minimal.processes import interrupts, ranks
from zero_minimal.workload import data
from zero_minimal.workload.model import GPT, GPTConfig

STEPS = 20


@interrupts.program
def main() -> None:
    """Train a GPT on Python's own documentation with each of the four systems."""
    with ranks.start() as rank:
        text = data.read_tokens()
        for stage, system in enumerate((Naive, Stage1, Stage2, Stage3)):
            loss, psi, holds, sends = train(system, text, rank)
            of = stage, psi, rank.world_size, "fp32"
            states = sum(formulas.model_states(*of).values())
            if rank.rank == 0:
                print(f"{system.__name__}: loss {loss:.4f}, holds {holds / 1e6:.2f} MB (formula {states / 1e6:.2f}), "
                      f"a step sends {sends / 1e6:.2f} MB (formula {formulas.traffic(*of) / 1e6:.2f})")


def train(system: type, text: torch.Tensor, rank: ranks.Rank) -> tuple[float, int, int, int]:
    """The last loss, the parameters, the bytes held after backward, and the bytes that a step sends."""
    torch.manual_seed(0)
    nothing = held()
    model = GPT(GPTConfig(layers=4, hidden=128, heads=4, sequence=64, dropout=0.0)).to(rank.device)
    psi = sum(param.numel() for param in model.parameters())
    zero = system(model, torch.optim.AdamW, lr=1e-3)
    batches = torch.Generator().manual_seed(rank.rank)  # each rank has its own data
    for step in range(STEPS):
        starts = torch.randint(len(text) - 65, (8,), generator=batches)
        inputs = torch.stack([text[start : start + 65] for start in starts]).long().to(rank.device)
        with TrafficMeter() as meter:
            loss = model(inputs[:, :-1], inputs[:, 1:])
            loss.backward()
            if step == STEPS - 1:
                holds = held() - nothing - inputs.nbytes
            zero.step()
    return loss.item(), psi, holds, meter.sent_bytes


def held() -> int:
    """Bytes of all tensors that this rank holds now."""
    with Ledger() as ledger:
        return ledger.total
