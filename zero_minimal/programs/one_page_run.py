"""One page's run: train a GPT with each of its four systems, and print what they hold and send beside the formulas."""

import gc

import torch
from torch import Tensor

from zero_minimal.one_page import Naive, Sent, Stage1, Stage2, Stage3
from zero_minimal.processes import interrupts, ranks
from zero_minimal.workload import data
from zero_minimal.workload.model import GPT, GPTConfig

STEPS = 20


def held() -> int:
    """Bytes of all tensors that this rank holds now."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@interrupts.program
def main() -> None:
    """Train a GPT on the documentation inside Python, with each of the four."""
    with ranks.start() as rank:
        number, text = rank.world_size, data.read_tokens()
        shares = {Naive: (4 + 4 + 8, 2), Stage1: (4 + 4 + 8 / number, 2),
                  Stage2: (4 + (4 + 8) / number, 2), Stage3: ((4 + 4 + 8) / number, 3)}
        for system, (states, times) in shares.items():
            loss, psi, holds, sends = train(system, text, rank)
            if rank.rank == 0:
                print(f"{system.__name__}: loss {loss:.4f}, holds {holds / 1e6:.2f} MB (formula "
                      f"{states * psi / 1e6:.2f}), a step sends {sends / 1e6:.2f} MB (formula "
                      f"{times * 4 * psi * (1 - 1 / number) / 1e6:.2f})")


def train(system: type, text: torch.Tensor, rank: ranks.Rank) -> tuple:
    """The last loss, parameters, bytes that are held after backward, and bytes that a step sends."""
    torch.manual_seed(0)
    nothing = held()
    model = GPT(GPTConfig(layers=4, hidden=128, heads=4, sequence=64, dropout=0.0)).to(rank.device)
    psi = sum(param.numel() for param in model.parameters())
    zero = system(model, torch.optim.AdamW, lr=1e-3)
    batches = torch.Generator().manual_seed(rank.rank)  # each rank its own data
    for _ in range(STEPS):
        starts = torch.randint(len(text) - 65, (8,), generator=batches)
        inputs = torch.stack([text[start : start + 65] for start in starts]).long().to(rank.device)
        Sent.bytes = 0.0
        loss = model(inputs[:, :-1], inputs[:, 1:])
        loss.backward()
        holds = held() - nothing
        zero.step()
    return loss.item(), psi, holds, Sent.bytes
