"""Scenarios: weights that are read, edited, averaged, saved and loaded while a stage trains them."""

import contextlib
import copy
import io
import tempfile

import torch
from house.scenarios.pieces import MOMENTUM, Chain, Layer, go_on, squares, train, wrapped
from house.scenarios.stand import scenario
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero_minimal.checkpoint import saved_state

GATHER = r"under `with zero\.gather_parameters\(\):`, on all ranks"


def training(me, what, **options):
    """Train; what(zero, step) comes after each update."""
    return train(me, after=what, **options)


def in_gathered(change):
    """change(model, step) in gather_parameters()."""
    def what(zero, step):
        with zero.gather_parameters():
            change(zero.model, step)

    return what


# ---------------------------------------------------------------------------------------------------------------- reads


@scenario(naive=False)
def weights_read_in_gather_parameters(me):
    training(me, in_gathered(lambda model, step: me.note(*model.parameters())))


@scenario(naive=False)
def a_penalty_in_gather_parameters(me):
    def backward(zero, step):
        loss = squares(zero.model, me, step)
        with zero.gather_parameters(), zero.gather_parameters():
            loss = loss + 0.1 * sum(param.square().sum() + param.sin().mean() for param in zero.model.parameters())
        loss.backward()
        me.note(loss)

    train(me, backward=backward)


@scenario(refused={"stage3": GATHER})
def weights_read_outside(me):
    training(me, lambda zero, step: me.note(sum(param.norm() for param in zero.model.parameters())))


@scenario(refused={"stage3": GATHER})
def a_weight_printed_outside(me):
    training(me, lambda zero, step: me.note(zero.model.layers[0].linear.weight[0, 0].item()))


@scenario(refused={"stage3": GATHER})
def a_weight_through_data_outside(me):
    training(me, lambda zero, step: me.note(zero.model.layers[0].linear.weight.data.sum()))


@scenario(refused={"stage3": GATHER})
def a_weight_through_detach_and_numpy(me):
    training(me, lambda zero, step: me.note(float(zero.model.layers[0].linear.weight.detach().numpy().sum())))


@scenario(refused={"stage3": GATHER})
def parameters_to_vector(me):
    training(me, lambda zero, step: me.note(nn.utils.parameters_to_vector(zero.model.parameters())))


@scenario()
def weights_are_counted_outside(me):
    """What loggers ask for: sizes, dtypes, devices."""
    def what(zero, step):
        params = list(zero.model.parameters())
        me.note(sum(p.numel() for p in params), sum(p.requires_grad for p in params))
        assert all(p.dtype == torch.float64 and p.device.type == "cpu" and p.is_leaf for p in params)
        str(zero.model), str([p.shape for p in params])

    training(me, what)


# ---------------------------------------------------------------------------------------------------------------- edits


@torch.no_grad()
def clamp(model, step=0):
    for param in model.parameters():
        param.clamp_(-0.3, 0.3)


@torch.no_grad()
def new_values(model, step=0):
    for number, param in enumerate(model.parameters()):
        param.copy_(torch.full_like(param, 0.1 * (1 + number % 3)))


def through_data(model, step=0):
    for param in model.parameters():
        param.data = param.data * 0.5


def in_place_through_data(model, step=0):
    for param in model.parameters():
        param.data.mul_(0.5)


def by_init(model, step=0):
    for layer in model.layers:
        nn.init.constant_(layer.linear.weight, 0.2)


def by_reset(model, step=0):
    torch.manual_seed(step)
    model.head.reset_parameters()


def by_load(model, step=0):
    torch.manual_seed(step)
    model.load_state_dict(Chain().state_dict())


def by_assign(model, step=0):
    torch.manual_seed(step)
    model.load_state_dict(Chain().state_dict(), assign=True)


def new_parameter(model, step=0):
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))


def from_vector(model, step=0):
    count = sum(param.numel() for param in model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, count), model.parameters())


