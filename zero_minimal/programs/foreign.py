"""Foreign: what a simulation takes from a file: a stage of somebody's own, and models that are not our GPT.

    python -m zero_minimal simulate --stage my_system.py …      build(model, group, budget), or a class
    python -m zero_minimal simulate --model config.json …       a configuration of the transformers library
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

METHODS = ("step", "zero_grad")  # what a step calls of a stage
PIP = "pip install transformers"


def read_system(path: str) -> tuple[str, Callable]:
    """(its name, build(model, group, budget)) of a file, which is run. It has a function `build`, or a single class
    with step() and zero_grad(), which is called as StageN is: Class(model, AdamW, group=…, **options).

    Raises: ValueError, in one sentence, for a file that is neither.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path} is not a file: give 0, 1, 2 or 3, or a Python file with build(model, group, budget)")
    try:
        ast.parse(text := file.read_text())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python: {error}") from None
    spec = importlib.util.spec_from_loader(file.stem, loader=None, origin=str(file))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules.setdefault(file.stem, module)  # dataclasses look there
    exec(compile(text, str(file.resolve()), "exec"), vars(module))
    return file.stem, build_of(module, path)


def build_of(module, path: str) -> Callable:
    """The function build(model, group, budget) of a module, or one that calls its class."""
    if inspect.isfunction(build := getattr(module, "build", None)):
        if len(inspect.signature(build).parameters) != 3:
            raise ValueError(f"build in {path} must take three arguments: build(model, group, budget)")
        return build
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
           and all(hasattr(kind, method) for method in METHODS)]
    if len(own) != 1:
        names = ", ".join(kind.__name__ for kind in own) or "none"
        raise ValueError(f"{path} must have a function build(model, group, budget), or one class with step() and "
                         f"zero_grad(); classes of that kind: {names}")
    return lambda model, group, budget: own[0](model, AdamW, group=group, **budget.options)


@dataclass(frozen=True)
class ForeignModel:
    """A causal language model of the transformers library, by its config.json; built without weights.

    Raises: ValueError, in one sentence, without that library, or for a file that it does not take.
    """

    file: str
    sequence: int
    recompute: bool = True
    sizes: dict = field(default_factory=dict, compare=False)

    def __post_init__(self):
        transformers = library()
        try:
            entries = json.loads(Path(self.file).read_text())
            config = transformers.AutoConfig.for_model(**entries)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.file} is no configuration that transformers reads: {error}".split("\n")[0]
                             ) from None
        config.use_cache, config.dtype = False, None  # a cache is for generating; the dtype is the simulation's
        longest = getattr(config, "max_position_embeddings", None)
        if longest and self.sequence > longest:
            raise ValueError(f"this model reads at most {longest:,} tokens: give --sequence {longest} or less")
        object.__setattr__(self, "_config", config)
        with torch.device("meta"):
            model = self.build()
        elements = sum(param.numel() for param in model.parameters())
        self.sizes.update(name=type(model).__name__, parameters=elements, vocabulary=config.vocab_size)

    def build(self) -> nn.Module:
        """model(tokens, targets) is the loss. On torch's default device, in its default dtype."""
        model = library().AutoModelForCausalLM.from_config(self._config, attn_implementation="sdpa")
        model.train()
        if self.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return WithLoss(model)


class WithLoss(nn.Module):
    """A model of transformers, called as ours: model(tokens, targets) is the loss."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, labels=targets).loss


def library():
    """transformers. Raises: ValueError, with the line that installs it, where it is absent."""
    with contextlib.suppress(ImportError):
        import transformers

        return transformers
    raise ValueError(f"--model needs the library transformers, which is not installed here: {PIP}")
