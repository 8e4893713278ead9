"""What goes through a buffer comes back exact, or is refused while all is as it was, and nothing hangs afterwards."""

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fused_all_reduce
from zero_minimal.core import fused

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
SIZE = 400  # bytes of a buffer: the first tensor is larger


def first():
    """A tensor that would be under way, or even reduced, by the time the next one is looked at."""
    return torch.arange(3.0 * SIZE) + dist.get_rank()


def shared():
    whole = torch.ones(6)
    return whole[:4], whole[3:]


REFUSED = {  # all but the first tensor; dtype of the buffers; the error
    "int64 above 2^24": (lambda: [torch.tensor([2**24 + 1])], torch.float32, "torch.int64 is none"),
    "int64 in fp64": (lambda: [torch.tensor([2**60 + 1])], torch.float64, "torch.int64 is none"),
    "int8": (lambda: [torch.ones(3, dtype=torch.int8)], torch.float32, "torch.int8 is none"),
    "bool": (lambda: [torch.tensor([True])], torch.float32, "torch.bool is none"),
    "complex": (lambda: [torch.ones(3, dtype=torch.complex64)], torch.float32, "torch.complex64 is none"),
    "buffers of int64": (lambda: [], torch.int64, "torch.int64 is none"),
    "fp64 in fp32": (lambda: [torch.ones(3, dtype=torch.float64)], torch.float32, "torch.float64 does not fit"),
    "fp32 in bf16": (lambda: [], torch.bfloat16, "torch.float32 does not fit"),
    "not contiguous": (lambda: [torch.ones(3, 4).t()], torch.float32, "contiguous"),
    "expanded": (lambda: [torch.ones(1).expand(4)], torch.float32, "contiguous"),
    "no tensor": (lambda: [None], torch.float32, "NoneType"),
    "shared memory": (lambda: [*shared()], torch.float32, "share memory"),
    "on another device": (lambda: [torch.ones(3, device="meta")], torch.float32, "buffers on cpu"),
}


def refused(name):
    make, dtype, words = REFUSED[name]
    begin, rest = first(), make()
    with pytest.raises((ValueError, TypeError), match=words):
        all_reduce([begin, *rest], ConstantBuffers(SIZE, dtype=dtype))
    assert torch.equal(begin, first()), f"{name}: the first tensor was changed"
    if dtype == torch.float32 and name != "on another device":  # that of the fused buffer
        with pytest.raises((ValueError, TypeError), match=words):
            fused_all_reduce([begin, *rest])
        assert torch.equal(begin, first())
    all_reduce([begin], ConstantBuffers(SIZE))
    mean = (dist.get_world_size() - 1) / 2
    assert torch.equal(begin, torch.arange(3.0 * SIZE) + mean), f"{name}: what comes next is wrong"


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", (2, 3))
def test_refused_before_anything_is_sent(world_size):
    def look():
        for name in REFUSED:
            refused(name)

    toys.run(look, world_size)


def test_on_one_rank_only_it_ends_them_all():
    def look():
        dtype = torch.int64 if dist.get_rank() == 1 else torch.float32
        all_reduce([torch.ones(300), torch.ones(300, dtype=dtype)], ConstantBuffers(SIZE))

    with pytest.raises(Exception, match="torch.int64 is none"):
        toys.run(look, 2)


def of_all_dtypes(dtype):
    """Small whole numbers, which every dtype has exactly, and so have their sums."""
    kinds = [kind for kind in FLOATS if fused.holds(dtype, kind)]
    tensors = [torch.full((50,), 1.0 + dist.get_rank()).to(kind) for kind in kinds]
    all_reduce(iter(tensors), ConstantBuffers(SIZE, dtype=dtype), op="sum")
    return [tensor.double() for tensor in tensors]  # not every dtype can be pickled


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_mixed_dtypes_that_fit_are_summed(world_size, dtype):
    total = world_size * (world_size + 1) / 2
    for tensors in toys.run(of_all_dtypes, world_size, dtype):
        assert tensors and all((tensor == total).all() for tensor in tensors)


def test_fp64_is_exact_in_fp64():
    def look():
        tensor = torch.tensor([1 / 3 + dist.get_rank()], dtype=torch.float64)
        all_reduce([tensor], ConstantBuffers(5e2, dtype=torch.float64), op="sum")
        return tensor.item()

    assert toys.run(look, 2) == [1 / 3 + (1 / 3 + 1)] * 2


def test_which_dtype_holds_which():
    """By every value of the 16-bit and 8-bit ones."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    every = {kind: numbers.view(kind) for kind in (torch.bfloat16, torch.float16)}
    every |= {kind: torch.arange(-128, 128).to(torch.int8).view(kind) for kind in FLOATS[4:]}
    for kind, its_values in every.items():
        exact = its_values.double().nan_to_num(0, 0, 0)
        for wide in FLOATS[:4]:
            survives = exact.to(wide).double().equal(exact)
            assert survives == fused.holds(wide, kind), f"{kind} in {wide}"
    assert fused.holds(torch.float64, torch.float32) and not fused.holds(torch.float32, torch.float64)
