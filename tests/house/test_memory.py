"""The memory ledger: every storage is counted once, while it lives, under its owner's name."""

import gc
import sys
import time
import weakref

import checks
import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as hooks_of_all_modules
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.core import collectives, seams
from zero_minimal.guards import collective_fingerprint as notes
from zero_minimal.meters.memory import CATEGORIES, Ledger
from zero_minimal.processes import ranks
from zero_minimal.workload.model import GPT, GPTConfig

KB = torch.Size([256])  # a shape of 1024 bytes in fp32


@pytest.fixture
def ledger():
    """An open ledger that begins at nothing but what the process holds anyway."""
    with Ledger() as ledger:
        yield ledger


def grown(ledger, since):
    return {name: now - since[name] for name, now in ledger.states().items() if now != since[name]}


# -------------------------------------------------------------------------------------------- births, sizes, deaths


def test_a_storage_counts_once_while_any_tensor_uses_it(ledger):
    before = ledger.total
    whole = torch.empty(KB)
    assert ledger.total - before == 1024
    view, same = whole.view(16, 16)[3:], whole.detach()
    whole.mul_(0).add_(1)
    assert ledger.total - before == 1024, "views and in-place operators take no memory"
    del whole, same
    assert ledger.total - before == 1024, "a view of 832 bytes keeps all of its storage"
    del view
    assert ledger.total == before


def test_tensors_that_no_operator_makes(ledger):
    before = ledger.total
    kept = [torch.tensor([1.0, 2.0]), torch.from_numpy(numpy.ones(3, "float32")), torch.zeros(2, dtype=torch.int64)]
    assert ledger.total - before == 8 + 12 + 16
    kept.clear()
    assert ledger.total == before


def test_a_temporary_shows_in_the_peak_and_is_gone(ledger):
    kept = torch.ones(KB)
    ledger.reset()
    before = ledger.total
    result = (kept * 2).sum()  # noqa: F841 — it holds 4 bytes
    assert ledger.total - before == 4
    assert ledger.peak.total - before == 1024 + 4
    assert ledger.peak.what.startswith("aten.sum")


def test_resized_storages(ledger):
    tensor = torch.ones(KB)
    ledger.reset()
    before = ledger.total
    tensor.untyped_storage().resize_(0)
    assert ledger.total - before == -1024
    tensor.untyped_storage().resize_(1024)
    assert ledger.total == before
    tensor.resize_(3 * 256)  # this one passes torch's dispatcher
    assert ledger.total - before == 2048
    own = [event.bytes for event in ledger.trace if event.storage.bytes == 3072]
    assert own == [1024, -1024, 1024, -1024, 3072]


def test_trace_and_timeline_add_up(ledger):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    ledger.watch(model, optimizer)
    for _ in range(2):
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    size = {}
    for event in ledger.trace:  # an allocator that replays it never frees what is not there
        assert (event.bytes < 0) == (event.storage in size)
        assert event.bytes > 0 or size.pop(event.storage) == -event.bytes
        if event.bytes > 0:
            size[event.storage] = event.bytes
    assert sum(size.values()) == ledger.total == ledger.timeline[-1].total
    assert ledger.timeline[-1].bytes == ledger.states()
    assert [moment.seconds for moment in ledger.timeline] == sorted(moment.seconds for moment in ledger.timeline)
    assert ledger.peak.total == max(moment.total for moment in ledger.timeline) == sum(ledger.peak.bytes.values())
    assert ledger.highest()["activations"] >= ledger.peak.bytes["activations"]


def test_rounded_as_cuda_allocates(ledger):
    before, before_rounded = ledger.total, ledger.rounded(512)
    kept = [torch.empty(1), torch.empty(128), torch.empty(129)]
    assert ledger.total - before == 4 + 512 + 516
    assert ledger.rounded(512) - before_rounded == 512 + 512 + 1024
    del kept


def test_device():
    with Ledger() as everywhere, Ledger("meta") as meta, Ledger("cuda") as cuda:
        before = everywhere.total, meta.total, cuda.total
        kept = torch.empty(KB), torch.empty(2048, device="meta")
        after = everywhere.total, meta.total, cuda.total
    assert [b - a for a, b in zip(before, after, strict=True)] == [1024, 8192, 0], "meta tensors take no memory"
    del kept


def test_fake_tensors_count_as_what_they_stand_for():
    with FakeTensorMode(), Ledger("cpu") as ledger, Ledger("cuda:0") as cuda:
        before = cuda.total
        layer = nn.Linear(1000, 1000, bias=False)
        elsewhere = torch.empty(KB, device="cuda")
        assert cuda.total - before == 1024
        ledger.watch(layer)
        layer(torch.empty(10, 1000)).sum().backward()
        assert ledger.states()["parameters"] == ledger.states()["gradients"] == 4_000_000
        layer.weight.untyped_storage().resize_(0)
        assert ledger.states()["parameters"] == 0
    del elsewhere


