"""Lesson 10's assignment, part A, the whole system, in steps: what is computed, owned and sent on a mesh of ranks,
however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.

A mesh is D × M: D replicas of a model that M ranks share. Rank d · M + m has part m of replica d.
"""

import functools
import itertools
import math
import random
import tracemalloc

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from cut import is_cut, part_of
from sharded import assert_shards_hold, awkward_backward, first_backward, gradients_of
from stock import Stock
from torch import nn, optim

from zero_minimal.core.layout import pack
from zero_minimal.core.mesh import make_mesh
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.offloading import host
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("C1", "C2", "C3", "C4", "C5")
BATCH, SEQUENCE = 3, toys.SEQUENCE
SIZES = dict(hidden=30, heads=6, sequence=SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)
INPUT = 4 * SEQUENCE * SIZES["hidden"]  # bytes of a block's input, for each sequence
MESH = ("every rank of the mesh must start the same collectives of a group in the same order, also for parameters that "
        "all ranks of a model hold whole")


def sizes_of(layers=2):
    return GPTConfig(layers=layers, **SIZES)


# ------------------------------------------------------------------------------------------ step 1: C_B, M_D: gradients

BUCKET = 4096  # bytes


def stage_2(assignment):
    """Stage 2 with the memory of the file."""
    return functools.partial(Stage2, memory=assignment.ConstantMemory)


def unequal(model):
    """Groups under which the first bucket is among the smallest: the head has a group of its own."""
    *others, head = model.parameters()
    return [{"params": others}, {"params": [head]}]


def memories(assignment):
    """For models of 2 and 5 blocks: bytes of gradients' memory when the stage has been made, and after two steps of
    two micro-batches; of the parameters; of the largest bucket; and the most that may be padding."""
    found = []
    for blocks in (2, 5):
        before = checks.live_bytes()
        model = toys.build(functools.partial(toys.Transformer, blocks), dist.get_rank())
        zero = stage_2(assignment)(model, optim.SGD, lr=0.1, bucket_bytes=BUCKET, param_groups=unequal(model))
        held = sum(bucket.padded for bucket in zero.buckets) * 4
        begins = checks.live_bytes() - before - held
        for step in range(2):
            zero.model(*toys.tokens(dist.get_rank(), step + 2)).backward()
            toys.step_of(zero, step)
        after = checks.live_bytes(until=before + held + begins + 1024, looks=10) - before - held
        found.append((begins, after, held, 4 * max(bucket.padded for bucket in zero.buckets)))
        del zero, model
    return found


LATER = 25  # how often something is done that must go on for ever
ROUNDS, PYTHONS = 4, 64 * 1024  # bytes


def worked_long(assignment):
    """What ConstantMemory makes for nine buckets of 256 kB at most, in four rounds of two micro-batches: for each
    method bytes of new tensors at most during a call, and what they may be; bytes of Python's own at most, numpy's and
    bytearrays among them; and what is wrong first with what whole() and shard() gave, "" if nothing is."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    wrong, last = "", 0
    for size in (16, 2**16):  # what is imported, or made once, is there before the large one comes
        params = [nn.Parameter(torch.zeros(elements)) for elements in (size // 2, *[size] * 8)]
        buckets = pack(params, [{"params": params}], ranks, 4 * size)
        for bucket in buckets:
            bucket.parameter_shard = bucket.shard(bucket.zeros(), rank)
        largest = 4 * max(bucket.padded for bucket in buckets)
        tracemalloc.start()
        memory, most, seen = assignment.ConstantMemory(buckets, None), {"whole": 0, "shard": 0, "give_back": 0}, []
        homes = {}

        def call(name, given, *known):
            with Stock([*seen, *known]) as stock:
                result = getattr(memory, name)(given)
            if seen and round:
                most[name] = max(most[name], stock.highest)
            return result

        for round, later in itertools.product(range(ROUNDS), (False, True)):
            for bucket in buckets:
                whole, part = call("whole", bucket), call("shard", bucket)
                call("give_back", whole, whole, part)
                if whole.any():
                    wrong = wrong or f"in round {round} whole() gave a buffer that is not zero"
                if where(whole)[0] == last:
                    wrong = wrong or f"in round {round} whole() gave the same buffer twice in succession"
                last = where(whole.fill_(1.0))[0]
                if not later:
                    if where(part) != homes.setdefault(bucket, where(part)):
                        wrong = wrong or f"in round {round} shard() gave a bucket another place than in round 0"
                    bucket.gradient_shard = part
                    seen += [whole, part] * (not round)
            for bucket in buckets if later else ():
                bucket.gradient_shard = None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most, {"whole": largest, "shard": largest / ranks, "give_back": largest}, peak, wrong


@pytest.mark.step(1, points=2)
def test_two_buffers_and_a_slab_are_all_there_is(assignment):
    for rank, found in enumerate(once(memories, 2, assignment)):
        for (begins, after, held, largest), blocks in zip(found, (2, 5), strict=True):
            wanted = held / 2 + 2 * largest
            told = (f"rank {rank} of 2, a model of {blocks} blocks with {in_words(held)} of parameters, in buckets of "
                    f"{in_words(largest)}: ")
            right = (f"{in_words(wanted)} are right: two buffers of {in_words(largest)}, and its half of the gradients")
            assert begins <= wanted + 1024, (
                f"{told}ConstantMemory takes {in_words(begins)}, and {right}. How large must a buffer be at least, so "
                "that each bucket fits? And how many shards of a bucket are this rank's?"
            )
            assert begins >= 0.98 * wanted, (
                f"{told}ConstantMemory takes {in_words(begins)} before the first backward, and {right}. All of it is "
                "allocated once, up front: later it would come to lie between activations"
            )
            assert after <= begins + 1024, (
                f"{told}after two steps of two micro-batches, and zero_grad(), {in_words(after)} live beside the "
                f"parameters, and {right}: memory was taken later, and kept. What arrives for a later micro-batch is "
                "needed until it has been added"
            )
    for rank, (most, may, peak, wrong) in enumerate(once(worked_long, 2, assignment)):
        told = f"rank {rank} of 2, eight buckets of 262.1 kB and a smaller one, whose shards have 1.1 MB in all"
        for name, bytes in most.items():
            assert bytes <= may[name] + 1024, (
                f"{told}: a call of {name}() took {in_words(bytes)} beside buffers and slab, and "
                f"{in_words(may[name])} are enough, for one {'shard' if name == 'shard' else 'bucket'}. Memory for all "
                "buckets is there once, in the slab"
            )
        assert peak <= PYTHONS, (
            f"{told}: ConstantMemory took {in_words(peak)} of Python's own memory, in arrays of numpy, bytes or lists, "
            "which no count of tensors shows. It is memory all the same: buffers and slab hold all that is needed"
        )
        assert not wrong, f"{told}, in {ROUNDS} rounds: {wrong}. Each of them is like the first one"


def spied(assignment):
    """The file's ConstantMemory, that notes where its tensors lie: address of the memory, first byte, bytes."""

    class Spied(assignment.ConstantMemory):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.wholes, self.shards, self.dirty = [], [], 0

        def whole(self, bucket):
            whole = super().whole(bucket)
            self.wholes.append((*where(whole), bucket.padded * 4))
            self.dirty += int((whole != 0).sum())
            return whole

        def shard(self, bucket):
            shard = super().shard(bucket)
            self.shards.append(where(shard))
            return shard

    return Spied


