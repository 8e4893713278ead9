"""Buffers: the figures and the pictures of lesson 07's page, from constant buffers and one buffer for all.

    python -m zero_minimal.programs.lesson07_figures lessons/07_constant_buffers

writes measured.json into that folder, and from it trays.png, sizes.png and ones.png. Bytes, counts and the order of
events are the same on any machine. Only the seconds of "prices" are this machine's.
"""

import time

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fused_all_reduce
from zero_minimal.core import collectives
from zero_minimal.core.gradient_memory import GradientMemory
from zero_minimal.meters.double_buffer_trace import Trays, numbered
from zero_minimal.meters.observer import Observer
from zero_minimal.pictures.double_buffer_chart import draw_ones, draw_sizes, draw_trays
from zero_minimal.processes import ranks
from zero_minimal.programs import figures, progress, report
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import ConstantMemory

RANKS = 2
ROOM = 1000  # elements of a buffer in the picture
SIZES = (400, 250, 2300, 100, 600, 30, 500)  # of its tensors
SIZE = 4 * 2**20  # bytes of a buffer
MEASURED, CALCULATED = (10**6, 10**7, 10**8), (10**9, 3 * 10**9)  # parameters
PRICED = 4_820_992  # parameters of the default run
PRICES = tuple(2**power for power in range(14, 25, 2))  # bytes of a buffer: 16 KiB to 16 MiB
ROUNDS = 9  # of which the fastest counts: whatever disturbs only makes it slower
BUCKETS = (2**18, 2**20, 2**22, 2**24, 2**25)  # bytes, of stage 2
ONES, EVERY = 4096, 32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PARTS = (4096, 1, 1, -4096)  # of four ranks


class Turns(GradientMemory):
    """Whole gradients of stage 2 go through two constant buffers, C_B; their shards lie where they do without it."""

    def __init__(self, buckets, group=None):
        self.constant_buffers = ConstantMemory(buckets, group).constant_buffers

    def whole(self, bucket):
        return self.constant_buffers.take()[: bucket.padded].zero_()

    def give_back(self, whole):
        pass


# ----------------------------------------------------------------------------------------------------------- in a rank


def watched_trays() -> dict:
    """This rank's record of Trays."""
    with Trays(ConstantBuffers(4 * ROOM)) as trays:
        all_reduce(numbered(SIZES), trays)
    return trays.record


def gradients_of(parameters: int) -> list[torch.Tensor]:
    """So many elements, in tensors of 100,000 and the rest."""
    return list(torch.ones(parameters).split(100_000))


def bytes_of_buffers(parameters: int) -> dict:
    """What each of the two ways allocates to keep numbers of the gradients in, scratch of collectives left out."""
    tensors, found = gradients_of(parameters), {}
    buffers = ConstantBuffers(SIZE)
    all_reduce(tensors, buffers)
    found["constant"] = sum(buffer.untyped_storage().nbytes() for buffer in buffers.buffers)
    with collectives.heard_by(lambda moment, call: found.update(fused=call.tensors[0].untyped_storage().nbytes())):
        fused_all_reduce(tensors)
    return {"parameters": parameters, **found, "measured": True}


def price(size: int | None, rounds: int = ROUNDS) -> dict:
    """Seconds of one all-reduce of the default run's gradients, the fastest of some, and the number of collectives."""
    tensors, starts, seconds = gradients_of(PRICED), [], []
    buffers = ConstantBuffers(size) if size else None
    for _ in range(rounds):
        starts.clear()
        dist.barrier()
        began = time.perf_counter()
        with collectives.heard_by(lambda moment, call: moment == "start" and starts.append(call)):
            all_reduce(tensors, buffers) if buffers else fused_all_reduce(tensors)
        seconds.append(time.perf_counter() - began)
    return {"size": size, "seconds": min(seconds), "collectives": len(starts)}


def stage_2(bucket_bytes: int, memory: type, settings: Settings) -> dict:
    """Bytes at the highest moment of a step of stage 2, and how many of them are activations and buffers."""
    with ranks.start() as rank:
        zero = loop.build(Stage2, settings, rank, bucket_bytes=bucket_bytes, memory=memory)
        observer = Observer(zero, rank, settings)
        for _ in loop.steps(zero, loop.training_batches(settings, rank.rank), settings, observers=[observer]):
            pass
        peak = observer.report()["memory"]
        return {"bucket": bucket_bytes, "constant": memory is Turns, "buckets": len(zero.buckets), "peak": peak["peak"],
                "activations": peak["peak_by_category"]["activations"], "buffers": peak["peak_by_category"]["buffers"]}


