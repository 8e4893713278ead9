"""What else torch can do with a model around a stage: another wrapper, thread, transform, or a graph of before. It
works, or is refused with the line to write."""

import copy
import threading
import warnings

import pytest
import torch
import toys
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


X = torch.ones(3, 4)


def stage_of(stage, model=None):
    torch.manual_seed(0)
    return toys.STAGES[stage](model or Model(), optim.SGD, lr=0.1)


def joint(stage):
    zero = stage_of(stage)
    one = zero.model(X).sum()
    one.backward(retain_graph=True)
    (one + zero.model(X).sum()).backward()
    zero.step()


def both_forwards_first(stage):
    zero = stage_of(stage)
    one, other = zero.model(X).sum(), zero.model(X).sum()
    one.backward(retain_graph=True)
    (one + other).backward()
    zero.step()


def an_older_graph(stage):
    zero = stage_of(stage)
    one = zero.model(X).sum()
    one.backward(retain_graph=True)
    zero.model(X).sum().backward()
    one.backward()
    zero.step()


def in_a_thread(work):
    raised = []

    def run():
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def train(zero):
    zero.model(X).sum().backward()
    zero.step()
    zero.zero_grad()


def another_thread(stage):
    zero = stage_of(stage)
    train(zero)
    in_a_thread(lambda: train(zero))


def one_thread_for_all(stage):
    def work():
        zero = stage_of(stage)
        train(zero)
        train(zero)

    in_a_thread(work)


def evaluated_in_a_thread(stage):
    zero = stage_of(stage)
    train(zero)
    in_a_thread(lambda: torch.no_grad()(zero.model)(X))
    train(zero)


def transformed(stage):
    zero = stage_of(stage)
    torch.func.vmap(zero.model)(torch.ones(5, 3, 4)).sum().backward()


def differentiated(stage):
    zero = stage_of(stage)
    torch.func.jacrev(zero.model)(X[0])


def a_copy_is_transformed(stage):
    zero = stage_of(stage)
    with zero.gather_parameters():
        whole = copy.deepcopy(zero.model)
    torch.func.jacrev(whole)(X[0])
    torch.func.vmap(whole)(X)


def inside_ddp(stage):
    zero = stage_of(stage)
    DistributedDataParallel(zero.model)(X).sum().backward()


def around_ddp(stage):
    stage_of(stage, DistributedDataParallel(Model()))


def of_fsdp(stage):
    model = Model()
    fully_shard(model)
    stage_of(stage, model)


def of_script(stage):
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.blocks[0] = nn.Sequential(torch.jit.script(nn.Linear(8, 8)))
    train(stage_of(stage, model))


def under_inference(stage):
    model = Model()
    with torch.inference_mode():
        stage_of(stage, model)


def buffers_of_other_sizes(stage):
    model = Model()
    model.register_buffer("seen", torch.zeros(3 + torch.distributed.get_rank()))
    stage_of(stage, model)


def a_buffer_that_grows(stage):
    model = Model()
    model.register_buffer("seen", torch.zeros(3))
    zero = stage_of(stage, model)
    model.seen = torch.zeros(3 + torch.distributed.get_rank())
    train(zero)


FINE = ""
CASES = {  # what it says at stage 2 and at stage 3
    joint: (FINE, "call backward() on each loss by itself"),
    both_forwards_first: (FINE, FINE),
    an_older_graph: (FINE, FINE),
    another_thread: (FINE, "call it in one thread"),
    one_thread_for_all: (FINE, FINE),
    evaluated_in_a_thread: (FINE, FINE),
    transformed: (FINE, "copy.deepcopy(model)"),
    differentiated: (FINE, "copy.deepcopy(model)"),
    a_copy_is_transformed: (FINE, FINE),
    inside_ddp: ("leave DistributedDataParallel out",) * 2,
    around_ddp: ("give the stage the model in it, its .module",) * 2,
    of_fsdp: ("is a DTensor",) * 2,
    of_script: (FINE, "module 'blocks.0.0' is TorchScript"),
    under_inference: ("wrap the model outside of it",) * 2,
    buffers_of_other_sizes: ("differs from rank 0's in names, shapes or dtypes",) * 2,
    a_buffer_that_grows: ("broadcast of buffer 'seen'",) * 2,
}


def said(case, stage):
    try:
        case(stage)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return FINE


@pytest.mark.parametrize("stage", (2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_works_or_says_what_to_write(case, stage):
    expected = CASES[case][stage - 2]
    for words in toys.run(said, 2, case, stage):
        assert expected in words if expected else not words, words
