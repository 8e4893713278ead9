"""Chunks: words for numbers that say whose they are. a, b, c are chunks; b1 is rank 1's b, Σb the sum of all ranks'."""

from itertools import groupby

from zero_minimal.classroom.report.rings import LETTERS, PADDING, RANKS, Read, Ring
from zero_minimal.classroom.report.story import Cell, Grid

EVERYBODY = (1,) * RANKS


def label(found: Read, ring: Ring) -> str:
    """Of a chunk: "b1", "b0+b1", "Σb"; in a ring that adds nothing up, "b" where it is the right one's."""
    if ring.copies > 1:
        return " + ".join(f"rank {rank}'s tensor" for rank, count in enumerate(found.parts) if count)
    letter = LETTERS[found.element // ring.chunk]
    if not ring.sums and found.parts == right(ring, found.element):
        words = letter
    elif found.parts == EVERYBODY:
        words = f"Σ{letter}"
    else:
        words = "+".join(f"{f'{count}·' if count > 1 else ''}{letter}{rank}"
                         for rank, count in enumerate(found.parts) if count)
    return f"({words})/{RANKS}" if found.divided else words


def right(ring: Ring, element: int, rank: int = 0) -> tuple[int, ...]:
    """Whose parts must be in an element at the end, counted."""
    return tuple(int(each in ring.right(element, rank)) for each in range(RANKS))


def say(found: list[Read | None] | None, ring: Ring) -> str:
    """A tensor in words: "b0+b1", "a b c", "c (2 of 3 numbers)"."""
    if found is None:
        return "a tensor whose memory is freed"
    words = []
    for key, group in groupby(found, lambda each: each and (each.element // ring.chunk, each.parts, each.divided)):
        group = list(group)
        if key is None:
            words.append("numbers that no rank had")
        elif group[0] == PADDING:
            words += ["zeros"] if len(found) == len(group) else []
        else:
            whole = len(ring.ranges[key[0]])
            words.append(label(group[0], ring) + (f" ({len(group)} of {whole} numbers)" if len(group) != whole else ""))
    return " ".join(words) or "nothing"


def grid(states: list[dict[int, Read]], ring: Ring, title: str) -> Grid:
    """Who holds what: a line for each rank, a column for each chunk."""
    rows = [(f"rank {rank}", [_cell([held[element] for element in chunk if element in held], len(chunk), ring)
                              for chunk in ring.ranges]) for rank, held in enumerate(states)]
    return Grid(title, [f"chunk {LETTERS[place]}" for place in range(len(ring.ranges))], rows)


def _cell(found: list[Read], whole: int, ring: Ring) -> Cell:
    if not found:
        return Cell("–")
    words = list(dict.fromkeys(label(each, ring) for each in found))
    done = len(found) == whole and all(each.parts == right(ring, each.element) and not each.divided for each in found)
    return Cell(" and ".join(words) + ("" if len(found) == whole else " in part"), "all" if done else "some")
