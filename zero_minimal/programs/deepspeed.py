"""DeepSpeed: what --deepspeed-config does in the programs that train: a JSON that DeepSpeed reads is read here, too.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --deepspeed-config ds.json

The file becomes flags (workload/deepspeed_config.py); the first rank says which, and what it ignores.
"""

import argparse
import os
import sys
from collections.abc import Callable

from zero_minimal.meters.observer import stage_in
from zero_minimal.programs.offload_flags import OFFLOADED
from zero_minimal.workload import deepspeed_file
from zero_minimal.workload.deepspeed_config import Wanted
from zero_minimal.workload.settings import Parser, Settings
from zero_minimal.zero_100b import CONFIGS

KEPT = ("partition_activations", "cpu_checkpointing")  # of "activation_checkpointing": P_a and P_a+cpu


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Give the parser --deepspeed-config."""
    parser.add_argument("--deepspeed-config", metavar="FILE.json", help="take from a DeepSpeed configuration what it "
                        "has of all this; flags say the rest, and what both say must agree")


def of_stage(parser: Parser, arguments: argparse.Namespace, stage_class: type) -> Callable[[Settings], Settings]:
    """Fill in the flags of a stage's program from the file, if there is one; what then adds to its settings. Ends the
    program, saying what is accepted, for a file that does not fit."""
    name = stage_class.__name__

    def fit(wanted: Wanted) -> None:
        stage = stage_in(name)
        if wanted.stage != stage:
            raise ValueError(f"zero_optimization.stage is {wanted.stage}, and {name} is stage {stage}: start "
                             f"zero_minimal/stage{wanted.stage}.py with this file")
        if name in OFFLOADED and wanted.flags.get("offload", "") is None:
            raise ValueError(f"offload_optimizer.device is none, and {name} offloads: start "
                             f"zero_minimal/stage{stage}.py with this file")

    return _read(parser, arguments, fit, model_parallel=1)


def of_config(parser: Parser, arguments: argparse.Namespace) -> Callable[[Settings], Settings]:
    """The same of zero_100b.py: stage and kept activations choose one of C1 to C5."""

    def fit(wanted: Wanted) -> None:
        if wanted.flags.pop("offload", None):
            raise ValueError("zero_100b.py has no offload of optimizer state: start zero_minimal/stage"
                             f"{wanted.stage}.py with this file")
        kept = tuple(wanted.found.get(f"activation_checkpointing.{key}") is True for key in KEPT)
        fitting = [each for each, config in CONFIGS.items() if stage_in(config.stage.__name__) == wanted.stage
                   and (config.partition, config.to_host) == (kept[0] or kept[1], kept[1])]
        if not fitting:
            raise ValueError(f"none of {', '.join(CONFIGS)} is stage {wanted.stage}"
                             f"{' with cpu_checkpointing' if kept[1] else ''}: C1 and C2 are stage 1 (C2 with "
                             "partition_activations), C3 to C5 stage 2 (C4 with partition_activations, C5 with "
                             "cpu_checkpointing, too)")
        if "config" in wanted.given and wanted.given["config"] != fitting[0]:
            raise ValueError(f"it asks for {fitting[0]}, and the command line has --config {wanted.given['config']}: "
                             "leave one of them out")
        wanted.flags["config"] = fitting[0]

    return _read(parser, arguments, fit, arguments.model_parallel, mesh=True)


def _read(parser: Parser, arguments: argparse.Namespace, fit: Callable[[Wanted], None], model_parallel: int,
          mesh: bool = False) -> Callable[[Settings], Settings]:
    path = arguments.deepspeed_config
    if path is None:
        return lambda settings: settings
    ranks = int(os.environ.get("WORLD_SIZE", 1)) // model_parallel
    try:
        wanted = Wanted(deepspeed_file.read(path), parser.given_values(), vars(arguments), ranks, mesh)
        fit(wanted)
    except ValueError as error:
        parser.error(f"--deepspeed-config {path}: {error}")
    vars(arguments).update(wanted.flags)
    if int(os.environ.get("RANK", 0)) == 0:
        for line in (words(wanted), *wanted.notes):
            print(f"{os.path.basename(path)}: {line}", file=sys.stderr)
    return wanted.settings


def words(wanted: Wanted) -> str:
    """What the file says, as flags; and what no flag says."""
    flags = " ".join(f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float) else
                     f"--{name.replace('_', '-')} {value}" for name, value in wanted.flags.items() if value is not None)
    more = [f"{name}: " + ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                                    for key, value in part.items())
            for name, part in (("optimizer", wanted.optimizer), ("scheduler", wanted.scheduler), ("fp16", wanted.fp16))
            if part]
    return "; ".join(["it says " + flags, *more])
