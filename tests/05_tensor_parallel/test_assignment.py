"""Lesson 5's assignment, tensor parallelism, in steps: what is computed, owned and sent, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.

All numbers have mixed signs: with positive ones alone a split before a non-linearity would often be right.
"""

import functools
import itertools
import math
import random
from dataclasses import replace

import checks
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from checks import once
from cut import is_cut, part_of
from stock import Stock
from torch import nn

from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.workload.model import GPT, MLP, Attention, GPTConfig

worlds = pytest.mark.parametrize("world_size", (2, 3))
CONFIG = GPTConfig(layers=2, hidden=12, heads=6, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)
DROPOUT = replace(CONFIG, dropout=0.3)
FEW = 2, 5  # tokens: 4 ranks have 1, 1, none and none of them; 2, 2, 1 and none
EACH = 4  # bytes of a number

GROUP = "here ranks 0 and 2 of 3 are the group: is `group` passed on to every collective, rank and number of ranks?"
SAME = "all ranks of the group must start the same all-reduces in the same order"

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ numbers, and parts


def drawn(rank, number, *shape):
    """Random numbers of a rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(toys.seed(rank, number)))


def shared(number, *shape):
    """In a rank: rank 0's, which the test can compute too."""
    tensor = drawn(dist.get_rank(), number, *shape)
    dist.broadcast(tensor, 0)
    return tensor


def tokens_of(rank, vocabulary=toys.VOCABULARY, batch=3):
    return toys.tokens(rank, 0, batch=batch, vocabulary=vocabulary)


def shared_tokens(vocabulary=toys.VOCABULARY):
    inputs, targets = tokens_of(dist.get_rank(), vocabulary)
    for tensor in (inputs, targets):
        dist.broadcast(tensor, 0)
    return inputs, targets


def lively(make, rank, scale=0.3):
    """A module of one process whose weights, biases and norms are all far from where they start: each one matters."""
    module = make()
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.copy_(scale * drawn(rank, 500 + number, *param.shape))
        for norm in (part for part in module.modules() if isinstance(part, nn.LayerNorm)):
            norm.weight += 1.0
    return module


def filled(module, make, group=None, scale=0.3):
    """In a rank: the parallel module with this rank's parts of rank 0's lively one. Parts are cut here, not by the
    file."""
    whole = dict(lively(make, dist.get_rank(), scale).named_parameters())
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for name, param in module.named_parameters():
        dist.broadcast(whole[name].data, 0)
        param.data = part_of(name, whole[name].detach(), ranks, rank).clone()
    return module


class Phases:
    """Counts what this rank asks for in each phase: {phase: (collectives, bytes that a ring sends for them)}."""

    def __init__(self):
        self.found = {}

    def __call__(self, phase, function, *args):
        """function(*args), counted."""
        with TrafficMeter() as meter, checks.Calls() as made:
            result = function(*args)
        barriers = sum(call.name == "barrier" for call in made.made)
        calls = {name: count["calls"] for name, count in meter.collectives.items()}
        # the two halves of an all-reduce are one
        number = sum(calls.values()) - min(calls.get("reduce_scatter", 0), calls.get("all_gather", 0))
        number = (0 if set(calls) == {"send"} else number) + barriers
        self.found[phase] = number, meter.sent_bytes, calls | ({"barrier": barriers} if barriers else {})
        return result


