"""DeepSpeed's keys: what each key of its JSON does here, and why; and the reader of files by this table.

Names are those of DeepSpeed 0.19, and some that it has removed recently, since old files still have them.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zero_minimal.workload.deepspeed_settings import SCHEDULES
from zero_minimal.workload.settings import DTYPES, meant

AUTO = "auto"
OFF = (False, None, 0, "none")  # values that turn a key off; sections have "enabled" instead
TRUE = (True,)


class Taken(NamedTuple):
    """The key becomes a flag of the program, or an option of the optimizer, schedule or scaler. kind: in words, and a
    function that checks a value; flag: its value replaces "auto"."""

    kind: tuple[str, Callable[[Any], bool]]
    flag: str = ""


class Ignored(NamedTuple):
    """The key changes memory or speed but no results: a line says so, unless the value makes no difference here."""

    why: str
    same: tuple[Any, ...] = ()


class OfMesh(Ignored):
    """zero_100b.py uses the key, the stage files ignore it."""


class Refused(Ignored):
    """Ignoring the key would change results, so the program does not start."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number. In Python, True and False would count, too."""
    return type(value) in (int, float) and math.isfinite(value)


def from_up(least: float, whole: bool = False) -> tuple[str, Callable[[Any], bool]]:
    """The kind of numbers from `least` up. 5e8 counts as whole."""
    return f"must be a {'whole ' * whole}number from {least} up", lambda value: (
        is_number(value) and value >= least and not (whole and value % 1))


def one_of(*values: Any) -> tuple[str, Callable[[Any], bool]]:
    """The kind of these values. In Python, True would equal 1."""
    return f"must be one of {', '.join(map(json.dumps, values))}", lambda value: (
        value in values and isinstance(value, bool) == isinstance(values[0], bool))


NUMBER, WHOLE, COUNT = from_up(0), from_up(0, whole=True), from_up(1, whole=True)
BOOL, DTYPE, FOLDER = one_of(False, True), one_of(*DTYPES), ("must name a folder", lambda value: isinstance(value, str))
ADAM = one_of("AdamW", "Adam")[0], lambda value: str(value).lower() in ("adamw", "adam")
BETAS = "must be two numbers from 0 to below 1", lambda value: (
    isinstance(value, list) and len(value) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in value))

AVERAGED = "a collective averages: other rounding at most"
DISK = "--host-budget says what the host may take; it reads ahead and writes behind by itself"
FUSED = "torch's fused Adam is used here"
PLAIN = "nothing is quantized, compressed or left out here"
REPORT = "this program has its own progress, --json and report at the end"
SAVED = "--save and --resume have a format of their own"
UNIT = "a unit (a block) is what stage 3 gathers: the one at work and the next are whole"
WIDE = "masters and optimizer state here are always fp32"

