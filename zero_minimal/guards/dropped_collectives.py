"""Dropped collectives: nobody waits for one, since the user caught an error, say, and let the stage
go. If its memory went while gloo still receives into it, gloo would stop reading from that rank,
and the next call would hang.

Seam: the class Work, which gets a __del__.
"""

from zero_minimal.core.work import Work

_dropped: list = []  # works that nobody can wait for, and what holds their memory


def keep_its_memory(work: Work) -> None:
    if work.works and work.then is not None:
        _dropped.append((work.works, work.then))


Work.__del__ = keep_its_memory
