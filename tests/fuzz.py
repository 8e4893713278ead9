"""A fuzzer of training programs: a random model, a random loop, at a random world and every stage, beside plain
PyTorch in one process. Each comes out equal, or is refused; what does neither is made small and printed.

    python tests/fuzz.py --programs 10000 --seed 1
    python tests/fuzz.py --replay "{'world': 2, 'model': …, 'loop': …}" --stage stage3

A program is counted once for each stage. fuzzing/drawn.py says what may be in one.
"""

import argparse
import ast
import contextlib
import pprint
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fuzzing.drawn import LADDER, PROGRAMS, STAGES  # noqa: E402
from fuzzing.pool import Hung, Pools, plainly  # noqa: E402
from fuzzing.verdict import judged  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SMALL_ENOUGH = 150  # tries to make a finding smaller


class Found(AssertionError):
    """A program that is neither equal nor refused."""


class Fuzzer:
    """Runs programs on ranks that stay, and counts what comes of them."""

    def __init__(self, pools: Pools):
        self.pools, self.verdicts, self.reasons, self.where = pools, Counter(), Counter(), Counter()
        self.examples = {}  # a program for each reason
        self.last = None  # what was found: (program, stage, why)

    @property
    def count(self) -> int:
        return self.verdicts.total()

    def judge(self, program: dict, stages) -> None:
        """Raises: Found."""
        plain = plainly(program)
        for stage in [self.last[1]] if self.last else stages:  # while a finding is made small: its stage alone
            try:
                verdict, why = judged(program, self.pools.play(program, stage), plain)
            except Hung as error:
                verdict, why = "finding", f"waits: {error}"
            if not self.last:
                self.verdicts[verdict] += 1
                self.where[stage, program["world"], verdict] += 1
                if verdict in ("refused", "neither"):
                    self.reasons[verdict, why] += 1
                    self.examples.setdefault((verdict, why), f"{stage} {program}")
            if verdict == "finding":
                if not self.last:
                    print(f"found, after {self.count} programs: {stage}, {program}\n{why}", file=sys.stderr, flush=True)
                self.last = program, stage, why
                raise Found(why)

    def hunt(self, programs: int, number: int):
        """Up to so many programs; None, or what was found, as small as it gets: (program, stage, why)."""
        self.last, self.tries = None, 0
        until = self.count + programs

        @seed(number)
        @settings(max_examples=programs, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
                  suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False)
        @given(PROGRAMS, st.sampled_from([LADDER] * 3 + [STAGES]))
        def judge(program, stages):
            if self.last:
                self.tries += 1
            if self.tries < SMALL_ENOUGH and (self.count < until or self.last):
                self.judge(program, stages)

        try:
            judge()
        except Exception:  # hypothesis has words of its own for a finding that it could not repeat
            if not self.last:
                raise
        return self.last


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", metavar="PROGRAM", help="a program that was printed")
    parser.add_argument("--stage", choices=STAGES, default="stage3")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, too
    with Pools() as pools:
        fuzzer = Fuzzer(pools)
        if args.replay:
            program = ast.literal_eval(args.replay)
            print(*judged(program, pools.play(program, args.stage), plainly(program)))
            return
        began, number, findings = time.monotonic(), args.seed * 1000, 0
        with contextlib.suppress(KeyboardInterrupt):
            while fuzzer.count < args.programs:
                number += 1
                print(f"{fuzzer.count} programs: {dict(fuzzer.verdicts)}", file=sys.stderr, flush=True)
                if found := fuzzer.hunt(min(200, args.programs - fuzzer.count), number):
                    program, stage, why = found
                    findings += 1
                    print(f"\nfinding {findings}, at {stage}:\n{pprint.pformat(program)}\n{why}", flush=True)
        report(fuzzer, findings, time.monotonic() - began)
    sys.exit(bool(findings))


def report(fuzzer, findings, seconds):
    print(f"\n{fuzzer.count} programs in {seconds:.0f} s: {dict(fuzzer.verdicts)}")
    for world in (1, 2, 3):
        for stage in STAGES:
            counts = {verdict: fuzzer.where[stage, world, verdict] for verdict in fuzzer.verdicts}
            print(f"  {stage} on {world}: " + ", ".join(f"{verdict} {count}" for verdict, count in counts.items()))
    for (verdict, why), count in fuzzer.reasons.most_common():
        print(f"{count:6} {verdict}: {why}\n       such as {fuzzer.examples[verdict, why]}")


if __name__ == "__main__":
    main()
