"""Moved data: a user may let a parameter point to other memory inside gather_parameters(), by
`param.data = …` or torch.nn.utils.vector_to_parameters(). The stage copies the values into its own
memory (stage 3 does so anyway).

Seam: parameters_edited.
Mistake: model.to(torch.bfloat16) after wrapping, whose values would be copied back into fp32.
"""

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.layout import same_storage
from zero_minimal.guards.ownership import name_of
from zero_minimal.guards.trained_by import trained_by


@seams.at("parameters_edited")
@torch.no_grad()
def take_over(model: nn.Module, group) -> None:
    stage = trained_by(next(model.parameters()))
    for bucket in getattr(stage, "all_buckets", ()):
        for param in bucket.params:
            if param.dtype != bucket.dtype:
                raise TypeError(f"{name_of(param)} is {param.dtype} at the end of "
                                f"gather_parameters(), and the stage was made for {bucket.dtype}: "
                                "convert the model before wrapping, or a copy.deepcopy() of it")
    if hasattr(stage, "units"):  # stage 3 has copied them
        return
    for bucket in getattr(stage, "buckets", ()):
        vector = bucket.parameters.as_strided((bucket.flat.size,), (1,), 0)
        for param in bucket.params:
            view = bucket.flat.view(vector, param)
            alike = param.shape == view.shape and param.dtype == view.dtype
            if alike and not same_storage(param, vector):
                view.copy_(param.data)
                param.data = view
