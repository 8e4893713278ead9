"""Registry: everything that can be trained here, by name. Programs choose from it."""

from zero_minimal.kept_units import Kept3
from zero_minimal.late_gather import Late1, Late2
from zero_minimal.programs import peers
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.zero_100b import CONFIGS, System

__all__ = ["CONFIGS", "CONTENDERS", "REFERENCE", "STAGES", "System"]

STAGES = (Stage0, Stage1, Stage2, Stage3)  # by number
REFERENCE = "DDP"  # the baseline of times
CONTENDERS = {
    "DDP": peers.DDP,
    **{f"stage {number}": stage for number, stage in enumerate(STAGES)},
    "late 1": Late1,
    "late 2": Late2,
    "kept 3": Kept3,
    "ZeroRedundancy": peers.ZeroRedundancy,
    "FSDP2 kept": peers.FSDP2Kept,
    "FSDP2": peers.FSDP2,
    **{f"DeepSpeed {number}": peer for number, peer in enumerate(peers.DEEPSPEED)},
    "floor": peers.Floor,
}
