"""Lesson 7's assignment, constant buffers, in steps: whose turn it is, how tensors are cut, what is sent and when.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. In between,
they run on the reference.
"""

import gc
import random
import time
import weakref
from itertools import pairwise

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from stock import Stock

from zero_minimal.core import collectives, seams
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import in_collective

worlds = pytest.mark.parametrize("world_size", (3, 2))


@pytest.fixture
def lesson(assignment):
    """The module under test."""
    return assignment


def number_of(tensor, buffers):
    """Which of the two buffers a tensor lies in, 0 or 1; None: it is neither."""
    return next((number for number, buffer in enumerate(buffers.buffers)
                 if 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes), None)


# -------------------------------------------------------------------------------- step 1: two buffers that take turns

SIZES = ((100, torch.float32), (4096, torch.float32), (4097, torch.float32), (100, torch.float16),
         (100, torch.float64), (1e3, torch.float32), (47.9, torch.float32))


def made(lesson):
    """Of buffers of each size: `elements`; of each buffer its shape, dtype, bytes, and where it lies. And which sizes
    were refused."""
    found, refused = [], []
    for size, dtype in SIZES:
        buffers = lesson.ConstantBuffers(size, dtype=dtype)
        found.append((buffers.elements, [
            (tuple(buffer.shape), str(buffer.dtype), buffer.nbytes, buffer.data_ptr()) for buffer in buffers.buffers]))
    standard = str(lesson.ConstantBuffers(100).buffers[0].dtype)
    places = [buffer.device.type for buffer in lesson.ConstantBuffers(100, device="meta").buffers]
    for elements in (-4, dist.get_world_size() - 1, dist.get_world_size()):
        try:
            lesson.ConstantBuffers(4 * elements)
            refused.append(None)
        except Exception as error:
            refused.append(type(error).__name__)
    return found, (standard, places), refused


@pytest.mark.step(1, points=5)
def test_two_buffers_of_the_size(lesson):
    world_size = 3
    for found, (standard, _), _ in once(made, world_size, lesson):
        for (size, dtype), (elements, buffers) in zip(SIZES, found, strict=True):
            what = f"ConstantBuffers({size}, dtype={dtype}) on {world_size} ranks"
            fit = int(size) // dtype.itemsize
            assert len(buffers) == 2, f"{what} has {len(buffers)} in `buffers`, and two take turns"
            assert abs(buffers[0][3] - buffers[1][3]) >= buffers[0][2], (
                f"{what}: both of its buffers are the same memory. One could not be filled while the other is on its "
                "way"
            )
            for shape, kind, held, _ in buffers:
                assert kind == str(dtype), f"{what} has buffers of {kind}"
                assert held <= size, (
                    f"{what} has buffers of {held} bytes each: `size` is in bytes, and an element has {dtype.itemsize}"
                )
                assert shape == (elements,) and isinstance(elements, int), (
                    f"{what} has buffers {list(shape)}, and its `elements` is {elements!r}: both must be the same, as "
                    "a number of elements, an int"
                )
            assert elements % world_size == 0, (
                f"{what} holds {elements} elements, of which {world_size} ranks have no equal parts: it must be a "
                "multiple of the number of ranks"
            )
            assert elements == fit // world_size * world_size, (
                f"{what} holds {elements} elements, and {fit // world_size * world_size} fit: as many as there is room "
                "for, down to a multiple of the number of ranks"
            )
        assert standard == "torch.float32", f"without dtype= the buffers are of {standard}, and fp32 is the default"


@pytest.mark.step(1, points=1)
def test_the_buffers_lie_on_the_device(lesson):
    for _, (_, places), _ in once(made, 3, lesson):
        assert places == ["meta"] * 2, f'with device="meta" the buffers lie on {" and ".join(dict.fromkeys(places))}'


def made_in_a_group(lesson):
    """`elements` of buffers of a group of ranks 1 and 2, by SIZES and for one element each; and whether all know it."""
    group = dist.new_group([1, 2])
    lesson.ConstantBuffers(100)
    if dist.get_rank() == 0:
        return None
    buffers = [lesson.ConstantBuffers(size, dtype=dtype, group=group) for size, dtype in (*SIZES, (8, torch.float32))]
    return [each.elements for each in buffers], all(each.group is group for each in buffers)


@pytest.mark.step(1, points=1)
def test_buffers_of_a_group(lesson):
    for rank, (found, known) in enumerate(once(made_in_a_group, 3, lesson)[1:], 1):
        assert known, "the group that ConstantBuffers was given is not its `group`"
        for (size, dtype), elements in zip((*SIZES, (8, torch.float32)), found, strict=True):
            right = int(size) // dtype.itemsize // 2 * 2
            assert elements == right, (
                f"ConstantBuffers({size}, dtype={dtype}, group=…) of ranks 1 and 2 of 3 holds {elements} elements on "
                f"rank {rank}, and {right} are right: the ranks that share a buffer are those of its group. Does "
                "get_world_size() know the group?"
            )


@pytest.mark.step(1, points=1)
def test_a_size_that_holds_nothing(lesson):
    for ranks, (_, _, (below, one_too_few, enough)) in [(n, found) for n in (3, 1) for found in once(made, n, lesson)]:
        where = "on 3 ranks" if ranks == 3 else "on 1 rank"
        assert enough is None, f"ConstantBuffers({4 * ranks}) {where} raised {enough}: one element a rank is enough"
        assert one_too_few == "ValueError", (
            f"ConstantBuffers({4 * ranks - 4}) {where} {'raised ' + one_too_few if one_too_few else 'was made'}, "
            "though there is no element for each rank: ValueError is wanted, else a loop over loads of nothing goes on"
        )
        assert below == "ValueError", (
            f"ConstantBuffers(-16) {where} {f'raised {below}' if below else 'was made'}: ValueError is wanted, as for "
            "every size that holds nothing"
        )


ROUNDS = (5, 3, 2, 33)  # trips until wait() is called


class Trip:
    """A collective under way, for a test. It is falsy, as an empty list of works is."""

    def __init__(self, number, events):
        self.number, self.events = number, events

    def __len__(self):
        return 0

    def wait(self):
        self.events.append(("waited", self.number))

    def read(self):
        self.events.append(("read", self.number))


