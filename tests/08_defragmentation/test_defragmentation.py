"""Lesson 8, M_D: checkpoints and gradients lie in slabs; an arena closes its holes; an allocator model shows why."""

import functools
import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from zero_minimal.activation_partitioning import checkpoint, checkpoint_blocks
from zero_minimal.defragmentation import Arena, Slab, gradients_in_slab
from zero_minimal.meters import allocator as allocator_model
from zero_minimal.meters.allocator import MIB, CachingAllocator, OutOfMemory
from zero_minimal.meters.memory import Ledger
from zero_minimal.programs import lesson08_program
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = GPTConfig(layers=3, hidden=30, heads=3, sequence=23, vocabulary=31, dropout=0.1)
LENGTHS = (9, 23, 5, 17)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def gpt(seed=0):
    torch.manual_seed(seed)
    return GPT(SIZES)


def extent(tensor):
    """First byte, and the byte behind the last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Numbered(Slab):
    """A slab that remembers the addresses of what it kept."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.extents = []

    def keep(self, tensor):
        kept = super().keep(tensor)
        self.extents.append(extent(kept))
        return kept


# --------------------------------------------------------------------------------------------------------------- slab


def test_slab_keeps_copies_side_by_side_in_one_allocation():
    slab = Slab(3 * 5 + 7 + 1)
    sources = [torch.randn(3, 5), torch.randn(7), torch.randn(())]
    wanted = [source.clone() for source in sources]
    kept = [slab.keep(source) for source in sources]
    for source in sources:
        source.zero_()
    assert toys.identical(kept, wanted), "what is kept is a copy: the source may be overwritten"
    assert [tensor.shape for tensor in kept] == [tensor.shape for tensor in wanted]
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {slab.memory.untyped_storage().data_ptr()}
    ends = [extent(tensor) for tensor in kept]
    assert ends[0][0] == slab.memory.data_ptr()
    assert all(first[1] == second[0] for first, second in zip(ends, ends[1:], strict=False))
    assert slab.memory.untyped_storage().nbytes() == 4 * 23


def test_slab_starts_from_the_front_after_reset():
    slab = Slab(10)
    for _ in range(50):
        assert slab.keep(torch.ones(6)).data_ptr() == slab.memory.data_ptr()
        slab.keep(torch.ones(4))
        slab.reset()
    assert slab.used == 0


def test_slab_measures_its_first_round():
    slab = Slab()
    first = [slab.keep(torch.full((size,), float(size))) for size in (5, 8)]
    assert slab.memory is None
    slab.reset()
    assert len(slab.memory) == 13
    again = [slab.keep(tensor) for tensor in first]
    assert toys.identical(first, again)
    assert all(slab.holds(tensor) for tensor in again) and not any(slab.holds(tensor) for tensor in first)


def test_slab_says_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Slab(0)
    slab = Slab(10)
    slab.keep(torch.ones(7))
    with pytest.raises(MemoryError, match="4 elements do not fit behind the 7 of 10.*largest step.*reset"):
        slab.keep(torch.ones(4))
    slab.keep(torch.ones(3))  # what was refused took no room
    with pytest.raises(ValueError, match="float32 on cpu, and was given torch.float64.*one slab for each"):
        slab.keep(torch.ones(1, dtype=torch.float64))


# ----------------------------------------------------------------------------------------------------------- training