EDITS = {
    "clamp_": clamp, "copy_": new_values, "data assigned": through_data, "data in place": in_place_through_data,
    "nn.init": by_init, "reset_parameters": by_reset, "load_state_dict": by_load, "vector_to_parameters": from_vector,
}
REPLACED = r"moved or replaced after wrapping.*do that before"
for words, edit in EDITS.items():
    scenario(f"edited in gather_parameters() by {words}", naive=False, or_refused=REPLACED, worlds=(2, 3))(
        lambda me, edit=edit: training(me, in_gathered(edit)))
    scenario(f"edited outside by {words}", or_refused=f"{REPLACED}|{GATHER}", worlds=(2, 3))(
        lambda me, edit=edit: training(me, lambda zero, step: edit(zero.model, step)))
for words, edit in {"load_state_dict(assign=True)": by_assign, "a new nn.Parameter": new_parameter}.items():
    scenario(f"replaced by {words}", refused=f"{REPLACED}|{GATHER}", naive=False)(
        lambda me, edit=edit: training(me, lambda zero, step: edit(zero.model, step)))
    scenario(f"replaced in gather_parameters() by {words}", refused=REPLACED, naive=False)(
        lambda me, edit=edit: training(me, in_gathered(edit)))


scenario("edited between backward and step", or_refused=f"{REPLACED}|{GATHER}")(
    lambda me: train(me, each=lambda zero, step: clamp(zero.model)))


def edited_in_16_bit(me, gathered):
    def edit(zero, step):
        if step == 2:
            with zero.gather_parameters() if gathered else contextlib.nullcontext():
                new_values(zero.model)

    def backward(zero, step):
        zero.model(me.x(step).bfloat16()).float().square().mean().backward()

    training(me, edit, model=Chain().bfloat16(), optimizer=AdamW, steps=5, backward=backward, lr=0.01)


LOW = dict(naive=False, dtype=torch.float32, tolerance=2e-2)
scenario("16-bit weights edited outside", or_refused=GATHER, **LOW)(lambda me: edited_in_16_bit(me, False))
scenario("16-bit weights edited in gather_parameters()", **LOW)(lambda me: edited_in_16_bit(me, True))


@scenario(naive=False, worlds=(2, 3, 4), refused="gather_parameters.*(alike|all ranks)")
def one_rank_alone_edits_in_gather_parameters(me):
    def edit(model, step):
        if me.rank == 0:
            clamp(model)

    training(me, in_gathered(edit))


@scenario(refused=f"{REPLACED}|{GATHER}", naive=False)
def moved_to_another_dtype(me):
    def what(zero, step):
        if step == 1:
            zero.model.float()
            torch.set_default_dtype(torch.float32)

    training(me, what)


CONVERTED = "the stage was made for torch.float64: convert the model before wrapping"
for words, cast in {"to": lambda model, _: model.to(torch.bfloat16), "half": lambda model, _: model.half()}.items():
    scenario(f"converted in gather_parameters() by {words}()", naive=False, refused=CONVERTED)(
        lambda me, cast=cast: training(me, in_gathered(cast)))


@scenario(naive=False)
def converted_in_gather_parameters_and_back(me):
    training(me, in_gathered(lambda model, step: model.float() and model.double()))


def last_step_on_one_rank_alone(me, then):
    model, zero = wrapped(me, Chain(), SGD, lr=0.1)
    squares(model, me, 0).backward()
    if me.rank == 0:
        zero.step()
    zero.zero_grad()
    then(zero)


def read_whole(zero):
    with zero.gather_parameters():
        pass


def save_it(zero):
    with tempfile.TemporaryDirectory() as folder:
        saved_state.save(zero, folder)


OFTEN = r"not in the same collective|rank 1 leaves gather_parameters\(\) with other values|after [01] steps"
for words, then in {"a gather": read_whole, "a checkpoint": save_it}.items():
    scenario(f"the last step on one rank alone, then {words}", naive=False, worlds=(2, 3), refused=OFTEN)(
        lambda me, then=then: last_step_on_one_rank_alone(me, then))


