"""DeepSpeed's keys: what is done here with each key of its JSON, and why. A table, no code.

    key: Key(what is done, why, values with which there is nothing to say)

    taken      it becomes a flag of the program, or an option of the optimizer, schedule or scaler
    ignored    other memory or speed, and the same numbers: a line says so
    refused    other numbers than the file asks for, so the program does not start
    mesh       taken by zero_100b.py, ignored by the files of the stages

Names are those of DeepSpeed 0.19, with those that it has dropped lately, since files live long.
What DeepSpeed does by default, where it is another thing than here, stands in DEFAULTS. KINDS are
the optimizers and schedules of the sections that have a type.
"""

from typing import Any, NamedTuple

from zero_minimal.workload.deepspeed_schedules import PARAMETERS


class Key(NamedTuple):
    """A row of the table. same: values with which nothing is ignored, or to be refused."""

    does: str
    why: str
    same: tuple[Any, ...] = ()


OFF = (False, None, 0, "none")  # values of a key that turns something on; a section has "enabled"

_OWN_REPORT = "this program has its own progress, --json and report at the end"
_OWN_DISK = "--host-budget says what the host may take; it reads ahead and writes behind by itself"
_UNIT = "a unit (a block) is what stage 3 gathers: the one at work and the next are whole"
_CUT = "every parameter of a unit is cut, however small it is"
_MESH = ("DeepSpeed's own checkpoint function reads this, which no model calls here: --recompute, "
         "or zero_100b.py --config C1 … C5")

