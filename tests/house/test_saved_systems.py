"""ZeRO-100B goes on under another mesh: parts of matrices are saved as chunks of the whole ones."""

import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample

from zero_minimal.checkpoint import saved_state, state_folder
from zero_minimal.checkpoint.chunks import chunks
from zero_minimal.core.mesh import make_mesh
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.zero_100b import System, places

pytestmark = pytest.mark.thorough

# 31 tokens are no multiple of 2 or 4: the embedding's last part is padded
SIZES = GPTConfig(layers=2, hidden=8, heads=4, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)
STEPS, SAVED_AT, BOUND = 5, 2, 3e-4  # the bound is that of test_saved_state_elsewhere.py


def system(config, model_parallel, seed):
    warnings.filterwarnings("ignore", "P_a saves nothing here")  # in a group of one
    torch.manual_seed(seed)
    return System(config, SIZES, make_mesh(model_parallel), 12, torch.float32, "cpu", torch.optim.SGD, lr=0.01,
                  momentum=0.9, bucket_bytes=3000)


def steps(zero, first, last):
    """Losses, means over all data-parallel ranks: 12 sequences a step, which these share."""
    losses, share = [], dist.get_world_size(zero.mesh.data_group)
    for step in range(first, last):
        loss = zero.model(*(whole.chunk(share)[zero.mesh.data_rank] for whole in toys.tokens(0, step, batch=12)))
        loss.backward()
        zero.step()
        zero.zero_grad()
        every = [torch.zeros_like(loss) for _ in range(share)]
        dist.all_gather(every, loss.detach(), group=zero.mesh.data_group)
        losses.append(torch.stack(every).mean().item())
    return losses


def save(config, model_parallel, folder):
    zero = system(config, model_parallel, 1)
    steps(zero, 0, SAVED_AT)
    saved_state.save(zero, folder, {"mesh": model_parallel})
    return steps(zero, SAVED_AT, STEPS)


def move(config, model_parallel, folder, other):
    """Load it, save it anew as it is, and train on."""
    zero = system(config, model_parallel, 2)
    saved_state.load(zero, folder)
    saved_state.save(zero, other)
    return steps(zero, SAVED_AT, STEPS)


def other_kind(folder):
    torch.manual_seed(2)
    zero = toys.STAGES[2](GPT(SIZES), torch.optim.SGD, lr=0.01, momentum=0.9)
    with pytest.raises(ValueError) as caught:
        saved_state.load(zero, folder)
    return str(caught.value)


def in_plain_torch(folder):
    """The whole model and the optimizer's state."""
    parameters = state_folder.read_contents(state_folder.finished(folder)[0]).facts["parameters"]
    model = GPT(SIZES)
    groups = [[param for name, param in model.named_parameters() if parameters[name]["group"] == group]
              for group in (0, 1)]
    optimizer = torch.optim.SGD([{"params": params} for params in groups], lr=1.0)
    saved_state.load_plain(model, optimizer, folder)
    return model, optimizer



CASES = [((2, 2), (2, 1), "C4"), *(((4, 2), (ranks, model_parallel), config) for config in ("C1", "C4", "C5")
                                   for ranks, model_parallel in ((4, 1), (4, 4), (4, 2), (1, 1), (3, 1)))]


@pytest.mark.parametrize("before, after, config", sample(CASES, CASES[:1]))
def test_goes_on_under_another_mesh(before, after, config, tmp_path):
    expected = toys.run(save, before[0], "C4", before[1], tmp_path / "a")[0]
    found = toys.run(move, after[0], config, after[1], tmp_path / "a", tmp_path / "b")[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= BOUND
    assert config != "C4" or before != after or found == expected
    (model, optimizer), (again, other) = in_plain_torch(tmp_path / "a"), in_plain_torch(tmp_path / "b")
    assert toys.identical(model.parameters(), again.parameters())
    states = [[state["momentum_buffer"] for state in one.state.values()] for one in (optimizer, other)]
    assert toys.identical(*states) and len(states[0]) == len(list(model.parameters()))
    [words] = toys.run(other_kind, 1, tmp_path / "a")
    assert words.startswith("this checkpoint is not of this model: it was saved by zero_100b, and a stage has other "
                            "optimizer groups: go on with what saved it, or take its weights alone")
    # the whole model computes what the parts computed
    assert abs(model(*toys.tokens(0, SAVED_AT, batch=12)).item() - expected[0]) <= BOUND


def places_here(model_parallel):
    zero = system("C1", model_parallel, 1)
    names = {name: tuple(param.shape) for name, param in zero.model.named_parameters()}
    return [(name, place, names[name]) for name, place in places(zero.model).items()]


def test_the_parts_are_the_whole():
    """Of each parameter that is cut, the parts of all ranks fill the whole one, without overlap."""
    whole = dict(GPT(SIZES).named_parameters())
    every = toys.run(places_here, 2, 2)
    counted = {}
    for of_rank in every:
        for name, place, shape in of_rank:
            assert place.shape == tuple(whole[name].shape)
            seen = counted.setdefault(name, torch.zeros(place.shape))
            for chunk in chunks(shape, 0, torch.Size(shape).numel()):
                for _, there in place.chunks(chunk):
                    seen[tuple(slice(a, a + size) for a, size in zip(there.offsets, there.sizes, strict=True))] += 1
    assert len(counted) == 1 + 2 * 6 and all((seen == 1).all() for seen in counted.values())
