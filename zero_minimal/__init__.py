"""ZeRO (arXiv:1910.02054) step by step: one small file a stage, each runs under torchrun."""

import sys

from zero_minimal.core import seams

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("Windows has no fork(), which the ranks are started with: run this inside "
                      "WSL, the Linux that comes with Windows (wsl --install), as the README says")

# what attaches to the algorithm from outside (core/seams.py)
seams.attached += ["zero_minimal.guards", "zero_minimal.extensions", "zero_minimal.checkpoint"]
