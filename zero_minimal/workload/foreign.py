"""Foreign: a model of the library transformers instead of our GPT, made from its config.json.

    torchrun --nproc-per-node 2 zero_minimal/stage3.py --model config.json

It is built on the meta device, and each of its modules then draws its own values. Stage 3 does that
unit by unit, other stages all at once; the values are the same. The library is optional.
"""

import contextlib
import copy
import difflib
import functools
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.units import find_units
from zero_minimal.extensions import meta_device

PIP = "pip install 'transformers>=5'"
BYTES = 256  # the values that a byte can have
# entries of a configuration that may differ without making it another model
FREE = re.compile(r"_.*|.*dtype|transformers_version|use_cache|.*drop.*|.*_token_id|architectures")


def library():
    """The module transformers. Raises: ValueError, saying how to install it, if it is absent."""
    with contextlib.suppress(ImportError):
        import transformers

        if int(transformers.__version__.split(".")[0]) < 5:  # older ones leave buffers undrawn
            raise ValueError("--model needs transformers 5 or newer, and "
                             f"{transformers.__version__} is installed here: {PIP}")
        transformers.logging.set_verbosity_error()
        return transformers
    raise ValueError("--model needs the library transformers, which is not installed here: "
                     f"{PIP}")


def _words(error: Exception) -> str:
    """The first line of the library's error, or of its cause if it has one."""
    return str(error.__cause__ or error).split("\n")[0].rstrip(".")


def _reason(error: Exception, entries, kinds) -> str:
    """Why a file with these entries is refused; kinds: the accepted values of model_type."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file (give the config.json of a model that lies here)"
    if entries is not None and "model_type" not in entries:  # a list, too
        return 'it has no "model_type", such as "gpt2"'
    words = _words(error).split(". Should contain")[0]  # the library then lists all kinds
    kind = str(entries["model_type"]) if entries else ""
    near = [] if kind in kinds else difflib.get_close_matches(kind, kinds, n=1)
    return f"{words}: did you mean {near[0]}?" if near else words


@dataclass(frozen=True)
class ForeignModel:
    """A language model of the library transformers, built from its config.json without weights.

    A decoder (Llama, GPT-2) learns to predict the next token. An encoder (BERT) fills gaps: its
    objective is masked language modelling (masking.py).
    Raises: ValueError, in one sentence, without that library, or for a file that it refuses.
    """

    file: str
    sequence: int
    recompute: bool = True

    def __post_init__(self):
        config = self.config
        longest = getattr(config, "max_position_embeddings", None)
        if longest and self.sequence > longest:
            raise ValueError(f"this model reads at most {longest:,} tokens: give --sequence "
                             f"{longest} or less")

    @functools.cached_property
    def config(self):
        """The library's configuration object, without the cache for generation."""
        transformers, entries = library(), None
        try:
            entries = self.entries
            config = transformers.AutoConfig.for_model(**entries)
        except Exception as error:  # the library has its own classes
            reason = _reason(error, entries, getattr(transformers, "CONFIG_MAPPING", ()))
            raise ValueError(f"{self.file} is no configuration that transformers reads: {reason}"
                             ) from None
        kinds = {*transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
                 *transformers.MODEL_FOR_MASKED_LM_MAPPING}
        if getattr(config, "is_encoder_decoder", False) or type(config) not in kinds:
            raise ValueError(f"{self.file} is a {config.model_type}, which is no language model "
                             "of one stack: give one like gpt2, llama or bert")
        config.use_cache, config.dtype = False, None  # we choose the dtype
        return config

    @property
    def masked(self) -> bool:
        """Whether it fills gaps, as an encoder: it also sees the tokens that follow."""
        return (type(self.config) in library().MODEL_FOR_MASKED_LM_MAPPING
                and not getattr(self.config, "is_decoder", False))

    @functools.cached_property
    def sizes(self) -> dict:
        """{"name" (its class), "vocabulary" (tokens), "parameters"}."""
        model = self.on_meta()
        return {"name": type(model).__name__, "vocabulary": self.config.vocab_size,
                "parameters": sum(param.numel() for param in model.parameters())}

    @functools.cached_property
    def entries(self) -> dict:
        """The contents of its file, which may change while the model trains."""
        return json.loads(Path(self.file).read_text(encoding="utf-8"))

    def differences(self, entries: dict) -> dict:
        """Where a model with these entries differs from this one: {name: (there, here)}. Entries
        that a file leaves out have the library's defaults."""
        try:
            there = library().AutoConfig.for_model(**entries).to_dict()
        except (ValueError, TypeError, KeyError):
            there = entries
        here = self.config.to_dict()
        if there.get("model_type") != here["model_type"]:
            return {"model_type": (there.get("model_type"), here["model_type"])}
        return {name: (there.get(name), here.get(name))
                for name in sorted(there.keys() | here.keys())
                if not FREE.fullmatch(name) and there.get(name) != here.get(name)}

    def on_meta(self, dtype: torch.dtype | None = None, attention: str = "",
                dropout: bool = True) -> nn.Module:
        """A model on the meta device. model(tokens, targets) is the loss; stage 3 draws values.

        dtype: of the parameters; None: torch's default.
        attention: the library's "sdpa" (torch's) or "eager" (scores, softmax, product), or
            "recomputed", eager and recomputed in backward; "": the library's choice.
        Raises: ValueError if the library cannot build the model, or has no such attention for it.
        """
        transformers = library()
        kind = (transformers.AutoModelForMaskedLM if self.masked
                else transformers.AutoModelForCausalLM)
        if attention == "recomputed":  # the library's eager attention, with its mask
            transformers.AttentionInterface.register("recomputed", recomputed)
            masks = transformers.AttentionMaskInterface
            masks.register("recomputed", masks()["eager"])
        how = {"attn_implementation": attention} if attention else {}
        config = self.config if dropout else without_dropout(self.config)
        try:
            with torch.device("meta"):
                model = kind.from_config(config, dtype=dtype or torch.get_default_dtype(), **how)
        except Exception as error:  # for example, sizes that do not fit together
            raise ValueError(f"transformers does not build the model of {self.file}: "
                             f"{_words(error)}") from error
        model.train()
        if self.recompute:  # renamed in about transformers 5.20
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return with_loss(model)

    def build(self, dtype: torch.dtype | None = None, **how) -> nn.Module:
        """The same model on torch's default device, with values."""
        model = self.on_meta(dtype, **how)
        if torch.get_default_device().type != "meta":
            meta_device.materialise(find_units(model, [])[0], model)
        return model