def train(slabs, lengths=LENGTHS, micro_batches=1):
    """Losses, gradients of every step, and a look at the slabs, of a training with all blocks checkpointed."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    slab = Numbered(SIZES.layers * 3 * max(lengths) * SIZES.hidden)
    gradient_slab = gradients_in_slab(model) if slabs else None
    if slabs:
        checkpoint_blocks(model, place=slab.keep)
    else:
        for block in model.blocks:
            block.forward = functools.partial(torchs_checkpoint, block.inside, use_reentrant=False)
    losses, gradients = [], []
    for step, length in enumerate(lengths):
        for micro in range(micro_batches):
            loss = model(*toys.tokens(micro, step, sequence=length))
            if slabs:
                assert len({low for low, _ in slab.extents}) == SIZES.layers, "a place for each block's input"
            loss.backward()
            losses.append(loss.item())
            slab.reset()
            checkpoints, slab.extents = slab.extents, []
        gradients += [param.grad.clone() for param in model.parameters()]
        if slabs:
            assert_side_by_side(checkpoints, slab.memory)
            assert all(gradient_slab.holds(param.grad) for param in model.parameters())
            assert_side_by_side(sorted(extent(param.grad) for param in model.parameters()), gradient_slab.memory)
            assert gradient_slab.used == len(gradient_slab.memory) == sum(p.numel() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if slabs:
            gradient_slab.reset()
    return losses, gradients + [param.detach() for param in model.parameters()]


def assert_side_by_side(extents, memory):
    """One after another from the first byte of the memory on: one allocation, without holes."""
    assert extents[0][0] == memory.data_ptr()
    assert all(first[1] == second[0] for first, second in zip(extents, extents[1:], strict=False))
    assert extents[-1][1] <= memory.data_ptr() + memory.untyped_storage().nbytes()


@pytest.mark.parametrize("micro_batches", (1, 3))
def test_training_with_slabs_is_the_same_to_the_bit(micro_batches):
    (losses, tensors), (losses_in_slabs, tensors_in_slabs) = (
        train(slabs, micro_batches=micro_batches) for slabs in (False, True)
    )
    assert losses == losses_in_slabs
    assert toys.identical(tensors, tensors_in_slabs)
    assert len(set(losses)) == len(losses)


def test_only_the_inputs_of_blocks_are_kept():
    """By the ledger: between forward and backward the slab, and nothing else that is as large as a block's input."""
    model, slab = gpt(), Slab(SIZES.layers * 3 * 23 * SIZES.hidden)
    checkpoint_blocks(model, place=slab.keep)
    tokens = toys.tokens(0, 0, sequence=23)
    with Ledger("cpu") as ledger:
        before = ledger.total
        x = model.token_embedding(tokens[0])
        for block in model.blocks:
            x = block(x)
        assert ledger.total - before <= x.untyped_storage().nbytes() + 3 * 6000, "x, and three random states"
        x.sum().backward()


def test_gradient_reaches_input_and_parameters():
    layer, slab = nn.Linear(5, 5), Slab(100)
    for wants in (True, False):
        x = torch.randn(3, 5, requires_grad=wants)
        gradients = []
        for run in (layer, lambda x: checkpoint(layer, x, place=slab.keep)):
            layer.zero_grad()
            x.grad = None
            run(x).square().sum().backward()
            gradients.append([layer.weight.grad, *([x.grad] if wants else [])])
        assert toys.identical(*gradients)
        assert (x.grad is not None) == wants


def test_evaluation_keeps_nothing():
    slab = Slab(100)
    with torch.no_grad():
        checkpoint(nn.Linear(5, 5), torch.ones(2, 5), place=slab.keep)
    assert slab.used == 0


def test_backward_does_not_use_what_was_overwritten():
    slab = Slab(100)
    loss = checkpoint(nn.Linear(5, 5), torch.ones(2, 5), place=slab.keep).sum()
    slab.reset()
    slab.keep(torch.zeros(2, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_slab_says_what_it_cannot_do():
    layer = nn.Linear(2, 3)
    slab = gradients_in_slab(layer)
    layer(torch.ones(1, 2)).sum().backward()
    slab.reset()
    with pytest.raises(RuntimeError, match="set gradients to None first"):
        layer(torch.ones(1, 2)).sum().backward()
    pair = nn.ParameterList([torch.ones(2), torch.ones(5)])
    slab = gradients_in_slab(pair)
    pair[0].sum().backward()
    slab.reset()
    pair[1].sum().backward()  # lies over all of the one before
    with pytest.raises(RuntimeError, match="set gradients to None first"):
        pair[0].sum().backward()
    with pytest.raises(ValueError, match="has none that wants a gradient"):
        gradients_in_slab(nn.Linear(2, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="has torch.bfloat16 on cpu, torch.float32 on cpu"):
        gradients_in_slab(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3).bfloat16()]))