def where(tensor):
    return tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.nbytes


def places(assignment):
    """Where shards lay in each of three steps, all whole gradients, and elements of buffers that were not zero; after
    a step of three micro-batches the shards' places, and what is in them, after what each one alone gives."""
    rank = dist.get_rank()
    model = toys.build(toys.Transformer, rank)
    zero = Stage2(model, optim.SGD, memory=spied(assignment), lr=0.0, bucket_bytes=BUCKET, param_groups=unequal(model))
    steps, sums = [], []
    for batches in ((0,), (1,), (2,), (0, 1, 2)):
        for batch in batches:
            model(*toys.tokens(rank, batch)).backward()
        sums.append(torch.cat([shard.detach().clone() for shard in zero.reduced_gradients()]))
        steps.append([where(shard) for shard in zero.reduced_gradients()])
        zero.zero_grad()
    return steps[:-1], zero.memory.wholes, zero.memory.dirty, steps[-1], sums


@pytest.mark.step(1, points=3)
def test_shards_stay_in_the_slab(assignment):
    for rank, (steps, *_) in enumerate(once(places, 2, assignment)):
        for number, shards in enumerate(steps):
            memories = len({memory for memory, *_ in shards})
            assert memories == 1, (
                f"after the backward of step {number} the {len(shards)} gradient shards of rank {rank} lie in "
                f"{memories} allocations: M_D lays them side by side into one, which was made at the start"
            )
            ends = [first + size for _, first, size in sorted(shards)]
            assert all(end <= first for end, (_, first, _) in zip(ends, sorted(shards)[1:], strict=False)), (
                f"after the backward of step {number} gradient shards of rank {rank} overlap: each bucket has a place "
                "of its own in the slab"
            )
            assert sorted(shards) == sorted(steps[0]), (
                f"in step {number} the gradient shards of rank {rank} lie elsewhere than in step 0: they must stay "
                "where they are from step to step"
            )


@pytest.mark.step(1, points=1)
def test_whole_gradients_take_turns_in_two_buffers(assignment):
    for rank, (_, wholes, *_) in enumerate(once(places, 2, assignment)):
        used = len({memory for memory, *_ in wholes})
        assert used <= 2, (
            f"in four steps whole() of rank {rank} gave memory of {used} allocations for {len(wholes)} buckets: C_B "
            "has two buffers, which are used again and again"
        )
        same = sum(one[0] == other[0] for one, other in zip(wholes, wholes[1:], strict=False))
        assert used == 2 and not same, (
            f"whole() of rank {rank} gave one bucket after the other the same buffer, {same} times of "
            f"{len(wholes) - 1}: two buffers take turns. One may still be on its way while the next is filled"
        )
        for _, _, size, wanted in wholes:
            assert size == wanted, (
                f"whole() of rank {rank} gave {in_words(size)} for a bucket of {in_words(wanted)}: a buffer may be "
                "larger than a bucket. What is sent must be [padded]"
            )


STALE = "the mean gradient, where some parameters got none. A buffer still holds what was sent in it before: what must \
be in it where a gradient is missing?"


def reduced(assignment):
    """The shards of a plain model, and of one whose parameters do not all have gradients, in its second backward."""
    shards, *_ = first_backward(stage_2(assignment))
    return shards, awkward_backward(stage_2(assignment))


@pytest.mark.step(1, points=2, stuck="each rank must reduce all buckets in the same order")
def test_the_mean_gradient_comes_out(assignment):
    dirty = [dirty for _, _, dirty, *_ in once(places, 2, assignment)]
    assert not any(dirty), (
        f"whole() gave buffers that were not zero, in {dirty} elements on ranks 0 and 1: a buffer still holds what was "
        "sent in it before, and padding, and a parameter without a gradient, count as zero"
    )
    found = once(reduced, 3, assignment)
    assert_shards_hold([shards for shards, _ in found], gradients_of(3))
    wanted = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold([awkward for _, awkward in found], wanted, STALE, make=checks.Awkward)


@pytest.mark.step(1, points=3)
def test_micro_batches_add_up(assignment):
    for rank, (steps, *_, last, (*each, together)) in enumerate(once(places, 2, assignment)):
        near = functools.partial(torch.allclose, together, rtol=1e-4, atol=1e-6)
        assert not near(2 * each[-1]), (
            f"after three micro-batches rank {rank}'s shards are twice the last one's gradient: its average arrived "
            "where the sum lay, and was then added to itself. Where does shard() let it arrive, if "
            "bucket.gradient_shard is there already?"
        )
        assert not near(each[-1]), (
            f"after three micro-batches rank {rank}'s shards are the gradient of the last one alone"
        )
        assert near(sum(each)), (
            f"after three micro-batches rank {rank}'s shards are not the sum of their gradients"
        )
        assert sorted(last) == sorted(steps[0]), (
            f"after three micro-batches rank {rank}'s shards lie beside the slab: the sum belongs into it"
        )