def without_dropout(config):
    """A copy of the configuration whose dropout shares are all 0."""
    config = copy.deepcopy(config)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def recomputed(module: nn.Module, *given, **options) -> tuple:
    """The library's own eager attention for this model, recomputed in backward."""
    plain = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if plain is None:
        raise ValueError(f"the library's {type(module).__name__} has no attention that could be "
                         "computed again by itself: give --attention fused or unfused")

    def attend(*given):
        return plain(module, *given, **options)[0]

    return checkpoint(attend, *given, use_reentrant=False), None


class WithLoss:
    """Mixed into a model of the library, so that it is called like ours: model(tokens) returns
    logits, model(tokens, targets) the mean cross-entropy in nats; a target of -100 does not count.
    """

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids=tokens).logits  # [batch, sequence, vocabulary]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def initialise(self, module: nn.Module) -> None:
        """Draw one module's values as the library does, from a seed of its own: so the values do
        not depend on the order of the modules."""
        seed, places, draw = self.drawing
        torch.manual_seed(random.Random(f"seed {seed}, module {places[module]}").getrandbits(63))
        for drawer in draw[module]:
            drawer()


def with_loss(model: nn.Module) -> nn.Module:
    """This model, with WithLoss mixed into its class; its parameters keep their names."""
    places = {module: place for place, module in enumerate(model.modules())}
    model.drawing = torch.initial_seed(), places, meta_device.drawers(model)
    model.__class__ = type(type(model).__name__, (WithLoss, type(model)), {})
    return model
