"""Import: the weights of a safetensors file as a checkpoint, from which training continues.

    python -m zero_minimal import model.safetensors runs/b
    torchrun --nproc-per-node 2 zero_minimal/stage3.py --resume runs/b

A folder of transformers with all its files is accepted, too; the names of its GPT-2 become those of the GPT here. With
--model they stay as they are, for a stage that trains that model of transformers. A weight that has no place here is an
error: without it, a different model would be trained.
"""

import json
import re
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from zero_minimal.checkpoint import as_json, loading, local_chunks, saving
from zero_minimal.programs.progress import meanwhile
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.settings import Parser

GPT2 = {  # {transformers' name for a part: our name}
    "wte": "token_embedding", "wpe": "position_embedding", "ln_f": "norm", "ln_1": "attention_norm",
    "attn.c_attn": "attention.query_key_value", "attn.c_proj": "attention.projection", "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.expansion", "mlp.c_proj": "mlp.projection", "lm_head": "head",
}
MASKS = ("attn.bias", "attn.masked_bias")  # attention masks, which are no weights and the same in every model


def read(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file, or in all files of a folder. Raises: ValueError, naming a file that cannot be read."""
    files = [path]
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        names = set(in_json(index, "weight_map").values()) if index.exists() else {"model.safetensors"}
        files = [path / name for name in sorted(names)]
    found = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
    return found


def in_json(file: Path, key: str):
    """A JSON file's value for this key. Raises: ValueError, naming it."""
    try:
        return json.loads(file.read_text())[key]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{file} cannot be read, or has no {key!r}") from None


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with our names, if they are those of transformers' GPT-2; otherwise unchanged. Raises: ValueError,
    with the names that have no place in our GPT.

    transformers keeps GPT-2's matrices as [inputs, outputs], and torch.nn.Linear [outputs, inputs].
    """
    short = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    if "wte.weight" not in short:
        return weights
    found, unknown = {}, []
    for name, tensor in short.items():
        block, part, kind = re.fullmatch(r"(h\.\d+\.)?(?:(.*)\.)?(\w+)", name, re.DOTALL).groups()
        if part in GPT2:
            is_matrix = ".c_" in f".{part}" and kind == "weight"
            place = (block or "").replace("h.", "blocks.", 1)
            found[f"{place}{GPT2[part]}.{kind}"] = tensor.t().contiguous() if is_matrix else tensor
        elif f"{part}.{kind}" not in MASKS:
            unknown.append(name)
    if unknown:
        raise ValueError("this GPT-2 has weights for which the GPT here has no place: "
                         f"{loading.in_short(unknown)}. Take them out of the file, or merge them into the "
                         "others (LoRA's)")
    return found


def described(tensor: torch.Tensor) -> dict:
    """What the facts say of a weight, and a checksum, which tells whether two names belong to one."""
    return local_chunks.described(tensor, group=None, crc32=zlib.crc32(as_json.bytes_of(tensor)))


def of_the_library(weights: dict[str, torch.Tensor], config: Path) -> dict[str, torch.Tensor]:
    """The weights with their names in a model of this configuration: files of weights omit a prefix that most names
    share. Raises: ValueError for weights that have no place there."""
    model = ForeignModel(str(config), 1).on_meta()
    places, prefix = model.state_dict().keys(), f"{getattr(model, 'base_model_prefix', '')}."
    found, unknown = {}, []
    for name, tensor in weights.items():
        place = next((each for each in (name, prefix + name) if each in places), None)
        if place:
            found[place] = tensor
        elif not name.endswith(MASKS):
            unknown.append(name)
    if unknown:
        raise ValueError(f"a {type(model).__name__} has no place for {loading.in_short(unknown)}")
    return found


def take_over(path: Path, folder: Path, of_a_model: bool = False) -> dict[str, torch.Tensor]:
    """Write a checkpoint of only the weights, and return them; of_a_model: with transformers' names, for a stage that
    trains its model. Raises: ValueError if reading fails; OSError if writing fails."""
    weights, extra = read(path), {"step": 0, "batches": 0, "scaler": None}
    config = path / "config.json"
    if of_a_model:
        if not config.exists():
            raise ValueError(f"{path} has no config.json, which says what --model's weights are: give the folder")
        weights = of_the_library(weights, config)
        extra["model"] = json.loads(config.read_text())
    else:
        weights = renamed(weights)
        if path.is_dir() and config.exists() and "n_head" in config.read_text():
            extra["settings"] = {"heads": in_json(config, "n_head")}  # no weight's shape shows it
    facts = {
        "step": 0, "extra": extra, "stage": None, "ranks": 0,
        "parameters": {name: described(tensor) for name, tensor in weights.items()},
        "also": {}, "buffers": {}, "optimizer": None, "groups": [], "numbers": {},
    }
    to_save = [local for name, tensor in weights.items()
               for local in local_chunks.chunks_of_whole("model", name, tensor)]
    saving.write_alone(folder, facts, to_save, keep=1)
    return weights


def main(arguments: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m zero_minimal import",
                    description="Make a checkpoint, for --resume, from the weights of a safetensors file.")
    parser.add_argument("path", type=Path, metavar="FILE.safetensors", help="the file, or a folder from transformers")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, for the checkpoint")
    parser.add_argument("--model", action="store_true", help="for a stage with --model FOLDER/config.json: names stay "
                        "those of transformers")
    flags = parser.parse_args(arguments)
    try:
        if flags.folder.exists() and (not flags.folder.is_dir() or any(flags.folder.iterdir())):
            parser.error(f"{flags.folder} is not empty: name a new folder")
        with meanwhile("reading …"):
            weights = take_over(flags.path, flags.folder, flags.model)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{flags.folder} cannot be written: {error.strerror or error}")
    print(f"{flags.folder}: {len(weights)} tensors. Go on with --resume {flags.folder}")
