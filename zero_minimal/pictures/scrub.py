"""Scrub: a slider moves through a memory, request by request, in a notebook or a browser, without a server."""

import json
import zlib
from pathlib import Path

from zero_minimal.meters.allocator import CachingAllocator, memory_map
from zero_minimal.meters.memory import Event
from zero_minimal.pictures.memory_map import look_of
from zero_minimal.pictures.style import LOOKS

TEMPLATE = Path(__file__).with_name("scrub.html")


class Scrub:
    """Bars of whole memories, each with a slider over the requests of a trace; shown as HTML.

    Args:
        traces: {name: trace}, from traces.unpacked(), replayed with this capacity until they end or fail.
        starts: {name: the request shown first}; by default the one that fails, or else the last.
        pools: {name: the Pool that serves it}; by default the allocator's own.
    """

    def __init__(self, traces: dict[str, list[Event]], capacity: int, starts: dict[str, int] | None = None,
                 pools: dict[str, type] | None = None):
        self.capacity = capacity
        self.memories = [_memory(name, trace, capacity, (starts or {}).get(name), (pools or {}).get(name))
                         for name, trace in traces.items()]

    def __repr__(self) -> str:
        return f"{' and '.join(memory['name'] for memory in self.memories)}, to be scrubbed through in a notebook"

    def _repr_html_(self) -> str:
        seen = {row[-1] for memory in self.memories for row in memory["rows"]}
        content = {"capacity": self.capacity, "memories": self.memories,
                   "looks": {category: colour for category, (colour, _) in LOOKS.items() if category in seen}}
        data = json.dumps(content, separators=(",", ":"))
        name = f"scrub-{zlib.crc32(data.encode()):x}"  # a page may have several elements
        return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data).replace("__ID__", name)


def _memory(name: str, trace: list[Event], capacity: int, start: int | None, pool: type | None) -> dict:
    """One replay for the page: rows (begin, end, address, bytes, category), segments (begin, end, address, bytes), the
    bytes of each request (negative: freed), and where it fails."""
    allocator = CachingAllocator(capacity, pool) if pool else CachingAllocator(capacity)
    rows, failure = memory_map(trace, allocator)
    last = failure.request if failure else len(trace) - 1
    segments = allocator.segments + allocator.past_segments
    return {
        "name": name, "start": last if start is None else start, "fails": failure and failure.request,
        "requests": [event.bytes for event in trace[: last + 1]],
        # include the failing request in the lifetime of what is alive then
        "rows": [[row.begin, row.end + (failure is not None and row.end == last), row.address, row.bytes,
                  look_of(row.category)] for row in rows],
        "segments": [[segment.begin, segment.end, segment.address, segment.bytes] for segment in segments],
    }
