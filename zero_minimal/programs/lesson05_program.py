"""The program of lesson 5: train a GPT with tensor parallelism, and with stage 2 over the data-parallel groups.

    torchrun --nproc-per-node 4 zero_minimal/tensor_parallel.py --model-parallel 2
"""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.mesh import Mesh, make_mesh
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import report
from zero_minimal.programs.train import losses_of
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop, settings


@interrupts.program
def main(model_class: type) -> None:
    """Read the flags, build a model of this class (the lesson's ParallelGPT, or a learner's), train it."""
    parser = settings.Parser(description="Train a GPT with tensor parallelism; over the data-parallel groups "
                                         "works stage 2. Start it with torchrun --nproc-per-node N.")
    parser.add_argument("--model-parallel", type=settings.positive, metavar="M",
                        help="ranks that share a model (default: all)")
    settings.add_device(parser)
    settings.add_settings(parser)
    arguments = parser.parse_args()
    settings.refuse_model(parser, arguments)
    asked = settings.read_settings(parser, arguments)
    if asked.clip or asked.dtype == "fp16":
        parser.error("--clip and --dtype fp16 need sums over both groups, and stage 2 knows only its own: use "
                     "--clip 0, and fp32 or bf16; zero_100b.py does both")
    with ranks.start(arguments.device) as rank:
        try:
            mesh = make_mesh(arguments.model_parallel or rank.world_size)
            torch.manual_seed(asked.seed)  # the same model for every M
            model = model_class(asked.model_config(), mesh.model_group)
        except ValueError as error:
            parser.error(str(error))
        run(asked, rank, mesh, model)


def run(asked: settings.Settings, rank: ranks.Rank, mesh: Mesh, model: torch.nn.Module) -> None:
    """Train on all ranks; rank 0 prints the loss on held-out text before and after."""
    model.to(rank.device, settings.DTYPES[asked.dtype])
    if asked.recompute:
        model.run_block = lambda block, x: checkpoint(block.inside, x, use_reentrant=False)
    zero = Stage2(
        model, torch.optim.AdamW, group=mesh.data_group, bucket_bytes=int(asked.bucket_mb * 2**20),
        **asked.optimizer_options(),
    )
    # ranks that share a model read the same data, and have the same dropout outside the parallel region
    replicas = dist.get_world_size(mesh.data_group)
    batches = loop.training_batches(asked, mesh.data_rank)
    validation = loop.validation_batches(asked, mesh.data_rank, replicas)
    loop.seed_dropout(asked, mesh.data_rank)

    before = loop.evaluate(zero, validation, rank)
    name = f"D × M = {replicas} × {dist.get_world_size(mesh.model_group)}"
    losses_of(loop.steps(zero, batches, asked), asked.steps, name, rank)
    after = loop.evaluate(zero, validation, rank)
    if rank.rank == 0:
        parameters = sum(param.numel() for param in model.parameters())
        report.say(f"{name}: loss on held-out text {before:.3f} before and {after:.3f} after training, in nats a "
                   f"token; {parameters:,} parameters on a rank")