def of_other_kinds(assignment):
    """What is said of buckets of two dtypes, or devices; what goes wrong with a model in bf16, and in groups of one
    and of two of the ranks."""
    told, faults, groups = {}, {}, [[0], [1, 2]]
    for kinds in (("float32", "cpu"), ("bfloat16", "cpu")), (("float16", "cpu"), ("bfloat16", "cpu")), (
            ("float32", "cpu"), ("float32", "meta")):
        params = [nn.Parameter(torch.zeros(3, dtype=getattr(torch, dtype), device=device)) for dtype, device in kinds]
        buckets = pack(params, [{"params": params}], dist.get_world_size(), None)
        for bucket in buckets:
            bucket.parameter_shard = bucket.shard(bucket.zeros(), dist.get_rank())
        try:
            assignment.ConstantMemory(buckets, None)
        except ValueError as error:
            told[kinds] = str(error)
        told.setdefault(kinds, "")
    some, _ = dist.new_subgroups_by_enumeration(groups)
    for name, dtype, group in (("in bf16", torch.bfloat16, None), (f"on the groups {groups}", torch.float32, some)):
        model = toys.build(toys.Transformer, dist.get_rank()).to(dtype)
        zero = stage_2(assignment)(model, optim.SGD, group=group, lr=0.1, bucket_bytes=BUCKET)
        try:
            model(*toys.tokens(dist.get_rank(), 0)).backward()
            whole = zero.memory.whole(zero.buckets[0])
            kinds = {each.dtype for each in (*zero.reduced_gradients(), whole)} - {dtype}
            size, largest = whole.untyped_storage().nbytes(), max(bucket.padded for bucket in zero.buckets)
            faults[name] = (
                f"gradients lie in memory of {kinds.pop()}" if kinds else
                f"the largest bucket has {largest} elements of {dtype.itemsize} bytes, and a buffer {size} bytes"
                if size > largest * dtype.itemsize else
                "whole() gave a buffer that is not zero" if whole.any() else "")
        except (ValueError, RuntimeError, TypeError) as error:
            faults[name] = f"it raised {type(error).__name__}: {error}"
    return told, faults


@pytest.mark.step(1, points=1)
def test_buffers_are_of_the_buckets_kind(assignment):
    for rank, (told, faults) in enumerate(once(of_other_kinds, 3, assignment)):
        for kinds, words in told.items():
            assert words, (
                f"rank {rank}: buckets of {kinds} were taken without a word, and one pair of buffers cannot hold both: "
                "ValueError (kind_of raises it)"
            )
        for name, fault in faults.items():
            assert not fault, (
                f"rank {rank}, a backward {name}: {fault}. Gradients have the dtype of their parameters, and buckets "
                "are cut for the ranks of the stage's group: what must the buffers know?"
            )


# ---------------------------------------------------------------------------------------- on a mesh: one model for all


def lively():
    """The whole model, whose weights, biases and norms are all far from where they start: each one matters."""
    model = GPT(sizes_of())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape))
        for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
            norm.weight += 1.0
    return model


def batch_of(step, model_parallel, batch=BATCH):
    """In a rank: the tokens of its replica, those of the replica's first rank."""
    first = dist.get_rank() // model_parallel * model_parallel
    group = make_mesh(model_parallel).model_group
    tokens = toys.tokens(dist.get_rank(), step, batch=batch)
    for tensor in tokens:
        dist.broadcast(tensor, first, group=group)
    return tokens


def system_of(assignment, name, model_parallel, optimizer=optim.SGD, dtype=torch.float32, **options):
    """In a rank: a System with this rank's part of rank 0's lively model."""
    mesh = make_mesh(model_parallel)
    whole = dict(toys.build(lively, dist.get_rank()).named_parameters())
    torch.manual_seed(5)
    system = assignment.System(name, sizes_of(), mesh, BATCH, dtype, "cpu", optimizer,
                               **({"lr": 1.0, "bucket_bytes": BUCKET} | options))
    with torch.no_grad():
        for path, param in system.model.named_parameters():
            dist.broadcast(whole[path].data, 0)
            # .data: else the ranks of a wrong group hear that these values differ, and nothing of their group
            param.data.copy_(part_of(path, whole[path], model_parallel, mesh.model_rank))
    return system


