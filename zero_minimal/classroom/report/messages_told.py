"""Messages, told: what ranks sent each other in each round of a collective, beside what a ring sends."""

from dataclasses import replace

from zero_minimal.classroom.lessons import UNWRITTEN, Lesson
from zero_minimal.classroom.report import chunk_words, message_rounds
from zero_minimal.classroom.report.message_rounds import Event
from zero_minimal.classroom.report.recording import Recorded
from zero_minimal.classroom.report.rings import CHUNKS, PADDING, RANKS, RINGS, Ring, Sent
from zero_minimal.classroom.report.story import Line, Part, Step, Story, alike

WORLD_SIZE = RANKS
LEGEND = ("a, b, c are the chunks of a tensor. b1 is what rank 1 had in chunk b at the start, b0+b1 the sum of two, Σb "
          "that of all ranks. A round is counted by what must wait for what, not in seconds: messages that need not "
          "wait for each other are in the same one.")


def names(lesson: Lesson) -> list[str]:
    """The lesson's functions that can be told."""
    return [name for name in lesson.tasks if name in RINGS]


def tell(lesson: Lesson, runs: list[Recorded]) -> Story:
    """Raises: what broken records lead to, ValueError, KeyError, TypeError and the like."""
    return Story(f"Each function was called once more, on {RANKS} ranks and with small tensors.", LEGEND,
                 [part_of(run, RINGS[run.name]) for run in runs])


def part_of(run: Recorded, ring: Ring) -> Part:
    """A function's call: at the start, round by round, and what was returned."""
    if UNWRITTEN in run.ended:
        return Part(run.name, ring.about, [Step("Not written yet", departures=[run.ended])])
    events = message_rounds.in_rounds(run.ranks)
    ring = ring if ring.in_place else _in_its_rounds(ring, events)
    departures = [found for rank in range(RANKS) for found in _sent(run.name, rank, events[rank], ring)]
    last = max([event.round or 0 for own in events for event in own], default=0)
    expected = max(sent.round for own in ring.sent for sent in own)
    grids = _grids(events, ring, 0)
    steps = [Step("At the start", grids=grids)] if grids else []
    for number in range(1, max(last, 1 if run.ended else expected) + 1):
        wrong = {rank: words for round, rank, words in reversed(departures) if round == number}
        lines = [_line(rank, own, ring, number, rank in wrong, number == max(last, 1))
                 for rank, own in enumerate(events)]
        steps.append(Step(f"Round {number}", lines, _grids(events, ring, number),
                          departures=alike([wrong[rank] for rank in sorted(wrong)])))
    ends = [_end(run.name, rank, own, ring) for rank, own in enumerate(events)]
    if any(line.did for line, _ in ends):
        steps.append(Step("Returned", [line for line, _ in ends],
                          departures=alike([words for _, wrong in ends for words in wrong])))
    if run.ended and steps[-1].title.startswith("Round") and any(line.departs for line in steps[-1].lines):
        steps[-1].departures.append(run.ended)  # where a message is missing
    elif run.ended:
        steps.append(Step("It stops here", departures=[run.ended]))
    return Part(run.name, ring.about, steps)


def _in_its_rounds(ring: Ring, events: list[list[Event]]) -> Ring:
    """What is expected, in the rounds in which this submission sends it. Where ranks take turns, say, with a blocking
    send, there are more rounds, and that is right too; in a broadcast they are what it is about."""
    def moved(rank: int, own: tuple[Sent, ...]) -> tuple[Sent, ...]:
        found = [event.round for event in events[rank] if event.what == "send"]
        return tuple(replace(sent, round=found[place] if place < len(found) else sent.round)
                     for place, sent in enumerate(own))

    return replace(ring, sent=tuple(moved(rank, own) for rank, own in enumerate(ring.sent)))


def _grids(events: list[list[Event]], ring: Ring, number: int) -> list:
    if ring.copies > 1:
        return []
    states = [message_rounds.held(message_rounds.state_after(own, number), ring) for own in events]
    return [chunk_words.grid(states, ring, "What each rank holds then")]


# ------------------------------------------------------------------------------------------------------ round by round


