"""The five collectives: right values in every dtype and size, blocking and asynchronous; no more bytes than needed."""

import contextlib
import os
import socket
import struct
import sys

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.core import collectives, sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 5, 33, sums.PIECE + 7)  # elements of a rank's part; the last one is summed in two pieces


def numbers(rank, size, dtype):
    """What a rank holds: any rank can compute it."""
    return torch.randn(size, generator=torch.Generator().manual_seed(31 * rank + size)).to(dtype)


def summed(size, dtype, op, world_size):
    """The sum or average over the ranks as documented: in rank order, 16-bit numbers in fp32, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    total = numbers(0, size, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + numbers(rank, size, dtype).to(wide)
    return (total / world_size if op == "avg" else total).to(dtype)


def check_all(dtype, size, op, async_op):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, part = world_size * size, slice(rank * size, (rank + 1) * size)
    pending = []

    def call(function, *tensors, **options):
        answer = function(*tensors, async_op=async_op, **options)
        assert (answer is not None) == async_op
        pending.append(answer)

    scattered, given = torch.full((size,), torch.nan, dtype=dtype), numbers(rank, whole, dtype)
    gathered = torch.full((whole,), torch.nan, dtype=dtype)
    everywhere, copied = (numbers(rank, whole + 1, dtype) for _ in range(2))
    root = world_size - 1
    call(collectives.reduce_scatter, scattered, given, op=op)
    call(collectives.all_gather, gathered, numbers(rank, size, dtype))
    call(collectives.all_reduce, everywhere, op=op)
    call(collectives.broadcast, copied, root)
    for answer in pending if async_op else ():  # all four were under way at once
        answer.wait()
        answer.wait()  # a second one finds nothing to do

    expected = summed(whole + 1, dtype, op, world_size)
    assert torch.equal(scattered, summed(whole, dtype, op, world_size)[part])
    assert torch.equal(given, numbers(rank, whole, dtype)), "reduce_scatter changed its input"
    assert torch.equal(gathered, torch.cat([numbers(other, size, dtype) for other in range(world_size)]))
    assert torch.equal(everywhere, expected)
    assert torch.equal(copied, numbers(root, whole + 1, dtype))


def check_values():
    for dtype in DTYPES:
        for size in SIZES:
            for op in ("avg", "sum"):
                for async_op in (False, True):
                    check_all(dtype, size, op, async_op)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", toys.WORLDS)
def test_values(world_size):
    toys.run(check_values, world_size)


def check_maximum():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for async_op in (False, True):
            tensor = numbers(rank, 7, dtype)
            pending = collectives.all_reduce(tensor, op="max", async_op=async_op)
            if async_op:
                pending.wait()
            assert torch.equal(tensor, torch.stack([numbers(other, 7, dtype) for other in range(world_size)]).amax(0))


def check_shapes():
    """Matrices, numbers without dimensions, strided tensors; other dtypes for broadcast."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for shape in ((), (1,), (3, 5), (2, 0)):
        tensor = torch.full(shape, float(rank))
        collectives.all_reduce(tensor, op="sum")
        assert torch.equal(tensor, torch.full(shape, float(sum(range(world_size)))))
    whole = torch.arange(24.0).view(4, 6) + rank
    for strided in (whole.t(), whole[:, ::2], whole[1:3]):
        kept = whole.clone()
        expected = strided - rank + (world_size - 1) / 2
        collectives.all_reduce(strided)
        assert torch.equal(strided, expected)
        collectives.broadcast(strided, world_size - 1)
        whole.copy_(kept)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64):
        tensor = torch.arange(3).add(rank).to(dtype)
        collectives.broadcast(tensor)
        assert torch.equal(tensor, torch.arange(3).to(dtype))
    expanded = torch.tensor(2.0).expand(3)  # all elements in one place: it can be sent, if nothing has to change
    collectives.broadcast(expanded)
    counts = torch.tensor([rank, 1])
    collectives.all_reduce(counts, op="sum")
    assert counts.tolist() == [sum(range(world_size)), world_size]


def check_in_place():
    """The small tensor may be this rank's own part of the large one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (1, 5, 40):
        flat = numbers(rank, world_size * size, torch.float32)
        part = flat.view(world_size, size)[rank]
        collectives.reduce_scatter(part, flat)
        assert torch.equal(part, summed(world_size * size, torch.float32, "avg", world_size).view(-1, size)[rank])
        collectives.all_gather(flat, part)
        assert torch.equal(flat, summed(world_size * size, torch.float32, "avg", world_size))


def check_overflow():
    """16-bit sums run in fp32: an average of large fp16 numbers is finite, and small bf16 parts are not lost."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    collectives.all_reduce(large)
    assert large.tolist() == [60000.0] * 3
    small = torch.tensor([256.0 if rank == 0 else 0.75], dtype=torch.bfloat16)  # bf16 has no number in (256, 258)
    collectives.all_reduce(small, op="sum")
    assert small.item() == torch.tensor(256 + 0.75 * (world_size - 1)).bfloat16().item()


