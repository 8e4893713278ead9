"""Every branch for a GPU runs here, with values, on a GPU made of CPU memory (tests/lazy_gpu.py): copies as late as
CUDA allows, and backward in a thread of its own. What a real GPU does beyond that, check-gpu looks at."""

import contextlib
import copy
import gc
import threading
from dataclasses import replace
from unittest import mock

import lazy_gpu
import pytest
import torch
import torch.distributed as dist
from misuse import in_ranks
from thorough import sample

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.core import collectives, loss_scaler, random_state
from zero_minimal.core.mesh import make_mesh
from zero_minimal.defragmentation import Slab
from zero_minimal.extensions import join
from zero_minimal.guards.same_on_all_ranks import checksum, numbers_of_all_ranks
from zero_minimal.meters import timing
from zero_minimal.offload import Offloaded1, Offloaded2, Offloaded3
from zero_minimal.offloading import host, offloaded_state
from zero_minimal.offloading.host_link import BUFFERS, Queues
from zero_minimal.offloading.host_process import Host, HostError
from zero_minimal.offloading.pinned_link import PinnedBus
from zero_minimal.processes import joining, ranks
from zero_minimal.programs.gpu import agreement
from zero_minimal.programs.registry import STAGES
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import System

SETTINGS = Settings(layers=2, hidden=32, heads=2, sequence=8, batch=2, steps=2, dtype="bf16", bucket_mb=0.02)
WAYS = {  # name: stage, what its checkpoints are told, settings
    **{name: (*way, {}) for name, way in (agreement.WAYS | agreement.AWAY).items()},  # those of check-gpu
    "stage 3, torch's checkpoints": (STAGES[3], None, {"recompute": True}),
    "stage 1, offloaded, 2 micro-batches": (Offloaded1, None, {"accumulate": 2}),
    "stage 3, offloaded, 2 micro-batches": (Offloaded3, None, {"accumulate": 2}),
    "stage 2, offloaded, fp32, clipped": (Offloaded2, None, {"dtype": "fp32", "clip": 0.5}),
    "stage 2, offloaded, fp16": (Offloaded2, None, {"dtype": "fp16"}),
}
PLAIN = ("stage 3, checkpoints on the host", "stage 1, offloaded, 2 micro-batches", "stage 3, offloaded")


def train(name, on_gpu):
    """The losses, and checksums of the parameters afterwards. On the CPU those of the stage by itself."""
    stage, kept, others = WAYS[name]
    if not on_gpu:
        stage, kept = STAGES[int(name.split(",")[0].removeprefix("stage "))], None
    settings = replace(SETTINGS, **others)
    with lazy_gpu.here() if on_gpu else contextlib.nullcontext(), ranks.start() as rank:
        rank = replace(rank, device=lazy_gpu.GPU) if on_gpu else rank
        zero = loop.build(stage, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
        assert all(bucket.parameter_shard.is_cuda == on_gpu for bucket in zero.buckets)
        if kept is not None:
            checkpoint_blocks(zero.model, **kept)
        if on_gpu:
            zero.run_backward = lazy_gpu.backward
        scaler = loss_scaler.LossScaler(2.0**10) if settings.dtype == "fp16" else None
        steps = loop.steps(zero, loop.training_batches(settings, rank.rank), settings, scaler=scaler)
        losses = [loss.item() for parts in steps for loss in parts]
        state = copy.deepcopy(zero.state_dict())
        with zero.gather_parameters():  # an edit on the GPU reaches the master on the host
            for param in zero.model.parameters():
                param.data.mul_(0.5)
        zero.load_state_dict(state)
        with zero.gather_parameters():
            sums = [checksum(param) for param in zero.model.parameters()]
        del zero, steps
        gc.collect()
        return losses, sums


def train_twice(names):
    found = {name: (train(name, False), train(name, True)) for name in names}
    return found, lazy_gpu.seen


@pytest.mark.thorough
@pytest.mark.parametrize("which", sample(("some", "all"), ("some",)))
@pytest.mark.parametrize("world_size", sample((1, 2), (2,)))
def test_a_lazy_gpu_gives_the_bits_of_a_cpu(world_size, which):
    names = PLAIN if which == "some" else [name for name in WAYS if name not in PLAIN]
    for found, seen in ranks.run(train_twice, world_size, names, device="cpu", timeout=400):
        for name, (on_cpu, on_gpu) in found.items():
            assert on_gpu == on_cpu, name
        assert seen >= {"pinned", "record_stream", "late copy from the GPU", "late copy to the GPU", "cpu()",
                        "event.synchronize", "set_rng_state"}, "these branches have run"


# ------------------------------------------------------------------------ the bus, if one of its promises is broken


@contextlib.contextmanager
def two_ends():
    """The rank's end of a bus, and the host's."""
    ours, theirs = Queues.pair()
    with lazy_gpu.here():
        memory = torch.zeros(2, BUFFERS, 64, dtype=torch.uint8, pin_memory=True)
        yield PinnedBus(ours, memory, 0, lazy_gpu.GPU), PinnedBus(theirs, memory, 1, lazy_gpu.GPU)


def through_the_bus(tensors=8):
    """What the rank gets back of tensors that it sends, changes at once, and that the host doubles."""
    with two_ends() as (here, there):
        def serve():
            kept = []
            for _ in range(tensors):
                parcel = there.receive()
                kept.append(parcel.tensor.clone())
                there.emptied(parcel)
            for tensor in kept:
                there.send(("doubled",), 2 * tensor)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for number in range(tensors):
            tensor = torch.full((16,), float(number), device="cuda")
            here.send(("take",), tensor)
            tensor.zero_()
            del tensor
        back = torch.empty(tensors, 16, device="cuda")
        for number in range(tensors):
            parcel = here.receive()
            assert parcel.tensor.is_cuda
            back[number].copy_(parcel.tensor)
            here.emptied(parcel)
        thread.join(5)
        return back.cpu()[:, 0].tolist()


def test_the_pinned_bus_keeps_its_promises():
    assert through_the_bus() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]


