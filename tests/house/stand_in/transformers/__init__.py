"""A stand-in for the library transformers, for tests where that is not installed: what --model calls of it, and two
small models. One is Llama-like: RMS norms, rotary positions, fewer heads for keys than for queries, a gated MLP; with
dropout, which Llama has not. The other is the same, and sees the tokens that follow: an encoder.

They draw their values as those of the library do: modules of torch's in reset_parameters(), all in _init_weights().
"""

import contextlib
import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__version__ = "5.0.stand-in"
logging = types.SimpleNamespace(set_verbosity_error=lambda: None)
DEFAULTS = dict(vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=48, tie_word_embeddings=False, dropout=0.1,
                initializer_range=0.02)


class Config:
    is_encoder_decoder = is_decoder = False
    _attention = "sdpa"

    def __init__(self, **entries):
        vars(self).update(DEFAULTS | {"model_type": self.model_type} | entries)

    def to_dict(self):
        return dict(vars(self))


class DecoderConfig(Config):
    model_type = "standin"


class EncoderConfig(Config):
    model_type = "standin-encoder"


class UnfusedConfig(DecoderConfig):
    model_type = "standin-unfused"  # of these the library has no fused attention


class PairConfig(Config):
    model_type, is_encoder_decoder = "standin-pair", True


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


class Rotary(nn.Module):
    """Positions as angles: a buffer that is computed, and not saved."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("frequencies", self.computed(), persistent=False)

    def computed(self):
        return 1e4 ** (-torch.arange(0, self.size, 2).float() / self.size)

    def forward(self, x):
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        cosine, sine = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat([-second, first], -1) * sine


def sdpa_attention_forward(module, query, key, value, is_causal):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2), None


def eager_attention_forward(module, query, key, value, is_causal):
    scores = (query @ key.transpose(-2, -1)) * query.shape[-1] ** -0.5  # [batch, heads, sequence, sequence]
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class AttentionInterface(dict):
    """Functions by their names, as the library keeps them: eager is the model's own."""

    KNOWN = {"sdpa": sdpa_attention_forward}

    def __init__(self):
        super().__init__(self.KNOWN)

    @classmethod
    def register(cls, name, function):
        cls.KNOWN[name] = function


class AttentionMaskInterface(AttentionInterface):
    KNOWN = {"eager": None}


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.head = config, config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, config.num_key_value_heads * self.head, bias=False)
                                    for _ in range(2))
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = Rotary(self.head)

    def forward(self, x):
        query, key, value = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                             for part in (self.q_proj, self.k_proj, self.v_proj))
        times = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(times, 1) for part in (self.rotary(key), value))
        attend = AttentionInterface().get(self.config._attention, eager_attention_forward)
        x, _ = attend(self, self.rotary(query), key, value, is_causal=isinstance(self.config, DecoderConfig))
        return self.c_proj(x.flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
                                        for _ in range(2))
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.c_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_norm, self.attention = RMSNorm(config.hidden_size), Attention(config)
        self.mlp_norm, self.mlp, self.dropout = RMSNorm(config.hidden_size), MLP(config), nn.Dropout(config.dropout)
        self.recompute = False

    def inside(self, x):
        x = x + self.dropout(self.attention(self.input_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False) if self.recompute else self.inside(x)


class Model(nn.Module):
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding.weight

    def activation_checkpointing_enable(self, options):
        assert options == {"use_reentrant": False}
        for layer in self.layers:
            layer.recompute = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            module.frequencies.copy_(module.computed())
        for name, param in module.named_parameters():
            if name == "c_proj.weight":  # of the residual stream: narrower
                nn.init.normal_(param, std=self.config.initializer_range / (2 * len(self.layers)) ** 0.5)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return types.SimpleNamespace(logits=self.lm_head(self.norm(x)))


class StandInForCausalLM(Model):
    pass


class StandInForMaskedLM(Model):
    pass


class AutoConfig:
    KINDS = {kind.model_type: kind for kind in (DecoderConfig, EncoderConfig, UnfusedConfig, PairConfig)}

    @classmethod
    def for_model(cls, model_type, **entries):
        if model_type not in cls.KINDS:
            raise ValueError(f"Unrecognized model identifier: {model_type}")
        return cls.KINDS[model_type](**entries)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def from_config(kind, config, dtype, attn_implementation=None):
    unfused = config.model_type == "standin-unfused"
    if attn_implementation == "sdpa" and unfused:
        raise ValueError("this model does not support torch's attention")
    config = copy.deepcopy(config)
    config._attention = attn_implementation or ("eager" if unfused else "sdpa")
    with default_dtype(dtype):
        return kind(config)


AutoModelForCausalLM = types.SimpleNamespace(from_config=functools.partial(from_config, StandInForCausalLM))
AutoModelForMaskedLM = types.SimpleNamespace(from_config=functools.partial(from_config, StandInForMaskedLM))
MODEL_FOR_CAUSAL_LM_MAPPING = dict.fromkeys((DecoderConfig, EncoderConfig, UnfusedConfig), StandInForCausalLM)
MODEL_FOR_MASKED_LM_MAPPING = {EncoderConfig: StandInForMaskedLM}
