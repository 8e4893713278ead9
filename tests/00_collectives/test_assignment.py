"""Lesson 0's assignment, ring algorithms, in steps: what arrives, and what each rank sends to whom.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import re
import time

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import once

from zero_minimal.classroom.lessons import LOOK_AT
from zero_minimal.classroom.messages import listed
from zero_minimal.processes.ranks import RankError

worlds = pytest.mark.parametrize("world_size", (3, 2, 4))  # three first: on two, left and right are the same rank
PART = 35  # elements of a chunk


@pytest.fixture
def ring(assignment):
    """The module under test."""
    return assignment


def numbers(rank, size, dtype=torch.float32):
    """What a rank holds. The test can compute it for all of them, a rank for itself alone (toys.seed). Whole numbers
    have 60 bits, more than any float has."""
    generator = torch.Generator().manual_seed(toys.seed(rank, 13 * rank + size))
    if not dtype.is_floating_point:
        return torch.randint(-(2**59), 2**59, (size,), generator=generator, dtype=dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def near(one, other):
    """Equal up to the rounding of a few additions in another order, in their own dtype; whole numbers exactly."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return torch.equal(one, other)
    digits = torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=100 * digits, atol=10_000 * digits)


KINDS = (torch.float64, torch.int64)


def assert_kind(result, wanted, call, rank, world_size):
    """A result of another dtype than fp32 is the wanted one."""
    assert_is_tensor(result, call, rank)
    if result.dtype == wanted.dtype and near(result, wanted):
        return
    where = f"{call} of {wanted.dtype} numbers on rank {rank} of {world_size}"
    assert result.dtype == wanted.dtype, f"{where} gave numbers of {result.dtype}: results have the dtype of the input"
    assert result.shape == wanted.shape, f"{where} gave {list(result.shape)}, and {list(wanted.shape)} is right"
    index = int((result - wanted).abs().argmax())
    assert not near(result.float(), wanted.float()), (
        f"{where} gave {result[index]} where {wanted[index]} is right: digits are lost, so it was computed in a "
        "narrower dtype on the way. Work in the tensor's own"
    )
    pytest.fail(f"{where} gave {result[index]} at index {index}, and {wanted[index]} is right")


def same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


OWN = "a result has memory of its own, with one rank too: who changes it must not change the input"
AGAIN = "changed when the function was called again: each call returns new memory"


def and_stays(result, call):
    """A copy of a result, and whether it is as it was after some more calls, whose results live, too."""
    if not isinstance(result, torch.Tensor):
        return result, True
    before = result.clone()
    _others = [call() for _ in range(4)]  # two buffers, or more, might take turns
    return before, torch.equal(before.nan_to_num(), result.nan_to_num())


def count(number, thing):
    """1 element; 2 elements"""
    return f"{number} {thing}{'s' * (number != 1)}"


@contextlib.contextmanager
def only_messages(pause=0.0, copies=False):
    """Context in a rank; the calls that are made in it must be send and receive, or it fails. copies: keep what was
    sent."""
    before = checks.written_bytes()
    with checks.Calls(pause, copies=copies) as calls:
        yield calls
    others = sorted({call.name for call in calls.made} - {"send", "recv"})
    assert not others, (
        f"it calls torch's own {' and '.join(others)}, and this lesson is about what is inside: build it from send and "
        "receive"
    )
    written = checks.written_bytes() - before
    asked = sum(call.bytes for call in calls.made if call.name == "send")
    assert written <= asked + 256 * len(calls.made) + 64, (  # gloo's own words: some dozen bytes a message
        f"this rank wrote {written} bytes, as the kernel counts, and its {len(calls.made)} calls of send and receive "
        f"asked for {asked}: all that travels must be sent and received by them"
    )


