"""DeepSpeed files as people write them: the keys and values that public repositories and DeepSpeed's documentation
have, each in a file of our own, with the program that it is given to and what becomes of it there.

A row: the file, the command line (ranks, flags) and what is expected: flags, keys ignored, or words that refuse."""

AUTO = "auto"
TRAINER = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "train_batch_size": AUTO,
           "train_micro_batch_size_per_gpu": AUTO}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
           "reduce_bucket_size": 2e8, "contiguous_gradients": True}
UNITS = {"sub_group_size": 1e9, "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO,
         "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
         "stage3_gather_16bit_weights_on_model_save": True}
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
EIGHT = {"train_batch_size": 8}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
MB = 2**20
IGNORED_UNITS = {f"zero_optimization.{key}" for key in UNITS}
PRINTED = {"steps_per_print"}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def adam(kind="AdamW", **params):
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


READ = {  # name: (file, ranks, flags on the command line, flags that it becomes, keys that are ignored)
    "Trainer, stage 2 with offload": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE, "optimizer": ADAMW, "scheduler": WARM_UP} | PRINTS
        | zero(2, offload_optimizer=CPU, **BUCKETS), 2, {"dtype": "fp16", "batch": 3},
        {"dtype": "fp16", "batch": 3, "accumulate": 1, "offload": "cpu", "bucket_mb": 4e8 / MB, "lr": 2e-3}, PRINTED),
    "Trainer, stage 3 with both offloads": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE, "bf16": {"enabled": AUTO}, "optimizer": ADAMW,
                   "scheduler": WARM_UP} | PRINTS
        | zero(3, offload_optimizer=CPU, offload_param=CPU, overlap_comm=True, contiguous_gradients=True,
               reduce_bucket_size=AUTO, **UNITS), 4, {"dtype": "bf16", "clip": 1.0},
        {"dtype": "bf16", "clip": 1.0, "offload": "cpu", "batch": 4},
        PRINTED | IGNORED_UNITS | {"zero_optimization.offload_param"}),
    "Trainer, stage 3, NVMe": (
        TRAINER | {"bf16": {"enabled": True}, "optimizer": ADAMW, "scheduler": WARM_UP} | PRINTS
        | {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                   "overlap_events": True}}
        | zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True,
                                     "buffer_count": 4, "fast_init": False},
               overlap_comm=True, contiguous_gradients=True, **UNITS), 1, {},
        {"offload": "disk:/local_nvme", "dtype": "bf16"},
        PRINTED | IGNORED_UNITS | {"aio", "zero_optimization.offload_optimizer.buffer_count"}),
    "Trainer, stage 1, scale from 2^32": (
        {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "wall_clock_breakdown": False,
         "bf16": {"enabled": AUTO}, "optimizer": ADAMW,
         "fp16": {"enabled": AUTO, "auto_cast": False} | SCALE | {"initial_scale_power": 32}}
        | schedule("WarmupDecayLR", warmup_min_lr=AUTO, warmup_max_lr=AUTO, warmup_num_steps=AUTO, total_num_steps=AUTO)
        | zero(1, overlap_comm=True), 2, {"lr": 1e-4, "dtype": "fp16"}, {"lr": 1e-4, "dtype": "fp16"}, set()),
    "Trainer, the smallest": (
        {"train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO} | zero(2)
        | adam(lr=AUTO, weight_decay=AUTO), 2, {}, {"dtype": "fp32", "batch": 4, "clip": 1.0}, set()),
    "Accelerate, no optimizer": (
        {"train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0} | BF16
        | {"steps_per_print": float("1e9"), "zero_allow_untested_optimizer": True}
        | zero(2, offload_optimizer={"device": "none"}, offload_param={"device": "none"}), 2, {},
        {"accumulate": 2, "offload": None, "clip": 1.0}, PRINTED),
    "all numbers that may be auto are": (
        TRAINER | BF16 | {"steps_per_print": AUTO}
        | zero(3, sub_group_size=AUTO, stage3_max_live_parameters=AUTO, stage3_max_reuse_distance=AUTO,
               reduce_bucket_size=AUTO, overlap_comm=True), 8, {"batch": 2}, {"batch": 2, "dtype": "bf16"},
        PRINTED | {f"zero_optimization.{key}" for key in (
            "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")}),
    "DeepSpeed's tutorial, CIFAR": (
        {"train_batch_size": 16, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
         "wall_clock_breakdown": False, "fp16": {"enabled": True, "fp16_master_weights_and_grads": False} | SCALE
         | {"loss_scale_window": 500, "initial_scale_power": 15}}
        | adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
        | schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=0.001, warmup_num_steps=1000)
        | zero(0, allgather_partitions=True, reduce_scatter=True, allgather_bucket_size=50000000,
               reduce_bucket_size=50000000, overlap_comm=True, contiguous_gradients=True, cpu_offload=False), 2, {},
        {"batch": 8, "lr": 0.001, "dtype": "fp16", "bucket_mb": 1e8 / MB}, PRINTED),
    "DeepSpeed's page of keys": (
        {"train_batch_size": 8, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}} | zero(2)
        | adam("Adam", lr=0.00015), 4, {}, {"batch": 2, "lr": 0.00015, "dtype": "fp16"}, set()),
    "DeepSpeed's 1-cycle tutorial": (
        EIGHT | schedule(
            "OneCycle", cycle_first_step_size=16000, cycle_first_stair_count=8000, decay_step_size=16000,
            cycle_min_lr=0.0001, cycle_max_lr=0.001, decay_lr_rate=0.001, cycle_min_mom=0.85, cycle_max_mom=0.99,
            decay_mom_rate=0.0) | adam(lr=1e-3), 1, {}, {"batch": 8}, set()),
    "DeepSpeed's range test tutorial": (
        {"train_micro_batch_size_per_gpu": 4} | schedule(
            "LRRangeTest", lr_range_test_min_lr=0.0001, lr_range_test_step_size=200, lr_range_test_step_rate=5,
            lr_range_test_staircase=False) | zero(1), 2, {}, {"batch": 4}, set()),
    "DeepSpeed-Chat": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
         "prescale_gradients": False, "wall_clock_breakdown": False,
         "fp16": {"enabled": True, "loss_scale_window": 100},
         "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
         "tensorboard": {"enabled": False, "output_path": "runs/", "job_name": "sft"}}
        | zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none"},
               stage3_param_persistence_threshold=1e4, stage3_max_live_parameters=3e7, stage3_prefetch_bucket_size=3e7,
               memory_efficient_linear=False), 8, {}, {"accumulate": 1, "batch": 4, "offload": None},
        PRINTED | {f"zero_optimization.{key}" for key in (
            "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_prefetch_bucket_size",
            "memory_efficient_linear")}),
    "Megatron-DeepSpeed, bf16": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
         "prescale_gradients": True, "steps_per_print": 10, "wall_clock_breakdown": False} | BF16 | zero(1), 4, {},
        {"accumulate": 4, "batch": 4}, PRINTED | {"prescale_gradients"}),
    "GPT-NeoX": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
         "gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": True,
         "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}}
        | adam("Adam", lr=0.0006, betas=[0.9, 0.95], eps=1e-8)
        | zero(1, allgather_partitions=True, allgather_bucket_size=5e8, overlap_comm=True, reduce_scatter=True,
               reduce_bucket_size=5e8, contiguous_gradients=True), 8, {}, {"batch": 4, "lr": 0.0006},
        PRINTED | {"wall_clock_breakdown"}),
    "a profiled run with monitors": (
        {"train_batch_size": 8, "gradient_clipping": 0.5, "dump_state": True, "memory_breakdown": True} | BF16 | zero(2)
        | {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "detailed": True},
           "comms_logger": {"enabled": True, "verbose": False}, "wandb": {"enabled": True, "project": "p"},
           "csv_monitor": {"enabled": True, "output_path": "out"}, "tensorboard": {"enabled": True}}, 2, {},
        {"batch": 4, "clip": 0.5},
        {"dump_state", "memory_breakdown", "flops_profiler", "comms_logger", "wandb", "csv_monitor", "tensorboard"}),
    "a schedule in which the last batch stands": (
        {"train_micro_batch_size_per_gpu": 8, "steps_per_print": 100, "zero_allow_untested_optimizer": True,
         "fp16": {"enabled": True} | SCALE,
         "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False,
                                      "contiguous_memory_optimization": False, "number_checkpoints": False,
                                      "synchronize_checkpoint_boundary": False, "profile": False}}
        | schedule("WarmupLR", last_batch_iteration=-1, warmup_min_lr=0, warmup_max_lr=1e-4, warmup_num_steps=10000)
        | zero(2, offload_optimizer=CPU, contiguous_gradients=True, overlap_comm=True, allgather_bucket_size=2e8,
               reduce_bucket_size=2e8), 2, {}, {"batch": 8, "offload": "cpu"}, PRINTED),
    "activations in parts": (
        {"train_micro_batch_size_per_gpu": 1} | BF16 | zero(2, **BUCKETS)
        | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True,
                                        "contiguous_memory_optimization": True, "number_checkpoints": 4}}, 2, {},
        {"batch": 1}, {f"activation_checkpointing.{key}" for key in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints")}),
    "two sizes of buckets": (
        {"train_batch_size": 4, "communication_data_type": "bf16"} | BF16
        | zero(1, reduce_bucket_size=500000000, allgather_bucket_size=200000000, round_robin_gradients=True), 2, {},
        {"bucket_mb": 1e9 / MB}, {"zero_optimization.allgather_bucket_size"}),
    "one size of buckets, in fp32": (
        {"train_batch_size": 4} | zero(2, allgather_bucket_size=MB), 2, {}, {"bucket_mb": 4.0, "dtype": "fp32"}, set()),
    "stage 3 with buckets and small parameters": (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
         "gradient_clipping": 1.0, "steps_per_print": 100} | BF16
        | zero(3, overlap_comm=True, contiguous_gradients=True, reduce_bucket_size=5e8,
               stage3_prefetch_bucket_size=5e8, stage3_param_persistence_threshold=1e5, offload_optimizer=CPU), 2, {},
        {"accumulate": 2, "offload": "cpu"}, PRINTED | {f"zero_optimization.{key}" for key in (
            "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")}),
    "torch's Adam, and attention of no use": (
        {"train_micro_batch_size_per_gpu": 2, "sparse_attention": None} | FP16 | zero(2)
        | adam(lr=AUTO, betas=[0.9, 0.999], torch_adam=True, adam_w_mode=True)
        | schedule("WarmupLR", warmup_min_lr=1e-6, warmup_max_lr=AUTO, warmup_num_steps=5), 2, {"lr": 3e-4},
        {"lr": 3e-4}, set()),
    "ZeRO++, its second copy alone": (
        EIGHT | BF16 | zero(3, zero_hpz_partition_size=8, mics_shard_size=-1,
                                              zero_quantized_weights=False, zero_quantized_gradients=False), 2, {},
        {"batch": 4}, {"zero_optimization.zero_hpz_partition_size"}),
    "checkpoints elsewhere": (
        {"train_batch_size": 8, "checkpoint": {"tag_validation": "Warn", "use_node_local_storage": True},
         "nebula": {"enabled": True, "persistent_storage_path": "/p"}, "data_types": {"grad_accum_dtype": "bf16"}}
        | BF16 | zero(1, elastic_checkpoint=True, load_from_fp32_weights=False), 1, {}, {"batch": 8},
        {"checkpoint", "nebula", "zero_optimization.load_from_fp32_weights"}),
}

