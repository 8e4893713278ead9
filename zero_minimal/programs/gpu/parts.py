"""Parts: the parts of check-gpu. Each runs in its own process, so that a part that hangs or crashes becomes a line of
the table, and the others still run.

    python -m zero_minimal.programs.gpu.parts NAME --json FILE [--gpus N] [--dry]

is the command that check-gpu starts; use it to rerun a failed part.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from zero_minimal.programs import report
from zero_minimal.programs.gpu.place import Place


@dataclass(frozen=True)
class Part:
    """What it checks, in words; the file in this folder with its function(place); its limit in seconds; GPUs that it
    needs."""

    title: str
    module: str
    limit: float
    gpus: int = 1


PARTS = {  # in the order in which they run; their limits add up to 8 minutes
    "machine": Part("what is here", "place", 20),
    "nccl": Part("all stages on NCCL, a rank a GPU", "agreement", 50),
    "shared": Part("all stages, ranks that share a GPU", "agreement", 70),
    "memory": Part("the ledger beside the allocator", "ledger_check", 75),
    "offload": Part("offload: copies beside computation", "copies", 60),
    "checkpoints": Part("P_a+cpu: copies beside computation", "copies", 40),
    "fragments": Part("M_D beside the allocator's statistics", "ledger_check", 30),
    "overlap": Part("NCCL beside computation", "copies", 40, gpus=2),
    "throughput": Part("speed beside DDP and FSDP2", "throughput", 95),
}


def function_of(name: str) -> Callable[[Place], dict]:
    """The part's function, which has its name."""
    return getattr(importlib.import_module(f"zero_minimal.programs.gpu.{PARTS[name].module}"), name)


def main(arguments: list[str]) -> None:
    """Run one part, and write its results to a file."""
    parser = argparse.ArgumentParser(prog="python -m zero_minimal.programs.gpu.parts")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--json", required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--trace", default="")
    parser.add_argument("--dry", action="store_true")
    flags = vars(parser.parse_args(arguments))
    name, file = flags.pop("name"), flags.pop("json")
    report.write_json(function_of(name)(Place(**flags)), file)


if __name__ == "__main__":
    main(sys.argv[1:])