def trips(lesson):
    """What happens in each of ROUNDS, in order: a buffer is "taken" and "sent", the trip is "waited" for and "read";
    the "end" is when wait() has returned, "twice" when it has again; with how many trips somebody still knew at most
    after a send, and at the end. Then the buffers that were taken in all rounds, by their numbers; and the bytes of
    both buffers at the start, and after each round."""
    buffers, taken, rounds = lesson.ConstantBuffers(48), [], []
    held = [sum(buffer.untyped_storage().nbytes() for buffer in buffers.buffers)]
    for count in ROUNDS:
        events, known, most = [], weakref.WeakSet(), 0
        for number in range(count):
            buffer = buffers.take()
            taken.append(number_of(buffer, buffers) if isinstance(buffer, torch.Tensor) else repr(buffer))
            trip = Trip(number, events)
            events.append(("taken", number))
            known.add(trip)
            buffers.send(trip, trip.read)
            events.append(("sent", number))
            del trip
            if len(known) > 2:
                gc.collect()
            most = max(most, len(known))
        for end in ("end", "twice"):
            buffers.wait()
            events.append((end, None))
        gc.collect()
        held.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers.buffers))
        rounds.append((count, events, most, len(known)))
    return rounds, taken, held


def taken_twice(lesson):
    """Of take(), take(), send(), take(), take(): whether the second buffer, which was sent, was waited for when the
    first was taken again, and when it was taken itself; and the four buffers, by their numbers."""
    buffers, events = lesson.ConstantBuffers(48), []
    taken = [buffers.take(), buffers.take()]
    trip = Trip(0, events)
    buffers.send(trip, trip.read)
    waited = []
    for _ in range(2):
        taken.append(buffers.take())
        waited.append(("waited", 0) in events)
    return waited, [number_of(buffer, buffers) for buffer in taken]


def listed(events):
    """What happened to which trip, in words."""
    words = [f"{what} {'' if number is None else number + 1}".strip() for what, number in events]
    return ", ".join(words) if words else "nothing"


def two_pairs(lesson):
    """Two pairs of buffers, each of which sends one after the other: what happened, as in trips(), trip 0 in the first
    pair and 1 in the second, when both had been taken again; and when all was over. And how many buffers lie in memory
    of their own."""
    pairs, events = [lesson.ConstantBuffers(48) for _ in range(2)], []
    for number, buffers in enumerate(pairs):
        buffers.take()
        trip = Trip(number, events)
        buffers.send(trip, trip.read)
    for buffers in pairs:
        buffers.take()  # the other one, which nobody has sent
    early = list(events)
    for buffers in pairs:
        buffers.wait()
        events.append(("end", None))
    return early, events, len({buffer.data_ptr() for buffers in pairs for buffer in buffers.buffers})


def place(events, *event):
    """Where an event first stands; beyond the end if it does not."""
    return events.index(event) if event in events else len(events)


@pytest.mark.step(1, points=4)
def test_two_buffers_for_ever(lesson):
    for _, taken, (before, *later) in once(trips, 1, lesson):
        assert None not in taken, (
            f"take() number {taken.index(None) + 1} returned memory that is none of the two in `buffers`: they are "
            "allocated once, when the object is made, and used again and again"
        )
        assert set(later) == {before}, (
            f"the two buffers have {before} bytes when they are made, and {later[0]} after wait(): they are constant. "
            "Memory that comes and goes between other tensors leaves holes"
        )
        for number in range(1, len(taken)):
            assert {taken[number - 1], taken[number]} == {0, 1}, (
                f"take() returned the buffers {', '.join(map(str, taken[: number + 1]))}: they must take turns, 0, 1, "
                f"0, 1 or 1, 0, 1, 0, also after a wait() (which came after {ROUNDS[0]} of them, and after "
                f"{ROUNDS[1]} more)"
            )


@pytest.mark.step(1, points=6)
def test_a_buffer_is_taken_when_it_is_back(lesson):
    for count, events, *_ in once(trips, 1, lesson)[0][0]:
        for number in range(count - 2):
            again = place(events, "taken", number + 2)
            assert place(events, "waited", number) < again, (
                f"take() number {number + 3} returned a buffer that is still on its way: nobody has waited for what "
                f"was sent in it after take() number {number + 1}. Who fills it now changes what is being sent"
            )
            assert place(events, "read", number) < again, (
                f"take() number {number + 3} returned a buffer whose result nobody has read: then() of the send after "
                f"take() number {number + 1} was not called. Who fills it now destroys the result"
            )


@pytest.mark.step(1, points=5)
def test_one_may_travel_while_the_other_is_taken(lesson):
    [((early, late), taken)] = once(taken_twice, 1, lesson)
    assert not early, (
        "take(), take(), send(), take(): the buffer that was taken last is on its way, the second one. The third "
        "take() returns the first, and waited for the second"
    )
    assert taken in ([0, 1] * 2, [1, 0] * 2), (
        f"take(), take(), send(), take(), take() returned the buffers {', '.join(map(str, taken))}: they take turns at "
        "each take(), also if nothing was sent in between"
    )
    assert late, (
        "take(), take(), send(), take(), take(): the last take() returns the second buffer, which is on its way, and "
        "nobody has waited for it. What has this buffer to wait for?"
    )
    for early, events, places in once(two_pairs, 1, lesson):
        assert places == 4, (
            f"two ConstantBuffers have {places} buffers in all, and 4 are right: each has two of its own, new memory"
        )
        right = [step for number in range(2) for step in (("waited", number), ("read", number), ("end", None))]
        assert not early and events == right, (
            f"two ConstantBuffers, each of which has sent one buffer: {listed(early)} happened while the other buffers "
            f"were taken, and with a wait() of each pair {listed(events[len(early):])}. Each pair waits for its own "
            "buffers alone, in its own wait(): is what is under way, or whose turn it is, kept in `self`, and not in "
            "the class?"
        )
    for count, events, *_ in once(trips, 1, lesson)[0][0]:
        for number in range(count):
            early = place(events, "waited", number)
            assert early > place(events, "sent", number), (
                f"send() number {number + 1} waited for its collective at once: it is over before the other buffer is "
                "filled, and two buffers are no better than one"
            )
            if number + 1 < count:
                assert early > place(events, "taken", number + 1), (
                    f"take() number {number + 2} waited for the collective that was sent last, in the other buffer: "
                    "only the one that used this buffer must be over, else nothing travels while it is filled"
                )


