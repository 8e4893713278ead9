"""The settings of a training run: one dataclass, and the flags made from it."""

import argparse
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.processes import interrupts
from zero_minimal.processes.joining import COLLECTIVE_TIMEOUT
from zero_minimal.workload import data, tokens
from zero_minimal.workload.foreign import BYTES, ForeignModel
from zero_minimal.workload.model import GPTConfig

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")  # formats of a picture file
OPTIMIZER = dict(betas=(0.9, 0.95), weight_decay=0.1, fused=True)  # AdamW's options beside lr
WARM_UP = 100  # steps
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("layers", "hidden", "heads", "dropout")  # of our GPT: the file of --model sets its own


def option(default: int | float | str, help: str):
    """A setting's default and its line in --help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """One training run. Raises: ValueError, saying what is accepted, if it cannot work."""

    layers: int = option(6, "blocks of the model")
    hidden: int = option(256, "width of the model")
    heads: int = option(8, "attention heads; they must divide --hidden")
    sequence: int = option(64, "tokens in a sequence; a token is a byte")
    batch: int = option(4, "sequences in a micro-batch of one rank")
    steps: int = option(120, "optimizer steps")
    accumulate: int = option(1, "micro-batches in an optimizer step")
    clip: float = option(0.0, "largest global norm of the gradient; 0: do not clip")
    dtype: str = option("fp32", "of parameters and gradients: " + ", ".join(DTYPES))
    text: str = option("", "file to learn from (default: the documentation inside Python, "
                           "pydoc_data.topics)")
    seed: int = option(0, "of the model, the batches and dropout")
    bucket_mb: float = option(4.0, "size of the buckets in which gradients travel, in MiB")
    recompute: bool = option(False, "keep only each block's input, and recompute its inside in "
                                    "backward")
    lr: float = option(2e-3, "learning rate, before warm-up and decay")
    dropout: float = option(0.0, "share of activations set to zero in training")
    model: str = option("", "config.json of the library transformers (gpt2, llama, bert, …): train "
                            "that model instead of our GPT")
    tokenizer: str = option("", "with --model: tokenizer.json of its vocabulary (default: a token "
                                "is a byte)")

    def __post_init__(self):
        if self.model:
            self._check_vocabulary()
        elif self.tokenizer:
            raise ValueError("--tokenizer is for --model: the GPT here reads bytes")
        else:
            self.model_config()  # GPTConfig knows which sizes fit together
        for name in ("sequence", "batch", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("bucket_mb", "lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}")
        if not 0 <= self.clip < float("inf"):
            raise ValueError(f"clip must be above 0, or 0 for no clipping, not {self.clip}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number from 0 up, below 2^32, not {self.seed}")

    def model_config(self) -> GPTConfig:
        """The sizes of the model."""
        return GPTConfig(
            layers=self.layers, hidden=self.hidden, heads=self.heads, sequence=self.sequence,
            dropout=self.dropout, recompute=self.recompute,
        )

    @functools.cached_property
    def foreign(self) -> ForeignModel:
        """The model that --model names. Raises: ValueError, saying why, if it is refused."""
        return ForeignModel(self.model, self.sequence, self.recompute)

    @property
    def gap(self) -> int | None:
        """The mask token, for a model that fills gaps; None for one that continues a text. If
        tokens are bytes, it is 256, the first number that is not a byte."""
        if not self.model or not self.foreign.masked:
            return None
        return tokens.gap(self.tokenizer) if self.tokenizer else BYTES

    def _check_vocabulary(self) -> None:
        """Raises: ValueError, with the line to write, if the tokens do not fit the model's
        vocabulary, or if there is no such model."""
        beside = tokens.file_of(self.model).with_name("tokenizer.json")
        if not self.tokenizer and (known := tokens.listed(beside)) > BYTES + 1:
            raise ValueError(f"{beside} has {known} tokens, and without --tokenizer a byte would "
                             f"be a token, whatever it means there: give --tokenizer {beside}")
        gap, has = self.gap, self.foreign.sizes["vocabulary"]
        needed = tokens.size(self.tokenizer) if self.tokenizer else BYTES
        needed = max(needed, -1 if gap is None else gap + 1)
        if has < needed:
            of = f"--tokenizer {self.tokenizer} has" if self.tokenizer else (
                "bytes are" if gap is None else "bytes and one token for gaps are")
            other = "" if self.tokenizer else ", or give --tokenizer FILE"
            raise ValueError(f"the model of {self.model} has {has} tokens, and {of} {needed}: "
                             f'write "vocab_size": {needed} into it{other}')

    def read_tokens(self) -> torch.Tensor:
        """The text, int [tokens]. Raises: what data.read_tokens raises."""
        return data.read_tokens(self.text, self.tokenizer)

    def optimizer_class(self) -> type:
        """The optimizer's class in torch."""
        return torch.optim.AdamW

    def optimizer_options(self) -> dict:
        """The optimizer's keyword arguments."""
        return {"lr": self.lr, **OPTIMIZER}

    def learning_rate(self, step: int) -> float:
        """A step's rate, from step 0: linear warm-up times half a cosine down to a tenth.

        The warm-up has a fixed number of steps, however long the run is: too high a rate early
        makes training unstable.
        """
        warm = min(1.0, (step + 1) / WARM_UP)
        return self.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def scheduled(self, step: int, skipped: int) -> dict:
        """The optimizer's options in a step; fp16 skipped `skipped` steps before it, which count
        here like all others."""
        return {"lr": self.learning_rate(step)}

    def loss_scaler(self, groups: list | None = None) -> LossScaler | None:
        """The loss scaler for fp16, otherwise None. groups: as LossScaler takes them."""
        return LossScaler(groups=groups) if self.dtype == "fp16" else None

    def tokens_per_step(self, ranks: int) -> int:
        """Tokens that all ranks together train on in one optimizer step."""
        return ranks * self.batch * self.sequence * self.accumulate


