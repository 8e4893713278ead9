"""A wrap that is refused, or fails half-way, leaves the model as it was: a corrected one works."""

from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage, in_ranks
from thorough import sample
from torch import nn, optim

from zero_minimal.extensions.averages import Average
from zero_minimal.naive import Naive
from zero_minimal.processes.ranks import RankError


class Grown(toys.Transformer):
    """With something more: a parameter or a buffer."""

    def __init__(self, **more):
        super().__init__()
        for name, value in more.items():
            if isinstance(value, nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)


class Forgetful(nn.LayerNorm):
    """Draws what it inherits, and not what it adds."""

    def __init__(self, size):
        super().__init__(size)
        self.scale = nn.Parameter(torch.ones(size))


class Late(toys.Transformer):
    """The last block holds a parameter that nobody draws."""

    def __init__(self):
        super().__init__()
        self.blocks[2].norm2 = Forgetful(15)


class HalfMeta(Late):
    """Its first blocks are here, the last is on the meta device."""

    def __init__(self):
        super().__init__()
        self.blocks[2].to("meta")


class Undrawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))

    def reset_parameters(self):
        raise KeyError("no numbers")


class Fails(optim.SGD):
    """On all parameters at once: so not where a stage tries it on a few elements."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        if sum(param.numel() for group in self.param_groups for param in group["params"]) > 200:
            raise KeyError("too many")


class Picky(optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        if any("depth" in group for group in self.param_groups):
            raise LookupError("depth")


class Tied(nn.Module):
    """By their memory, and not as one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight.data = self.embedding.weight.data