def assert_ring(calls, rank, world_size, messages, size, what, share):
    """This rank sent so many messages of so many bytes, all to its right neighbour; `share` says why so many."""
    sends = [call for call in calls if call.name == "send"]
    right = (rank + 1) % world_size
    strangers = sorted({call.peer for call in sends} - {right})
    assert not strangers, (
        f"rank {rank} of {world_size} sent to rank {', '.join(map(str, strangers))} in {what}: in a ring each rank "
        f"sends to its right neighbour alone, here rank {right}"
    )
    sent, wanted = sum(call.bytes for call in sends), messages * size
    assert sent == wanted, (
        f"rank {rank} of {world_size} sent {sent} bytes in {what}, in {count(len(sends), 'message')}; "
        f"{share} is {wanted} bytes" + (f": {messages} messages of {size}" if wanted and messages > 1 else "")
    )
    assert len(sends) == messages, (
        f"rank {rank} of {world_size} sent {count(len(sends), 'message')} in {what}, and {messages} "
        f"{'is' if messages == 1 else 'are'} right, of {size} bytes each: one chunk an exchange, in one piece"
    )


# ---------------------------------------------------------------------------------------------------- step 1: exchange

SENT_LATE, LARGE = -7.0, 2**18
PAUSE = 0.2  # seconds before each message of a rank that is late


def exchanged(ring):
    """What came in, when rank 0 is late, and all overwrite what they sent as soon as exchange returns."""
    rank = dist.get_rank()
    outgoing, incoming = numbers(rank, LARGE), torch.full((LARGE,), torch.nan)
    time.sleep(0.3 if rank == 0 else 0)
    with only_messages() as calls:
        ring.exchange(outgoing, incoming, None)
        kept = torch.equal(outgoing, numbers(rank, LARGE))
        outgoing.fill_(SENT_LATE)
        came = incoming.clone()
    time.sleep(0.5)  # whatever is still on its way may arrive
    return came, kept, calls.made


@pytest.mark.step(1, points=7, unheard="these ranks wait in send: who receives?",
                  unsent="these ranks wait to receive: who sends?",
                  stuck="for each rank that waits: which rank does it wait for, and what does that one do?",
                  left="a send that nobody waits for may be dropped before it was made: wait() for each isend before "
                  "you return")
@pytest.mark.parametrize("world_size", (3, 2))
def test_neighbours_exchange(ring, world_size):
    for rank, (came, kept, _) in enumerate(once(exchanged, world_size, ring)):
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        assert kept, f"exchange changed `outgoing` on rank {rank}"
        assert not (came == SENT_LATE).any(), (
            f"rank {rank} received what rank {left} wrote into `outgoing` after its exchange() had returned: the send "
            "was still under way. Wait for it before you return"
        )
        assert not came.isnan().any(), (
            f"`incoming` is not filled on rank {rank} when exchange() returns: receive into it, and wait until it is "
            "there"
        )
        assert world_size == 2 or not torch.equal(came, numbers(right, LARGE)), (
            f"rank {rank} received rank {right}'s tensor: send to the right (rank + 1), receive from the left "
            "(rank - 1)"
        )
        assert torch.equal(came, numbers(left, LARGE)), f"rank {rank} did not receive the tensor of rank {left}"


@pytest.mark.step(1, points=4)
def test_an_exchange_is_one_message(ring):
    for rank, (*_, calls) in enumerate(once(exchanged, 3, ring)):
        assert_ring(calls, rank, 3, 1, 4 * LARGE, "exchange", "one tensor")


MEMBERS = ((1, 2), (0, 2))  # of groups: neighbours, whose numbers in the group are others; and no neighbours


GROUP = "here only {} form the group, and inside it they are ranks 0 and 1"
PASSED_ON = f"{GROUP}: is `group` passed on to every call, to get_rank() and get_world_size() too?"
NAMES = f"{GROUP}. But send and recv want their numbers among all ranks, here {{}} and {{}}: use _global()"


def in_groups(call, ring, words=PASSED_ON):
    """(members, [result of each]) for each group, of three ranks; of a failure, the words say what to look at."""
    for members in MEMBERS:
        try:
            results = toys.run(in_a_group, 3, call, ring, members)
        except (RankError, TimeoutError) as error:
            hint = words.format(listed(members), *members)
            error.hints = dict.fromkeys(("stuck", "left", "unsent", "unheard", "raised"), hint)
            raise
        yield members, [results[rank] for rank in members]


def in_a_group(call, ring, members):
    """call(ring, group, the tensor [6] of this rank), if this rank is in the group."""
    rank, group = dist.get_rank(), dist.new_group(list(members))
    if rank in members:
        with only_messages():
            return call(ring, group, numbers(rank, 6))
    return None