@pytest.mark.step(1, points=2)
def test_a_result_is_read_once_and_in_time(lesson):
    for sends, events, most, known in once(trips, 1, lesson)[0][0]:
        for number in range(sends):
            what, count = f"the result of send() number {number + 1} of {sends}", events.count(("read", number))
            assert place(events, "read", number) < place(events, "end"), (
                f"wait() returned, and {what} was not read: both buffers may be on their way"
            )
            assert place(events, "read", number) > place(events, "waited", number), (
                f"{what} was read before pending.wait() had returned: its numbers are not there yet. then() comes after"
            )
            assert count == 1, (
                f"{what} was read {count} times: then() is called once. Forget it when you have called it"
            )
        assert not known, (
            f"after wait() {known} of {sends} pendings, or their then(), are still kept: they hold the gradients, "
            "which nobody could free. Forget both when then() was called"
        )
        assert most <= 2, (
            f"after a send() {most} pendings, or their then(), are kept, and two buffers can be on their way: forget "
            "both when then() was called, which is before its buffer is taken again"
        )


# --------------------------------------------------------------------------------------------- step 2: cut into loads

ROOM = 7  # elements of a load
CUTS = [(ROOM, sizes) for sizes in (
    (1,), (ROOM - 1,), (ROOM,), (ROOM + 1,), (3 * ROOM + 1,), (3, 9, 1, 15), (ROOM, ROOM), (5, 0, 4), (0,), ())]
DRAWN = random.Random(7)
CUTS += [(room, tuple(DRAWN.choice((0, 1, 1, 2, room, DRAWN.randrange(30))) for _ in range(DRAWN.randrange(30))))
         for room in (1, 2, 5, 12, 40, 100) for _ in range(3)] + [(100, (1,) * 70)]


def cut(lesson):
    """For each of CUTS its loads: of each piece the number of its tensor (None: it is no view of any), and of each load
    the numbers in it, as they were when the load came and when all had come. The tensors hold 0, 1, 2 and so on."""
    found = []
    for room, sizes in CUTS:
        flats = list(torch.arange(float(sum(sizes))).split(sizes)) if sizes else []
        flats = [flat.clone() for flat in flats]
        loads, at_once = [], []
        for load in lesson.loads(iter(flats), room):
            loads.append(load)
            at_once.append(_numbers(load))
            if len(loads) > 50 + sum(sizes):
                break
        found.append(([[_tensor_of(piece, flats) for piece in load] for load in loads], at_once,
                      list(map(_numbers, loads))))
    return found


def _numbers(load):
    return [number for piece in load for number in piece.tolist()]


def _tensor_of(piece, flats):
    places = [flat.untyped_storage().data_ptr() for flat in flats]
    place = piece.untyped_storage().data_ptr()
    return places.index(place) if place in places else None


def each_cut(lesson):
    """what was cut in words, elements of a load, number of elements, the three that cut() found."""
    for results in once(cut, 1, lesson):
        for (room, sizes), found in zip(CUTS, results, strict=True):
            tensors = f"tensors of {listed_numbers(sizes)} elements" if len(sizes) != 1 else f"a tensor of {sizes[0]}"
            what = f"loads(): of {tensors if sizes else 'no tensors'}, for buffers of {room} elements,"
            yield what, room, sum(sizes), *found


def listed_numbers(numbers):
    *others, last = map(str, numbers) if numbers else ("no",)
    return f"{', '.join(others)} and {last}" if others else last


TAIL = "what is left at the end is a load as well"
CUT = "a tensor goes on in the next load where one is full, and a large one goes through several"


@pytest.mark.step(2, points=10,
                  raised="there may be a tensor without elements, or no tensor at all; and `flats` may be an iterable "
                  "that can be read once")
def test_every_element_is_in_one_load(lesson):
    for what, room, total, _, at_once, _ in each_cut(lesson):
        cut_up, right = [number for load in at_once for number in load], list(range(total))
        missing, twice = sorted(set(right) - set(cut_up)), len(cut_up) - len(set(cut_up))
        assert len(at_once) <= 50 + total, f"{what} there are {len(at_once)} loads, and no end: does `start` get on?"
        assert not missing, (
            f"{what} {len(missing)} of {total} elements are in no load, the first is element {missing[0]}: "
            f"{TAIL if missing == right[-len(missing):] and len(missing) < room else CUT}"
        )
        assert not twice, f"{what} {twice} elements are in two loads: their mean would be taken twice"
        assert cut_up == right, (
            f"{what} the order is {', '.join(f'{number:.0f}' for number in cut_up[:12])} …: loads follow the order of "
            "the tensors, else ranks could send different ones together"
        )