def test_a_gradient_slab_does_not_keep_its_model_alive():
    layer = nn.Linear(2, 3)
    slab = gradients_in_slab(layer)
    layer(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(layer.weight), weakref.ref(slab)
    del layer, slab
    gc.collect()
    assert [ref() for ref in alive] == [None, None], "a hook holds the parameter that holds the hook"


def stage2_losses(in_slab):
    rank = dist.get_rank()
    model, slab = toys.build(lambda: GPT(SIZES), rank), Slab()
    if in_slab:
        checkpoint_blocks(model, place=slab.keep)
    zero = Stage2(model, torch.optim.AdamW, lr=1e-2, bucket_bytes=4096)
    torch.manual_seed(200 + rank)
    losses = []
    for step in range(3):
        loss = model(*toys.tokens(rank, step))
        losses.append(loss.item())
        loss.backward()
        zero.step()
        zero.zero_grad()
        slab.reset()
        assert not in_slab or len(slab.memory) == SIZES.layers * 3 * toys.SEQUENCE * SIZES.hidden
    return losses


@pytest.mark.thorough
def test_checkpoints_in_a_slab_go_with_stage_2():
    without, within = (toys.run(stage2_losses, 3, in_slab) for in_slab in (False, True))
    assert without == within
    assert len({tuple(losses) for losses in within}) == 3, "each rank has its own data"


# -------------------------------------------------------------------------------------------------------------- arena


def test_arena_takes_the_smallest_hole_and_merges_neighbours():
    arena = Arena(100)
    a, b, c, d = (arena.allocate((size,)) for size in (30, 10, 20, 40))
    assert arena.free_bytes == arena.largest_free == 0
    start = arena.memory.data_ptr()
    assert [tensor.data_ptr() - start for tensor in (a, b, c, d)] == [0, 120, 160, 240]
    arena.free(a)
    arena.free(c)
    assert (arena.free_bytes, arena.largest_free) == (200, 120)
    small = arena.allocate((4, 5))
    assert small.data_ptr() - start == 160, "the hole of 20 fits best"
    arena.free(small)
    arena.free(b)  # free neighbours on both sides
    assert (arena.free_bytes, arena.largest_free) == (240, 240)
    arena.free(d)
    assert arena.allocate((100,)).data_ptr() == start


def test_arena_hands_out_its_own_memory():
    arena = Arena(60, torch.float64)
    tensors = [arena.allocate(shape) for shape in ((3, 4), (), (2, 1, 5))]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {arena.memory.untyped_storage().data_ptr()}
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 4), (), (2, 1, 5)]
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float64 for tensor in tensors)
    assert arena.free_bytes == 8 * (60 - 23)


def test_arena_says_what_does_not_fit():
    arena = Arena(100)
    parts = [arena.allocate((20,)) for _ in range(5)]
    arena.free(parts[1])
    arena.free(parts[3])
    with pytest.raises(MemoryError, match=r"\(30,\) needs 120 bytes; 160 are free, the largest block has 80: call"):
        arena.allocate((30,))
    with pytest.raises(MemoryError, match="needs 200 bytes; 160 are free.*free tensors that are not needed, or make"):
        arena.allocate((50,))
    arena.compact()
    arena.allocate((30,))
    with pytest.raises(ValueError, match="at least one element, not of shape"):
        arena.allocate((3, 0))
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Arena(0)


def test_arena_refuses_a_second_free():
    arena = Arena(10)
    tensor, other = arena.allocate((4,)), arena.allocate((4,))
    arena.free(tensor)
    assert tensor.numel() == 0, "nobody can write by mistake to what is someone else's"
    for wrong in (tensor, torch.ones(4), other[:2], Arena(10).allocate((4,))):
        with pytest.raises(ValueError, match="once: it is none, or it was freed before"):
            arena.free(wrong)
    assert arena.free_bytes == 4 * 6


@pytest.mark.parametrize("gap", (1, 3, 700))
def test_compaction_moves_overlapping_blocks(gap, monkeypatch):
    monkeypatch.setattr(Arena._move, "__defaults__", (100,))  # pieces of 100 elements
    arena = Arena(2000)
    hole, large, behind = (arena.allocate(shape) for shape in ((gap,), (37, 31), (50,)))
    values = [tensor.normal_().clone() for tensor in (large, behind)]
    holders, address = [large, behind], id(large)
    arena.free(hole)
    arena.compact()
    assert toys.identical(holders, values)
    assert id(holders[0]) == address
    assert large.data_ptr() == arena.memory.data_ptr()
    assert behind.data_ptr() == extent(large)[1]
    assert arena.largest_free == arena.free_bytes == 4 * (2000 - 37 * 31 - 50)


def test_compaction_keeps_parameters_and_transposed_tensors():
    arena = Arena(200)
    hole = arena.allocate((5,))
    turned = arena.allocate((3, 7)).normal_().t_()
    wanted = turned.clone()
    param = arena.allocate((6, 4)).normal_().requires_grad_()
    loss = (param * param).sum()
    arena.free(hole)
    arena.compact()
    assert torch.equal(turned, wanted) and turned.shape == (7, 3)
    assert param.is_leaf and param.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # other values lie there now


