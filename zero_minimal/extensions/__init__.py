"""Extensions: rare cases that the algorithm serves, each attached from outside."""

from zero_minimal.extensions import (  # noqa: F401
    graph_entries,
    hooks_of_users,
    kept_gradients,
    meta_device,
    moved_data,
    odd_outputs,
)
