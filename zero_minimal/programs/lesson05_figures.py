"""Patients: the figures and the pictures of lesson 05's page. A GPT is cut over ranks, once right, and three times with
one mistake in one of its layers; and what each rank owns and sends.

    python -m zero_minimal.programs.lesson05_figures lessons/05_tensor_parallel

writes measured.json into that folder, and patients.png from it; and region.png, which shows no figures. What is counted
are bytes, calls and errors of gradients, never time. So another machine gives the same, but for rounding.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure

from zero_minimal.meters.layer_errors import layer_errors
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.pictures.layer_error_chart import RIGHT, draw_patients
from zero_minimal.pictures.region import draw_region
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.tensor_parallel import ParallelGPT, ParallelMLP, f, g, shard
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

WORLDS = (1, 2, 4)
PATIENT_RANKS = 2
SMALL = Settings(layers=3, hidden=64, heads=4, steps=60)  # of the patients
ILL = 1  # the block whose MLP has the mistake


# ------------------------------------------------------------------------------------------------------------ mistakes


def forget_f(mlp: ParallelMLP) -> None:
    """x goes into the first matrix as it is."""
    layer = mlp.expansion
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)


def forget_g(mlp: ParallelMLP) -> None:
    """What comes out of the second matrix stays a part."""
    layer = mlp.projection
    layer.forward = lambda x: F.linear(x, layer.weight) + layer.bias


def split_before_gelu(mlp: ParallelMLP) -> None:
    """The first matrix is cut by its inputs, and GELU gets a part of a sum on each rank."""
    group, ranks_, first = mlp.expansion.group, dist.get_world_size(mlp.expansion.group), mlp.expansion
    rank = dist.get_rank(group)

    def forward(x):
        own = f(x, group).chunk(ranks_, -1)[rank]
        hidden = g(F.gelu(F.linear(own, first.weight, first.bias / ranks_), approximate="tanh"), group)
        return mlp.projection(f(hidden, group).chunk(ranks_, -1)[rank])

    first.cut = lambda name, whole: shard(whole, 1, group) if name == "weight" else whole
    outputs, inputs = first.weight.shape[0] * ranks_, first.weight.shape[1]
    first.weight = torch.nn.Parameter(torch.zeros(outputs, inputs // ranks_))
    first.bias = torch.nn.Parameter(torch.zeros(outputs))
    mlp.forward = forward


MISTAKES: dict[str, Callable[[ParallelMLP], None]] = {
    "f forgotten": forget_f, "g forgotten": forget_g, "split before GELU": split_before_gelu,
    "no mistake": lambda mlp: None,
}
PATIENTS = {"split before GELU": "A", "f forgotten": "B", "g forgotten": "C"}  # as the page calls them


# ----------------------------------------------------------------------------------------------------------- in a rank


def trained(settings: Settings) -> tuple[dict, dict, float, list]:
    """A GPT after some steps in one process: its weights; and of the next batch gradients, loss, and the batch."""
    torch.manual_seed(settings.seed)
    model, batches = GPT(settings.model_config()), loop.training_batches(settings, 0)
    optimizer = torch.optim.AdamW(model.parameters(), **settings.optimizer_options())
    for _ in range(settings.steps):
        optimizer.zero_grad()
        model(*next(batches)).backward()
        optimizer.step()
    optimizer.zero_grad()
    batch = next(batches)
    loss = model(*batch)
    loss.backward()
    return model.state_dict(), {name: param.grad for name, param in model.named_parameters()}, loss.item(), list(batch)


def examine(settings: Settings, weights: dict, gradients: dict, batch: list) -> dict[str, dict]:
    """{mistake: loss of each rank, and the errors of its gradients by layer}, with the mistake in one MLP."""
    found = {}
    with ranks.start():
        for name, make in MISTAKES.items():
            model = ParallelGPT(settings.model_config())
            make(model.blocks[ILL].mlp)
            model.load_whole(weights)
            loss = model(*batch)
            loss.backward()
            losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(losses, loss.detach())
            found[name] = {"losses": [one.item() for one in losses], "layers": layer_errors(model, gradients)}
    return found


def by_signs() -> dict[str, float]:
    """How wrong the outputs of two layers are with ReLU in between if the first is cut by its inputs: with numbers of
    both signs, and with positive ones alone. A share of their size. One process will do: the mistake is in the sums."""
    found = {}
    for name, change in (("mixed", lambda x: x), ("positive", torch.abs)):
        generator = torch.Generator().manual_seed(0)
        shapes = (32, 16), (64, 16), (16, 64)
        x, first, second = (change(torch.randn(*shape, generator=generator)) for shape in shapes)
        parts = [F.linear(mine, weight) for mine, weight in zip(x.chunk(2, -1), first.chunk(2, -1), strict=True)]
        right = F.linear(F.relu(sum(parts)), second)
        found[name] = ((F.linear(sum(map(F.relu, parts)), second) - right).norm() / right.norm()).item()
    return found


def counted(settings: Settings) -> dict:
    """What a rank owns of the model, and what it sends in forward and in backward of the default run's batch."""
    with ranks.start() as rank:
        torch.manual_seed(settings.seed)
        model = ParallelGPT(settings.model_config())
        batch, phases = next(loop.training_batches(settings, 0)), {}
        with TrafficMeter() as meter:
            loss = model(*batch)
        phases["forward"] = meter.per_step(1)
        meter.reset()
        with meter:
            loss.backward()
        phases["backward"] = meter.per_step(1)
        whole = sum(param.numel() for param in model.replicated())
        return {"ranks": rank.world_size, "batch": settings.batch, "replicated": whole, "loss": loss.item(),
                "parameters": sum(map(torch.numel, model.parameters())), "phases": phases}


