"""Writer trace: which elements of the parameters a rank writes in step(), before the others send theirs.

    with Written(zero) as written:
        zero.step()
    written.masks       # for each parameter, in the order of the model: True where this rank wrote, in its shape

A stage gathers bucket after bucket. When this rank begins to gather one, what has changed in it is its own
work.
"""

import contextlib

import torch

from zero_minimal.core import seams, work


class Written:
    """Watches one step() of a stage whose parameters lie whole in zero.buckets, in the order in which it gathers them.
    A stage that gathers nothing has written all that has changed."""

    def __init__(self, zero):
        self.zero, self.buckets = zero, list(zero.buckets)

    def __enter__(self):
        self._before = [bucket.parameters.clone() for bucket in self.buckets]
        self._changed: list[torch.Tensor] = []
        with contextlib.ExitStack() as undo:
            undo.enter_context(seams.heard_by("collective", self._hear))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        self._undo.close()
        for place in range(len(self._changed), len(self.buckets)):
            self._look(place)
        self.masks = [self._mask(param) for param in self.zero.model.parameters()]

    def _hear(self, moment: str, call: work.Call) -> None:
        if (moment, call.name) == ("start", "all_gather") and len(self._changed) < len(self.buckets):
            self._look(len(self._changed))

    def _look(self, place: int) -> None:
        self._changed.append(self.buckets[place].parameters != self._before[place])

    def _mask(self, param) -> torch.Tensor:
        mask = torch.zeros(param.numel(), dtype=torch.bool)
        for bucket, changed in zip(self.buckets, self._changed, strict=True):
            if any(param is other for other in bucket.params):
                offset = bucket.flat.offsets[param]
                begin, end = max(offset, bucket.start), min(offset + param.numel(), bucket.start + bucket.padded)
                mask[begin - offset : end - offset] = changed[begin - bucket.start : end - bucket.start].cpu()
        return mask.view(param.shape)
