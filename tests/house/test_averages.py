"""Moving averages of the weights: in shards, by torch's AveragedModel, or written by hand, at all stages the same."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage, in_ranks
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero_minimal.extensions.averages import Average
from zero_minimal.guards.collective_fingerprint import EDITED

pytestmark = pytest.mark.thorough

PAGE = (Path(__file__).parents[2] / "lessons/manual/own-model.md").read_text()
DECAY, STEPS = 0.9, 4


class Frozen(toys.Transformer):
    """Some of it is not trained: at stage 3 that lies in a bucket too."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)


def wrap(stage, dtype=torch.float32, make=Frozen):
    torch.manual_seed(0)
    model = make().to(dtype)
    return model, toys.STAGES[stage](model, optim.AdamW, lr=1e-2, bucket_bytes=4096)


def losses_of(model):
    """Of both ranks' batches."""
    with torch.no_grad():
        return [model(*toys.tokens(rank, 9)).item() for rank in range(2)]


def average_in_four_ways(stage, dtype):
    model, zero = wrap(stage, dtype)
    sharded = Average(zero, DECAY)
    with zero.gather_parameters():
        torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        torchs.update_parameters(model)  # its first update is a copy
        by_hand = {name: param.detach().clone() for name, param in model.named_parameters()}
    trained = []
    for step in range(STEPS):
        model(*toys.tokens(dist.get_rank(), step)).backward()
        zero.step()
        sharded.update()
        with zero.gather_parameters():
            torchs.update_parameters(model)
            for name, param in model.named_parameters():
                if param.requires_grad:
                    by_hand[name].lerp_(param.detach(), 1 - DECAY)
            trained.append([param.detach().clone() for param in model.parameters()])
        zero.zero_grad()
    before, outside = zero.state_dict()["shards"], losses_of(model)
    before = [shard.clone() for shard in before]
    kept = [*zero.optimizer.param_groups, *zero.optimizer.state.values()]  # the program may hold them, too
    with sharded.in_place():
        inside = losses_of(model)
        with zero.gather_parameters():
            means = [param.detach().clone() for param in model.parameters()]
    assert toys.identical(zero.state_dict()["shards"], before) and losses_of(model) == outside, "the weights are back"
    after = [*zero.optimizer.param_groups, *zero.optimizer.state.values()]
    assert all(one is other for one, other in zip(kept, after, strict=True))
    model(*toys.tokens(dist.get_rank(), STEPS)).backward()  # training goes on
    assert not [bucket.moment for bucket in zero.buckets if EDITED in bucket.moment]
    zero.step()
    return dict(means=means, inside=inside, outside=outside, by_hand=list(by_hand.values()), torchs=losses_of(torchs),
                trained=trained, after=toys.whole_parameters(zero), mine=sum(shard.nbytes for shard in sharded.shards))


@by_stage
@pytest.mark.parametrize("world_size", (2, 3))
def test_all_ways_are_one(world_size, stage):
    first, *others = toys.run(average_in_four_ways, world_size, stage, torch.float32)
    assert toys.identical(first["means"], first["by_hand"])
    assert first["inside"] == pytest.approx(first["torchs"], rel=1e-5)
    assert first["inside"] != first["outside"]
    for other in others:
        assert toys.identical(other["means"], first["means"]) and other["inside"] == first["inside"]
        assert toys.identical(other["after"], first["after"])
    whole = sum(param.nbytes for param in Frozen().parameters() if param.requires_grad)
    share = whole / (1 if stage == 0 else world_size)
    assert share <= first["mine"] < 1.2 * share + 4096, "a rank averages what it updates"


def train_without(stage, dtype):
    """The same training, without any average."""
    model, zero = wrap(stage, dtype)
    for step in range(STEPS + 1):
        model(*toys.tokens(dist.get_rank(), step)).backward()
        zero.step()
        zero.zero_grad()
    return toys.whole_parameters(zero)


@by_stage
def test_in_16_bit_the_average_is_of_the_masters(stage):
    """A decay so close to 1 that 16 bit would round the change away."""
    (first, _), wanted = toys.run(average_in_four_ways, 2, stage, torch.bfloat16), toys.run(train_without, 2, stage,
                                                                                        torch.bfloat16)
    assert toys.identical(first["after"], wanted[0]), "training went on as without averages"
    start = [param.detach() for param in wrap_in_one_process()]
    exact = [param.double() for param in start]
    for weights in first["trained"]:
        exact = [mean.lerp(weight.double(), 1 - DECAY) for mean, weight in zip(exact, weights, strict=True)]
    ours = toys.distance(first["means"], exact)
    assert ours < 0.5 * toys.distance(start, exact)
    assert ours <= toys.distance(first["by_hand"], exact)


def wrap_in_one_process():
    torch.manual_seed(0)
    return list(Frozen().to(torch.bfloat16).parameters())


@by_stage
@in_ranks(2)
def test_it_is_for_evaluation(stage):
    model, zero = wrap(stage)
    average = Average(zero)
    with pytest.raises(RuntimeError, match=r"zero\.step\(\) outside in_place\(\)"), average.in_place():
        model(*toys.tokens(0, 0)).backward()
        zero.step()
    zero.zero_grad()
    model(*toys.tokens(0, 0)).backward()
    with pytest.raises(RuntimeError, match="enter in_place\\(\\) after it"), average.in_place():
        pass
    zero.zero_grad()
    before = toys.whole_parameters(zero)
    with pytest.raises(ZeroDivisionError), average.in_place():
        raise ZeroDivisionError
    assert toys.identical(toys.whole_parameters(zero), before)


# ----------------------------------------------------------------------------------------------- what the manual shows


def sample_of_the_manual(stage, sample, model_class):
    torch.manual_seed(dist.get_rank())
    space = {"torch": torch, "nn": nn}
    exec(model_class, space)
    model = space["Model"]()
    zero = toys.STAGES[stage](model, optim.AdamW, lr=0.01)
    space |= dict(model=model, zero=zero, batches=[torch.randn(16, 8) for _ in range(5)])
    exec(sample, space)
    x = space["x"]
    return space["smooth_loss"].item(), (space["smooth"](x) - x.sort().values).square().mean().item()


@by_stage
def test_the_sample_runs_as_it_stands(stage):
    first, second = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]
    model_class = re.search(r"^class Model.*?(?=^\S)", first, re.MULTILINE | re.DOTALL)[0]
    for in_place, copied in toys.run(sample_of_the_manual, 2, stage, second, model_class):
        assert in_place == copied
