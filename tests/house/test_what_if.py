"""What if: the formulas that write themselves down are those of `plan`; the page calculates with them, and nothing else."""

import math
import random

import pytest

from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.shapes import usual_shape
from zero_minimal.programs import what_if
from zero_minimal.programs.planning import Speeds


def settings(count=200, seed=7):
    """Random settings, each of them one that `plan` accepts."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        shared, dtype = draw.choice(what_if.SHARES), draw.choice(("fp32", "bf16", "fp16"))
        if draw.random() < 0.5:
            try:
                shape = usual_shape(int(draw.choice(what_if.SIZES)), 1024, shared, True)
            except ValueError:
                continue
            sizes = {name: getattr(shape, name) for name in what_if.SHAPE}
        else:
            heads = shared * draw.randint(1, 6)
            sizes = {"layers": draw.randint(1, 150), "heads": heads, "hidden": heads * draw.choice((16, 24, 64, 128)),
                     "vocabulary": draw.randint(2, 60000)}
        gpu = GPUS[draw.choice(list(GPUS))]
        found.append({
            **sizes, "sequence": draw.choice((1, 64, 1024, 2048, 32768)), "batch": draw.randint(1, 40),
            "data_parallel": draw.choice((1, 2, 3, 7, 8, 64, 100, 1024)), "model_parallel": shared, "dtype": dtype,
            "kept": draw.choice(what_if.KEPT if shared > 1 else what_if.KEPT[:2]),
            "optimizer_bytes": draw.choice((4, 8, 12, 6.5)), "device_bytes": gpu.memory * draw.choice((1, 0.1, 3)),
            **vars(Speeds(gpu.rate(dtype), gpu.link, draw.choice((1, 4, gpu.node)), draw.choice((1.25e9, 12.5e9)))),
        })
    return found


def differences(told, shown):
    """Figures that are not alike: the page has doubles, and Python whole numbers of any size."""
    def alike(one, other):
        if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
            return one is other or one == other and type(one) is type(other)
        return math.isclose(one, other, rel_tol=1e-12)

    return {name: (told[name], shown[name]) for name in shown if not alike(told[name], shown[name])}


@pytest.fixture(scope="module")
def formulas():
    return what_if.expressions()


def test_what_is_written_down_says_what_plan_says_in_200_settings(formulas):
    """And every figure of the page is one of plan's."""
    moments, fit = set(), set()
    for setting in settings():
        told, shown = what_if.flat(what_if.asked(setting)), what_if.on_a_page(formulas, setting)
        assert not differences(told, shown), setting
        moments |= {shown[f"{stage} moment"] for stage in range(4)}
        fit |= {shown[f"{stage} fits"] for stage in range(4)}
    assert moments == {"logits", "top block", "bottom block", "embedding", "update"} and fit == {True, False}