# ------------------------------------------------------------------------------------------------------ categories


def test_two_layers_by_hand():
    features = torch.ones(4, 10)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    with Ledger() as ledger:
        ledger.watch(model)
        before = ledger.states()
        size = 4 * (10 * 20 + 20 + 20 * 5 + 5)
        assert before["parameters"] == size

        loss = model(features).sum()
        # kept for backward: what the ReLU gave; and the loss, in our hands. The input was there before.
        assert grown(ledger, before) == {"activations": 4 * (4 * 20) + 4}
        ledger.reset()
        loss.backward()
        assert grown(ledger, before) == {"activations": 4, "gradients": size}

        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(optimizer)
        optimizer.step()
        assert grown(ledger, before) == {"activations": 4, "gradients": size, "optimizer": 2 * size, "scalars": 4 * 4}
        optimizer.zero_grad()
        assert grown(ledger, before) == {"activations": 4, "optimizer": 2 * size, "scalars": 4 * 4}
    # In backward most activations live at the ReLU: its output, the gradients of that and of its input, the loss and
    # the loss's gradient. The last layer's gradients are there by then, the first layer's are not.
    highest = max(ledger.timeline, key=lambda moment: moment.bytes["activations"])
    assert highest.what == "aten.threshold_backward.default, backward"
    assert highest.bytes["activations"] == 3 * 4 * (4 * 20) + 4 + 4
    assert highest.bytes["gradients"] == before["gradients"] + 4 * (20 * 5 + 5)


def test_a_gradient_that_lives_for_a_moment_is_a_gradient(ledger):
    model = nn.Linear(16, 16, bias=False)

    def drop(parameter):
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(drop)
    ledger.watch(model)
    before = ledger.states()
    model(torch.ones(2, 16)).sum().backward()
    assert grown(ledger, before) == {}
    assert ledger.highest()["gradients"] - before["gradients"] == 4 * 16 * 16


def test_masters_buffers_and_scalars(ledger):
    model = nn.BatchNorm1d(8, dtype=torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, momentum=0.9)
    before = ledger.states()
    ledger.watch(model, optimizer)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    states = ledger.states()
    assert states["parameters"] == 2 * 16
    assert states["optimizer"] == (4 + 4) * 16
    assert states["gradients"] - before["gradients"] == 4 * 16
    assert states["buffers"] - before["buffers"] == 2 * 8 + 2 * 8 + 8  # mean, variance, number of batches


def test_gradients_that_only_the_optimizer_sees(ledger):
    master = nn.Parameter(torch.ones(KB))
    optimizer = torch.optim.SGD([master])
    ledger.reset()
    before = ledger.states()["gradients"]
    master.grad = torch.ones(KB)
    optimizer.step()
    master.grad = None
    assert ledger.highest()["gradients"] - before == 1024


def test_owners_named_before_the_ledger_opens():
    master = torch.ones(KB, requires_grad=True)
    optimizer = torch.optim.SGD([master])
    ledger = Ledger()
    ledger.watch(optimizer)
    with ledger:
        del optimizer, master
        gc.collect()
        assert ledger.highest()["optimizer"] == 1024
        assert ledger.states()["optimizer"] == 0


def test_phases_decide_where_no_owner_does():
    dataset = torch.ones(KB)
    model = nn.Linear(256, 256)
    with Ledger() as ledger:
        before = ledger.states()
        early = torch.ones(KB)
        assert grown(ledger, before) == {"other": 1024}, "before watch(): not of the model"
        ledger.watch(model)
        before = ledger.states()
        with torch.no_grad():
            output = model(dataset)
            assert grown(ledger, before) == {"activations": 1024}, "forward, evaluation too"
            scratch = output * 2
            assert grown(ledger, before) == {"activations": 1024, "buffers": 1024}, "clipping, say"
        late = output + 1
        assert grown(ledger, before) == {"activations": 2048, "buffers": 1024}, "a loss outside the model, say"
    del early, scratch, late


def test_claim(ledger):
    before = ledger.states()
    shards = {"mine": [torch.ones(KB), (torch.ones(KB), None)]}
    ledger.claim(shards, "optimizer")
    assert grown(ledger, before) == {"optimizer": 2048}
    with pytest.raises(ValueError, match="'weights'.*choose from parameters, gradients"):
        ledger.claim(shards, "weights")


