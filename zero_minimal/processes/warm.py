"""Imported once by the server that ranks are forked from, so that no rank imports torch itself."""

import importlib.util

import torch._dynamo  # noqa: F401  (every optimizer imports it when it is first made)
import torch.distributed.fsdp  # noqa: F401
import torch.nn.parallel  # noqa: F401
import torch.optim  # noqa: F401
import torch.utils.checkpoint  # noqa: F401

import zero_minimal.processes.joining  # noqa: F401
from zero_minimal.core import seams

if importlib.util.find_spec("zero_minimal.core.collectives"):  # a lesson that builds it has none
    seams.attach()
