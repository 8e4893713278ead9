"""Offload: implements --offload, --bus and --host-budget in the programs of the stages. offload.py is stage 2 with it.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --dtype bf16 --offload cpu --bus 12GB/s
    torchrun --nproc-per-node 2 zero_minimal/stage2.py --dtype bf16 --offload disk:/scratch --host-budget 200MB
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from zero_minimal.offload import Offloaded1, Offloaded2, Offloaded3
from zero_minimal.paper import quantities
from zero_minimal.processes import interrupts
from zero_minimal.workload.settings import Parser

# by name, since a file run as a program has classes of its own
OFFLOADED = {kind.__name__: kind for kind in (Offloaded1, Offloaded2, Offloaded3)}
CLASSES = {name.replace("Offloaded", "Stage"): kind for name, kind in OFFLOADED.items()} | OFFLOADED


@dataclass(frozen=True)
class Offload:
    """The values of these flags.

    cpu: whether the ranks have hosts. bus: bytes a second, None for full speed. disk: the folder in which the host
    keeps its data, None for memory. host_budget: bytes of memory that its process may then have, None for no limit.
    """

    cpu: bool = False
    bus: float | None = None
    disk: str | None = None
    host_budget: int | None = None

    def class_of(self, stage_class: type) -> type:
        """The class that trains this stage."""
        return CLASSES[stage_class.__name__] if self.cpu else stage_class

    def options(self) -> dict:
        """The options that only an offloaded class takes."""
        return {"bus": self.bus, "disk": self.disk, "host_budget": self.host_budget} if self.cpu else {}

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """A context for making a stage: a disk or a budget that is too small ends the program with one line. All ranks
        notice it."""
        try:
            yield
        except (ValueError, OSError) as error:
            if self.disk is None:
                raise
            interrupts.refuse(f"error: --offload disk:{self.disk}: {error}")


NOTHING = Offload()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the three flags."""
    group = parser.add_argument_group("offload")
    group.add_argument("--offload", metavar="cpu|disk:FOLDER", help="masters, optimizer state and the update are on "
                       "the host: in its memory, or in a file in this folder")
    group.add_argument("--bus", type=speed, metavar="SPEED", help="of the bus to a rank's host, each way, e.g. 12GB/s "
                       "(default: full speed)")
    group.add_argument("--host-budget", type=quantities.size, metavar="SIZE", help="memory that each host may have "
                       "beyond Python and torch, 200MB say, with --offload disk:FOLDER (default: what three buckets "
                       "take)")


def read_flags(parser: Parser, arguments: argparse.Namespace, stage_class: type) -> Offload:
    """Read the flags. If they contradict each other, ends the program and says what is accepted."""
    bus, budget = arguments.bus, arguments.host_budget
    if stage_class.__name__ in OFFLOADED and arguments.offload is None:
        arguments.offload = "cpu"
    if bus is not None and arguments.offload is None:
        parser.error("--bus is the speed of --offload's bus: give --offload cpu, too")
    kind, _, folder = (arguments.offload or "").partition(":")
    if budget is not None and kind != "disk":
        parser.error("--host-budget is for a host that keeps its state on a disk: give --offload disk:FOLDER, too")
    if arguments.offload is None:
        return NOTHING
    if arguments.offload != "cpu" and (kind != "disk" or not folder):
        parser.error(f"--offload {arguments.offload} is not there: --offload cpu is, and --offload disk:FOLDER")
    if stage_class.__name__ not in CLASSES:
        parser.error("--offload is for stage1.py, stage2.py and stage3.py: stage 0 has no shards that could leave, and "
                     "other files have no offloaded stage")
    if folder and not os.path.isdir(folder):
        parser.error(f"--offload {arguments.offload}: {folder} is no folder: give one that is there")
    return Offload(True, bus, folder or None, budget)


def speed(text: str) -> float:
    """Bytes a second: "12GB/s" is 12e9. The type of a flag."""
    return float(quantities.size(text.strip().removesuffix("/s")))
