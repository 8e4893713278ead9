"""Export: the weights of a checkpoint as a file that a plain model loads without zero_minimal.

    python -m zero_minimal export runs/a model.safetensors
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

For a run with --model, also as a folder that transformers loads without zero_minimal:

    python -m zero_minimal export runs/a tuned
    AutoModelForCausalLM.from_pretrained("tuned"), AutoTokenizer.from_pretrained("tuned")

    config.json         the trained model's, from the checkpoint
    model.safetensors   the weights
    tokenizer.json      for a run on bytes: one token for each byte; otherwise a copy of --tokenizer's
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from zero_minimal.checkpoint import as_json, loading, local_chunks
from zero_minimal.checkpoint.state_folder import Contents
from zero_minimal.programs.progress import meanwhile
from zero_minimal.programs.report import beside, write_json
from zero_minimal.workload import tokens
from zero_minimal.workload.foreign import BYTES
from zero_minimal.workload.settings import Parser, output_file

GAP = tokens.GAPS[0]


def weights(contents: Contents) -> dict[str, torch.Tensor]:
    """The saved model's state_dict(), in its own dtypes, with both names of tied weights."""
    made, facts = {}, contents.facts
    for kind, described in (("model", facts["parameters"]), ("buffer", facts["buffers"])):
        for name, one in described.items():
            made[kind, name] = torch.zeros(one["shape"], dtype=as_json.dtype_of(one["dtype"]))
    loading.read_alone(contents, [local for (kind, name), tensor in made.items()
                                  for local in local_chunks.chunks_of_whole(kind, name, tensor)])
    found = {name: tensor for (_, name), tensor in made.items()}
    return found | {name: found[first].clone() for name, first in facts["also"].items() if first in found}


def export(folder: Path, file: Path) -> Contents:
    """Write the weights of the newest complete checkpoint. Raises: Damaged; ValueError for a folder, if the checkpoint
    is not of a --model; OSError if writing fails."""
    contents = loading.newest_good(folder)
    if file.suffix == ".safetensors":
        save(weights(contents), file)
    else:
        write_folder(contents, file)
    return contents


def save(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write a file, which gets its name once it is complete, with the permissions of any new file (save_file would let
    only its owner read it). Raises: OSError, SafetensorError."""
    with beside(file) as part:
        part.touch()
        mode = part.stat().st_mode
        save_file(weights, part, {"format": "pt"})  # transformers requires this entry
        part.chmod(mode)


# ---------------------------------------------------------------------------------------------- for transformers


def write_folder(contents: Contents, folder: Path) -> None:
    """Write the folder, weights last. Warns if the tokenizer no longer exists. Raises: as export()."""
    extra = contents.facts["extra"]
    model = extra.get("model") if isinstance(extra, dict) else None
    if not model:
        raise ValueError("a folder is for models of transformers, and this checkpoint is of none: name a file that "
                         "ends in .safetensors")
    found = weights(contents)
    folder.mkdir(exist_ok=True)
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in found.values()
                  if tensor.is_floating_point()), None)
    write_json(model | {"dtype": dtype}, folder / "config.json")
    write_tokenizer(extra.get("settings", {}).get("tokenizer", ""), extra.get("gap"), folder)
    save(found, folder / "model.safetensors")


def write_tokenizer(of_the_run: str, gap: int | None, folder: Path) -> None:
    """Write tokenizer.json, and the other file that transformers needs. gap: the mask token of a model that has one."""
    kept = tokens.file_of(of_the_run) if of_the_run else None
    if kept is None:
        write_json(of_bytes(gap is not None), folder / "tokenizer.json")
    elif kept.is_file():
        (folder / "tokenizer.json").write_bytes(kept.read_bytes())
    else:
        warnings.warn(f"the tokenizer {kept} is not there any more: copy it into the folder as tokenizer.json",
                      stacklevel=2)
        return
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    write_json({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
               | {"mask_token": token["content"] for token in added if token["id"] == gap},
               folder / "tokenizer_config.json")


def of_bytes(with_gap: bool) -> dict:
    """A tokenizer of the library tokenizers with a token for each byte, numbered as the byte. That library writes bytes
    as visible characters (GPT-2's alphabet); there are no merges."""
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
    """GPT-2's character for each byte: printable bytes are themselves, the others get characters from 256 on."""
    hidden = [byte for byte in range(BYTES) if chr(byte) == " " or not chr(byte).isprintable()]
    return [chr(BYTES + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(BYTES)]


# -------------------------------------------------------------------------------------------------------- command


def target(path: str) -> Path:
    """The type of a flag that names a file of weights, or a folder that is new, empty, or from an earlier export."""
    if path.endswith(".safetensors"):
        return output_file(path)
    folder = Path(path)
    if folder.suffix:
        raise argparse.ArgumentTypeError(f"{path}: the name of a file must end in .safetensors, and that of a folder "
                                         "has no dot")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "config.json").exists())):
        raise argparse.ArgumentTypeError(f"{path} is there, and no folder of a model: name a new one")
    return folder


def main(arguments: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m zero_minimal export",
                    description="Write the weights of a checkpoint as a safetensors file, for the plain model.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, or a folder of them: the newest")
    parser.add_argument("file", type=target, metavar="FILE.safetensors|FOLDER", help="the file to write; or a folder, "
                        "for a run with --model, that transformers loads")
    flags = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True) as passed_over, meanwhile("reading …"):
            warnings.simplefilter("always")
            contents = export(flags.folder, flags.file)
    except ValueError as error:  # including Damaged
        parser.error(str(error))
    except (OSError, SafetensorError) as error:
        parser.error(f"{flags.file} cannot be written: {getattr(error, 'strerror', None) or error}")
    for one in passed_over:
        print(f"warning: {one.message}", file=sys.stderr)
    if left := contents.facts.get("extra_states"):
        names = ", ".join(path or "the model" for path in left)
        print(f"warning: get_extra_state() of {names} is not in the file: load_state_dict(…, strict=False)",
              file=sys.stderr)
    count = sum(torch.Size(one["shape"]).numel() for one in contents.facts["parameters"].values())
    print(f"{flags.file}: {count:,} parameters of {contents.folder}")