@pytest.mark.thorough
def test_training_in_an_arena_leaves_no_holes_after_compaction():
    """50 steps in which all activations and gradients come from one arena, while gradients outlive their step."""
    arena, chance = Arena(400_000), random.Random(0)
    model, reference = gpt(), gpt()
    moments = []  # in each step: bytes free, and the largest block, before compaction

    def contiguous(tensor):  # as in the arena: kernels that see other strides may sum in another order
        return tensor.clone(memory_format=torch.contiguous_format)

    def pack(tensor):
        if not tensor.is_floating_point():
            return tensor
        home = arena.allocate(tensor.shape)
        home.copy_(tensor)
        return home

    def unpack(home):
        if home.is_floating_point():
            value = home.clone()
            arena.free(home)
            return value
        return home

    old = {}  # gradients that somebody still wants: of some parameters, from some step before
    for step in range(50):
        inputs = toys.tokens(0, step, sequence=chance.randint(2, SIZES.sequence))
        random_state = torch.get_rng_state()
        with torch.autograd.graph.saved_tensors_hooks(contiguous, lambda tensor: tensor):
            plain = reference(*inputs)
        plain.backward()
        torch.set_rng_state(random_state)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(*inputs)
        if step % 10 == 3:
            arena.compact()  # between forward and backward: what was saved has moved
        loss.backward()
        assert loss.item() == plain.item()
        assert toys.identical([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        for name, param in model.named_parameters():
            if chance.random() < 0.3:
                if name in old:
                    arena.free(old.pop(name)[0])  # leaves a hole
                else:
                    old[name] = arena.allocate(param.grad.shape).copy_(param.grad), param.grad.clone()
        for trained in (model, reference):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
            trained.zero_grad()
        moments.append((arena.free_bytes, arena.largest_free))
        if step % 10 == 9:
            arena.compact()
            live = 4 * sum(tensor.numel() for tensor, _ in old.values())
            assert arena.largest_free == arena.free_bytes == 4 * 400_000 - live
        assert all(torch.equal(tensor, value) for tensor, value in old.values())
    assert any(largest < free for free, largest in moments), "there were holes to close"
    assert arena.largest_free == arena.free_bytes


# ---------------------------------------------------------------------------------------------------- allocator model


def test_model_rounds_and_shares_small_segments():
    allocator = CachingAllocator(100 * MIB)
    blocks = [allocator.allocate(bytes) for bytes in (1, 512, 513, MIB)]
    assert [block.size for block in blocks] == [512, 512, 1024, MIB]
    assert [block.address for block in blocks] == [0, 512, 1024, 2048]
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, MIB + 2048)
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB, "the first segment has not room for that"


@pytest.mark.parametrize(("bytes", "segment"), [
    (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB), (33 * MIB, 34 * MIB),
])
def test_model_asks_the_driver_as_torch_does(bytes, segment):
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(bytes)
    assert allocator.reserved == segment


def test_model_takes_the_best_fit():
    allocator = CachingAllocator(100 * MIB)
    a, _, b, _, c, _ = (allocator.allocate(k * 1024) for k in (100, 1, 50, 1, 80, 1))
    for block in (a, b, c):
        allocator.free(block)
    assert allocator.allocate(60 * 1024).address == c.address, "80 KiB is the smallest that is enough"
    assert allocator.allocate(20 * 1024).address == c.address + 60 * 1024, "what was left of it is exactly 20 KiB"
    assert allocator.allocate(20 * 1024).address == b.address
    assert allocator.allocate(100 * 1024).address == a.address


def test_model_splits_large_blocks_only_if_much_is_left():
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    whole = allocator.allocate(39 * MIB)
    assert (whole.size, allocator.free_blocks) == (40 * MIB, [])
    allocator.free(whole)
    part = allocator.allocate(39 * MIB - 512)
    assert (part.size, allocator.free_blocks) == (39 * MIB - 512, [MIB + 512])


def test_model_merges_free_neighbours():
    allocator = CachingAllocator(100 * MIB)
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert allocator.free_blocks == [5 * MIB, 5 * MIB]
    allocator.free(blocks[1])
    assert allocator.free_blocks == [15 * MIB]
    assert allocator.allocate(14 * MIB - 512).address == 0
    allocator.free(blocks[3])
    assert allocator.free_blocks == [6 * MIB + 512]
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks[3])


