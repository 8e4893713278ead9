"""Guards: misuse is refused at once, with the line to write instead. A file each, which opens with
the seams that it uses and the mistakes that it refuses. The algorithm knows none of them
(core/seams.py), and runs without."""

from importlib import import_module
from importlib.util import find_spec

IN_ORDER = (  # in which they are asked
    "group_members", "ownership", "refused_models", "views_from_outside", "refused_optimizers",
    "same_on_all_ranks", "failed_wrap", "reads_of_freed_parameters", "used_gradients",
    "grad_placeholder", "changed_in_forward", "training_moment", "stage3_reads",
    "version_counters", "copied_stage", "vocabulary", "forked_process", "collective_fingerprint",
)
HAS_COLLECTIVES = find_spec("zero_minimal.core.collectives")  # not in the lesson that builds them
for name in IN_ORDER if HAS_COLLECTIVES else ():
    import_module(f"zero_minimal.guards.{name}")