BREAKS = {
    "the tensor itself is sent": lambda: mock.patch.object(torch.Tensor, "clone", lambda tensor, **_: tensor.detach()),
    "its memory is for others at once": lambda: mock.patch.object(lazy_gpu, "record_stream", lambda *_: None),
    "the host reads at once": lambda: mock.patch.object(PinnedBus, "_until", lambda bus, done: None),
    "the GPU reads at once": lambda: mock.patch.object(lazy_gpu.Stream, "wait_event", lambda stream, event: None),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_each_promise_is_needed(broken):
    with BREAKS[broken]():
        assert through_the_bus() != [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]


def test_a_buffer_is_not_filled_while_the_gpu_reads_it():
    with two_ends() as (here, there):
        there.send((), torch.ones(16))
        with mock.patch.object(lazy_gpu.Stream, "wait_event", lambda stream, event: None):  # the GPU has not come to it
            parcel = here.receive()
        here.emptied(parcel)
        assert parcel.tensor[0] != 1.0, "the copy is late"
        for number in (2.0, 3.0):  # the second needs the buffer of the first
            there.send((), torch.full((16,), number))
        assert parcel.tensor[0] == 1.0


def test_words_of_a_thread_are_its_own():
    with two_ends() as (here, there):
        count = torch.tensor(3.0)
        here.send(("put", {"step": count}))
        there.receive().words[1]["step"].add_(1)
        assert count == 3.0


def test_who_asks_hears_of_each_copy():
    with two_ends() as (here, _):
        here.copies = []
        here.send((), torch.ones(16, device="cuda"))
        [one] = here.copies
        one.end.synchronize()
        assert one.leaves and one.bytes == 64 and one.start.elapsed_time(one.end) >= 0


# ------------------------------------------------------------------------------------------------- other branches


def test_a_copy_to_the_host_is_read_when_it_is_there():
    with lazy_gpu.here():
        tensor = torch.arange(8.0, device="cuda")
        kept = host.to_host(tensor)
        assert lazy_gpu.is_pinned(kept) and not kept.is_cuda
        assert not torch.equal(kept, torch.arange(8.0)), "it is under way"
        tensor = None  # its memory is not for others before
        again = host.back(kept, lazy_gpu.GPU)
        assert again.is_cuda and torch.equal(again.cpu(), torch.arange(8.0))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_fingerprint_on_a_gpu_knows_every_bit(dtype, monkeypatch):
    monkeypatch.setattr(offloaded_state, "AT_ONCE", 16)
    with lazy_gpu.here():
        shard = torch.randn(100, device="cuda").to(dtype)
        before = offloaded_state.fingerprint(shard)
        assert isinstance(before, torch.Tensor) and before.ndim == 0, "nobody has waited for it"
        assert before == offloaded_state.fingerprint(shard.clone())
        for place in (0, 15, 16, 99):
            changed = shard.clone()
            changed[place] += 1
            assert before != offloaded_state.fingerprint(changed)


def on_native_collectives():
    """What stages and helpers do where the backend is not gloo; one that sums must do for one that averages."""
    sums = {**collectives._OPS, "avg": dist.ReduceOp.SUM}
    nccl = mock.patch.object(dist, "get_backend", lambda group=None: "nccl")
    with nccl, mock.patch.object(collectives, "_OPS", sums):
        with lazy_gpu.here():
            found = {}
            for name in ("stage 0", "stage 1", "stage 2", "stage 3"):
                with ranks.start() as rank:
                    zero = loop.build(WAYS[name][0], SETTINGS, replace(rank, device=lazy_gpu.GPU))
                    zero.run_backward = lazy_gpu.backward
                    steps = loop.steps(zero, loop.training_batches(SETTINGS, rank.rank), SETTINGS)
                    found[name] = [loss.item() for parts in steps for loss in parts]
                    with zero.gather_parameters():
                        pass
            found["batches"] = list(join.together(range(2)))
            found["numbers"] = numbers_of_all_ranks([dist.get_rank(), 7])
            return found


def test_native_collectives_are_called_as_they_want_to_be():
    one, other = ranks.run(on_native_collectives, 2, device="cpu", timeout=200)
    for found in (one, other):
        assert found["stage 0"] == found["stage 1"] == found["stage 2"] == found["stage 3"]
        assert found["batches"] == [0, 1] and found["numbers"] == [[0, 7], [1, 7]]
    assert one["stage 0"] != other["stage 0"]


def systems(on_gpu):
    losses = []
    with lazy_gpu.here() if on_gpu else contextlib.nullcontext(), ranks.start() as rank:
        device = lazy_gpu.GPU if on_gpu else rank.device
        mesh = make_mesh(2)
        for name in ("C4", "C5"):
            torch.manual_seed(0)
            kinds = torch.bfloat16, device, torch.optim.AdamW
            zero = System(name, SETTINGS.model_config(), mesh, SETTINGS.batch, *kinds, lr=1e-3)
            batches = loop.training_batches(SETTINGS, 0)
            for inputs, targets in (next(batches) for _ in range(2)):
                loss = zero.model(inputs.to(device), targets.to(device))
                lazy_gpu.backward(loss) if on_gpu else loss.backward()
                zero.step()
                zero.zero_grad()
                losses.append(loss.item())
    return losses


@pytest.mark.thorough
def test_systems_with_checkpoints_on_the_host():
    on_gpu, on_cpu = (ranks.run(systems, 2, where, device="cpu", timeout=200) for where in (True, False))
    assert on_gpu == on_cpu


@pytest.mark.parametrize(("asked", "gpus", "ranks_here", "gets"), (
    (("auto", None), 2, 2, ("cuda", "nccl")), (("auto", None), 1, 2, ("cuda", "gloo")),
    (("cuda", "nccl"), 4, 4, ("cuda", "nccl")), (("cuda", "gloo"), 4, 2, ("cuda", "gloo")),
    (("cpu", None), 4, 2, ("cpu", "gloo")), (("auto", None), 0, 1, ("cpu", "gloo"))))
def test_who_gets_which_backend(asked, gpus, ranks_here, gets, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert joining.choose(*asked, ranks_here) == gets


def test_nccl_is_told_its_gpu(monkeypatch):
    told, chosen = {}, []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: told.update(options, backend=backend))
    monkeypatch.setattr(joining, "_describe", lambda: None)
    monkeypatch.setattr(joining, "_local", {})
    joining.join(dist.HashStore(), 1, 2)
    second = torch.device("cuda", 1)
    assert told["backend"] == "nccl" and told["device_id"] == second and chosen == [second]
    joining.join(dist.HashStore(), 3, 4)  # shares it, so gloo
    assert told["backend"] == "gloo" and told["device_id"] is None and chosen[-1] == second


def test_random_state_has_that_of_the_gpu():
    with lazy_gpu.here():
        states = random_state.random_state()
        assert len(states) == 2
        lazy_gpu.seen.discard("set_rng_state")
        with random_state.random_state_of(states):
            pass
        assert "set_rng_state" in lazy_gpu.seen
        assert [kind for kind, _, _ in random_state.autocast_state()] == ["cpu", "cuda"]


@in_ranks(1)
def test_ranks_draw_on_their_gpus():
    with lazy_gpu.here():
        with random_state.parallel_random():
            pass
        assert "seed" in lazy_gpu.seen


def test_memory_and_time_of_a_gpu(monkeypatch):
    asked = []
    for name, answer in (("reset_peak_memory_stats", None), ("memory_reserved", 5), ("max_memory_reserved", 9),
                         ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, answer=answer: asked.append(name) or answer)
    monkeypatch.setattr(dist, "barrier", lambda: asked.append("barrier"))
    assert (timing.start_of_memory(lazy_gpu.GPU), timing.peak_of_memory(lazy_gpu.GPU)) == (5, 9)
    timing.together(lazy_gpu.GPU)
    assert asked == ["reset_peak_memory_stats", "memory_reserved", "max_memory_reserved", "synchronize", "barrier"]


def test_a_slab_on_a_gpu():
    with lazy_gpu.here():
        slab = Slab(64, device="cuda")
        kept = slab.keep(torch.ones(4, device="cuda"))
        assert kept.is_cuda and slab.holds(kept)
        with pytest.raises(ValueError, match="cpu"):
            slab.keep(torch.ones(4))


def test_a_host_that_is_a_thread_takes_no_speed():
    with lazy_gpu.here(), pytest.raises(ValueError, match="leave bus= out"):
        Host(lambda bus: None, 64, lazy_gpu.GPU, 1e9)


def test_an_error_of_the_host_thread_reaches_the_rank():
    def serve(bus):
        bus.receive()
        raise KeyError("on the host")

    with lazy_gpu.here():
        host = Host(serve, 64, lazy_gpu.GPU, None)
        with pytest.raises(HostError, match="on the host"):
            host.ask("anything")
