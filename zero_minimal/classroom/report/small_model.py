"""Small model: one whose gradients say whose they are.

Each element of layer n, of 12, gets the gradient n · 3 · 13^(rank + 3 · batch). So in the mean of three ranks, written
to base 13, there is the digit n for each part that is in it: 070777 is layer 7, batch 0 of all ranks, and batch 1 of
rank 1. These numbers, their sums and means are exact in fp32.
"""

from dataclasses import dataclass

import torch
from torch import nn

RANKS, BATCHES = 3, 2
STEPS = ((1,), (0, 1))  # the batches of each step
# elements of the layers: buckets begin and end in the middle of layers, and the last one is of layer 1 alone
SIZES = (119, 96, 112, 80, 96, 112, 80, 96, 112, 80, 96, 112)
UNITS = ((1, 2), *((layer,) for layer in range(3, len(SIZES) + 1)))  # layers of each block: at stage 3 its units
BUCKET = 4 * 96  # bytes
ELEMENTS = sum(SIZES)
BASE = len(SIZES) + 1
LR, EPS = 1.0, 5e6  # of Adam: eps as large as the gradients, so that the step depends on them
MAX_NORM = 2e7


class Block(nn.Module):
    """A layer, or several. Their output has the same gradient for every element of a layer."""

    def __init__(self, *numbers: int):
        super().__init__()
        self.numbers = numbers
        self.weights = nn.ParameterList([torch.zeros(SIZES[number - 1]) for number in numbers])

    def forward(self, factor, without: int = 0):
        layers = zip(self.numbers, self.weights, strict=True)
        # a view, as in nn.Linear: autograd saves it for backward, and with it the memory that it lies in
        return torch.stack([(weight.view(-1) * (number * factor)).sum()
                            for number, weight in layers if number != without]).sum()


class Model(nn.Module):
    """model(factor, …) is a loss. Layer 1, which shares a block with layer 2, is used by rank 0 alone: on the others
    its gradient is missing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(*layers) for layers in UNITS])

    def forward(self, factor, without: int):
        return torch.stack([block(factor, without) for block in self.blocks]).sum()


def build(rank: int) -> Model:
    """Other values on every rank; rank 0's, zeros, are what all must start from."""
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0 * rank)
    return model


def batch(rank: int, number: int) -> tuple[torch.Tensor, int]:
    """What model() is given: a rank's data in a batch, and the layer that it does not use. They want a gradient,
    so that autograd saves the weights for backward, as it does in a model whose layers follow each other."""
    return torch.tensor(float(RANKS * BASE ** (rank + RANKS * number)), requires_grad=True), 1 if rank else 0


def mean_gradient(layer: int, *batches: int) -> int:
    """Of each element, averaged over the ranks and added over batches."""
    ranks = range(1 if layer == 1 else RANKS)
    return sum(layer * BASE ** (rank + RANKS * number) for rank in ranks for number in batches)


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


def read(value: float, likely: float = 1) -> Read | None:
    """None: no sum of gradients that there are. `likely`: the factor to try first, since 3 times layer 4 is as much as
    layer 12."""
    for times in (likely, *FACTORS):
        digits, whole = [], round(value / times)
        if abs(value / times - whole) > 1e-3 or not 0 < whole < BASE ** (RANKS * BATCHES):
            continue
        while whole:
            whole, digit = divmod(whole, BASE)
            digits.append(digit)
        found = set(digits) - {0}
        if len(found) == 1 and max(found) <= len(SIZES):
            return Read(found.pop(), tuple((place % RANKS, place // RANKS) for place, digit in enumerate(digits)
                                           if digit), times)
    return None
