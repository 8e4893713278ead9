"""Facts of a bug hunt: the figures that a cause can be held against, read off the records of both runs."""

import json
from dataclasses import dataclass
from pathlib import Path

HEALTHY, BROKEN = "healthy", "broken"
NEAR = 0.01  # two figures are alike if they differ by at most this part


def near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))


@dataclass(frozen=True)
class Facts:
    """Of one hunt's file. What is named `b` is the broken run's, `h` the healthy one's."""

    record: dict

    @classmethod
    def read(cls, file: Path) -> "Facts":
        return cls(json.loads(file.read_text(encoding="utf-8")))

    @property
    def ranks(self) -> int:
        return self.record["ranks"]

    @property
    def stage(self) -> int:
        return self.record["stage"]

    @property
    def micros(self) -> int:
        return self.record["settings"]["accumulate"]

    @property
    def dtype(self) -> str:
        return self.record["settings"]["dtype"]

    def run(self, side: str) -> list[dict]:
        """The reports of its ranks."""
        return self.record["runs"][side]

    # losses, norms, parameters

    @property
    def losses(self) -> list[list[float]]:
        """Of the broken run, [rank][step]."""
        return [rank["losses"] for rank in self.run(BROKEN)]

    @property
    def norms(self) -> tuple[list[float], float]:
        """Of the first step: of each rank of the broken run, and rank 0's of the healthy one."""
        return [rank["norms"][0] for rank in self.run(BROKEN)], self.run(HEALTHY)[0]["norms"][0]

    @property
    def norm_ratio(self) -> float:
        """Rank 0's, of the first step: broken over healthy."""
        broken, healthy = self.norms
        return broken[0] / healthy

    @property
    def starts_alike(self) -> bool:
        """Whether each rank's first loss is that of the healthy run."""
        return all(near(one["losses"][0], other["losses"][0])
                   for one, other in zip(self.run(BROKEN), self.run(HEALTHY), strict=True))

    @property
    def apart(self) -> list[float]:
        """The largest difference of a parameter between two ranks, before the first step and after each; [] at
        stage 3."""
        return [max(values) for values in zip(*(rank["apart"] for rank in self.run(BROKEN)), strict=True)]

    def moved(self, side: str) -> float:
        """How far the first step moved rank 0's parameters."""
        return self.run(side)[0]["moved"][0]

    # memory of rank 0, bytes

    def at_the_end(self, side: str, category: str, step: int = -1) -> int:
        return self.run(side)[0]["memory"][step]["at the end"][category]

    def highest(self, side: str, category: str) -> int:
        return self.run(side)[0]["memory"][-1]["highest"][category]

    @property
    def whole(self) -> int:
        """Bytes of all parameters, with their padding: what the healthy run's gradients are together."""
        gradients = self.at_the_end(HEALTHY, "gradients")
        return gradients * (self.ranks if self.stage >= 2 else 1)

    # collectives of a step

    def calls(self, side: str, name: str) -> int:
        return self._counted(side, name)["calls"]

    def payload(self, side: str, name: str) -> int:
        return self._counted(side, name)["bytes"]

    def _counted(self, side: str, name: str) -> dict:
        return self.run(side)[0]["traffic"]["collectives"].get(name, {"calls": 0, "bytes": 0})

    @property
    def reduction(self) -> str:
        """The collective that averages gradients in the healthy run."""
        return "reduce_scatter" if self.stage else "all_reduce"

    def reductions(self, side: str) -> tuple[int, int]:
        """Calls and bytes of it."""
        return self.calls(side, self.reduction), self.payload(side, self.reduction)

    # order and time

    def overlap(self, side: str) -> tuple[int, int]:
        """Gradients that came while a collective was under way, and all that came."""
        return tuple(self.run(side)[0]["overlap"])

    def lag(self, side: str) -> tuple[int, float]:
        """The rank that starts its first collective last, and how many seconds it is behind the first to."""
        starts = [min((one[1] for one in rank["time"]["collectives"]), default=0.0) for rank in self.run(side)]
        late = max(range(len(starts)), key=starts.__getitem__)
        return late, starts[late] - min(starts)

    def seconds(self, side: str) -> float:
        """Of a step."""
        return max(rank["time"]["seconds"] for rank in self.run(side))

    def wait(self, side: str) -> float:
        """Seconds for which that collective is waited for, on any rank, that is waited for least."""
        return min((one[3] - one[2] for rank in self.run(side) for one in rank["time"]["collectives"]), default=0.0)

    def under_way(self, side: str) -> list[float]:
        """Seconds from start to end of each collective of a step, on the rank where it takes least; the quickest
        collective first."""
        ranks = [in_order(rank) for rank in self.run(side)]
        return sorted(min(one[3] - one[1] for one in same) for same in zip(*ranks, strict=True))

    def reductions_begin(self, side: str) -> tuple[float, float, float]:
        """Seconds, on rank 0: when its first reduction of gradients starts; when the last one does; for how long it
        computes in between, so waits for none."""
        ours = [one for one in in_order(self.run(side)[0]) if one[0] == self.reduction]
        first, last = ours[0][1], ours[-1][1]
        waits = sum(min(one[3], last) - one[2] for one in ours if one[2] < last)
        return first, last, last - first - waits


def in_order(rank: dict) -> list[list]:
    """The collectives of a rank's step as they started: [name, start, wait, end, bytes]. All ranks have this order."""
    return sorted(rank["time"]["collectives"], key=lambda one: one[1])
