"""At stage 3 a state dict of placeholders would be a checkpoint of NaN, and an encoder that reads
its first layer's parameters would return other results: both are refused outside
gather_parameters().

Seam: wrapped.
"""

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.reads_of_freed_parameters import refuse_left_behind


@seams.at("wrapped")
def refuse_state_dict(stage) -> None:
    """Let state_dict() and load_state_dict() of stage.model, and of each module in it, raise an
    error that says what to do, unless stage.shown: a state dict of placeholders would be a
    checkpoint of NaN."""

    if not hasattr(stage, "units"):  # not stage 3
        return

    def refuse(stage, module, *_):
        if not stage.shown and any(True for _ in module.parameters()):
            raise RuntimeError("at stage 3 a rank holds shards only: put model.state_dict() or "
                               "model.load_state_dict() under `with zero.gather_parameters():`, "
                               "on all ranks; or save zero.state_dict(), this rank's part")

    tie = WeakHook(refuse, stage, left=refuse_left_behind)
    for module in stage.model.modules():
        module.register_state_dict_pre_hook(tie)
        module.register_load_state_dict_pre_hook(tie)


@seams.at("wrapped")
def refuse_nested_tensors(stage) -> None:
    """Let each nn.TransformerEncoder of stage.model refuse a call with another result here. In
    evaluation it reads its first layer's parameters: released ones turn off a fast path that leaves
    zeros where the padding is."""

    if not hasattr(stage, "units"):
        return

    def refuse(stage, module, args, kwargs):
        padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        plain = module.training or torch.is_grad_enabled() or stage.shown
        if padding is not None and module.use_nested_tensor and not plain:
            raise RuntimeError("at stage 3 an evaluation with src_key_padding_mask would not put "
                               "zeros where the padding is, as nested tensors do: build "
                               "nn.TransformerEncoder(…, enable_nested_tensor=False), or evaluate "
                               "under `with zero.gather_parameters():`, on all ranks")

    for module in stage.model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(WeakHook(refuse, stage), with_kwargs=True)