def exchange_in_group(ring, group, tensor):
    incoming = torch.zeros(6)
    ring.exchange(tensor, incoming, group)
    return incoming


@pytest.mark.step(1, points=4)
def test_exchange_in_a_group(ring):
    for members, (one, two) in in_groups(exchange_in_group, ring, NAMES):
        assert torch.equal(one, numbers(members[1], 6)) and torch.equal(two, numbers(members[0], 6)), (
            f"{listed(members)} did not receive each other's tensor: {NAMES.format(listed(members), *members)}"
        )


# ---------------------------------------------------------------------------------------------- step 2: reduce-scatter


def reduce_scattered(ring):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = numbers(rank, world_size * PART)
    with only_messages(copies=True) as calls:
        part = ring.reduce_scatter(tensor)
    kept = torch.equal(tensor, numbers(rank, world_size * PART))
    part, stayed = and_stays(part, lambda: ring.reduce_scatter(tensor + 1))
    return part, kept, stayed, calls.made


@pytest.mark.step(2, points=12)
@worlds
def test_reduce_scatter_gives_this_ranks_part_of_the_sum(ring, world_size):
    parts = [numbers(rank, world_size * PART).view(world_size, PART) for rank in range(world_size)]
    for rank, (part, *_, calls) in enumerate(once(reduce_scattered, world_size, ring)):
        assert_is_tensor(part, "reduce_scatter", rank)
        assert part.shape == (PART,), (
            f"reduce_scatter returned a tensor {list(part.shape)} on rank {rank}: of [{world_size} x {PART}] elements "
            f"its chunk is [{PART}]"
        )
        assert part.dtype == torch.float32, (
            f"reduce_scatter gave numbers of {part.dtype} on rank {rank}: results have the dtype of the input"
        )
        assert part.isfinite().all(), f"rank {rank}'s chunk holds {part[~part.isfinite()][0]}: memory nobody wrote to"
        if not near(part, sum(whole[rank] for whole in parts)):
            pytest.fail(f"rank {rank} of {world_size} returned {_found(part, parts)}; it must return chunk {rank} with "
                        f"the sum of {listed(range(world_size))}.{_sums_sent(rank, calls, parts)}")


def _found(numbers, parts):
    """In words: which chunk it is, and with whose numbers, where that can be seen. parts: [rank][chunk]."""
    made, world_size = _made_of(numbers, parts), len(parts)
    if not made:
        return "zeros" if made == {} else "numbers that are no sum of chunks of the ranks"
    chunks, times, ranks = {chunk for _, chunk in made}, set(made.values()), sorted(rank for rank, _ in made)
    if len(chunks) == 1 and times in ({world_size}, {1}):
        whose = f"the numbers of {listed(ranks)} alone" if len(ranks) == 1 else f"the sum of {listed(ranks)}"
        mean = "" if times == {world_size} else f", divided by {world_size} (the mean, not the sum)"
        return f"chunk {chunks.pop()} with {whose}{mean}"
    terms = [("" if each == world_size else f"{each / world_size:g} × ") + f"chunk {chunk} of rank {rank}"
             for (rank, chunk), each in made.items()]
    mixed = ", which are different chunks" if len(chunks) > 1 else ""
    return f"the sum of {', '.join(terms[:-1])} and {terms[-1]}{mixed}" if terms[1:] else terms[0]


def _made_of(numbers, parts):
    """{(rank, chunk): how often it was added, times N}, None if these numbers are no such sum."""
    if numbers.numel() != PART or not numbers.isfinite().all():
        return None
    world_size, wanted = len(parts), numbers.double().flatten()
    table = torch.stack(parts).double().view(-1, PART)
    times = (torch.linalg.lstsq(table.T, wanted[:, None]).solution.flatten() * world_size).round()
    if not near((times / world_size @ table).float(), wanted.float()):
        return None
    return {divmod(place, world_size): int(each) for place, each in enumerate(times) if each}


def _sums_sent(rank, calls, parts):
    """Lines that say what a rank sent in a reduce-scatter, and what to look at."""
    world_size, sent = len(parts), _chunks_sent(calls)
    if sent is None:
        return ""
    right = [sum(parts[(rank - step) % world_size][(rank - last - 1) % world_size] for step in range(last + 1))
             for last in range(world_size - 1)]
    if len(sent) == len(right) and all(map(near, sent, right)):
        return f"{LOOK_AT}what it sent is right. Which chunk does it return, and what has it added to that one?"
    return (_in_steps([_found(numbers, parts) for numbers in sent], world_size)
            + f"{LOOK_AT}your table of \"Whose turn is which chunk?\". Does it say the same?")


