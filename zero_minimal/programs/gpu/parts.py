"""Parts: the parts of check-gpu. Each runs in its own process, so that a part that hangs or crashes becomes a line of
the table, and the others still run.

    python -m zero_minimal.programs.gpu.parts NAME --json FILE [--gpus N] [--dry]

is the command that check-gpu starts; use it to rerun a failed part.
"""

import argparse
import importlib
import sys
from dataclasses import dataclass

from zero_minimal.programs import report
from zero_minimal.programs.gpu.place import Place


@dataclass(frozen=True)
class Part:
    """What it checks, in words; its function(place) in this folder; its limit in seconds; GPUs that it needs."""

    title: str
    module: str
    function: str = "run"
    limit: float = 60.0
    gpus: int = 1


PARTS = {  # in the order in which they run; their limits add up to 8 minutes
    "machine": Part("what is here", "machine", limit=20),
    "nccl": Part("all stages on NCCL, a rank a GPU", "agreement", "nccl", 50),
    "shared": Part("all stages, ranks that share a GPU", "agreement", "shared", 70),
    "memory": Part("the ledger beside the allocator", "ledger_check", limit=75),
    "offload": Part("offload: copies beside computation", "copies", "offload", 60),
    "checkpoints": Part("P_a+cpu: copies beside computation", "copies", "checkpoints", 40),
    "fragments": Part("M_D beside the allocator's statistics", "fragments", limit=30),
    "overlap": Part("NCCL beside computation", "copies", "overlap", 40, gpus=2),
    "throughput": Part("speed beside DDP and FSDP2", "throughput", limit=95),
}


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
    module = importlib.import_module(f"zero_minimal.programs.gpu.{PARTS[name].module}")
    report.write_json(getattr(module, PARTS[name].function)(Place(**flags)), file)


if __name__ == "__main__":
    main(sys.argv[1:])
