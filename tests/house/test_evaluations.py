"""Evaluations at stage 3 without no_grad: they leave nothing behind. And states that do not
fit change nothing."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage
from torch import optim

pytestmark = pytest.mark.thorough


def wrap(stage, make=toys.Transformer, **options):
    torch.manual_seed(0)
    model = make()
    options = {"lr": 1e-2, "bucket_bytes": 4096, **options}
    return model, toys.STAGES[stage](model, options.pop("optimizer", optim.AdamW), **options)


# ----------------------------------------------------------------------------------------------- without no_grad()


def tracked(zero):
    """How many entries the lists and dicts of the followers of forward and backward have, all together."""
    return sum(len(value) for part in (zero.execution_order, zero.reducer) for value in vars(part).values()
               if isinstance(value, (list, dict, set)))


def evaluate_often(parts):
    model, zero = wrap(3)
    inputs, targets = toys.tokens(dist.get_rank(), 0)
    lengths, work = [], []
    for _ in range(300):
        calls = []
        sys.setprofile(lambda frame, event, what, add=calls.append: add(event))
        result = model.head(model.blocks[0](model.embedding(inputs))) if parts else model(inputs, targets)
        sys.setprofile(None)
        lengths.append(tracked(zero))
        work.append(len(calls))
    assert result.requires_grad
    return lengths[10], lengths[-1], sorted(work[10:60])[25], sorted(work[-50:])[25]


@pytest.mark.parametrize("parts", (False, True))
def test_evaluations_do_not_grow(parts):
    for length, last, early, late in toys.run(evaluate_often, 2, parts, timeout=120):
        assert last <= length
        assert late <= early, "an evaluation calls more and more"  # counted: a clock would tell of other programs


def most_gradients(evaluations):
    """How many parameters have a whole gradient at the same time in a training step, after some evaluations."""
    model, zero = wrap(3, lambda: toys.Transformer(blocks=8), optimizer=optim.SGD)
    batch, most = toys.tokens(dist.get_rank(), 0), [0]

    def count(_):
        most[0] = max(most[0], sum(param.grad is not None for param in model.parameters()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    for _ in range(evaluations):
        result = model(*batch)
        del result
    loss = model(*batch)
    loss.backward()
    zero.step()
    return most[0], loss.item(), toys.whole_parameters(zero)


def test_an_evaluation_does_not_hold_up_the_next_backward():
    (count, loss, after), (count_then, loss_then, after_then) = (toys.run(most_gradients, 2, n)[0] for n in (0, 3))
    assert count_then == count, "gradients stay whole until the end of backward"
    assert loss == loss_then and toys.identical(after, after_then)


# ------------------------------------------------------------------------------------------ states that do not fit


class Counting(toys.Transformer):
    """With a buffer."""

    def __init__(self, name="seen", shape=(3,)):
        super().__init__()
        self.register_buffer(name, torch.ones(shape))


def everything(zero):
    return [*toys.whole_parameters(zero), *(buffer.clone() for buffer in zero.model.buffers()),
            *(value.clone() for state in zero.optimizer.state.values() for value in state.values())]


def train(zero, steps=1):
    for step in range(steps):
        zero.model(*toys.tokens(dist.get_rank(), step)).backward()
        zero.step()
        zero.zero_grad()


def with_a_wrong_moment(state):
    first = next(iter(state["optimizer"]["state"]))
    state["optimizer"]["state"][first]["exp_avg"] = torch.ones(5)
    return state


def load_what_does_not_fit(stage):
    _, zero = wrap(stage, Counting)
    train(zero, 2)
    before, own = everything(zero), copy.deepcopy(zero.state_dict())
    others = {}
    for words, make, options in (("other buffers: .* was other", lambda: Counting("other"), {}),
                                 ("other buffers: .*seen", lambda: Counting(shape=(4,)), {}),
                                 ("optimizer_class SGD", Counting, dict(optimizer=optim.SGD, momentum=0.9)),
                                 ("optimizer_class RMSprop", Counting, dict(optimizer=optim.RMSprop))):
        _, other = wrap(stage, make, **options)
        train(other)
        others[words] = other.state_dict()
    others |= {
        "other buckets|other shards": {**own, "shards": own["shards"][:-1]},
        "other shards: ": {**own, "shards": [*own["shards"][:-1], torch.ones(5)]},
        "other shards": {key: value for key, value in own.items() if key != "shards"},
        "optimizer groups": {key: value for key, value in own.items() if key != "optimizer"},
        "optimizer state: exp_avg": with_a_wrong_moment(copy.deepcopy(own)),
    }
    train(zero)
    before = everything(zero)
    for words, state in others.items():
        with pytest.raises(ValueError, match=words):
            zero.load_state_dict(state)
        assert toys.identical(everything(zero), before), f"half of it is loaded ({words})"
    zero.load_state_dict(own)
    train(zero)
    assert toys.identical(everything(zero), before), "the same step again, from the same state"


@by_stage
@pytest.mark.parametrize("world_size", (2, 3))
def test_a_state_that_does_not_fit_changes_nothing(world_size, stage):
    toys.run(load_what_does_not_fit, world_size, stage)