def _line(rank: int, events: list[Event], ring: Ring, number: int, wrong: bool, is_last: bool) -> Line:
    did, starts = [], {event.entry["number"]: event.entry for event in events if event.what == "receive"}
    for event in events:
        entry = event.entry
        if event.round == number and event.what == "collective":
            did.append(f"calls torch's own {entry['name']}")
        elif event.round == number and event.what == "send":
            did.append(f"sends {_message(entry, ring)} to rank {entry['peer']} ({entry['bytes']:,} bytes)")
        elif event.round == number and event.what == "received":
            did.append(f"receives {_message(entry, ring)} from rank {starts.pop(entry['number'])['peer']}")
        elif event.what == "received":
            starts.pop(entry["number"])
    expected = [f"sends {_expected(sent, ring)} to rank {sent.to} ({_bytes(sent, ring):,} bytes)"
                for sent in ring.sent[rank] if sent.round == number]
    expected += [f"receives {_expected(sent, ring)} from rank {sender}" for sender, own in enumerate(ring.sent)
                 for sent in own if sent.round == number and sent.to == rank]
    differs = bool(did) != bool(expected) if ring.free else set(did) != set(expected)
    if is_last:
        did += [f"waits for a message from rank {entry['peer']} that does not come" for entry in starts.values()]
    return Line(f"rank {rank}", "; ".join(did) or "nothing", "; ".join(expected) or "nothing", wrong or differs)


def _message(entry: dict, ring: Ring) -> str:
    return chunk_words.say(message_rounds.reads(entry["values"], ring), ring)


def _expected(sent: Sent, ring: Ring) -> str:
    parts = tuple(int(rank in sent.ranks) for rank in range(RANKS))
    return chunk_words.label(message_rounds.Read(ring.ranges[sent.chunk].start, parts), ring)


def _bytes(sent: Sent, ring: Ring) -> int:
    padded = ring.sums or ring.copies > 1  # chunks that are added up are of one size
    return ring.message_bytes if padded else len(ring.ranges[sent.chunk]) * ring.dtype.itemsize


def _sent(name: str, rank: int, events: list[Event], ring: Ring) -> list[tuple[int, int, str]]:
    """(round, rank, sentence) wherever what a rank sends is not what a ring sends."""
    found, expected, seen = [], ring.sent[rank], set()
    sends = [event for event in events if event.what == "send"]
    for event in events:
        if event.what == "collective":
            found.append((event.round, rank, f"Rank {rank} calls torch's own {event.entry['name']}: {name} is to be "
                          "built from send and receive."))
    for place, event in enumerate(sends):
        words = _wrong_way(event, rank) or _too_many(rank, place, expected, ring) or _wrong_kind(event, ring) or (
            _wrong_piece(event, ring, seen) if ring.free and not ring.sums else
            _wrong_chunk(event, expected[place], ring))
        if words:
            found.append((event.round, rank, f"In round {event.round} of {name} rank {rank} sends {words}"))
    if any(event.what == "returned" for event in events) and not ring.in_place:
        found += [(sent.round, rank, f"In round {sent.round} of {name} rank {rank} sends nothing, and "
                   f"{_expected(sent, ring)} is expected.") for sent in expected[len(sends):]]
    arrivals = [place for place, event in enumerate(events) if event.what == "received"]
    if ring.in_place and len(arrivals) > 1 and sends and events.index(sends[0]) > arrivals[-1]:
        found.append((sends[0].round, rank, f"In {name} rank {rank} passes its first chunk on when it has received all "
                      f"{len(arrivals)}, in round {sends[0].round}: a chunk can go on while the next one comes, and "
                      "this one could in round 2."))
    return found


def _wrong_way(event: Event, rank: int) -> str:
    right = (rank + 1) % RANKS
    if event.entry["peer"] == right:
        return ""
    return (f"to rank {event.entry['peer']}: in a ring a rank sends to its right neighbour alone, here rank {right}.")


def _too_many(rank: int, place: int, expected: tuple, ring: Ring) -> str:
    if place < len(expected):
        return ""
    if not expected:
        return "a message, and it is the last rank of the ring: nobody is left who needs one."
    most = f"at most {CHUNKS}, its chunk_count," if ring.in_place else f"{len(expected)}"
    return f"message {place + 1}, and {most} {'is' if most == '1' else 'are'} expected from it."


def _wrong_kind(event: Event, ring: Ring) -> str:
    dtype = str(ring.dtype)[6:]
    if event.entry["dtype"] != dtype:
        return f"numbers of {event.entry['dtype']}, and the tensor's are of {dtype}."
    if (ring.sums or not ring.free) and event.entry["bytes"] != ring.message_bytes:
        return (f"{event.entry['bytes']:,} bytes in one message, and one chunk has {ring.message_bytes:,}: what is "
                "passed on is one chunk, in one piece.")
    return ""