def _chunks_sent(calls):
    """What this rank sent, if each message was a chunk; else None."""
    sends = [call for call in calls if call.name == "send"]
    if any(call.numbers is None or call.numbers.numel() != PART for call in sends):
        return None
    return [call.numbers.flatten() for call in sends]


def _in_steps(sent, world_size):
    lines = [f"\n    In step {number} it sent {words}." for number, words in enumerate(sent[:world_size], 1)]
    if len(sent) < world_size - 1:
        then = "After that it sent nothing" if sent else "It sent nothing"
        lines.append(f"\n    {then}: {world_size} ranks take {count(world_size - 1, 'step')}.")
    return "".join(lines)


def assert_is_tensor(value, name, rank):
    assert isinstance(value, torch.Tensor), f"{name} returned {value!r} on rank {rank}, and a tensor is wanted"


@pytest.mark.step(2, points=4)
def test_reduce_scatter_leaves_its_input(ring):
    for rank, (_, kept, stayed, _) in enumerate(once(reduce_scattered, 3, ring)):
        assert kept, (
            f"reduce_scatter changed its input on rank {rank}: add to a copy, the caller still needs the tensor"
        )
        assert stayed, f"what reduce_scatter had returned on rank {rank} {AGAIN}"


@pytest.mark.step(2, points=8)
@worlds
def test_reduce_scatter_sends_one_chunk_a_step(ring, world_size):
    for rank, (*_, calls) in enumerate(once(reduce_scattered, world_size, ring)):
        assert_ring(calls, rank, world_size, world_size - 1, 4 * PART, "reduce_scatter",
                    "(N-1)/N of the tensor")


def of_kinds(call, size):
    """For each dtype: the result of call(tensor [size]), whether the tensor is as it was, and whether both share
    memory."""
    rank, results = dist.get_rank(), []
    for dtype in KINDS:
        tensor = numbers(rank, size, dtype)
        with only_messages():
            result = call(tensor)
        shared = isinstance(result, torch.Tensor) and same_memory(tensor, result)
        results.append((result, torch.equal(tensor, numbers(rank, size, dtype)), shared))
    return results


def assert_kinds(results, call, wanted):
    """`wanted(rank, dtype)` is right."""
    world_size = len(results)
    for rank, of_rank in enumerate(results):
        for dtype, (result, kept, shared) in zip(KINDS, of_rank, strict=True):
            assert_kind(result, wanted(rank, dtype), call, rank, world_size)
            assert kept, f"{call} changed its input of {dtype} numbers on rank {rank} of {world_size}"
            assert not shared, f"{call} gave its input's own memory back on rank {rank} of {world_size}: {OWN}"


def reduced_odd(ring):
    return of_kinds(ring.reduce_scatter, 3 * dist.get_world_size())


@pytest.mark.step(2, points=3)
@pytest.mark.parametrize("world_size", (1, 3))
def test_reduce_scatter_of_other_kinds(ring, world_size):
    assert_kinds(toys.run(reduced_odd, world_size, ring), "reduce_scatter", lambda rank, dtype: sum(
        numbers(other, 3 * world_size, dtype) for other in range(world_size)).view(world_size, 3)[rank])


def reduce_scatter_in_group(ring, group, tensor):
    return ring.reduce_scatter(tensor, group)


@pytest.mark.step(2, points=3)
def test_reduce_scatter_in_a_group(ring):
    for members, parts in in_groups(reduce_scatter_in_group, ring):
        total = sum(numbers(rank, 6) for rank in members).view(2, 3)
        for place, part in enumerate(parts):
            assert near(part, total[place]), other_in_group("reduce_scatter", members, place, "chunk")


def other_in_group(call, members, place, what):
    return f"{call} in a group gave rank {members[place]} a wrong {what}: {PASSED_ON.format(listed(members))}"


# -------------------------------------------------------------------------------------------------- step 3: all-gather


