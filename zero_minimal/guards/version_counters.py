"""Version counters: tell autograd of updates, which it does not see. Then a backward pass through
an older graph is an error, as in plain torch, and autocast does not reuse its cached copies.

Seams: wrapped, update_ends.
"""

import torch

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook


@seams.at("update_ends")
def tell_autograd(bucket) -> None:
    for param in bucket.params:
        torch.autograd.graph.increment_version(param)
    torch.clear_autocast_cache()


@seams.at("wrapped")
def forget_casts(stage) -> None:
    """Before a forward: a cached cast would lead backward into an older graph."""
    stage.model.register_forward_pre_hook(WeakHook(lambda *_: torch.clear_autocast_cache(), stage))