def test_model_gives_back_what_is_idle_and_then_fails():
    allocator = CachingAllocator(100 * MIB)
    a, b, c = (allocator.allocate(30 * MIB) for _ in range(3))
    allocator.free(a)
    assert allocator.reserved == 90 * MIB, "kept for the next request"
    d = allocator.allocate(36 * MIB)
    assert (allocator.reserved, d.size) == (96 * MIB, 36 * MIB), "the driver took back 30 MiB first"
    allocator.free(d)
    allocator.free(c)
    held = [allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)]  # one in c's segment, then one behind it
    allocator.free(held[0])
    with pytest.raises(OutOfMemory, match="of 104,857,600 bytes") as caught:
        allocator.allocate(41 * MIB)
    error = caught.value
    assert error.allocated == 30 * MIB + 12 * MIB
    assert (error.requested, error.free) == (41 * MIB, 58 * MIB)
    assert error.free_share == pytest.approx(0.58)
    assert error.largest_free == 40 * MIB == allocator.largest_free
    assert "58%" in str(error) and "41,943,040" in str(error)
    allocator.free(b)
    allocator.free(held[1])
    assert allocator.allocate(100 * MIB).address == 0


def test_model_never_overlaps():
    """Thousands of random requests: blocks stay apart and inside their segments, and the sums are right."""
    chance, allocator, live = random.Random(1), CachingAllocator(150 * MIB), []
    for _ in range(4000):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
            continue
        try:
            live.append(allocator.allocate(int(2 ** chance.uniform(8, 25))))
        except OutOfMemory as error:
            assert error.largest_free < error.requested or error.requested < 10 * MIB
    by_address = sorted(live, key=lambda block: block.address)
    assert all(a.address + a.size <= b.address for a, b in zip(by_address, by_address[1:], strict=False))
    for block in live:
        assert any(s.address <= block.address and block.address + block.size <= s.address + s.bytes
                   for s in allocator.segments)
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.reserved == sum(s.bytes for s in allocator.segments) <= 150 * MIB
    assert allocator.reserved == allocator.allocated + sum(allocator.free_blocks)
    assert allocator.past_segments
    for block in live:
        allocator.free(block)
    assert allocator.largest_free == 150 * MIB
    assert allocator.free_blocks == sorted(s.bytes for s in allocator.segments)


# ------------------------------------------------------------------------------------------------------------- replay


LONGEST = 192


@pytest.fixture(scope="module")
def recordings():
    """A real training with and without slabs."""
    config = GPTConfig(layers=4, hidden=128, heads=2, sequence=LONGEST, vocabulary=16384, dropout=0.1)
    lengths = lesson08_program.varied_lengths(4, LONGEST)
    return {slabs: lesson08_program.record(config, lengths, batch=4, accumulate=4, slabs=slabs)
            for slabs in (False, True)}


@pytest.mark.thorough
def test_recordings_are_of_the_same_training(recordings):
    assert recordings[False].losses == recordings[True].losses
    assert len(set(recordings[True].losses)) == 4
    for recording in recordings.values():
        assert recording.begins == sorted(recording.begins) and len(recording.begins) == 4
        assert 0 < recording.begins[0] < recording.begins[-1] < len(recording.trace)


@pytest.mark.thorough
def test_replay_serves_every_event(recordings):
    for recording in recordings.values():
        allocator = allocator_model.replay(recording.trace, CachingAllocator(2**40))
        alive, peak = {}, 0
        for event in recording.trace:
            alive[event.storage] = alive.get(event.storage, 0) + event.bytes
            peak = max(peak, sum(alive.values()))
        assert allocator.requests == len(recording.trace)
        assert peak <= allocator.peak_allocated <= allocator.peak_reserved
        rows, failure = allocator_model.memory_map(recording.trace, CachingAllocator(2**40))
        assert failure is None
        assert len(rows) == sum(event.bytes > 0 for event in recording.trace)
        assert all(row.begin < row.end and row.bytes > 0 for row in rows)


@pytest.mark.thorough
def test_map_has_no_two_tensors_in_one_place(recordings):
    rows, _ = allocator_model.memory_map(recordings[False].trace, CachingAllocator(2**40))
    for moment in range(0, len(recordings[False].trace), 97):
        lying = sorted((row.address, row.bytes) for row in rows if row.begin <= moment < row.end)
        assert all(a + size <= b for (a, size), (b, _) in zip(lying, lying[1:], strict=False))