class Looks(nn.Linear):
    """It keeps a part of its own weight."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("first", self.weight.data[:1])


class Shared(nn.Module):
    """Its weight [4, 4] is also in what other(weight) gives."""

    def __init__(self, other, buffer=False, attribute=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        if buffer:
            self.register_buffer("other", other(self.weight.data))
        elif attribute:
            self.kept = other(self.weight.data)
        else:
            self.other = other(self.weight.data)

    def forward(self, x):
        return x @ self.weight


def inference():
    with torch.inference_mode():
        return toys.Transformer()


def on_meta():
    with torch.device("meta"):
        return Late()


def in_groups(*choose):
    """Options of a wrap: an optimizer group of what each of these chooses of a model."""
    return lambda model: {"param_groups": [{"params": list(params(model))} for params in choose]}


def stranger(model):
    return [nn.Parameter(torch.ones(3))]


# ways to mend a model: (model, stage) → one that can be wrapped


def another(model, stage):
    return toys.Transformer()


def without_more(model, stage):
    del model.more
    return model


def drawn(model, stage):
    model.blocks[2].norm2 = nn.LayerNorm(15)
    if stage < 3:
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


SPARSE = torch.eye(3).to_sparse()
PARAMETERS, HEAD = nn.Module.parameters, lambda model: [model.head.weight]
# what is said; how the model is made; what is wrong beside it, or a function of the model; how the model is mended
Wrong = namedtuple("Wrong", "words make options mend", defaults=(toys.Transformer, {}, lambda model, stage: model))
CASES = {
    "optimizer fails": Wrong("too many", options=dict(optimizer=Fails)),
    "optimizer refuses a group": Wrong("depth", options=lambda model: {
        "param_groups": [{"params": list(model.parameters()), "depth": 3}], "optimizer": Picky}),
    "unknown option": Wrong("does not take these options", options=dict(momentun=0.9)),
    "wrong option": Wrong("Invalid learning rate", options=dict(lr=-1.0)),
    "not element-wise": Wrong("not element-wise", options=dict(optimizer=optim.LBFGS)),
    "a name": Wrong("give the optimizer's class", options=dict(optimizer="SGD")),
    "an optimizer": Wrong("give the optimizer's class", options=lambda model: {
        "optimizer": optim.SGD(model.parameters(), lr=0.1)}),
    "a stranger": Wrong("does not have", options=in_groups(PARAMETERS, stranger)),
    "in two groups": Wrong("twice", options=in_groups(PARAMETERS, HEAD)),
    "twice in a group": Wrong("twice", options=in_groups(lambda model: HEAD(model) * 2)),
    "an empty group": Wrong("no parameter to train", options=in_groups(lambda model: [])),
    "all is frozen": Wrong("no parameter to train", lambda: toys.Transformer().requires_grad_(False),
                           mend=lambda model, stage: model.requires_grad_(True)),
    "bytes": Wrong("give a number of bytes", options=dict(bucket_bytes="4 MB")),
    "sparse parameter": Wrong("is sparse", lambda: Grown(more=nn.Parameter(SPARSE, requires_grad=False)),
                              mend=without_more),
    "sparse buffer": Wrong("is sparse", lambda: Grown(more=SPARSE), mend=without_more),
    "meta buffer": Wrong("on the meta device", lambda: Grown(more=torch.empty(3, device="meta")), mend=without_more),
    "meta": Wrong("on the meta device", on_meta, mend=drawn),
    "half meta": Wrong("on the meta device", HalfMeta, mend=drawn),
    "a drawer that fails": Wrong("no numbers|only stage 3", lambda: nn.Sequential(nn.Linear(3, 3), Undrawn()),
                                 mend=another),
    "no shape yet": Wrong("'0.weight' has no shape yet", lambda: nn.Sequential(nn.LazyLinear(3)), mend=another),
    "inference": Wrong("torch.inference_mode", inference, mend=another),
    "one memory": Wrong("parameter 'embedding.weight' and parameter 'head.weight' share memory", Tied, mend=another),
    "a view": Wrong("parameter 'weight' and buffer 'first' share memory", Looks, mend=another),
    "a transposed tie": Wrong("parameter 'weight' and parameter 'other' share memory",
                              lambda: Shared(lambda weight: nn.Parameter(weight.t())), mend=another),
    "slices that overlap": Wrong("parameter 'other' share", lambda: Shared(lambda weight: nn.Parameter(weight[:, 1:3])),
                                 mend=another),
    "a transposed buffer": Wrong("buffer 'other' share memory",
                                 lambda: Shared(lambda weight: weight.t(), buffer=True), mend=another),
    "an attribute": Wrong("parameter 'weight' and attribute 'kept' share memory",
                          lambda: Shared(lambda weight: weight.detach(), attribute=True), mend=another),
    "a list of a dict": Wrong("attribute 'kept' share memory", lambda: Shared(
        lambda weight: {"all": [weight[0].detach()]}, attribute=True), mend=another),
}


def picture(model):
    """Of each parameter and buffer: what it is, where, and its values."""
    def values(tensor):
        known = not tensor.is_meta and tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
        return tensor.detach().clone() if known else None

    return [(name, type(tensor), id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, values(tensor))
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]]


def same(ours, theirs, values=True):
    return all(a[:6] == b[:6] and (a[6] is None) == (b[6] is None) and
               (a[6] is None or not values or torch.equal(a[6], b[6])) for a, b in zip(ours, theirs, strict=True))


def hooks_of(model):
    return [len(hooks) for module in model.modules() for hooks in
            (module._forward_hooks, module._forward_pre_hooks, module._state_dict_pre_hooks)]


def wrap(stage, model, optimizer=optim.SGD, **options):
    return toys.STAGES[stage](model, optimizer, **{"lr": 0.1, "bucket_bytes": 4096} | options)


def fail_and_correct(stage, case):
    words, make, options, mend = CASES[case]
    torch.manual_seed(dist.get_rank())
    model = make()
    options = options(model) if callable(options) else options
    before, hooks = picture(model), hooks_of(model)
    with pytest.raises((ValueError, TypeError, LookupError), match=words) as caught:
        wrap(stage, model, **options)
    # what fails late has taken rank 0's values by then, as the next wrap will
    late = case in ("optimizer fails", "half meta") and dist.get_rank() > 0
    assert same(picture(model), before, values=not late)
    assert hooks_of(model) == hooks
    zero = wrap(stage, mend(model, stage))  # while the first error is still held
    start = toys.whole_parameters(zero)
    toys.step_of(zero, 0)
    assert 0 < toys.distance(start, toys.whole_parameters(zero)) < 10 and caught.value is not None


@pytest.mark.thorough
@by_stage
@in_ranks(2)
def test_a_corrected_wrap_works(stage):
    for case in CASES:
        if case == "bytes" and stage == 3:
            continue  # there a unit is a bucket
        try:
            fail_and_correct(stage, case)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


@in_ranks(2)
def test_interleaved_columns_of_one_tensor_share_nothing():
    whole, model = torch.randn(4, 4), nn.Module()
    model.even, model.odd = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])
    model.upper, model.lower = nn.Parameter(torch.randn(6)[:3]), nn.Parameter(torch.randn(6)[3:])
    del whole  # nobody else holds it
    wrap(1, model)


# ------------------------------------------------------------------------------------------------- ranks that differ


def frozen(model, part):
    getattr(model, part).requires_grad_(False)
    return model


def parts_of(stage, odd):
    model = toys.Transformer()
    return model, {"units": [model.blocks[odd]]} if stage == 3 else {"bucket_bytes": 600 + 4000 * odd}


def in_order(stage, odd):
    model = nn.Linear(3, 3)
    return model, {"param_groups": [{"params": param} for param in [model.weight, model.bias][:: 1 - 2 * odd]]}


def optimizer(**options):
    return lambda stage, odd: (nn.Linear(3, 3), options if odd else {})


ODD = {  # what differs: (stage, whether this is an odd rank) → a model, and options of the wrap
    "model in its length": lambda stage, odd: (toys.Transformer(blocks=2 + odd), {}),
    "model in a shape": lambda stage, odd: (nn.Linear(3, 3 + odd), {}),
    "model in a dtype": lambda stage, odd: (nn.Linear(3, 3, dtype=(torch.float32, torch.float64)[odd]), {}),
    "model in a name": lambda stage, odd: (nn.ModuleDict({"ab"[odd]: nn.Linear(3, 3)}), {}),
    "model in the order of groups": in_order,
    "model in its buckets": parts_of,
    "optimizer in an option": optimizer(momentum=0.9),
    "optimizer in options": optimizer(nesterov=False, weight_decay=1e-4),
    "optimizer in its class": optimizer(optimizer=optim.Adam),
    "model in what is frozen": lambda stage, odd: (frozen(toys.Transformer(), ("norm", "head")[odd]), {}),
}


def differ_and_correct(stage):
    for what, build in ODD.items():
        model, options = build(stage, dist.get_rank() > 0)
        before = picture(model)
        with pytest.raises(RuntimeError, match=f"the {what.split()[0]} of rank 1 differs from rank 0's in "):
            wrap(stage, model, **options)
        assert same(picture(model), before), what
    zero = wrap(stage, model.requires_grad_(True))
    toys.step_of(zero, 0)
    return toys.whole_parameters(zero)


@by_stage
@pytest.mark.parametrize("world_size", sample((2, 3), [2]))
def test_ranks_that_differ(world_size, stage):
    first, *others = toys.run(differ_and_correct, world_size, stage)
    assert all(toys.identical(first, other) for other in others)


@pytest.mark.parametrize("stage_class", (Naive, *toys.STAGES))
def test_needs_ranks(stage_class):
    with pytest.raises(RuntimeError, match=r"ranks\.start\(\).*ranks\.run"):
        stage_class(nn.Linear(3, 3), optim.SGD, lr=0.1)


def trained(stage):
    zero = wrap(stage, toys.Transformer(), optim.AdamW, lr=0.01)
    losses = [toys.step_of(zero, step) for step in range(3)]
    with Average(zero).in_place():
        return losses, toys.whole_parameters(zero)


@by_stage
@in_ranks(2)
def test_the_users_default_device_matters_to_what_the_user_makes_alone(stage):
    torch.manual_seed(0)
    losses, values = trained(stage)
    torch.manual_seed(0)
    model = toys.Transformer()
    batches = [toys.tokens(dist.get_rank(), step) for step in range(3)]
    with torch.device("meta"):
        zero = wrap(stage, model, optim.AdamW, lr=0.01)
        assert losses == [toys.learn(zero, model(*batch)) for batch in batches]
        with Average(zero).in_place(), zero.gather_parameters():
            assert toys.identical(model.parameters(), values)


def empty_on_one_rank():
    wrap(2, toys.Transformer().requires_grad_(dist.get_rank() == 0))


def test_one_rank_alone_makes_the_mistake():
    with pytest.raises(RankError, match="(?s)rank 1 of 2.*no parameter to train") as caught:
        toys.run(empty_on_one_rank, 2, timeout=60)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, ValueError)
