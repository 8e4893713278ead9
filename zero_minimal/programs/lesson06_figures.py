"""Activation partitioning: the figures and the pictures of lesson 06's page.

    python -m zero_minimal.programs.lesson06_figures lessons/06_activation_partitioning

writes measured.json into that folder, and from it copies.png, staircase.png and messages.png. What is counted are bytes
and the order of events, never time. So another machine, or a busy one, gives the same.
"""

import functools

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.core import collectives
from zero_minimal.meters.memory import Moment
from zero_minimal.pictures.activation_chart import draw_copies, draw_messages, draw_staircase
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.programs.lesson06_program import CONFIG, INPUT, MODES, batch, build, step_of

WORLDS = (1, 2, 3, 4)
STAIRS_RANKS = 2  # of the staircase, and of the messages
COPIES_RANKS = 4
BLOCK = 3  # of those two pictures that show one block
DROPOUT = 0.1
MOMENTS = ("its turn in forward", "in between", "its turn in backward", "afterwards")


# ----------------------------------------------------------------------------------------------------------- in a rank


def watched_steps() -> dict[str, dict]:
    """{mode: what step_of() saw on this rank}; the activations of the timeline alone."""
    with ranks.start() as rank:
        return {mode: told(step_of(mode, checkpoint_blocks, rank.device)) for mode in MODES}


def told(step) -> dict:
    """A Step for JSON."""
    return {**step._asdict(), **stairs(step.timeline, step.backward), "timeline": None}


def stairs(timeline: list[Moment], backward: int) -> dict:
    """What draw_staircase() takes: of a timeline in which backward begins at that place, the activations."""
    counts = [moment.bytes["activations"] for moment in timeline]
    places = [place for place, (now, before) in enumerate(zip(counts, [None, *counts], strict=False)) if now != before]
    return {"activations": [counts[place] for place in places], "backward": sum(place < backward for place in places)}


def watched_messages() -> dict[str, list]:
    """{mode: [phase, collective, bytes] of all that belongs to a block in the second step, in order}."""
    with ranks.start() as rank:
        return {mode: messages_of(mode, rank.device) for mode in MODES}


def messages_of(mode: str, device: torch.device, block: int = BLOCK) -> list[list]:
    """The collectives of one block in a step, in order: [phase, name, bytes of the whole vector]."""
    model = build(mode, checkpoint_blocks, device)
    model(*batch(device)).backward()
    found, backward = [], False
    where: list = [None, ""]  # the block at work, and its phase

    def begins(number, *_):
        where[:] = number, "again" if backward else "forward"

    def ends(number, *_):
        where[:] = (number, "backward") if backward else (None, "")

    def left(number, *_):  # backward has left the block: what is gathered next is the input of the one below
        where[:] = number - 1, "gather"

    for number, one in enumerate(model.blocks):
        one.attention_norm.register_forward_pre_hook(functools.partial(begins, number))
        one.mlp.register_forward_hook(functools.partial(ends, number))
        one.attention_norm.register_full_backward_hook(functools.partial(left, number))

    def turns_back(gradient):  # backward comes to the last block
        where[:] = len(model.blocks) - 1, "gather" if MODES[mode] is not None else "backward"

    def hear(moment, call):
        if moment == "start" and where[0] == block:
            found.append([where[1], call.name, call.bytes])

    loss = model.norm.register_forward_hook(lambda module, args, output: args[0].register_hook(turns_back) and None)
    with collectives.heard_by(hear):
        loss, backward = model(*batch(device)), True
        loss.backward()
    return [["backward" if MODES[mode] is None and phase == "gather" else phase, *rest] for phase, *rest in found]


def watched_copies() -> dict[str, list]:
    """{mode: for each of MOMENTS [first, numbers] of a block's input: the elements that this rank holds}."""
    with ranks.start() as rank:
        return {mode: copies_of(mode, rank.device) for mode in ("checkpoints", "P_a")}