_ROWS = {  # by section; "" is the outermost. One string may list several keys that share a row
    "": {
        "train_batch_size": Taken(COUNT),  # micro-batch × accumulation × data-parallel ranks
        "train_micro_batch_size_per_gpu": Taken(COUNT, "batch"),
        "gradient_accumulation_steps": Taken(COUNT, "accumulate"),
        "gradient_clipping": Taken(NUMBER, "clip"),
        "communication_data_type": Taken(DTYPE, "dtype"),
        "managed_gradient_accumulation": Refused("the loop here counts micro-batches itself", TRUE),
        "dataloader_drop_last": Ignored("all batches here have one size", TRUE),
        "torch_autocast amp": Refused("there is neither autocast nor Apex here: use bf16 or fp16", OFF),
        "prescale_gradients": Ignored(AVERAGED, OFF),
        "gradient_predivide_factor": Ignored(AVERAGED, (1,)),
        "gradient_allreduce_op": Refused("gradients are averaged here, not summed", ("mean",)),
        "sparse_gradients": Ignored("an embedding's gradient is reduced like all others", OFF),
        "quantize_training weight_quantization eigenvalue compression_training sparse_attention "
        "progressive_layer_drop": Refused(PLAIN, OFF),
        "curriculum_learning data_efficiency": Refused("all batches here have one length", OFF),
        "zero_allow_untested_optimizer": Ignored("any element-wise optimizer will do here", TRUE),
        "zero_force_ds_cpu_optimizer": Ignored("the host's update is torch's own, too", (False,)),
        "tensor_parallel": Refused("zero_100b.py --model-parallel M cuts a model", OFF),
        "sequence_parallel_size": Refused("sequences are not cut over ranks here", (1,)),
        "seq_parallel_communication_data_type": Ignored("sequences are not cut over ranks here"),
        "expert_parallel": Refused("the model here has no experts", OFF),
        "use_data_before_expert_parallelism pipeline": Ignored("there are no experts and no PipelineModule here", OFF),
        "elasticity": Refused("the batch would follow the number of ranks", OFF),
        "aio": Ignored(DISK),
        "checkpoint nebula datastates": Ignored(SAVED, OFF),
        "compile disable_python_gc": Ignored("the model runs as it is written, and Python as it is", OFF),
        "hybrid_engine": Ignored("it serves text generation while training", OFF),
        "autotuning": Ignored("`python -m zero_minimal plan` calculates, `bench` measures", OFF),
        "disable_allgather": Refused("ranks would go on with old parameters", OFF),
        "vocabulary_size": Ignored("the vocabulary here is the 256 bytes"),
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level flops_profiler comms_logger "
        "tensorboard wandb csv_monitor comet timers": Ignored(REPORT, OFF),
        "bfloat16": Refused("an old name: write bf16", OFF),
    },
    "fp16": {
        "enabled": Taken(BOOL, "dtype"),
        "loss_scale initial_scale_power": Taken(NUMBER),  # a scale of 0 is dynamic, starting at 2 to this power
        "loss_scale_window hysteresis": Taken(COUNT),  # good steps before it doubles, overflows before it halves
        "consecutive_hysteresis": Taken(BOOL),  # whether a good step resets the count of overflows
        "min_loss_scale": Taken(from_up(2.0**-24)),
        "auto_cast": Ignored("inputs here are tokens: there is nothing to cast", (False,)),
        "fp16_master_weights_and_grads": Refused(WIDE, OFF),
    },
    "bf16": {
        "enabled": Taken(BOOL, "dtype"),
        "immediate_grad_update": Ignored("gradients go into buckets as they come", TRUE),
        "check_grad_overflow": Ignored("bf16 has fp32's range: no step is skipped here", OFF),
        "bf16_master_weights_and_grads bf16_optimizer_states": Refused(WIDE, OFF),
    },
    "data_types": {
        "grad_accum_dtype param_dtype": Taken(DTYPE, "dtype"),
        "buffer_dtype keep_in_fp32_modules": Ignored("the model here has no buffers"),
    },
    "optimizer": {"type": Taken(ADAM), "legacy_fusion": Ignored(FUSED, OFF)},
    "optimizer.params": {
        "lr": Taken(NUMBER, "lr"),
        "eps weight_decay": Taken(NUMBER),
        "betas": Taken(BETAS),
        "adam_w_mode": Taken(BOOL),  # DeepSpeed's Adam is AdamW unless this is false
        "torch_adam": Taken(BOOL),  # decides the default weight decay
        "bias_correction": Refused("torch's Adam always corrects", TRUE),
        "amsgrad": Refused("K in the formulas is that of plain Adam", OFF),
        "fp32_optimizer_states": Refused(WIDE, TRUE),
        "fused": Ignored(FUSED, TRUE),
        "foreach": Ignored(FUSED, OFF),
        "max_grad_norm": Refused("write gradient_clipping"),
    },
    "scheduler": {"type": Taken(one_of(*SCHEDULES))},
    "scheduler.params": {  # deepspeed_settings.py explains them
        "warmup_min_lr warmup_min_ratio cos_min_ratio lr_range_test_min_lr lr_range_test_step_rate cycle_min_lr "
        "cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate": Taken(NUMBER),
        "warmup_max_lr": Taken(NUMBER, "lr"),
        "warmup_num_steps lr_range_test_step_size cycle_first_step_size": Taken(COUNT),
        "total_num_steps": Taken(COUNT, "steps"),
        "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size": Taken(WHOLE),
        "warmup_type": Taken(one_of("log", "linear")),
        "lr_range_test_staircase cycle_momentum": Taken(BOOL),
        "last_batch_iteration": Refused("a run goes on with --resume", (-1,)),
    },
    "zero_optimization": {
        "stage": Taken(one_of(0, 1, 2, 3)),
        "reduce_bucket_size allgather_bucket_size": Taken(COUNT),  # --bucket-mb; DeepSpeed counts elements
        "contiguous_gradients overlap_comm reduce_scatter round_robin_gradients": Ignored(
            "gradients always go into a bucket as they come: it is reduce-scattered while the next one fills", TRUE),
        "allgather_partitions": Ignored("updated parameters are always all-gathered, not broadcast", TRUE),
        "use_multi_rank_bucket_allreduce": Ignored("a bucket here is of all ranks, and reduce-scattered"),
        "sub_group_size": Ignored("an update goes bucket by bucket"),
        "ignore_unused_parameters": Ignored("without a gradient a parameter counts as with one of 0", TRUE),
        "compute_grad_norm": Ignored("the norm is computed to clip, only"),
        "parameter_alignment legacy_stage1": Ignored("buckets are padded at their ends, at stage 1 too", OFF),
        "load_from_fp32_weights elastic_checkpoint": Ignored(
            "a checkpoint here has fp32 masters, and goes on under any number of ranks", TRUE),
        "offload_param": Ignored("parameters stay on the device: 2Ψ/N bytes at stage 3 in 16 bit", OFF),
        "zenflow": Refused("updates here never use old gradients", OFF),
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "zeropp_loco_param": Refused(PLAIN, OFF),
        "zero_hpz_partition_size": Ignored("no second copy of parameters is kept inside a node (ZeRO++)", (0, 1)),
        "mics_shard_size mics_hierarchical_params_gather": Ignored("shards are over all ranks", (*OFF, -1)),
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold leaf_module": Ignored(UNIT),
        "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params": Ignored(UNIT, OFF),
        "stage3_param_persistence_threshold stage3_model_persistence_threshold": Ignored(
            "every parameter of a unit is cut, however small it is", (0,)),
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save": Ignored(
            "`python -m zero_minimal export` writes whole weights", OFF),
        "memory_efficient_linear override_module_apply": Ignored("the model's modules are used as they are"),
        "pipeline_loading_checkpoint": Ignored(SAVED, OFF),
        "log_trace_cache_warnings": Ignored(REPORT, OFF),
        "enable_sanity_checks": Ignored("mistakes are always looked for", TRUE),
        "save_muon_momentum_buffer_in_memory": Ignored("there is no Muon here"),
        "cpu_offload": Refused("an old name: write offload_optimizer", OFF),
        "cpu_offload_param": Refused("an old name: write offload_param", OFF),
        "cpu_offload_use_pin_memory": Ignored("an old name of pin_memory"),
    },
    "zero_optimization.offload_optimizer": {
        "device": Taken(one_of("none", "cpu", "nvme")),
        "nvme_path": Taken(FOLDER),
        "pin_memory": Ignored("with a GPU the buffers are always pinned, and else nothing is", TRUE),
        "buffer_count buffer_size": Ignored(DISK),
        "pipeline pipeline_read pipeline_write": Ignored(DISK, TRUE),
        "fast_init": Ignored(DISK, OFF),
        "ratio": Ignored("all state leaves the device", (1,)),
        "super_offload": Ignored("there is one way here", OFF),
        "cpuadam_cores_perc": Ignored("torch's threads do the host's update"),
    },
    "activation_checkpointing": {
        "partition_activations cpu_checkpointing contiguous_memory_optimization": OfMesh(
            "DeepSpeed's own checkpoint function reads this, which no model calls here: --recompute, or zero_100b.py "
            "--config C1 … C5", OFF),
        "number_checkpoints synchronize_checkpoint_boundary": Ignored("one is kept for each block", OFF),
        "profile": Ignored(REPORT, OFF),
    },
}
TABLE: dict[str, Taken | Ignored] = {
    f"{section}.{key}".strip("."): row for section, rows in _ROWS.items()
    for keys, row in rows.items() for key in keys.split()}  # {"zero_optimization.stage": …}


