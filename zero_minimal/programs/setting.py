"""Setting: the sizes, the seed and the questions for examining a claim. They are drawn at random, so that a copied
figure fits only by chance."""

import random
from dataclasses import dataclass

from zero_minimal.paper import published


@dataclass(frozen=True)
class Setting:
    """The values of a Lab: lab.seed, lab.layers and so on.

    The first part is for real runs here, the second for simulated or computed ones, the third selects a figure of the
    paper.
    """

    # a GPT that is trained on real ranks
    seed: int = 0
    layers: int = 3
    hidden: int = 96
    heads: int = 4
    sequence: int = 16
    batch: int = 2  # sequences per rank and step
    steps: int = 12

    # a model and a machine that are only simulated
    parameters: int = 7_000_000_000  # Ψ
    devices: int = 8  # N, the devices that train it
    model_parallel: int = 4  # M of them share a model
    sequences: int = 32  # in a batch of that model
    tokens: int = 2048  # in each of them
    elements: int = 500_000_000  # of a bucket

    # of the paper
    row: int = 4  # of Table 2, and M of the paper's 100B model: model-parallel degree
    gpus: int = 64  # of Figure 3, to begin with
    without: float = 13.0  # of Figure 4: billions of parameters, without model parallelism
    largest: int = 170  # of Figure 2: billions of parameters, with it
    config: str = "C4"  # of Figure 7

    @property
    def seeds(self) -> tuple[int, ...]:
        """Three seeds, as the result of one could be chance."""
        return self.seed, self.seed + 1, self.seed + 2


def draw(seed: str | int) -> Setting:
    """A setting that depends only on the seed. Its questions differ from those of the default setting."""
    dice = random.Random(f"setting {seed}")
    return Setting(
        seed=dice.randrange(10_000), layers=dice.choice((2, 3, 4)), hidden=dice.choice((80, 112, 128)),
        sequence=dice.choice((12, 16, 20)), batch=dice.choice((2, 3)), steps=dice.choice((6, 7, 8)),
        parameters=dice.randrange(80, 150) * 100_000_000, devices=dice.choice((12, 16, 24, 32, 48)),
        model_parallel=2, sequences=dice.choice((16, 24)), tokens=dice.choice((1024, 2048)),
        elements=dice.randrange(30, 48) * 10_000_000, row=dice.choice((2, 8, 16)), gpus=dice.choice((128, 256)),
        without=dice.choice([billions for billions in published.FIGURE4 if billions != Setting.without]),
        largest=dice.choice((100, 120, 140)), config=dice.choice(("C2", "C5")),
    )