REFUSED = {  # name: (file, ranks, flags on the command line, the line)
    "a total that is no product": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4} | zero(3), 2,
        {}, "train_batch_size is 64, but train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 4 × 2 data-"),
    "a total that the ranks do not divide": ({"train_batch_size": 10} | zero(2), 4, {},
                                             "train_batch_size 10 cannot be 1"),
    "sizes that a program is to fill in": (
        {"train_batch_size": -1, "train_micro_batch_size_per_gpu": -1} | zero(2), 2, {},
        "train_batch_size must be a number from 1 up, not -1"),
    "offload by its old name": (
        {"train_batch_size": 10, "gradient_accumulation_steps": 1, "amp": {"enabled": False}} | FP16
        | zero(2, cpu_offload=True, **BUCKETS), 2, {},
        "zero_optimization.cpu_offload = true is not possible here: an old"),
    "a schedule with another's parameter": (
        {"train_batch_size": 10} | schedule("WarmupLR", last_batch_iteration=-1, total_num_steps=500, warmup_min_lr=0,
                                            warmup_max_lr=3e-5, warmup_num_steps=100), 1, {},
        "WarmupLR has no scheduler.params.total_num_steps"),
    "gradients added up in fp32": (
        {"train_batch_size": 8, "data_types": {"grad_accum_dtype": "fp32"}} | BF16 | zero(1), 1, {},
        'data_types.grad_accum_dtype is "fp32", and parameters are bf16'),
    "a key that is one of a trainer": (
        {"train_micro_batch_size_per_gpu": AUTO, "gradient_checkpointing": True} | BF16 | zero(2), 1, {},
        "DeepSpeed has no key gradient_checkpointing"),
    "a scale in bf16": (
        {"bf16": {"enabled": True, "auto_cast": False, "loss_scale": 0}} | zero(3), 1, {},
        "DeepSpeed has no key bf16.auto_cast: auto_cast belongs into fp16"),
    "a dtype under another name": (
        {"data_types": {"grad_accum_dtype": "fp32", "params_dtype": "fp32"}}, 1, {},
        "DeepSpeed has no key data_types.params_dtype: did you mean param_dtype?"),
    "a mode in the wrong place": (
        {"optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-3}}} | FP16, 1, {},
        "DeepSpeed has no key optimizer.adam_w_mode: adam_w_mode belongs into optimizer.params"),
    "the norm in the optimizer, as for BERT": (
        EIGHT | adam("Adam", lr=4e-3, max_grad_norm=1.0, weight_decay=0.01, bias_correction=True),
        1, {}, "optimizer.params.max_grad_norm = 1.0 is not possible here: write gradient_clipping"),
    "1-bit Adam": (EIGHT | adam("OneBitAdam", lr=4e-4, freeze_step=23000), 1, {},
                   'optimizer.type is "OneBitAdam": there are AdamW, Adam here'),
    "Lamb": (EIGHT | adam("Lamb", lr=1e-3), 1, {}, 'optimizer.type is "Lamb": there are AdamW, Adam'),
    "a cosine of torch": (EIGHT | schedule("CosineAnnealingLR", T_max=10), 1, {},
                          'scheduler.type is "CosineAnnealingLR": there are WarmupLR'),
    "curriculum learning": (
        {"train_batch_size": 8, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}}, 1, {},
        "curriculum_learning = {"),
    "ZeRO++": (EIGHT | BF16 | zero(3, zero_quantized_weights=True), 1, {},
               "nothing is quantized here"),
    "sparse attention": (
        {"train_batch_size": 8, "sparse_attention": {"mode": "fixed", "block": 16}} | FP16, 1, {},
        "attention here is dense"),
    "elastic sizes": (
        {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]}}, 1, {},
        "the batch would follow the number of ranks"),
    "two precisions": (EIGHT | BF16 | FP16, 1, {}, "fp16 and bf16 are both enabled"),
    "the learning rate of both": (
        EIGHT | adam(lr=1e-5), 1, {"lr": 1e-4}, "makes --lr 1e-05, and the command line has"),
    "ZeRO as a switch": ({"train_batch_size": 8, "zero_optimization": True}, 1, {},
                         "zero_optimization must be an object"),
}
TEXTS = {  # what is no JSON: (text, the line)
    "comments": ('{\n  "train_batch_size": 8,  // of all\n  "bf16": {}\n}', "comments and commas at an end"),
    "a comma at the end": ('{"bf16": {"enabled": true,},}', "comments and commas at an end are not read here"),
    "Python's True": ('{"bf16": {"enabled": True}}', "it is not JSON"),
    "a section twice": ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, '
                        '"offload_optimizer": {"device": "cpu"}}}', "offload_optimizer stands there twice"),
}