@pytest.mark.thorough
def test_slabs_prevent_the_failure(recordings):
    finding = allocator_model.find_capacity(recordings[False].trace, recordings[True].trace, tries=12)
    assert finding.smallest_with <= finding.capacity < finding.smallest_without
    with pytest.raises(OutOfMemory) as caught:
        allocator_model.replay(recordings[False].trace, CachingAllocator(finding.capacity))
    assert caught.value.requested <= caught.value.free, "free memory would have been enough, in one piece"
    assert 2 * caught.value.largest_free < caught.value.requested, "no block is nearly large enough"
    assert caught.value.free_share > 0.25
    allocator_model.replay(recordings[True].trace, CachingAllocator(finding.capacity))


@pytest.mark.thorough
def test_slabs_are_two_storages_of_the_trace(recordings):
    rows, _ = allocator_model.memory_map(recordings[True].trace, CachingAllocator(2**40))
    lasting = [row for row in rows if row.begin < recordings[True].begins[0] and row.end > recordings[True].begins[-1]]
    longest = max(lesson08_program.varied_lengths(4, LONGEST))
    assert ("activations", 4 * 4 * longest * 128 * 4) in {(row.category, row.bytes) for row in lasting}
    gradients = [row for row in rows if row.category == "gradients" and row.end > recordings[True].begins[0]]
    parameters = sum(row.bytes for row in lasting if row.category == "parameters")
    kept = [row for row in gradients if row in lasting]
    assert len(kept) == 1 and kept[0].bytes <= parameters + MIB
    assert max(row.end - row.begin for row in gradients if row not in lasting) < 100, "from autograd into the slab"


# ------------------------------------------------------------------------------------------- the real allocator of CUDA


def segments_of(pool):
    """Bytes and blocks (bytes, whether in use) of each segment of a pool, as torch tells them."""
    return sorted(
        (segment["total_size"], [(block["size"], block["state"] == "active_allocated") for block in segment["blocks"]])
        for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool.id)
    )


def segments_of_model(allocator, live):
    """The same of a model, whose used blocks are `live`."""
    blocks = [(block.address, block.size, True) for block in live]
    blocks += [(address, bytes, False) for address, bytes in allocator.holes]
    return sorted(
        (segment.bytes, [(bytes, used) for address, bytes, used in sorted(blocks)
                         if segment.address <= address < segment.address + segment.bytes])
        for segment in allocator.segments
    )


@cuda
def test_model_does_as_cuda_does():
    chance, allocator, live = random.Random(2), CachingAllocator(2**40), []
    pool = torch.cuda.MemPool()  # of our own: what other tests left in the cache does not matter
    with torch.cuda.use_mem_pool(pool):
        for _ in range(200):
            if live and chance.random() < 0.45:
                allocator.free(live.pop(chance.randrange(len(live)))[1])
            else:
                bytes = int(2 ** chance.uniform(8, 25))
                live.append((torch.empty(bytes, dtype=torch.uint8, device="cuda"), allocator.allocate(bytes)))
        assert segments_of(pool) == segments_of_model(allocator, [block for _, block in live])


@cuda
@pytest.mark.parametrize("slabs", (False, True))
def test_replay_reserves_what_cuda_reserves(recordings, slabs):
    pool, tensors = torch.cuda.MemPool(), {}
    with torch.cuda.use_mem_pool(pool):
        for _, storage, bytes, _ in recordings[slabs].trace:
            if bytes > 0:
                tensors[storage] = torch.empty(bytes, dtype=torch.uint8, device="cuda")
            else:
                del tensors[storage]
        reserved = sum(bytes for bytes, _ in segments_of(pool))
    allocator = allocator_model.replay(recordings[slabs].trace, CachingAllocator(2**40))
    assert abs(reserved - allocator.reserved) <= 20 * MIB, "but for a segment: among equal blocks addresses decide"


@cuda
def test_slabs_are_two_blocks_on_cuda():
    model = gpt().cuda()
    slab = Slab(SIZES.layers * 3 * 23 * SIZES.hidden, device="cuda")
    gradient_slab = gradients_in_slab(model)
    checkpoint_blocks(model, place=slab.keep)
    inputs, targets = toys.tokens(0, 0, sequence=23)
    model(inputs.cuda(), targets.cuda()).backward()
    blocks = [(block["address"], block["address"] + block["size"]) for segment in torch.cuda.memory_snapshot()
              for block in segment["blocks"] if block["state"] == "active_allocated"]
    for memory, inside in ((slab.memory, []), (gradient_slab.memory, [param.grad for param in model.parameters()])):
        low, high = next((low, high) for low, high in blocks if low <= memory.data_ptr() < high)
        assert all(low <= first and last <= high for first, last in map(extent, [memory, *inside]))