def copies_of(mode: str, device: torch.device, block: int = BLOCK) -> list[list[int]]:
    model = build(mode, checkpoint_blocks, device)
    seen: list[list[int]] = []
    inputs, outputs = [], []

    def begins(module, args):
        inputs.append(args[0].detach().clone())
        seen.append([0, args[0].numel()])

    model.blocks[block].attention_norm.register_forward_pre_hook(begins)
    model.blocks[block].register_forward_hook(lambda module, args, output: outputs.append(output.grad_fn))
    loss = model(*batch(device))
    seen.append(place_in(inputs[0], outputs[0].saved_tensors))
    loss.backward()
    assert torch.equal(*inputs), "the second run began with another input"
    try:
        seen.append(place_in(inputs[0], outputs[0].saved_tensors))
    except RuntimeError:  # autograd has freed them
        seen.append([0, 0])
    return seen


def place_in(whole: Tensor, kept: tuple) -> list[int]:
    """Which elements of a tensor are kept: the first of them, and how many."""
    (part,) = kept
    length = min(part.numel(), whole.numel())
    for first in range(0, whole.numel(), length):
        there = whole.flatten()[first : first + length]
        if torch.equal(there, part.flatten()[: there.numel()]):
            return [first, there.numel()]
    raise ValueError("what is kept is no part of the input")


def watched_savings() -> dict[str, list]:
    """{"fused" or "dropout": what autograd saves in a block of ours without a checkpoint: [shape, bytes]}."""
    with ranks.start() as rank:
        return {name: saved_in(build("no checkpoints", checkpoint_blocks, rank.device, dropout).blocks[0], rank.device)
                for name, dropout in (("fused", 0.0), ("dropout", DROPOUT))}


def saved_in(block: nn.Module, device: torch.device) -> list[list]:
    """Each storage that autograd saves in a block, parameters aside: [shape of its first tensor, bytes]."""
    known = {param.untyped_storage().data_ptr() for param in block.parameters()}
    found: dict = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found.setdefault(storage.data_ptr(), (tensor, [list(tensor.shape), storage.nbytes()]))
        return tensor

    x = torch.randn(batch(device)[0].shape + (CONFIG.hidden,), device=device, requires_grad=True)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        block(x)
    return [line for _, line in found.values()]


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need; of rank 0, where it is not said."""
    with progress.bar(name="lesson 06", total=2 * len(WORLDS) + 2, unit="run") as bar:

        def run(*call):
            found = ranks.run(*call, device="cpu", timeout=300)
            bar.update()
            return found

        steps = {str(world_size): run(watched_steps, world_size)[0] for world_size in WORLDS}
        drawn = {mode: {name: step[name] for name in ("activations", "backward")}
                 for mode, step in steps[str(STAIRS_RANKS)].items()}
        for step in (step for modes in steps.values() for step in modes.values()):
            del step["timeline"], step["activations"], step["backward"]
        return {
            "input": INPUT, "steps": steps, "stairs": drawn,
            "messages": run(watched_messages, STAIRS_RANKS)[0],
            "copies": run(watched_copies, COPIES_RANKS),
            "saved": {str(world_size): run(watched_savings, world_size)[0] for world_size in WORLDS},
        }


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    drawn = {mode: measured["stairs"][mode] for mode in ("no checkpoints", "checkpoints", "P_a")}
    messages = {mode: measured["messages"][mode] for mode in drawn}
    copies = {mode: [rank[mode] for rank in measured["copies"]] for mode in measured["copies"][0]}
    return {"copies.png": draw_copies(copies, MOMENTS, measured["input"] // 4),
            "staircase.png": draw_staircase(drawn), "messages.png": draw_messages(messages, measured["input"])}


def table(measured: dict) -> str:
    """What was measured, in MB."""
    lines = [["ranks", "mode", "kept", "on the host", "highest", "sent", "loss"]]
    for ranks_, modes in measured["steps"].items():
        for mode, step in modes.items():
            counts = (step[name] / 1e6 for name in ("kept", "on_host", "highest", "sent"))
            lines.append([ranks_, mode, *(f"{count:.1f}" for count in counts), f"{step['loss']:.6f}"])
    saved = [["ranks", "saved in a block, in inputs of a block", ""]]
    for ranks_, kinds in measured["saved"].items():
        for kind, tensors in kinds.items():
            saved.append([ranks_, kind, f"{sum(size for _, size in tensors) / measured['input']:.2f}"])
    return report.table(lines) + "\n" + report.table(saved)


main = figures.program("06_activation_partitioning", measure, pictures, table)

if __name__ == "__main__":
    main()
