"""Collectives: operations in which all ranks exchange tensors.

    reduce_scatter   [N·s] on every rank → rank r holds part r of the sum       [s]
    all_gather       [s] on every rank → all parts in rank order, everywhere    [N·s]
    all_reduce       = reduce_scatter, then all_gather: the sum, everywhere
    broadcast        one rank's tensor, everywhere

For example, two ranks hold [1, 2] and [3, 4]: reduce_scatter(op="sum") leaves [4] on one and [6] on
the other; all_gather of these gives [4, 6] on both. The default op is "avg", the mean.

All ranks must call the same functions in the same order. A rank of a ring sends (N−1)/N of the
payload for each of the first two, and twice that for an all_reduce (core/ring.py shows how).

On gloo sums run in rank order, and in fp32 for 16-bit tensors. So an element's sum does not depend
on the bucket it travels in, and all stages reduce the same gradients to the same average, bit for
bit. (With accumulation they reduce different ones: stages 0 and 1 the sum of the micro-batches,
stages 2 and 3 each by itself. NCCL sums in an order of its own.)

gloo's own reduce-scatter moves as much as an all-reduce, twice what it should, and its all-gather
copies the result once more. Ours are plain messages: each rank sends part r to rank r, or its own
part to everyone, and every part lands where it belongs. A tensor on a GPU goes through host memory,
since gloo runs on the CPU. On NCCL the native functions are called.

The decorator `collective` (work.py) gives each function three arguments in the place of call=:
group=, where None is all ranks; async_op=, with which it returns a `Work` at once, and else None,
when the result is in place; of=, which names what is sent, for errors.
"""

import time

import torch
import torch.distributed as dist

from zero_minimal.core.seams import tell
from zero_minimal.core.sums import sum_in_rank_order
from zero_minimal.core.work import Call, Work, collective, other_ranks, wait_for_half_done

# torch 2.13 renamed both
_native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LONG = 2**18  # bytes: before it sends a message as long as this, a rank sleeps for …
NAP = 1e-5  # seconds: meanwhile gloo's thread can see that the other rank is ready for it
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


@collective
def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, *, op: str = "avg", call: Call
) -> Work:
    """Sum or average `input` over the ranks; this rank's part of the result goes to `output`.

    Args:
        output: [s], any floating dtype. It may be this rank's own part of `input`.
        input: [N·s], part r meant for rank r.
        op: "avg" or "sum".
    """
    group, world_size, rank = _place(call)
    if dist.get_backend(group) != "gloo":
        work = _native_reduce_scatter(output, input, op=_OPS[op], group=group, async_op=True)
        return Work([work])
    # every rank has a summand for each part: leaving[r] is ours for part r, and goes to rank r;
    # arriving[r] is rank r's for our own part, and our own summand needs no message
    leaving = _on_host(input, group).view(world_size, -1).unbind()
    scratch = leaving[0].new_empty(world_size - 1, output.numel())
    arriving = list(scratch.unbind())
    arriving.insert(rank, leaving[rank])

    def finish():
        total = torch.empty_like(output, device="cpu") if output.is_cuda else output
        sum_in_rank_order(arriving, total.view(-1), op)
        free(scratch)
        if total is not output:
            output.copy_(total)

    return Work(_exchange(leaving, arriving, call), finish)


@collective
def all_gather(output: torch.Tensor, input: torch.Tensor, *, call: Call) -> Work:
    """Collect every rank's `input` [s] into `output` [N·s], in rank order. `input` may be this
    rank's own part of `output`."""
    group, world_size, rank = _place(call)
    if dist.get_backend(group) != "gloo":
        return Work([_native_all_gather(output, input, group=group, async_op=True)])
    host = torch.empty_like(output, device="cpu") if output.is_cuda else output
    arriving = host.view(world_size, -1).unbind()  # arriving[r] comes from rank r
    if arriving[rank].data_ptr() != input.data_ptr():
        arriving[rank].copy_(input.view(-1))
    works = _exchange([arriving[rank]] * world_size, arriving, call)
    return Work(works, lambda: host is output or output.copy_(host))