@pytest.mark.step(2, points=8)
def test_loads_are_full(lesson):
    for what, room, total, _, at_once, _ in each_cut(lesson):
        sizes = list(map(len, at_once))
        right = [room] * (total // room) + [total % room] * (total % room > 0)
        assert max(sizes, default=0) <= room, f"{what} a load has {max(sizes)} elements: it does not fit into a buffer"
        assert 0 not in sizes, (
            f"{what} load {sizes.index(0) + 1} of {len(sizes)} is empty: a collective of nothing would be sent"
        )
        assert sizes == right, (
            f"{what} there are loads of {listed_numbers(sizes)} elements, and {listed_numbers(right)} is right: each "
            "one is filled up, with a part of the next tensor too, so that there are as few collectives as can be"
        )


@pytest.mark.step(2, points=7)
def test_a_load_is_a_list_of_views(lesson):
    for what, *_, tensors, at_once, later in each_cut(lesson):
        assert not any(None in load for load in tensors), (
            f"{what} there are pieces that are copies: the result would be written to them, and not into the tensors"
        )
        for number, (before, after) in enumerate(zip(at_once, later, strict=True), 1):
            assert before == after, (
                f"{what} load {number} held {len(before)} elements when it came, and {len(after)} after the next ones "
                "had come: each load needs a list of its own, since it is read again when its buffer is back"
            )


# --------------------------------------------------------------------------------------- step 3: into the buffer, back

OLD = -5.0  # what is in a buffer from the trip before


def carried(lesson):
    """A buffer after it was filled, what fill() returned and whether that is a view of the buffer's start; what
    unpack() left in the tensors, and in what it unpacked."""
    buffer, sizes = torch.full((12,), OLD), (3, 1, 4)
    tensors = [flat.clone() for flat in torch.arange(1.0, 9.0).split(sizes)]
    whole = torch.arange(20.0, 26.0)  # of which a part is a piece
    load = [*tensors[:2], whole[2:4], tensors[2]]
    filled = lesson.fill(buffer, load)
    is_tensor = isinstance(filled, torch.Tensor)
    is_view = is_tensor and filled.data_ptr() == buffer.data_ptr()
    after = buffer.tolist()
    result = torch.arange(100.0, 110.0)
    lesson.unpack(result, load)
    return after, filled.tolist() if is_tensor else repr(filled), is_view, [
        *(tensor.tolist() for tensor in tensors), whole.tolist()], result.tolist()


FILLED = [1.0, 2, 3, 4, 22, 23, 5, 6, 7, 8]


@pytest.mark.step(3, points=5)
def test_fill_puts_pieces_side_by_side(lesson):
    for buffer, filled, is_view, *_ in once(carried, 1, lesson):
        assert filled != FILLED or is_view, (
            "fill() returned new memory: what is sent must be the buffer itself, from its start, as far as it is "
            "filled. Else there is a third buffer, and the result comes back into it"
        )
        assert filled != [*FILLED, OLD, OLD], (
            f"fill() returned all {len(buffer)} elements of the buffer, and {len(FILLED)} are filled: behind them are "
            "numbers of the load before, which would be sent again"
        )
        assert filled == FILLED, f"fill() of pieces {FILLED[:3]}, {FILLED[3:4]} and so on returned {filled}"
        assert buffer[len(FILLED):] == [OLD, OLD], "fill() changed what is behind the load: nothing is written there"


@pytest.mark.step(3, points=4)
def test_unpack_brings_each_piece_its_part(lesson):
    for *_, tensors, filled in once(carried, 1, lesson):
        assert filled == list(range(100, 110)), "unpack() changed the buffer"
        before = [FILLED[:3], FILLED[3:4], FILLED[6:], list(range(20, 26))]
        right = [[100, 101, 102], [103], [106, 107, 108, 109], [20, 21, 104, 105, 24, 25]]
        assert tensors != before, (
            "unpack() left the tensors as they were: it must write into the memory of each piece (an assignment to a "
            "name, or a new tensor, does not)"
        )
        assert tensors == right, (
            f"after unpack() of 100, 101 … 109 the tensors hold {tensors}, and {right} is right: each piece gets its "
            "own part, in the memory in which it lies"
        )


SPECIAL = (1 / 3, torch.inf, -torch.inf, torch.nan, 0.0, 1e30, -7e4, 65519.0, 1e-7, 3e-40)
SHORT = (torch.float16, torch.bfloat16, torch.float32)


def rounded(lesson):
    """For 16 bit and fp32 in one load, with SPECIAL numbers: what is right, and what fill() put into an fp32 buffer;
    what is right for fp32 in each dtype, and what unpack() made of it."""
    some = torch.cat([torch.tensor(SPECIAL), torch.randn(200, generator=torch.Generator().manual_seed(3))])
    load = [(some * 1.001).to(dtype) for dtype in SHORT]
    exact = torch.cat([piece.double() for piece in load])
    filled = lesson.fill(torch.zeros(len(exact)), load).clone()
    lesson.unpack(some.repeat(3), load)
    return filled, exact, [(some, some.to(dtype), piece) for dtype, piece in zip(SHORT, load, strict=True)], (
        through_wide(lesson))


def first_other(ours, right):
    """The place of the first number that is not the same in both; None if there is none."""
    others = ~((ours == right) | ours.isnan() & right.isnan())
    return int(others.int().argmax()) if others.any() else None


def through_wide(lesson):
    """1/3 and 2/3 in a load of float64: what fill() put into a buffer of float64, and what unpack() of a fifth and two
    made of the load."""
    load = [torch.tensor([part], dtype=torch.float64) / 3 for part in (1.0, 2.0)]
    buffer = torch.zeros(3, dtype=torch.float64)
    filled = lesson.fill(buffer, load).clone()
    lesson.unpack(torch.tensor([1.0, 2.0], dtype=torch.float64) / 5, load)
    return filled, torch.cat(load)


@pytest.mark.step(3, points=4)
def test_numbers_are_rounded_when_they_come_back_and_never_before(lesson):
    for filled, exact, pieces, wide in once(rounded, 1, lesson):
        for what, found, whole in zip(("fill() put", "unpack() left"), wide, (3, 5), strict=True):
            right = torch.tensor([1.0, 2.0], dtype=torch.float64) / whole
            assert torch.equal(found, right), (
                f"{what} {found[0].item():.17g} for {right[0].item():.17g}, with pieces and a buffer of float64: it "
                "was rounded on the way. Numbers are computed in the dtype of the buffers, and go through no other one"
            )
        assert filled.dtype == torch.float32, f"fill() returned numbers of {filled.dtype} for an fp32 buffer"
        worst = first_other(filled.double(), exact)
        assert worst is None, (
            f"fill() put {filled[worst].item():.7g} into an fp32 buffer for {exact[worst].item():.7g}: it was rounded "
            "on the way. The buffer has digits enough for numbers of 16 bit and of fp32"
        )
        for given, right, piece in pieces:
            worst = first_other(piece, right)
            assert worst is None, (
                f"unpack() of {given[worst].item():.7g} into a piece of {piece.dtype} left "
                f"{piece[worst].item():.7g}, not {right[worst].item():.7g}"
            )


def made_on_the_way(lesson):
    """Bytes that operators make in fill() and in unpack() at most, and those of a load."""
    buffer = torch.zeros(1000)
    load = list(torch.ones(1000).split([600, 300, 100]))
    found = []
    for function in (lesson.fill, lesson.unpack):
        with Stock([buffer, load[0]]) as stock:
            function(buffer, load)
        found.append(stock.highest)
    return found, buffer.nbytes


@pytest.mark.step(3, points=2)
def test_nothing_is_made_on_the_way(lesson):
    for found, size in once(made_on_the_way, 1, lesson):
        for name, made in zip(("fill", "unpack"), found, strict=True):
            assert made <= size // 2, (
                f"{name}() of a load of {in_words(size)} made new memory of {in_words(made)}, though pieces and buffer "
                "are of one dtype: it is a third buffer, at each load. Copy each piece straight to its place"
            )


