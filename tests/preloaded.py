"""Imported once, by the server that tests' ranks are forked from (zero_minimal/processes/ranks.py): what they need.

A rank that imports `checks`, and pytest with it, takes longer over that than over most of what a test does in it. Here
is nothing but imports: a thread or a process group of the server's own would be broken in every rank.
"""

import gc
import importlib
import os
import pkgutil
import sys
from pathlib import Path

TESTS = Path(__file__).parent
os.chdir(TESTS.parent)  # it was started beside this file, to find it (conftest.py)
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import torch  # noqa: E402

import zero_minimal  # noqa: E402
import zero_minimal.processes.warm  # noqa: E402, F401
from zero_minimal.guards.refused_optimizers import check_element_wise  # noqa: E402

PACKAGES = ("zero_minimal", *(f"zero_minimal.{name}" for name in ("core", "guards", "processes", "extensions",
                              "checkpoint", "offloading", "meters", "paper", "workload")))

for package in PACKAGES:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in ("checks", "toys"):
    importlib.import_module(name)
for optimizer_class in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):  # no rank needs to try these again
    for options in ({}, {"lr": 0.1}):
        check_element_wise(optimizer_class, options)
gc.freeze()  # a collection in a rank would write to all of it, and so copy it
