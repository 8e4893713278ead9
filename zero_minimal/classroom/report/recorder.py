"""Recorder: what happens in a rank, written down at once. It runs beside the submission: nobody believes what it says.

Each event is a line of JSON in a file of the rank's own folder. So what was written is still there when the rank
hangs, dies, or is ended.
"""

import json
import math
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

FILE = "record.jsonl"
MOST = 600_000  # bytes of a file
MOST_RUNS = 64  # of equal numbers in a row, of one tensor
NOTHING = -12345.0  # stands for NaN, while runs are looked for


class Recorder:
    """Writes into the folder that is the current one now."""

    def __init__(self):
        self.file, self.left, self.silent = os.open(FILE, os.O_WRONLY | os.O_CREAT, 0o644), MOST, False

    def note(self, what: str, **entries) -> None:
        """One event. Entries are numbers, texts, and lists and dicts of them."""
        line = json.dumps({"what": what, **entries}).encode() + b"\n"
        if not self.silent and len(line) <= self.left:
            self.left -= os.write(self.file, line)


def values_of(tensor: torch.Tensor) -> list | None:
    """[[number, how often in a row], …], the first of them; a number is None where nothing was written (NaN). None in
    place of the list if the tensor's memory is freed."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        if not _is_there(tensor):
            return None
        flat = tensor.reshape(-1)
        if flat.is_floating_point():
            flat = torch.where(flat.isfinite(), flat, torch.full_like(flat, NOTHING))
        numbers, counts = torch.unique_consecutive(flat, return_counts=True)
        numbers, counts = numbers[:MOST_RUNS].tolist(), counts[:MOST_RUNS].tolist()
    return [[None if number == NOTHING else number, count] for number, count in zip(numbers, counts, strict=True)]


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether all its numbers can be read: a tensor may outlive its memory, and to read it then ends the process."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(),
                                                                                    strict=True))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def finite(number: float) -> float | None:
    """A number for JSON."""
    return float(number) if math.isfinite(number) else None
