"""The training loop for all stages, for systems made of them, and for their peers in torch.

    zero = build(Stage2, settings, rank)
    for losses in steps(zero, batches, settings):
        ...

Measurements are passed in as observers: the loop does not know what they measure.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext

import torch

from zero_minimal.core import collectives
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.processes import ranks
from zero_minimal.workload import data, masking
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import DTYPES, Settings


def build(
    stage_class: Callable, settings: Settings, rank: ranks.Rank, *, from_meta: bool = False,
    **options,
):
    """A stage or a peer, made with `options`, around the GPT or settings.model, with equal values
    on every rank. from_meta: stage 3 gets settings.model on the meta device."""
    torch.manual_seed(settings.seed)
    with rank.device if settings.model else nullcontext():
        if settings.model:
            foreign, dtype = settings.foreign, DTYPES[settings.dtype]
            model = foreign.on_meta(dtype) if from_meta else foreign.build(dtype)
        else:
            model = GPT(settings.model_config()).to(rank.device, DTYPES[settings.dtype])
        optimizer_class, its_options = settings.optimizer_class(), settings.optimizer_options()
        zero = stage_class(model, optimizer_class, **its_options, **options)
    seed_dropout(settings, rank.rank)
    return zero


def seed_dropout(settings: Settings, data_rank: int) -> None:
    """From now on, each rank that reads its own data also draws its own random numbers."""
    torch.manual_seed(settings.seed + 1 + data_rank)


def training_batches(settings: Settings, data_rank: int) -> data.Batches:
    """A rank's endless batches. Raises: ValueError for a text that is too short or unreadable."""
    training, _ = data.split(settings.read_tokens(), settings.sequence)
    return data.Batches(training, settings.batch, settings.sequence, settings.seed, data_rank,
                        settings.gap)


def validation_batches(settings: Settings, data_rank: int, data_ranks: int) -> list:
    """A rank's part of the validation set."""
    _, held_out = data.split(settings.read_tokens(), settings.sequence)
    batches = data.validation_batches(
        held_out, settings.batch, settings.sequence, data_rank, data_ranks
    )
    gap = settings.gap
    return batches if gap is None else [
        masking.with_gaps(tokens, gap, f"validation, rank {data_rank}, batch {number}")
        for number, (tokens, _) in enumerate(batches)]


def steps(
    zero, batches: Iterable, settings: Settings, *,
    scaler: LossScaler | None = None, observers: Iterable = (), first: int = 0,
) -> Iterator[list[torch.Tensor]]:
    """Train settings.steps optimizer steps of settings.accumulate micro-batches each.

    Args:
        zero: a stage, or an object that is used like one.
        batches: pairs (inputs, targets), int64 [batch, sequence], one for each micro-batch.
        scaler: for fp16.
        observers: each one's step() is a context around every optimizer step.
        first: the step to begin with, when a run is resumed.
    Yields: after each step, the losses of its micro-batches, 0-dim tensors divided by their number,
        so that their sum is the loss of the step.
    """
    batches, device = iter(batches), next(zero.model.parameters()).device
    # some peers (DeepSpeed) have their own backward
    run_backward = getattr(zero, "run_backward", torch.Tensor.backward)
    for step in range(first, settings.steps):
        for group in zero.optimizer.param_groups:
            group.update(settings.scheduled(step, scaler.skipped if scaler else 0))
        with ExitStack() as watched:
            for observer in observers:
                watched.enter_context(observer.step())
            # not at the end of the step, so that an observer still finds the gradients there
            zero.zero_grad()
            losses = []
            for micro in range(settings.accumulate):
                inputs, targets = (tokens.to(device) for tokens in next(batches))
                is_last = micro == settings.accumulate - 1
                with nullcontext() if is_last else zero.no_sync():
                    loss = zero.model(inputs, targets) / settings.accumulate
                    run_backward(scaler.scale(loss) if scaler else loss)
                losses.append(loss.detach())
            update(zero, scaler, settings.clip)
        yield losses


def update(zero, scaler: LossScaler | None, clip: float) -> None:
    """One optimizer step, clipped unless `clip` is 0; a scaler first divides by its loss scale."""
    if scaler:
        scaler.unscale_(zero)
    if clip:
        zero.clip_grad_norm_(clip)
    if scaler:
        scaler.step(zero)
        scaler.update()
    else:
        zero.step()


@torch.no_grad()
def evaluate(zero, batches: list, rank: ranks.Rank) -> float:
    """Mean loss over the validation batches of all ranks."""
    zero.model.eval()
    total, count = 0.0, 0
    for inputs, targets in batches:
        total += zero.model(inputs.to(rank.device), targets.to(rank.device)).item() * len(inputs)
        count += len(inputs)
    zero.model.train()
    return mean_over_ranks([total / count], rank)[0]


def mean_over_ranks(values: list[float], rank: ranks.Rank) -> list[float]:
    """The mean of each number over all ranks, the same on every rank."""
    mean = torch.tensor(values, dtype=torch.float64, device=rank.device)
    collectives.all_reduce(mean, op="avg")
    return mean.tolist()
