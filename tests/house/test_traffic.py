"""The traffic meter: every collective counts once, with its payload and what a ring sends for it."""

import socket
import struct
import subprocess
import sys

import checks
import pytest
import torch
import torch.distributed as dist
from misuse import in_ranks
from torch import nn

from zero_minimal.core import collectives, ring, seams
from zero_minimal.meters import traffic
from zero_minimal.meters.traffic import TrafficMeter, in_collective, wire_bytes
from zero_minimal.processes import ranks

S = 12  # elements of a part; 4 bytes each in fp32


def calls_of_ours():
    """Each collective of ours with N·S elements or S, and how its counts must look: bytes, times (N−1)/N on a ring."""
    n = dist.get_world_size()
    whole, part = torch.ones(n * S), torch.ones(S)
    bytes_whole, bytes_part = 4 * n * S, 4 * S
    return {
        "reduce_scatter": (lambda **how: collectives.reduce_scatter(part, whole, **how), bytes_whole, 1),
        "all_gather": (lambda **how: collectives.all_gather(whole, part, **how), bytes_whole, 1),
        "all_reduce": (lambda **how: collectives.all_reduce(part, **how), bytes_part, 2),
        "broadcast": (lambda **how: collectives.broadcast(part, **how), bytes_part, 1),
    }


def calls_of_torch():
    """The same by torch.distributed itself, some under several names."""
    n = dist.get_world_size()
    whole, part = torch.ones(n * S), torch.ones(S)
    wholes, bytes_whole, bytes_part = list(whole.view(n, S)), 4 * n * S, 4 * S
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    functional = torch.distributed._functional_collectives
    world = dist.group.WORLD
    return [
        ("reduce_scatter", lambda: scatter(part, whole), bytes_whole, 1),
        ("reduce_scatter", lambda: dist.reduce_scatter(part, wholes), bytes_whole, 1),
        ("reduce_scatter", lambda: functional.reduce_scatter_tensor(whole, "sum", 0, world).sum(), bytes_whole, 1),
        ("all_gather", lambda: gather(whole, part), bytes_whole, 1),
        ("all_gather", lambda: dist.all_gather(wholes, part), bytes_whole, 1),
        ("all_gather", lambda: functional.all_gather_tensor(part, 0, world).sum(), bytes_whole, 1),
        ("all_reduce", lambda: dist.all_reduce(part), bytes_part, 2),
        ("all_reduce", lambda: functional.all_reduce(part, "sum", world).sum(), bytes_part, 2),
        ("broadcast", lambda: dist.broadcast(part, 0), bytes_part, 1),
        ("reduce", lambda: dist.reduce(part, 0), bytes_part, 1),
        ("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(whole), whole), bytes_whole, 1),
        ("all_to_all", lambda: dist.all_to_all(list(torch.empty_like(whole).view(n, S)), wholes), bytes_whole, 1),
    ]


def check(name, call, payload, rings):
    n = dist.get_world_size()
    with TrafficMeter() as meter:
        call()
    assert meter.collectives == {name: {"calls": 1, "bytes": payload}}
    assert meter.sent_bytes == rings * payload * (n - 1) // n


def check_all():
    for name, (call, payload, rings) in calls_of_ours().items():
        check(name, call, payload, rings)
        check(name, lambda call=call: call(async_op=True).wait(), payload, rings)
    for each in calls_of_torch():
        try:
            check(*each)
        except RuntimeError as error:
            assert "does not support" in str(error), "torch 2.6 on gloo does not have them all"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_once_with_payload_and_ring(world_size):
    ranks.run(check_all, world_size, device="cpu")


def rings():
    """What ring algorithms made of plain sends really send."""
    n, sent = dist.get_world_size(), {}
    for name, call in {
        "reduce_scatter": lambda: ring.reduce_scatter(torch.ones(n * S)),
        "all_gather": lambda: ring.all_gather(torch.ones(S)),
        "all_reduce": lambda: ring.all_reduce(torch.ones(n * S)),
    }.items():
        with TrafficMeter() as meter:
            call()
        assert list(meter.collectives) == ["send"]
        sent[name] = meter.sent_bytes
    return sent


def test_the_ring_formula_is_what_a_ring_sends():
    part = 4 * S
    for sent in ranks.run(rings, 3, device="cpu"):
        assert sent == {"reduce_scatter": 2 * part, "all_gather": 2 * part, "all_reduce": 4 * part}


def adding_up():
    tensor, meter = torch.ones(S), TrafficMeter()
    with meter:
        collectives.all_reduce(tensor)
    collectives.all_reduce(tensor)  # nobody is listening
    with meter, TrafficMeter() as inner:
        collectives.all_reduce(tensor)
        collectives.all_reduce(tensor, op="max")
        dist.broadcast(tensor, 0)
    assert inner.collectives["all_reduce"]["calls"] == 2 and inner.collectives["broadcast"]["calls"] == 1
    totals = meter.collectives, meter.sent_bytes, meter.per_step(3), meter.per_step(2)
    meter.reset()
    assert meter.per_step(1) == {"collectives": {}, "sent_bytes": 0}
    return totals


def test_meters_add_up_and_nest():
    payload = 4 * S
    for total, sent, thirds, halves in ranks.run(adding_up, 2, device="cpu"):
        assert total == {"all_reduce": {"calls": 3, "bytes": 3 * payload}, "broadcast": {"calls": 1, "bytes": payload}}
        assert sent == 3 * payload + payload // 2
        assert thirds["collectives"]["all_reduce"] == {"calls": 1, "bytes": payload}
        assert halves["collectives"]["all_reduce"] == {"calls": 1.5, "bytes": 1.5 * payload}
        assert halves["sent_bytes"] == sent // 2


def in_a_subgroup():
    pair = dist.new_group([0, 1])
    sent = []
    for library in (collectives, dist):
        with TrafficMeter() as meter:
            if dist.get_rank() < 2:
                library.all_reduce(torch.ones(S), group=pair)
        sent.append(meter.sent_bytes)
    return sent


def test_a_group_counts_its_own_ranks():
    assert ranks.run(in_a_subgroup, 3, device="cpu") == [[4 * S, 4 * S], [4 * S, 4 * S], [0, 0]]


def a_step_of(peer):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if peer == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    for _ in range(2):  # in its first step DDP still arranges its buckets
        with TrafficMeter() as meter:
            model(torch.ones(4, 8)).sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return meter.collectives, meter.sent_bytes


ELEMENTS = 2 * (8 * 8 + 8)


def test_ddp_all_reduces_from_cpp():
    for counts, sent in ranks.run(a_step_of, 3, "ddp"):
        assert counts.pop("broadcast", {"bytes": 0})["bytes"] <= 128, "how its buckets lie, once"
        assert counts == {"all_reduce": {"calls": 1, "bytes": 4 * ELEMENTS}}
        assert 0 <= sent - 2 * 4 * ELEMENTS * 2 // 3 <= 128


@pytest.mark.skipif(not checks.FSDP2_RUNS_ON_THE_CPU, reason="this torch's FSDP2 does not run on the CPU")
def test_fsdp2_gathers_before_forward_and_backward():
    for counts, _ in ranks.run(a_step_of, 2, "fsdp2"):
        assert counts["all_gather"] == {"calls": 2 * 2, "bytes": 2 * 4 * ELEMENTS}
        assert counts["reduce_scatter"] == {"calls": 2, "bytes": 4 * ELEMENTS}
        assert counts["all_reduce"]["bytes"] <= 4 * 4, "clipping: DTensor sums four squared norms"


@in_ranks(1)
def test_leaves_the_collectives_as_they_were():
    before = torch._C._len_torch_dispatch_stack()
    heard = []
    hear = seams.heard_by("collective", lambda *word: heard.append(word))
    with pytest.raises(ZeroDivisionError), TrafficMeter(), hear:
        with pytest.raises(ValueError, match="36 elements are not"):
            collectives.reduce_scatter(torch.ones(5), torch.ones(36))
        assert not in_collective()
        assert not heard, "a guard has refused it"
        raise ZeroDivisionError
    collectives.all_reduce(torch.ones(2))
    assert not heard, "a listener that has gone hears nothing"
    assert torch._C._len_torch_dispatch_stack() == before


# -------------------------------------------------------------------------------------------------------- on the wire


def crossing():
    """What this rank's connections carry for one reduce-scatter, while another program sends 40 MB over the
    loopback."""
    n = dist.get_world_size()
    whole, part = torch.ones(n * 2**20), torch.empty(2**20)
    collectives.reduce_scatter(part, whole)  # connections are made
    before = wire_bytes(quiet=True)
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, "-c", STRANGER], check=True)
    collectives.reduce_scatter(part, whole)
    return wire_bytes(quiet=True) - before


