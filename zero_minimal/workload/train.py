"""The loop: one for all stages, and for the peers of torch they are compared with.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --steps 100
"""

import math
import threading
from contextlib import nullcontext

import torch
from tqdm import tqdm

from zero_minimal.foundations import collectives, ranks
from zero_minimal.foundations.precision import LossScaler
from zero_minimal.meters.observer import Observer
from zero_minimal.programs import report
from zero_minimal.workload import data
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import (
    DTYPES,
    Parser,
    Settings,
    add_device,
    add_settings,
    output_file,
    read_settings,
)

WARM_UP = 100  # steps

tqdm.set_lock(threading.RLock())  # its own lock, between processes, would outlive a rank and be reported as leaked


def train(stage_class, settings: Settings, rank: ranks.Rank) -> dict:
    """Train a GPT on this rank's batches, and return this rank's report (the JSON object of the README).

    Args:
        stage_class: Stage0 … Stage3, or a peer with the same API.
    The losses, in nats a token, are means over the ranks. Raises ValueError if the text cannot be read or is too short.
    """
    training, held_out = data.split(data.read_tokens(settings.text), settings.sequence)
    batches = data.Batches(training, settings.batch, settings.sequence, settings.seed, rank.rank)
    validation = data.validation_batches(held_out, settings.batch, settings.sequence, rank.rank, rank.world_size)

    torch.manual_seed(settings.seed)  # the same model on every rank …
    model = GPT(settings.model_config()).to(rank.device, DTYPES[settings.dtype])
    zero = stage_class(
        model, torch.optim.AdamW, bucket_bytes=int(settings.bucket_mb * 2**20),
        lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
    )
    torch.manual_seed(settings.seed + 1 + rank.rank)  # … but dropout of its own
    scaler = LossScaler() if settings.dtype == "fp16" else None
    observer = Observer(zero, rank, settings)

    losses, validation_losses = [], [evaluate(zero, validation, rank)]
    steps = tqdm(range(settings.steps), desc=stage_class.__name__, unit="step", disable=rank.rank != 0)
    for step in steps:
        for group in zero.optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        with observer.step():
            zero.zero_grad()  # first, not last: at the end of the step the observer counts the gradients too
            loss = 0.0
            for micro in range(settings.accumulate):
                inputs, targets = (tokens.to(rank.device) for tokens in next(batches))
                is_last = micro == settings.accumulate - 1
                with nullcontext() if is_last else zero.no_sync():
                    part = zero.model(inputs, targets) / settings.accumulate
                    (scaler.scale(part) if scaler else part).backward()
                loss += part.item()
            update(zero, scaler, settings.clip)
        losses.append(loss)
        steps.set_postfix(loss=f"{loss:.3f}", refresh=False)
    validation_losses.append(evaluate(zero, validation, rank))

    return observer.report() | {
        "losses": mean_over_ranks(losses, rank),
        "validation_losses": validation_losses,
    }


def update(zero, scaler: LossScaler | None, clip: float) -> None:
    """One optimizer step, clipped if `clip` is not 0, and with the loss scale taken out again if there is one."""
    if scaler:
        scaler.unscale_(zero)
    if clip:
        zero.clip_grad_norm_(clip)
    if scaler:
        scaler.step(zero)
        scaler.update()
    else:
        zero.step()


def learning_rate(step: int, settings: Settings) -> float:
    """A linear warm-up over WARM_UP steps, times half a cosine down to a tenth.

    Warm-up counts steps, however long the run is: a young model that is pushed too fast stumbles.
    """
    warm = min(1.0, (step + 1) / WARM_UP)
    return settings.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))


@torch.no_grad()
def evaluate(zero, batches, rank: ranks.Rank) -> float:
    """Mean loss over the validation batches of all ranks."""
    zero.model.eval()
    total, count = 0.0, 0
    for inputs, targets in batches:
        total += zero.model(inputs.to(rank.device), targets.to(rank.device)).item() * len(inputs)
        count += len(inputs)
    zero.model.train()
    return mean_over_ranks([total / count], rank)[0]


def mean_over_ranks(values: list[float], rank: ranks.Rank) -> list[float]:
    """Means of the ranks' numbers, the same on every rank."""
    mean = torch.tensor(values, dtype=torch.float64, device=rank.device)
    collectives.all_reduce(mean, op="avg")
    return mean.tolist()


def main(stage_class) -> None:
    """The program of a stage file: read the flags, train, print the report, and write it as JSON if asked to."""
    parser = Parser(
        description=f"Train a GPT with {stage_class.__name__}, by itself or under torchrun --nproc-per-node N.",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report to this file")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU for each rank, else gloo")
    add_device(parser)
    add_settings(parser)
    arguments = parser.parse_args()
    settings = read_settings(parser, arguments)

    with ranks.start(arguments.device, arguments.backend) as rank:
        result = train(stage_class, settings, rank)
    if rank.rank == 0:
        print(report.describe(result))
        if arguments.json:
            report.write_json(result, arguments.json)
