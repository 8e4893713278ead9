"""Written: a stage of a plan as a DeepSpeed file, and as code for FSDP2, for `plan --write-deepspeed-config`.

Both are complete: stage files read the DeepSpeed file (--deepspeed-config), and a test runs both against the stage.
"""

import argparse
import math
from pathlib import Path

from zero_minimal.paper.moments import BUCKET
from zero_minimal.paper.quantities import plural
from zero_minimal.paper.shapes import block_parameters, root_parameters
from zero_minimal.programs import report
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import DTYPES, OPTIMIZER, Settings, output_file

DISK = "/local_nvme"  # a placeholder: a plan does not know folders
FSDP2 = {  # stage: (why these lines, lines for only the last of several micro-batches)
    0: ("FSDP2 always shards: stage 0 is DDP.", ["require_backward_grad_sync = {}"]),
    1: ("FSDP2 has no stage 1. These lines send as much as stage 1: gradients and parameters stay whole until the last "
        "micro-batch; between steps FSDP2 keeps shards of both.",
        ["set_requires_gradient_sync({})", "set_reshard_after_backward({})"]),
    2: ("Parameters stay whole until the last micro-batch is through, as at stage 2; between steps FSDP2 keeps shards "
        "of them, which stage 2 does not.", ["set_reshard_after_backward({})"]),  # or each gathers parameters
    3: ("Blocks let their parameters go after forward, and gather them again for backward.", []),
}