TABLE: dict[str, dict[str, Key]] = {  # by section; "" is the outermost
    "": {
        "train_batch_size": Key(
            "taken", "it must be micro-batch × accumulation × data-parallel ranks"),
        "train_micro_batch_size_per_gpu": Key("taken", "--batch"),
        "gradient_accumulation_steps": Key("taken", "--accumulate"),
        "managed_gradient_accumulation": Key(
            "refused", "the loop here counts micro-batches itself", (True,)),
        "dataloader_drop_last": Key("ignored", "all batches here have one size", (True,)),
        "gradient_clipping": Key("taken", "--clip"),
        "torch_autocast": Key("refused", "there is no autocast here: use bf16 or fp16", OFF),
        "amp": Key("refused", "there is no Apex here: use bf16 or fp16", OFF),
        "communication_data_type": Key(
            "taken", "it must be the dtype of the parameters, or absent"),
        "prescale_gradients": Key("ignored", "a collective averages: other rounding at most", OFF),
        "gradient_predivide_factor": Key(
            "ignored", "a collective averages: other rounding at most", (1,)),
        "gradient_allreduce_op": Key(
            "refused", "gradients are averaged here, not summed", ("mean",)),
        "sparse_gradients": Key(
            "ignored", "an embedding's gradient is reduced like all others", OFF),
        "quantize_training": Key("refused", "weights are not quantized here", OFF),
        "weight_quantization": Key("refused", "weights are not quantized here", OFF),
        "compression_training": Key("refused", "models are not compressed here", OFF),
        "sparse_attention": Key("refused", "attention here is dense", OFF),
        "progressive_layer_drop": Key("refused", "no layer is dropped here", OFF),
        "curriculum_learning": Key("refused", "all batches here have one length", OFF),
        "data_efficiency": Key("refused", "all batches here have one length", OFF),
        "eigenvalue": Key(
            "refused", "it serves DeepSpeed's quantized training, which is not here", OFF),
        "zero_allow_untested_optimizer": Key(
            "ignored", "any element-wise optimizer will do here", (True,)),
        "zero_force_ds_cpu_optimizer": Key(
            "ignored", "the host's update is torch's own, too", (False,)),
        "tensor_parallel": Key("refused", "zero_100b.py --model-parallel M cuts a model", OFF),
        "sequence_parallel_size": Key("refused", "sequences are not cut over ranks here", (1,)),
        "seq_parallel_communication_data_type": Key(
            "ignored", "sequences are not cut over ranks here"),
        "expert_parallel": Key("refused", "the model here has no experts", OFF),
        "use_data_before_expert_parallelism": Key("ignored", "the model here has no experts", OFF),
        "pipeline": Key(
            "ignored", "DeepSpeed's PipelineModule reads this, and there is none here", OFF),
        "elasticity": Key("refused", "the batch would follow the number of ranks", OFF),
        "aio": Key("ignored", _OWN_DISK),
        "checkpoint": Key("ignored", "--save and --resume have a format of their own"),
        "nebula": Key("ignored", "--save and --resume have a format of their own", OFF),
        "datastates": Key("ignored", "--save and --resume have a format of their own", OFF),
        "compile": Key("ignored", "the model runs as it is written", OFF),
        "hybrid_engine": Key("ignored", "it serves text generation while training", OFF),
        "autotuning": Key(
            "ignored", "`python -m zero_minimal plan` calculates, `bench` measures", OFF),
        "disable_allgather": Key("refused", "ranks would go on with old parameters", OFF),
        "disable_python_gc": Key("ignored", "Python's own way is kept", OFF),
        "vocabulary_size": Key("ignored", "the vocabulary here is the 256 bytes"),
        **{name: Key("ignored", _OWN_REPORT, OFF) for name in (
            "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
            "log_level", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor",
            "comet", "timers",
        )},
        "bfloat16": Key("refused", "an old name: write bf16", OFF),
    },
    "fp16": {
        "enabled": Key("taken", "--dtype fp16"),
        "loss_scale": Key("taken", "a fixed scale; 0: one that adapts"),
        "initial_scale_power": Key("taken", "the first scale is 2 to this power"),
        "loss_scale_window": Key("taken", "so many good steps double the scale"),
        "hysteresis": Key("taken", "so many overflows halve it"),
        "consecutive_hysteresis": Key("taken", "whether a good step forgets the overflows before"),
        "min_loss_scale": Key("taken", "the scale falls no lower"),
        "auto_cast": Key("ignored", "inputs here are tokens: there is nothing to cast", (False,)),
        "fp16_master_weights_and_grads": Key("refused", "masters here are always fp32", OFF),
    },
    "bf16": {
        "enabled": Key("taken", "--dtype bf16"),
        "immediate_grad_update": Key("ignored", "gradients go into buckets as they come", (True,)),
        "check_grad_overflow": Key(
            "ignored", "bf16 has fp32's range: no step is skipped here", OFF),
        "bf16_master_weights_and_grads": Key("refused", "masters here are always fp32", OFF),
        "bf16_optimizer_states": Key("refused", "optimizer state here is always fp32", OFF),
    },
    "data_types": {
        "grad_accum_dtype": Key("taken", "it must be the dtype of the parameters, or absent"),
        "param_dtype": Key("taken", "it must be the dtype of the parameters, or absent"),
        "buffer_dtype": Key("ignored", "the model here has no buffers"),
        "keep_in_fp32_modules": Key("ignored", "the model here has no buffers"),
    },
    "optimizer": {
        "type": Key("taken", "AdamW or Adam, torch's own"),
        "legacy_fusion": Key("ignored", "torch's fused Adam is used here", OFF),
    },
    "optimizer.params": {
        "lr": Key("taken", "--lr"),
        "betas": Key("taken", "torch's betas"),
        "eps": Key("taken", "torch's eps"),
        "weight_decay": Key("taken", "torch's weight_decay"),
        "adam_w_mode": Key("taken", "DeepSpeed's Adam is AdamW unless this is false"),
        "torch_adam": Key("taken", "decides the weight decay where none is given"),
        "bias_correction": Key("refused", "torch's Adam always corrects", (True,)),
        "amsgrad": Key("refused", "K in the formulas is that of plain Adam", OFF),
        "fp32_optimizer_states": Key("refused", "state is always fp32", (True,)),
        "fused": Key("ignored", "torch's fused Adam is used here", (True,)),
        "foreach": Key("ignored", "torch's fused Adam is used here", OFF),
        "max_grad_norm": Key("refused", "write gradient_clipping"),
    },
    "scheduler": {
        "type": Key("taken", "WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest or OneCycle"),
    },
    "scheduler.params": {
        "warmup_min_lr": Key("taken", "where the learning rate begins"),
        "warmup_max_lr": Key("taken", "where warm-up ends"),
        "warmup_num_steps": Key("taken", "how long it takes"),
        "warmup_type": Key("taken", "log or linear"),
        "total_num_steps": Key("taken", "where the decay ends"),
        "warmup_min_ratio": Key("taken", "WarmupCosineLR: where it begins, × lr"),
        "cos_min_ratio": Key("taken", "WarmupCosineLR: where it ends, × lr"),
        "lr_range_test_min_lr": Key("taken", "LRRangeTest: where the learning rate begins"),
        "lr_range_test_step_size": Key("taken", "so many steps for one move up"),
        "lr_range_test_step_rate": Key("taken", "how far up, × lr_range_test_min_lr"),
        "lr_range_test_staircase": Key("taken", "whether it waits between two moves"),
        "cycle_min_lr": Key("taken", "OneCycle: where the learning rate begins and ends"),
        "cycle_max_lr": Key("taken", "its summit"),
        "cycle_first_step_size": Key("taken", "so many steps up"),
        "cycle_second_step_size": Key("taken", "so many steps down"),
        "cycle_first_stair_count": Key("taken", "up in so many stairs; 0: none"),
        "cycle_second_stair_count": Key("taken", "down in so many stairs; 0: none"),
        "decay_lr_rate": Key("taken", "how fast it falls after the cycle"),
        "decay_step_size": Key("taken", "so many steps for one fall; 0: it stays"),
        "cycle_momentum": Key("taken", "whether Adam's first beta moves against it"),
        "cycle_min_mom": Key("taken", "that beta at the summit"),
        "cycle_max_mom": Key("taken", "that beta where the learning rate is smallest"),
        "decay_mom_rate": Key("taken", "how fast that beta grows after the cycle"),
        "last_batch_iteration": Key("refused", "a run goes on with --resume", (-1,)),
    },
    "zero_optimization": {
        "stage": Key("taken", "it must be that of the script"),
        "reduce_bucket_size": Key("taken", "--bucket-mb; DeepSpeed counts elements"),
        "allgather_bucket_size": Key("taken", "one size of buckets serves both ways"),
        "allgather_partitions": Key(
            "ignored", "updated parameters are always all-gathered, not broadcast", (True,)),
        "reduce_scatter": Key("ignored", "gradients are always reduce-scattered", (True,)),
        "overlap_comm": Key(
            "ignored", "a bucket always travels while backward fills the next", (True,)),
        "contiguous_gradients": Key(
            "ignored", "gradients are always copied into a bucket as they come", (True,)),
        "round_robin_gradients": Key(
            "ignored", "each rank owns a part of every bucket, so all copy alike anyway", (True,)),
        "use_multi_rank_bucket_allreduce": Key(
            "ignored", "a bucket here is of all ranks, and reduce-scattered"),
        "sub_group_size": Key("ignored", "an update goes bucket by bucket"),
        "ignore_unused_parameters": Key(
            "ignored", "a parameter without a gradient counts as one whose gradient is 0", (True,)),
        "compute_grad_norm": Key("ignored", "the norm is computed to clip, only"),
        "parameter_alignment": Key("ignored", "buckets are padded at their ends only", OFF),
        "legacy_stage1": Key("ignored", "there is one stage 1 here", OFF),
        "load_from_fp32_weights": Key(
            "ignored", "a checkpoint here has fp32 masters, and these are loaded", (True,)),
        "elastic_checkpoint": Key(
            "ignored", "a checkpoint here goes on under any number of ranks", (True,)),
        "offload_param": Key(
            "ignored", "parameters stay on the device: 2Ψ/N bytes at stage 3 in 16 bit", OFF),
        "zenflow": Key("refused", "updates here never use old gradients", OFF),
        "zero_quantized_weights": Key("refused", "nothing is quantized here", OFF),
        "zero_quantized_nontrainable_weights": Key("refused", "nothing is quantized here", OFF),
        "zero_quantized_gradients": Key("refused", "nothing is quantized here", OFF),
        "zeropp_loco_param": Key("refused", "nothing is quantized here", OFF),
        "zero_hpz_partition_size": Key(
            "ignored", "no second copy of parameters is kept inside a node (ZeRO++)", (0, 1)),
        "mics_shard_size": Key("ignored", "shards are over all ranks", (-1, 0, None)),
        "mics_hierarchical_params_gather": Key("ignored", "shards are over all ranks", OFF),
        "stage3_prefetch_bucket_size": Key("ignored", _UNIT),
        "stage3_max_live_parameters": Key("ignored", _UNIT),
        "stage3_max_reuse_distance": Key("ignored", _UNIT),
        "stage3_module_granularity_threshold": Key("ignored", _UNIT),
        "stage3_allgather_sequential": Key("ignored", _UNIT, OFF),
        "stage3_use_all_reduce_for_fetch_params": Key("ignored", _UNIT, OFF),
        "stage3_param_persistence_threshold": Key("ignored", _CUT, (0,)),
        "stage3_model_persistence_threshold": Key("ignored", _CUT, (0,)),
        "stage3_gather_16bit_weights_on_model_save": Key(
            "ignored", "`python -m zero_minimal export` writes whole weights", OFF),
        "stage3_gather_fp16_weights_on_model_save": Key(
            "ignored", "`python -m zero_minimal export` writes whole weights", OFF),
        "memory_efficient_linear": Key("ignored", "torch's linear layers are used"),
        "override_module_apply": Key("ignored", "each module draws its own values"),
        "pipeline_loading_checkpoint": Key("ignored", "see --resume", OFF),
        "leaf_module": Key("ignored", _UNIT),
        "log_trace_cache_warnings": Key("ignored", _OWN_REPORT, OFF),
        "enable_sanity_checks": Key("ignored", "mistakes are always looked for", (True,)),
        "save_muon_momentum_buffer_in_memory": Key("ignored", "there is no Muon here"),
        "cpu_offload": Key("refused", "an old name: write offload_optimizer", OFF),
        "cpu_offload_param": Key("refused", "an old name: write offload_param", OFF),
        "cpu_offload_use_pin_memory": Key("ignored", "an old name of pin_memory"),
    },
    "zero_optimization.offload_optimizer": {
        "device": Key("taken", "--offload cpu, or disk:nvme_path"),
        "nvme_path": Key("taken", "--offload disk:nvme_path"),
        "pin_memory": Key(
            "ignored", "with a GPU the buffers are always pinned, and else nothing is", (True,)),
        "buffer_count": Key("ignored", _OWN_DISK),
        "buffer_size": Key("ignored", _OWN_DISK),
        "pipeline": Key("ignored", _OWN_DISK, (True,)),
        "pipeline_read": Key("ignored", _OWN_DISK, (True,)),
        "pipeline_write": Key("ignored", _OWN_DISK, (True,)),
        "fast_init": Key("ignored", _OWN_DISK, OFF),
        "ratio": Key("ignored", "all state leaves the device", (1,)),
        "super_offload": Key("ignored", "there is one way here", OFF),
        "cpuadam_cores_perc": Key("ignored", "torch's threads do the host's update"),
    },
    "activation_checkpointing": {
        "partition_activations": Key("mesh", _MESH, OFF),
        "cpu_checkpointing": Key("mesh", _MESH, OFF),
        "contiguous_memory_optimization": Key("mesh", _MESH, OFF),
        "number_checkpoints": Key("ignored", "one for each block", OFF),
        "synchronize_checkpoint_boundary": Key("ignored", "not needed here", OFF),
        "profile": Key("ignored", _OWN_REPORT, OFF),
    },
}

SECTIONS = set(TABLE) - {""}
KINDS = {"optimizer": ("AdamW", "Adam"), "scheduler": tuple(PARAMETERS)}

# what DeepSpeed 0.19 does where the file says nothing, and these programs would do otherwise
DEFAULTS = {
    "gradient_clipping": 1.0,
    "fp16": {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
             "consecutive_hysteresis": False, "min_loss_scale": 1},
    "optimizer": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
}
