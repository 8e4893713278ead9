"""The ranks of `replicate`: they run the passes of a session one after the other, as a script or a notebook does.

A pass with the SAME model continues with the object that the previous pass trained. It has a new optimizer, warm-up and
order of the data, the same each time. So two passes of a seed differ only in what their table shows.
"""

import hashlib
import statistics
import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_minimal.core import collectives
from zero_minimal.meters.memory import Ledger
from zero_minimal.offload import Offloaded2
from zero_minimal.processes import ranks
from zero_minimal.programs.replicate_plan import NEW, OFFLOADED, PLAIN, STANDARD, ZERO, Pass, Session
from zero_minimal.stage0 import Stage0
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop
from zero_minimal.workload.encoder import Encoder, EncoderConfig
from zero_minimal.workload.reviews import Batches
from zero_minimal.workload.settings import Settings


class Plain:
    """A model and its torch optimizer with the API of the stages, for one rank: nothing is flattened or sent."""

    def __init__(self, model: torch.nn.Module, optimizer_class: type, *, bucket_bytes: int, **options):
        self.model, self.optimizer = model, optimizer_class(model.parameters(), **options)
        self.no_sync, self.step, self.zero_grad = nullcontext, self.optimizer.step, self.optimizer.zero_grad


CLASSES = {STANDARD: Stage0, ZERO: Stage2, OFFLOADED: Offloaded2, PLAIN: Plain}
SEQUENCE = 32  # words; longer sentences are truncated
MEMORY_TOLD = ("table", "memory")  # parts with a ledger, which takes a second to open
WATCHED = 2  # steps of a pass under the ledger, which slows them; the other steps are timed
WARM = 10  # further steps that the median step leaves out, if possible


class Data(NamedTuple):
    """Reviews as tokens, int64 [reviews, sequence], and labels, int64 [reviews]; vocabulary: number of words."""

    tokens: Tensor
    labels: Tensor
    held_out_tokens: Tensor
    held_out_labels: Tensor
    vocabulary: int


def run(session: Session, data: Data) -> list[dict]:
    """Run in each rank: return a report for each pass."""
    torch.set_num_threads(1)  # the same bits with any number of cores; on busy ones threads wait for each other
    with ranks.start() as rank:
        ledger = Ledger(rank.device.type) if session.part in MEMORY_TOLD else None
        held = sum(part.nbytes for part in data[:4]) if rank.device.type == "cpu" else 0  # the ledger counts them there
        model, found = None, []
        for each in session.passes:
            if each.model == NEW:
                model = None  # free it before the new one is made
                torch.manual_seed(session.seed)
                sizes = session.size.layers, session.size.hidden, session.size.heads
                model = Encoder(EncoderConfig(*sizes, data.vocabulary, SEQUENCE)).to(rank.device)
            before = len(ledger.timeline) if ledger else 0
            found.append(train(model, each, session, data, ledger, rank))
            if ledger:
                highest = max(moment.total for moment in ledger.timeline[before:])
                found[-1] |= {"peak": highest - held, "peak_never_reset": ledger.peak.total - held}
        return found


def train(model: Encoder, each: Pass, session: Session, data: Data, ledger: Ledger | None, rank: ranks.Rank) -> dict:
    """Run one pass; return its final losses, memory and times."""
    count = len(data.labels) // each.batch
    if session.steps is not None:  # twice the batch has half as many
        count = min(count, session.steps * 8 // each.batch)
    settings = Settings(steps=count, lr=session.rate, seed=session.seed, batch=each.batch // rank.world_size,
                        bucket_mb=session.bucket_mb)
    with ledger or nullcontext():
        zero = CLASSES[each.kind](model, torch.optim.AdamW, bucket_bytes=int(settings.bucket_mb * 2**20),
                                  **settings.optimizer_options())
        if ledger:
            ledger.watch(zero)
    loop.seed_dropout(settings, rank.rank)
    steps = loop.steps(zero, Batches(data.tokens, data.labels, each.batch, session.seed, rank.rank, rank.world_size),
                       settings)
    losses, seconds = [], []
    for step in range(settings.steps):
        with (step < WATCHED and ledger) or nullcontext():
            start = time.perf_counter()
            losses += next(steps)
            seconds.append(time.perf_counter() - start)
    timed = seconds[WATCHED:] or seconds
    losses = torch.stack(losses)
    return {
        "kind": each.kind, "batch": each.batch, "model": each.model, "steps": settings.steps,
        "training_loss": loop.mean_over_ranks([losses.double().mean().item()], rank)[0],
        "losses": digest([losses]), "weights": digest(model.parameters()), **evaluate(model, data, rank),
        "parameters": sum(param.numel() for param in model.parameters() if param.requires_grad),
        "step_seconds": statistics.median(timed[WARM:] or timed),
        "seconds": sum(timed) * settings.steps / len(timed),  # estimated for all steps without the ledger
    }


@torch.no_grad()
def evaluate(model: Encoder, data: Data, rank: ranks.Rank) -> dict[str, float]:
    """Mean loss and accuracy over all held-out reviews; each rank reads its part."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=rank.device)
    rows = torch.arange(rank.rank, len(data.held_out_labels), rank.world_size)
    for part in rows.split(64):
        labels = data.held_out_labels[part].to(rank.device)
        logits = model(data.held_out_tokens[part].to(rank.device))
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == labels).sum()])
    model.train()
    collectives.all_reduce(totals, op="sum")
    loss, right = (totals / len(data.held_out_labels)).tolist()
    return {"validation_loss": loss, "accuracy": right}


def digest(tensors) -> str:
    """A hash of the tensors' bits: equal only for equal bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