# ----------------------------------------------------------------------------- step 4: fill one while the other travels

ROOM_BYTES = 4 * 12
SHAPES = ((3, 5), (1,), (4, 7), (), (0, 3), (2, 13), (0,), (2, 3, 2), (11,), (13,), (37,))


def numbers(rank, dtype=torch.float32, shapes=SHAPES):
    """Tensors of a rank's own. A test can compute them for all ranks, a rank for itself alone (toys.seed)."""
    generator = torch.Generator().manual_seed(toys.seed(rank, 17 * rank))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def reduced(lesson, group=None):
    """What all_reduce() made of numbers(): the mean, then the sum, of tensors that want a gradient, side by side in
    one memory, through the same buffers; and whether they still want one."""
    rank, found = dist.get_rank(), {}
    buffers = lesson.ConstantBuffers(ROOM_BYTES, group=group)
    lesson.all_reduce([], buffers)
    tensors = numbers(rank)
    lesson.all_reduce(iter(tensors), buffers)
    found["avg"] = tensors
    flat = torch.cat([tensor.flatten() for tensor in numbers(rank)])
    places = flat.split([tensor.numel() for tensor in tensors])
    tensors = [place.view(shape).requires_grad_() for place, shape in zip(places, SHAPES, strict=True)]
    lesson.all_reduce(iter(tensors), buffers, op="sum")
    found["sum"] = [tensor.detach() for tensor in tensors]
    found["as they were"] = torch.is_grad_enabled() and all(tensor.requires_grad for tensor in tensors)
    return found


LOST = ("{} still holds rank {}'s own numbers: its result was not read, or not written into this tensor. Is it the "
        "load of this send that then() reads? (A function made in a loop sees the loop's variables as they are when it "
        "is called.)")
UNTOUCHED = ("{} still holds rank {}'s own numbers, and so does each tensor: nothing was sent, or no result was read. "
             "`tensors` may be a generator, as here: who goes through it a second time finds nothing")


def assert_reduced(ours, parts, op, what):
    """Tensors of rank after rank are the mean (or the sum) of `parts`, tensors of rank after rank."""
    for rank, tensors in enumerate(ours):
        for number, tensor in enumerate(tensors):
            exact = sum(part[number].double() for part in parts) / (len(parts) if op == "avg" else 1)
            if torch.allclose(tensor.double(), exact, atol=1e-5, rtol=1e-5 if tensor.itemsize == 4 else 0.01):
                continue
            which = f"tensor {number + 1} of {len(tensors)}, {list(tensor.shape)}, on rank {rank} of {len(parts)}"
            which += f", {what},"
            own = torch.isclose(tensor, parts[rank][number]).double().mean().item()
            untouched = all(map(torch.equal, tensors, parts[rank]))
            assert own < 1, (UNTOUCHED if untouched else LOST).format(which, rank)
            assert own == 0 or own == 1, (
                f"{which} holds the rank's own numbers in {own:.0%} of its elements: a load was not sent, or its "
                "result was not read. Is the last one waited for?"
            )
            ratio = (tensor.double().flatten() @ exact.flatten() / exact.flatten().square().sum()).item()
            close = torch.allclose(tensor.double(), ratio * exact, atol=1e-4)
            assert not close, (
                f"{which} is {ratio:.3g} times what is right: op={op!r} is the {'mean' if op == 'avg' else 'sum'} over "
                "the ranks"
            )
            wrong = ~torch.isclose(tensor.double(), exact, atol=1e-5)
            pytest.fail(
                f"{which} holds wrong numbers in {int(wrong.sum())} of {tensor.numel()} elements, for example "
                f"{tensor[wrong][0]:.4g} where {exact[wrong][0]:.4g} is right. Does each load get the numbers of its "
                "own buffer, was it back when they were read, and do all ranks send the same elements together?"
            )


@pytest.mark.step(4, points=7, stuck="every rank must send the same loads in the same order")
@worlds
def test_tensors_become_mean_or_sum(lesson, world_size):
    ranks = once(reduced, world_size, lesson)
    for op in ("avg", "sum"):
        assert_reduced([found[op] for found in ranks], [numbers(rank) for rank in range(world_size)], op,
                       f"reduced with op={op!r}")
    assert all(found["as they were"] for found in ranks), (
        "after all_reduce() autograd records nothing any more, or tensors that wanted a gradient want none: it is off "
        "inside of all_reduce() alone"
    )


