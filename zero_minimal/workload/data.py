"""What the model reads: the bytes of a text, by default Python's own documentation.

One byte is one token (vocabulary 256), so there is no tokenizer and nothing to download. (A model
with another vocabulary can use a tokenizer: tokens.py.) The last tenth is held out for validation.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch

from zero_minimal.workload import tokens as by_tokenizer
from zero_minimal.workload.masking import with_gaps


def read_tokens(text: str = "", tokenizer: str = "") -> torch.Tensor:
    """The bytes of the file `text`, or of `pydoc_data.topics` if no file is named: uint8 [bytes].
    With the file of a tokenizer, its tokens: int32 [tokens].

    Raises: ValueError, saying what to do, if the file cannot be read or is empty.
    """
    if not text:
        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            content = Path(text).read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot read the text {text!r} ({reason}): name a file that can be "
                             "read") from error
        if not content:
            raise ValueError(f"the text {text!r} is empty: name a file that holds some")
    if tokenizer:
        return by_tokenizer.encode(content, tokenizer)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def split(tokens: torch.Tensor, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first nine tenths for training, and the last tenth, held out for validation.

    Raises: ValueError if either is too short for one sequence and the token that follows it.
    """
    held_out = len(tokens) // 10
    unit = "bytes" if tokens.dtype == torch.uint8 else "tokens"
    if held_out < sequence + 1:
        raise ValueError(
            f"a text of {len(tokens)} {unit} is too short for sequences of {sequence}: its last "
            f"tenth is held out for validation and must hold {sequence + 1}; give a text of at "
            f"least {10 * (sequence + 1)} {unit}, or shorter sequences"
        )
    return tokens[:-held_out], tokens[-held_out:]


class Batches:
    """Random crops of the text, without end.

    Each item is (inputs, targets), both int64 [batch, sequence]; targets are one byte ahead, or,
    with a mask token `gap`, what is masked (masking.py). Each rank draws its own, from `seed` and
    `rank` alone: stage, world size and model do not change them.
    """

    def __init__(self, tokens: torch.Tensor, batch: int, sequence: int, seed: int, rank: int,
                 gap: int | None = None):
        self.tokens, self.batch, self.sequence, self.gap = tokens, batch, sequence, gap
        self.name = f"seed {seed}, rank {rank}"
        self.random = random.Random(self.name)
        self.drawn = 0  # batches drawn so far

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = crops(self.tokens, self._starts(), self.sequence)
        if self.gap is None:
            return inputs, targets
        return with_gaps(inputs, self.gap, f"{self.name}, batch {self.drawn}")

    def skip(self, count: int) -> None:
        """Continue as if `count` more batches had been drawn."""
        for _ in range(count):
            self._starts()

    def _starts(self) -> list[int]:
        """Where the sequences of the next batch begin."""
        self.drawn += 1
        end = len(self.tokens) - self.sequence
        return [self.random.randrange(end) for _ in range(self.batch)]


def validation_batches(
    tokens: torch.Tensor, batch: int, sequence: int, rank: int, world_size: int, windows: int = 96
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of `windows` fixed windows, spread evenly over the held-out text, in
    batches like those of Batches.

    All ranks get equally many (at stage 3 they must run forward together), so that the mean over
    ranks is the mean over windows; windows that do not divide evenly are left out.
    """
    gap = max(1, (len(tokens) - sequence - 1) // windows)
    starts = [start for start in range(0, len(tokens) - sequence, gap)][:windows]
    share = max(1, len(starts) // world_size)
    own = [starts[(rank * share + i) % len(starts)] for i in range(share)]
    return [crops(tokens, own[first : first + batch], sequence) for first in range(0, share, batch)]


def crops(
    tokens: torch.Tensor, starts: list[int], sequence: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [len(starts), sequence], of the windows that begin at `starts`."""
    windows = torch.stack([tokens[start : start + sequence + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
