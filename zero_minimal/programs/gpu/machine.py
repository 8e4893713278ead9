"""Machine: its hardware and versions, and whether a GPU computes the same as the CPU."""

import platform

import torch

from zero_minimal.programs.gpu.place import Check, Place, result


def run(place: Place) -> dict:
    """The part: names, versions, memory; a product of two matrices."""
    torch.manual_seed(0)
    one, other = torch.randn(2, 256, 256, dtype=torch.float64)
    device = torch.device(place.device)
    furthest = (one.to(device) @ other.to(device)).cpu().sub(one @ other).abs().max().item()
    what = "a product of two fp64 matrices, against the CPU's"
    check = Check(what, f"{furthest:.1g}", "at most 1e-10", furthest <= 1e-10)
    return result([check], machine=facts(place))


def facts(place: Place) -> dict:
    """For the JSON: versions, and each GPU."""
    told = {"python": platform.python_version(), "torch": torch.__version__, "gpus": []}
    if place.dry:
        return told
    told["cuda"] = torch.version.cuda
    told["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        told["gpus"].append({"name": properties.name, "bytes": properties.total_memory,
                             "capability": f"{properties.major}.{properties.minor}",
                             "processors": properties.multi_processor_count})
    return told