@collective
def all_reduce(tensor: torch.Tensor, *, op: str = "avg", call: Call) -> Work:
    """Sum ("sum"), average ("avg") or maximum ("max") of `tensor` over the ranks, in place. On
    gloo a reduce_scatter and an all_gather, except for "max", which gloo does itself."""
    group, world_size, rank = _place(call)
    if dist.get_backend(group) != "gloo":
        return Work([dist.all_reduce(tensor, op=_OPS[op], group=group, async_op=True)])
    if op == "max":
        _meet(call)
        host = _on_host(tensor, group)
        work = dist.all_reduce(host, op=_OPS[op], group=group, async_op=True)
        return Work([work], lambda: tensor.copy_(host))

    flat = _padded(tensor, world_size)
    part = flat.view(world_size, -1)[rank]
    scattered = reduce_scatter.part(part, flat, op=op, call=call)

    def gather():
        scattered.wait()
        all_gather.part(flat, part, call=call).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat[: tensor.numel()].view(tensor.shape))

    return Work([], gather, half_done=True)


@collective
def broadcast(tensor: torch.Tensor, root: int = 0, *, call: Call) -> Work:
    """Copy the tensor of rank `root` of the group to all ranks, in place. Any dtype."""
    host = _on_host(tensor, call.group).resolve_conj().contiguous()
    as_bytes = host.view(-1).view(torch.uint8)
    source = dist.get_global_rank(call.group, root)
    _meet(call)
    work = dist.broadcast(as_bytes, source, group=call.group, async_op=True)

    def finish():
        # only where it differs: an expanded tensor (a mask, say) cannot be written
        if host is not tensor and not torch.equal(host, tensor.to(host.device)):
            tensor.copy_(host)

    return Work([work], finish)


def free(tensor: torch.Tensor) -> None:
    """Free a tensor's memory now, even if gloo's threads or autograd still refer to it."""
    if not tensor.untyped_storage().resizable():
        raise RuntimeError("numpy holds memory that is to be freed, of a parameter, say: write "
                           "weight.detach().clone().numpy(), or weight.tolist()")
    tensor.untyped_storage().resize_(0)


def _exchange(leaving: list, arriving: list, call: Call) -> list:
    """Start to send leaving[r] to every other rank r, and to receive arriving[r] from it. Returns
    the works to wait for.

    Receives are posted before sends, so that a message is written to its place as it comes.
    """
    # the group's own methods: dist.isend and dist.irecv do checks that cost time
    group, others = call.group, other_ranks(call.group)
    tell("messages", "open", call)
    works = [group.recv([arriving[other]], other, call.tag) for other in reversed(others)]
    if others and leaving[others[0]].nbytes >= LONG:
        time.sleep(NAP)
    works += [group.send([leaving[other]], other, call.tag) for other in others]
    tell("messages", "sent", call)
    return works


def _place(call: Call) -> tuple[dist.ProcessGroup, int, int]:
    """The group, how many ranks it has, and which of them this one is."""
    return call.group, call.group.size(), call.group.rank()


def _meet(call: Call) -> None:
    """Before one of gloo's own collectives, which could take messages still to come for its own."""
    wait_for_half_done(call.group)
    tell("messages", "read", call)


def _on_host(tensor, group):
    """Where gloo can read it."""
    return tensor.cpu() if tensor.is_cuda and dist.get_backend(group) == "gloo" else tensor


def _padded(tensor, world_size: int):
    """The tensor as [N·s]: a view where that is possible, else a copy filled up with zeros."""
    if tensor.is_contiguous() and tensor.numel() and tensor.numel() % world_size == 0:
        return tensor.view(-1)
    flat = tensor.new_zeros(max(1, -(-tensor.numel() // world_size)) * world_size)
    flat[: tensor.numel()] = tensor.reshape(-1)
    return flat