class Starts:
    """While open, lists what this rank begins to send: (seconds, number of the buffer or None, its bytes, name). Of our
    collectives it knows how many are `under_way`, begun and not waited for, and how many `later` ones found none."""

    def __init__(self, buffers):
        self.buffers, self.made, self.under_way, self.later = buffers, [], 0, 0

    def __enter__(self):
        starts = self

        class Natives(checks.Calls):
            """Torch's own collectives, where the learner calls them."""

            def hear(self, function, args):
                if not in_collective() and function.namespace == "c10d":
                    for tensor in tensors_in(args[:2]):
                        if tensor.numel():
                            starts.note(tensor, function.__name__.split(".")[0].strip("_"))
                            break

        self._undo = Natives(), seams.heard_by("collective", self._hear)
        for context in self._undo:
            context.__enter__()
        return self

    def __exit__(self, *error):
        for context in reversed(self._undo):
            context.__exit__(*error)

    def _hear(self, moment, call):
        if moment == "start":
            self.later += bool(self.made and not self.under_way and "gather" not in call.name)
            self.note(max(call.tensors, key=lambda tensor: tensor.nbytes), call.name)
        if "gather" not in call.name:
            self.under_way += {"start": 1, "wait": -1}.get(moment, 0)

    def note(self, tensor, name):
        self.made.append((time.monotonic(), number_of(tensor, self.buffers), tensor.nbytes, name))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