def backward(*ends):
    """Backward from results, each with its gradient behind it, if there is a way."""
    pairs = [pair for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def gradients_of(module):
    return {name: param.grad for name, param in module.named_parameters()}


# ------------------------------------------------------------------------------------------------------------- words


def near(one, other, rtol=1e-4, scale=None):
    """Equal up to the rounding of some hundred operations; `scale` is the size of its numbers, if not `other`'s."""
    if one is None or one.shape != other.shape:
        return False
    scale = other.abs().max().item() if scale is None else scale
    return bool(((one - other).abs() <= rtol * (other.abs() + 0.1 * scale) + 1e-9).all())


def off_by(one, other):
    """12%: how far a tensor is from the right one, as a share of its size."""
    share = ((one - other).norm() / other.norm().clamp(min=1e-12)).item()
    return "NaN" if share != share else f"{share:.0%}" if share >= 0.01 else f"{share:.2g} times"


def factor(one, other):
    """The number that `other` was multiplied with, if it was, else None."""
    ratio = ((one * other).sum() / other.square().sum()).item()
    return ratio if near(one, ratio * other) else None


def words_for(gradients, wanted, rank, ranks, added=True):
    """What a wrong gradient looks like, from those of all ranks."""
    ours = gradients[rank]
    if ours is None:
        return "there is none: the way back ends in between (a collective inside of no autograd function has none)"
    if ours.shape != wanted.shape:
        return f"it has the shape {tuple(ours.shape)}, and {tuple(wanted.shape)} is right"
    found = factor(ours, wanted)
    if found is not None and abs(found) > 1e-3:
        return f"it is {found:.3g} times the right one"
    if added and all(near(one, one) for one in gradients) and near(sum(gradients), wanted, 1e-3):
        return f"it is only a part: those of the {ranks} ranks add up to the right one, and nobody has added them"
    return f"it is off by {off_by(ours, wanted)} of its size"


def assert_messages(found, wanted, ranks, what, rank=0):
    """wanted: {phase: (number of all-reduces, of how many bytes altogether)}."""
    for phase, (number, size) in wanted.items():
        calls, sent, names = found[phase]
        most, least = 2 * size * (ranks - 1) / ranks, f"{count(number)} of {size} bytes together"
        made = ", ".join(f"{times} {name}" for name, times in names.items()) or "no collective"
        told = f"rank {rank} of {ranks} made {made} in the {phase} of {what}, for which a ring sends {sent:.0f} bytes"
        if not number:
            assert not calls and not sent, f"{told}: there is nothing to send here. Which of f and g sends in {phase}?"
            continue
        assert sent >= 0.98 * most - 16, (
            f"{told}, and {most:.0f} are right, for {least}: something is not added up. Which of f and g sends in "
            f"{phase}?")
        assert sent <= 1.02 * most + 64 * ranks * number, (
            f"{told}. {most:.0f} bytes are enough, for {least}: what else travels?")
        assert calls <= number, f"{told}: {least} are enough"


def count(number):
    return f"{number} all-reduce{'s' * (number != 1)}"


# ------------------------------------------------------------------------------ step 1: f and g, the ends of the region

SHAPE = (3, 5, 7)


def ends(file, members=None):
    """What f and g make of a rank's own numbers, and of gradients: {"f": …, "g": …}; None for who is in no group."""
    rank = dist.get_rank()
    group = dist.new_group(members) if members else None
    if members and rank not in members:
        return None
    return {name: _end(getattr(file, name), rank, group) for name in ("f", "g")}


def _end(end, rank, group):
    x = drawn(rank, 1, *SHAPE).requires_grad_()
    phases, gradient = Phases(), drawn(rank, 2, 5, 3, 7)
    y = phases("forward", end, x.transpose(0, 1), group)  # its rows do not lie in order
    assert isinstance(y, torch.Tensor), f"f and g return a tensor, and one of them returns {type(y).__name__}"
    value, kept = y.detach().clone(), torch.equal(x.detach(), drawn(rank, 1, *SHAPE))
    same = y.data_ptr() == x.data_ptr()
    phases("backward", backward, y, gradient)
    found = dict(value=value, kept=kept, same=same, gradient=x.grad, phases=phases.found,
                 gradient_kept=torch.equal(gradient, drawn(rank, 2, 5, 3, 7)))
    y.detach().zero_()
    found["apart"] = torch.equal(x.detach(), drawn(rank, 1, *SHAPE))
    x = drawn(rank, 1, *SHAPE)  # as in an evaluation, and its rows lie in order
    y = end(x, group)
    found["plain_kept"] = torch.equal(x, drawn(rank, 1, *SHAPE))
    before = y.clone()
    end(drawn(rank, 2, *SHAPE), group)  # another x, of this shape
    found["result_kept"] = torch.equal(y, before)
    y.detach().zero_()
    found["plain_apart"] = torch.equal(x, drawn(rank, 1, *SHAPE))
    phases = Phases()
    y = phases("forward", end, x.bfloat16().requires_grad_(), group)
    phases("backward", backward, y, x.bfloat16())
    found["in bf16"] = phases.found
    with Stock([leaf := x.clone().requires_grad_()]) as stock:
        y = end(leaf * 2, group)
        found["held"] = stock.alive() / y.nbytes
    return found


def assert_end_forward(name, rank, found, parts, where):
    own, total = parts[rank], sum(parts)
    value = found["value"]
    where = f"{name}(x) on rank {rank} of {where}"
    assert found["kept"], (
        f"{name} changed the x that it was given on rank {rank}: a collective that works in place needs a copy to work "
        "on")
    assert found["plain_kept"], (
        f"{name} changed the x that it was given on rank {rank}, a contiguous one that wants no gradient, as in an "
        "evaluation: it needs a copy to work on there, too")
    wanted = own if name == "f" else total
    if near(value, wanted):
        return
    assert name != "f" or not near(value, total), (
        f"{where} is the sum of all ranks' x. f stands where x enters the region, and every rank has the whole x "
        "already: nothing is to be added up in forward there. Have f and g changed places?")
    assert name != "g" or not near(value, own), (
        f"{where} is that rank's own x. g stands where results leave the region: each rank has a part of a sum, and "
        "nobody has added these parts up")
    assert not near(value, total / len(parts)), (
        f"{where} is the mean of all ranks' x: parts of a sum are to be added up (op=\"sum\")")
    pytest.fail(f"{where} is off by {off_by(value, wanted)} of its size; {'x as it is' if name == 'f' else 'the sum'} "
                "is right")


def assert_end_backward(name, rank, found, weights, where):
    own, total = (part.transpose(0, 1) for part in (weights[rank], sum(weights)))
    gradient, wanted = found["gradient"], total if name == "f" else own
    where = f"{name} in backward, on rank {rank} of {where}"
    assert gradient is not None, (
        f"{where}: no gradient comes back to x. A collective is none of autograd's operations: who calls one between x "
        "and the loss must say what its gradient is (torch.autograd.Function)")
    assert found["gradient_kept"], (
        f"{where}: the gradient that came in has been changed in place. Autograd may give the same tensor to others, "
        "too: work on a copy. (If backward calls the other one of f and g: the gradient wants no gradient itself. Does "
        "that one change such an x?)")
    if near(gradient, wanted):
        return
    assert name != "f" or not near(gradient, own), (
        f"{where}: x gets the gradient of this rank's own part of the layer. But every rank used x: its gradient is "
        "that of all their parts together")
    assert name != "g" or not near(gradient, total), (
        f"{where}: the gradients of all ranks are added up. The result that g returned is the same on all ranks, and "
        f"each of them has its gradient already: together they make it {len(weights)} times too large")
    assert not near(gradient, sum(weights).transpose(0, 1) / len(weights)), (
        f"{where}: x gets the mean of the ranks' gradients, and they must be added up (op=\"sum\")")
    pytest.fail(f"{where}: the gradient of x is off by {off_by(gradient, wanted)} of its size; "
                f"{'the sum of all ranks' if name == 'f' else 'the one that came in'} is right")


def own_numbers(ranks, number, *shape):
    return [drawn(rank, number, *shape) for rank in ranks]


@pytest.mark.step(1, points=6, stuck=SAME)
@pytest.mark.parametrize("world_size", (2, 3, 1))
def test_values_pass_f_and_g(assignment, world_size):
    parts = [part.transpose(0, 1) for part in own_numbers(range(world_size), 1, *SHAPE)]
    ranks = once(ends, world_size, assignment)
    for name in ("f", "g"):
        for rank, found in enumerate(ranks):
            assert_end_forward(name, rank, found[name], parts, world_size)
    for rank, found in enumerate(ranks):
        for kept, words in (("apart", ""), ("plain_apart", " (here x is contiguous, and wants no gradient)")):
            assert found["g"][kept], (
                f"rank {rank} of {world_size}: the result of g lies in the memory of its x{words}: who changes it "
                "changes x. It is in memory of its own at every M, also at 1")
        assert found["g"]["result_kept"], (
            f"rank {rank} of {world_size}: g was called twice, with two x of one shape that want no gradient, and the "
            "second call changed the result of the first one: each result is in memory of its own")


@pytest.mark.step(1, points=1, stuck=SAME)
def test_f_copies_nothing(assignment):
    for rank, found in enumerate(once(ends, 3, assignment)):
        assert found["f"]["same"], (
            f"rank {rank} of 3: f gave a copy of x. It gives x as it is: a copy takes time, and b·s·h numbers of "
            "memory in each region")
        for name in ("f", "g"):
            assert found[name]["held"] < 1.5, (
                f"rank {rank} of 3: between forward and backward {found[name]['held']:.1f} times the memory of its "
                f"result lives because of {name}, whose x nobody else keeps. What does it save for backward, and what "
                "of that does backward need?")


@pytest.mark.step(1, points=10, stuck=SAME)
@worlds
def test_gradients_pass_f_and_g(assignment, world_size):
    weights = own_numbers(range(world_size), 2, 5, 3, 7)
    for name in ("f", "g"):
        for rank, found in enumerate(once(ends, world_size, assignment)):
            assert_end_backward(name, rank, found[name], weights, world_size)


@pytest.mark.step(1, points=5, stuck=SAME)
def test_f_and_g_send_one_all_reduce_each(assignment):
    for rank, found in enumerate(once(ends, 3, assignment)):
        for name, busy in (("f", "backward"), ("g", "forward")):
            for phases, each, dtype in (("phases", EACH, ""), ("in bf16", 2, ", in bf16 (2 bytes a number)")):
                sizes = (1, each * math.prod(SHAPE))
                wanted = {phase: sizes if phase == busy else (0, 0) for phase in ("forward", "backward")}
                assert_messages(found[name][phases], wanted, 3, f"{name} alone{dtype}", rank)


MANY = list(itertools.product(  # (shape, dtype, end, group): two groups in turn
    ((), (1,), (0, 3), (5, 7)), (torch.float32, torch.float64, torch.bfloat16, torch.float16), ("f", "g"),
    ((0, 1, 2), (1, 2))))


MORE = 0, 1000, 2000, 3000  # of x, the gradients of two results, and that of what goes past them


def whole_numbers(rank, number, shape, dtype):
    """Sums of these are exact in each dtype, and in no narrower one than fp64 if it is that."""
    return ((4 * drawn(rank, number, *shape)).round().double() + (2**-40 if dtype == torch.float64 else 0)).to(dtype)


def many_ends(file):
    """{number: [results, gradient of x, x afterwards, gradients that came, afterwards]} of many x that are under way
    together, and how many barriers there were. Each goes through two ends, and past them."""
    rank, groups, begun = dist.get_rank(), {(0, 1, 2): None, (1, 2): dist.new_group([1, 2])}, {}
    with checks.Calls() as calls:
        for number, (shape, dtype, name, members) in enumerate(MANY):
            if rank in members:
                x, *gradients = (whole_numbers(rank, number + more, shape, dtype) for more in MORE)
                inside, end = x.requires_grad_() * 1, getattr(file, name)
                begun[number] = x, [end(inside, groups[members]), end(inside, groups[members]), inside], gradients
        for _, results, gradients in begun.values():
            backward(*itertools.chain(*zip(results, gradients, strict=True)))
    return {number: [*(y.detach() for y in results[:2]), x.grad, x.detach(), *gradients]
            for number, (x, results, gradients) in begun.items()}, sum(call.name == "barrier" for call in calls.made)


PAST = ("gradient of x, which went through two {0} and also past them, as by a skip connection (only what comes to a "
        "result of {0} is its matter: a hook on x itself sees all that comes to x)")
CAME = [f"gradient {number} that came, afterwards," for number in (1, 2, 3)]


def assert_many_ends(ranks):
    for rank, (found, barriers) in enumerate(ranks):
        assert not barriers, f"f and g were called {len(found)} times each way on rank {rank}, with {barriers} barriers"
        for number, ours in found.items():
            shape, dtype, name, members = MANY[number]
            x, *gradients = ([whole_numbers(member, number + more, shape, dtype) for member in members]
                             for more in MORE)
            own = members.index(rank)
            first, second, past = came = [gradient[own] for gradient in gradients]
            value, back = (x[own], sum(gradients[0]) + sum(gradients[1])) if name == "f" else (sum(x), first + second)
            names = "first result", "second result", PAST.format(name), "x afterwards", *CAME
            for what, one, right in zip(names, ours, [value, value, back + past, x[own], *came], strict=True):
                assert one is not None and one.dtype == dtype and torch.equal(one, right), (
                    f"{name} of x {list(shape)} in {dtype}, on rank {rank} in the group of ranks {members}, where many "
                    f"x of two groups are under way: the {what} is not right: {one}, and not {right}")


@pytest.mark.step(1, points=3, stuck=GROUP, left=GROUP, raised=GROUP)
def test_f_and_g_in_a_group(assignment):
    members = (0, 2)
    ranks = toys.run(ends, 3, assignment, members)
    parts = [part.transpose(0, 1) for part in own_numbers(members, 1, *SHAPE)]
    weights = own_numbers(members, 2, 5, 3, 7)
    for place, member in enumerate(members):
        for name in ("f", "g"):
            assert_end_forward(name, place, ranks[member][name], parts, GROUP)
            assert_end_backward(name, place, ranks[member][name], weights, GROUP)
    assert_many_ends(toys.run(many_ends, 3, assignment))


# ------------------------------------------------------------------------------- step 2: linear layers, cut in two ways

INPUTS, OUTPUTS = 6, 24


def parts_of_layers(file):
    """{name: (this rank's part of shared numbers, numbers in its storage, bytes in the layer)} by the layers' cut; what
    a seed gives; bytes that live because of the two layers, and those of their parameters; what shard() refuses."""
    torch.manual_seed(3)
    before = checks.live_bytes()
    column, row = file.ColumnParallelLinear(INPUTS, OUTPUTS), file.RowParallelLinear(OUTPUTS, INPUTS)
    own = sum(param.nbytes for layer in (column, row) for param in layer.parameters())
    held, found = checks.live_bytes(until=before + own, looks=3) - before, {}
    for number, (name, layer, kind, *shape) in enumerate(LAYERS):
        layer = {"column": column, "row": row}[layer]
        part = layer.cut(kind, shared(10 + number, *shape))
        found[name] = part, part.untyped_storage().nbytes() // EACH, getattr(layer, kind).untyped_storage().nbytes()
    return found, column.weight.detach(), shards(file, 1), held, own, refuses(file, 7)


def refuses(file, size, **blocks):
    """Whether shard() says by a ValueError that so many rows, and so many columns, cannot be cut."""
    for dim in (0, 1):
        try:
            file.shard(torch.zeros(size, 3).transpose(0, dim), dim, **blocks)
        except Exception as error:
            if isinstance(error, ValueError):
                continue
        return False
    return True


def wholes(ranks, blocks):
    """Tensors to cut: [(tensor, dim)]; their rows lie in order, or not."""
    for dtype, dim, turned in itertools.product((torch.float64, torch.bfloat16, torch.int64), range(3), (False, True)):
        shape = [2, 3, 5]
        shape[dim] = 2 * blocks * ranks
        whole = torch.arange(math.prod(shape)).to(dtype).view(shape) + (2**-40 if dtype == torch.float64 else 0)
        yield whole.mT.contiguous().mT if turned else whole, dim


def shards(file, blocks):
    return [file.shard(whole, dim, blocks=blocks).contiguous() for whole, dim in wholes(dist.get_world_size(), blocks)]


def assert_shards(parts, rank, world_size, blocks):
    for part, (whole, dim) in zip(parts, wholes(world_size, blocks), strict=True):
        wanted = torch.cat([block.chunk(world_size, dim)[rank] for block in whole.chunk(blocks, dim)], dim)
        assert part.dtype == whole.dtype and torch.equal(part, wanted), (
            f"shard() of a tensor {list(whole.shape)} in {whole.dtype}, dim {dim}, blocks {blocks}, on rank {rank} of "
            f"{world_size}: it gives {part.dtype} {list(part.shape)}, with other numbers than the "
            f"{ordinal(rank)} part of each block, {list(wanted.shape)}")


LAYERS = (("ColumnParallelLinear's weight", "column", "weight", OUTPUTS, INPUTS),
          ("ColumnParallelLinear's bias", "column", "bias", OUTPUTS),
          ("RowParallelLinear's weight", "row", "weight", INPUTS, OUTPUTS),
          ("RowParallelLinear's bias", "row", "bias", INPUTS))
CUT_AT = (0, 0, 1, None)


@pytest.mark.step(2, points=5, raised="`cut` gets weights and biases, and a bias has one dimension: is `name` cut at "
                  "all, and where?")
@worlds
def test_a_rank_owns_its_part_of_a_layer(assignment, world_size):
    ranks = once(parts_of_layers, world_size, assignment)
    for number, ((name, _, _, *shape), dim) in enumerate(zip(LAYERS, CUT_AT, strict=True)):
        whole = drawn(0, 10 + number, *shape)
        for rank, (found, *_) in enumerate(ranks):
            part = found[name][0]
            wanted = whole if dim is None else whole.chunk(world_size, dim)[rank]
            assert dim is not None or part.shape == wanted.shape, (
                f"{name}, {tuple(shape)} as a whole: cut() gives rank {rank} of {world_size} a part of "
                f"{tuple(part.shape)}. To which result is this bias added, and who has that result?")
            assert part.shape == wanted.shape, (
                f"{name}, {tuple(shape)} as a whole: cut() gives rank {rank} of {world_size} a part of "
                f"{tuple(part.shape)}, and {tuple(wanted.shape)} is right. Which of the numbers of a weight's shape "
                "stands for outputs?")
            assert torch.equal(part, wanted), (
                f"{name}: the part of rank {rank} of {world_size} has other numbers than the {ordinal(rank)} of "
                f"{world_size} equal parts" + same_part(ranks, name, rank))
    for rank, (_, _, parts, *_) in enumerate(ranks):
        assert_shards(parts, rank, world_size, 1)
    assert not torch.equal(ranks[0][1], ranks[1][1]), (
        "a new ColumnParallelLinear has the same weight on ranks 0 and 1: each rank must draw the whole weight "
        "(random_weight) and take its own part, else the layer has one half twice")


def ordinal(rank):
    return ("first", "second", "third", "fourth")[rank]


def same_part(ranks, name, rank):
    same = [other for other, (found, *_) in enumerate(ranks) if other != rank
            and torch.equal(found[name][0], ranks[rank][0][name][0])]
    return f": it is the same as on rank {same[0]}" if same else ""


def layers(file):
    """Values and gradients of the layers alone and of the MLP; {phase: traffic} of the MLP; and a group's MLP."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    phases, found = Phases(), {}
    mlp = filled(file.ParallelMLP(CONFIG), lambda: MLP(CONFIG))
    hidden = CONFIG.hidden
    inside = part_of("expansion", shared(20, 4 * hidden, 3, 5).contiguous(), ranks, rank).permute(1, 2, 0)
    with torch.no_grad():
        found["column"] = mlp.expansion(shared(21, 3, 5, hidden))
        found["row"] = mlp.projection(inside)
    x, gradient = shared(21, 3, 5, hidden).requires_grad_(), shared(22, 3, 5, hidden)
    y = phases("forward", mlp, x)
    phases("backward", backward, y, gradient)
    found |= {"y": y.detach(), "x": x.grad, "gradients": gradients_of(mlp)}
    return found, phases.found


def plain_layers():
    mlp, hidden = lively(lambda: MLP(CONFIG), 0), CONFIG.hidden
    x = drawn(0, 21, 3, 5, hidden).requires_grad_()
    with torch.no_grad():
        column = mlp.expansion(x)
        row = mlp.projection(drawn(0, 20, 4 * hidden, 3, 5).permute(1, 2, 0))
        erf = mlp.projection(F.gelu(column))
    y = mlp(x)
    y.backward(drawn(0, 22, 3, 5, hidden))
    return mlp, {"column": column, "row": row, "erf": erf, "y": y.detach(), "x": x.grad, "gradients": gradients_of(mlp)}


@pytest.mark.step(2, points=7, stuck=SAME)
@worlds
def test_values_of_column_and_row(assignment, world_size):
    mlp, wanted = plain_layers()
    for rank, (found, _) in enumerate(once(layers, world_size, assignment)):
        where = f"on rank {rank} of {world_size}"
        part, bias = wanted["column"].chunk(world_size, -1)[rank], mlp.projection.bias.detach().expand(3, 5, -1)
        own_bias = mlp.expansion.bias.detach().chunk(world_size)[rank].expand(3, 5, -1)
        if found["column"].shape == part.shape and near(part - found["column"], own_bias):
            pytest.fail(f"ColumnParallelLinear {where}: the result lacks the bias")
        assert_value(found["column"], part, f"ColumnParallelLinear {where}: its part of the layer's outputs")
        row = found["row"]
        if row.shape == wanted["row"].shape and near(row - wanted["row"], (world_size - 1) * bias):
            pytest.fail(f"RowParallelLinear {where}: the result is too large by {world_size - 1} times the bias. Each "
                        f"of {world_size} ranks has added it to its part, and then the parts were added up")
        if row.shape == wanted["row"].shape and near(row - wanted["row"], -bias):
            pytest.fail(f"RowParallelLinear {where}: the result lacks the bias")
        assert_value(row, wanted["row"], f"RowParallelLinear {where}: the whole layer's outputs, which it gives,")
        assert not near(found["y"], wanted["erf"]), (
            f"ParallelMLP {where} uses GELU as it is, and MLP its approximation, approximate=\"tanh\"")
        assert near(found["y"], wanted["y"]), (
            f"ParallelMLP {where}: both layers alone are right, and the MLP's output is off by "
            f"{off_by(found['y'], wanted['y'])} of its size. GELU(a + b) is not GELU(a) + GELU(b): what does GELU need "
            "to be there?")


def assert_value(value, wanted, what):
    assert value.shape == wanted.shape, f"{what} has the shape {tuple(value.shape)}, and {tuple(wanted.shape)} is right"
    assert near(value, wanted), f"{what} is off by {off_by(value, wanted)} of its size"


# from the loss to the first layer, as backward goes
MLP_WAY = ("projection.bias", "projection.weight", "expansion.bias", "expansion.weight")


def layer_by_lot(mlp, lot, numbers, own=lambda tensor: tensor):
    """What a layer, or all of this MLP, gives of x [..., inputs]; the gradient of x, which goes past it, too; and those
    of parameters. Shape and layout are drawn by lot. own(tensor): this rank's part of what is [..., 4 * hidden]."""
    lots, hidden = random.Random(lot), CONFIG.hidden
    shape = [lots.randrange(1, 4) for _ in range(lot % 4)]
    name, inputs, outputs = lots.choice((("expansion", hidden, 4 * hidden), ("projection", 4 * hidden, hidden),
                                         ("", hidden, hidden)))
    x, past = (own(numbers(number + lot, inputs, *shape).permute(*range(len(shape), -1, -1))) for number in (100, 200))
    x = (x if lots.random() < 0.5 else x.contiguous()).requires_grad_()
    gradient, inside = own(numbers(300 + lot, *reversed(shape), outputs)), x * 1
    mlp.zero_grad()
    y = mlp.get_submodule(name)(inside)
    backward(y, gradient, inside, past)
    given = {param: grad for param, grad in gradients_of(mlp).items() if grad is not None}
    return name, list(x.shape), y.detach(), x.grad, {param: grad.clone() for param, grad in given.items()}


def layers_by_lot(file):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mlp = filled(file.ParallelMLP(CONFIG), lambda: MLP(CONFIG))
    return [layer_by_lot(mlp, lot, shared, functools.partial(own_part, ranks=ranks, rank=rank)) for lot in LOTS]


def own_part(tensor, ranks, rank):
    return tensor.chunk(ranks, -1)[rank] if tensor.shape[-1] == 4 * CONFIG.hidden else tensor


LOTS = range(16)
LAYER = {"expansion": "ColumnParallelLinear", "projection": "RowParallelLinear", "": "ParallelMLP"}


def assert_layers_by_lot(ranks):
    mlp, size = lively(lambda: MLP(CONFIG), 0), len(ranks)
    for lot in LOTS:
        _, _, *wanted, gradients = layer_by_lot(mlp, lot, functools.partial(drawn, 0))
        for rank, found in enumerate(ranks):
            name, shape, *ours, given = found[lot]
            where = f"{LAYER[name]} of x {shape} on rank {rank} of {size}"
            right = [own_part(tensor, size, rank) for tensor in wanted]
            assert_value(ours[0], right[0], f"{where}: its result")
            assert ours[1].shape == right[1].shape and near(ours[1], right[1], 1e-3), (
                f"{where}: x also goes past the layer, as by a skip connection, and its gradient is off by "
                f"{off_by(ours[1], right[1])} of its size. Only what comes through the layer is added up over ranks: "
                "what else is?")
            for param, gradient in gradients.items():
                assert near(given.get(param), part_of(param, gradient, size, rank), 1e-3), (
                    f"{where}: the gradient of {param} is not right, and in the MLP alone with x [3, 5, 12] it is")


@pytest.mark.step(2, points=5, stuck=SAME, raised="layers take x [..., inputs], and here it has 1 to 4 dimensions")
@worlds
def test_gradients_of_an_mlp(assignment, world_size):
    _, wanted = plain_layers()
    ranks = [found for found, _ in once(layers, world_size, assignment)]
    assert_gradients([found["gradients"] for found in ranks], wanted["gradients"], MLP_WAY, "the MLP")
    for rank in range(world_size):
        gradients = [found["x"] for found in ranks]
        assert near(gradients[rank], wanted["x"]), (
            f"the MLP's input x, on rank {rank} of {world_size}: its gradient is wrong, and those of all layers are "
            f"right: {words_for(gradients, wanted['x'], rank, world_size)}. What stands between x and the first layer?")
    assert_layers_by_lot(toys.run(layers_by_lot, world_size, assignment))


def assert_gradients(of_ranks, whole, way, what):
    """`way`: names of the parameters from the loss on, as backward passes them."""
    ranks, right = len(of_ranks), ""
    wanted = [{name: part_of(name, whole[name], ranks, rank) for name in way} for rank in range(ranks)]
    wrong = {name: [rank for rank in range(ranks) if not near(of_ranks[rank][name], wanted[rank][name], 1e-3)]
             for name in way}
    for name in way:
        if wrong[name]:
            rank, gradients = wrong[name][0], [found[name] for found in of_ranks]
            told = words_for(gradients, wanted[rank][name], rank, ranks, added=not is_cut(name))
            pytest.fail(
                f"gradients of {what} on {ranks} ranks, from the loss backwards: "
                f"{f'right down to {right}, and wrong' if right else 'wrong'} from {name} on (on rank {rank} "
                f"{told}). {sum(map(bool, wrong.values()))} of {len(way)} are wrong. To look at: what does backward "
                f"pass {'between these two' if right else 'before it comes there'}?")
        right = name


@pytest.mark.step(2, points=3, stuck=SAME)
@worlds
def test_an_mlp_sends_two_all_reduces(assignment, world_size):
    size = EACH * 3 * 5 * CONFIG.hidden
    for rank, (_, phases) in enumerate(once(layers, world_size, assignment)):
        assert_messages(phases, {"forward": (1, size), "backward": (1, size)}, world_size, "an MLP", rank)


def alone(file):
    """A tensor, after what shard() made of it on one rank was changed."""
    whole = torch.zeros(4, 3)
    file.shard(whole, 0).add_(1)
    return whole


@pytest.mark.step(2, points=3)
@worlds
def test_nobody_holds_the_whole_layer(assignment, world_size):
    ranks = once(parts_of_layers, world_size, assignment)
    for (name, _, _, *shape), dim in zip(LAYERS, CUT_AT, strict=True):
        wanted = math.prod(shape) // (1 if dim is None else world_size)
        for rank, (found, *_) in enumerate(ranks):
            _, held, in_layer = found[name]
            assert dim is None or held <= wanted, (
                f"{name}: the part of rank {rank} has {wanted} numbers, and keeps a memory of {held}: it is a "
                "view of the whole, which stays as long as the view does")
            assert in_layer <= EACH * wanted, (
                f"{name}: rank {rank} of {world_size} owns {in_layer} bytes, and its part has {EACH * wanted}")
    for rank, (*_, held, own, _) in enumerate(ranks):
        assert held <= 1.2 * own, (
            f"two layers, of which rank {rank} of {world_size} owns {own} bytes: {held} bytes live because of them. "
            "Who still holds the whole weights?")
    [whole] = once(alone, 1, assignment)
    assert not whole.any(), (
        "on one rank shard() gave the tensor itself, or a view of it: who changes the part changes the whole. It is in "
        "memory of its own at every M, also at 1")


@pytest.mark.step(2, points=2)
@worlds
def test_unequal_parts_are_refused(assignment, world_size):
    for rank, (*_, refused) in enumerate(once(parts_of_layers, world_size, assignment)):
        assert refused, (
            f"7 rows cannot be cut into {world_size} equal parts, and on rank {rank} shard() said nothing: a "
            "ValueError must say so")


# ------------------------------------------------------------------------------------------ step 3: attention by heads


def attended(file):
    attention = file.ParallelAttention(CONFIG)
    parts = {name: attention.query_key_value.cut(name, shared(30, *shape))
             for name, shape in (("weight", (3 * CONFIG.hidden, CONFIG.hidden)), ("bias", (3 * CONFIG.hidden,)))}
    attention = filled(attention, lambda: Attention(CONFIG))
    x, gradient = shared(31, 3, 9, CONFIG.hidden).requires_grad_(), shared(32, 3, 9, CONFIG.hidden)
    phases = Phases()
    y = phases("forward", attention, x)
    phases("backward", backward, y, gradient)
    return {"y": y.detach(), "x": x.grad, "gradients": gradients_of(attention), "parts": parts, "phases": phases.found,
            "shards": shards(file, 3),
            "refused": refuses(file, 5 * dist.get_world_size(), blocks=dist.get_world_size())}


def plain_attention():
    attention = lively(lambda: Attention(CONFIG), 0)
    x = drawn(0, 31, 3, 9, CONFIG.hidden).requires_grad_()
    y = attention(x)
    y.backward(drawn(0, 32, 3, 9, CONFIG.hidden))
    return {"y": y.detach(), "x": x.grad, "gradients": gradients_of(attention)}


@pytest.mark.step(3, points=4)
@worlds
def test_a_rank_owns_its_heads(assignment, world_size):
    for name, shape in (("weight", (3 * CONFIG.hidden, CONFIG.hidden)), ("bias", (3 * CONFIG.hidden,))):
        whole = drawn(0, 30, *shape)
        for rank, found in enumerate(once(attended, world_size, assignment)):
            part, wanted = found["parts"][name], part_of("query_key_value", whole, world_size, rank)
            assert not torch.equal(part, whole.chunk(world_size)[rank]), (
                f"the {name} of query_key_value on rank {rank} of {world_size} is one piece of the whole. But the rows "
                "of the whole are first all queries, then all keys, then all values: this rank has queries of heads "
                "whose keys are elsewhere. What is `blocks` for?")
            assert part.shape == wanted.shape and torch.equal(part, wanted), (
                f"the {name} of query_key_value on rank {rank} of {world_size}: query, key and value of this rank's "
                f"heads are the {ordinal(rank)} part of each of three blocks, one after the other")
    for rank, found in enumerate(once(attended, world_size, assignment)):
        assert_shards(found["shards"], rank, world_size, 3)


@pytest.mark.step(3, points=1)
@worlds
def test_unequal_blocks_are_refused(assignment, world_size):
    for rank, found in enumerate(once(attended, world_size, assignment)):
        assert found["refused"], (
            f"{5 * world_size} rows are {world_size} blocks of 5, and 5 cannot be cut into {world_size} equal parts. "
            f"On rank {rank} shard(…, blocks={world_size}) raised no ValueError: what must divide the rows?")


@pytest.mark.step(3, points=8, stuck=SAME, raised="this rank has heads / M of the heads, and of each three blocks; how "
                  "wide is one head?")
@worlds
def test_attention_is_that_of_one_process(assignment, world_size):
    wanted = plain_attention()
    ranks = once(attended, world_size, assignment)
    for rank, found in enumerate(ranks):
        y = found["y"]
        assert y.shape == wanted["y"].shape, (
            f"attention on rank {rank} of {world_size} gives {tuple(y.shape)}, and {tuple(wanted['y'].shape)} is right")
        first = ~torch.isclose(y, wanted["y"], rtol=1e-3, atol=1e-4).flatten(2).all(-1).all(0)
        assert near(y, wanted["y"]), (
            f"attention on rank {rank} of {world_size} is not that of one process: off by {off_by(y, wanted['y'])} of "
            f"its size, at {int(first.sum())} of {len(first)} positions. Does each *position* look at itself "
            "and those before it? Has each head its own query, key and value? Do the heads stand side by side in their "
            "order afterwards?")
    assert_gradients([found["gradients"] for found in ranks], wanted["gradients"],
                     ("projection.bias", "projection.weight", "query_key_value.bias", "query_key_value.weight"),
                     "attention")
    gradients = [found["x"] for found in ranks]
    for rank in range(world_size):
        assert near(gradients[rank], wanted["x"], 1e-3), (
            f"the gradient of attention's input on rank {rank} of {world_size} is wrong: "
            f"{words_for(gradients, wanted['x'], rank, world_size)}")


@pytest.mark.step(3, points=7, stuck=SAME)
@worlds
def test_attention_sends_two_all_reduces(assignment, world_size):
    size = EACH * 3 * 9 * CONFIG.hidden
    for rank, found in enumerate(once(attended, world_size, assignment)):
        assert_messages(found["phases"], {"forward": (1, size), "backward": (1, size)}, world_size, "attention", rank)


# ---------------------------------------------------------------- step 4: embedding, and the loss without whole logits


def filled_embedding(file, tokens):
    embedding = file.VocabularyParallelEmbedding(tokens, CONFIG.hidden)
    part = part_of(TOKENS, 0.3 * shared(40, tokens, CONFIG.hidden), dist.get_world_size(), dist.get_rank())
    embedding.weight.data = part.clone()
    return embedding


def looked_up(file):
    """Rows of the parallel embedding, their gradient, and what is sent."""
    embedding, phases = filled_embedding(file, toys.VOCABULARY), Phases()
    inputs, _ = shared_tokens()
    rows = phases("forward", embedding, inputs)
    phases("backward", backward, rows, shared(41, *inputs.shape, CONFIG.hidden))
    return rows.detach(), embedding.weight.grad, phases.found


def vocabulary(file, tokens):
    """Logits and loss of the parallel embedding, their gradients, and what is sent."""
    embedding, found = filled_embedding(file, tokens), {}
    inputs, targets = shared_tokens(tokens)
    for name, (scale, shift) in CASES.items():
        phases, embedding.weight.grad = Phases(), None
        x = (scale * shared(42, *inputs.shape, CONFIG.hidden)).requires_grad_()
        logits = phases("logits", embedding.logits, x)
        given = logits + shift
        before = given.detach().clone()
        loss = phases("forward", embedding.cross_entropy, given, targets)
        found["kept"] = torch.equal(given.detach(), before)
        phases("backward", backward, loss, torch.full_like(loss, SCALE))
        found[name] = logits.detach(), loss.detach(), x.grad, embedding.weight.grad, phases.found
    return found


# {case: (scale of x, added to all logits)}; in fp32 exp(100) is infinite, and exp(-300) is 0
CASES = {"loss": (1.0, 0.0), "large": (60.0, 0.0), "low": (1.0, -300.0)}
TOKENS = "token_embedding.weight"
SCALE = 3.0  # of the loss, before backward


def plain_vocabulary(tokens=toys.VOCABULARY):
    weight, (inputs, targets) = (0.3 * drawn(0, 40, tokens, CONFIG.hidden)).requires_grad_(), tokens_of(0, tokens)
    rows = F.embedding(inputs, weight)
    rows.backward(drawn(0, 41, *inputs.shape, CONFIG.hidden))
    found = {"rows": (rows.detach(), weight.grad)}
    for name, (scale, shift) in CASES.items():
        weight.grad = None
        x = (scale * drawn(0, 42, *inputs.shape, CONFIG.hidden)).requires_grad_()
        logits = F.linear(x, weight) + shift
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (SCALE * loss).backward()
        found[name] = logits.detach(), loss.detach(), x.grad, weight.grad
    return found


SUMS = ("a rank asks for no row that it has not got; what a collective changes in place was detached before; and what "
        "a gradient must pass goes through g")
ROWS = "who has no row of a token adds nothing, and is asked for no row that it has not got"


@pytest.mark.step(4, points=4, stuck=SAME, raised=ROWS)
@worlds
def test_rows_of_the_embedding(assignment, world_size):
    rows, gradient = plain_vocabulary()["rows"]
    for rank, (ours, grown, phases) in enumerate(toys.run(looked_up, world_size, assignment)):
        where = f"on rank {rank} of {world_size}"
        assert ours.shape == rows.shape, f"the embedding {where} gives {tuple(ours.shape)}, not {tuple(rows.shape)}"
        right = torch.isclose(ours, rows, rtol=1e-3, atol=1e-5).all(-1)
        assert right.all(), (
            f"the embedding {where}: rows of {int((~right).sum())} of {right.numel()} tokens are wrong. W{ROWS[1:]}")
        part = part_of(TOKENS, gradient, world_size, rank)
        wrong = (~torch.isclose(grown, part, rtol=1e-3, atol=1e-5).all(-1)).nonzero().flatten().tolist()
        assert near(grown, part), (
            f"the gradient of the embedding's weight {where}: {words_for([grown], part, 0, 1, added=False)}. "
            f"{f'Row {wrong[0]} alone is' if len(wrong) == 1 else f'{len(wrong)} of {len(part)} rows are'} wrong. Only "
            "rows of tokens that were looked up here have one, and all of these")
        size = EACH * rows.numel()
        assert_messages(phases, {"forward": (1, size), "backward": (0, 0)}, world_size, "the embedding", rank)


@pytest.mark.step(4, points=5, stuck=SAME, raised=SUMS)
@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_the_loss_is_that_of_whole_logits(assignment, world_size):
    for tokens in FEW if world_size == 4 else (toys.VOCABULARY,):
        assert_loss(assignment, world_size, tokens)


def assert_loss(assignment, world_size, tokens):
    plain = plain_vocabulary(tokens)
    ranks = once(vocabulary, world_size, assignment, tokens)
    for rank, found in enumerate(ranks):
        _assert_logits(found["loss"][0], plain["loss"][0], rank, world_size)
        assert found["kept"], f"cross_entropy changed the logits that it was given, on rank {rank}: work on a copy"
    for rank, found in enumerate(ranks):
        where = f"on rank {rank} of {world_size}"
        for name in CASES:
            wanted, ours = plain[name], found[name]
            largest = f"logits from {wanted[0].min():.0f} to {wanted[0].max():.0f}"
            assert ours[1].shape == () and ours[1].dtype == torch.float32, (
                f"the loss {where} is {ours[1].dtype} of shape {tuple(ours[1].shape)}: a 0-dim fp32 tensor is right")
            told = f"the loss is {ours[1]:.6g}, and {wanted[1]:.6g} is right"
            look = suspect(ours[1], wanted[0], tokens_of(0, tokens)[1], world_size)
            assert near(ours[1], wanted[1], 1e-4), f"{told}, {where} and with {largest}. {look}"
            other = ranks[0][name][1]
            assert torch.equal(ours[1], other), (
                f"with {largest} the loss is {ours[1]:.9g} {where}, and {other:.9g} on rank 0: the same to the last "
                "digit is right, so all ranks must add in one order")
            gradients = [one[name][2] for one in ranks]
            assert near(gradients[rank], wanted[2], 1e-3), (
                f"the loss {where} is right, with {largest}. The gradient of x, of which the logits are made, is not: "
                f"{words_for(gradients, wanted[2], rank, world_size)}. What does x pass on its way into the logits, "
                "and what do the sums of the loss pass?")
            part = part_of(TOKENS, wanted[3], world_size, rank)
            assert near(ours[3], part, 1e-3, scale=wanted[3].abs().max().item()), (
                f"the loss {where} is right, with {largest}. The gradient of this rank's rows is not: "
                f"{words_for([ours[3]], part, 0, 1, added=False)}")


def suspect(loss, whole, targets, world_size):
    """What a wrong loss came of, from the logits of one process: the mistake that gives just this loss."""
    parts = whole.split(-(-whole.shape[-1] // world_size), -1)
    highest = torch.stack([part.amax(-1) for part in parts], -1)
    each = torch.stack([part.exp().sum(-1) for part in parts], -1)
    target = whole.gather(-1, targets[..., None]).squeeze(-1)
    owner = targets // parts[0].shape[-1]
    units = (each * (-highest).exp()).sum(-1).log() - target + highest.gather(-1, owner[..., None]).squeeze(-1)
    right = whole.logsumexp(-1) - target
    if loss.isnan():
        size, tokens = parts[0].shape[-1], whole.shape[-1]
        if size * world_size == tokens:
            return ("Not a number, and all logits are finite: an infinity comes up on the way. exp() of a large one "
                    "overflows, and log(0) is -inf. What is subtracted before exp(), and is it the highest of "
                    "its token on all ranks?")
        alone = ", and no others, so that its highest is -inf, too" if size * (world_size - 1) >= tokens else ""
        return (f"Not a number. The last rank has logits of -inf, of rows that fill up{alone}. Where does -inf meet "
                "other numbers? A mean or a sum with it is -inf; -inf - -inf is nan, and so is 0 · -inf: a number to "
                "be dropped is replaced (torch.where, masked_fill), not multiplied with 0")
    if loss.isinf():
        happened = "exp() of a logit has overflowed" if loss > 0 else "exp() of every logit was 0, and log(0) is -inf"
        return (f"{happened}. What is subtracted from the logits before exp(), and is it the highest of its token on "
                "all ranks?")
    for words, value in {
        "each rank has subtracted its own highest logit, and exponentials of other units were added up": units.mean(),
        "the target's logit is missing": (right + target).mean(),
        "the target's logit is missing, where the highest was subtracted": (right + target - highest.amax(-1)).mean(),
        "the mean of the ranks' exponentials was taken, and not their sum": (each.mean(-1).log() - target).mean(),
        "the tokens' losses were added up, and their mean is right": right.sum(),
        "the ranks' losses were added up": world_size * right.mean(),
    }.items():
        if near(loss, value, 1e-4):
            return f"Just this comes out if {words}"
    return ("Each rank has some logits of each token, and one rank has the target's: what do the others put in its "
            "place, and which sums are of all ranks?")


def _assert_logits(ours, whole, rank, world_size):
    where = f"on rank {rank} of {world_size}, with {whole.shape[-1]} tokens,"
    size = -(-whole.shape[-1] // world_size)
    wanted = whole[..., rank * size : (rank + 1) * size]
    assert ours.shape == (*whole.shape[:-1], size), (
        f"logits {where} have the shape {tuple(ours.shape)}, not {(*whole.shape[:-1], size)}: one for each row here")
    own, padding = ours[..., : wanted.shape[-1]], ours[..., wanted.shape[-1] :]
    assert not own.numel() or near(own, wanted, scale=whole.abs().max().item()), (
        f"logits {where} are off by {off_by(own, wanted)} of their size")
    assert (padding == -torch.inf).all(), (
        f"{padding.shape[-1]} of the logits {where} belong to rows that fill up the last part, and to no token: as "
        f"{padding.flatten()[0]:.3g} they take part in the loss, and exp(-inf) would be 0")


@pytest.mark.step(4, points=4, stuck=SAME, raised=SUMS)
@worlds
def test_the_loss_sends_three_numbers_a_token(assignment, world_size):
    tokens = tokens_of(0)[0].numel()
    for rank, found in enumerate(once(vocabulary, world_size, assignment, toys.VOCABULARY)):
        phases = found["loss"][-1]
        assert not any(phases["logits"][:2]), (
            f"rank {rank} of {world_size} sends {phases['logits'][1]:.0f} bytes for its logits, or waits for others: "
            "each rank has x whole")
        calls, sent, _ = phases["forward"]
        most = 2 * 3 * EACH * tokens * (world_size - 1) / world_size
        assert sent <= 1.02 * most + 64 * world_size * 3, (
            f"rank {rank} of {world_size} sends {sent:.0f} bytes for the loss of {tokens} tokens, each with "
            f"{toys.VOCABULARY} logits. Three numbers a token are enough, {most:.0f} bytes: what does the loss need to "
            "know of all these logits?")
        assert calls <= 3, f"rank {rank} of {world_size} makes {calls} collectives for the loss: three are enough"
        # backward: what x gets, once
        size = EACH * tokens * CONFIG.hidden
        assert_messages(phases, {"backward": (1, size)}, world_size, "the loss", rank)


def stepped(file, members=None, config=CONFIG, dtype=torch.float32):
    """A step of the whole model: loss, gradients, bytes of each parameter and gradient, what was sent; None for who is
    in no group."""
    group = dist.new_group(members) if members else None
    inputs, targets = shared_tokens()
    whole = lively(lambda: GPT(config), dist.get_rank())
    for param in whole.parameters():
        dist.broadcast(param.data, 0)
    if members and dist.get_rank() not in members:
        return None
    model = file.ParallelGPT(config, group)
    model.load_whole({name: value.detach() for name, value in whole.state_dict().items()})
    model.to(dtype)
    phases = Phases()
    loss = phases("forward", model, inputs, targets)
    phases("backward", backward, loss, torch.ones_like(loss))
    owned = {name: [part.untyped_storage().nbytes() for part in (param.data, param.grad) if part is not None]
             for name, param in model.named_parameters()}
    return {"loss": loss.detach(), "gradients": gradients_of(model), "owned": owned, "phases": phases.found}


def plain_step():
    model = lively(lambda: GPT(CONFIG), 0)
    loss = model(*tokens_of(0))
    loss.backward()
    return loss.detach(), gradients_of(model)


def way_back(config):
    """Names of the GPT's parameters, as backward passes them; the embedding is passed first and last."""
    layers = ("mlp.projection", "mlp.expansion", "mlp_norm", "attention.projection", "attention.query_key_value",
              "attention_norm")
    inside = [f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight")]
    blocks = [f"blocks.{number}.{name}" for number in reversed(range(config.layers)) for name in inside]
    return ["norm.bias", "norm.weight", *blocks, "position_embedding.weight", TOKENS]


def assert_step(ranks, what):
    loss, gradients = plain_step()
    for rank, found in enumerate(ranks):
        assert found["loss"].dtype == torch.float32 and near(found["loss"], loss), (
            f"the loss of {what} on rank {rank} is {found['loss']:.6g}, and in one process it is {loss:.6g}")
    assert_gradients([found["gradients"] for found in ranks], gradients, way_back(CONFIG), what)


@pytest.mark.step(4, points=4, stuck=SAME)
@worlds
def test_all_gradients_are_those_of_one_process(assignment, world_size):
    ranks = once(stepped, world_size, assignment)
    assert_step(ranks, "a GPT")
    for rank, found in enumerate(ranks):
        for name, gradient in found["gradients"].items():
            assert is_cut(name) or torch.equal(gradient, ranks[0]["gradients"][name]), (
                f"{name} is whole on every rank, and its gradient differs between ranks 0 and {rank} in its last bits: "
                "with each step the ranks' models move a little apart")
            wanted = EACH * gradient.numel()
            held = max(found["owned"][name])
            assert held <= wanted, f"rank {rank} owns {held} bytes of {name} or of its gradient; its part has {wanted}"


@pytest.mark.step(4, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_model_in_a_group(assignment):
    members = (0, 2)
    ranks = toys.run(stepped, 3, assignment, members)
    assert_step([ranks[member] for member in members], f"a GPT ({GROUP})")


LOGITS = 10.0, 0.03, 9.0  # each token's highest, that of its target, all others


def logits_for(targets):
    """In bf16, [batch, sequence, vocabulary]."""
    logits = torch.full((*targets.shape, toys.VOCABULARY), LOGITS[2], dtype=torch.bfloat16)
    logits.scatter_(-1, targets.unsqueeze(-1), LOGITS[1])
    return logits.scatter_(-1, (targets.unsqueeze(-1) + 1) % toys.VOCABULARY, LOGITS[0])


def in_sixteen_bits(file):
    """A step of the whole model in bf16; and the loss of logits that are given."""
    found, embedding = stepped(file, dtype=torch.bfloat16), filled_embedding(file, toys.VOCABULARY)
    _, targets = shared_tokens()
    logits, ranks = logits_for(targets), dist.get_world_size()
    padding = ranks * len(embedding.weight) - toys.VOCABULARY
    own = F.pad(logits, (0, padding), value=-math.inf).chunk(ranks, -1)[dist.get_rank()]
    found["given"] = [embedding.cross_entropy(part, targets).detach() for part in (own, own.half())]
    found["wide"] = embedding.cross_entropy(own.double(), targets).detach()
    return found


@pytest.mark.step(4, points=1, stuck=SAME)
def test_a_loss_in_sixteen_bits(assignment):
    loss, _ = plain_step()
    _, targets = tokens_of(0)
    given = F.cross_entropy(logits_for(targets).float().flatten(0, 1), targets.flatten())
    wide = once(stepped, 2, assignment)
    for rank, found in enumerate(toys.run(in_sixteen_bits, 2, assignment)):
        assert found["loss"].dtype == torch.float32, (
            f"with bf16 parameters the loss on rank {rank} is {found['loss'].dtype}: sums of exponentials are made in "
            "fp32")
        assert found["wide"].dtype == torch.float32, (
            f"of logits in fp64 the loss on rank {rank} is {found['wide'].dtype}: it is fp32 whatever they are")
        assert near(found["loss"], loss, 2e-2), (
            f"with bf16 parameters the loss on rank {rank} is {found['loss']:.4g}, and {loss:.4g} in fp32")
        for dtype, ours in zip(("bf16", "fp16"), found["given"], strict=True):
            assert ours.dtype == torch.float32 and near(ours, given, 1e-5), (
                f"of logits in {dtype}, {LOGITS[0]:g} for the highest of each token, {LOGITS[1]:g} for its target and "
                f"{LOGITS[2]:g} for all others, the loss on rank {rank} is {ours:.6g}, and {given:.6g} is right. "
                f"In bf16 {LOGITS[0]:g} - {LOGITS[1]:g} is {LOGITS[0]:g}, and exp(-1) has 3 digits: what is computed "
                "before the logits are fp32?")
        for phase, (_, sent, _) in found["phases"].items():
            most = wide[rank]["phases"][phase][1] / 2 + 3 * EACH * targets.numel() / 2 * (phase == "forward")
            assert sent <= 1.02 * most + 128, (
                f"in {phase} rank {rank} of 2 sends {sent:.0f} bytes for a model in bf16, and {most:.0f} are enough: "
                "half of what it sends in fp32 (but for three fp32 numbers a token, for the loss). f and g send in the "
                "dtype of their x: what is that in each layer, and in the logits? (f(x).float() sends 2 bytes a "
                "number, and f(x.float()) sends 4)")


# ------------------------------------------------------------------------ step 5: random numbers inside and outside


WIDE = replace(DROPOUT, hidden=2 * CONFIG.heads * toys.SEQUENCE)  # a head has room for two numbers a position
TIMES = 400  # regions, one after the other


def dropped(file):
    """Attention whose output is what it did to its probabilities: [batch, position, heads, 2, position looked at].

    Queries and keys are 0: each position looks at itself and those before it alike. Values are one-hot by position,
    twice.
    """
    attention = file.ParallelAttention(WIDE)
    width, heads, rank, ranks = WIDE.hidden, WIDE.heads, dist.get_rank(), dist.get_world_size()
    head = torch.eye(toys.SEQUENCE).repeat(2, 1)  # [2 * position, position]
    value = F.pad(head.repeat(heads // ranks, 1), (0, width - toys.SEQUENCE))
    with torch.no_grad():
        attention.query_key_value.weight.data = torch.cat([torch.zeros(2 * len(value), width), value])
        attention.query_key_value.bias.zero_()
        attention.projection.weight.data = torch.eye(width).chunk(ranks, 1)[rank].clone()
        attention.projection.bias.zero_()
    x, found = torch.eye(toys.SEQUENCE, width).expand(8, -1, -1).contiguous(), {}

    def seen():
        with torch.no_grad():
            return attention(x).unflatten(-1, (heads, 2, toys.SEQUENCE))

    torch.manual_seed(toys.seed(0, 60) if not rank else 0)
    start = torch.get_rng_state()
    dist.broadcast(start, 0)
    torch.set_rng_state(start)
    found["first"], found["second"] = seen(), seen()
    torch.set_rng_state(start)
    found["again"] = seen()
    attention.eval()
    state = torch.get_rng_state()
    found["evaluation"] = seen()
    found["untouched"] = torch.equal(state, torch.get_rng_state())
    attention, state = file.ParallelAttention(CONFIG), torch.get_rng_state()
    attention(x[..., : CONFIG.hidden])
    found["undropped"] = torch.equal(state, torch.get_rng_state())
    return found


@pytest.mark.step(5, points=3, stuck=SAME)
@worlds
def test_ranks_drop_other_values_inside_the_region(assignment, world_size):
    per_rank = CONFIG.heads // world_size
    first, second, again, plain = (once(dropped, world_size, assignment)[0][name]
                                   for name in ("first", "second", "again", "evaluation"))
    assert not near(first, plain), (
        f"with a dropout of {DROPOUT.dropout} attention gives the same in training as in an evaluation: nothing was "
        "dropped")
    for one in range(world_size):
        for other in range(one):
            here, there = (first[:, :, rank * per_rank : (rank + 1) * per_rank] for rank in (one, other))
            assert not torch.equal(here, there), (
                f"heads that compute the same on ranks {other} and {one} come out the same: both ranks dropped the "
                "same values. In one process each head has a mask of its own: each rank must draw other numbers here")
    assert not torch.equal(first, second), (
        "attention was called twice, and dropped the same values both times: the state inside must follow from one "
        "that moves on")
    assert torch.equal(first, again), (
        "attention was called with the same random state outside as before, and dropped other values: recomputation in "
        "backward would not get the masks of forward. What does the state inside start from?")


@pytest.mark.step(5, points=1, stuck=SAME)
def test_without_dropout_nothing_is_drawn(assignment):
    for rank, found in enumerate(once(dropped, 3, assignment)):
        assert found["undropped"], (
            f"with a dropout of 0 attention has drawn random numbers on rank {rank} of 3: nothing is to be dropped, "
            "and who draws next gets other numbers than without it")


@pytest.mark.step(5, points=2, stuck=SAME)
@worlds
def test_dropout_is_that_of_attention(assignment, world_size):
    ranks = once(dropped, world_size, assignment)
    kept = (1 / torch.arange(1, toys.SEQUENCE + 1)).diag() @ torch.ones(toys.SEQUENCE, toys.SEQUENCE).tril()
    for rank, found in enumerate(ranks):
        where = f"on rank {rank} of {world_size}"
        assert near(found["evaluation"][:, :, 0, 0], kept.expand(8, -1, -1)) and near(
            found["evaluation"], found["evaluation"][:, :, :1, :1].expand(found["evaluation"].shape)), (
            f"attention {where} in an evaluation: not each position looks at itself and those before it alike, though "
            "all queries and keys are 0. Nothing may be dropped then, and nothing that comes later is seen")
        assert found["untouched"], f"an evaluation has drawn random numbers {where}: nothing is to be dropped"
    _assert_weights(ranks[0]["first"].transpose(1, 2), kept)
    _assert_masks(ranks[0]["first"].transpose(1, 2)[..., 0, :] == 0, kept > 0, world_size)


def _assert_weights(whole, kept):
    """whole [batch, heads, position, 2, position looked at]; kept: what it is without dropout."""
    seen = f"with a dropout of {DROPOUT.dropout} and heads that look at all positions before them alike"
    assert torch.equal(whole[..., 0, :], whole[..., 1, :]), (
        f"{seen}, two numbers that are the same in every value came out differently: the results of attention were "
        "dropped. `Attention` drops probabilities, before they meet the values")
    found, wanted = whole[..., 0, :], kept / (1 - DROPOUT.dropout)
    off = ~(torch.isclose(found, wanted, rtol=1e-3) | torch.isclose(found, torch.zeros(()), atol=1e-6))
    if off.any():
        *_, position, _ = place = off.nonzero()[-1].tolist()
        pytest.fail(f"{seen}, position {position} has a weight of {found[tuple(place)]:.4g}. Each is 0 if it was "
                    f"dropped, else 1/{position + 1} · 1/(1 - {DROPOUT.dropout}) = {wanted[position, 0]:.4g}: is what "
                    "is left rescaled, and how often is dropout applied?")
    share = (found == 0)[..., kept > 0].double().mean().item()
    assert abs(share - DROPOUT.dropout) < 0.08, f"{seen}, {share:.0%} of all probabilities were dropped"


def _assert_masks(dropped, seen, world_size):
    """dropped [batch, heads, position, position looked at]; seen: which of them a position looks at."""
    zero, per_rank = dropped[..., seen], WIDE.heads // world_size  # [batch, heads, weights]
    for rank in range(world_size):
        of_heads = zero[:, rank * per_rank : (rank + 1) * per_rank].transpose(0, 1)
        for what, masks in {"heads": of_heads, "sequences": of_heads.transpose(0, 1)}.items():
            assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks), (
                f"{what} that compute the same came out the same on rank {rank} of {world_size}: they have one mask "
                "together. Each head and each sequence has a mask of its own")
    rows = dropped[..., -2:, : toys.SEQUENCE - 1]
    assert not torch.equal(rows[..., 0, :], rows[..., 1, :]), (
        "the last two positions dropped the same of all those before them, in all heads: one mask for all positions")


def draws(file):
    """Numbers outside and inside the context, which ends with an error once."""
    torch.manual_seed(70)
    outside, inside = [torch.rand(4)], []
    with file.parallel_random():
        inside.append(torch.rand(4))
    outside.append(torch.rand(4))
    try:
        with file.parallel_random():
            inside.append(torch.rand(4))
            raise KeyboardInterrupt("the test's own")
    except KeyboardInterrupt:
        ended = "passed on"
    else:
        ended = "lost"
    outside.append(torch.rand(4))
    many = []
    for _ in range(TIMES):
        with file.parallel_random():
            many.append(tuple(torch.rand(4).tolist()))
    return outside, inside, ended, many


def draws_in_groups(file):
    """Numbers inside the context, from one state outside, in the group of ranks 0 and 1, or in that of 2 and 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(71)
    group = groups[dist.get_rank() // 2]
    with file.parallel_random(group):
        drawn = torch.rand(4)
    attention = file.ParallelAttention(DROPOUT, group)
    return torch.cat([drawn, attention(torch.ones(2, toys.SEQUENCE, DROPOUT.hidden)).detach().flatten()])


@pytest.mark.step(5, points=2)
@worlds
def test_all_ranks_draw_the_same_outside(assignment, world_size):
    first, second, *others = once(draws_in_groups, 4, assignment)
    assert torch.equal(first, others[0]) and torch.equal(second, others[1]), (
        "ranks 0 and 1 are a group, and ranks 2 and 3. From the same state outside the two groups drew other numbers "
        "inside parallel_random(group), or in an attention of this group: a rank's numbers follow from the outside "
        "state and from its rank in the group")
    ranks = toys.run(draws, world_size, assignment)
    for rank, (outside, inside, ended, many) in enumerate(ranks):
        assert ended == "passed on", f"an error inside parallel_random() did not come out of it on rank {rank}"
        for number, what in enumerate(("Before parallel_random()", "After parallel_random()", "After an error in it")):
            assert torch.equal(outside[number], ranks[0][0][number]), (
                f"{what} rank {rank} draws other numbers than rank 0, from the same seed: dropout outside the region "
                "would differ, and so would what every rank holds whole")
        drawn_inside = [number for part in inside for number in part.tolist()]
        assert not {number for part in outside for number in part.tolist()} & set(drawn_inside), (
            f"rank {rank} draws the same numbers outside as inside: outside must have moved on when it comes back")
        assert not rank or not set(many) & set(ranks[0][-1]), (
            f"in {TIMES} regions rank {rank} drew numbers that rank 0 drew in one of them, from the same state outside")
        assert len(set(many)) == TIMES, (
            f"{TIMES} times parallel_random() on rank {rank}, and only {len(set(many))} of them drew other numbers "
            "than all before: masks come again. Of how many possible seeds is the one inside?")


def trained_with_dropout(file):
    """Gradients of two steps with dropout everywhere; what every rank holds whole must get the same on each."""
    model = filled_gpt(file)
    inputs, targets = shared_tokens()
    torch.manual_seed(80)
    for _ in range(2):
        loss = model(inputs, targets)
        loss.backward()
    return loss.detach(), gradients_of(model)


def filled_gpt(file):
    whole = lively(lambda: GPT(CONFIG), dist.get_rank())
    for param in whole.parameters():
        dist.broadcast(param.data, 0)
    model = file.ParallelGPT(DROPOUT)
    model.load_whole({name: value.detach() for name, value in whole.state_dict().items()})
    return model


@pytest.mark.step(5, points=2, stuck=SAME)
def test_what_each_rank_holds_whole_stays_alike(assignment):
    ranks = toys.run(trained_with_dropout, 3, assignment)
    for rank, (loss, gradients) in enumerate(ranks):
        assert torch.equal(loss, ranks[0][0]), (
            f"with dropout the loss on rank {rank} is {loss:.6g}, and {ranks[0][0]:.6g} on rank 0: what they dropped "
            "outside the region was not the same")
        differ = [name for name, gradient in gradients.items()
                  if not is_cut(name) and not torch.equal(gradient, ranks[0][1][name])]
        assert not differ, (
            f"with dropout {len(differ)} gradients of what each rank holds whole differ between ranks 0 and {rank}, "
            f"the first is that of {differ[0]}: the ranks' models will drift apart")
