"""python -m zero_minimal COMMAND: the tools around the stages."""

import importlib
import sys

COMMANDS = {  # name: (module of this package with main(arguments), what it does)
    "compare": ("programs.compare",
                "all stages, torch's DDP and FSDP2 on the same work: table, picture"),
    "plan": ("programs.plan",
             "what a model needs on each device, by stage: formulas"),
    "simulate": ("programs.simulate",
                 "a stage's own code as one rank of 1024, on tensors without memory"),
    "reproduce": ("programs.reproduce",
                  "the paper's tables and figures beside the formulas and the running code"),
    "bench": ("programs.bench",
              "time stages and peers in turn, beside DDP; traffic and memory; scaling"),
    "grade": ("classroom.grade",
              "points for an assignment, and what to mend"),
    "starters": ("classroom.starters",
                 "write the assignments anew from the reference"),
}


def overview() -> str:
    """What --help prints."""
    lines = [f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join((
        "usage: python -m zero_minimal COMMAND [flags]", "", "commands:", *lines, "",
        "python -m zero_minimal COMMAND --help shows a command's flags.",
        "To train with one stage: torchrun --nproc-per-node 2 zero_minimal/stage2.py",
    ))


def main(arguments: list[str]) -> int | str | None:
    """Run a command; the result is for sys.exit."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return None if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"unknown command {name!r}\n\n{overview()}", file=sys.stderr)
        return 2
    return importlib.import_module("zero_minimal." + COMMANDS[name][0]).main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
