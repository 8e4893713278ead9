"""Hub: a checkpoint of a --model as a folder that transformers loads without us.

    python -m zero_minimal export runs/a tuned
    AutoModelForCausalLM.from_pretrained("tuned"), AutoTokenizer.from_pretrained("tuned")

    config.json         the one that was trained, which the checkpoint has
    model.safetensors   the weights
    tokenizer.json      of a run on bytes: one that makes a token of each byte; else a copy of --tokenizer's
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from zero_minimal.checkpoint.state_folder import Contents
from zero_minimal.workload import tokens
from zero_minimal.workload.foreign import BYTES

GAP = tokens.GAPS[0]


def write(contents: Contents, weights: dict[str, torch.Tensor], folder: Path) -> list[str]:
    """Write the folder, the weights last; what is not in it, in words. Raises: ValueError for a checkpoint that is not
    of a --model, OSError for a folder that cannot be written."""
    extra = contents.facts["extra"]
    model = extra.get("model") if isinstance(extra, dict) else None
    if not model:
        raise ValueError("a folder is for models of transformers, and this checkpoint is of none: name a file that "
                         "ends in .safetensors")
    settings = extra.get("settings", {})
    folder.mkdir(exist_ok=True)
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()
                  if tensor.is_floating_point()), None)
    as_json(model | {"dtype": dtype}, folder / "config.json")
    missing = write_tokenizer(settings.get("tokenizer", ""), extra.get("gap") is not None, folder)
    save(weights, folder / "model.safetensors")
    return missing


def save(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write a file, which takes its name when it is whole; who may read it is as for any new file (save_file lets its
    owner alone). Raises: OSError, SafetensorError."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.touch()
        mode = part.stat().st_mode
        save_file(weights, part, {"format": "pt"})  # transformers looks for this word
        part.chmod(mode)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_tokenizer(of_the_run: str, with_gap: bool, folder: Path) -> list[str]:
    """tokenizer.json, and what transformers wants beside it. with_gap: for a model that fills gaps."""
    kept = tokens.file_of(of_the_run) if of_the_run else None
    if kept is None:
        as_json(of_bytes(with_gap), folder / "tokenizer.json")
    elif kept.is_file():
        (folder / "tokenizer.json").write_bytes(kept.read_bytes())
    else:
        return [f"the tokenizer {kept} is not there any more: copy it into the folder as tokenizer.json"]
    as_json({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            | ({"mask_token": GAP} if with_gap else {}), folder / "tokenizer_config.json")
    return []


def of_bytes(with_gap: bool) -> dict:
    """A tokenizer of the library tokenizers that makes a token of each byte, whose number is the byte's. That library
    writes bytes as characters that can be seen (GPT-2's alphabet), and has no merges here."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    gap = {"id": BYTES, "content": GAP, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [gap] if with_gap else [],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {character: byte for byte, character in enumerate(alphabet())}, "merges": []},
    }


def alphabet() -> list[str]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others for those from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(BYTES) if byte not in seen]
    return [chr(byte) if byte in seen else chr(BYTES + hidden.index(byte)) for byte in range(BYTES)]


def as_json(content: dict, file: Path) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
