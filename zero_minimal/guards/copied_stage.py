"""A stage cannot be copied or pickled, and its hooks cannot become TorchScript.

Seams: the base class of the stages, and their hooks' class.
"""

from zero_minimal.core.reducer import Hooks
from zero_minimal.core.weak_hooks import WeakHook


def refuse_copies(stage):
    raise TypeError("a stage is tied to its ranks and cannot be copied or pickled: keep "
                    "zero.state_dict(), or copy the model under "
                    "`with zero.gather_parameters():`")


def refuse_script(hook, attribute: str):
    """Called for an attribute that a hook lacks. torch.jit.script asks for __name__."""
    if attribute != "__name__":
        raise AttributeError(attribute)
    raise AttributeError("torch.jit.script cannot compile the hooks that tie a model to its "
                         "stage: build the model anew, let it load_state_dict() the weights "
                         "(at stage 3 under `with zero.gather_parameters():`), and script that")


Hooks.__reduce__ = refuse_copies
WeakHook.__getattr__ = refuse_script