def test_checkpointing_keeps_less(ledger):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
    ledger.watch(layers)

    def forward_of(call):
        ledger.reset()
        x = torch.ones(32, 64, requires_grad=True)
        for layer in layers:
            x = call(layer, x)
        x.sum().backward()
        return ledger.highest()["activations"]

    def checkpointed(layer, x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    plain, recomputed = forward_of(lambda layer, x: layer(x)), forward_of(checkpointed)
    assert plain - recomputed >= 2 * 4 * 32 * 64, f"{plain} and {recomputed} bytes of activations"


# ------------------------------------------------------------------------------------- opening, closing, and manners


def test_what_was_there_before_is_other():
    before = torch.ones(KB)
    with Ledger() as ledger:
        with_it = ledger.states()["other"]
    del before
    with Ledger() as ledger:
        assert with_it - ledger.states()["other"] == 1024


def test_opened_again():
    ledger = Ledger()
    with ledger:
        gone, resized = torch.ones(KB), torch.ones(KB)
        before = ledger.total
    del gone
    resized.untyped_storage().resize_(0)
    born = torch.ones(5 * 256)
    assert ledger.total == before, "closed, it shows what there was at the end"
    states = ledger.states()
    ledger.claim([born, *(torch.ones(KB) for _ in range(100))], "optimizer")  # one lies where the first tensor lay
    assert ledger.states() == states
    with ledger:
        assert ledger.total - before == -1024 - 1024 + 5120
        del born
        assert ledger.total - before == -1024 - 1024
    assert ledger.timeline[-1].total == ledger.total


def test_one_at_a_time(ledger):
    with pytest.raises(RuntimeError, match="open already"):
        ledger.__enter__()
    before = ledger.total
    kept = torch.ones(KB)
    assert ledger.total - before == 1024, "the failed attempt changed nothing"
    del kept


def test_nested_ledgers_both_see(ledger):
    before = ledger.total
    with Ledger() as inner:
        inner_before = inner.total
        tensor = torch.ones(KB)
        tensor.untyped_storage().resize_(512)
        assert inner.total - inner_before == ledger.total - before == 512
    tensor.untyped_storage().resize_(256)
    assert ledger.total - before == 256
    assert inner.total - inner_before == 512


def test_leaves_torch_as_it_was():
    def everything_it_touches():
        return (
            torch.UntypedStorage.resize_,
            list(seams.listeners["collective"]),
            len(hooks_of_all_modules._global_forward_hooks),
            len(hooks_of_all_modules._global_forward_pre_hooks),
            len(hooks_of_all_modules._global_forward_hooks_always_called),
            len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
            torch._C._len_torch_dispatch_stack(),
        )

    model, before = nn.Linear(4, 4), everything_it_touches()
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger:
        ledger.watch(model)
        model(torch.ones(4))
        assert everything_it_touches() != before
        raise ZeroDivisionError
    assert everything_it_touches() == before
    assert not model.weight._backward_hooks
    total = ledger.total
    kept = torch.ones(KB)
    assert ledger.total == total, "it does not listen any more"
    del kept


def test_an_operator_that_fails_leaves_the_ledger_right(ledger):
    before = ledger.total
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.Linear(4, 4)(torch.ones(3))
    assert ledger.total == before
    model = nn.Linear(4, 4)
    ledger.watch(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(3))
    with torch.no_grad():
        scratch = torch.ones(KB)
    assert grown(ledger, dict.fromkeys(CATEGORIES, 0))["buffers"] >= 1024, "the failed forward is over"
    del scratch


def test_it_keeps_nothing_alive():
    with Ledger() as ledger:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        before, owners = ledger.total, [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer
        gc.collect()
        assert [owner() for owner in owners] == [None, None]
        assert before - ledger.total == 4 * 20 * (1 + 1 + 2) + 2 * 4
    kept, itself = torch.ones(KB), weakref.ref(ledger)
    with ledger:
        pass
    del ledger
    gc.collect()
    assert itself() is None, "a tensor that outlives the ledger does not hold it"
    del kept


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def test_lives_with_other_modes_and_keeps_results():
    torch.manual_seed(0)
    model, features = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)

    def gradient():
        torch.manual_seed(1)
        model.zero_grad()
        model(features).sum().backward()
        return model[0].weight.grad.clone()

    expected = gradient()
    with Doubling(), Ledger(), Doubling():
        assert torch.equal(gradient(), expected)


# ---------------------------------------------------------------------------------------------------- stages and peers

SMALL = GPTConfig(layers=6, hidden=32, heads=4, sequence=16, vocabulary=64, dropout=0.0)


def train(zero, ledger):
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    for _ in range(2):
        zero.zero_grad()
        zero.model(tokens, tokens).backward()
        zero.step()
        ledger.reset()


class Peer:
    """A plain loop's parts, in the form of a stage."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def watch_ddp():
    from torch.nn.parallel import DistributedDataParallel

    with Ledger() as ledger:
        model = DistributedDataParallel(GPT(SMALL))
        peer = Peer(model, torch.optim.AdamW(model.parameters()))
        ledger.watch(peer)
        train(peer, ledger)
        return ledger.states(), sum(p.numel() for p in model.parameters())


def test_ddp_holds_gradients_twice():
    for states, elements in ranks.run(watch_ddp, 2):
        assert states["parameters"] == states["gradients"] == 4 * elements
        assert states["optimizer"] == 8 * elements
        assert states["buffers"] == 4 * elements, "its reducer's flat buckets, made in C++"


def watch_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with Ledger() as ledger:
        model, mesh = GPT(SMALL), init_device_mesh("cpu", (dist.get_world_size(),))
        units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        peer = Peer(model, torch.optim.AdamW(model.parameters()))
        ledger.watch(peer)
        train(peer, ledger)
        states = ledger.states()
        model(*torch.zeros(2, 2, 16, dtype=torch.int64)).backward()
        return states, ledger.highest(), sum(p.numel() for p in model.parameters()), max(units)


@pytest.mark.thorough
@pytest.mark.skipif(not checks.FSDP2_RUNS_ON_THE_CPU, reason="this torch's FSDP2 does not run on the CPU")
def test_fsdp2_gathers_parameters():
    for states, highest, elements, unit in ranks.run(watch_fsdp, 2):  # all sizes are even: no padding
        assert states["parameters"] == states["gradients"] == 4 * elements // 2
        assert states["optimizer"] == 8 * elements // 2
        assert highest["parameters"] >= states["parameters"] + 4 * unit
        assert highest["buffers"] >= 4 * unit, "the flat copies that it gathers into and reduces from"


def after_gloo(ledger, total):
    """Bytes alive beyond `total`, which they reach as soon as gloo's own thread lets go of what it sent."""
    deadline = time.monotonic() + 5
    while ledger.total > total and time.monotonic() < deadline:
        time.sleep(0.001)
    return ledger.total - total


def watch_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, other = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]) for _ in range(2))
    rows @ other  # torch sets itself up
    with Ledger() as ledger:
        ledger.reset()
        before = ledger.total
        product = rows @ other  # `other` is gathered for a moment
        result = product.to_local().nbytes
        return after_gloo(ledger, before + result), ledger.peak.total - before - result