# ----------------------------------------------------------------------------------------- as flags


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for torchrun's programs: all ranks read the same flags, rank 0 prints.

    It refuses with one line, which suggests a similar name if there is one.
    """

    def __init__(self, *, allow_abbrev: bool = False, **options):
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def parse_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        self.given = {word.split("=")[0] for word in words}  # also flags written with their default
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            flag = flag.split("=")[0]
            self.error(f"there is no {flag}{meant(flag, self._option_string_actions)}")
        return found

    def given_values(self, args=None) -> dict:
        """{name: value} of the flags on the command line, without those left at their defaults."""
        unset = object()
        blank = argparse.Namespace(**{action.dest: unset for action in self._actions})
        found = vars(self.parse_known_args(args, blank)[0])
        return {name: value for name, value in found.items() if value is not unset}

    def error(self, message):
        choice = re.match(r"argument .*invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            message += meant(choice[1], re.findall(r"[\w.+-]+", choice[2]))
        interrupts.refuse(f"{self.prog}: error: {message} (--help shows all there is)")

    def print_help(self, file=None):
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            super().print_help(file)


def meant(name: str, names: Iterable[str]) -> str:
    """": did you mean --ranks?" if one of the names is near, else nothing."""
    name = name.strip("-")  # all flags begin with dashes
    by_letters = {each.strip("-"): each for each in names}
    longer = [each for each in by_letters if name and each.startswith(name)]
    near = longer or difflib.get_close_matches(name, by_letters, n=1)
    return f": did you mean {by_letters[near[0]]}?" if near else ""


def add_settings(parser: argparse.ArgumentParser, **defaults) -> None:
    """Give the parser a flag for every setting; `defaults` replace those of Settings."""
    group = parser.add_argument_group("model and training")
    for setting in fields(Settings):
        flag = "--" + setting.name.replace("_", "-")
        default = defaults.get(setting.name, setting.default)
        if setting.type is bool:
            group.add_argument(flag, action="store_true", help=setting.metadata["help"])
        else:
            shown = "" if default == "" else f" (default: {default})"
            line = setting.metadata["help"] + shown
            kind = {"type": _number(setting.type)} if setting.type in (int, float) else {}
            metavar = setting.name.upper().replace("_", "-")
            group.add_argument(flag, default=default, metavar=metavar, help=line, **kind)


def read_settings(parser: Parser, arguments: argparse.Namespace) -> Settings:
    """Settings from parsed flags. If they cannot work, ends the program and says what is accepted.

    Checks here, before the ranks connect, all that can be checked, even the text: so all ranks
    refuse alike.
    """
    names = [setting.name for setting in fields(Settings)]
    try:
        settings = Settings(**{name: getattr(arguments, name) for name in names})
        for name in SIZES if settings.model else ():
            if f"--{name}" in parser.given:
                parser.error(f"--{name} is for the GPT here, and the sizes of --model are those of "
                             f"its file: leave --{name} out, or write it into {arguments.model}")
        data.split(settings.read_tokens(), settings.sequence)
    except ValueError as error:
        parser.error(str(error))
    return settings


def refuse_model(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End a program whose model is split over ranks if --model names another model."""
    if arguments.model:
        parser.error("--model is for the stages: here ranks share a model, and only our GPT is cut "
                     "so; leave --model out")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Give the parser --device, which ranks.choose understands."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="default: auto, a GPU if there is one")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Give the parser --timeout, for ranks.start."""
    parser.add_argument("--timeout", type=positive, default=COLLECTIVE_TIMEOUT, metavar="SECONDS",
                        help="a rank that hears nothing from the others for so long ends and says "
                             f"so (default: {COLLECTIVE_TIMEOUT})")


def output_file(path: str) -> Path:
    """The type of a flag that names an output file: refuses a file that cannot be written."""
    file = Path(path)
    # it is written under another name and renamed, but for a pipe, say, which is written itself
    renamed = file.is_file() or not file.exists()
    needed = [file] * file.exists() + [file.resolve().parent] * renamed
    if file.is_dir() or not all(os.access(each, os.W_OK) for each in needed):
        raise argparse.ArgumentTypeError(f"{path!r} cannot be written: name a file in a folder "
                                         "that exists")
    return file


def picture_file(path: str) -> Path:
    """The type of a flag that names a picture to write: refuses suffixes outside PICTURES."""
    file = output_file(path)
    if file.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{path!r} is no picture: its name must end in "
                                         f"{', '.join(PICTURES)}")
    return file


def positive(text: str) -> int:
    """The type of a flag that counts something: a whole number from 1 up."""
    value = _number(int)(text)
    if not 1 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"a whole number from 1 up (to 10⁹) is wanted, not {text}")
    return value


def _number(kind: type):
    """The type of a flag for int or float, whose error says which is wanted."""

    def number(text: str):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{wanted} is wanted, not {text!r}") from None

    return number