LATE = 0.5  # seconds
TRAY = 2**20  # bytes
LARGE = ((TRAY // 4 - 3,), (3 * TRAY // 4,), (7,), (TRAY // 2 - 999,))  # an odd number in all


def large(rank):
    """Of which a small one is in bf16."""
    return [tensor.bfloat16() if tensor.numel() == 7 else tensor for tensor in numbers(rank, shapes=LARGE)]


def with_a_slow_rank(lesson):
    """Rank 1 comes late, then rank 0. What each rank begins to send, and what came of it, each time."""
    rank, found = dist.get_rank(), []
    buffers = lesson.ConstantBuffers(TRAY)
    for slow in (1, 0):
        tensors = large(rank)
        dist.barrier()
        time.sleep(LATE if rank == slow else 0)
        with Starts(buffers) as starts:
            lesson.all_reduce(tensors, buffers)
        found.append((starts.made, tensors, starts.later))
    return found


@pytest.mark.step(4, points=8)
def test_one_is_filled_while_the_other_travels(lesson):
    ranks = once(with_a_slow_rank, 2, lesson)
    for turn, (slow, quick) in enumerate(((1, 0), (0, 1))):
        begun = ranks[slow][turn][0]
        assert begun, f"all_reduce() sent nothing on rank {slow}"
        meanwhile = {number for at, number, *_ in ranks[quick][turn][0] if at < begun[0][0]}
        assert len(meanwhile) > 1, (
            f"rank {slow} was {LATE} s late, and meanwhile rank {quick} sent {len(meanwhile) or 'no'} buffer and then "
            "waited: it could fill and send the other one. Who waits for each collective at once (or calls "
            "it without async_op=True) needs no second buffer"
        )
        for rank, found in enumerate(ranks):
            assert not found[turn][2], (
                f"rank {rank} began {found[turn][2]} of {len(found[turn][0])} collectives while none was on its way: "
                "all but the first are filled and sent while the one before travels. Who waits for both buffers, or "
                "for the one that was sent last, has nothing on its way meanwhile"
            )


@pytest.mark.step(4, points=4)
def test_a_slow_rank_changes_nothing(lesson):
    ranks = once(with_a_slow_rank, 2, lesson)
    parts = [large(rank) for rank in range(2)]
    for turn, slow in enumerate((1, 0)):
        try:
            assert_reduced([found[turn][1] for found in ranks], parts, "avg", "reduced")
        except (AssertionError, pytest.fail.Exception) as error:
            raise AssertionError(
                f"where rank {slow} comes {LATE} s late: {error} (A buffer that is filled before what was sent in it "
                "is over changes what the other ranks get.)") from None


OTHERS = (torch.float16, torch.bfloat16, torch.float64)


def in_other_dtypes(lesson):
    """Of buffers of each of OTHERS, and 30 elements of it, 0 to 29 and the rank: which buffers were sent, and how many
    bytes; and the mean."""
    found = []
    for dtype in OTHERS:
        buffers = lesson.ConstantBuffers(12 * dtype.itemsize, dtype=dtype)
        tensor = torch.arange(30, dtype=dtype) + dist.get_rank()
        with Starts(buffers) as starts:
            lesson.all_reduce([tensor], buffers)
        found.append(([(number, size) for _, number, size, name in starts.made if "gather" not in name], tensor))
    return found


@pytest.mark.step(4, points=4)
def test_each_element_is_sent_once(lesson):
    for rank, made in [(n, turn[0]) for n, turns in enumerate(once(with_a_slow_rank, 2, lesson)) for turn in turns]:
        sent = [(number, size) for _, number, size, name in made if "gather" not in name]
        gathers, scatters = (sum(word in name for *_, name in made) for word in ("gather", "scatter"))
        total = 4 * sum(shape[0] for shape in LARGE)
        assert None not in {number for number, _ in sent}, (
            f"rank {rank} sent memory that is none of the two buffers: what travels must lie in them, else there are "
            "more"
        )
        assert sum(size for _, size in sent) == total, (
            f"rank {rank} sent {sum(size for _, size in sent):,} bytes in {len(sent)} collectives, of {total:,} bytes "
            "of tensors: each element goes once, in 4 bytes, and of the last buffer only what is filled"
        )
        right = -(-total // TRAY)
        assert len(sent) == right, (
            f"rank {rank} made {len(sent)} collectives for {total:,} bytes, and {right} are enough with buffers of "
            f"{TRAY:,}: each costs its time before the first byte. (Here a small tensor in the middle is in bf16. In "
            "which dtype does it travel, and does it need a load of its own?)"
        )
        assert gathers <= scatters, f"rank {rank} made {gathers} all-gathers, where {scatters} reduce-scatters need one"
    for rank, found in enumerate(once(in_other_dtypes, 2, lesson)):
        for dtype, (sent, mean) in zip(OTHERS, found, strict=True):
            elsewhere, total = [size for number, size in sent if number is None], sum(size for _, size in sent)
            assert not elsewhere and total == 30 * dtype.itemsize, (
                f"with buffers of {dtype} and 30 elements of it rank {rank} sent {total} bytes, {sum(elsewhere)} of "
                f"them from memory that is none of the two buffers, and {30 * dtype.itemsize} from the buffers are "
                "right: what travels has the dtype of the buffers, which need not be fp32"
            )
            assert torch.equal(mean, torch.arange(30, dtype=dtype) + 0.5), (
                f"with buffers of {dtype} the mean of 0 … 29 and of 1 … 30 is {mean.tolist()} on rank {rank}"
            )


PROBES = {  # of each rank, and what their mean is
    torch.float16: (((4096, 1, -4096), 1 / 3), ((40000, 40000, 40000), 40000), ((2.0**-24,) * 3, 2.0**-24),
                    ((2048, 1, 1), 2050 / 3)),
    torch.bfloat16: (((256, 1, -256), 1 / 3), ((1, 2.0**-9, 2.0**-9), (1 + 2.0**-8) / 3)),
}


def too_early(parts, dtype):
    """The mean if each rank divides its own part, in fp32, before the sum."""
    return sum(torch.tensor(part, dtype=torch.float32) / len(parts) for part in parts).to(dtype).item()


def probed(lesson):
    """What all_reduce() makes of PROBES on three ranks, mean by mean, and of the sum of random numbers; and the mean of
    wide_numbers(), through buffers of float64."""
    rank, found = dist.get_rank(), {}
    buffers = lesson.ConstantBuffers(400)
    for dtype, probes in PROBES.items():
        mean = torch.tensor([parts[rank] for parts, _ in probes], dtype=torch.float64).to(dtype)
        total = numbers(rank, dtype, ((200,),))[0]
        lesson.all_reduce([mean], buffers)
        lesson.all_reduce([total], buffers, "sum")
        found[str(dtype)] = mean, total
    wide, narrow = wide_numbers(rank), wide_numbers(rank).float()
    lesson.all_reduce([narrow, wide], lesson.ConstantBuffers(400, dtype=torch.float64))
    return found, wide, narrow


def wide_numbers(rank):
    """Of float64, with more digits than fp32 has; and infinity."""
    return torch.cat([numbers(rank, torch.float64, ((20,),))[0] / 3, torch.tensor([torch.inf])])


TWINS = {  # of a tensor of 9: what of it is given, too
    "one tensor twice": lambda tensor: tensor,
    "a tensor, and a view that begins in its middle": lambda tensor: tensor[3:],
    "a tensor, and its last element": lambda tensor: tensor[8:],
    "a tensor, and a part of its middle": lambda tensor: tensor[3:5],
    "a tensor that is not contiguous": lambda tensor: torch.ones(3, 2).t(),
}


def refused_twins(lesson):
    """The same for each of TWINS, which comes last, then first."""
    found = []
    for words, second in TWINS.items():
        for order in (1, -1):
            buffers, tensor = lesson.ConstantBuffers(48), torch.full((9,), 1.0 + dist.get_rank())
            try:
                lesson.all_reduce([tensor, torch.ones(3), second(tensor)][::order], buffers)
                raised = None
            except Exception as error:
                raised = type(error).__name__
            buffers.wait()
            found.append((words, raised, bool((tensor == 1 + dist.get_rank()).all())))
    return found


def refused(lesson):
    """What all_reduce() raises for tensors of which the last does not fit, and whether the others are as they were."""
    found = []
    for dtype, wrong, device in ((torch.float32, torch.float64, "cpu"), (torch.bfloat16, torch.float32, "cpu"),
                                 (torch.bfloat16, torch.float16, "cpu"), (torch.float16, torch.bfloat16, "cpu"),
                                 (torch.float32, torch.float32, "meta"), (torch.float32, torch.int64, "cpu"),
                                 (torch.float32, None, "cpu")):
        buffers = lesson.ConstantBuffers(dtype.itemsize * 12, dtype=dtype)
        tensors = [torch.full((9,), 1.0 + dist.get_rank(), dtype=dtype) for _ in range(4)]
        try:
            lesson.all_reduce([*tensors, wrong and torch.ones(3, dtype=wrong, device=device)], buffers)
            raised = None
        except Exception as error:
            raised = type(error).__name__
        buffers.wait()  # what is under way all the same would be in the way of the next
        untouched = all(bool((part == 1 + dist.get_rank()).all()) for part in tensors)
        found.append((str(dtype), f"{wrong}{', on another device' * (device == 'meta')}", raised, untouched))
    return found


@pytest.mark.step(4, points=2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(lesson):
    for rank, found in (*enumerate(once(refused, 2, lesson)), ("0, which is alone,", *once(refused, 1, lesson))):
        for dtype, wrong, raised, untouched in found:
            what = f"buffers of {dtype}, several tensors of it, and a last one of {wrong}: on rank {rank}"
            assert raised == "ValueError" or raised and wrong == "None", (
                f"{what} all_reduce() {'raised ' + raised if raised else 'went through: rounded, or left out'}"
                ". It must be a ValueError, before anything is sent: does fused.flat_views know the buffers' dtype and "
                "their device?"
            )
            assert untouched, (
                f"{what} it was refused when the tensors before it had been reduced. All of them must be looked at "
                "first: give fused.flat_views all at once"
            )
    for rank, found in enumerate(once(refused_twins, 2, lesson)):
        for words, raised, untouched in found:
            torchs_own = raised == "RuntimeError" and "contiguous" in words  # of tensor.view(-1)
            assert (raised == "ValueError" or torchs_own) and untouched, (
                f"of {words} all_reduce() on rank {rank} {'raised ' + raised if raised else 'wrote no right result'}"
                f"{'' if untouched else ', and has changed it'}. It must be a ValueError, before anything is sent: "
                "fused.flat_views sees it if it gets all tensors in one call"
            )


@pytest.mark.step(4, points=4)
def test_sums_are_those_of_fp32(lesson):
    for rank, (found, wide, narrow) in enumerate(once(probed, 3, lesson)):
        exact = sum(map(wide_numbers, range(3))) / 3
        worst = int((wide - exact).abs().nan_to_num(0.0).argmax())
        assert torch.allclose(wide, exact, rtol=1e-12, atol=1e-12), (
            f"with buffers and a tensor of float64 a mean is {wide[worst]:.17g} on rank {rank}, and "
            f"{exact[worst]:.17g} is right: it was rounded on the way. Numbers are added and divided in the dtype of "
            "the buffers, and go through no other one"
        )
        for dtype, probes in PROBES.items():
            for (parts, exact), mean in zip(probes, found[str(dtype)][0].double().tolist(), strict=True):
                right = torch.tensor(exact, dtype=torch.float64).to(dtype).item()
                told = (f"the mean of {parts[0]:.6g}, {parts[1]:.6g} and {parts[2]:.6g} in {dtype} is {mean:.6g} on "
                        f"rank {rank}, and {right:.6g} is right: ")
                assert mean == right or mean != too_early(parts, dtype), (
                    f"{told}just this comes out if each rank divides before the sum. {parts[0]:.6g}/{len(parts)} is "
                    "not exact in fp32 either: divide after the sum"
                )
                assert mean == right, (
                    f"{told}between the tensor and its result nothing is rounded to 16 "
                    "bit. The buffers are fp32: add and divide there"
                )
            exact = sum(numbers(other, dtype, ((200,),))[0].double() for other in range(3)).to(dtype)
            wrong = int((found[str(dtype)][1] != exact).sum())
            assert not wrong, (
                f"of 200 sums of three numbers of {dtype} {wrong} are wrong in the last digit on rank {rank}: they "
                "were rounded more than once. The buffers are fp32, and what comes back is rounded once"
            )
        exact = (sum(wide_numbers(other).float().double() for other in range(3)) / 3).float()
        assert torch.equal(narrow, exact), (
            f"with buffers of float64 a mean of fp32 is {narrow[0]:.9g} on rank {rank}, and {exact[0]:.9g} is right "
            "(or another one is wrong): numbers are added and divided in the dtype of the buffers, and rounded once"
        )


def three_loads(lesson):
    """The buffers that nine times three loads were sent in, by their numbers, and the one that is taken next; and what
    was read of a load that was sent before, from the same buffers."""
    buffers, read = lesson.ConstantBuffers(48), []
    with Starts(buffers) as starts:
        for _ in range(9):
            lesson.all_reduce([torch.full((30,), 1.0 * dist.get_rank())], buffers)
    sent = [number for _, number, _, name in starts.made if "gather" not in name]
    following = number_of(buffers.take(), buffers)
    for tensors in ([torch.ones(30)], [], [torch.ones(0)]):
        buffers = lesson.ConstantBuffers(48)
        earlier = buffers.take().fill_(1.0 + dist.get_rank())
        pending = collectives.all_reduce(earlier, op="sum", async_op=True)
        buffers.send(pending, lambda earlier=earlier: read.append(earlier.unique().tolist()))
        lesson.all_reduce(tensors, buffers)
        pending.wait()
    return sent, following, read


@pytest.mark.step(4, points=1)
def test_the_turns_go_on(lesson):
    for rank, (sent, following, read) in enumerate(once(three_loads, 2, lesson)):
        assert read == [[3.0]] * 3, (
            "a load of 1 + rank was sent, and then all_reduce() was called with the same buffers: of 30 elements, of "
            f"no tensor, of an empty one. On rank {rank} `then` of that load found {read}, and [3.0], once in each "
            "case, is right: all_reduce() takes buffers by take(), which waits for what is on its way, and ends with "
            "wait()"
        )
        assert len(sent) == 27 and all({a, b} == {0, 1} for a, b in pairwise([*sent, following])), (
            f"nine all_reduce(), of 3 loads each, sent the buffers {', '.join(map(str, sent))} on rank {rank} (None: "
            f"it lies in neither), and then take() returned {following}: whose turn it is goes on from one all_reduce "
            "to the next"
        )


SMALL = 2**16  # bytes of a buffer


def memory(lesson):
    """Bytes beyond tensors and buffers at the peak of all_reduce(), for 4 and for 40 buffers' worth of tensors, every
    other one of bf16; and what is left beyond the buffers when the tensors are gone."""
    found, left = [], []
    for times in (4, 40):
        bare = checks.live_bytes()
        tensors = [torch.ones(SMALL // (16, 8)[n % 2] + 5, dtype=(torch.float32, torch.bfloat16)[n % 2])
                   for n in range(4 * times)]
        buffers = lesson.ConstantBuffers(SMALL)
        lesson.all_reduce(tensors, buffers)
        ledger = Ledger()
        with ledger:
            before = live(tensors) + live(buffers.buffers)
            lesson.all_reduce(tensors, buffers)
        found.append(max((moment.total for moment in ledger.timeline), default=0) - before)
        del tensors, ledger
        bare += live(buffers.buffers)
        left.append(checks.live_bytes(until=bare, looks=20) - bare)
        del buffers
    return *found, max(left)


def live(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.step(4, points=4)
def test_memory_does_not_grow_with_the_model(lesson):
    for rank, (small, large, left) in enumerate(once(memory, 2, lesson)):
        assert large <= small + SMALL, (
            f"besides tensors and buffers rank {rank} needs {in_words(small)} for {in_words(4 * SMALL)} of tensors, "
            f"and {in_words(large)} for {in_words(40 * SMALL)}: it must be the same, however large the model is. What "
            "is kept or copied, load after load?"
        )
        assert left < 4096, (
            f"when all_reduce() has ended, and nobody holds the tensors, {in_words(left)} are still there beside the "
            f"buffers on rank {rank}: what is kept from call to call?"
        )


def in_a_group(lesson):
    """Ranks 1 and 2 share buffers."""
    group = dist.new_group([1, 2])
    return reduced(lesson, group) if dist.get_rank() else None


GROUP = ("here only ranks 1 and 2 form the group of the buffers: is it kept, and passed on to every call, to "
         "get_world_size() too?")


@pytest.mark.step(4, points=1, stuck=GROUP, left=GROUP, raised=GROUP, unsent=GROUP)
def test_reduces_in_a_group(lesson):
    _, *ranks = toys.run(in_a_group, 3, lesson)
    try:
        for op in ("avg", "sum"):
            assert_reduced([found[op] for found in ranks], [numbers(rank) for rank in (1, 2)], op, f"with op={op!r}")
    except (AssertionError, pytest.fail.Exception) as error:
        raise AssertionError(f"{error} To look at: {GROUP}") from None