def all_gathered(ring):
    rank = dist.get_rank()
    part = numbers(rank, PART)
    torch.use_deterministic_algorithms(True)  # new memory comes filled with NaN
    with only_messages(copies=True) as calls:
        whole = ring.all_gather(part)
    kept = torch.equal(part, numbers(rank, PART))
    whole, stayed = and_stays(whole, lambda: ring.all_gather(part + 1))
    return whole, kept, stayed, calls.made


@pytest.mark.step(3, points=7)
@worlds
def test_all_gather_gives_all_parts_in_order(ring, world_size):
    results = once(all_gathered, world_size, ring)
    for rank, (whole, kept, stayed, calls) in enumerate(results):
        assert_is_tensor(whole, "all_gather", rank)
        assert whole.shape == (world_size * PART,), (
            f"all_gather of [{PART}] returned {list(whole.shape)} on rank {rank} of {world_size}: one flat tensor "
            f"[{world_size * PART}] is wanted"
        )
        places = [_whose(piece, world_size) for piece in whole.view(world_size, PART)]
        assert places == list(range(world_size)), (
            f"all_gather on rank {rank} of {world_size} gave the parts of ranks {_listed(places)}, and they must be "
            f"{_listed(range(world_size))}, in this order on every rank.{_parts_sent(calls, results)}"
        )
        assert kept, f"all_gather changed its input on rank {rank}: write into a new tensor"
        assert stayed, f"what all_gather had returned on rank {rank} {AGAIN}"


def _whose(piece, world_size):
    return next((rank for rank in range(world_size) if torch.equal(piece, numbers(rank, PART))), "?")


def _parts_sent(calls, results):
    """A line on the first message, of any rank, that was empty; if none was, lines on what this rank sent."""
    sent, world_size = [_chunks_sent(result[-1]) for result in results], len(results)
    if None in sent or (own := _chunks_sent(calls)) is None:
        return ""
    empty = [(step, rank) for rank, messages in enumerate(sent) for step, numbers in enumerate(messages, 1)
             if numbers.isnan().all() or not numbers.any()]
    if empty:
        step, rank = min(empty)
        return (f"\n    In step {step} rank {rank} sent a place of its result that nothing had been received into yet.")
    whose = [_whose(numbers, world_size) for numbers in own]
    return _in_steps([f"the part of rank {rank}" if rank != "?" else "what is nobody's part" for rank in whose],
                     world_size)


def _listed(places):
    return ", ".join(map(str, places)) + (" (? is nobody's)" if "?" in places else "")


@pytest.mark.step(3, points=5)
@worlds
def test_all_gather_sends_one_part_a_step(ring, world_size):
    for rank, (*_, calls) in enumerate(once(all_gathered, world_size, ring)):
        assert_ring(calls, rank, world_size, world_size - 1, 4 * PART, "all_gather", "N-1 parts")


def gathered_large(ring):
    """What came, where rank 0 sends late and so receives late, and all write over what they got as soon as they have
    it; and whether that stays when all_gather is called again."""
    rank = dist.get_rank()
    part = numbers(rank, LARGE)
    with only_messages(pause=PAUSE * (rank == 0)):
        whole = ring.all_gather(part)
        came = whole.clone()
        whole.fill_(SENT_LATE)
    time.sleep(2 * PAUSE)  # whatever is still on its way may arrive
    ring.all_gather(part)
    return came, bool((whole == SENT_LATE).all())


@pytest.mark.step(3, points=2, left="a send that nobody waits for may be dropped before it was made: wait() for each")
def test_all_gather_of_large_parts(ring):
    wanted = torch.cat([numbers(rank, LARGE) for rank in range(3)])
    for rank, (came, stayed) in enumerate(once(gathered_large, 3, ring)):
        assert not (came == SENT_LATE).any(), (
            f"rank {rank} received what its left neighbour wrote into its own result after all_gather() had returned "
            "there: the last send was still under way. Wait for it before you return"
        )
        assert torch.equal(came, wanted), f"all_gather of parts of {LARGE} elements gave other numbers on rank {rank}"
        assert stayed, f"what all_gather had returned on rank {rank}, of {LARGE} elements a part, {AGAIN}"


def gathered_odd(ring):
    return of_kinds(ring.all_gather, 3) + of_kinds(ring.all_gather, 1)


