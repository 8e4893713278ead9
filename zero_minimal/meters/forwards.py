"""Forwards: which modules ran.

    with forwards() as ran:
        model(tokens)
    ran                        # {"GPT", "Linear", …}: the names of their classes
"""

import contextlib
from collections.abc import Iterator

from torch.nn.modules.module import register_module_forward_hook


@contextlib.contextmanager
def forwards() -> Iterator[set[str]]:
    """Names of the classes of modules whose forward has run meanwhile."""
    ran: set[str] = set()
    hook = register_module_forward_hook(lambda module, *call: ran.add(type(module).__name__))
    try:
        yield ran
    finally:
        hook.remove()
