"""What people do to an offloaded stage beside training: Ctrl-C, processes of their own, odd arguments and edits."""

import copy
import functools
import gc
import time
from pathlib import Path

import pytest
import torch
import toys
from processes import ended

from zero_minimal import offload, stage2
from zero_minimal.offloading.host_process import HostError

pytestmark = pytest.mark.thorough

in_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def stage_of(number, optimizer=torch.optim.AdamW, bucket_bytes=4096, dtype=torch.bfloat16, **options):
    kind = getattr(offload, f"Offloaded{number}")
    return kind(toys.build(toys.MLP, 0, dtype), optimizer, lr=1e-2, bucket_bytes=bucket_bytes, **options)


def step(zero, number=0):
    dtype = next(zero.model.parameters()).dtype
    inputs, targets = toys.numbers(0, number)
    zero.model(inputs.to(dtype), targets.to(dtype)).backward()
    zero.step()
    zero.zero_grad()


# ----------------------------------------------------------------------------------------------------- interruptions


def ctrl_c(owner, name, after):
    """Let the method be interrupted when it has done its work for the so-many-th time."""
    method, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*args, **options):
        result = method(*args, **options)
        if next(calls) == after:
            raise KeyboardInterrupt
        return result

    setattr(owner, name, interrupted)


PLACES = {
    "before the last parcel is copied": lambda zero: ctrl_c(zero.host, "receive", len(zero.buckets) - 1),
    "before the first one is": lambda zero: ctrl_c(zero.host.bus, "receive", 0),
    "before a parcel is given back": lambda zero: ctrl_c(zero.host.bus, "emptied", 0),
    "when half of the state is here": lambda zero: ctrl_c(zero.host.bus, "receive_all", 1),
    "when the order has been sent": lambda zero: ctrl_c(zero.host.bus, "send", 2 * len(zero.buckets) - 1),
    "when the question has been": lambda zero: ctrl_c(zero.host, "send", 2 * len(zero.buckets) + 1),
}


def interrupted(stage, place, bucket_bytes):
    zero = stage_of(stage, bucket_bytes=bucket_bytes)
    step(zero)
    pid = zero.host.process.pid
    PLACES[place](zero)
    with pytest.raises(KeyboardInterrupt):
        for number in (1, 2):
            step(zero, number)
            zero.state_dict()
    clip = functools.partial(zero.clip_grad_norm_, 1.0)
    for use in (functools.partial(step, zero), zero.zero_grad, zero.state_dict, clip):
        start = time.monotonic()
        with pytest.raises(HostError, match="was interrupted: rank and host no longer agree. Build the stage anew"):
            use()
        assert time.monotonic() - start < 1
    del zero, use, clip
    gc.collect()
    return ended([pid])


def all_interrupted():
    cases = [(stage, place, size) for stage in (1, 2, 3) for place in PLACES for size in (256, None)[stage == 3 :]]
    return [case for case in cases if not interrupted(*case)]


def some_interrupted():
    return [place for place in list(PLACES)[:3] if not interrupted(2, place, 256 if "first" in place else None)]


@in_proc
@pytest.mark.parametrize("cases", (some_interrupted, pytest.param(all_interrupted, marks=pytest.mark.thorough)))
def test_who_goes_on_after_an_interruption_is_told(cases):
    assert toys.run(cases, 1) == [[]]


# ------------------------------------------------------------------------------------------------------------- edits


def edited_without_a_context():
    """By how much parameters are off that were edited, saved as this rank's part, lost, and loaded again."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in (stage2.Stage2, offload.Offloaded2):
            zero = kind(toys.build(toys.MLP, 0, dtype), torch.optim.AdamW, lr=1e-2, bucket_bytes=256)
            step(zero)
            params = list(zero.model.parameters())
            with torch.no_grad():
                for param in params:
                    param.add_(1.0)
            edited, state = [param.clone() for param in params], copy.deepcopy(zero.state_dict())
            step(zero, 1)
            zero.load_state_dict(state)
            found[kind.__name__, dtype] = max((a - b).abs().max().item() for a, b in zip(edited, params, strict=True))
    return found


def test_an_edit_is_in_the_state_of_this_rank():
    [found] = toys.run(edited_without_a_context, 1)
    assert not any(found.values()), found


def state_that_is_not_here():
    """What is left of a state on the rank after it has been loaded."""
    zero = stage_of(2)
    step(zero)
    state, master = zero.optimizer.state, zero.buckets[0].master
    for use in (lambda: state[master]["exp_avg"], state.clear, lambda: state.update({}), lambda: state.pop(master)):
        with pytest.raises(RuntimeError, match=r"is on the host: take zero.state_dict\(\)"):
            use()
    zero.load_state_dict(copy.deepcopy(zero.state_dict()))
    step(zero, 1)
    left, zero.optimizer.state = len(zero.optimizer.state), {}
    with pytest.raises(RuntimeError, match=r"is on the host: take zero.state_dict\(\)"):
        step(zero, 2)
    return left


def test_state_that_is_on_the_host_is_not_read_or_changed_on_the_rank():
    assert toys.run(state_that_is_not_here, 1) == [0]


@pytest.mark.parametrize("options, words", (
    (dict(bus="12GB/s"), "bus is '12GB/s': give bytes a second"), (dict(bus=True), "bus is True"),
    (dict(bus=float("nan")), "bus is nan"), (dict(bus=0), "bus is 0"),
    (dict(disk=".", host_budget="200MB"), "host_budget is '200MB': give bytes"),
    (dict(disk=".", host_budget=float("nan")), "host_budget is nan"), (dict(disk=""), "disk is '': give a folder"),
    (dict(host_budget=2e8), "give disk=FOLDER, too"),
), ids=str)
def test_an_argument_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        stage_of(2, **options)
