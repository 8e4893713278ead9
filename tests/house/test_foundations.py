"""What the stages stand on, piece by piece: layout, precision, optimizers on shards, units."""

import types
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from misuse import in_ranks
from torch import nn

from zero_minimal.core import layout, optimizers, precision, units
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.guards import refused_models
from zero_minimal.guards.outputs import tensors_in

# ------------------------------------------------------------------------------------------------------------ layout


def some_parameters():
    shapes = [(7, 3), (1,), (), (0,), (64,), (5, 5, 5), (16,), (2, 33), (0, 4), (3,)]
    counts = [torch.arange(torch.Size(shape).numel(), dtype=torch.float32) for shape in shapes]
    return [nn.Parameter(count.view(shape) + 1) for count, shape in zip(counts, shapes, strict=True)]


@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("bucket_bytes", (1, 200, 1000, None))
def test_every_element_lies_in_one_bucket(world_size, bucket_bytes):
    params = some_parameters()
    values = [param.detach().clone() for param in params]
    buckets = layout.pack(params, [dict(params=params)], world_size, bucket_bytes)
    layout.flatten(buckets)
    for param, value in zip(params, values, strict=True):
        assert torch.equal(param, value)
        assert param.is_contiguous()
        param.grad = -param.detach().t().contiguous().t() if param.dim() == 2 else -param.detach()
    for bucket in buckets:
        assert bucket.padded % (world_size * layout.ALIGNMENT) == 0
        assert bucket_bytes is None or bucket.padded * 4 < bucket_bytes + world_size * layout.ALIGNMENT * 4
        assert bucket.zeros().shape == bucket.parameters.shape == (bucket.padded,)
        shards = [bucket.shard(bucket.parameters, rank) for rank in range(world_size)]
        assert all(shard.data_ptr() % 4 == 0 and shard.shape == (bucket.padded // world_size,) for shard in shards)
        assert torch.equal(torch.cat(shards), bucket.parameters)
        whole = bucket.zeros()
        bucket.fuse_gradients(whole)
        assert torch.equal(whole, -bucket.parameters)  # each gradient beside its parameter; padding zero
        for missing in (None, bucket.params[0], bucket.params[-1]):
            kept = {param: param.grad for param in bucket.params}
            for param in bucket.params:
                param.grad = None if param is missing else param.grad
            found = torch.full((bucket.padded,), float("nan"))
            bucket.fuse_gradients(found)
            filled = sum(bucket._place(found, param).numel() for param in bucket.params if param is not missing)
            there = ~found.isnan()
            assert there.sum() == filled, "where there is no gradient it stays as it is"
            assert torch.equal(found[there], -bucket.parameters[there])
            for param, gradient in kept.items():
                param.grad = gradient
        assert bucket.numel == (bucket.parameters != 0).sum()
    assert sum(bucket.numel for bucket in buckets) == sum(param.numel() for param in params)
    total = torch.cat([bucket.parameters for bucket in buckets])
    assert sorted(total[total != 0].tolist()) == sorted(torch.cat([value.flatten() for value in values]).tolist())


def test_groups_dtypes_and_order():
    """Parameters of different groups or dtypes never share a bucket; those that backward finishes first come first."""
    wide = [nn.Parameter(torch.randn(40)) for _ in range(4)]
    narrow = [nn.Parameter(torch.randn(40).bfloat16()) for _ in range(2)]
    order = [wide[0], narrow[0], wide[1], wide[2], narrow[1], wide[3]]
    groups = [dict(params=[wide[0], wide[1], narrow[0]]), dict(params=[wide[2], narrow[1]])]
    buckets = layout.pack(order, groups, 2, None)
    assert [(bucket.group_index, bucket.dtype) for bucket in buckets] == [
        (-1, torch.float32), (1, torch.bfloat16), (1, torch.float32), (0, torch.bfloat16), (0, torch.float32),
    ]
    assert [bucket.trained for bucket in buckets] == [False, True, True, True, True]
    assert [set(bucket.params) for bucket in buckets[-2:]] == [{narrow[0]}, {wide[0], wide[1]}]
    single = layout.pack(wide, [dict(params=wide)], 1, 4 * 48)
    sizes = [[param is wide[0] for param in bucket.params] for bucket in single]
    assert sizes == [[False], [False], [False], [True]]


def test_a_size_that_cannot_be_cut_is_refused():
    for wrong in (lambda elements, world_size: elements // world_size * world_size, lambda elements, world_size: 16):
        with pytest.raises(ValueError, match=r"padded_size\(\d+, 3\) is \d+: it must be a multiple of 3, and not less"):
            layout.pack(some_parameters(), [], 3, None, padded_size=wrong)


def test_bucket_bytes_makes_sense():
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="bucket_bytes"):
            refused_models.refuse_bucket_bytes(nn.Linear(2, 2), None, None, wrong)


# --------------------------------------------------------------------------------------------------------- precision


def test_masters():
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.randn(5).to(dtype)
        master = precision.master_of(half)
        assert master.dtype == torch.float32 and torch.equal(master, half.float())


def test_edits_reach_the_master_and_the_rest_stays_precise():
    master = nn.Parameter(torch.tensor([1.001, 2.002, 3.003, 4.004]))
    shard = master.detach().bfloat16()
    bucket = types.SimpleNamespace(parameter_shard=shard, master=master)
    shard[1] = 7.0
    precision.keep_changes(bucket)
    assert torch.equal(master.data, torch.tensor([1.001, 7.0, 3.003, 4.004]))


def test_clip():
    def norm(value):
        return torch.tensor(value)

    assert precision.clip(None, norm(0.5), 1.0).item() == 1.0
    assert precision.clip(None, norm(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-6)
    assert precision.clip(torch.tensor(0.5), norm(4.0), 1.0).item() == pytest.approx(0.125, rel=1e-6)
    assert precision.clip(None, norm(0.0), 1.0).item() == 1.0


@in_ranks(3)
def test_global_norm():
    """Over shards of several dtypes, as torch.nn.utils computes it on the whole."""
    rank = dist.get_rank()
    single, double, half = torch.float32, torch.float64, torch.bfloat16
    for dtypes in ((single,), (double, single), (single, double), (half, half)):
        whole = [torch.randn(24, generator=torch.Generator().manual_seed(seed)).to(d) for seed, d in enumerate(dtypes)]
        shards = [gradient.view(3, 8)[rank] for gradient in whole]
        expected = torch.cat([gradient.double() for gradient in whole]).norm()
        for norm in (precision.global_norm(shards), precision.global_norm(whole, sharded=False)):
            assert norm.shape == () and norm.item() == pytest.approx(expected.item(), rel=1e-6)
        assert precision.global_norm(shards, 0.5).item() == pytest.approx(expected.item() / 2, rel=1e-6)
    assert precision.global_norm([torch.full((2,), torch.inf if rank == 1 else 1.0)]).isinf()
    assert precision.global_norm([torch.full((2,), torch.nan if rank == 1 else 1.0)]).isnan()


class Recorder:
    """Stands for a stage: its gradients are what the test says."""

    group = None

    def __init__(self):
        self.gradient_scale, self.steps, self.gradients = None, 0, [torch.ones(3)]

    def reduced_gradients(self):
        return self.gradients

    def step(self):
        self.steps += 1
        self.used_scale = self.gradient_scale

    def zero_grad(self):
        self.gradient_scale = None


@in_ranks(2)
def test_loss_scaler():
    rank, zero, scaler = dist.get_rank(), Recorder(), LossScaler(initial_scale=2.0**10, growth_interval=3)

    def step(overflow_on=None, unscale=0):
        zero.gradients = [torch.ones(3), torch.full((2,), torch.inf if rank == overflow_on else 1.0)]
        assert scaler.scale(torch.tensor(3.0)).item() == 3.0 * scaler.scale_value
        for _ in range(unscale):
            scaler.unscale_(zero)
        taken = scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        return taken

    assert step(unscale=0) and zero.used_scale == 2.0**-10
    assert step(unscale=2) and zero.used_scale == 2.0**-10  # once, however often it is asked for
    assert not step(overflow_on=1)  # on every rank
    assert (zero.steps, scaler.scale_value) == (2, 2.0**9)
    assert all(step() for _ in range(2)) and scaler.scale_value == 2.0**9
    assert step() and scaler.scale_value == 2.0**10  # three good ones in a row
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale_value, other.state_dict()) == (2.0**10, scaler.state_dict())
    assert not step(overflow_on=0) and not step(overflow_on=1) and scaler.scale_value == 2.0**8


# -------------------------------------------------------------------------------------------------------- optimizers


def test_a_bucket_is_updated_alone():
    """With its group's options, in fp32, and as if the whole had been updated at once. Schedulers see nothing odd."""
    masters = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    buckets = [types.SimpleNamespace(group_index=index // 2, master=master, dtype=torch.float32, params=[], told=0,
                                     parameter_shard=master.data, gradient_shard=torch.randn(6))
               for index, master in enumerate(masters)]
    whole = [nn.Parameter(master.detach().clone()) for master in masters]
    options = [dict(weight_decay=0.1), dict(lr=0.5)]
    optimizer = optimizers.over_shards(torch.optim.AdamW, dict(lr=0.1), options, buckets)
    plain = torch.optim.AdamW([dict(params=whole[:2], **options[0]), dict(params=whole[2:], **options[1])], lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, plain)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for bucket, param in zip(buckets, whole, strict=True):
                before = [master.detach().clone() for master in masters]
                optimizers.update_shard(optimizer, bucket, torch.tensor(0.25))
                changed = [not torch.equal(old, new) for old, new in zip(before, masters, strict=True)]
                assert changed == [bucket.master is master for master in masters]
                assert bucket.master.grad is None
                param.grad = bucket.gradient_shard * 0.25
            plain.step()
            for scheduler in schedulers:
                scheduler.step()
    for master, param in zip(masters, whole, strict=True):
        assert torch.equal(master, param)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def test_an_update_that_fails_leaves_the_optimizer_as_it_was():
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([dict(params=[param]), dict(params=[nn.Parameter(torch.zeros(2))])], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizers.update(optimizer, optimizer.param_groups[0], param, torch.ones(3))
    assert param.grad is None and [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


# ------------------------------------------------------------------------------------------------------------- units


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([self.Block(), nn.Tanh(), nn.ModuleList([nn.Linear(2, 3)])])
        self.named = nn.ModuleDict({"a": nn.Linear(2, 4)})
        self.shared = self.blocks[0].inner[0].weight

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.inner = nn.Linear(2, 5), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 6)])

        def forward(self, x):
            return self.own(x)


def owned(found, model):
    names = {param: name for name, param in model.named_parameters()}
    return {unit.name: sorted(names[param] for param in unit.params) for unit in found}


def test_units():
    model = Tree()
    found = units.find_units(model)
    assert found[0].module is model
    assert owned(found, model) == {
        "": ["first.bias", "first.weight", "named.a.bias", "named.a.weight", "shared"],
        "blocks.0": ["blocks.0.own.bias", "blocks.0.own.weight"],
        "blocks.0.inner.0": ["blocks.0.inner.0.bias"],
        "blocks.0.inner.1": ["blocks.0.inner.1.bias", "blocks.0.inner.1.weight"],
        "blocks.2.0": ["blocks.2.0.bias", "blocks.2.0.weight"],
    }
    inner = next(unit for unit in found if unit.name == "blocks.0.inner.1")
    assert {unit.name for unit in inner.parents} == {"", "blocks.0"}
    assert list(owned(units.find_units(model, [model.first]), model)) == ["", "first"]
    assert list(owned(units.find_units(model, []), model)) == [""]
    with pytest.raises(ValueError, match="not a part of the model"):
        units.find_units(model, [nn.Linear(2, 2)])


@dataclass
class Answer:
    one: torch.Tensor
    rest: object = None


def test_tensors_in_outputs():
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    circle = types.SimpleNamespace(tensor=c)
    circle.self = circle
    output = (a, [Answer(b, rest={"x": circle, "y": None, "z": "text"})], Answer, nn.Linear(2, 2), 3, {"deep": ((d,),)})
    assert [tensor.item() for tensor in tensors_in(output)] == [0.0, 1.0, 2.0, 3.0]