def _wrong_chunk(event: Event, sent: Sent, ring: Ring) -> str:
    """In a ring which chunk goes in which round is no choice; only all_reduce is free to cut as it likes."""
    found = message_rounds.reads(event.entry["values"], ring)
    parts = tuple(int(rank in sent.ranks) for rank in range(RANKS))
    kept = [each for each in found or [None] if each != PADDING]
    chunk = ring.ranges[sent.chunk]
    right = all(each and each.parts == parts and not each.divided for each in kept)
    if right and (ring.free or [each.element for each in kept] == list(chunk)):
        return ""
    expected = _expected(sent, ring)
    if ring.free:
        return (f"{_message(event.entry, ring)}, and expected is a chunk with the parts of rank "
                f"{' and '.join(map(str, sorted(sent.ranks)))} in it, such as {expected}.")
    return f"{_message(event.entry, ring)}, and {expected} is expected."


def _wrong_piece(event: Event, ring: Ring, seen: set) -> str:
    """A broadcast may be cut as its author likes, in up to chunk_count pieces."""
    found = message_rounds.reads(event.entry["values"], ring)
    if not found or not all(each and each.parts == chunk_words.right(ring, each.element) for each in found):
        return f"{_message(event.entry, ring)}, and the root's numbers are expected."
    if len(found) == ring.size:
        return f"the whole tensor in one message: in {CHUNKS} chunks the next rank could pass one on while others come."
    again = seen & {each.element for each in found}
    seen |= {each.element for each in found}
    return f"{_message(event.entry, ring)} a second time." if again else ""


# ------------------------------------------------------------------------------------------------------------- the end


def _end(name: str, rank: int, events: list[Event], ring: Ring) -> tuple[Line, list[str]]:
    """What a rank had in the end, and sentences on what is not right with it."""
    wanted = " ".join(dict.fromkeys(_wanted(element, rank, ring) for element in ring.holds[rank]))
    verb = "the tensor holds" if ring.in_place or ring.copies > 1 else "returns"
    entry = next((event.entry for event in events if event.what == "returned"), None)
    if entry is None:
        return Line(f"rank {rank}", "", f"{verb} {wanted}"), []
    if "kind" in entry:
        return Line(f"rank {rank}", f"returns {entry['kind']}", f"returns {wanted}", True), [
            f"{name} returned {entry['kind']} on rank {rank}, and a tensor is expected."]
    found = message_rounds.reads(entry["values"], ring)
    has = chunk_words.say(found, ring)
    wrong = list(_wrong_end(name, rank, entry, found, has, wanted, ring)) + list(_left(name, rank, events, ring))
    did = f"{verb} {has}{', but see above' if wrong and has == wanted else ''}"
    return Line(f"rank {rank}", did, f"{verb} {wanted}", bool(wrong)), wrong


def _wanted(element: int, rank: int, ring: Ring) -> str:
    return chunk_words.label(message_rounds.Read(element, chunk_words.right(ring, element, rank)), ring)


def _wrong_end(name: str, rank: int, entry: dict, found, has: str, wanted: str, ring: Ring):
    dtype = str(ring.dtype)[6:]
    pairs = [(each.element, each.parts, each.divided) if each else None for each in found or ()]
    right = [(element, chunk_words.right(ring, element, rank), False) for element in ring.holds[rank]]
    if ring.copies == 1 and entry["shape"] != [len(right)]:
        yield f"{name} returned a tensor {entry['shape']} on rank {rank}, and a flat one [{len(right)}] is expected."
    elif pairs != right:
        mean = any(each and each.divided for each in found or ())
        yield (f"{name} ends with {has} on rank {rank}, and {wanted} is expected"
               + (": the mean, not the sum." if mean else "."))
    if entry["dtype"] != dtype:
        yield f"{name} returned numbers of {entry['dtype']} on rank {rank}, and the tensor's are of {dtype}."
    if ring.inputs and not entry["kept"]:
        yield f"{name} changed its input on rank {rank}: the caller still needs it."
    elif ring.inputs and ring.copies == 1 and not entry["own"]:
        yield f"{name} returned its input's own memory on rank {rank}: a result is new memory."
    if ring.in_place and not entry["same"]:
        yield f"{name} did not return the tensor that it was given, on rank {rank}."


def _left(name: str, rank: int, events: list[Event], ring: Ring):
    """What was not waited for, and a result that does not stay."""
    under_way = sum((event.what in ("send", "receive")) - (event.what == "waited") for event in events)
    if under_way > 0:
        yield (f"{name} returned on rank {rank} while {under_way} of its messages had not been waited for: what was to "
               "be sent may still change, and what was to come may not be there.")
    if any(event.what == "again" and event.entry["stays"] is False for event in events):
        yield (f"What {name} had returned on rank {rank} changed when it was called a second time: each result is new "
               "memory.")