def in_four(dtype: torch.dtype) -> dict:
    """The sum of PARTS over four ranks, in 16 places: by torch's own all-reduce, and through constant buffers; and what
    a rank sends for an element."""
    mine = float(PARTS[dist.get_rank()])
    own, ours, sent = torch.full((16,), mine).to(dtype), torch.full((16,), mine).to(dtype), []
    dist.all_reduce(own)
    with collectives.heard_by(lambda moment, call: moment == "start" and sent.append(call.bytes)):
        all_reduce([ours], ConstantBuffers(SIZE), "sum")
    return {"torch": own.tolist(), "buffers": ours.tolist(), "bytes": [dtype.itemsize, sum(sent) // ours.numel()]}


# ------------------------------------------------------------------------------------------------------------- figures


def ones(dtype: torch.dtype) -> list[float]:
    """A running sum of ONES ones in this dtype, after each EVERY of them."""
    total, found = torch.zeros((), dtype=dtype), []
    for number in range(1, ONES + 1):
        total = total + torch.ones((), dtype=dtype)
        if number % EVERY == 0:
            found.append(total.item())
    return found


def measure() -> dict:
    """All that the page and its pictures need, of rank 0."""
    settings = Settings(steps=2)
    runs = len(MEASURED) + len(PRICES) + 2 * len(BUCKETS) + len(DTYPES) + 2
    with progress.bar(name="lesson 07", total=runs, unit="run") as bar:

        def first_rank(function, *args, world_size=RANKS):
            found = ranks.run(function, world_size, *args, device="cpu", timeout=300)[0]
            bar.update()
            return found

        rows = [first_rank(bytes_of_buffers, parameters) for parameters in MEASURED]
        constant = rows[-1]["constant"]
        return {
            "trays": first_rank(watched_trays),
            "rows": rows + [{"parameters": parameters, "constant": constant, "fused": 4 * parameters, "measured": False}
                            for parameters in CALCULATED],
            "prices": [first_rank(price, size) for size in (*PRICES, None)],
            "stage 2": [first_rank(stage_2, size, memory, settings)
                        for size in BUCKETS for memory in (GradientMemory, Turns)],
            "sums": {name(dtype): first_rank(in_four, dtype, world_size=len(PARTS)) for dtype in DTYPES},
            "ones": {name(dtype): ones(dtype) for dtype in DTYPES},
        }


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pictures(measured: dict) -> dict[str, Figure]:
    """The page's pictures by their names, from what measure() gave."""
    title = f"seven gradients as one long vector, cut for buffers of {ROOM:,} elements: rank 0 of {RANKS}"
    return {"trays.png": draw_trays({title: measured["trays"]}),
            "sizes.png": draw_sizes(measured["rows"], measured["prices"]),
            "ones.png": draw_ones(measured["ones"], EVERY)}


def table(measured: dict) -> str:
    """What was measured, in MB and ms."""
    memory = [["parameters", "one for all", "two constant"]]
    for row in measured["rows"]:
        memory.append([f"{row['parameters']:,}", f"{row['fused'] / 1e6:,.1f}", f"{row['constant'] / 1e6:,.1f}"])
    prices = [["a buffer", "collectives", "ms"]]
    for row in measured["prices"]:
        size = f"{row['size'] / 1e6:.3f}" if row["size"] else "for all"
        prices.append([size, str(row["collectives"]), f"{1e3 * row['seconds']:.1f}"])
    peaks = [["a bucket", "buckets", "C_B", "highest"]]
    for row in measured["stage 2"]:
        peaks.append([f"{row['bucket'] / 1e6:.2f}", str(row["buckets"]), "yes" if row["constant"] else "",
                      f"{row['peak'] / 1e6:.2f}"])
    return "\n\n".join(map(report.table, (memory, prices, peaks)))


main = figures.program("07_constant_buffers", measure, pictures, table)

if __name__ == "__main__":
    main()