def deepspeed(config: GPTConfig | None, told: dict, stage: int, accumulate: int = 1,
              offload: str | None = None) -> dict:
    """DeepSpeed's keys. config: None for a model of transformers. told: the result of plan(). offload: None, "cpu" or
    "disk". Learning rate, betas and weight decay are those of this project's programs: a plan does not know yours.

    Raises: ValueError for an offload of stage 0.
    """
    if offload and not stage:
        raise ValueError("stage 0 has no shards that could leave: give --stage 1, 2 or 3 with --offload")
    batch, shares = told["batch"], told["sequence_parallel"]
    parallel = told["ranks"] // told["model_parallel"] // shares
    elements = BUCKET // DTYPES[told["dtype"]].itemsize  # DeepSpeed counts elements
    zero = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements, "overlap_comm": True,
            "contiguous_gradients": True, "reduce_scatter": True}
    if stage == 3:
        block = block_parameters(config) if config else told["largest_unit"]
        root = root_parameters(config) if config else told["root"]
        zero |= {"stage3_prefetch_bucket_size": block, "stage3_param_persistence_threshold": 0,
                 "stage3_max_live_parameters": root + 2 * block, "stage3_max_reuse_distance": 0}
    if offload:
        place = {"device": "nvme", "nvme_path": DISK} if offload == "disk" else {"device": "cpu"}
        zero["offload_optimizer"] = place | {"pin_memory": True}
    content = {
        "train_batch_size": batch * accumulate * parallel, "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulate, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": Settings.lr, "betas": list(OPTIMIZER["betas"]), "eps": 1e-8,
                                                  "weight_decay": OPTIMIZER["weight_decay"]}},
        "zero_optimization": zero,
    }
    if told["dtype"] == "fp16":  # as LossScaler: each overflow halves the scale, 2000 good steps double it. But
        # DeepSpeed stops at 1, and LossScaler goes lower: DeepSpeed takes only whole numbers as the smallest scale
        content["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000,
                           "hysteresis": 1, "min_loss_scale": 1}
    elif told["dtype"] == "bf16":
        content["bf16"] = {"enabled": True}
    if told["checkpoints"] != "whole":
        content["activation_checkpointing"] = {"partition_activations": True,
                                               "cpu_checkpointing": told["checkpoints"] == "P_a+cpu"}
    if _wide(told):
        content |= {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return content | ({"sequence_parallel_size": shares} if shares > 1 else {})


def _wide(told: dict) -> bool:
    """Whether gradients are fp32 with 16-bit parameters."""
    return told["dtype"] != "fp32" and told["gradient_bytes"] == 4


def fsdp2(told: dict, stage: int, accumulate: int = 1, offload: str | None = None) -> str:
    """Code for FSDP2 that does what the stage does. It expects `model`, with its blocks, and `batches`: pairs of tokens
    and targets, or keyword arguments for a model of transformers."""
    lists = [f"model.{name}" for name in told.get("blocks", ("blocks",))]
    blocks = lists[0] if len(lists) == 1 else f"({', '.join(f'*{name}' for name in lists)})"
    loss = "model(**next(batches)).loss" if "model" in told else "model(*next(batches))"
    dtype = DTYPES[told["dtype"]]
    dtypes = f"param_dtype={dtype}, reduce_dtype={'torch.float32' if _wide(told) else dtype}"
    host = "CPUOffloadPolicy, " if offload else ""
    policy = "mp_policy=policy" + ", offload_policy=CPUOffloadPolicy()" * bool(offload)
    shard = [
        f"from torch.distributed.fsdp import {host}MixedPrecisionPolicy, fully_shard", "",
        f"policy = MixedPrecisionPolicy({dtypes if told['dtype'] != 'fp32' else ''})",
        "model.float()  # FSDP2 keeps fp32 shards, and gathers and reduces in the policy's dtypes",
        f"for block in {blocks}:", f"    fully_shard(block, reshard_after_forward={stage == 3}, {policy})",
        f"fully_shard(model, reshard_after_forward=False, {policy})",
    ]
    replicate = [
        "from torch.nn.parallel import DistributedDataParallel", "",
        "model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # FSDP2 has no stage 0",
    ]
    for_the_last = FSDP2[stage][1] if accumulate > 1 else []
    return "\n".join((
        "import torch", *(shard if stage else replicate),
        f"optimizer = torch.optim.AdamW(model.parameters(), lr={Settings.lr}, betas={OPTIMIZER['betas']}, "
        f"weight_decay={OPTIMIZER['weight_decay']})", "",
        f"for micro in range({accumulate}):",
        *(f"    model.{line.format(f'micro == {accumulate - 1}')}" for line in for_the_last),
        f"    ({loss} / {accumulate}).backward()", "optimizer.step()", "optimizer.zero_grad()", ""))


# -------------------------------------------------------------------------------------------------------------- command


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the plan's parser the flags for writing."""
    parser.add_argument("--write-deepspeed-config", type=output_file, metavar="FILE.json",
                        help="write a stage as a DeepSpeed file, and print FSDP2's code for it")
    parser.add_argument("--stage", type=int, choices=range(4), metavar="0…3",
                        help="the stage to write (default: the first that fits)")


def readers(told: dict, stage: int, file: Path) -> list[str]:
    """Lines that say which programs can use the file unchanged, with the training command, and which cannot."""
    if why := _said({"gradients here are kept and reduced in the dtype of the parameters": _wide(told),
                     "no ranks share a sequence here": told["sequence_parallel"] > 1,
                     "they cut no model (--mp)": told["model_parallel"] > 1}):
        return [paragraph(f"DeepSpeed reads it. The stage scripts refuse it: {', and '.join(why)}.")]
    names = ("model", "sequence") if "model" in told else ("layers", "hidden", "heads", "sequence")
    model = " ".join(f"--{name} {told[name]}" for name in names) + " --recompute" * told["recompute"]
    but = _said({"its vocabulary is bytes, 256": "model" not in told and told["vocabulary"] != 256,
                 "its attention is fused": told["attention"] != "fused"})
    apart = f" (but {', and '.join(but)})" if but else ""
    ranks, node = told["ranks"], told["node"]
    here = ranks if ranks <= node else math.gcd(ranks, node)
    nodes = f"--nnodes {ranks // here} " if here < ranks else ""
    return [paragraph(f"DeepSpeed reads it. So does the stage script, which trains what was planned{apart}:"), "",
            f"    torchrun {nodes}--nproc-per-node {here} \\",
            f"        zero_minimal/stage{stage}.py --deepspeed-config {file} \\", f"        {model}"]


def _said(sentences: dict[str, bool]) -> list[str]:
    """The sentences whose condition is true."""
    return [sentence for sentence, is_so in sentences.items() if is_so]


def write(flags: argparse.Namespace, config: GPTConfig | None, told: dict) -> str:
    """Write the file that the flags request; return a text about it, and FSDP2's code. "" if they request none.

    Raises: ValueError if no stage fits, or if flags for writing have no file.
    """
    file, accumulate, disk = flags.write_deepspeed_config, flags.accumulate, flags.offload == "disk"
    if not file and flags.stage is not None:
        raise ValueError("--stage says which one --write-deepspeed-config writes: give that, too")
    if not file:
        return ""
    if told["replicate"] > 1:
        raise ValueError("the file and FSDP2's lines cut states over all ranks: give --write-deepspeed-config without "
                         "--replicate")
    offloaded = [row["stage"] for row in told.get("offload", {}).get("rows", []) if row["fits"]]
    fitting = (offloaded[0] if offloaded else None) if flags.offload else told["first_stage_that_fits"]
    stage = fitting if flags.stage is None else flags.stage
    if stage is None:
        raise ValueError("--write-deepspeed-config: no stage fits, so say which one with --stage")
    report.write_json(deepspeed(config, told, stage, accumulate, flags.offload), file)
    words = _said({
        f"stage {stage} is written to {file}, for {plural(told['ranks'], 'rank')}.": True,
        "Learning rate, betas and weight decay are this project's: choose your own.": True,
        f"nvme_path is {DISK}: put your folder there.": disk,
        f"At stage {stage} DeepSpeed (0.19) keeps the state in memory all the same; the stage scripts do not.":
            disk and stage < 3,
        "It has nothing of --mp: the model itself is cut.": told["model_parallel"] > 1,
        "Attention itself is to send what --sequence-parallel says: FSDP2's lines do not.":
            told["sequence_parallel"] > 1,
    })
    besides = _said({
        "fp16 needs a loss scale besides: torch.amp.GradScaler.": told["dtype"] == "fp16" and stage,
        "In 16 bit stage 0 updates fp32 copies of the parameters, and DDP has none: losses differ.":
            told["dtype"] != "fp32" and not stage,
        "Blocks recompute if you say so: model.gradient_checkpointing_enable().": "model" in told and told["recompute"],
    })
    lines = fsdp2(told, stage, accumulate, flags.offload).splitlines()
    return "\n".join(("", "", paragraph(*words), "", *readers(told, stage, file), "",
                      paragraph(f"The same in FSDP2. {FSDP2[stage][0]}", *besides), "",
                      *(f"    {line}".rstrip() for line in lines)))
