"""Extensions: rare cases that the algorithm serves, each attached from outside."""

from zero_minimal.extensions import meta_device, odd_graphs  # noqa: F401