STRANGER = """
import socket
door = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(door.getsockname())
receiver, _ = door.accept()
for _ in range(1000):
    sender.sendall(bytes(40_000))
    receiver.recv(40_000, socket.MSG_WAITALL)
"""


@pytest.mark.skipif(wire_bytes() is None, reason="the kernel does not count here")
@pytest.mark.parametrize("world_size", (2, 3))
def test_the_wire_is_the_rank_s_own(world_size):
    expected = 4 * 2**20 * (world_size - 1)
    for wire in ranks.run(crossing, world_size, device="cpu"):
        assert expected <= wire <= 1.001 * expected


@pytest.mark.skipif(wire_bytes() is None, reason="the kernel does not count here")
def test_what_is_open_besides_does_not_count(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as sender:
        receiver, _ = door.accept()
        pair = socket.socketpair()  # no TCP
        with receiver, pair[0], pair[1], open(tmp_path / "file", "wb") as file:
            before = wire_bytes()
            sender.sendall(bytes(10_000))
            for write in (file.write, pair[0].send):
                write(bytes(1000))
            assert wire_bytes() - before == 10_000


def test_a_kernel_that_does_not_count_is_told_apart(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()):
        monkeypatch.setattr(traffic, "SENT", struct.Struct("400x2Q"))  # as if tcp_info were shorter
        assert wire_bytes() is None
    monkeypatch.setattr(traffic, "FILES", "/no/such/folder")
    assert wire_bytes() is None, "as on macOS"
