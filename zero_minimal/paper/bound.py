"""Bound: the least that any system that trains an unchanged model can hold and send.

A step uses a parameter in forward, and later in backward. Take any moment t of the step. Let

    live(t)    bytes of the parameters that are in use at t, or were used before t and will be used after it
    x(t)       bytes of these that the rank holds whole at t: the system's choice (which units stay is a knapsack)
    rest(t)    bytes of activations, and of gradients that autograd is making: the model's own, not the system's

Each rank keeps 1/N of the parameters and 1/N of the optimizer's state, S bytes. Whole parameters include the rank's
shard, so parameters take x + (Ψ₂ − x)/N bytes, where Ψ₂ is the bytes of all. For a rank with peak P

    x(t)(1 − 1/N) + Ψ₂/N + S + rest(t) ≤ P                                                                          (1)

Traffic: a rank that updates 1/N of the parameters must receive the other ranks' gradients for them and send the result
to all: at least 2Ψ₂(N−1)/N bytes per rank and step. Parameters that are live but not whole at t must be sent again:

    sent ≥ 2Ψ₂(N−1)/N + (live(t) − x(t))(N−1)/N                                                                     (2)

With x from (1) in (2), for every t:

    sent + P ≥ 2Ψ₂(N−1)/N + need(t),      need(t) = live(t)(N−1)/N + Ψ₂/N + S + rest(t)                             (3)

The highest need(t) is what a system must hold that sends no parameter twice. Below that, a byte of memory costs a byte
of traffic. (x is a knapsack of bytes here, not of whole units, since a unit can be cut arbitrarily small. So the bound
is not above the best knapsack.) rest(t) leaves out gradient shards: (3) still holds, but is slightly low.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The bound of one rank, in bytes. `others`: what model parallelism sends in addition, in any system."""

    parameters: int  # Ψ₂, of this rank's part of the model
    ranks: int  # N, the ranks that share it: D on a mesh
    need: float  # the highest need(t)
    others: float = 0.0

    @property
    def least_sent(self) -> float:
        """What data parallelism sends at least, however much memory there is."""
        return 2 * self.parameters * (self.ranks - 1) / self.ranks

    def sent(self, memory: float) -> float:
        """The fewest bytes that a system sends in a step whose peak is at most `memory`."""
        return self.others + self.least_sent + max(0.0, self.need - memory)

    def memory(self, sent: float) -> float:
        """The lowest peak of a system that sends at most `sent`. Raises: ValueError if none sends so little."""
        spare = sent - self.others - self.least_sent
        if spare < 0:
            raise ValueError(f"no system sends only {sent:,.0f} bytes: {self.others + self.least_sent:,.0f} at least")
        return self.need - spare


def need(live: float, rest: float, parameters: int, ranks: int, optimizer: int) -> float:
    """need(t). optimizer: bytes of the optimizer's state for a 16-bit model, with masters, on all ranks together."""
    return live * (ranks - 1) / ranks + parameters / ranks + optimizer / ranks + rest
