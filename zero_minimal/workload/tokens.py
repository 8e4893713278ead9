"""Tokens: a text in the vocabulary of a tokenizer, which is a file of the library tokenizers.

Without one, the bytes of the text are the tokens (data.py). The library is optional: transformers
installs it.
"""

import contextlib
import functools
import json
from pathlib import Path

import torch

PIP = "pip install tokenizers"
GAPS = ("[MASK]", "<mask>")  # how tokenizers of encoders name the mask token


def file_of(path: str) -> Path:
    """The path itself, or tokenizer.json in it if it is a folder."""
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def listed(file: Path) -> int:
    """How many tokens a tokenizer.json lists; 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return len(json.loads(file.read_text())["model"]["vocab"])
    return 0


@functools.lru_cache(maxsize=2)
def read(path: str):
    """A tokenizer. Raises: ValueError, saying what to do, without the library or for other files.
    """
    tokenizers = None
    with contextlib.suppress(ImportError):
        import tokenizers
    if tokenizers is None:
        raise ValueError("--tokenizer needs the library tokenizers, which is not installed here: "
                         f"{PIP}")
    try:
        return tokenizers.Tokenizer.from_file(str(file_of(path)))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"--tokenizer {path} is no file of the library tokenizers: {error}"
                         ) from None


@functools.lru_cache(maxsize=1)
def encode(content: bytes, path: str) -> torch.Tensor:
    """A text's tokens, int32 [tokens]. Raises: ValueError if it is not UTF-8."""
    tokenizer = read(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 (byte {error.start}), which a tokenizer reads: "
                         "leave --tokenizer out, then its bytes are the tokens") from None
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int32)


def size(path: str) -> int:
    """The number of a tokenizer's tokens, including added ones."""
    return read(path).get_vocab_size()


def gap(path: str) -> int:
    """The mask token, which marks a gap. Raises: ValueError if there is none."""
    found = [token for name in GAPS if (token := read(path).token_to_id(name)) is not None]
    if not found:
        raise ValueError(f"an encoder fills gaps, and --tokenizer {path} has no token for them: "
                         f"add one called {GAPS[0]}")
    return found[0]
