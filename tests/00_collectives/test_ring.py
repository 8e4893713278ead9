"""The ring algorithms: what the collectives give, and the bytes that a ring sends."""

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.core import collectives, ring

PART = 35  # elements


def numbers(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(13 * rank + size))


def rounding(size, world_size):
    """A sum of N numbers in another order: each of N - 1 additions rounds by half a unit of fp32, in both orders."""
    total = sum(numbers(rank, size).abs() for rank in range(world_size))
    return 2 * (world_size - 1) * torch.finfo(torch.float32).eps / 2 * total


def check_values():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = numbers(rank, world_size * PART)
    ours, theirs = ring.reduce_scatter(whole), torch.empty(PART)
    collectives.reduce_scatter(theirs, whole, op="sum")
    assert torch.equal(whole, numbers(rank, world_size * PART)), "reduce_scatter changed its input"
    bound = rounding(world_size * PART, world_size).view(world_size, PART)[rank]
    assert ((ours - theirs).abs() <= bound).all()

    part = numbers(rank, PART)
    assert torch.equal(ring.all_gather(part), torch.cat([numbers(other, PART) for other in range(world_size)]))

    for size in (1, 3, 64, 101):
        mine = numbers(rank, size)
        ours, theirs = ring.all_reduce(mine), mine.clone()
        collectives.all_reduce(theirs, op="sum")
        assert ours.shape == mine.shape
        assert ((ours - theirs).abs() <= rounding(size, world_size)).all()
        exact = ring.all_reduce(torch.full((size,), float(rank)))  # small whole numbers do not round
        assert torch.equal(exact, torch.full((size,), float(sum(range(world_size)))))

    for root in range(world_size):
        for size, chunks in ((1, 4), (10, 3), (64, 4), (7, 1)):
            tensor = numbers(rank, size)
            assert ring.broadcast(tensor, root, chunk_count=chunks) is tensor
            assert torch.equal(tensor, numbers(root, size))


@pytest.mark.parametrize("world_size", toys.WORLDS)
def test_values(world_size):
    toys.run(check_values, world_size)


def check_groups():
    rank = dist.get_rank()
    for members in ([0, 2], [2, 1]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        order = sorted(members)  # torch numbers the ranks of a group so
        assert ring.all_reduce(torch.full((3,), float(rank)), group).tolist() == [float(sum(members))] * 3
        assert ring.all_gather(torch.tensor([float(rank)]), group).tolist() == [float(member) for member in order]
        assert ring.broadcast(torch.tensor([float(rank)]), 1, group).item() == order[1]


def test_groups():
    toys.run(check_groups, 3)


def count_bytes(size):
    """{algorithm: bytes this rank sent}, counted where they are handed to torch."""
    rank, world_size, sent = dist.get_rank(), dist.get_world_size(), []
    isend, send = dist.isend, dist.send
    dist.isend = lambda tensor, *args, **options: (sent.append(tensor.nbytes), isend(tensor, *args, **options))[1]
    dist.send = lambda tensor, *args, **options: (sent.append(tensor.nbytes), send(tensor, *args, **options))[1]
    calls = {
        "reduce_scatter": lambda: ring.reduce_scatter(numbers(rank, world_size * size)),
        "all_gather": lambda: ring.all_gather(numbers(rank, size)),
        "all_reduce": lambda: ring.all_reduce(numbers(rank, world_size * size)),
        "broadcast": lambda: ring.broadcast(numbers(rank, world_size * size), root=1 % world_size),
    }
    counted = {}
    for name, call in calls.items():
        sent.clear()
        call()
        counted[name] = sum(sent)
    return counted


@pytest.mark.parametrize("world_size", toys.WORLDS)
def test_bytes(world_size):
    """Exactly: every rank sends (N - 1)/N of the payload; in a broadcast all but the ring's last one send all of it."""
    counted = toys.run(count_bytes, world_size, PART)
    share = (world_size - 1) * PART * 4
    last = 1 % world_size - 1  # the root's left neighbour
    for rank, bytes_of in enumerate(counted):
        whole = 0 if rank == last % world_size else world_size * PART * 4
        assert bytes_of == {
            "reduce_scatter": share,
            "all_gather": share,
            "all_reduce": 2 * share,
            "broadcast": whole,
        }
