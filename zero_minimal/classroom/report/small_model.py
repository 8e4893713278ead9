"""Small model: one whose gradients say whose they are.

Each element of layer n gets the gradient n · 3 · 16^(rank + 3 · batch). So the mean of three ranks is n in one
hexadecimal digit for each part that is in it: 0x070777 is layer 7, batch 0 of all ranks and batch 1 of rank 1.
"""

from dataclasses import dataclass

import torch
from torch import nn

RANKS, BATCHES = 3, 2
STEPS = ((1,), (0, 1))  # the batches of each step
SIZES = (23, 96, 112, 80, 96, 112, 80, 96, 112, 80, 96, 112)  # elements: buckets begin and end in the middle of layers
BUCKET = 4 * 96  # bytes
ELEMENTS = sum(SIZES)
LR, EPS = 1.0, 1e7  # of Adam: eps as large as the gradients, so that the step depends on them
MAX_NORM = 5e7


class Layer(nn.Module):
    """Its output has the same gradient for every element."""

    def __init__(self, number: int, size: int):
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.zeros(size))

    def forward(self, factor):
        return (self.weight * (self.number * factor)).sum()


class Model(nn.Module):
    """model(factor) is a loss. Layer 1 is used by rank 0 alone: on the others its gradient is missing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, size) for number, size in enumerate(SIZES, 1))

    def forward(self, factor, uses_all: bool):
        return torch.stack([layer(factor) for layer in self.layers if uses_all or layer.number > 1]).sum()


def build(rank: int) -> Model:
    """Other values on every rank; rank 0's, zeros, are what all must start from."""
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0 * rank)
    return model


def batch(rank: int, number: int) -> tuple[torch.Tensor, bool]:
    """A rank's data in a batch."""
    return torch.tensor(float(RANKS * 16 ** (rank + RANKS * number))), rank == 0


def mean_gradient(layer: int, *batches: int) -> int:
    """Of each element, averaged over the ranks and added over batches."""
    ranks = range(1 if layer == 1 else RANKS)
    return sum(layer * 16 ** (rank + RANKS * number) for rank in ranks for number in batches)


def gradient_norm(*batches: int) -> float:
    """Of the whole mean gradient."""
    return sum(size * mean_gradient(layer, *batches) ** 2 for layer, size in enumerate(SIZES, 1)) ** 0.5


def trained(steps: list[tuple[tuple[int, ...], float]], times: int = 1) -> list[float]:
    """What one process has in each layer after these steps, (batches, factor of the gradient), of Adam.
    times: how often each update is made."""
    weights = [nn.Parameter(torch.zeros(())) for _ in SIZES]
    optimizer = torch.optim.Adam(weights, lr=LR, eps=EPS)
    for batches, factor in steps:
        for layer, weight in enumerate(weights, 1):
            weight.grad = torch.tensor(mean_gradient(layer, *batches) * factor)
        for _ in range(times):
            optimizer.step()
    return [weight.item() for weight in weights]


@dataclass(frozen=True)
class Read:
    """What a gradient is: of which layer, and whose parts, (rank, batch), are in it. `times`: how much too large."""

    layer: int
    parts: tuple[tuple[int, int], ...]
    times: float = 1


FACTORS = (1, 3, 1 / 3, 2, 1 / 2)


def read(value: float) -> Read | None:
    """None: no sum of gradients that there are."""
    for times in FACTORS:
        digits, whole = [], round(value / times)
        if abs(value / times - whole) > 1e-3 or not 0 < whole < 16 ** (RANKS * BATCHES):
            continue
        while whole:
            whole, digit = divmod(whole, 16)
            digits.append(digit)
        found = set(digits) - {0}
        if len(found) == 1 and max(found) <= len(SIZES):
            return Read(found.pop(), tuple((place % RANKS, place // RANKS) for place, digit in enumerate(digits)
                                           if digit), times)
    return None
