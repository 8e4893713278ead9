"""A stage cannot be copied or pickled.

Seam: the base class of the stages.
"""

from zero_minimal.core.reducer import Hooks


def refuse_copies(stage):
    raise TypeError("a stage is tied to its ranks and cannot be copied or pickled: keep "
                    "zero.state_dict(), or copy the model under "
                    "`with zero.gather_parameters():`")


Hooks.__reduce__ = refuse_copies
