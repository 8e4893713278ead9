"""Lesson 6's assignment, checkpoints and P_a, in steps: what is kept, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import functools
import math
import random
import time
import tracemalloc
from unittest import mock

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from stock import Stock, bytes_behind
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero_minimal.core import random_state
from zero_minimal.offloading import host

pytestmark = pytest.mark.usefixtures("one_thread")

FEW, MANY = 2, 6  # blocks
BATCH, SEQUENCE, WIDTH = 5, 77, 55
NUMBERS = BATCH * SEQUENCE * WIDTH  # of a block's input: odd, and 3 does not divide them
WHOLE = 4 * NUMBERS  # bytes
SLACK = 8192  # bytes a block for states of random numbers and the like


# ------------------------------------------------------------------------------------------------- what is checkpointed


class Rung(nn.Module):
    """A block that is wide inside. It counts how often it runs. That it drops, none of its modules shows."""

    def __init__(self, width, inside, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, inside), nn.Linear(inside, width), dropout
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), self.dropout, self.training)


class Tower(nn.Module):
    """Blocks between two layers. tower(x, call) calls each block by call(block, x)."""

    def __init__(self, blocks=FEW, dropout=0.0, width=WIDTH, inside=4 * WIDTH):
        super().__init__()
        self.first, self.last = nn.Linear(7, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Rung(width, inside, dropout) for _ in range(blocks))

    def forward(self, x, call):
        x = self.first(x)
        for block in self.blocks:
            x = call(block, x)
        return self.last(x)


def plainly(function, *args, group=None, to_host=False, place=None, **kwargs):
    """What a checkpoint must come to."""
    return function(*args, **kwargs)


def numbers_of(rank, *shape):
    generator = torch.Generator().manual_seed(toys.data_seed(rank, 17 * rank + 1))
    return torch.randn(*shape, generator=generator)


def batch_of(rank, width=7):
    return numbers_of(rank, BATCH, SEQUENCE, width)


def alike(tensors, group=None):
    """Those of the group's rank 0 for all of its ranks, as in a model-parallel group."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0, group=group)


def gradients_of(module):
    """{name: gradient or False}"""
    return {name: False if param.grad is None else param.grad for name, param in module.named_parameters()}


# ----------------------------------------------------------------------------------------------------- arguments by lot

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
COMPLEX = torch.complex64  # no floating point, and it can require a gradient
SIZES = ((), (1,), (0, 3), (6, 4), (77, 55), (96, 56))
LOTS = range(8)


def pool_of(rank):
    return numbers_of(rank, 100 * 56).double().abs()


def laid_out(leaf, layout):
    """A tensor with these numbers: as the leaf is, transposed, or with gaps."""
    tensor = leaf.clone().mT.contiguous().mT if layout == 1 and leaf.ndim > 1 else leaf.clone()
    return torch.stack([tensor, tensor], -1)[..., 0] if layout == 2 else tensor


