"""DeepSpeed's keys: what is done here with each key of its JSON, and why; and a file, read by this table.

Names are those of DeepSpeed 0.19, with those that it has dropped lately, since files live long.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zero_minimal.workload.deepspeed_settings import SCHEDULES
from zero_minimal.workload.settings import meant

OFF = (False, None, 0, "none")  # values of a key that turns something on; a section has "enabled"


class Taken(NamedTuple):
    """It becomes a flag of the program, or an option of the optimizer, schedule or scaler. flag: what "auto" is.
    kind: in words, and whether a value is of it; None: another key decides."""

    kind: tuple[str, Callable[[Any], bool]] | None = None
    flag: str = ""


class Ignored(NamedTuple):
    """Other memory or speed, and the same numbers: a line says so, but for values that are the same here."""

    why: str
    same: tuple[Any, ...] = ()


class OfMesh(Ignored):
    """Taken by zero_100b.py, ignored by the files of the stages."""


class Refused(Ignored):
    """Other numbers than the file asks for, so the program does not start."""


def is_number(value: Any) -> bool:
    """Whether it is one, and finite. Python would count true and false, too."""
    return type(value) in (int, float) and math.isfinite(value)


def from_up(least: float, whole: bool = False) -> tuple[str, Callable[[Any], bool]]:
    """The kind of numbers from here up. 5e8 is a whole one."""
    return f"must be a {'whole ' * whole}number from {least} up", lambda value: (
        is_number(value) and value >= least and not (whole and value % 1))


NUMBER, WHOLE, COUNT = from_up(0), from_up(0, whole=True), from_up(1, whole=True)
TRUTH = "must be true or false", lambda value: value in (True, False) and not is_number(value)
BETAS = "must be two numbers from 0 to below 1", lambda value: (
    isinstance(value, list) and len(value) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in value))
STAGE = "is 0, 1, 2 or 3", lambda value: is_number(value) and value in range(4)
DEVICE = "is none, cpu or nvme", lambda value: value in ("none", "cpu", "nvme")
CURVE = "is log or linear", lambda value: value in ("log", "linear")

REPORT = "this program has its own progress, --json and report at the end"
DISK = "--host-budget says what the host may take; it reads ahead and writes behind by itself"
UNIT = "a unit (a block) is what stage 3 gathers: the one at work and the next are whole"

_ROWS = {  # by section; "" is the outermost. Keys that share a row stand beside each other
    "": {
        "train_batch_size": Taken(COUNT),  # micro-batch × accumulation × data-parallel ranks
        "train_micro_batch_size_per_gpu": Taken(COUNT, "batch"),
        "gradient_accumulation_steps": Taken(COUNT, "accumulate"),
        "gradient_clipping": Taken(NUMBER, "clip"),
        "communication_data_type": Taken(),  # the dtype of the parameters, or absent
        "managed_gradient_accumulation": Refused("the loop here counts micro-batches itself", (True,)),
        "dataloader_drop_last": Ignored("all batches here have one size", (True,)),
        "torch_autocast": Refused("there is no autocast here: use bf16 or fp16", OFF),
        "amp": Refused("there is no Apex here: use bf16 or fp16", OFF),
        "prescale_gradients": Ignored("a collective averages: other rounding at most", OFF),
        "gradient_predivide_factor": Ignored("a collective averages: other rounding at most", (1,)),
        "gradient_allreduce_op": Refused("gradients are averaged here, not summed", ("mean",)),
        "sparse_gradients": Ignored("an embedding's gradient is reduced like all others", OFF),
        "quantize_training weight_quantization": Refused("weights are not quantized here", OFF),
        "compression_training": Refused("models are not compressed here", OFF),
        "sparse_attention": Refused("attention here is dense", OFF),
        "progressive_layer_drop": Refused("no layer is dropped here", OFF),
        "curriculum_learning data_efficiency": Refused("all batches here have one length", OFF),
        "eigenvalue": Refused("it serves DeepSpeed's quantized training, which is not here", OFF),
        "zero_allow_untested_optimizer": Ignored("any element-wise optimizer will do here", (True,)),
        "zero_force_ds_cpu_optimizer": Ignored("the host's update is torch's own, too", (False,)),
        "tensor_parallel": Refused("zero_100b.py --model-parallel M cuts a model", OFF),
        "sequence_parallel_size": Refused("sequences are not cut over ranks here", (1,)),
        "seq_parallel_communication_data_type": Ignored("sequences are not cut over ranks here"),
        "expert_parallel": Refused("the model here has no experts", OFF),
        "use_data_before_expert_parallelism": Ignored("the model here has no experts", OFF),
        "pipeline": Ignored("DeepSpeed's PipelineModule reads this, and there is none here", OFF),
        "elasticity": Refused("the batch would follow the number of ranks", OFF),
        "aio": Ignored(DISK),
        "checkpoint nebula datastates": Ignored("--save and --resume have a format of their own", OFF),
        "compile": Ignored("the model runs as it is written", OFF),
        "hybrid_engine": Ignored("it serves text generation while training", OFF),
        "autotuning": Ignored("`python -m zero_minimal plan` calculates, `bench` measures", OFF),
        "disable_allgather": Refused("ranks would go on with old parameters", OFF),
        "disable_python_gc": Ignored("Python's own way is kept", OFF),
        "vocabulary_size": Ignored("the vocabulary here is the 256 bytes"),
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level flops_profiler comms_logger "
        "tensorboard wandb csv_monitor comet timers": Ignored(REPORT, OFF),
        "bfloat16": Refused("an old name: write bf16", OFF),
    },
    "fp16": {
        "enabled": Taken(TRUTH),
        "loss_scale initial_scale_power": Taken(NUMBER),  # a scale of 0: one that adapts, from 2 to this power
        "loss_scale_window hysteresis": Taken(COUNT),  # good steps that double it, overflows that halve it
        "consecutive_hysteresis": Taken(TRUTH),  # whether a good step forgets the overflows before
        "min_loss_scale": Taken(from_up(2.0**-24)),
        "auto_cast": Ignored("inputs here are tokens: there is nothing to cast", (False,)),
        "fp16_master_weights_and_grads": Refused("masters here are always fp32", OFF),
    },
    "bf16": {
        "enabled": Taken(TRUTH),
        "immediate_grad_update": Ignored("gradients go into buckets as they come", (True,)),
        "check_grad_overflow": Ignored("bf16 has fp32's range: no step is skipped here", OFF),
        "bf16_master_weights_and_grads": Refused("masters here are always fp32", OFF),
        "bf16_optimizer_states": Refused("optimizer state here is always fp32", OFF),
    },
    "data_types": {
        "grad_accum_dtype param_dtype": Taken(),  # the dtype of the parameters, or absent
        "buffer_dtype keep_in_fp32_modules": Ignored("the model here has no buffers"),
    },
    "optimizer": {
        "type": Taken(),
        "legacy_fusion": Ignored("torch's fused Adam is used here", OFF),
    },
    "optimizer.params": {
        "lr": Taken(NUMBER, "lr"),
        "eps weight_decay": Taken(NUMBER),
        "betas": Taken(BETAS),
        "adam_w_mode": Taken(TRUTH),  # DeepSpeed's Adam is AdamW unless this is false
        "torch_adam": Taken(TRUTH),  # decides the weight decay where none is given
        "bias_correction": Refused("torch's Adam always corrects", (True,)),
        "amsgrad": Refused("K in the formulas is that of plain Adam", OFF),
        "fp32_optimizer_states": Refused("state is always fp32", (True,)),
        "fused": Ignored("torch's fused Adam is used here", (True,)),
        "foreach": Ignored("torch's fused Adam is used here", OFF),
        "max_grad_norm": Refused("write gradient_clipping"),
    },
    "scheduler": {"type": Taken()},
    "scheduler.params": {  # what they mean: deepspeed_settings.py
        "warmup_min_lr warmup_min_ratio cos_min_ratio lr_range_test_min_lr lr_range_test_step_rate cycle_min_lr "
        "cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate": Taken(NUMBER),
        "warmup_max_lr": Taken(NUMBER, "lr"),
        "warmup_num_steps lr_range_test_step_size cycle_first_step_size": Taken(COUNT),
        "total_num_steps": Taken(COUNT, "steps"),
        "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size": Taken(WHOLE),
        "warmup_type": Taken(CURVE),
        "lr_range_test_staircase cycle_momentum": Taken(TRUTH),
        "last_batch_iteration": Refused("a run goes on with --resume", (-1,)),
    },
    "zero_optimization": {
        "stage": Taken(STAGE),
        "reduce_bucket_size allgather_bucket_size": Taken(COUNT),  # --bucket-mb; DeepSpeed counts elements
        "allgather_partitions": Ignored("updated parameters are always all-gathered, not broadcast", (True,)),
        "reduce_scatter": Ignored("gradients are always reduce-scattered", (True,)),
        "overlap_comm": Ignored("a bucket always travels while backward fills the next", (True,)),
        "contiguous_gradients": Ignored("gradients are always copied into a bucket as they come", (True,)),
        "round_robin_gradients": Ignored("each rank owns a part of every bucket, so all copy alike anyway", (True,)),
        "use_multi_rank_bucket_allreduce": Ignored("a bucket here is of all ranks, and reduce-scattered"),
        "sub_group_size": Ignored("an update goes bucket by bucket"),
        "ignore_unused_parameters": Ignored(
            "a parameter without a gradient counts as one whose gradient is 0", (True,)),
        "compute_grad_norm": Ignored("the norm is computed to clip, only"),
        "parameter_alignment": Ignored("buckets are padded at their ends only", OFF),
        "legacy_stage1": Ignored("there is one stage 1 here", OFF),
        "load_from_fp32_weights": Ignored("a checkpoint here has fp32 masters, and these are loaded", (True,)),
        "elastic_checkpoint": Ignored("a checkpoint here goes on under any number of ranks", (True,)),
        "offload_param": Ignored("parameters stay on the device: 2Ψ/N bytes at stage 3 in 16 bit", OFF),
        "zenflow": Refused("updates here never use old gradients", OFF),
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "zeropp_loco_param": Refused("nothing is quantized here", OFF),
        "zero_hpz_partition_size": Ignored("no second copy of parameters is kept inside a node (ZeRO++)", (0, 1)),
        "mics_shard_size mics_hierarchical_params_gather": Ignored("shards are over all ranks", (*OFF, -1)),
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold leaf_module": Ignored(UNIT),
        "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params": Ignored(UNIT, OFF),
        "stage3_param_persistence_threshold stage3_model_persistence_threshold": Ignored(
            "every parameter of a unit is cut, however small it is", (0,)),
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save": Ignored(
            "`python -m zero_minimal export` writes whole weights", OFF),
        "memory_efficient_linear": Ignored("torch's linear layers are used"),
        "override_module_apply": Ignored("each module draws its own values"),
        "pipeline_loading_checkpoint": Ignored("see --resume", OFF),
        "log_trace_cache_warnings": Ignored(REPORT, OFF),
        "enable_sanity_checks": Ignored("mistakes are always looked for", (True,)),
        "save_muon_momentum_buffer_in_memory": Ignored("there is no Muon here"),
        "cpu_offload": Refused("an old name: write offload_optimizer", OFF),
        "cpu_offload_param": Refused("an old name: write offload_param", OFF),
        "cpu_offload_use_pin_memory": Ignored("an old name of pin_memory"),
    },
    "zero_optimization.offload_optimizer": {
        "device": Taken(DEVICE),
        "nvme_path": Taken(),
        "pin_memory": Ignored("with a GPU the buffers are always pinned, and else nothing is", (True,)),
        "buffer_count buffer_size": Ignored(DISK),
        "pipeline pipeline_read pipeline_write": Ignored(DISK, (True,)),
        "fast_init": Ignored(DISK, OFF),
        "ratio": Ignored("all state leaves the device", (1,)),
        "super_offload": Ignored("there is one way here", OFF),
        "cpuadam_cores_perc": Ignored("torch's threads do the host's update"),
    },
    "activation_checkpointing": {
        "partition_activations cpu_checkpointing contiguous_memory_optimization": OfMesh(
            "DeepSpeed's own checkpoint function reads this, which no model calls here: --recompute, or zero_100b.py "
            "--config C1 … C5", OFF),
        "number_checkpoints": Ignored("one for each block", OFF),
        "synchronize_checkpoint_boundary": Ignored("not needed here", OFF),
        "profile": Ignored(REPORT, OFF),
    },
}
TABLE: dict[str, Taken | Ignored] = {
    f"{section}.{key}".strip("."): row for section, rows in _ROWS.items()
    for keys, row in rows.items() for key in keys.split()}  # {"zero_optimization.stage": …}
KINDS = {"optimizer": ("AdamW", "Adam"), "scheduler": tuple(SCHEDULES)}  # of sections that have a type


# ---------------------------------------------------------------------------------------------------------- a file


def read(path: str) -> dict[str, Any]:
    """{"section.key": value} of a file. Raises: ValueError for what is no JSON, or has keys that DeepSpeed does not
    know."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error}); comments and commas at an end are not read here") from None
    if not isinstance(content, dict):
        raise ValueError("it must be an object, {…}, of DeepSpeed's keys")
    return dict(_flat(content, ""))


