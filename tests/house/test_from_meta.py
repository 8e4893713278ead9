"""Models of the meta device that draw their values in _init_weights(module), as those of Hugging Face's transformers.
(tests/house/test_simulate.py has those with reset_parameters and initialise.)"""

import math

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn, optim

from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough


class RMSNorm(nn.Module):
    """No reset_parameters: its model draws it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class Rotary(nn.Module):
    """A buffer that is computed, and one of bool, in which no number can say "not yet"."""

    def __init__(self, size, base=100.0):
        super().__init__()
        self.base = base
        frequencies, mask = self.computed(size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def computed(self, size):
        return self.base ** -(torch.arange(size) / size), torch.ones(size, size, dtype=torch.bool).tril()


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.c_proj = RMSNorm(size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x):
        return x + self.c_proj(self.up(self.norm(x)).relu())


class Pretrained(nn.Module):
    """As a model of transformers: it draws all its modules from a distribution of its own, some once more."""

    STD = 0.02

    def __init__(self, size=24, layers=3):
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(toys.VOCABULARY, size), Rotary(size)
        self.layers = nn.ModuleList([Layer(size) for _ in range(layers)])
        self.norm, self.head = RMSNorm(size), nn.Linear(size, toys.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, self.STD)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            for buffer, value in zip(module.buffers(), module.computed(len(module.frequencies)), strict=True):
                buffer.copy_(value)
        for name, param in module.named_parameters():
            if name == "c_proj.weight":  # of the residual stream: narrower, as GPT-2's
                param.data.normal_(0.0, self.STD / math.sqrt(2 * len(self.layers)))

    def forward(self, x, y=None):
        h = self.embedding(x) * self.rotary.frequencies
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h).where(self.rotary.mask.any(0), 0))
        return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Wide(Pretrained):
    STD = 0.5


class Around(nn.Module):
    """A model of one's own around two of theirs, each with its own distribution."""

    def __init__(self):
        super().__init__()
        self.backbone, self.wide = Pretrained(), Wide()
        self.head = nn.Linear(toys.VOCABULARY, 5)

    def forward(self, x, y):
        return self.head(self.backbone(x) + self.wide(x)).square().mean()


def from_meta(make):
    """Parameters and buffers as drawn, and losses."""
    torch.manual_seed(7 * (1 + dist.get_rank()))  # rank 0's values count
    with torch.device("meta"):
        model = make()
    zero = Stage3(model, optim.AdamW, lr=1e-2)
    first = dict(zip([name for name, _ in model.named_parameters()], toys.whole_parameters(zero), strict=True))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = []
    for step in range(4):
        losses.append(model(*toys.tokens(0, step)))
        losses[-1].backward()
        zero.step()
        zero.zero_grad()
    return first, buffers, [loss.item() for loss in losses]


@pytest.mark.parametrize("make", (Pretrained, Around))
def test_a_model_draws_its_modules(make):
    worlds = {world: toys.run(from_meta, world, make) for world in (1, 2, 3)}
    first, buffers, losses = worlds[1][0]
    torch.manual_seed(0)
    built = make()
    for name, param in built.named_parameters():
        drawn = first[name]
        if param.std() == 0:
            assert torch.equal(drawn, param), name
        elif param.numel() > 100:  # the rest is too few to compare
            assert drawn.std().item() == pytest.approx(param.std().item(), rel=0.25), name
    for name, buffer in built.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    for outcomes in worlds.values():
        for other, its_buffers, its_losses in outcomes:
            assert toys.identical(first.values(), other.values()), "the values depend on the number of ranks"
            assert toys.identical(buffers.values(), its_buffers.values())
            assert its_losses == pytest.approx(losses, rel=1e-5)


class Unread(Pretrained):
    """It forgets the buffers: one of numbers, or one of bool."""

    def __init__(self, forgotten):
        self.forgotten = forgotten
        super().__init__()

    def _init_weights(self, module):
        if not isinstance(module, Rotary):
            super()._init_weights(module)
        elif self.forgotten == "mask":
            module.frequencies.fill_(1)
        else:
            module.mask.fill_(True)


class WithoutArgument(nn.Linear):
    """Somebody else's _init_weights, which takes no module: it is not called."""

    def _init_weights(self):
        raise AssertionError("called")


def refused(forgotten):
    with torch.device("meta"):
        model = Unread(forgotten)
    with pytest.raises(ValueError) as caught:
        Stage3(model, optim.AdamW)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]), "it is as it was"
    return str(caught.value)


def without_argument():
    with torch.device("meta"):
        model = nn.Sequential(WithoutArgument(8, 8))
    return toys.whole_parameters(Stage3(model, optim.AdamW))


def test_what_is_forgotten_is_refused():
    for name in ("frequencies", "mask"):
        assert f"nothing gave 'Rotary.{name}' a value" in toys.run(refused, 2, name)[0]
    weight, bias = toys.run(without_argument, 1)[0]
    assert 0.1 < weight.std() < 0.4 and bias.isfinite().all()


def hugging_face(kind):
    import transformers

    sizes = dict(vocab_size=toys.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, max_position_embeddings=16)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=toys.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16)
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def hugging_face_from_meta(kind):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = hugging_face(kind)
    zero = Stage3(model, optim.SGD, lr=0.1)
    inputs, labels = toys.tokens(dist.get_rank(), 0)
    model(input_ids=inputs, labels=labels).loss.backward()
    zero.step()
    model.eval()
    with zero.gather_parameters(), torch.no_grad():
        plain = hugging_face(kind).eval()  # on a real device: its buffers are as they should be
        plain.load_state_dict(model.state_dict())
        return torch.equal(model(input_ids=inputs).logits, plain(input_ids=inputs).logits)


@pytest.mark.parametrize("kind", ("llama", "gpt2", "bert"))
def test_hugging_face(kind):
    pytest.importorskip("transformers")
    assert all(toys.run(hugging_face_from_meta, 2, kind, timeout=120))
