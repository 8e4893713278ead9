"""python -m zero_minimal COMMAND: the tools around the stages."""

import difflib
import importlib
import sys

from zero_minimal.processes import interrupts
from zero_minimal.programs import progress

COMMANDS = {  # name: (module of this package with main(arguments), what it does)
    "compare": ("programs.compare",
                "all stages, torch's DDP and FSDP2 on the same work: table, picture"),
    "plan": ("programs.plan",
             "what a model needs on each device, by stage: formulas"),
    "sliders": ("programs.what_if",
                "the plan with sliders, as one HTML file for a browser"),
    "simulate": ("programs.simulate",
                 "a stage's own code as one rank of 1024, on tensors without memory"),
    "reproduce": ("programs.reproduce",
                  "the paper's tables and figures beside the formulas and the running code"),
    "replicate": ("programs.replicate",
                  "a report's claim that ZeRO lowers the loss: its mistake, and what is left"),
    "poster": ("programs.poster",
               "the course on one page of A3, from what its lessons measured"),
    "bench": ("programs.bench",
              "time stages and peers in turn, beside DDP; traffic and memory; scaling"),
    "latency": ("programs.latency",
                "what a message costs here before its first byte: measured, fitted, drawn"),
    "check-gpu": ("programs.check_gpu",
                  "what only a GPU can show: memory, overlap, bits, speed; 8 minutes"),
    "export": ("programs.export",
               "a checkpoint's weights as a safetensors file, for the plain model"),
    "import": ("programs.import_weights",
               "the other way round, from transformers' files, too"),
    "grade": ("classroom.grade",
              "points for an assignment, and what to mend; --watch: at each save"),
    "board": ("classroom.board",
              "a class's table for the budget, the open part of lesson 10"),
    "hunt": ("classroom.hunt",
             "points for your answers to the bug hunts, and what speaks against a wrong one"),
    "progress": ("classroom.course",
                 "your points and guesses in all lessons, and what to do next"),
    "starters": ("classroom.starters",
                 "write the assignments anew from the reference"),
    "notebooks": ("programs.notebooks",
                  "copies of the notebooks to hand out, without outputs and answers"),
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
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        words = (f": did you mean {near[0]}? (--help shows all there is)" if near
                 else f"\n\n{overview()}")
        print(f"unknown command {name!r}{words}", file=sys.stderr)
        return 2
    if not {"-h", "--help"} & set(rest):
        progress.announce(f"{name}: loading …")
    module = importlib.import_module("zero_minimal." + COMMANDS[name][0])
    progress.take_back()
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(interrupts.program(main)(sys.argv[1:]))
