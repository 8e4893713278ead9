"""Kept units: stage 3 whose last units stay whole from forward to their turn in backward. This
trades memory for traffic.

    Stage3    forward  0 1 2 3 4 5    backward  5 4 3 2 1 0    gathered in backward: 4 3 2 1 0
    Kept3     forward  0 1 2 3 4 5    backward  5 4 3 2 1 0    gathered in backward: 2 1 0

Backward begins where forward ends. So it needs the last units again soon, and the first ones late:
a unit that is kept for a short time saves as much traffic as one that is kept for long.

Memory: at the end of forward the parameters of all kept units, where Stage3 has those of one.
Backward frees them one by one as it needs memory itself: two kept units do not show in the peak.
Traffic: Ψ(N−1)/N · 3, less (N−1)/N of each kept unit. The root is always kept, and so is the unit
that forward comes to last: Stage3 keeps these, too.
"""

from zero_minimal.stage3 import Stage3


class Kept3(Stage3):
    """Stage 3 with its last units kept. Takes what Stage3 takes, and

    keep_units: how many, from the last one in the order of registration, which should be that of
        forward. Raises: ValueError if negative, or no whole number.
    """

    def __init__(self, model, optimizer_class, *, keep_units: int = 3, **options):
        if keep_units < 0 or keep_units != int(keep_units):
            raise ValueError(f"keep_units={keep_units}: give their number, 0 or more")
        self.waiting = set()  # units that stay whole until their turn in backward
        super().__init__(model, optimizer_class, **options)
        blocks = self.units[1:]  # the root stays anyway
        self.kept = set(blocks[max(len(blocks) - int(keep_units), 0) :])

    def unit_turn(self, unit, following):
        self.waiting = self.waiting - {unit} if self.reducer.running else self.kept
        super().unit_turn(unit, following)

    def _release(self, unit):
        if unit not in self.waiting:
            super()._release(unit)

    def _release_all(self):
        self.waiting = set()  # an update or the end of an evaluation: free them, too
        super()._release_all()


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Kept3)
