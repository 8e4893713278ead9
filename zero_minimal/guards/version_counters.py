"""Version counters: tell autograd of updates, which it does not see. Then a backward pass through
an older graph is an error, as in plain torch, and autocast does not reuse its cached copies.

Seams: wrapped, unit_begins, update_ends.
"""

import torch

from zero_minimal.core import seams
from zero_minimal.core.execution_order import in_backward
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


@seams.at("unit_begins")
def forget_casts_of_parts(order, unit) -> None:
    """At stage 3 also before a call of a part of the model by itself: the gradient of a parameter
    would come by the cached cast, which an earlier call has made, and after its unit's turn."""
    if len(order.under_way) == 1 and not in_backward():
        torch.clear_autocast_cache()