def check_mistakes():
    world_size = dist.get_world_size()
    two, four = torch.zeros(2), torch.zeros(2 * world_size)
    for call in (
        lambda: collectives.reduce_scatter(two, torch.zeros(2 * world_size + 1)),
        lambda: collectives.reduce_scatter(two, four, op="mean"),
        lambda: collectives.reduce_scatter(two, four, op="max"),
        lambda: collectives.all_reduce(four, op="mean"),
    ):
        with pytest.raises(ValueError, match="reduce_scatter|unknown op"):
            call()


def check_the_rest():
    check_maximum()
    check_shapes()
    check_in_place()
    check_overflow()
    check_mistakes()


@pytest.mark.parametrize("world_size", toys.WORLDS)
def test_maximum_shapes_in_place_overflow_mistakes(world_size):
    toys.run(check_the_rest, world_size)


def check_groups():
    """Two groups that share a rank; roots are ranks within the group."""
    rank = dist.get_rank()
    for members in ([0, 2], [1, 2], [2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        place, count = members.index(rank), len(members)
        mine = torch.full((3,), float(rank))
        collectives.all_reduce(mine, group=group)
        assert mine.tolist() == [sum(members) / count] * 3
        part = torch.empty(2)
        collectives.reduce_scatter(part, torch.arange(2.0 * count) + rank, op="sum", group=group)
        assert part.tolist() == [count * (2 * place + offset) + sum(members) for offset in (0, 1)]
        gathered = torch.empty(2 * count)
        collectives.all_gather(gathered, torch.full((2,), float(rank)), group=group)
        assert gathered.tolist() == [float(member) for member in members for _ in range(2)]
        copied = torch.tensor([float(rank)])
        collectives.broadcast(copied, count - 1, group=group)
        assert copied.item() == members[-1]


def test_groups():
    toys.run(check_groups, 3)


def check_order_of_waiting():
    """Two all-reduces under way, waited for in the other order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    one, two = numbers(rank, 50, torch.float32), numbers(rank, 21, torch.float32)
    first = collectives.all_reduce(one, async_op=True)
    second = collectives.all_reduce(two, op="sum", async_op=True)
    second.wait()
    first.wait()
    assert torch.equal(one, summed(50, torch.float32, "avg", world_size))
    assert torch.equal(two, summed(21, torch.float32, "sum", world_size))


def test_order_of_waiting():
    toys.run(check_order_of_waiting, 3)


# ---------------------------------------------------------------------------------------------- what crosses the wire


def received_bytes():
    """What the kernel has received for this process over TCP, on all its connections together."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
    return total


def measure_bytes(payload):
    """{collective: received bytes / payload} on this rank, the payload being the large tensor."""
    world_size, measured = dist.get_world_size(), {}
    flat, part = torch.ones(payload // 4), torch.ones(payload // 4 // world_size)
    calls = {
        "reduce_scatter": lambda: collectives.reduce_scatter(part, flat),
        "all_gather": lambda: collectives.all_gather(flat, part),
        "all_reduce": lambda: collectives.all_reduce(flat),
        "broadcast": lambda: collectives.broadcast(flat),
    }
    for name, call in calls.items():
        dist.barrier()
        before = received_bytes()
        call()
        dist.barrier()  # some hundred bytes
        measured[name] = (received_bytes() - before) / payload
        dist.barrier()
    return measured


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's TCP counters")
@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_bytes_on_the_wire(world_size):
    """Within 1%: next to 12 MB, the headers and barriers of gloo are some kilobytes."""
    measured = toys.run(measure_bytes, world_size, 12 * 2**20)
    share = (world_size - 1) / world_size
    for rank in measured:
        assert rank["reduce_scatter"] == pytest.approx(share, rel=0.01)
        assert rank["all_gather"] == pytest.approx(share, rel=0.01)
        assert rank["all_reduce"] == pytest.approx(2 * share, rel=0.01)
    # from one rank to all, or back: who gets how much depends on the algorithm, together they get N - 1 tensors
    assert sum(rank["broadcast"] for rank in measured) == pytest.approx(world_size - 1, rel=0.01)
