"""Scenarios: models of all kinds, in the usual loop. (More of them, which are checkpointed too: odd_models.py.)"""

import torch
import torch.nn.functional as F
from house.odd_models import Norms
from house.scenarios.pieces import WIDTH, Chain, Layer, Writer, go_on, next_word, train
from house.scenarios.stand import scenario
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import AdamW

# ------------------------------------------------------------------------------------------------- shared and left out


@scenario()
def embedding_tied_to_the_head(me):
    train(me, Writer(tied=True), AdamW, loss=next_word, lr=0.01)


@scenario()
def blocks_used_twice(me):
    def loss(model, me, step):
        x = me.x(step)
        for number in (0, 1, 0, 2, 2, 1):
            x = model.layers[number](model.first(x))
        return model.head(x).square().mean()

    train(me, Chain(), loss=loss)


@scenario()
def a_head_a_task_and_a_task_a_rank(me):
    """Root parameters: each rank uses another head."""
    model = Chain()
    model.heads = nn.ParameterList(torch.rand(3, WIDTH) for _ in range(4))

    def loss(model, me, step):
        x = model.first(me.x(step))
        for layer in model.layers:
            x = layer(x)
        return F.linear(x, model.heads[(me.rank + step) % 4]).square().mean()

    train(me, model, loss=loss)