@pytest.mark.step(3, points=3)
@pytest.mark.parametrize("world_size", (1, 4))
def test_all_gather_of_other_kinds(ring, world_size):
    results = toys.run(gathered_odd, world_size, ring)
    for size, of_size in ((3, slice(0, 2)), (1, slice(2, 4))):
        assert_kinds([of_rank[of_size] for of_rank in results], "all_gather", lambda rank, dtype, size=size: torch.cat(
            [numbers(other, size, dtype) for other in range(world_size)]))


def all_gather_in_group(ring, group, tensor):
    return ring.all_gather(tensor, group)


@pytest.mark.step(3, points=3)
def test_all_gather_in_a_group(ring):
    for members, results in in_groups(all_gather_in_group, ring):
        wanted = torch.cat([numbers(rank, 6) for rank in members])
        for place, whole in enumerate(results):
            assert torch.equal(whole, wanted), other_in_group("all_gather", members, place, "order of the parts")


# -------------------------------------------------------------------------------------------------- step 4: all-reduce

SIZES = (1, 3, 64, 101)  # elements; no world divides all of them
EVEN = 4 * 3 * PART


def all_reduced(ring):
    """For each size: the sum, whether the input is as it was, whether the result stays when it is called again, and
    what was sent."""
    rank, results = dist.get_rank(), []
    for size in (*SIZES, EVEN):
        tensor = numbers(rank, size)
        with only_messages() as calls:
            total = ring.all_reduce(tensor)
        kept = torch.equal(tensor, numbers(rank, size))
        total, stayed = and_stays(total, lambda tensor=tensor: ring.all_reduce(tensor + 1))
        results.append((total, kept, stayed, calls.made))
    return results


@pytest.mark.step(4, points=6, raised="N need not divide the number of elements: is the tensor padded before it is cut "
                  "into N chunks?")
@worlds
def test_all_reduce_gives_the_sum_of_any_size(ring, world_size):
    for rank, results in enumerate(once(all_reduced, world_size, ring)):
        for size, (result, kept, stayed, _) in zip((*SIZES, EVEN), results, strict=True):
            total = sum(numbers(other, size) for other in range(world_size))
            assert_is_tensor(result, "all_reduce", rank)
            assert result.shape == (size,), (
                f"all_reduce of {count(size, 'element')} over {world_size} ranks returned {list(result.shape)}: "
                + (f"{world_size} does not divide {size}, so pad it, and cut the padding off again"
                   if size % world_size else f"[{size}] is wanted")
            )
            right = int(torch.isclose(result, total, rtol=1e-5, atol=1e-3).sum())
            assert right == size, (
                f"all_reduce of {count(size, 'element')} over {world_size} ranks: rank {rank} has the right sum in "
                f"{right} of them" + (" (it has the mean)" if near(result * world_size, total) else
                          " (it has its own numbers)" if near(result, numbers(rank, size)) else "")
            )
            assert kept, f"all_reduce of {count(size, 'element')} changed its input on rank {rank} of {world_size}"
            assert stayed, f"what all_reduce had returned on rank {rank} of {world_size} {AGAIN}"


def of_each_size(results):
    """(rank, size, what it sent), the largest size first."""
    for rank, of_rank in enumerate(results):
        for size, (*_, calls) in reversed(list(zip((*SIZES, EVEN), of_rank, strict=True))):
            yield rank, size, calls


MUCH = 8  # elements of padding in a chunk that are no padding any more


