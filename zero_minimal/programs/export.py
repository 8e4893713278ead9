"""Export: the weights of a checkpoint as a file that a plain model loads without us.

    python -m zero_minimal export runs/a model.safetensors
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

Of a run with --model also as a folder that transformers loads (hub.py):

    python -m zero_minimal export runs/a tuned
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError

from zero_minimal.checkpoint import as_json, loading, local_chunks
from zero_minimal.checkpoint.state_folder import Contents
from zero_minimal.programs import hub
from zero_minimal.programs.progress import meanwhile
from zero_minimal.workload.settings import Parser, output_file


def weights(contents: Contents) -> dict[str, torch.Tensor]:
    """model.state_dict() of the model that was saved: its own dtypes, and both names of what has two."""
    made, facts = {}, contents.facts
    for kind, described in (("model", facts["parameters"]), ("buffer", facts["buffers"])):
        for name, one in described.items():
            made[kind, name] = torch.zeros(one["shape"], dtype=as_json.dtype_of(one["dtype"]))
    loading.read_alone(contents, [piece for (kind, name), tensor in made.items()
                                  for piece in local_chunks.whole_piece(kind, name, tensor)])
    found = {name: tensor for (_, name), tensor in made.items()}
    return found | {name: found[first].clone() for name, first in facts["also"].items() if first in found}


def export(folder: Path, file: Path) -> Contents:
    """Write the newest whole checkpoint's weights. Raises: Damaged, and for a folder what hub.write raises."""
    contents = loading.newest_good(folder)
    if file.suffix != ".safetensors":
        for left_out in hub.write(contents, weights(contents), file):
            warnings.warn(left_out, stacklevel=2)
        return contents
    hub.save(weights(contents), file)
    return contents


def target(path: str) -> Path:
    """The type of a flag that names a file of weights, or a folder that is new, empty, or had been one of these."""
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
                        "of a run with --model, that transformers loads")
    flags = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True) as passed_over, meanwhile("reading …"):
            warnings.simplefilter("always")
            contents = export(flags.folder, flags.file)
    except ValueError as error:  # Damaged is one
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
