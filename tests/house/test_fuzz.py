"""The fuzzer: a hundred programs come out right or refused, and what comes out wrong is found and made small."""

from dataclasses import replace

import fuzz
import pytest
import torch
from fuzzing.pool import Pools, plainly
from fuzzing.verdict import judged
from house.scenarios.stand import Outcome

pytestmark = pytest.mark.thorough

PROGRAM = {"world": 2, "model": {"blocks": [{}]}, "loop": {"steps": 2}}


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_hundred_programs():
    with Pools() as pools:
        fuzzer = fuzz.Fuzzer(pools)
        found = fuzzer.hunt(100, 29)
    assert not found, found
    assert fuzzer.count >= 100 and fuzzer.verdicts["equal"] > 75, fuzzer.verdicts


def of_all(error, where):
    return [Outcome([], [], [], [], error, where)] * 2


OURS = '  File "/somewhere/zero_minimal/core/execution_order.py", line 3, in f\n    raise RuntimeError(JOINT)\n'
REFUSED = "RuntimeError: parameter 'a' is frozen"


@pytest.mark.parametrize("error, where, verdict", [
    (REFUSED, OURS, "refused"),
    (REFUSED, OURS.replace("raise RuntimeError(JOINT)", "return a.storage"), "finding"),  # torch's
    (REFUSED, OURS.replace("zero_minimal", "torch"), "finding"),
    ("AttributeError: 'NoneType' object has no attribute 'size'", OURS, "finding"),
    ("RuntimeError: the ranks are not in the same collective: rank 0 is in", OURS, "finding"),
])
def test_what_counts_as_refused(error, where, verdict):
    plain = [Outcome([], [], [], [])] * 2
    assert judged(PROGRAM, of_all(error, where), plain)[0] == verdict
    assert judged(PROGRAM, [*of_all(error, where)[:1], plain[0]], plain)[0] == "finding", "one rank alone refuses"
    assert judged(PROGRAM, of_all(error, where), of_all("RuntimeError: odd", ""))[0] == "neither"


def test_what_counts_as_equal():
    plain = plainly(PROGRAM)
    assert judged(PROGRAM, plain, plain) == ("equal", "")
    assert judged(PROGRAM, plain, of_all("RuntimeError: odd", ""))[0] == "finding"
    for part in ("notes", "parameters", "buffers"):
        of_rank_1 = replace(plain[1], **{part: [torch.full((2,), 0.5 + 1e-8)]})
        other = replace(of_rank_1, **{part: [torch.full((2,), 0.5)]})
        verdict, why = judged(PROGRAM, [plain[0], of_rank_1], [plain[0], other])
        assert verdict == "finding" and why.startswith(f"rank 1, {part}")


def test_a_finding_is_made_small():
    """A stage that does tied weights wrong, in programs of all kinds."""
    class Wrong:
        def play(self, program, stage):
            right = plainly(program)
            if stage != "stage2" or "clip" not in program["loop"]:
                return right
            return [replace(one, parameters=[each + 1 for each in one.parameters]) for one in right]

    fuzzer = fuzz.Fuzzer(Wrong())
    program, stage, why = fuzzer.hunt(400, 1)
    assert (stage, why.split(":")[0]) == ("stage2", "rank 0, parameters")
    assert program["loop"].keys() == {"steps", "clip"} and program["model"] == {"blocks": [{}]}, program