@scenario(or_refused=GATHER)
def moved_to_where_it_is(me):
    training(me, lambda zero, step: zero.model.to("cpu").double())


@scenario(or_refused=f"{REPLACED}|build model and stage anew")
def a_layer_added_later(me):
    def what(zero, step):
        if step == 1:
            zero.model.layers.append(Layer())

    training(me, what)


# ------------------------------------------------------------------------------------------------------------- averages


@scenario(naive=False)
def an_average_by_hand(me):
    """EMA over what gather_parameters() shows."""
    average = []

    def what(model, step):
        for number, param in enumerate(model.parameters()):
            if step == 0:
                average.append(param.detach().clone())
            else:
                average[number].lerp_(param.detach(), 0.1)

    training(me, in_gathered(what))
    me.note(*average)


@scenario(or_refused=GATHER)
def averaged_model_made_before_wrapping(me):
    torch.manual_seed(0)  # all ranks alike: the average starts from the same
    model = Chain()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training(me, lambda zero, step: average.update_parameters(model), model=model)
    me.note(*average.parameters())


@scenario("averaged model made before wrapping, in gather_parameters()", naive=False)
def averaged_gathered(me):
    torch.manual_seed(0)
    model = Chain()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training(me, in_gathered(lambda model, step: average.update_parameters(model)), model=model)
    me.note(*average.parameters())


def copied(copy_it, gathered):
    def play(me):
        kept = []

        def what(zero, step):
            if step == 1:
                with zero.gather_parameters() if gathered else contextlib.nullcontext():
                    kept.append(copy_it(zero.model))
                with torch.no_grad():
                    me.note(kept[0](me.x(77)))

        zero = training(me, what, group=None, **MOMENTUM)  # with the default group a stage can be copied
        with torch.no_grad():
            me.note(kept[0](me.x(78)))
        me.note(*kept[0].parameters())
        assert zero

    return play


COPY = r"gather_parameters\(\)|before (you )?wrap|copy\.deepcopy"
scenario("deepcopy after wrapping", or_refused=COPY)(copied(copy.deepcopy, False))
scenario("deepcopy in gather_parameters()", naive=False, or_refused=COPY)(copied(copy.deepcopy, True))
scenario("AveragedModel made after wrapping", or_refused=COPY)(copied(AveragedModel, False))
scenario("AveragedModel made in gather_parameters()", naive=False, or_refused=COPY)(copied(AveragedModel, True))


@scenario("a copy trained on by a stage of its own", naive=False, or_refused="copy")
def a_copy_trained_on(me):
    zero = training(me, lambda *_: None, group=None, **MOMENTUM)
    with zero.gather_parameters():
        other = copy.deepcopy(zero.model)
    training(me, lambda *_: None, model=other, group=None, **MOMENTUM)


def averaged_copy(gathered):
    """A deep copy that follows the model, and is evaluated after each step."""
    def play(me):
        kept = []

        def what(zero, step):
            with zero.gather_parameters():
                if not kept:
                    kept.append(copy.deepcopy(zero.model))
                with torch.no_grad():
                    for mine, new in zip(kept[0].parameters(), zero.model.parameters(), strict=True):
                        mine.lerp_(new, 0.2)
            with torch.no_grad():
                if me.rank == 0 or not gathered:
                    me.note(kept[0](me.x(77)))

        training(me, what, group=None, **MOMENTUM)

    return play


scenario("a deep copy that follows", naive=False, or_refused=COPY)(averaged_copy(False))
scenario("a deep copy that follows, evaluated by rank 0", naive=False, or_refused=COPY, worlds=(2, 3, 4))(
    averaged_copy(True))


