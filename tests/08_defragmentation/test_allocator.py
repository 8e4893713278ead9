"""The model of CUDA's caching allocator does as torch's does; and a training's record in it, with slabs and without.

How blocks are found, split and merged is the lesson's Pool, which the graded checks look at.
"""

import random

import pytest
import torch

from zero_minimal.meters import allocator as allocator_model
from zero_minimal.meters.allocator import MIB, CachingAllocator, OutOfMemory
from zero_minimal.programs import lesson08_program
from zero_minimal.workload.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread")

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


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


def test_model_splits_large_blocks_only_if_much_is_left():
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    whole = allocator.allocate(39 * MIB)
    assert (whole.size, allocator.free_blocks) == (40 * MIB, [])
    allocator.free(whole)
    part = allocator.allocate(39 * MIB - 512)
    assert (part.size, allocator.free_blocks) == (39 * MIB - 512, [MIB + 512])


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