def read(path: str) -> dict[str, Any]:
    """{"section.key": value} of a file. Raises: ValueError for a file that is not JSON, for keys unknown to DeepSpeed,
    and for values of the wrong kind."""
    try:
        with open(path, encoding="utf-8") as file:
            return dict(_flat(json.load(file, object_pairs_hook=_no_key_twice), ""))
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error}); comments and commas at an end are not read here") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ValueError(f"{name} stands there twice: DeepSpeed refuses that, too")
    return dict(pairs)


def _flat(content: Any, section: str) -> Iterator[tuple[str, Any]]:
    """A section's keys with the section's name. A section that is turned off yields no other keys."""
    if not isinstance(content, dict):
        raise ValueError(f"{section or 'it'} must be an object, {{…}}, of DeepSpeed's keys, not {json.dumps(content)}")
    is_off = content.get("enabled", True) in OFF or content.get("device", "cpu") in OFF
    for key, value in sorted(content.items(), key=lambda pair: pair[0] == "params"):  # after their "type"
        name = f"{section}.{key}".strip(".")
        if name in _ROWS:
            yield from _flat({} if value is None else value, name)
        elif name not in TABLE:
            elsewhere = [f": did you mean {each}?" for each in TABLE if each.rpartition(".")[2] == key]
            raise ValueError(f"DeepSpeed has no key {name}{(elsewhere or [meant(name, (*TABLE, *_ROWS))])[0]}")
        elif not is_off or key in ("enabled", "device"):
            words, fits = getattr(TABLE[name], "kind", ("", None))
            if fits and value not in (None, AUTO) and not fits(value):
                raise ValueError(f"{name} {words}, not {json.dumps(value)}")
            yield name, value
