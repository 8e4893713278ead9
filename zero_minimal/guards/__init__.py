"""Guards: each file refuses some misuse at once, and says what to write instead. It opens with the
seams that it uses and the mistakes that it refuses. The algorithm does not know the guards
(core/seams.py), and runs without them."""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from zero_minimal.core import seams

IN_ORDER = (  # the order in which they are called
    "refused_collectives", "dropped_collectives", "bucket_names", "ownership", "refused_models",
    "views_from_outside", "refused_optimizers", "calls_as_in_torch", "same_on_all_ranks",
    "reads_of_freed_parameters", "used_gradients", "grad_placeholder", "changed_in_forward",
    "training_moment", "version_counters", "copied_stage", "vocabulary", "collective_fingerprint",
    "gradients_of_one_rank", "watchdog",
)
HAS_COLLECTIVES = find_spec("zero_minimal.core.collectives")  # not in the lesson that builds them
for name in IN_ORDER if HAS_COLLECTIVES else ():
    import_module(f"zero_minimal.guards.{name}")


@contextlib.contextmanager
def off(package: str = __name__) -> Iterator[None]:
    """Context in which no listener of this package is called: the algorithm without its guards."""
    seams.attach()
    kept = {moment: list(listeners) for moment, listeners in seams.listeners.items()}
    for listeners in seams.listeners.values():
        listeners[:] = [each for each in listeners if not each.__module__.startswith(package)]
    try:
        yield
    finally:
        for moment, listeners in kept.items():
            seams.listeners[moment][:] = listeners