def of_the_replicas(world_size, model_parallel):
    """The gradient of each replica's own loss, for the whole model, in fp64: [{name: gradient}]."""
    found = []
    for replica in range(world_size // model_parallel):
        model = toys.build(lively, 0, torch.float64)
        model(*toys.tokens(replica * model_parallel, 0, batch=BATCH)).backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    return found


def mean_of(gradients):
    return {name: sum(each[name] for each in gradients) / len(gradients) for name in gradients[0]}


def parts_of(whole, model_parallel, rank):
    return {name: part_of(name, tensor, model_parallel, rank % model_parallel) for name, tensor in whole.items()}


def flat(tensors):
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def near(one, other, rtol=1e-3):
    return bool((one - other).norm() <= rtol * other.norm())


# ----------------------------------------------------------------------- step 2: checkpoints: cut over whom, and where


def plain_system(assignment, name, model_parallel, layers=2, batch=BATCH, dtype=torch.float32, checkpoints=True):
    """A System of this rank that has no stage: what step 3 does, or does wrong, is not looked at here."""

    class WithoutStage(assignment.System):
        def over_replicas(self, *_, **options):
            return None

        def keep_checkpoints(self, *given):
            return super().keep_checkpoints(*given) if checkpoints else None

    torch.manual_seed(5)
    return WithoutStage(name, sizes_of(layers), make_mesh(model_parallel), batch, dtype, "cpu", optim.SGD, lr=0.1)


def slabs(assignment):
    """For each config: bytes that live after a step, when the system is made for 2 sequences and for 6; and those of
    the slab, before the first step of the second."""
    found = {}
    for name in ALL:
        found[name] = []
        for batch in (2, 6):
            before = checks.live_bytes()
            system = plain_system(assignment, name, 3, batch=batch)
            room = bytes_of(system.slab)
            for step in range(2):
                system.model(*batch_of(step, 3, batch)).backward()
                system.model.zero_grad()
            most = 0 if not found[name] else found[name][0] + 4 * 2 * INPUT
            found[name].append(checks.live_bytes(until=before + most, looks=3) - before)
            del system
        found[name].append(room)
    return found


def bytes_of(slab):
    return 0 if slab is None or slab.memory is None else slab.memory.nbytes


ANEW = ("is the slab emptied before each forward pass that keeps checkpoints (begin_forward), and before no other? "
        "Here a pass without a graph runs between a forward and its backward, which still needs what was kept; some "
        "passes with a graph have fewer sequences and no backward; of two others the second is in eval() mode")
FULL = ("b·s·h numbers are a block's input, there are as many of them as blocks, and a forward pass keeps no more: is "
        "the slab as large, and is it emptied before each forward pass (begin_forward)?")
WHOSE = "which ranks hold the same input: those of mesh.model_group, or those of mesh.data_group?"


@pytest.mark.step(2, points=4, raised=FULL, stuck=MESH)
def test_the_slab_is_as_large_as_the_checkpoints(assignment):
    for rank, found in enumerate(once(slabs, 3, assignment)):
        for name in ALL:
            grown, whole = found[name][1] - found[name][0], 2 * 4 * INPUT  # two blocks, four sequences more
            wanted = {"C1": whole, "C3": whole, "C2": whole / 3, "C4": whole / 3, "C5": 0}[name]
            why = {"C1": "two blocks keep b·s·h numbers each", "C2": "P_a: two blocks keep b·s·h/M numbers each",
                   "C5": "P_a+cpu: checkpoints lie in host memory, so the device needs no slab"}
            told = (f"{name} made for 6 sequences takes {in_words(grown)} more on rank {rank} of D × M = 1 × 3 than "
                    f"made for 2, and {in_words(wanted)} are right. "
                    f"{why.get(name, why['C1' if name == 'C3' else 'C2'])}")
            assert grown <= wanted + 1024, (
                f"{told}. The slab is too large: how many numbers of a block's input does a rank keep?"
            )
            assert grown >= wanted - 1024, (
                f"{told}. There is no slab that holds them all: each checkpoint gets memory of its own"
            )
            room, wanted = found[name][2], wanted * 6 / 4
            assert abs(room - wanted) <= 1024, (
                f"{name} made for 6 sequences has a slab of {in_words(room)} on rank {rank} of D × M = 1 × 3, before "
                f"its first pass, and {in_words(wanted)} are right: it is made at once, as large as one pass needs"
            )


def kept(assignment):
    """For each config, for each block more: bytes that forward makes and that live until backward, beside what was
    there; and bytes that were announced as copies in host memory."""
    found = {}
    for name in ALL:
        sizes = []
        for layers in (2, 6):
            system, copies = plain_system(assignment, name, 2, layers), []
            system.model(*batch_of(0, 2)).backward()
            system.model.zero_grad()
            slab = [] if system.slab is None else [system.slab.memory]
            tokens = batch_of(1, 2)
            with Stock([*system.model.parameters(), *slab, *tokens]) as stock, host.announced(
                    lambda copy, copies=copies: copies.append(copy.nbytes)):
                loss = system.model(*tokens)
                sizes.append((stock.alive(), sum(copies)))
            loss.backward()
            system.model.zero_grad()
        found[name] = [(many - few) / 4 for few, many in zip(*sizes, strict=True)]
    return found


@pytest.mark.thorough
@pytest.mark.step(2, points=3, raised=FULL, stuck=MESH)
def test_a_block_keeps_its_input_alone(assignment):
    whole = BATCH * INPUT
    for rank, found in enumerate(once(kept, 2, assignment)):
        for name in ALL:
            alive, copied = found[name]
            wanted = whole / 2 if name == "C5" else 0
            told = (f"{name}: a block's input has {in_words(whole)}, and between forward and backward each block holds "
                    f"{in_words(alive)} beside the slab on rank {rank} of D × M = 1 × 2")
            assert alive - wanted < 4 * whole, (
                f"{told}: all that it computes is there until backward. In every config blocks are checkpointed"
            )
            assert copied >= 0.99 * wanted, (
                f"{told}, and {in_words(copied)} went to host memory: in P_a+cpu the parts do, {in_words(wanted)}"
            )
            assert copied <= wanted + 256, (
                f"{name}: {in_words(copied)} a block went to host memory on rank {rank} of D × M = 1 × 2, and "
                f"{in_words(wanted)} are right: P_a+cpu alone uses it, for this rank's parts"
            )
            assert alive <= wanted + whole / 4, (
                f"{told}: checkpoints belong into the slab, which was allocated up front (what does place= take?)"
            )


def gathered(assignment):
    """What a pass with backward sends within a model, for C1 and C2; on a mesh of 2 × 2."""
    found = []
    for name in ("C1", "C2"):
        system = plain_system(assignment, name, 2)
        for step in range(2):  # in its first pass P_a compares inputs
            tokens = batch_of(step, 2)
            with TrafficMeter() as meter:
                loss = system.model(*tokens)
                loss.backward()
            system.model.zero_grad()
        found.append(meter.sent_bytes)
    return found


@pytest.mark.step(2, points=1, raised=WHOSE, stuck=WHOSE, left=WHOSE)
def test_p_a_cuts_over_the_ranks_of_a_model(assignment):
    wanted = 2 * BATCH * INPUT / 2
    for rank, (plain, partitioned) in enumerate(once(gathered, 4, assignment)):
        assert partitioned - plain == pytest.approx(wanted, abs=64), (
            f"rank {rank} of D × M = 2 × 2 sends {in_words(partitioned - plain)} more in C2 than in C1, and "
            f"{in_words(wanted)} are right: the input of each of two blocks is gathered once, b·s·h(M−1)/M numbers. "
            f"{WHOSE[0].upper()}{WHOSE[1:]}"
        )


def several_passes(assignment):
    """Losses of two passes in each config, the second in eval() mode, and the gradients of both. Each follows one
    of fewer sequences without a backward, and has one without a graph between forward and backward. C2 and C3 begin
    with 25 passes without a backward. "plain": without checkpoints."""
    found = {}
    for name in ("plain", *ALL):
        system = plain_system(assignment, "C1" if name == "plain" else name, 2, checkpoints=name != "plain")
        losses, tokens = [], batch_of(9, 2, 1)
        for _ in range(LATER if name in ("C2", "C3") else 0):
            system.model(*tokens)
        for step in range(2):
            system.model(*batch_of(step + 4, 2, BATCH - 1))
            loss = system.model.train(step == 0)(*batch_of(step, 2))
            with torch.no_grad():
                system.model(*batch_of(step + 2, 2))
            loss.backward()
            losses.append(loss.item())
        found[name] = losses, flat({path: param.grad for path, param in system.model.named_parameters()})
        system.model.zero_grad()
    return found


@pytest.mark.step(2, points=1, raised=ANEW, stuck=MESH)
def test_each_pass_uses_the_slab_anew(assignment):
    for rank, found in enumerate(once(several_passes, 2, assignment)):
        for name in ALL:
            (losses, gradients), (right, plain) = found[name], found["plain"]
            assert losses == right, (
                f"{name}: two passes gave the losses {losses} on rank {rank}, and {right} without checkpoints: the "
                "configs compute the same"
            )
            assert torch.equal(gradients, plain), (
                f"{name}: two passes gave gradients on rank {rank} that are off by "
                f"{(gradients - plain).abs().max():.2g} from those without checkpoints: what a block keeps of its "
                "input, bit for bit, must be there in backward"
            )


def of_dtypes(assignment):
    """What a pass of models of other dtypes raises; or that the slab has another size than it should."""
    found = {}
    for name, kind in (("C1", "bfloat16"), ("C2", "float16"), ("C4", "float64")):
        dtype = getattr(torch, kind)
        system = plain_system(assignment, name, 2, dtype=dtype)
        try:
            system.model(*batch_of(0, 2)).backward()
            wanted = 2 * BATCH * INPUT * dtype.itemsize // 4 // (1 if name == "C1" else 2)
            room = bytes_of(system.slab)
            found[name, kind] = f"the slab has {room} bytes, not {wanted}" if abs(room - wanted) > 1024 else ""
        except (ValueError, RuntimeError, MemoryError, TypeError) as error:
            found[name, kind] = f"it raised {type(error).__name__}: {error}"
        system.model.zero_grad()
    return found


@pytest.mark.step(2, points=1, stuck=MESH)
def test_checkpoints_have_the_dtype_of_the_model(assignment):
    for rank, found in enumerate(once(of_dtypes, 2, assignment)):
        for (name, kind), fault in found.items():
            assert not fault, (
                f"{name} with a model in {kind}, on rank {rank} of D × M = 1 × 2: {fault}. A block's input has the "
                "dtype of the model's parameters: what must the slab's be?"
            )


# --------------------------------------------------------------------------------------- step 3: ZeRO over the replicas


def stepped(assignment, model_parallel, names):
    """For each config: by how much a step of SGD with lr 1 moved each parameter of this rank's part, and where to."""
    found = {}
    for name in names:
        system = system_of(assignment, name, model_parallel)
        before = {path: param.detach().clone() for path, param in system.model.named_parameters()}
        system.model(*batch_of(0, model_parallel)).backward()
        system.step()
        after = {path: param.detach() for path, param in system.model.named_parameters()}
        found[name] = {path: before[path] - after[path] for path in before}, after
    return found


def assert_parts_differ(results, model_parallel, name):
    """Ranks of a model hold other parts of it after a step, too."""
    if model_parallel == 1:
        return
    cut = [flat({path: tensor for path, tensor in found[name][1].items() if is_cut(path)}) for found in results]
    alike = [rank for rank, part in enumerate(cut) if torch.equal(part, cut[0])]
    whose = "a mean over all ranks" if len(alike) == len(cut) else "a mean over the ranks of one model"
    assert 1 not in alike, (
        f"{name}: after step() ranks {' and '.join(map(str, alike))} hold the same numbers where the model is cut, "
        f"though ranks 0 and 1 are two parts of one model, D × M = {len(cut) // model_parallel} × {model_parallel}. "
        f"This was {whose}, and an all-gather among them. Only ranks that hold the same part belong together: "
        "which group is it?"
    )


def assert_mean(found, rank, world_size, model_parallel, name):
    """Parameters of a rank have lost the mean gradient of the replicas."""
    replicas, gradients = world_size // model_parallel, of_the_replicas(world_size, model_parallel)
    mean = parts_of(mean_of(gradients), model_parallel, rank)
    used, wanted = flat(found), flat(mean)
    told = f"{name}, rank {rank} of D × M = {replicas} × {model_parallel}: a step of SGD with lr 1 must subtract the " \
           f"mean gradient of the {replicas} replicas, and "
    if near(used, wanted):
        return
    assert not near(used, replicas * wanted), (
        f"{told}it subtracted {replicas} times as much: their sum. The divisor is D")
    assert not near(used, wanted / model_parallel), (
        f"{told}it subtracted 1/{model_parallel} of that: a sum over {replicas} ranks was divided by {world_size}. "
        "The divisor is D, the number of replicas, and not the number of all ranks")
    own = flat(parts_of(gradients[rank // model_parallel], model_parallel, rank))
    assert not near(used, own), (
        f"{told}it subtracted that of its own replica alone: what are the ranks that hold the same part of the model, "
        "mesh.data_group or mesh.model_group?")
    still = [path for path in mean if not found[path].any()]
    assert not still, (
        f"{told}{len(still)} parameters did not move, such as {still[0]}, which is "
        f"{'cut over the ranks' if is_cut(still[0]) else 'whole on all ranks'} of a model: every parameter is in a "
        "bucket on every rank")
    wrong = [path for path in mean if not near(found[path].double(), mean[path].double(), 1e-2)]
    kinds = {"cut over the ranks" if is_cut(path) else "whole on all ranks" for path in wrong}
    pytest.fail(f"{told}it did not, for {', '.join(wrong[:3]) or 'some elements'}, … ({' and '.join(kinds)})")


@pytest.mark.step(3, points=4, stuck=MESH, left=MESH)
def test_a_step_is_the_mean_of_the_replicas(assignment):
    for world_size, model_parallel, names in ((4, 2, ("C1", "C4")), (3, 1, ("C3",))):
        results = once(stepped, world_size, assignment, model_parallel, names)
        for name in names:
            assert_parts_differ(results, model_parallel, name)
            for rank, found in enumerate(results):
                assert_mean(found[name][0], rank, world_size, model_parallel, name)


OPTIONS = dict(lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, maximize=True, warmth=0.8)
SMALL = 2048  # bytes of a bucket


def holdings(assignment):
    """For C1 and C3: bytes of optimizer state and of parameters on this rank, in how many allocations gradient shards
    lie, how many of the shards' elements, the options of the optimizer's groups, bytes of the largest bucket, and
    whether the stage is config.stage."""
    found = {}
    for name in ("C1", "C3"):
        system = system_of(assignment, name, 2, checks.Warm, bucket_bytes=SMALL, **OPTIONS)
        system.model(*batch_of(0, 2)).backward()
        shards = system.reduced_gradients()
        memories = len({where(shard)[0] for shard in shards})
        elements = sum(shard.numel() for shard in shards)
        system.step()
        states = [tensor for state in system.optimizer.state.values() for tensor in state.values() if tensor.ndim]
        found[name] = (sum(tensor.nbytes for tensor in states), 4 * sum(map(torch.numel, system.model.parameters())),
                       memories, 4 * elements, [{option: value for option, value in group.items() if option != "params"}
                                                for group in system.optimizer.param_groups],
                       4 * max(bucket.padded for bucket in system.buckets),
                       isinstance(system.zero, assignment.CONFIGS[name].stage))
    return found


def sent_within_a_model(assignment):
    """On a mesh of 1 × 2, where nobody else sends: what a training step sends in C2 and C3; and what a forward and
    backward pass send of a system without a stage."""
    found = []
    for name in ("C2", "C3"):
        sent = []
        for make in (lambda name: system_of(assignment, name, 2), lambda name: plain_system(assignment, name, 2)):
            system = make(name)
            for step in range(2):  # in its first pass P_a compares inputs
                tokens = batch_of(step, 2)
                with TrafficMeter() as meter:
                    system.model(*tokens).backward()
                    if system.zero:
                        system.step()
                (system if system.zero else system.model).zero_grad()
            sent.append(meter.sent_bytes)
        found.append((name, *sent))
    return found


@pytest.mark.step(3, points=2, stuck=MESH, left=MESH)
def test_each_config_has_its_parts(assignment):
    for rank, found in enumerate(once(sent_within_a_model, 2, assignment)):
        for name, sent, right in found:
            assert sent <= right + 64, (
                f"{name}, rank {rank} of D × M = 1 × 2: forward, backward and step() send {in_words(sent)}, and "
                f"forward and backward of the same model without ZeRO {in_words(right)}. There is one replica, so ZeRO "
                "has nothing to send. What all ranks of a model hold whole has the same gradient on all of them "
                "already: f and g saw to it (lesson 05)"
            )
    for rank, found in enumerate(once(holdings, 4, assignment)):
        for name, (state, parameters, memories, shards, groups, largest, is_its) in found.items():
            assert is_its, f"{name}: system.zero of rank {rank} is no config.stage, as CONFIGS[{name!r}] has it"
            assert state <= 2 * parameters / 2 * 1.1, (
                f"{name}: rank {rank} of D × M = 2 × 2 holds {in_words(state)} of Adam's state for "
                f"{in_words(parameters)} of parameters: {in_words(parameters)} are right, as D = 2 "
                "replicas share 8 bytes a parameter"
            )
            assert name == "C1" or memories == 1, (
                f"C3: rank {rank}'s gradient shards lie in {memories} allocations, so C_B and M_D are not there: what "
                "are config.options for?"
            )
            assert shards <= parameters / 2 * 1.1, (
                f"{name}: rank {rank}'s reduced gradients are {in_words(shards)}, and it updates half of "
                f"{in_words(parameters)}"
            )
            wanted = checks.Warm([torch.zeros(1)], **OPTIONS).param_groups[0]
            for (number, group), option in itertools.product(enumerate(groups), set(wanted) - {"params"}):
                assert group[option] == wanted[option], (
                    f"{name}: in a system that was made with {OPTIONS} {option} is {group[option]} in group {number} "
                    f"of rank {rank}'s optimizer, and {wanted[option]} is right: `options` are those of all parameters"
                )
            assert largest <= SMALL + 4 * 2 * 16, (
                f"{name}: the system was made with bucket_bytes={SMALL}, and rank {rank}'s largest bucket has "
                f"{largest}: `options` are the stage's, too"
            )


# ---------------------------------------------------------------------------------- step 4: the norm of the whole model

SCALE = 1 / 1024


def clipped(assignment, model_parallel, name):
    """What clip_grad_norm_ returns, for twice max_norm; bytes that it asks to send; whether the gradients stayed; what
    the loss scale is then, for whom has put it there; how far the step went; the returned shape; what a second call
    returned, for max_norm. This is infinite, 0.1, and with a loss scale a large one and 0.1, the last one a tensor."""
    found = []
    for max_norm, scale in ((math.inf, None), (0.1, None), (1e6, SCALE), (0.1, torch.tensor(SCALE))):
        system = system_of(assignment, name, model_parallel)
        before = {path: param.detach().clone() for path, param in system.model.named_parameters()}
        loss = system.model(*batch_of(0, model_parallel))
        (loss if scale is None else loss / scale).backward()
        shards = [shard.detach().clone() for shard in system.reduced_gradients()]
        if scale is not None:
            system.gradient_scale = scale
        with checks.Calls() as calls:
            norm = system.clip_grad_norm_(2 * max_norm)
        again = float(system.clip_grad_norm_(max_norm))
        stayed = all(torch.equal(one, other) for one, other in zip(shards, system.reduced_gradients(), strict=True))
        system.step()
        moved = {path: before[path] - param.detach() for path, param in system.model.named_parameters()}
        found.append((float(norm), sum(call.bytes for call in calls.made), stayed, scale, moved, list(norm.shape),
                      again))
    return found


MESHES = ((4, 2, "C4"), (3, 3, "C1"), (3, 1, "C3"))


def cases(assignment):
    """(name, D, M, the right norm, its part that all ranks of a model hold whole, the mean gradient, what ranks found),
    of each mesh."""
    for world_size, model_parallel, name in MESHES:
        mean = mean_of(of_the_replicas(world_size, model_parallel))
        whole = {path: gradient for path, gradient in mean.items() if not is_cut(path)}
        found = once(clipped, world_size, assignment, model_parallel, name)
        yield (name, world_size // model_parallel, model_parallel, flat(mean).norm().item(), flat(whole).norm().item(),
               mean, found)


ONCE = ("all ranks of both groups must come to each all-reduce, also those whose copies do not count, and those whose "
        "own part has overflowed, while that of the other ranks of a model has not")


@pytest.mark.thorough
@pytest.mark.step(4, points=5, stuck=ONCE, left=ONCE)
def test_each_element_counts_once(assignment):
    for name, replicas, ranks, right, whole, mean, found in cases(assignment):
        for rank, ((norm, *_), *_) in enumerate(found):
            told = f"{name}, rank {rank} of D × M = {replicas} × {ranks} found the norm {norm:.5g}, and {right:.5g} " \
                   "is right"
            cut = (right**2 - whole**2) ** 0.5
            part = flat(parts_of(mean, ranks, rank)).norm().item()
            cut_part = flat({path: tensor for path, tensor in parts_of(mean, ranks, rank).items()
                             if is_cut(path)}).norm().item()
            for wrong, words in (
                ((cut**2 + ranks * whole**2) ** 0.5,
                 f"it counts the parameters that all ranks of a model hold whole M = {ranks} times"),
                (cut, "it leaves out the parameters that all ranks of a model hold whole: they count once"),
                (part, "it is the norm of this rank's part of the model: squares add up over both groups"),
                (cut_part, "it is the norm of this rank's part of the model, without what all ranks of a model hold "
                           "whole: squares add up over both groups"),
                (right * replicas**0.5, f"squares were counted for each of D = {replicas} replicas: a stage's norm is "
                                        "over its data-parallel group already"),
                (right**2, "it is the sum of the squares, not its root"),
            ):
                assert ranks == 1 and wrong == right or not _is(norm, wrong) or _is(wrong, right), f"{told}: {words}"
            assert _is(norm, right), f"{told}: norms do not add up, their squares do; each element counts once"
        norms = [each[0][0] for each in found]
        assert len(set(norms)) == 1, (
            f"{name}: the ranks of D × M = {replicas} × {ranks} found the norms {norms}: each would clip by another "
            "factor"
        )


def _is(norm, other):
    return norm == pytest.approx(other, rel=2e-4)


@pytest.mark.step(4, points=2, stuck=ONCE, left=ONCE)
def test_step_is_clipped_to_it(assignment):
    for name, replicas, ranks, right, _, mean, found in cases(assignment):
        for rank, (large, small, *_) in enumerate(found):
            wanted = flat(parts_of(mean, ranks, rank))
            for (*_, moved, shape, again), max_norm in ((large, math.inf), (small, 0.1)):
                factor = (flat(moved) @ wanted / (wanted @ wanted)).item()
                must = min(1.0, max_norm / right)
                assert factor == pytest.approx(must, rel=1e-3), (
                    f"{name}, rank {rank} of D × M = {replicas} × {ranks}: after clip_grad_norm_({max_norm:g}) of a "
                    f"gradient of norm {right:.4g} step() used {factor:.4g} times the gradient, and {must:.4g} is "
                    "right: self.gradient_scale is what it multiplies with, and the whole model's norm decides"
                )
                assert _is(again, min(right, 2 * max_norm)), (
                    f"{name}, rank {rank}: clip_grad_norm_({2 * max_norm:g}) of the norm {right:.4g}, and "
                    f"then again, for {max_norm:g}: the second one returned {again:.4g}, and "
                    f"{min(right, 2 * max_norm):.4g} is right: what the first one has set is part of the norm"
                )
                assert shape == [], f"clip_grad_norm_ returned a tensor of shape {shape}: a 0-dim one is right"


@pytest.mark.step(4, points=1, stuck=ONCE, left=ONCE)
def test_gradients_stay_as_they_were(assignment):
    for name, *_, found in cases(assignment):
        for rank, (_, (_, _, stayed, *_), *_) in enumerate(found):
            assert stayed, (
                f"{name}: clip_grad_norm_ changed rank {rank}'s gradients: it sets self.gradient_scale alone"
            )


@pytest.mark.step(4, points=1, stuck=ONCE, left=ONCE)
def test_a_loss_scale_is_taken_off(assignment):
    for name, _, ranks, right, _, mean, found in cases(assignment):
        for (rank, of_rank), (at, max_norm) in itertools.product(enumerate(found), ((-2, 1e6), (-1, 0.1))):
            norm, _, _, scale, moved, *_ = of_rank[at]
            assert _is(norm, right), (
                f"{name}: the loss was multiplied by 1024, and self.gradient_scale is 1/1024; rank {rank} found the "
                f"norm {norm:.5g}, and {right:.5g} is right: that of the gradients times this scale"
            )
            wanted = flat(parts_of(mean, ranks, rank))
            factor = (flat(moved) @ wanted / (wanted @ wanted)).item()
            must = min(1.0, max_norm / right)
            assert factor == pytest.approx(must, rel=1e-3), (
                f"{name}: with a loss scale of 1024, clipped to {max_norm:g}, step() of rank {rank} used {factor:.4g} "
                f"times the gradient, and {must:.4g} is right: clipping multiplies the scale that is there, also by 1"
            )
            assert scale == SCALE, (
                f"{name}: a tensor of 1/1024 was put into self.gradient_scale. After clip_grad_norm_({max_norm}) rank "
                f"{rank}'s tensor holds {float(scale):.3g}: it is the caller's, who may use it again in the next step. "
                "The new scale is a new tensor"
            )


OVERFLOWS = {torch.float16: (1, math.inf), torch.bfloat16: (2, math.nan)}  # on which rank, and what is there then


def of_16_bits(assignment, dtype):
    """Norms of a model of this dtype, under loss scales; the sums of squares of this rank's gradients, scaled, that
    count here: those that all ranks of a model hold count on its first one; and the scale after clipping to infinity,
    after clipping to a part of the norm, and what both must be. Six of them, of the same loss times six factors, and
    scales of which the dtype has none: one that is rounded may be right to four digits by chance, six may not. And the
    norm where one element of one rank's part has overflowed."""
    system = system_of(assignment, "C4", 2, dtype=dtype)
    mesh, norms, squares, scales = system.mesh, [], [], []
    not_here = set(system.model.replicated()) if mesh.model_rank else set()
    for number, factor in enumerate((1.0, 1.1, 1.23, 1.37, 1.61, 1.83)):
        system.zero_grad()
        scale = SCALE * (1 + 0.37 * number)
        (system.model(*batch_of(0, 2)).float() * factor / scale).backward()
        system.gradient_scale = scale
        if number % 2:
            system.gradient_scale = torch.tensor(scale)
        norms.append(float(system.clip_grad_norm_(math.inf)))
        before = float(system.gradient_scale)
        max_norm = norms[-1] * (0.3 + 0.1 * number)
        system.clip_grad_norm_(max_norm)
        scales.append((before, float(system.gradient_scale), scale, scale * max_norm / norms[-1]))
        squares.append(0.0)
        for bucket in system.zero.buckets:
            counts = torch.ones(bucket.padded)
            for param in not_here & set(bucket.params):
                bucket._place(counts, param).zero_()
            mine = bucket.gradient_shard.double() * bucket.shard(counts, mesh.data_rank)
            squares[-1] += (scale * mine).square().sum().item()
    chance, (rank, number) = random.Random(toys.seed(dist.get_rank(), 41)), OVERFLOWS[dtype]
    cut = [param for path, param in system.model.named_parameters() if is_cut(path) and "embedding" not in path]

    def overflow(gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        gradient.view(-1)[chance.randrange(gradient.numel())] = number
        return gradient

    if dist.get_rank() == rank:
        chance.choice(cut).register_hook(overflow)
    system.zero_grad()
    system.model(*batch_of(0, 2)).float().backward()
    system.gradient_scale = SCALE
    endless = float(system.clip_grad_norm_(1.0))  # nothing may come behind it: who has left would disturb who waits
    return norms, squares, scales, endless


@pytest.mark.step(4, points=1, stuck=ONCE, left=ONCE)
def test_the_norm_is_computed_in_fp32(assignment):
    for dtype in (torch.float16, torch.bfloat16):
        norms, squares, scales, endless = zip(*once(of_16_bits, 4, assignment, dtype))
        told = f"C4 with a model in {dtype}, whose loss was multiplied by six numbers from 359 to 1024"
        for found, parts in zip(zip(*norms), zip(*squares)):
            right = sum(parts) ** 0.5
            for rank, norm in enumerate(found):
                assert norm == pytest.approx(right, rel=1e-4), (
                    f"{told}: the norm is {right:.6g}, and rank {rank} found {norm:.6g}. Before it is scaled its "
                    f"square is up to {(right / SCALE)**2:.2g}. fp16 reaches to 65,504, and bf16 keeps 3 digits: in "
                    "which dtype are they computed?"
                )
        for rank, each in enumerate(scales):
            for (whole, part, scale, clipped), norm in zip(each, norms[rank], strict=True):
                for found, wanted in ((whole, scale), (part, clipped)):
                    assert found == pytest.approx(wanted, rel=1e-5), (
                        f"{told}: gradient_scale was {scale:.6g}, the norm {norm:.6g}. After clip_grad_norm_ to "
                        f"{clipped / scale * norm if wanted is clipped else math.inf:.6g} it is {found:.6g} on rank "
                        f"{rank}, and {wanted:.6g} is right. The scale is a number of fp32, whatever the model is in: "
                        "16 bits round it"
                    )
        other, number = OVERFLOWS[dtype]
        for rank, norm in enumerate(endless):
            assert not math.isfinite(norm), (
                f"C4 on D × M = 2 × 2 with a model in {dtype}, where one element of rank {other}'s gradient was "
                f"{number}, of a parameter that is cut: rank {rank} found the norm {norm:.5g}. It is infinite, or NaN, "
                "on all ranks: whoever scales a loss must see that it has overflowed"
            )


def of_many_buckets(assignment):
    """For buckets of two sizes: how many there are, bytes that clip_grad_norm_ asks to send, and how many norms it
    returns in 26 calls. And for models in bf16 of 2 and 8 blocks: bytes of all gradient shards of this rank, those of
    the largest bucket in fp32, and bytes that operators make in clip_grad_norm_ at most."""
    found = []
    for bucket_bytes in (16384, 512):
        system = system_of(assignment, "C4", 2, bucket_bytes=bucket_bytes)
        system.model(*batch_of(0, 2)).backward()
        system.reduced_gradients()
        with checks.Calls() as calls:
            norms = [float(system.clip_grad_norm_(1e6))]
        norms += [float(system.clip_grad_norm_(1e6)) for _ in range(LATER)]
        found.append((len(system.buckets), sum(call.bytes for call in calls.made), len(set(norms))))
    made = []
    for layers in (2, 8):
        torch.manual_seed(5)
        system = assignment.System("C4", sizes_of(layers), make_mesh(2), BATCH, torch.bfloat16, "cpu", optim.SGD,
                                   lr=0.1, bucket_bytes=BUCKET)
        system.model(*batch_of(0, 2)).backward()
        shards = system.reduced_gradients()
        with Stock([*shards, *system.model.parameters()]) as stock:
            system.clip_grad_norm_(1e6)
        made.append((sum(shard.nbytes for shard in shards), 4 * max(bucket.padded for bucket in system.buckets),
                     stock.highest))
    return found, made


@pytest.mark.step(4, points=1, stuck=ONCE, left=ONCE)
def test_the_norm_costs_a_few_numbers(assignment):
    for name, *_, found in cases(assignment):
        for rank, ((_, sent, *_), *_) in enumerate(found):
            assert sent <= 1024, (
                f"{name}: for the norm rank {rank} took part in collectives of {in_words(sent)}: a few numbers are "
                "enough, no gradient need travel"
            )
    results = once(of_many_buckets, 4, assignment)
    for rank, (_, ((few, _, some), (many, largest, most))) in enumerate(results):
        assert most <= some + largest, (
            f"C4 on D × M = 2 × 2, in bf16: rank {rank}'s gradients have {in_words(few)}, and clip_grad_norm_ makes "
            f"new memory of {in_words(some)} at its peak. In a larger model they have {in_words(many)}, and it makes "
            f"{in_words(most)}: that is a copy of the gradients, and there is no room for one. It needs one number of "
            "each bucket: what it computes of a bucket can go before the next one comes"
        )
    for rank, (((few, sent, _), (many, more, norms)), _) in enumerate(results):
        assert more <= sent + 64, (
            f"C4 on D × M = 2 × 2: for the norm of {few} buckets rank {rank} took part in collectives of "
            f"{in_words(sent)}, and for the same norm of {many} buckets of {in_words(more)}. Squares of a rank's "
            "buckets add up on the rank first: one number for all of them is sent"
        )
        assert norms == 1, (
            f"C4 on D × M = 2 × 2: clip_grad_norm_ was called {LATER + 1} times for the same gradients, which are not "
            f"too large, and returned {norms} norms on rank {rank}. How often it was called must not matter"
        )


NOT_COMPLETE = ("a bucket may have no shard yet when clip_grad_norm_ is called, as on a rank that ran no backward: "
                "what makes the shards complete before they are read?")


def of_a_rank_without_backward(assignment):
    """The norm where replica 1 ran no backward: its gradients count as zero, in the mean as in the norm. What the
    tensor that was returned holds when there is a second norm, of another batch, and the scale after a max_norm of 0.
    And the norm, and the scale after it, where no rank ran a backward."""
    first, tokens = [], batch_of(0, 2)
    for name in ("C1", "C3"):
        system = system_of(assignment, name, 2)
        if system.mesh.data_rank == 0:
            system.model(*tokens).backward()
        norm = system.clip_grad_norm_(1e6)
        first.append(float(norm))
        system.zero_grad()
    system.model(*tokens).backward()
    system.clip_grad_norm_(1e6)
    system.clip_grad_norm_(0)
    kept, stop = float(norm), system.gradient_scale
    system.zero_grad()
    nothing = float(system.clip_grad_norm_(1.0))
    scales = [1.0 if scale is None else float(scale) for scale in (stop, system.gradient_scale)]
    return first, kept, nothing, *scales


@pytest.mark.step(4, points=1, raised=NOT_COMPLETE, stuck=NOT_COMPLETE, left=NOT_COMPLETE)
def test_gradients_are_complete_before_they_are_read(assignment):
    first = of_the_replicas(4, 2)[0]
    right = flat(first).norm().item() / 2  # the mean of its gradient and of none
    results = once(of_a_rank_without_backward, 4, assignment)
    for rank, ((other, norm), kept, nothing, stop, scale) in enumerate(results):
        assert _is(norm, right) and _is(other, right), (
            f"C1 and C3 on D × M = 2 × 2, where replica 1 ran no backward: rank {rank} found the norms {other:.5g} and "
            f"{norm:.5g}, and {right:.5g} is right: a missing gradient counts as zero, and {NOT_COMPLETE}"
        )
        assert norm == kept, (
            f"rank {rank}: clip_grad_norm_ returned {norm:.5g}, and the tensor that it returned holds {kept:.5g} after "
            "the next call: return a new one each time"
        )
        assert stop == 0, (
            f"rank {rank}: after clip_grad_norm_(0) the scale is {stop:.5g}: 0 is a max_norm as any other"
        )
        assert nothing == 0 and scale == 1, (
            f"C3 on D × M = 2 × 2, where no rank ran a backward: after clip_grad_norm_(1) rank {rank} has the norm "
            f"{nothing:.5g} and the scale {scale:.5g}, and 0 and 1 are right: what is not too large is not scaled"
        )
