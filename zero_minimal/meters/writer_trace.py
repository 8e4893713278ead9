"""Writer trace: which elements of the parameters a rank writes in step(), before it receives the others'.

    with Written(zero) as written:
        zero.step()
    written.masks       # for each parameter, in the order of the model: True where this rank wrote, in its shape

A stage gathers bucket after bucket. When this rank begins to gather one, it has itself made all changes in it.
"""

import torch

from zero_minimal.core import work
from zero_minimal.meters.buckets import place
from zero_minimal.meters.events import Events


class Written(Events):
    """Watches one step() of a stage whose whole parameters are in zero.buckets, in the order in which it gathers them.
    A stage that gathers nothing has itself written all changes."""

    def __init__(self, zero):
        super().__init__()
        self.zero, self.buckets = zero, list(zero.buckets)
        self._before = [bucket.parameters.clone() for bucket in self.buckets]
        self._changed: list[torch.Tensor] = []

    def __exit__(self, *error):
        super().__exit__(*error)
        while len(self._changed) < len(self.buckets):
            self._look()
        self.masks = [self._mask(param) for param in self.zero.model.parameters()]

    def hear(self, moment: str, call: work.Call) -> None:
        if (moment, call.name) == ("start", "all_gather") and len(self._changed) < len(self.buckets):
            self._look()

    def _look(self) -> None:
        place = len(self._changed)
        self._changed.append(self.buckets[place].parameters != self._before[place])

    def _mask(self, param) -> torch.Tensor:
        mask = torch.zeros(param.numel(), dtype=torch.bool)
        for bucket, changed in zip(self.buckets, self._changed, strict=True):
            if any(param is other for other in bucket.params):
                offset, (begin, end) = bucket.flat.offsets[param], place(bucket, param)
                mask[begin - offset : end - offset] = changed[begin - bucket.start : end - bucket.start].cpu()
        return mask.view(param.shape)
