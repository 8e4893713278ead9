"""What a PyTorch user would try: it works, or is refused with the line to write instead."""

import copy
import functools
import io
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import Coder, by_stage, by_world, draw, refused
from thorough import sample
from torch import nn, optim

from zero_minimal.core.loss_scaler import LossScaler


def wrap(stage, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return toys.STAGES[stage](Coder().to(dtype), optim.SGD, lr=0.1, bucket_bytes=600, **options)


def numbers_of(stage, use):
    """Losses and what else `use` finds in three steps; all in fp32, so that stages can be compared bit for bit."""
    zero, rank, found = wrap(stage), dist.get_rank(), []
    for step in range(3):
        y = use(zero.model, draw(step, rank), found)
        loss = y.logsumexp(-1).mean()
        loss.backward()
        zero.step()
        zero.zero_grad()
        found.append(loss.item())
    return found


# ------------------------------------------------------------------------------------- parts of a model, by themselves


def encode_then_head(model, x, found):
    return model.head(model.encode(x))


def head_alone(model, x, found):
    return model.head(model.embedding(x))


def evaluate_parts(model, x, found):
    with torch.no_grad():
        found += [model.encode(x).sum().item(), model.head(torch.ones(16)).sum().item()]
        found += [model.embedding(x).sum().item(), model.blocks[1](torch.ones(16)).sum().item()]
    return model(x)


def hooks_of_the_user(model, x, found):
    handles = [block[0].register_forward_pre_hook(lambda module, _: found.append(module.weight.sum().item()))
               for block in model.blocks]
    handles += [block.register_forward_pre_hook(lambda module, _: found.append(module[0].weight.sum().item()))
                for block in model.blocks]
    y = model(x)
    for handle in handles:
        handle.remove()
    return y


def compiled(model, x, found):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler looks at .grad of all that it meets, and torch warns of that
        return torch.compile(model, backend="eager")(x)


@by_world
@pytest.mark.parametrize("use", sample(
    (encode_then_head, head_alone, evaluate_parts, hooks_of_the_user, compiled), (encode_then_head, hooks_of_the_user)))
def test_stage_3_is_as_stage_0(use, world_size):
    assert toys.run(numbers_of, world_size, 3, use) == toys.run(numbers_of, world_size, 0, use)


# -------------------------------------------------------------------------------------------------- edits, and freezing


def edit_in_16_bit(stage):
    """Weights that are loaded after wrapping are those that are trained on."""
    zero, rank = wrap(stage, torch.bfloat16), dist.get_rank()
    weight = zero.model.head.weight
    zero.model(draw(0, rank)).float().logsumexp(-1).mean().backward()
    zero.step()
    zero.zero_grad()
    with torch.no_grad():
        weight.fill_(0.5)
    zero.model(draw(1, rank)).float().logsumexp(-1).mean().backward()
    zero.step()
    return (weight - 0.5).abs().max().item()


@pytest.mark.parametrize("stage", range(3))
def test_an_edit_outside_is_kept_by_16_bit_masters(stage):
    assert all(distance < 0.1 for distance in toys.run(edit_in_16_bit, 2, stage))


def change_after_wrapping(stage, change):
    zero = wrap(stage)
    zero.model(draw(0, 0)).sum().backward()
    zero.step()
    zero.zero_grad()
    if change == "freeze":
        zero.model.head.requires_grad_(False)
    elif change == "group":
        zero.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    zero.model(draw(0, 0)).sum().backward()
    zero.step()


@by_stage
@pytest.mark.parametrize("change, words", (("freeze", "'head.weight' was frozen after wrapping"),
                                           ("group", "a group cannot be added to zero.optimizer")))
def test_what_is_changed_after_wrapping(change, words, stage):
    assert words in refused(change_after_wrapping, stage, change)


def unfreeze(stage):
    torch.manual_seed(0)
    model = Coder()
    model.head.requires_grad_(False)
    zero = toys.STAGES[stage](model, optim.SGD, lr=0.1)
    model.head.requires_grad_(True)
    model(draw(0, 0)).sum().backward()
    zero.step()


@by_stage
def test_unfreezing_after_wrapping(stage):
    assert "'head.weight' was unfrozen after wrapping" in refused(unfreeze, stage)


# ------------------------------------------------------------------------------------------- views from before wrapping


def loaded(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return state


def garbage(model):
    held = [model.head.weight.data]
    held.append(held)


def trained_before(model):
    optimizer = optim.Adam(model.parameters())
    loss = model(draw(0, 0)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, loss


def another_stage(model):
    zero = toys.STAGES[1](model, optim.SGD, lr=0.1)
    model(draw(0, 0)).sum().backward()
    zero.step()


VIEWS = {  # what is held of a model before it is wrapped: what is said of it
    "closure": (lambda model: (lambda ref: lambda: ref)(model.head.weight.detach()), "'head.weight', from"),
    "set": (lambda model: {model.head.weight.detach()}, "'head.weight', from"),
    "namespace": (lambda model: types.SimpleNamespace(ref=model.head.weight.data), "'head.weight', from"),
    "namespace in the model": (lambda model: setattr(model, "kept", types.SimpleNamespace(ref=model.head.weight.data)),
                               "'head.weight', from"),
    "partial": (lambda model: functools.partial(print, model.head.weight[0].detach()), "'head.weight', from"),
    "array": (lambda model: model.head.weight.detach().numpy(), "'head.weight', from"),
    "state": (lambda model: model.state_dict(), "'embedding.weight' and 10 more, from"),
    "loaded": (loaded, "'embedding.weight' and 10 more, from"),
    "parameters": (lambda model: [*model.named_parameters()], None),
    "copies": (lambda model: (copy.deepcopy(model), model.head.weight.detach().clone()), None),
    "frozen": (lambda model: model.head.requires_grad_(False).weight.data, None),
    "garbage": (garbage, None),
    "trained before": (trained_before, None),
    "another stage": (another_stage, None),
    "spectral norm": (lambda model: nn.utils.spectral_norm(model.head), None),
    "parametrized": (lambda model: nn.utils.parametrizations.weight_norm(model.head), None),
}


def warned_of(stage):
    """What each of VIEWS warns of; and where, in all."""
    found, places = {}, set()
    for case, (hold, _) in VIEWS.items():
        torch.manual_seed(0)
        model = Coder()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held = hold(model)
            caught.clear()
            zero = toys.STAGES[stage](model, optim.SGD, lr=0.1)
        found[case] = [str(warning.message) for warning in caught]
        places |= {warning.filename for warning in caught}
        del held, zero
    return found, places


@by_stage
def test_a_view_from_before_wrapping_is_warned_of(stage):
    ((found, places),) = toys.run(warned_of, 1, stage)
    for case, (_, words) in VIEWS.items():
        assert len(found[case]) == (words is not None), (case, found[case])
        assert not words or f"a view of parameter {words} before wrapping" in found[case][0], (case, found[case])
    assert places == {__file__}


# ----------------------------------------------------------------------------------------------------- states, numbers


def state_of(stage, **changes):
    """A state dict, of a model that differs in a name, in the optimizer or in the bytes of its buckets."""
    torch.manual_seed(0)
    model = Coder()
    if changes.get("renamed"):
        model.tail = model._modules.pop("head")
        model.forward = lambda x: model.tail(model.encode(x))
    optimizer, size = changes.get("optimizer", optim.SGD), changes.get("bytes", 600)
    zero = toys.STAGES[stage](model, optimizer, lr=0.1, bucket_bytes=size)
    model(draw(0, dist.get_rank())).sum().backward()
    zero.step()
    return zero, zero.state_dict()


def load_what_differs(stage):
    zero, state = state_of(stage)
    before = toys.whole_parameters(zero)
    for changes, words in (
        (dict(renamed=True), r"other parameters: the first that differs was tail.\w+ \d+, and is head"),
        (dict(optimizer=optim.Adam), "optimizer_class Adam, and is loaded with SGD"),
        (dict(bytes=2000), "other buckets"),
    ):
        if stage == 3 and "bytes" in changes:
            continue  # there a unit is a bucket
        with pytest.raises(ValueError, match=words) as caught:
            zero.load_state_dict(state_of(stage, **changes)[1])
        assert len(str(caught.value)) < 300
        assert toys.identical(toys.whole_parameters(zero), before), "nothing was changed"
    zero.load_state_dict(state)


@pytest.mark.parametrize("stage", sample(range(4), [3]))
def test_states_are_matched_by_name(stage):
    toys.run(load_what_differs, 2, stage)


def bytes_saved(stage):
    """What torch.save writes of the shards, and what they hold."""
    _, state = state_of(stage)
    file = io.BytesIO()
    torch.save(state["shards"], file)
    return len(file.getvalue()), sum(shard.nbytes for shard in state["shards"]), len(state["shards"])


@pytest.mark.parametrize("stage", sample((1, 2, 3), [2]))
def test_a_rank_saves_its_part_and_no_more(stage):
    for written, held, count in toys.run(bytes_saved, 4, stage):
        assert written < held + 2000 + 500 * count


def clip_complex(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.complex64)
    zero = toys.STAGES[stage](model, optim.SGD, lr=0.1)
    model(torch.ones(3, dtype=torch.complex64) * (1 + rank)).abs().sum().backward()
    return zero.clip_grad_norm_(0.1).item()


@pytest.mark.thorough
def test_complex_gradients_have_a_norm():
    first, *others = [toys.run(clip_complex, 2, stage) for stage in range(4)]
    assert first[0] > 0.1
    assert all(norm == pytest.approx(first[0]) for norms in (first, *others) for norm in norms)


def test_a_number_of_bytes_may_be_a_float():
    def run():
        zero = toys.STAGES[2](Coder(), optim.SGD, lr=0.1, bucket_bytes=5e8)
        assert len(zero.buckets) == 1
        for wrong in (0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="bucket_bytes is"):
                toys.STAGES[2](Coder(), optim.SGD, lr=0.1, bucket_bytes=wrong)

    toys.run(run, 1)


def nan_for_ever():
    zero = wrap(2)
    scaler = LossScaler()
    for step in range(60):
        scaler.scale(zero.model(draw(step, 0)).sum() * float("nan")).backward()
        assert not scaler.step(zero)
        scaler.update()
        zero.zero_grad()


def test_a_loss_that_is_never_finite():
    assert "gradients are infinite or NaN even at a loss scale of" in refused(nan_for_ever)