@pytest.mark.step(4, points=2)
@worlds
def test_all_reduce_sends_twice_a_reduce_scatter(ring, world_size):
    for rank, size, calls in of_each_size(once(all_reduced, world_size, ring)):
        chunk, sends = -(-size // world_size), [call for call in calls if call.name == "send"]
        sizes = {call.bytes for call in sends}
        if len(sizes) == 1 and 4 * chunk <= (sent := sizes.pop()) <= 4 * (chunk + MUCH):
            chunk = sent / 4  # it may be padded too much: that is another check's
        assert_ring(calls, rank, world_size, 2 * (world_size - 1), int(4 * chunk),
                    f"all_reduce of {count(size, 'element')}",
                    "2(N-1)/N of the tensor, filled up to a multiple of N,")


@pytest.mark.step(4, points=2)
@worlds
def test_all_reduce_pads_no_more_than_it_must(ring, world_size):
    for rank, size, calls in of_each_size(once(all_reduced, world_size, ring)):
        wanted = -(-size // world_size) * world_size
        padded = world_size * max([call.bytes for call in calls if call.name == "send"], default=0) // 4
        why = (f"{world_size} divides {size}, and it was padded all the same" if wanted == size else
               f"{wanted} is the next number that {world_size} divides")
        assert padded <= wanted, (
            f"all_reduce of {count(size, 'element')} over {world_size} ranks: by what rank {rank} sent, the tensor was "
            f"padded to {padded}. {why}"
        )


def all_reduced_odd(ring):
    return of_kinds(ring.all_reduce, 7) + of_kinds(ring.all_reduce, 6)


@pytest.mark.step(4, points=3)
@pytest.mark.parametrize("world_size", (1, 3))
def test_all_reduce_of_other_kinds(ring, world_size):
    results = toys.run(all_reduced_odd, world_size, ring)
    for size, of_size in ((7, slice(0, 2)), (6, slice(2, 4))):
        assert_kinds([of_rank[of_size] for of_rank in results], "all_reduce", lambda rank, dtype, size=size: sum(
            numbers(other, size, dtype) for other in range(world_size)))


def all_reduce_in_group(ring, group, tensor):
    return ring.all_reduce(tensor, group)


@pytest.mark.step(4, points=2)
def test_all_reduce_in_a_group(ring):
    for members, results in in_groups(all_reduce_in_group, ring):
        for place, result in enumerate(results):
            total = sum(numbers(rank, 6) for rank in members)
            assert near(result, total), other_in_group("all_reduce", members, place, "sum")


# --------------------------------------------------------------------------------------------------- step 5: broadcast


# elements, chunks, dtype
CUTS = ((64, 4, torch.float32), (10, 3, torch.int64), (7, 1, torch.float64), (1, 4, torch.float32))


def broadcasted(ring):
    """For every root and cut: whether the same tensor came back, its values, and what was sent."""
    rank, results = dist.get_rank(), []
    for root in range(dist.get_world_size()):
        def broadcast(tensor, chunks, named=(root,) if root else ()):  # rank 0 is the root where none is named
            return ring.broadcast(tensor, *named, chunk_count=chunks)

        # under a name that a rank's stack shows, should it stand still there
        broadcast.__code__ = broadcast.__code__.replace(co_name=f"broadcast_from_{root}")
        for cut, (size, chunks, dtype) in enumerate(CUTS):
            tensor = numbers(rank, size, dtype)
            with only_messages() as calls:
                returned = broadcast(tensor, chunks)
            results.append((root, cut, returned is tensor, tensor, calls.made))
    return results


LAST = "the last rank of the ring must not send, since nobody receives from it: which rank is that?"


def broadcasts(world_size, ring):
    """What `broadcasted` gave on each rank. Of ranks that stand still, it is said which rank was the root."""
    try:
        return once(broadcasted, world_size, ring)
    except TimeoutError as error:
        roots = re.findall(r" in broadcast_from_(\d+)", str(error))
        if roots and world_size > 1:
            root = min(map(int, roots))
            where = f"the root was rank {root} of {world_size}"
            last = "the last rank of the ring" + " when the root is not rank 0" * (root > 0)
            error.hints = {"stuck": f"{where}. {LAST.capitalize()}",
                           "unsent": f"{where}. Which rank should send to the one that waits? Who is {last}?"}
        raise


@pytest.mark.step(5, points=5, stuck=LAST, dropped="a send that nobody waits for may be dropped before it was made: "
                  "keep what isend returns, and wait() for each before you return")
@pytest.mark.parametrize("world_size", (2, 3, 4, 1))
def test_broadcast_copies_the_roots_tensor(ring, world_size):
    for rank, results in enumerate(broadcasts(world_size, ring)):
        for root, cut, _, tensor, _ in results:
            size, chunks, dtype = CUTS[cut]
            right = tensor == numbers(root, size, dtype)
            assert right.all(), (
                f"broadcast over {count(world_size, 'rank')}, root is {root or '0, as none is named'}: on rank {rank} "
                f"the tensor that it was given holds {int(right.sum())} of the root's {count(size, 'element')} "
                f"(chunk_count={chunks}). " + _what_is_missing(right, chunks)
            )


def _what_is_missing(right, chunks):
    """In words, what of a tensor did not arrive. right: whether each element did."""
    size, missing = len(right), int((~right).sum())
    if size < chunks:
        return "There may be fewer elements than chunks"
    if missing < size and right[: size - missing].all():
        return (f"The last {missing} of {size} elements did not arrive"
                + (f": {chunks} does not divide {size}" if size % chunks else ""))
    return "Receive into the tensor itself: its chunks are views of it"




def broadcasted_large(ring):
    """What came on each of four ranks, of which rank 2 sends late; the others write over it when they have it."""
    rank = dist.get_rank()
    tensor = numbers(rank, LARGE)
    with only_messages(pause=PAUSE * (rank == 2)):
        ring.broadcast(tensor, chunk_count=2)
        came = tensor.clone()
        tensor.fill_(SENT_LATE)
    time.sleep(3 * PAUSE)  # whatever is still on its way may arrive
    return came


@pytest.mark.step(5, points=2, stuck=LAST)
def test_broadcast_of_a_large_tensor(ring):
    for rank, came in enumerate(once(broadcasted_large, 4, ring)):
        assert not (came == SENT_LATE).any(), (
            f"rank {rank} received what its left neighbour wrote into the tensor after broadcast() had returned there: "
            "the last send was still under way. Wait for it before you return"
        )
        assert torch.equal(came, numbers(0, LARGE)), f"broadcast of {LARGE} elements gave other numbers on rank {rank}"


def broadcast_slowly(ring):
    rank = dist.get_rank()
    with only_messages(PAUSE * (rank == 1)) as calls:
        ring.broadcast(numbers(rank, 12 * PART), 1, chunk_count=3)
    return calls.made


@pytest.mark.step(5, points=5)
def test_broadcast_sends_the_tensor_once(ring):
    for rank, results in enumerate(broadcasts(3, ring)):
        for root, cut, _, tensor, calls in results:
            size, chunks, _ = CUTS[cut]
            sends = [call for call in calls if call.name == "send"]
            last, where = (rank + 1) % 3 == root, f"broadcast of {count(size, 'element')} from rank {root}"
            assert_ring(calls, rank, 3, len(sends), 0 if last else tensor.nbytes / max(1, len(sends)), where,
                        "what the last rank of the ring has to send" if last else "the whole tensor")
            assert len(sends) <= min(chunks, size), (
                f"rank {rank} of 3 sent {count(len(sends), 'message')} in {where} with chunk_count={chunks}: at most "
                f"{min(chunks, size)}, as tensor.chunk gives no empty ones"
            )


@pytest.mark.step(5, points=5)
def test_broadcast_is_a_pipeline(ring):
    calls = [[call for call in made if call.name == "send"] for made in once(broadcast_slowly, 3, ring)]
    root, middle = calls[1], calls[2]
    assert len(root) == 3, (
        f"with chunk_count=3 the root sent {count(len(root), 'message')}: in 3 chunks, so that the next rank can "
        "pass one on while it receives the next"
    )
    early = sum(call.at < root[-1].at for call in middle)
    assert early >= 2, (
        f"rank 2 had passed {count(early, 'chunk')} on when the root sent its last one, the third of three: send each "
        "chunk on as soon as it is there, and do not wait for the next one first"
    )


def broadcast_in_group(ring, group, tensor):
    ring.broadcast(tensor, 1, group)
    return tensor


@pytest.mark.step(5, points=2)
def test_broadcast_in_a_group(ring):
    for members, results in in_groups(broadcast_in_group, ring):
        for place, result in enumerate(results):
            assert torch.equal(result, numbers(2, 6)), (
                f"broadcast from rank 1 of a group of ranks {members[0]} and {members[1]} (root=1: that is rank 2) "
                f"gave another tensor on rank {members[place]}: root is a rank of the group"
            )


@pytest.mark.step(5, points=1)
def test_broadcast_returns_its_tensor(ring):
    for rank, results in enumerate(broadcasts(2, ring)):
        assert all(same for _, _, same, *_ in results), (
            f"broadcast did not return the tensor that it was given, on rank {rank}: end with return tensor"
        )
