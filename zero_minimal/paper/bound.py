"""Bound: how little a system can hold and send that trains a model as it is, whatever the system does.

A step uses a parameter in forward, and later in backward. Take any moment t of the step. Let

    live(t)    bytes of the parameters that were used before t and will be used after it, or just now
    x(t)       bytes of these that the rank holds whole at t: the system's choice (which units stay is a knapsack)
    rest(t)    bytes of activations, and of gradients that autograd is making: the model's own, not the system's

Each rank keeps 1/N of the parameters, and 1/N of the optimizer's state: S bytes of that. What is whole holds the own
shard, too, so parameters take x + (Ψ₂ − x)/N bytes, where Ψ₂ are the bytes of all parameters. So a rank that has peak P

    x(t)(1 − 1/N) + Ψ₂/N + S + rest(t) ≤ P                                                                          (1)

Traffic: whoever updates 1/N of the parameters must get the gradients of the other ranks for that, and all others must
get what it has updated: 2Ψ₂(N−1)/N bytes a rank and step at least. What was used before t, will be used after t and is
not whole at t must come a second time:

    sent ≥ 2Ψ₂(N−1)/N + (live(t) − x(t))(N−1)/N                                                                     (2)

With x from (1) in (2), for every t:

    sent + P ≥ 2Ψ₂(N−1)/N + need(t),      need(t) = live(t)(N−1)/N + Ψ₂/N + S + rest(t)                             (3)

The highest need(t) is what a system must hold that sends no parameter twice. Below that, a byte of memory costs a byte
of traffic. (In general a knapsack of whole units: here of bytes, since a unit may be cut as small as one likes. So the
bound is not above the best knapsack.) Gradient shards count as nothing in rest(t): so (3) stays true, if a little low.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """Of one rank; bytes. `others` is what model parallelism sends beside, whatever the system does."""

    parameters: int  # Ψ₂, of this rank's part of the model
    ranks: int  # N, those that share it: D on a mesh
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
    """need(t). optimizer: bytes of its state for a 16-bit model, masters too, all ranks' together."""
    return live * (ranks - 1) / ranks + parameters / ranks + optimizer / ranks + rest