# ------------------------------------------------------------------------------------------------------------- figures


def measure() -> dict:
    """All that the page and its pictures need."""
    with progress.bar(name="lesson 05", total=len(WORLDS) + 2, unit="run") as bar:
        rows = []
        for world_size in WORLDS:
            rows.append(ranks.run(counted, world_size, Settings(), device="cpu", timeout=300)[0])
            bar.update()
        rows.append(ranks.run(counted, 2, Settings(batch=2 * Settings().batch), device="cpu", timeout=300)[0])
        bar.update()
        weights, gradients, loss, batch = trained(SMALL)
        patients = ranks.run(examine, PATIENT_RANKS, SMALL, weights, gradients, batch, device="cpu", timeout=300)[0]
        bar.update()
    return {"rows": rows, "loss": loss, "patients": patients, "signs": by_signs()}


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    known = {f"patient {letter}": measured["patients"][name]["layers"] for name, letter in PATIENTS.items()}
    return {"region.png": draw_region(), "patients.png": draw_patients(known)}


def table(measured: dict) -> str:
    """What was measured, in MB and shares."""
    lines = [["ranks", "batch", "parameters", "all-reduces", "MB sent"]]
    for row in measured["rows"]:
        phases = row["phases"].values()
        calls = sum(phase["collectives"].get("all_reduce", {"calls": 0})["calls"] for phase in phases)
        sent = sum(phase["sent_bytes"] for phase in phases)
        lines.append([str(row["ranks"]), str(row["batch"]), f"{row['parameters']:,}", str(calls), f"{sent / 1e6:.2f}"])
    ill = [["mistake", "loss", "layers that are wrong"]]
    for name, found in measured["patients"].items():
        wrong = sum(layer["error"] > RIGHT for layer in found["layers"])
        ill.append([name, " ".join(f"{loss:.4f}" for loss in found["losses"]), f"{wrong} of {len(found['layers'])}"])
    signs = ", ".join(f"{name} numbers {share:.0%}" for name, share in measured["signs"].items())
    return "\n".join((report.table(lines), report.table(ill), f"loss in one process: {measured['loss']:.4f}",
                      f"ReLU of parts of a sum, error of the outputs: {signs}"))


main = figures.program("05_tensor_parallel", measure, pictures, table)

if __name__ == "__main__":
    main()
