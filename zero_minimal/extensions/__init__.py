"""Extensions: rare cases that the algorithm serves, each attached from outside."""

from zero_minimal.extensions import graph_entries, meta_device  # noqa: F401