def test_what_dtensor_does_inside_an_operator():
    for left, peak in ranks.run(watch_dtensor, 2, device="cpu"):
        assert left == 0
        assert peak >= 4 * 64 * 64


def watch_scratch():
    whole, part = torch.ones(dist.get_world_size() * 1000), torch.empty(1000)
    with Ledger() as ledger:
        ledger.claim([whole, part], "gradients")
        ledger.reset()
        before, total = ledger.states(), ledger.total
        pending = collectives.reduce_scatter(part, whole, async_op=True)
        pending.wait()
        del pending
        after_gloo(ledger, total)
        return grown(ledger, before), ledger.highest()["buffers"] - before["buffers"]


def test_scratch_of_a_collective_is_a_buffer():
    for left, scratch in ranks.run(watch_scratch, 2, device="cpu"):
        assert left == {}
        # gloo: what arrives from the other rank, before it is summed; and its note
        assert scratch == 4 * 2000 + notes.LENGTH


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_agrees_with_cuda():
    def step(model, optimizer):
        optimizer.zero_grad()
        model(*torch.zeros(2, 2, 16, dtype=torch.int64, device="cuda")).backward()
        optimizer.step()

    model = GPT(SMALL).cuda()
    step(model, torch.optim.AdamW(model.parameters()))  # cuBLAS takes its workspaces now: no tensor's memory
    del model
    gc.collect()
    with Ledger("cuda") as ledger:
        workspaces = torch.cuda.memory_allocated() - ledger.rounded(512)
        model = GPT(SMALL).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        for _ in range(2):
            step(model, optimizer)
            assert ledger.total <= torch.cuda.memory_allocated() - workspaces <= ledger.rounded(512)
        with torch.no_grad():
            output = model(torch.zeros(2, 16, dtype=torch.int64, device="cuda"))  # noqa: F841 — held on purpose
        assert ledger.total <= torch.cuda.memory_allocated() - workspaces <= ledger.rounded(512)