def kind_of(section: str, kind: Any) -> str:
    """Its name in KINDS; that of an optimizer in any case of letters. Raises: ValueError, saying which there are."""
    for name in KINDS[section]:
        if kind == name or section == "optimizer" and str(kind).lower() == name.lower():
            return name
    raise ValueError(f"{section}.type is {json.dumps(kind)}: there are {', '.join(KINDS[section])} here"
                     f"{meant(str(kind), KINDS[section])}")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ValueError(f"{name} stands there twice: DeepSpeed refuses that, too")
    return dict(pairs)


def _flat(content: dict, section: str) -> Iterator[tuple[str, Any]]:
    """Its keys with their sections. One that is turned off has no other keys."""
    if section in KINDS and "type" in content:  # first: another optimizer has parameters that are not in the table
        kind_of(section, content["type"])
    is_off = content.get("enabled", True) in OFF or content.get("device", "cpu") in OFF
    for key, value in content.items():
        name = f"{section}.{key}".strip(".")
        if name in _ROWS and value is None:
            continue
        elif name in _ROWS and not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, {{…}}, not {json.dumps(value)}")
        elif name in _ROWS:
            yield from _flat(value, name)
        elif name not in TABLE:
            raise ValueError(f"DeepSpeed has no key {name}{_place_of(key, section)}")
        elif not is_off or key in ("enabled", "device"):
            yield name, value


def _place_of(key: str, section: str) -> str:
    """Where a key belongs, or which one was meant."""
    names = [name.rpartition(".") for name in (*TABLE, *_ROWS)]
    for other, _, name in names[:len(TABLE)]:
        if name == key:
            return f": {key} belongs {f'into {other}' if other else 'outside of sections'}"
    return meant(key, [name for other, _, name in names if other == section])