class Adapted(nn.Module):
    """LoRA: a frozen layer, and a small product beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted():
    model = Chain()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.linear = Adapted(layer.linear)
    return model


@scenario()
def adapters_on_a_frozen_model(me):
    train(me, adapted(), AdamW, lr=0.05)


@scenario(naive=False)
def adapters_merged_for_evaluation(me):
    zero = train(me, adapted(), steps=3)
    with zero.gather_parameters():
        for layer in zero.model.layers:
            me.note(layer.linear.base.weight + layer.linear.up @ layer.linear.down)


@scenario()
def a_head_by_functional_linear_on_the_embedding(me):
    class Tied(Writer):
        def forward(self, words):
            return F.linear(self.encode(words), self.embedding.weight)

    train(me, Tied(), loss=next_word)


@scenario()
def a_block_that_reads_a_weight_of_the_root(me):
    class Reads(Layer):
        def forward(self, x):
            return super().forward(F.linear(x, root[0].first.weight))

    root = []
    model = Chain(Reads)
    root.append(model)
    train(me, model)


def with_a_neighbour():
    class Reads(Layer):
        def forward(self, x):
            return super().forward(F.linear(x, others[0].linear.weight))

    others = []
    model = Chain(Reads)
    others.append(model.layers[2])
    return model


@scenario(refused={"stage3": r"parameter 'layers.2.linear.weight' is released.*name a module around both in units="})
def a_block_that_reads_a_weight_of_another(me):
    train(me, with_a_neighbour())


@scenario()
def and_with_a_unit_around_both(me):
    train(me, with_a_neighbour(), units=[])


# ---------------------------------------------------------------------------------------------- parameters of all kinds


@scenario()
def parameter_list_and_dict(me):
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))
            self.named = nn.ParameterDict({"shift": torch.rand(WIDTH), "gain": torch.rand(WIDTH)})

        def forward(self, x):
            for factor in self.factors:
                x = torch.tanh(x * factor)
            return x * self.named["gain"] + self.named["shift"]

    train(me, Lists())


@scenario()
def parameters_of_two_dtypes(me):
    class Mixed(Layer):
        def __init__(self):
            super().__init__()
            self.linear.float()

        def forward(self, x):
            return self.norm((torch.tanh(self.linear(x.float())) * self.gain).double())

    train(me, Chain(Mixed))


class Spectral(Chain):
    def __init__(self):
        super().__init__()
        self.register_buffer("fourier", torch.fft.fft(torch.eye(7, dtype=torch.float64)))
        self.register_buffer("inverse", self.fourier.conj())  # a view, whose numbers are conjugated when they are read

    def forward(self, x):
        return super().forward(((x + 0j) @ self.fourier @ self.inverse).real / 7)


scenario("conjugated buffers")(lambda me: train(me, Spectral()))


@scenario()
def complex_parameters(me):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.cdouble))

        def forward(self, x):
            return (x.to(torch.cdouble) @ self.weight).abs()

    train(me, Rotation())


@scenario(or_refused="initiali")
def lazy_layers_after_a_dry_run(me):
    model = nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyLinear(3))
    model(me.x(0))
    train(me, model)


@scenario(refused="(?i)lazy|uninitialized|has no shape yet: run a batch")
def lazy_layers_without_a_dry_run(me):
    train(me, nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyLinear(3)))


# --------------------------------------------------------------------------------------------------- layers of torch


def bag_of_words(model, me, step):
    return model(me.words(step)).square().mean()


@scenario()
def embedding_with_padding(me):
    train(me, nn.Sequential(nn.Embedding(11, WIDTH, padding_idx=0), Chain()), loss=bag_of_words)


@scenario(refused=r"0 has max_norm=0.5.*weight\.renorm_\(2, 0, maxnorm\)", naive=False)
def embedding_with_max_norm(me):
    """It shortens rows as it reads them: other rows on each rank."""
    train(me, nn.Sequential(nn.Embedding(11, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 3)), loss=bag_of_words)


@scenario()
def lstm_and_gru(me):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH, bidirectional=True)])
            self.last = nn.RNNCell(2 * WIDTH, 3)

        def forward(self, x):
            for cell in self.cells:
                x, _ = cell(x)
            return self.last(x)

    train(me, Recurrent())


@scenario()
def packed_sequences(me):
    def loss(model, me, step):
        packed = nn.utils.rnn.pack_padded_sequence(me.x(step, 6, 3, WIDTH), torch.tensor([6, 4, 1 + me.rank % 3]))
        return nn.utils.rnn.pad_packed_sequence(model(packed)[0])[0].square().sum()

    train(me, nn.LSTM(WIDTH, 5), loss=loss)


@scenario()
def hidden_state_carried_on(me):
    """Truncated backpropagation through time."""
    state = []

    def loss(model, me, step):
        y, (h, c) = model(me.x(step, 4, 2, WIDTH), state.pop() if state else None)
        state.append((h.detach(), c.detach()))
        return y.square().mean()

    train(me, nn.LSTM(WIDTH, 5), loss=loss, steps=6)


@scenario()
def convolutions(me):
    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 5, 3, padding=1).to(memory_format=torch.channels_last)
            self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(1, 5), nn.Conv2d(5, 5, 3, padding=1, groups=5))
                                        for _ in range(2))
            self.up = nn.ConvTranspose2d(5, 2, 2)

        def forward(self, x):
            x = self.stem(x.to(memory_format=torch.channels_last))
            for block in self.blocks:
                x = x + block(x)
            return self.up(F.max_pool2d(x, 2))

    train(me, Seeing(), loss=lambda model, me, step: model(me.x(step, 2, 1, 6, 6)).square().mean())


@scenario()
def attention(me):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True),
                                            nn.MultiheadAttention(8, 2, kdim=3, vdim=5)])

        def forward(self, x, y, z):
            first, second = self.attention
            x, weights = first(x, x, x)
            return second(x, y, z)[0].square().mean() + weights.square().mean()

    def loss(model, me, step):
        return model(me.x(step, 4, 3, 8), me.x(step, 6, 3, 3), me.x(step, 6, 3, 5))

    train(me, Attending(), loss=loss)


def padded(model, me, step):
    x = me.x(step, 3, 5, 8)
    padding = torch.arange(5).expand(3, 5) >= torch.tensor([[4], [2 + me.rank % 2], [3]])
    loss = model(x, src_key_padding_mask=padding).square().mean()
    model.eval()
    with torch.no_grad():
        me.note(model(x), model(x, src_key_padding_mask=padding)[~padding])
    model.train()
    return loss


@scenario()
def transformer_encoder(me):
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)
    train(me, nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False), loss=padded)


@scenario(refused={"stage3": "enable_nested_tensor=False"})
def transformer_encoder_with_nested_tensors(me):
    import warnings

    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)
    train(me, nn.TransformerEncoder(layer, 2), loss=padded)


@scenario(refused={"stage3": "enable_nested_tensor=False"})
def what_nested_tensors_put_in_place_of_padding(me):
    import warnings

    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)

    def loss(model, me, step):
        padding = torch.arange(5).expand(3, 5) >= torch.tensor([[4], [2], [3]])
        model.eval()
        with torch.no_grad():
            me.note(model(me.x(step, 3, 5, 8), src_key_padding_mask=padding).mean(1))
        model.train()
        return model(me.x(step, 3, 5, 8)).square().mean()

    train(me, nn.TransformerEncoder(layer, 2), loss=loss)


@scenario(refused={"stage3": "enable_nested_tensor=False"})
def an_encoder_evaluated_by_itself_after_a_step(me):
    import warnings

    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2))

    def after(zero, step):
        model.eval()
        with torch.no_grad():
            me.note(model[1](me.x(step, 2, 5, 8), src_key_padding_mask=torch.arange(5).expand(2, 5) > 2))
        model.train()

    train(me, model, loss=lambda model, me, step: model(me.x(step, 3, 5, 8)).square().mean(), after=after)


@scenario()
def encoder_and_decoder(me):
    def loss(model, me, step):
        return model(me.x(step, 2, 4, 8), me.x(step, 2, 3, 8)).square().mean()

    train(me, nn.Transformer(8, 2, 2, 2, 13, dropout=0.0, batch_first=True), loss=loss)


# -------------------------------------------------------------------------------------------- weights that are computed


@scenario()
def weight_norm(me):
    def layer():
        layer = Layer()
        layer.linear = parametrizations.weight_norm(layer.linear)
        return layer

    train(me, Chain(layer))


@scenario()
def spectral_norm(me):
    """It keeps a vector in a buffer, and changes it at each forward in train mode."""
    train(me, Chain(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())))


@scenario()
def the_old_weight_norm(me):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has a newer one
        model = Chain(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))
    train(me, model)


@scenario()
def the_old_spectral_norm(me):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Chain(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))
    train(me, model)


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.t()) / 2


@scenario()
def a_parametrization_of_the_users(me):
    def layer():
        layer = Layer()
        parametrize.register_parametrization(layer.linear, "weight", Symmetric())
        return layer

    model = Chain(layer)

    def loss(model, me, step):
        with parametrize.cached():
            return model(me.x(step)).square().mean()

    train(me, model, loss=loss)


@scenario()
def orthogonal_weights(me):
    train(me, Chain(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh())))


@scenario()
def pruned_weights(me):
    """Pruned before: a mask in a buffer, and a hook that multiplies."""
    model = Chain()
    for layer in model.layers:
        prune.l1_unstructured(layer.linear, "weight", amount=0.3)
    train(me, model)


@scenario("pruned after wrapping", or_refused="moved or replaced|is released")
def pruned_after_wrapping(me):
    zero = train(me, steps=2)
    for layer in zero.model.layers:
        prune.random_unstructured(layer.linear, "weight", amount=0.3)
    go_on(me, zero, range(2, 4))


# -------------------------------------------------------------------------------------------------- buffers and chance


@scenario()
def batch_norm(me):
    def loss(model, me, step):
        value = model(me.x(step)).sin().mean()
        model.eval()
        with torch.no_grad():
            me.note(model(me.x(100 + step)).mean())
        model.train()
        return value

    train(me, Norms(), loss=loss)


@scenario()
def batch_norm_frozen_in_training(me):
    """Statistics of a pretrained model stay, its weights learn."""
    model = Norms()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    train(me, model, loss=lambda model, me, step: model(me.x(step)).sin().mean())


@scenario()
def dropout(me):
    train(me, Chain(lambda: nn.Sequential(Layer(), nn.Dropout(0.3))), AdamW, lr=0.01)


@scenario()
def buffers_that_forward_changes(me):
    """A counter, and a running mean that is not saved: each rank's own."""
    class Counting(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

        def forward(self, x):
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x) + self.mean / self.calls

    train(me, Chain(Counting))


# --------------------------------------------------------------------------------------------------- shapes of models


@scenario()
def layers_in_a_sequential(me):
    train(me, nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))))


@scenario()
def a_single_linear_layer(me):
    train(me, nn.Linear(WIDTH, 3))


@scenario()
def a_layer_left_out_at_random(me):
    """Stochastic depth, alike on all ranks."""
    def loss(model, me, step):
        x = model.first(me.x(step))
        for number, layer in enumerate(model.layers):
            if (step + number) % 3:
                x = layer(x)
        return model.head(x).square().mean()

    train(me, Chain(count=4), loss=loss, steps=6)


@scenario(refused={"stage3": "not in the same collective"}, worlds=(2, 3, 4))
def other_layers_left_out_on_each_rank(me):
    def loss(model, me, step):
        x = model.first(me.x(step))
        for number, layer in enumerate(model.layers):
            if (step + number + me.rank) % 3:
                x = layer(x)
        return model.head(x).square().mean()

    train(me, Chain(count=4), loss=loss)