def by_lot(call, pool, lot, rate=0.0, group=None, **options):
    """What comes of two passes through a function of a parameter and six tensors, whose dtypes, sizes, layouts and use
    are drawn by lot, by name; and (what, how much, at most, why) was kept, sent and announced in the second.
    Without dropout some are complex, as is one of the results, and one tensor is another one again, or a view of it, or
    what is detached of it."""
    lots, leaves, seen, heard, ranks = random.Random(lot), [], [], [], dist.get_world_size(group) if group else 1
    autocast = rate > 0 and lot % 4 > 1  # where torch.cat refuses fp64 and fp16
    kinds = [kind for kind in (KINDS if rate else (*KINDS, COMPLEX))
             if not (autocast and kind in (torch.float64, torch.float16))]
    for place in range(6):
        size, dtype = lots.choice(SIZES), lots.choice(kinds)
        leaf = (pool[place : place + math.prod(size)].view(size) * (2 + 3j if dtype.is_complex else 2)).to(dtype)
        leaves.append(leaf.requires_grad_((dtype.is_floating_point or dtype.is_complex) and lots.random() < 0.7))
    all_used = lot % 4 in (1, 2)  # else a graph that hooks have made has branches to which backward never comes
    layouts, used = [lots.randrange(3) for _ in leaves], [True, *(all_used or lots.random() < 0.7 for _ in leaves)]
    one, again = _twins(leaves, lots)
    other = (lambda tensor: tensor, lambda tensor: tensor.view_as(tensor), torch.detach)[lot % 3]
    turned, scales = lots.randrange(6), nn.ParameterList(torch.full((1,), 0.51 + place) for place in range(7))

    def function(first, pair, scale, *, named, others):
        tensors = [first, *pair, named, *others.values()]
        seen[:] = [(tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
        results = [torch.sin(nn.functional.dropout(tensor.double().contiguous(), rate) * factor)
                   if tensor.is_floating_point() else tensor * factor if tensor.is_complex() else tensor + tensor
                   for tensor, factor in zip(tensors, list(scales)[1:], strict=True)]
        if not rate:
            results[turned] = results[turned] * 2j  # whatever it was, it is complex
        return [(scale.view(1, 1) @ scale.view(1, 1)).float(), *results]

    def forward():
        tensors = list(map(laid_out, leaves, layouts))
        if not rate:
            tensors[again] = other(tensors[one])
        parts = [part_of(tensor.numel(), ranks) * tensor.itemsize if tensor.is_floating_point() else
                 tensor.nbytes if options else tensor.untyped_storage().nbytes() for tensor in tensors]
        given = {StorageWeakRef(tensor.untyped_storage()).cdata: tensor for tensor in tensors}
        with torch.autocast("cpu", enabled=autocast):
            results = call(function, tensors[0], tuple(tensors[1:3]), scales[0], named=tensors[3],
                           others=dict(zip("ab", tensors[4:], strict=True)), group=group, **options)
        return results, parts, [reference for _, reference in heard if reference.cdata in given]

    def alive(most):
        known = [*results, *(tensor for tensor, _ in seen), *(tensor.grad for tensor in (*leaves, *scales))]
        for _ in range(20 if group else 1):  # gloo's threads let go of a tensor a moment late
            amount = stock.alive() - sum(map(checks._bytes_in, known))
            if amount <= most:
                break
            time.sleep(0.02)
        return amount

    torch.manual_seed(lot)
    with Stock([*leaves, *scales, pool]) as stock, host.announced(
            lambda copy: heard.append((_named(copy), StorageWeakRef(copy.untyped_storage())))):
        for _ in range(2):
            heard.clear()
            with checks.Calls() as first:
                results, parts, themselves = forward()
            held, on_host = alive(sum(parts) + SLACK), sum(bytes_behind(reference) for _, reference in heard)
            loss = sum(((1 - 2j) * result).real.sum() if result.is_complex() else result.sum()
                       for result, wanted in zip(results, used, strict=True) if wanted and result.requires_grad)
            with checks.Calls() as second:
                loss.backward()
            del loss
        used_up, used_up_on_host = alive(SLACK), sum(bytes_behind(reference) for _, reference in heard)
        results = [result.detach() for result in results]  # the graph goes
        left, left_on_host = alive(SLACK), sum(bytes_behind(reference) for _, reference in heard)
    cut = [part for part, leaf in zip(parts, leaves, strict=True) if leaf.is_floating_point()]
    named = [*((f"result {place}", result) for place, result in enumerate(results)),
             *((f"argument {place}, when the function ran last", tensor) for place, (tensor, _) in enumerate(seen)),
             *((f"the gradient of argument {place}", leaf.grad) for place, leaf in enumerate(leaves)),
             *((f"the gradient of parameter {place}", scale.grad) for place, scale in enumerate(scales))]
    return {
        **{name: tensor if tensor is None else tensor.detach().clone(memory_format=torch.contiguous_format)
           for name, tensor in named},
        **{f"whether argument {place} required a gradient then": required for place, (_, required) in enumerate(seen)},
        "the next random number": torch.rand(1),
    }, [
        ("bytes that live between forward and backward", held, sum(parts) + SLACK),
        ("bytes that live after backward, while the results do", used_up * all_used, SLACK, ATTRIBUTES),
        ("bytes of copies for the host after backward, while the results live", used_up_on_host * all_used, 0,
         ATTRIBUTES),
        ("bytes that live after backward, without the results", left, SLACK),
        ("collectives in forward", len(first.made), 0),
        ("bytes that were sent in backward", sum(checks.sent_for(call, ranks) for call in second.made),
         (ranks - 1) * sum(cut)),
        ("barriers in backward", sum(call.name == "barrier" for call in second.made), 0),
        ("arguments that are a copy for the host", len(themselves), 0),
        ("arguments of which no copy was announced", len(leaves) - len(heard) if options else 0, 0),
        ("bytes of copies for the host after backward, without the results", left_on_host, 0),
        ("bytes between forward and backward on the device", held - on_host, SLACK if options else sum(parts) + SLACK),
    ] if group or options else []


ATTRIBUTES = (". What ctx has as an attribute lives as long as the graph, also a part or a copy; what is saved by "
              "ctx.save_for_backward goes when backward has used it")
BACK = (". Here two arguments are one tensor, and each has a gradient of its own: that of its own place. And each "
        "result that requires a gradient is gone back from, also a complex one")


def _twins(leaves, lots):
    """Places of two arguments, the first of which requires a gradient if any does."""
    wanting = [place for place, leaf in enumerate(leaves) if leaf.requires_grad] or [0]
    first = lots.choice(wanting)
    return first, lots.choice([place for place in range(len(leaves)) if place != first])


def by_lots(assignment, rate=0.3, **options):
    return [by_lot(assignment.checkpoint, pool_of(dist.get_rank()), lot, rate, **options) for lot in LOTS]


def by_lots_in_groups(assignment, **options):
    """Over all ranks and over the last two, in turn; None where this rank has no part in it."""
    pool, size = pool_of(dist.get_rank()), dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group([size - 2, size - 1])]
    alike([pool])
    return [by_lot(assignment.checkpoint, pool, lot, 0.3, groups[lot % 2], **options)
            if lot % 2 == 0 or dist.get_rank() >= size - 2 else None for lot in LOTS]


@functools.cache
def plainly_by_lot(rank, lot, rate):
    return by_lot(plainly, pool_of(rank), lot, rate)[0]


def assert_lots(found, rank, where, rate=0.3):
    """`rank`: whose numbers they worked on."""
    for lot, (values, amounts) in [(lot, ours) for lot, ours in zip(LOTS, found, strict=True) if ours]:
        of = f"{where}, a function of a parameter and six tensors of any dtype, size and layout:"
        for name, right in plainly_by_lot(rank, lot, rate).items():
            got, kinds = values[name], [f"{_named(value)} {list(value.shape)}" if isinstance(value, torch.Tensor)
                                        else str(value) for value in (values[name], right)]
            why = BACK if "gradient of" in name and not rate else ""
            assert kinds[0] == kinds[1], f"{of} {name} is {kinds[0]} instead of {kinds[1]}{why}"
            if isinstance(right, torch.Tensor):
                got, right = got.to(torch.complex128), right.to(torch.complex128)
                near = 1e-5 * right.abs().amax() if right.numel() and "gradient" in name else 0
                off = (got - right).abs()
                assert (off <= near).all(), f"{of} {name} ({kinds[0]}) is off by {off.max()}{why}"
        for name, amount, most, *why in amounts:
            assert amount <= most, f"{of} {name} are {amount:.0f}, and may be {most}{''.join(why)}"


# --------------------------------------------------------------------- step 1: run without a graph, keep the input


def held_between(call, blocks, group=None, **options):
    """Bytes that live between forward and backward, without the output; how often each block ran. With a group the
    ranks in it work on the same."""
    model, x = toys.build(functools.partial(Tower, blocks), dist.get_rank()), batch_of(dist.get_rank())
    if group:
        alike([*model.parameters(), x], group)
    call = functools.partial(call, group=group, **options) if options or group else call
    with Stock([*model.parameters(), x]) as stock:
        output = model(x, call)
        return stock.alive() - output.nbytes, [block.runs for block in model.blocks]


def held_by_a_block(call, **options):
    """Bytes that live between forward and backward for each block more."""
    few, _ = held_between(call, FEW, **options)
    many, runs = held_between(call, MANY, **options)
    return (many - few) / (MANY - FEW), runs


def forwards(assignment):
    """See held_by_a_block: with checkpoints, without any, and with copies of half the bytes; how often blocks ran."""
    with_checkpoints, runs = held_by_a_block(assignment.checkpoint)
    without, _ = held_by_a_block(plainly)
    placed, _ = held_by_a_block(assignment.checkpoint, place=torch.Tensor.half)
    return with_checkpoints, without, placed, runs


@pytest.mark.step(1, points=12)
def test_only_the_inputs_stay(assignment):
    for rank, (size, without, placed, _) in enumerate(once(forwards, 2, assignment)):
        kinds = (
            "the inside of the block is still there: a graph leads to all that was computed. Who records it, and where?"
            if size >= 0.9 * without else
            "more than the input is kept. What else do you save, or hold a reference to?"
        )
        assert size <= WHOLE + SLACK, (
            f"between forward and backward {in_words(size)} a block live on rank {rank}, and its input has "
            f"{in_words(WHOLE)} (without checkpoints it is {in_words(without)}): {kinds}"
        )
        assert size >= 0.99 * WHOLE, (
            f"between forward and backward {in_words(size)} a block live on rank {rank}, and its input has "
            f"{in_words(WHOLE)}: it is lost, and backward will need it. Was it saved? Does forward return a tuple, of "
            "which autograd knows the tensors, and not a list?"
        )
        assert placed <= 0.6 * WHOLE + SLACK, (
            f"with a place= that gives a copy of {in_words(WHOLE // 2)}, {in_words(placed)} a block live between "
            f"forward and backward on rank {rank}: is what keeper.keep(tensor) gives what you save, and nothing else?"
        )


@pytest.mark.step(1, points=3)
def test_forward_runs_the_function_once(assignment):
    for rank, (*_, runs) in enumerate(once(forwards, 2, assignment)):
        assert set(runs) == {1}, (
            f"rank {rank}: before any backward the {len(runs)} blocks have run {runs} times: in forward each runs once"
        )


class Odd(nn.Module):
    """Takes and returns whatever a block may."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, pair, where, *, mask=None, scale=1.0):
        x, index = pair
        x = torch.tanh(self.linear(x)) * scale * where["weight"]
        x = x.masked_fill(mask, 0.0)
        return {"x": x + index[:, None], "index": index + 1, "both": (x.sum(), index), "unused": 2 * x,
                "given": pair[0]}


def odd_call(call, rank, backward=False):
    """The tensors in what it returns; after a backward: gradients by name."""
    module = toys.build(Odd, rank)
    x, weight = numbers_of(rank, 7, 5).requires_grad_(), numbers_of(rank, 5)
    mask = numbers_of(rank, 7, 5) < 0.5
    result = call(module, (x * 2, torch.arange(7)), {"weight": weight}, mask=mask, scale=2.0)
    if not backward:
        return {"index": result["index"], "x": result["x"].detach(), "both": result["both"][0].detach(),
                "unused": result["unused"].detach()}
    (result["x"].square().sum() + result["both"][0] + result["given"].pow(3).sum()).backward()
    return gradients_of(module) | {"the input": False if x.grad is None else x.grad}


def plain_output(call, rank):
    """A block's whose input wants no gradient: the output, and whether it wants one."""
    block, x = toys.build(functools.partial(Rung, WIDTH, WIDTH, 0.0), rank), batch_of(rank, WIDTH)
    output = call(block, x)
    return output.detach(), output.requires_grad


def outputs(assignment):
    rank = dist.get_rank()
    return plain_output(assignment.checkpoint, rank), odd_call(assignment.checkpoint, rank)


@pytest.mark.step(1, points=5)
def test_the_result_is_the_functions(assignment):
    for rank, (plain, odd) in enumerate(once(outputs, 2, assignment)):
        wanted, _ = plain_output(plainly, rank)
        assert torch.equal(plain[0], wanted), (
            f"rank {rank}: checkpoint(block, x) returned other numbers than block(x): forward runs the function on "
            "what it was given"
        )
        assert plain[1], (
            f"rank {rank}: the output of checkpoint(block, x) requires no gradient though the block has parameters, so "
            "backward will never come here. The input is data, and wants none itself: what else among the arguments "
            "of forward does (anchor)?"
        )
        for name, value in odd_call(plainly, rank).items():
            assert torch.equal(odd[name], value), (
                f"rank {rank}: a function that takes tuples, dicts, integers and a mask, and returns a dict, gave "
                f"other numbers under a checkpoint, in {name!r}"
            )


# ---------------------------------------------------------------- step 2: backward: run again, go back through that


def one_block(call, rank):
    """Gradients of a block alone, whose input wants none."""
    block = toys.build(functools.partial(Rung, WIDTH, 2 * WIDTH, 0.0), rank)
    call(block, batch_of(rank, WIDTH)).square().mean().backward()
    return gradients_of(block)


def tower_step(call, rank):
    """Gradients of a tower, and of its input; how often each block ran."""
    model, x = toys.build(functools.partial(Tower, 3), rank), batch_of(rank).requires_grad_()
    model(x, call).square().mean().backward()
    found = gradients_of(model) | {"the tower's input": False if x.grad is None else x.grad}
    return found, [block.runs for block in model.blocks]


def backward_of_one(assignment):
    return one_block(assignment.checkpoint, dist.get_rank())


def backward_of_a_tower(assignment):
    return tower_step(assignment.checkpoint, dist.get_rank())


def assert_gradients(found, wanted, where, why="", why_wrong=None):
    """`why`: what to look at if one is missing; why_wrong: if one is another, the same by default."""
    why_wrong = why if why_wrong is None else why_wrong
    for name, gradient in wanted.items():
        if gradient is False:
            continue
        got = found[name]
        assert got is not False, f"{where}: no gradient came to {name}. {why}"
        assert got.shape == gradient.shape, f"{where}: the gradient of {name} has the shape {list(got.shape)}"
        size = gradient.double().abs().max().item()
        if (got.double() - gradient.double()).abs().max().item() <= 1e-5 * size:
            continue
        ratio = ((got.double() * gradient).sum() / gradient.double().square().sum()).item()
        if abs(ratio) < 1e-6 and not got.any():
            pytest.fail(f"{where}: the gradient of {name} is None or zero. {why}")
        close = (got.double() - ratio * gradient).abs().max().item() <= 1e-4 * abs(ratio) * size
        if close and abs(ratio - round(ratio)) < 1e-3:
            pytest.fail(f"{where}: the gradient of {name} is {ratio:.0f} times what it should be: was it added to "
                        ".grad more than once, or summed over ranks?")
        index = int((got.double() - gradient).abs().argmax())
        pytest.fail(
            f"{where}: the gradient of {name} is {got.flatten()[index]:.5g} where {gradient.flatten()[index]:.5g} is "
            f"right (element {index}). {why_wrong}"
        )


INSIDE = ("Backward must run the function again with a graph, and go back through it: does it record one "
          "(torch.enable_grad), and begin with the gradients that came in?")


@pytest.mark.step(2, points=6, raised=INSIDE)
def test_parameters_get_their_gradients(assignment):
    for rank, found in enumerate(once(backward_of_one, 2, assignment)):
        assert_gradients(found, one_block(plainly, rank), f"rank {rank}, backward of one checkpoint", INSIDE)


CHAIN = ("The blocks above have theirs, so the chain ends at a checkpoint: of a tensor that required a gradient "
         "backward returns it. Did the tensor that the second run began with require one?")


@pytest.mark.step(2, points=8, raised=INSIDE)
def test_the_input_gets_its_gradient(assignment):
    for rank, (found, _) in enumerate(once(backward_of_a_tower, 2, assignment)):
        wanted = tower_step(plainly, rank)[0]
        from_above = [name for part in ("last", "blocks.2", "blocks.1", "blocks.0", "first", "the tower")
                      for name in wanted if name.startswith(part)]
        top = {name: wanted[name] for name in from_above if name.startswith(("last", "blocks.2"))}
        assert_gradients(found, top, f"rank {rank}, backward through three checkpoints", INSIDE)
        assert_gradients(found, {name: wanted[name] for name in from_above},
                         f"rank {rank}, backward through three checkpoints", CHAIN,
                         "Above this all is right: what a checkpoint returns must be the gradient of the tensor with "
                         "which the second run began")


@pytest.mark.step(2, points=3, raised=INSIDE)
def test_the_function_runs_twice_in_all(assignment):
    for rank, (_, runs) in enumerate(once(backward_of_a_tower, 2, assignment)):
        assert set(runs) == {2}, (
            f"rank {rank}: after forward and backward the three blocks have run {runs} times, and each runs twice: "
            "once in forward, once again in backward"
        )


def memory_of_a_step(assignment):
    """Bytes that live after backward, while the output does, and at the peak, and those of gradients; the same without
    checkpoints; where each block takes integers and a mask besides; and where place= gives copies."""

    def with_others(block, x):
        index, mask = torch.arange(x.numel()).view(x.shape), x > 0
        return assignment.checkpoint(lambda x, index, mask: block(x * mask) + index % 2, x, index, mask)

    found, placed = [], functools.partial(assignment.checkpoint, place=torch.clone)
    for call in (assignment.checkpoint, plainly, with_others, placed):
        model, x = toys.build(functools.partial(Tower, MANY), dist.get_rank()), batch_of(dist.get_rank())
        with Stock([*model.parameters(), x]) as stock:
            output = model(x, call)
            output.sum().backward()
            gradients = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
            found.append((stock.alive() - output.nbytes - gradients, stock.highest, gradients))
    return found


@pytest.mark.step(2, points=5, raised=INSIDE)
def test_what_was_kept_goes_with_backward(assignment):
    for rank, ((after, *_), _, *more) in enumerate(once(memory_of_a_step, 1, assignment)):
        for left, others in zip((after, *(left for left, *_ in more)), (
                "", ", and who take integers and a mask besides", ", of which place= gave copies"), strict=True):
            assert left <= WHOLE, (
                f"rank {rank}: after backward {in_words(left)} still live of {MANY} blocks, whose inputs have "
                f"{in_words(WHOLE)} each{others}, while the output is still there. What ctx has as an attribute lives "
                "as long as the graph (look at forward, step 1); what is saved by ctx.save_for_backward, whatever its "
                "dtype, goes when backward has used it"
            )


@pytest.mark.step(2, points=3, raised=INSIDE)
def test_one_block_at_a_time(assignment):
    for rank, ((_, high, gradients), (_, without, _), *_) in enumerate(once(memory_of_a_step, 1, assignment)):
        most = (MANY + 14) * WHOLE + gradients + MANY * SLACK  # inputs, one block's inside, and its gradients
        assert high <= most < without, (
            f"rank {rank}: in a step of {MANY} blocks {in_words(high)} live at the peak ({in_words(without)} "
            f"without checkpoints), and inputs and the inside of one block are less than {in_words(most)}: a block's "
            "inside goes when backward has gone through it, before the next block runs again"
        )


def odd_backwards(assignment):
    call, rank = assignment.checkpoint, dist.get_rank()
    return (odd_call(call, rank, backward=True), frozen_and_twice(call, rank), once_more(call, rank),
            changed_between(call, rank), of_one_memory(call, rank), [
                changed_beside(call, rank, dtype) for dtype in KINDS],
            with_one_detached(call, rank), by_lots(assignment, 0.0))


def with_one_detached(call, rank):
    """Gradients of a layer whose function returns a second result that is detached, and of one input of two; which of
    the inputs required a gradient in the last run."""
    layer, x = toys.build(lambda: nn.Linear(5, 5), rank), numbers_of(rank, 3, 5).requires_grad_()
    required = []

    def both(x, y):
        required[:] = x.requires_grad, y.requires_grad
        return layer(x + y), layer(x * y).detach()

    sum(result.square().sum() for result in call(both, x, numbers_of(rank, 3, 5))).backward()
    return gradients_of(layer) | {"the input": False if x.grad is None else x.grad}, required


def of_one_memory(call, rank):
    """The gradient of a tensor that a function gets whole, and its first row besides."""
    x = numbers_of(rank, 4, 3).requires_grad_()
    call(lambda whole, row: (whole[:1] * 2 + whole.sum(0) * row).square().sum(), x, x[:1]).backward()
    return {"the input": False if x.grad is None else x.grad}


def changed_between(call, rank):
    """Gradients of a block whose input was changed between forward and backward; None from who refuses."""
    block, x = toys.build(lambda: Rung(5, 7, 0.0), rank), numbers_of(rank, 3, 5)
    loss = call(block, x).square().sum()
    x.mul_(3)
    try:
        loss.backward()
    except RuntimeError:
        return None
    return gradients_of(block)


def changed_beside(call, rank, dtype):
    """Gradients of a layer whose function also takes a second tensor, which was changed in place between forward
    and backward; None from who refuses."""
    layer, x = toys.build(lambda: nn.Linear(5, 5), rank), numbers_of(rank, 3, 5)
    beside = torch.arange(5).remainder(2).to(dtype)
    loss = call(lambda x, beside: layer(x) * (1 + 2 * beside), x, beside).square().sum()
    beside.copy_(beside == 0)
    try:
        loss.backward()
    except RuntimeError:
        return None
    return gradients_of(layer)


def once_more(call, rank, group=None):
    """Gradients of two backward passes through one graph; None from who refuses the second."""
    block, x = toys.build(lambda: Rung(5, 7, 0.0), rank), numbers_of(rank, 3, 5).requires_grad_()
    if group:
        alike([*block.parameters(), x], group)
    loss = call(block, x, group=group).square().sum()
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except (RuntimeError, TypeError):
        return None
    return gradients_of(block) | {"the input": False if x.grad is None else x.grad}


def frozen_and_twice(call, rank):
    """Gradients of a layer after a checkpoint in which nothing wants one, from two micro-batches."""
    block, last = toys.build(lambda: Rung(5, 7, 0.0), rank), toys.build(lambda: nn.Linear(5, 2), rank)
    block.requires_grad_(False)
    for _ in range(2):
        last(call(block, numbers_of(rank, 3, 5))).sum().backward()
    return gradients_of(last)


@pytest.mark.step(2, points=2, raised="an output may get no gradient (None), as integers and what nobody uses; an "
                                      "argument may want none; and where nothing inside wants one, there is nothing to "
                                      "go back through")
def test_any_arguments(assignment):
    for rank, (odd, other, more, changed, shared, beside, (partly, required), lots) in enumerate(
            once(odd_backwards, 2, assignment)):
        assert_gradients(partly, with_one_detached(plainly, rank)[0],
                         f"rank {rank}, a function whose second result is detached inside",
                         "It gets a gradient, but nothing leads back from it: each output is asked whether it requires "
                         "one")
        assert required == [True, False], (
            f"rank {rank}: of two inputs the first requires a gradient, and in the second run {required.count(True)} "
            "did: each must be as it was, since a function may ask, and a gradient that nobody wants takes memory"
        )
        assert_gradients(shared, of_one_memory(plainly, rank),
                         f"rank {rank}, a function of a tensor and of its first row",
                         "Both begin at one address, and are two arguments: what do you know a tensor by?")
        assert_gradients(odd, odd_call(plainly, rank, backward=True),
                         f"rank {rank}, a function that takes and returns tuples and dicts",
                         "Is each gradient that comes in paired with its output, and each that goes out with its "
                         "argument? One of the results is an argument itself, which no operator has made")
        assert_gradients(other, frozen_and_twice(plainly, rank), f"rank {rank}, a layer after a frozen block",
                         "Nothing in the block wants a gradient.")
        assert_gradients(more, once_more(plainly, rank) if more else {},
                         f"rank {rank}, backward(retain_graph=True), then backward()",
                         "Each second run begins with tensors of its own (detach), whose .grad is empty")
        assert_gradients(changed, changed_between(lambda block, x: block(x.clone()), rank) if changed else {},
                         f"rank {rank}, a block whose input was changed in place between forward and backward",
                         "The second run began with what it is now, and nobody was told. Without a checkpoint autograd "
                         "refuses that backward: it knows the version of each tensor that was saved by "
                         "ctx.save_for_backward")
        assert_lots(lots, rank, f"rank {rank}", 0.0)
        for dtype, of_it in zip(KINDS, beside, strict=True):
            assert_gradients(of_it or {}, changed_beside(lambda run, x, beside: run(x, beside.clone()), rank, dtype)
                             if of_it else {},
                             f"rank {rank}, a function that also takes a tensor of {dtype}, which was changed "
                             "in place between forward and backward",
                             "The second run took it as it is now, and nobody was told. Autograd knows the version of "
                             "each tensor that was saved by ctx.save_for_backward, and of no attribute of ctx")


def gradient_of_one(assignment):
    """What autograd.grad gives for the input of a block, and what the block's parameters have then; or the error."""
    block, x = toys.build(lambda: Rung(5, 7, 0.0), 0), numbers_of(0, 3, 5).requires_grad_()
    try:
        found, = torch.autograd.grad(assignment.checkpoint(block, x).square().sum(), x)
    except RuntimeError:
        return None
    return found, gradients_of(block)


@pytest.mark.step(2, points=1)
def test_what_is_no_plain_backward_is_refused(assignment):
    found = once(gradient_of_one, 1, assignment)[0]
    if found:
        left = [name for name, gradient in found[1].items() if gradient is not False]
        assert not left, (
            f"torch.autograd.grad(loss, x) through a checkpoint went on, and has put gradients into {', '.join(left)}, "
            "which nobody asked for: the next step would add them. @checkpoints.plain_backward_only refuses it"
        )


def half_used(assignment):
    """Gradients of the two layers of a function of which the first result alone is used, and of the two before it."""
    layers, x = toys.build(lambda: nn.ModuleList(nn.Linear(5, 5) for _ in range(4)), 0), numbers_of(0, 4, 5)
    first, _ = assignment.checkpoint(lambda x, y: (layers[0](x), layers[1](y)), layers[2](x), layers[3](x))
    first.square().sum().backward()
    return gradients_of(layers)


@pytest.mark.step(2, points=2, raised="an output that nobody uses gets no gradient (None): there is nothing to go back "
                                      "through")
def test_what_nobody_uses_gets_no_gradient(assignment):
    found = once(half_used, 1, assignment)[0]
    assert found["0.weight"] is not False, (
        "a function returns two results, and the first alone is used: no gradient came to the layer it comes from"
    )
    assert found["1.weight"] is False, (
        "a function returns two results, and the first alone is used. The layer of the second has None as gradient "
        "without a checkpoint, and with it a tensor: backward got zeros for an output that has no gradient: see "
        "ctx.set_materialize_grads"
    )
    assert found["3.weight"] is False, (
        "a function of two inputs returns two results, and the first alone is used. The layer from which the other "
        "input comes has None as gradient without a checkpoint, and with it a tensor: an input that got no gradient in "
        "the second run has None, too, and no zeros"
    )


# ----------------------------------------------------------------- step 3: the same again: random numbers and autocast


def with_dropout(call, rank):
    """Gradients of a tower with dropout, and of a block before it, whose input wants none; and a number that is drawn
    after the step."""
    model, x = toys.build(functools.partial(Tower, 3, 0.3), rank), batch_of(rank)
    model.begin = toys.build(functools.partial(Rung, 7, 9, 0.3), rank)
    torch.manual_seed(toys.seed(rank, 77))
    output = model(call(functools.partial(call, model.begin), x), call)  # one inside of another
    torch.rand(3)  # others draw numbers before backward
    output.square().mean().backward()
    return gradients_of(model), torch.rand(1).item()


def in_autocast(call, rank, inside=True, dtype=torch.bfloat16):
    """Gradients of a block that ran in autocast, or out of it, while backward runs where it did not; whether that left
    autocast on; and the loss with other weights then."""
    block = toys.build(functools.partial(Rung, WIDTH, WIDTH, 0.0), rank)
    x = batch_of(rank, WIDTH).requires_grad_(inside)
    with torch.autocast("cpu", dtype, enabled=inside):
        loss = call(block, x).float().square().mean()
    with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        loss.backward()
        left_on = torch.is_autocast_enabled("cpu")
    gradients = gradients_of(block) | {"the input": False if x.grad is None else x.grad}
    with torch.no_grad():
        torch._foreach_mul_(list(block.parameters()), 2)
    with torch.autocast("cpu", dtype, enabled=inside):
        return gradients, left_on, call(block, x).float().square().mean().item()


AUTOCASTS = ((True,), (False,), (True, torch.float16))  # a CPU's own dtype is bfloat16


def same_again(assignment):
    return *with_dropout(assignment.checkpoint, dist.get_rank()), by_lots(assignment, 0.3)


def autocasts(assignment):
    return [in_autocast(assignment.checkpoint, dist.get_rank(), *case) for case in AUTOCASTS]


DROPPED = ("Without dropout it would be right: in backward other numbers were dropped than in forward. Was the random "
           "state taken before the first run, and set for the second one?")


@pytest.mark.step(3, points=6)
def test_dropout_drops_the_same_again(assignment):
    for rank, (found, _, lots) in enumerate(once(same_again, 2, assignment)):
        wanted = with_dropout(plainly, rank)[0]
        first = {name: wanted.pop(name) for name in list(wanted) if name.startswith("begin")}
        assert_gradients(found, wanted, f"rank {rank}, three checkpointed blocks with dropout", DROPPED)
        assert_gradients(found, first, f"rank {rank}, a block with dropout whose input requires no gradient",
                         f"{DROPPED} Its parameters want gradients, so it needs that, too")
        assert_lots(lots, rank, f"rank {rank}, with dropout")


@pytest.mark.step(3, points=2)
def test_who_draws_next_draws_the_same(assignment):
    for rank, (_, drawn, _) in enumerate(once(same_again, 2, assignment)):
        wanted = with_dropout(plainly, rank)[1]
        assert drawn == wanted, (
            f"rank {rank}: after the step the next random number is {drawn:.6f}, and {wanted:.6f} without checkpoints: "
            "the second run must leave the random state as it found it, or the next forward drops what this one did"
        )


@contextlib.contextmanager
def long_random_states(extra):
    """Context in which a state of random numbers is so many bytes longer, and an operator's, which Stock hears."""
    long = {"get_rng_state": lambda get=torch.get_rng_state: torch.cat([get(), torch.zeros(extra, dtype=torch.uint8)]),
            "set_rng_state": lambda state, put=torch.set_rng_state: put(state[: len(state) - extra])}
    with mock.patch.multiple(torch, **long), mock.patch.multiple(torch.random, **long):
        yield


def held_of_a_step(assignment, extra):
    """Bytes of a tower's step, in whatever they are: between forward and backward, and when its output is gone."""
    model, x = toys.build(functools.partial(Tower, MANY, 0.3), 0), batch_of(0)
    with long_random_states(extra), Stock([*model.parameters(), x]) as stock:
        tracemalloc.start()  # lists, bytes, numpy
        output = model(x, assignment.checkpoint)
        between = stock.alive() + tracemalloc.get_traced_memory()[0]
        output.square().mean().backward()
        del output
        after = stock.alive() + tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return between, after


EXTRA = 2**17


def states_kept(assignment):
    """How many states of random numbers are kept between forward and backward, and after."""
    _, short, long = (held_of_a_step(assignment, extra) for extra in (0, 0, EXTRA))  # the first makes what is made once
    return [round((more - less) / EXTRA, 1) for less, more in zip(short, long, strict=True)]


@pytest.mark.step(3, points=1)
def test_one_random_state_a_block(assignment):
    between, after = once(states_kept, 1, assignment)[0]
    assert between <= MANY + 0.5, (
        f"between forward and backward of {MANY} blocks as much is kept as {between:g} states of random numbers have: "
        "one a block is enough, that of the moment before it ran"
    )
    assert after <= 0.5, (
        f"after backward, when the output of {MANY} blocks is gone, as much is still kept as {after:g} states of "
        "random numbers have: they must go with the graph"
    )


def after_an_error(assignment):
    """Whether an error in the second run came out, and whether random numbers and autocast were as before then."""

    runs = []

    def fails(x):
        torch.rand(3)
        runs.append(x.shape)
        if len(runs) > 1:
            raise KeyError("in backward only")
        return x.exp()

    with torch.autocast("cpu", torch.bfloat16):
        output = assignment.checkpoint(fails, torch.ones(2, requires_grad=True))
    torch.rand(5)
    before, failed = torch.get_rng_state(), False
    try:
        output.sum().backward()
    except KeyError:
        failed = True
    return failed, torch.equal(torch.get_rng_state(), before), torch.is_autocast_enabled("cpu")


@pytest.mark.step(3, points=2)
def test_an_error_leaves_all_as_it_was(assignment):
    failed, random, autocast = once(after_an_error, 1, assignment)[0]
    assert failed, "an error that the function raised in its second run did not come out of backward()"
    assert random and not autocast, (
        "the function raised an error in its second run, and after that "
        f"{'autocast is still on' if random else 'the random state is not what it was before backward'}: "
        "what a context has set it sets back, also when an error ends it"
    )


@pytest.mark.step(3, points=3, raised="the second run computes in the precision of the first: is autocast set in "
                                      "backward as it was in forward, and off where it was off?")
def test_autocast_is_as_it_was(assignment):
    for rank, found in enumerate(once(autocasts, 2, assignment)):
        for (inside, *dtype), (gradients, _, later) in zip(AUTOCASTS, found, strict=True):
            ran, backward = ("in", "outside of") if inside else ("outside of", "in")
            of = f" of {dtype[0]}" if dtype else ""
            right, _, wanted = in_autocast(plainly, rank, inside, *dtype)
            assert_gradients(
                gradients, right,
                f"rank {rank}, a block that ran {ran} torch.autocast{of}, with backward {backward} it",
                "The second run must compute in the precision of the first one: set autocast as it was then, on or "
                "off, and with its dtype. The way back through it, torch.autograd.backward, runs as the user's own "
                "backward does: behind that context, not in it")
            assert later == pytest.approx(wanted, rel=1e-3), (
                f"rank {rank}, a block that ran {ran} torch.autocast{of}, with backward {backward} it: then its "
                f"weights were doubled, and the next loss is {later:.4f} instead of {wanted:.4f}. Autocast keeps the "
                "weights that it has rounded until its outermost context ends: enter torch.autocast(…), which counts "
                "contexts, in place of its flags"
            )


def two_device_types(assignment):
    """in_autocast, where autocast has a setting for the GPU, too, as on a machine that has one."""
    real = random_state.autocast_state

    def both():
        return [*(state for state in real() if state[0] == "cpu"), ("cuda", False, torch.float16)]

    names = getattr(assignment.checkpoint, "__globals__", {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(random_state, "autocast_state", both))
        if "autocast_state" in names:
            stack.enter_context(mock.patch.dict(names, autocast_state=both))
        return in_autocast(assignment.checkpoint, dist.get_rank())


TYPES = ("here autocast_state() has an entry for each of two device types, as where there is a GPU: are all of them "
         "set before the one yield, and set back after it?")


@pytest.mark.step(3, points=1, raised=TYPES)
def test_autocast_of_two_device_types(assignment):
    gradients, *_ = once(two_device_types, 1, assignment)[0]
    assert_gradients(gradients, in_autocast(plainly, 0)[0],
                     "a block that ran in torch.autocast, with settings for two device types", f"To look at: {TYPES}")


# ---------------------------------------------------------------------------------------------- step 4: cut and gather


def part_of(numbers, world_size):
    return -(-numbers // world_size)


def parts_held(assignment, **options):
    """Bytes a block that live between forward and backward, where the ranks' inputs are cut over all of them; where
    they are not contiguous, too; and where each block has a second input, which wants no gradient."""

    def turned(block, x, **options):
        return assignment.checkpoint(block, x.mT.contiguous().mT, **options)

    def with_a_second(block, x, **options):
        return assignment.checkpoint(lambda x, other: block(x) + other, x, 2 * x.detach(), **options)

    return [held_by_a_block(call, group=dist.group.WORLD, **options)[0]
            for call in (assignment.checkpoint, turned, with_a_second)]


CUT = ("With group= each rank keeps a part of [numel / M, rounded up] elements: is what `cut` returns in memory of its "
       "own, and what `gather` returns of the old shape?")


@pytest.mark.step(4, points=7, raised=CUT)
@pytest.mark.parametrize("world_size", (2, 3))
def test_a_rank_keeps_its_part(assignment, world_size):
    share = 4 * part_of(NUMBERS, world_size)
    held = once(parts_held, world_size, assignment)
    for rank, turned, size in [(rank, turned, size) for rank, sizes in enumerate(held)
                               for turned, size in enumerate(sizes[:2])]:
        why = ("the whole is kept besides its part: who else refers to it?" if size >= WHOLE + 0.9 * share else
               "the whole is still there. Is what `keep` gives what you save? And a view keeps all of its storage "
               "alive: the part needs memory of its own"
               if size >= 0.95 * WHOLE else "more than the part is kept")
        assert size <= share + SLACK, (
            f"P_a over {world_size} ranks: between forward and backward {in_words(size)} a block live on rank {rank}. "
            f"Its input{', which is not contiguous,' * turned} has {in_words(WHOLE)}, and a part {in_words(share)}: "
            f"{why}{'. (reshape and flatten copy such a tensor, and a view keeps the copy)' * turned}"
        )
        assert size >= 0.98 * WHOLE / world_size - 8 * world_size, (
            f"P_a over {world_size} ranks: rank {rank} keeps {in_words(size)} of a block's input, which has "
            f"{in_words(WHOLE)}. All parts together are less than the whole: a tail is lost"
        )
    for rank, (*_, size) in enumerate(held):
        assert size <= 2 * share + SLACK, (
            f"P_a over {world_size} ranks, where a block has two inputs of {in_words(WHOLE)} each, and the second one "
            f"wants no gradient: rank {rank} keeps {in_words(size)} a block, and two parts have {in_words(2 * share)}. "
            "What is cut does not depend on whether it wants a gradient"
        )


def partitioned_step(call, group, dtype=torch.float32):
    """Gradients of a tower that all ranks of the group work on alike, with inputs of awkward sizes and strides."""
    rank = dist.get_rank()
    model = toys.build(functools.partial(Tower, 2, width=11, inside=13), rank).to(dtype)
    x = numbers_of(rank, 5, 7, 7).to(dtype)
    alike([*model.parameters(), x], group)
    return step_of(model, x, functools.partial(call, group=group))


def step_of(model, x, call):
    """Also of a tensor that is not contiguous, another of its size, one of a single element, integers and a mask."""
    turned = x.transpose(0, 2).detach().requires_grad_()  # [7, 7, 5]
    other = (0.5 * x.transpose(0, 2)).detach().requires_grad_()
    one = x[0, 0, :1].detach().clone().requires_grad_()
    index, mask = torch.arange(5), x.transpose(0, 2) > 0
    mixed = call(mix, turned, other, one, index, mask=mask)
    (model(x, call).float().square().mean() + mixed.float().square().mean()).backward()
    inputs = {"an input that is not contiguous": turned, "a second input of its size": other,
              "an input of one element": one}
    return gradients_of(model) | {name: False if part.grad is None else part.grad for name, part in inputs.items()}


def mix(x, other, one, index, mask):
    return torch.tanh(x * one * index * other).masked_fill(mask, 0.5)


def partitioned(assignment):
    """Gradients in two dtypes; how many of the parts that place= gave have no memory after backward; and, if they have,
    the gradients of two passes through one graph."""
    group, placed = dist.group.WORLD, []

    def place(part):
        placed.append(part.clone())
        return placed[-1]

    found = [partitioned_step(assignment.checkpoint, group, dtype) for dtype in (torch.float32, torch.bfloat16)]
    partitioned_step(functools.partial(assignment.checkpoint, place=place), group)
    freed = sum(part.untyped_storage().nbytes() < part.nbytes for part in placed)
    return found, freed, None if freed else once_more(assignment.checkpoint, dist.get_rank(), group), (
        by_lots_in_groups(assignment) if dist.get_world_size() == 3 else [None for _ in LOTS])


def wanted_step(dtype=torch.float32):
    model = toys.build(functools.partial(Tower, 2, width=11, inside=13), 0).to(dtype)
    return step_of(model, numbers_of(0, 5, 7, 7).to(dtype), plainly)


ORDER = "What is gathered must be the input bit for bit: the parts in order of rank, the tail too, in the old shape"
SPENT = ("`gather` reads its part, and neither changes nor frees it: the graph may go through it once more, and with "
         "place= other tensors lie in the same memory")


@pytest.mark.step(4, points=8, raised=CUT, stuck="all parts have the same length; all ranks of the group must gather, "
                                                 "the same tensors in the same order")
@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_what_is_gathered_is_the_input(assignment, world_size):
    for rank, (found, freed, more, lots) in enumerate(once(partitioned, world_size, assignment)):
        for dtype, gradients in zip((torch.float32, torch.bfloat16), found, strict=True):
            assert_gradients(gradients, wanted_step(dtype), f"P_a over {world_size} ranks, rank {rank}, "
                             f"{str(dtype).removeprefix('torch.')}", ORDER)
        assert not freed, (
            f"P_a over {world_size} ranks: after backward {freed} of the parts that place= gave have no memory on rank "
            f"{rank}. {SPENT}"
        )
        assert_gradients(more or {}, once_more(plainly, 0) if more else {}, f"P_a over {world_size} ranks, "
                         f"rank {rank}, backward(retain_graph=True), then backward()", SPENT)
        assert_lots(lots, 0, f"P_a over three ranks, or the last two, rank {rank}")


def messages_of_a_step(assignment):
    """Bytes that this rank sends in the second step: in forward, in backward; the same with integers among the
    arguments, and with one in bf16. The bytes of the integers."""
    group = dist.group.WORLD
    model, x = toys.build(functools.partial(Tower, MANY), dist.get_rank()), batch_of(dist.get_rank())
    index = torch.arange(NUMBERS)
    alike([*model.parameters(), x])
    call = functools.partial(assignment.checkpoint, group=group)
    found = []
    again = functools.partial(model, x, call)  # the first pass of a block compares checksums, too
    for forward_of in (again, again, lambda: call(with_integers, x.detach().requires_grad_(), index),
                       lambda: call(torch.tanh, x.detach().bfloat16().requires_grad_())):
        with checks.Calls() as forward:
            output = forward_of()
        with checks.Calls() as backward:
            output.float().square().mean().backward()
        found.append((forward.sent(), backward.sent()))
    with checks.Calls() as many:
        for _ in range(100):
            call(torch.tanh, x[0, 0].clone().requires_grad_()).sum().backward()
    return found[1:], index.nbytes, sum(made.name == "barrier" for made in many.made)


def with_integers(x, index):
    return x * index[: x.numel()].view(x.shape)


@pytest.mark.step(4, points=5, raised=CUT)
def test_one_gather_a_block_and_only_in_backward(assignment):
    world_size = 3
    share = MANY * 4 * part_of(NUMBERS, world_size) * (world_size - 1)
    for rank, (((forward, backward), _, (_, narrow)), _, barriers) in enumerate(
            once(messages_of_a_step, world_size, assignment)):
        assert not barriers, f"rank {rank} of {world_size} called {barriers} barriers in 100 steps: nobody waits here"
        assert forward <= 1024, (
            f"rank {rank} of {world_size} sent {in_words(forward)} in forward. To cut sends nothing: each rank has the "
            "whole input, and takes its part"
        )
        assert backward <= 1.02 * share + 1024, (
            f"rank {rank} of {world_size} sent {in_words(backward)} in backward. {MANY} blocks gather their inputs "
            f"once each: {in_words(share)}, (M−1)/M of the whole. Is it gathered twice, or by an all-reduce of parts "
            "among zeros, which sends twice as much?"
        )
        assert backward >= 0.98 * share, (
            f"rank {rank} of {world_size} sent {in_words(backward)} in backward, and {MANY} blocks cannot be gathered "
            f"with less than {in_words(share)}: the parts of others come from them alone"
        )
        share_of_one = 2 * part_of(BATCH * SEQUENCE * 7, world_size) * (world_size - 1)
        assert narrow <= 1.02 * share_of_one + 1024, (
            f"rank {rank} of {world_size} sent {in_words(narrow)} in backward of a block whose input is in bf16, and "
            f"its parts are {in_words(share_of_one)}: what is gathered has the input's dtype"
        )


@pytest.mark.step(4, points=2, raised=CUT)
def test_integers_stay_whole(assignment):
    for rank, ((_, (_, backward), _), size, _) in enumerate(once(messages_of_a_step, 3, assignment)):
        most = 1.1 * 4 * part_of(BATCH * SEQUENCE * 7, 3) * 2 + 1024
        assert backward <= most, (
            f"rank {rank} of 3 sent {in_words(backward)} in backward of a block that takes {in_words(size)} of "
            f"integers and a small tensor; {in_words(most)} are enough. Only floating-point tensors are cut: "
            "self.describe says which"
        )


GROUP = ("Here group= is a group of ranks 0 and 2 of three, and rank 1 has no part in it: is the group passed to every "
         "call, and is the rank the one in the group, dist.get_rank(group)?")


def in_a_group(assignment):
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    return partitioned_step(assignment.checkpoint, group)


@pytest.mark.step(4, points=3, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_group_of_some_ranks(assignment):
    for place, found in enumerate(once(in_a_group, 3, assignment)):
        if place != 1:
            assert_gradients(found, wanted_step(), f"P_a over a group of ranks 0 and 2 of three, rank {place}", GROUP)


# ------------------------------------------------------------------------------------------- step 5: to host memory


def to_the_host(assignment, cut):
    """Bytes of the copies that were announced, those of them that still live between forward and backward, what lives
    then besides, and how many copies are a block's input itself; the gradients."""
    rank, group = dist.get_rank(), dist.group.WORLD if cut else None
    model, x = toys.build(functools.partial(Tower, MANY), rank), batch_of(rank)
    alike([*model.parameters(), x])
    heard, inputs = [], {}  # weak references keep an address from being used again

    def call(block, x):
        reference = StorageWeakRef(x.untyped_storage())
        inputs[reference.cdata] = reference
        return assignment.checkpoint(block, x, group=group, to_host=True)

    def hear(copy):
        heard.append((copy.nbytes, StorageWeakRef(copy.untyped_storage())))

    with Stock([*model.parameters(), x]) as stock, host.announced(hear):
        output = model(x, call)
        on_host = sum(bytes_behind(reference) for _, reference in heard)
        on_device = stock.alive() - output.nbytes - on_host
        themselves = sum(reference.cdata in inputs for _, reference in heard)
    output.square().mean().backward()
    return [size for size, _ in heard], on_host, on_device, themselves, gradients_of(model)


MANY_COPIES = 200


def many_on_the_host(assignment):
    """How many of many inputs of one size have a wrong gradient, in one backward."""
    inputs = [numbers_of(0, 3).add_(number).requires_grad_() for number in range(MANY_COPIES)]
    sum(assignment.checkpoint(torch.square, x, to_host=True).sum() for x in inputs).backward()
    return sum(not torch.allclose(x.grad, 2 * x.detach()) for x in inputs)


def wanted_on_the_host():
    model = toys.build(functools.partial(Tower, MANY), 0)
    model(batch_of(0), plainly).square().mean().backward()
    return gradients_of(model)


HOST = "to_host gets a tensor, and returns a copy of it in host memory, of the same shape and dtype"


@pytest.mark.step(5, points=4, raised=HOST)
def test_a_copy_goes_to_the_host(assignment):
    for rank, (sizes, on_host, on_device, themselves, _) in enumerate(once(to_the_host, 2, assignment, False)):
        assert sizes, (
            f"rank {rank}: with to_host=True nothing was announced as host memory. On a CPU both are the same memory, "
            "and .to('cpu') returns the tensor itself: make a copy, and tell by announce(copy) that it stands for one "
            "in host memory"
        )
        assert not themselves, (
            f"rank {rank}: what was announced as host memory is a block's input itself, {themselves} times. On a CPU "
            ".to('cpu') copies nothing, and returns the tensor: a copy needs memory of its own, on any device"
        )
        assert len(sizes) == MANY, (
            f"rank {rank}: {MANY} blocks keep one tensor each, and {len(sizes)} copies were announced: each copy once"
        )
        assert on_host >= 0.99 * MANY * WHOLE, (
            f"rank {rank}: between forward and backward {in_words(on_host)} live of what was announced as host memory, "
            f"and the inputs of {MANY} blocks have {in_words(MANY * WHOLE)}: what is announced must be what is kept"
        )
        assert on_device <= WHOLE + MANY * SLACK, (  # the last layer keeps its input, too
            f"rank {rank}: between forward and backward {in_words(on_device)} still live on the device, though the "
            f"inputs of {MANY} blocks are in host memory. Is the copy what is kept, in memory of its own?"
        )


@pytest.mark.step(5, points=2, raised=HOST)
def test_only_the_part_goes_there(assignment):
    share = 4 * part_of(NUMBERS, 2)
    for rank, (sizes, _, on_device, *_) in enumerate(once(to_the_host, 2, assignment, True)):
        assert sum(sizes) <= 1.01 * MANY * share, (
            f"P_a+cpu over 2 ranks: rank {rank} brought {in_words(sum(sizes))} to host memory for {MANY} blocks, and "
            f"its parts are {in_words(MANY * share)}: cut first, and then only the part crosses the bus"
        )
        assert on_device <= WHOLE + MANY * SLACK, (  # the last layer keeps its input, too
            f"P_a+cpu over 2 ranks: between forward and backward {in_words(on_device)} live on rank {rank}'s device "
            "besides: parts and inputs must go when their copy has been made"
        )


OWN = ("a copy keeps its numbers until backward has used it, however many come after it. Is host memory used again "
       "that is still needed?")


@pytest.mark.step(5, points=2, raised=f"{HOST}; {OWN}")
def test_it_comes_back_from_there(assignment):
    for cut in (False, True):
        for rank, (*_, gradients) in enumerate(once(to_the_host, 2, assignment, cut)):
            assert_gradients(gradients, wanted_on_the_host(), f"to_host=True{' over 2 ranks' * cut}, rank {rank}",
                             "Is the copy filled with the tensor's values?")
    wrong, = once(many_on_the_host, 1, assignment)
    assert not wrong, f"of {MANY_COPIES} inputs that were kept at a time, {wrong} have a wrong gradient: {OWN}"
    for size, where in ((1, by_lots), (3, by_lots_in_groups)):
        for rank, lots in enumerate(once(functools.partial(where, to_host=True), size, assignment)):
            assert_lots(lots, 0, f"to_host=True{' and P_a' * (size > 1)}, rank {rank}")


def of_other_dtypes(assignment):
    """dtypes of the arguments in the first run and in the second, and of the copies that were announced."""
    seen, heard = [], []

    def notes(*tensors):
        seen.append([_named(tensor) for tensor in tensors])
        x, index, mask = (tensor.float() for tensor in tensors)
        return x * index * mask

    x = numbers_of(0, 6).to(torch.bfloat16).requires_grad_()
    with host.announced(lambda copy: heard.append(_named(copy))):
        output = assignment.checkpoint(notes, x, torch.arange(6), torch.arange(6) > 2, to_host=True)
    output.sum().backward()
    return *seen[:2], heard


def _named(tensor):
    return str(tensor.dtype).removeprefix("torch.")


@pytest.mark.step(5, points=2, raised=HOST)
def test_a_copy_has_the_tensors_dtype(assignment):
    first, second, heard = once(of_other_dtypes, 1, assignment)[0]
    unheard = [kind for kind in first if kind not in heard]
    assert not heard or not set(heard) < set(first), (
        f"with to_host=True a function that takes tensors of {', '.join(first)} had copies of {', '.join(heard)} "
        f"announced, and none of {', '.join(unheard)}: what is kept goes to host memory whatever it holds, integers "
        "and masks too, and each copy is announced"
    )
    assert sorted(heard) == sorted(first) and second == first, (
        f"with to_host=True a function that takes tensors of {', '.join(first)} had copies of "
        f"{', '.join(heard) or 'nothing'} announced, and got {', '.join(second)} in its second run: is the copy made "
        "with dtype= of the tensor? (float32 is the default: twice the memory of bfloat16, and no index or mask)"
    )


# --------------------------------------------------------------- all steps: what the kernel counts, at a plain size

TALL, BROAD = 16, 256
EACH = 4 * 8 * 256 * BROAD  # bytes of a block's input, 2.1 MB


def a_large_step(assignment):
    """The loss of a step of a tall model with P_a."""
    rank = dist.get_rank()
    model, x = toys.build(functools.partial(Tower, TALL, 0.0, BROAD, BROAD), rank), numbers_of(rank, 8, 256, 7)
    alike([*model.parameters(), x])
    assignment.checkpoint_blocks(model, group=dist.group.WORLD)
    loss = model(x, lambda block, x: block(x)).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.thorough
@pytest.mark.step(4, points=0, raised=CUT)
def test_the_kernel_counts_parts(assignment):
    losses, accounts = toys.run_counted(a_large_step, 4, assignment)
    wanted = toys.build(functools.partial(Tower, TALL, 0.0, BROAD, BROAD), 0)(numbers_of(0, 8, 256, 7), plainly)
    for rank, loss in enumerate(losses):
        assert loss == pytest.approx(wanted.square().mean().item(), rel=1e-4), f"rank {rank} has another loss"
    model = 2 * TALL * 4 * 2 * BROAD * (BROAD + 1)  # parameters and gradients
    needed, room = model + TALL * EACH / 4, 7 * EACH + 6e6
    for rank, account in enumerate(accounts):
        assert account.held is None or account.held <= needed + room, (
            f"a model of {TALL} blocks with inputs of {in_words(EACH)} on 4 ranks: rank {rank} holds up to "
            f"{in_words(account.held)}, as the kernel counts, and parameters, gradients and parts are "
            f"{in_words(needed)}, the inside of a block {in_words(room)} at most: copies of something live there"
        )
    if accounts and accounts[0].sent is not None:
        sent, least = sum(account.sent for account in accounts), 3 * TALL * EACH  # each part goes to three others
        assert 0.98 * least <= sent <= 1.6 * least, (  # with the parameters, which the test itself makes alike
            f"{TALL} blocks with inputs of {in_words(EACH)} on 4 ranks: together they sent {in_words(sent)}, as the "
            f"kernel counts, and to gather each input once is {in_words(least)}"
        )