# ---------------------------------------------------------------------------------------------------------------- saved


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def restarted(optimizer, **options):
    def play(me):
        saved = through_a_file(train(me, None, optimizer, steps=2, **options).state_dict())
        _, zero = wrapped(me, None, optimizer, **options)
        zero.load_state_dict(saved)
        go_on(me, zero, range(2, 4))

    return play


@scenario("named parameters saved and read by torch alone", naive=False)
def _named_parameters(me):
    zero, file = train(me), io.BytesIO()
    with zero.gather_parameters():
        torch.save(dict(zero.model.named_parameters()), file)
    file.seek(0)
    me.note(*torch.load(file).values())


scenario("saved and restarted, SGD", naive=False)(restarted(SGD, **MOMENTUM))
scenario("saved and restarted, AdamW", naive=False)(restarted(AdamW, lr=0.01))


@scenario(naive=False)
def back_to_a_saved_state(me):
    """Early stopping: the best state is loaded into the same stage."""
    zero = train(me, None, AdamW, steps=2, lr=0.01)
    best = through_a_file(zero.state_dict())
    go_on(me, zero, range(2, 4))
    zero.load_state_dict(best)
    go_on(me, zero, [9])


@scenario(refused={"stage3": GATHER})
def state_dict_of_the_model_outside(me):
    training(me, lambda zero, step: me.note(*zero.model.state_dict().values()))


@scenario(naive=False)
def weights_for_inference(me):
    """model.state_dict() in gather_parameters(), loaded into a plain model."""
    kept = {}

    def what(model, step):
        kept.update({name: value.clone() for name, value in model.state_dict().items()})

    training(me, in_gathered(what))
    plain = Chain()
    plain.load_state_dict(kept)
    me.note(plain(me.x(5)))


@scenario(naive=False)
def state_dict_kept_without_a_clone(me):
    """What gather_parameters() showed stays valid, as its docstring says."""
    kept = []
    zero = training(me, lambda *_: None, steps=2)
    with zero.gather_parameters():
        kept += zero.model.state_dict().values() if me.stage == "stage3" else [
            value.clone() for value in zero.model.state_dict().values()]
    go_on(me, zero, [7])
    me.note(*kept)


@scenario(naive=False, or_refused="gather_parameters|state_dict")
def state_of_the_optimizer_alone(me):
    """zero.optimizer.state_dict() and load_state_dict(), as many scripts save."""
    def what(zero, step):
        if step == 1:
            zero.optimizer.load_state_dict(through_a_file(zero.optimizer.state_dict()))

    training(me, what, optimizer=AdamW, lr=0.01)


@scenario(naive=False)
def training_inside_gather_parameters_evaluates(me):
    """Evaluation on whole parameters, on all ranks."""
    def what(model, step):
        with torch.no_grad():
            me.note(model(me.x(50 + step)))

    training(me, in_gathered(what))


@scenario(naive=False, worlds=(2, 3, 4))
def rank_0_evaluates_in_gather_parameters(me):
    def what(model, step):
        if me.rank == 0:
            with torch.no_grad():
                me.note(model(me.x(50 + step)))

    training(me, in_gathered(what))


@scenario(naive=False, refused={"stage3": r"backward\(\) outside gather_parameters\(\)"})
def backward_in_gather_parameters(me):
    def backward(zero, step):
        with zero.gather_parameters():
            squares(zero.model, me, step).backward()

    train(me, steps=3, backward=backward)


@scenario(naive=False, refused={"stage3": r"leave gather_parameters\(\) first"})
def a_step_in_gather_parameters(me):
    model, zero = wrapped(me)
    for step in range(3):
        squares(model, me, step).backward()
        with zero.gather_parameters():
            zero.step()
        zero.zero_grad()


@scenario(naive=False)
def the_stage_object_is_forgotten(me):
    """`del zero` while the model lives on; then another model."""
    _, zero = wrapped(me)
    squares(zero.model, me, 0).backward()
    zero.step()
    del zero
    train(me, Chain())
