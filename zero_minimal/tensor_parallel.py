"""Tensor parallelism: Megatron's way to cut each layer over the ranks of a model-parallel group (arXiv:1909.08053).

ZeRO works together with it (sections 1 and 8), and P_a, of the next lesson, removes what it leaves behind. With f and
g, the two ends of the parallel region, a block's MLP is

    x ─ f ─ A's columns ─ GELU ─ B's rows ─ g ─ + B's bias ─ dropout     f: identity forward, all-reduce backward
            [h, 4h / MP]         [4h / MP, h]                            g: all-reduce forward, identity backward

A rank has some columns of A, so it has some of the hidden values, whole. GELU needs no others. It multiplies them with
its rows of B, and the ranks' products add up to the result. Attention is the same with heads in the place of columns.

Memory a rank, for MP ranks (b sequences of s tokens, width h, vocabulary V):
    model states    1/MP of every matrix and of the embedding; norms, row-parallel biases and positions whole
    activations     1/MP inside the region; outside it, so also each block's input [b, s, h], whole on every rank
    logits          [b, s, V / MP]: the loss is computed without ever putting them together

Communication plan, a block:
    forward      all-reduce in g, after attention and after the MLP          2 · b·s·h elements
    backward     all-reduce in f, for the MLP and for attention              2 · b·s·h
A ring sends 2(MP−1)/MP times that. With recomputation forward runs twice: the 12·b·s·h of section 8. The whole model
adds an all-reduce of b·s·h after the embedding, one in backward before the head, and for the loss 3 numbers a token.
All of it is on the critical path: nothing can be computed meanwhile.
"""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zero_minimal.foundations import collectives, values

# -------------------------------------------------------------------------------------------------- who works with whom


@dataclass(frozen=True)
class Mesh:
    """This rank's place among DP x MP ranks, and the two groups it belongs to.

    With 4 ranks and MP = 2 the model-parallel groups are (0, 1) and (2, 3): they talk most, so they are neighbours.
    The data-parallel groups are (0, 2) and (1, 3): these ranks hold the same shards, and train them on different data.
    """

    model_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    model_rank: int  # within model_group: says which shards this rank holds
    data_rank: int  # within data_group: says which data it reads


def make_mesh(model_parallel: int) -> Mesh:
    """Split all ranks into model-parallel groups of this size. Every rank must call it.

    Raises: ValueError on every rank if the world is not DP x MP.
    """
    world_size = dist.get_world_size()
    if not isinstance(model_parallel, int) or model_parallel < 1 or world_size % model_parallel:
        raise ValueError(f"{world_size} ranks cannot be split into model-parallel groups of {model_parallel}: the "
                         f"world must be DP x MP; accepted here: {', '.join(map(str, divisors(world_size)))}")
    places = torch.arange(world_size).view(-1, model_parallel)  # [DP, MP]
    model_group, _ = dist.new_subgroups_by_enumeration(places.tolist())
    data_group, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    return Mesh(model_group, data_group, dist.get_rank(model_group), dist.get_rank(data_group))


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ---------------------------------------------------------------------------------- the two ends of the parallel region


class CopyToModelParallelRegion(torch.autograd.Function):
    """f, where x [any shape] enters: each rank uses it, so its gradient is the sum of what comes back from all."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return g(gradient, ctx.group), None


class ReduceFromModelParallelRegion(torch.autograd.Function):
    """g, where partial results [any shape] leave: they add up, and each rank's has the gradient of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, op="sum", group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return f(gradient, ctx.group), None


def f(x, group=None):  # f and g are each other's backward
    return CopyToModelParallelRegion.apply(x, group)


def g(x, group=None):
    return ReduceFromModelParallelRegion.apply(x, group)


@contextmanager
def parallel_random(group=None):
    """Random numbers of the rank's own, for dropout inside the region. Outside, all ranks must draw the same ones.

    Seed all ranks of the group alike. Then dropout outside the region has equal masks, and x stays equal on all ranks.
    Inside, each rank has other heads, so it needs other masks: the inside state starts from a number drawn from the
    outside state (of the CPU; it costs no wait for a GPU) plus the rank. On the way out the outside state, of the CPU
    and of the current GPU, is put back, one draw further on. So the inside depends on nothing but the outside state:
    checkpointing that restores torch's own random state before it recomputes gets the same masks again.
    """
    seed = int(torch.randint(2**31, (), device="cpu")) + dist.get_rank(group)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield


# ----------------------------------------------------------------------------------------------------------- the layers


def shard(whole: torch.Tensor, dim: int, group=None, blocks: int = 1) -> torch.Tensor:
    """This rank's part of a tensor that is cut along `dim`: [n, …] → [n / MP, …], in memory of its own.

    blocks: the dimension is made of so many equal blocks, and a rank gets a part of each.
    Raises: ValueError if it cannot be cut in equal parts.
    """
    ranks, size = dist.get_world_size(group), whole.shape[dim]
    if size % (blocks * ranks):
        raise ValueError(f"{ranks} model-parallel ranks cannot share a size of {size} equally: it must be a multiple "
                         f"of {blocks * ranks}")
    parts = whole.unflatten(dim, (blocks, ranks, -1)).select(dim + 1, dist.get_rank(group))
    return parts.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def random_weight(rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
    """Every rank draws the whole weight and then keeps its part: a seed gives the same model at any MP."""
    return torch.empty(rows, columns).normal_(std=std)


class ColumnParallelLinear(nn.Module):
    """x […, inputs], the same on all ranks → this rank's part of the outputs, […, outputs / MP].

    blocks: of the outputs (3 for query, key and value side by side); a rank has a part of each.
    """

    def __init__(self, inputs: int, outputs: int, group=None, blocks: int = 1):
        super().__init__()
        self.group, self.blocks = group, blocks
        self.weight = nn.Parameter(self.cut("weight", random_weight(outputs, inputs)))  # [outputs / MP, inputs]
        self.bias = nn.Parameter(self.cut("bias", torch.zeros(outputs)))  # [outputs / MP]

    def cut(self, name, whole):
        return shard(whole, 0, self.group, self.blocks)

    def forward(self, x):
        return F.linear(f(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's part of the inputs, […, inputs / MP] → the outputs, […, outputs], the same on all ranks."""

    def __init__(self, inputs: int, outputs: int, group=None, std: float = 0.02):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(self.cut("weight", random_weight(outputs, inputs, std)))  # [outputs, inputs / MP]
        self.bias = nn.Parameter(torch.zeros(outputs))  # whole on every rank

    def cut(self, name, whole):
        return shard(whole, 1, self.group) if name == "weight" else whole

    def forward(self, x):
        return g(F.linear(x, self.weight), self.group) + self.bias  # after g: else it would be added MP times


class VocabularyParallelEmbedding(nn.Module):
    """One weight for embedding and head, cut by tokens: rank r has those from r·V/MP on, V rounded up to divide."""

    def __init__(self, vocabulary: int, hidden: int, group=None):
        super().__init__()
        self.vocabulary, self.group = vocabulary, group
        self.part = -(-vocabulary // dist.get_world_size(group))
        self.first = dist.get_rank(group) * self.part
        self.weight = nn.Parameter(self.cut("weight", random_weight(vocabulary, hidden)))  # [part, hidden]

    def cut(self, name, whole):
        if len(whole) != self.vocabulary:
            raise ValueError(f"this model has a vocabulary of {self.vocabulary} tokens, not {len(whole)}")
        padding = self.part * dist.get_world_size(self.group) - self.vocabulary
        return shard(F.pad(whole, (0, 0, 0, padding)), 0, self.group)

    def forward(self, tokens):  # [batch, sequence] → [batch, sequence, hidden]
        own, place = self.place(tokens)
        return g(F.embedding(place, self.weight) * own.unsqueeze(-1), self.group)  # one rank has the row, others zeros

    def logits(self, x):  # [batch, sequence, hidden] → this rank's [batch, sequence, part]
        logits = F.linear(f(x, self.group), self.weight)
        padding = torch.arange(self.first, self.first + self.part, device=x.device) >= self.vocabulary
        return logits.masked_fill(padding, -math.inf)

    def place(self, tokens):
        """Whether this rank has a token, and its place in the shard (0 for those of others)."""
        own = (tokens >= self.first) & (tokens < self.first + self.part)
        return own, torch.where(own, tokens - self.first, 0)

    def cross_entropy(self, logits, targets):
        """Mean cross-entropy in nats a token, a 0-dim fp32 tensor, the same on all ranks.

        Args: logits of this rank, [batch, sequence, part]; targets [batch, sequence].
        The ranks exchange three numbers a token: the highest logit, the sum of all exponentials, the target's logit.
        """
        logits = logits.float()
        highest = logits.detach().amax(-1)  # [batch, sequence]; exp() of what is left cannot overflow
        collectives.all_reduce(highest, op="max", group=self.group)
        logits = logits - highest.unsqueeze(-1)
        own, place = self.place(targets)
        of_target = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).where(own, 0.0)
        total, of_target = g(torch.stack([logits.exp().sum(-1), of_target]), self.group)
        return (total.log() - of_target).mean()


# ------------------------------------------------------------------------------------------- the GPT built from them


class ParallelAttention(nn.Module):
    """Causal self-attention; each rank has heads / MP of the heads, whole. Raises ValueError if MP does not divide."""

    def __init__(self, config, group=None):
        super().__init__()
        ranks = dist.get_world_size(group)
        if config.heads % ranks:
            raise ValueError(f"{ranks} model-parallel ranks cannot share {config.heads} attention heads equally; "
                             f"accepted with these heads: {', '.join(map(str, divisors(config.heads)))}")
        self.heads, self.dropout, self.group = config.heads // ranks, config.dropout, group
        self.query_key_value = ColumnParallelLinear(config.hidden, 3 * config.hidden, group, blocks=3)
        self.projection = RowParallelLinear(config.hidden, config.hidden, group, residual_std(config))

    def forward(self, x):  # [batch, sequence, hidden] → the same
        batch, sequence, _ = x.shape
        x = self.query_key_value(x).view(batch, sequence, 3, self.heads, -1)
        query, key, value = x.permute(2, 0, 3, 1, 4)  # each [batch, heads / MP, sequence, hidden / heads]
        dropout = self.dropout if self.training else 0.0
        with parallel_random(self.group) if dropout else nullcontext():
            x = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(x.transpose(1, 2).reshape(batch, sequence, -1))


class ParallelMLP(nn.Module):
    """Two linear layers with a GELU between them; each rank has 4 · hidden / MP of the values between them."""

    def __init__(self, config, group=None):
        super().__init__()
        self.expansion = ColumnParallelLinear(config.hidden, 4 * config.hidden, group)
        self.projection = RowParallelLinear(4 * config.hidden, config.hidden, group, residual_std(config))

    def forward(self, x):  # [batch, sequence, hidden] → the same
        return self.projection(F.gelu(self.expansion(x), approximate="tanh"))


def residual_std(config) -> float:
    """GPT-2's: each block adds to the residual stream twice; smaller steps keep the sum at the size of one."""
    return 0.02 / math.sqrt(2 * config.layers)


class ParallelBlock(nn.Module):
    """Attention, then the MLP, each added to the residual stream. Norms and dropout are outside the region."""

    def __init__(self, config, group=None):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = ParallelAttention(config, group)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = ParallelMLP(config, group)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):  # [batch, sequence, hidden] → the same
        return self.inside(x)

    def inside(self, x):
        """What checkpointing wraps."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ParallelGPT(nn.Module):
    """The GPT of zero_minimal/workload/model.py over the ranks of `group`, with the same names of parameters.

    `model(tokens, targets)` is the mean cross-entropy, a 0-dim fp32 tensor; `model(tokens)` are the whole logits,
    [batch, sequence, vocabulary]. tokens and targets are int64 [batch, sequence], the same on all ranks of the group.

    Args:
        config: layers, hidden, heads, sequence (the longest), vocabulary, dropout.
    Set `run_block` to a function (block, x) to run the blocks in your own way, say with checkpoint(block.inside, x).
    Raises: ValueError if MP does not divide the heads, for an input that is too long, and for unknown tokens.
    """

    run_block = None

    def __init__(self, config, group=None):
        super().__init__()
        self.config, self.group = config, group
        self.token_embedding = VocabularyParallelEmbedding(config.vocabulary, config.hidden, group)
        self.position_embedding = nn.Embedding(config.sequence, config.hidden)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([ParallelBlock(config, group) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, tokens, targets=None):
        self.check(tokens, targets)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))  # [batch, sequence, hidden]
        for block in self.blocks:
            x = self.run_block(block, x) if self.run_block else block(x)
        logits = self.token_embedding.logits(self.norm(x))  # [batch, sequence, vocabulary / MP]
        if targets is not None:
            return self.token_embedding.cross_entropy(logits, targets)
        first, ranks = self.token_embedding.first, dist.get_world_size(self.group)
        whole = F.pad(logits, (first, logits.shape[-1] * (ranks - 1) - first))  # zeros where other ranks have theirs
        return g(whole, self.group)[..., : self.config.vocabulary]

    def check(self, tokens, targets):
        if tokens.shape[1] > self.config.sequence:
            raise ValueError(f"this model reads at most {self.config.sequence} tokens at once, not {tokens.shape[1]}")
        if not values.present():
            return
        for numbers in (tokens,) if targets is None else (tokens, targets):  # no rank would have an unknown one
            if not 0 <= numbers.min() <= numbers.max() < self.config.vocabulary:
                raise ValueError(f"tokens must be from 0 to {self.config.vocabulary - 1}: found {int(numbers.min())} "
                                 f"to {int(numbers.max())}")

    def replicated(self) -> list[nn.Parameter]:
        """What every rank of the group holds whole: norms, biases after g, positions."""
        cut = {param for module in self.modules() for name, param in module.named_parameters(recurse=False)
               if isinstance(module, (ColumnParallelLinear, VocabularyParallelEmbedding))
               or isinstance(module, RowParallelLinear) and name == "weight"}
        return [param for param in self.parameters() if param not in cut]

    def shard_of(self, whole: dict) -> dict:
        """This rank's parts of a single-process GPT's state, or of anything with its names and shapes: gradients, say.

        Raises: ValueError if a tensor is missing or has another size.
        """
        parts = {}
        for name, param in self.named_parameters():
            if whole.get(name) is None:
                raise ValueError(f"the whole model has no {name!r}: build it from the same config")
            path, _, last = name.rpartition(".")
            module = self.get_submodule(path)
            parts[name] = module.cut(last, whole[name]) if hasattr(module, "cut") else whole[name]
            if parts[name].shape != param.shape:
                raise ValueError(f"this rank's part of {name!r} has the shape {tuple(parts[name].shape)}, and must "
                                 f"have {tuple(param.shape)}: build the whole model from the same config")
        return parts

    def load_whole(self, whole: dict) -> None:
        """Take over the weights of a single-process GPT: its state_dict(), the same on every rank."""
        self.load_state_dict(self.shard_of(whole))


if __name__ == "__main__":
    from torch.utils.checkpoint import checkpoint
    from tqdm import tqdm

    from zero_minimal.foundations import ranks
    from zero_minimal.stage2 import Stage2
    from zero_minimal.workload import data, settings, train

    def main() -> None:
        """torchrun --nproc-per-node 4 zero_minimal/tensor_parallel.py --model-parallel 2"""
        parser = settings.Parser(description="Train a GPT with tensor parallelism; over the data-parallel groups "
                                             "works stage 2. Start it with torchrun --nproc-per-node N.")
        parser.add_argument("--model-parallel", type=settings.positive, metavar="MP",
                            help="ranks that share a model (default: all)")
        settings.add_device(parser)
        settings.add_settings(parser)
        arguments = parser.parse_args()
        asked = settings.read_settings(parser, arguments)
        if asked.clip or asked.dtype == "fp16":
            parser.error("--clip and --dtype fp16 need sums over both groups, and stage 2 knows only its own: use "
                         "--clip 0, and fp32 or bf16; zero_100b.py does both")
        with ranks.start(arguments.device) as rank:
            try:
                mesh = make_mesh(arguments.model_parallel or rank.world_size)
                torch.manual_seed(asked.seed)  # the same model at any MP
                model = ParallelGPT(asked.model_config(), mesh.model_group)
            except ValueError as error:
                parser.error(str(error))
            run(asked, rank, mesh, model)

    def run(asked, rank, mesh, model) -> None:
        model.to(rank.device, settings.DTYPES[asked.dtype])
        if asked.recompute:
            model.run_block = lambda block, x: checkpoint(block.inside, x, use_reentrant=False)
        zero = Stage2(
            model, torch.optim.AdamW, group=mesh.data_group, bucket_bytes=int(asked.bucket_mb * 2**20),
            lr=asked.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
        )
        training, held_out = data.split(data.read_tokens(asked.text), asked.sequence)
        replicas = dist.get_world_size(mesh.data_group)
        # ranks that share a model read the same data, and drop out the same values outside the parallel region
        batches = data.Batches(training, asked.batch, asked.sequence, asked.seed, mesh.data_rank)
        validation = data.validation_batches(held_out, asked.batch, asked.sequence, mesh.data_rank, replicas)
        torch.manual_seed(asked.seed + 1 + mesh.data_rank)

        before = train.evaluate(zero, validation, rank)
        name = f"DP {replicas} x MP {dist.get_world_size(mesh.model_group)}"
        steps = tqdm(range(asked.steps), desc=name, unit="step", disable=rank.rank != 0)
        for step in steps:
            for param_group in zero.optimizer.param_groups:
                param_group["lr"] = train.learning_rate(step, asked)
            loss = 0.0
            for _ in range(asked.accumulate):
                inputs, targets = (tokens.to(rank.device) for tokens in next(batches))
                part = model(inputs, targets) / asked.accumulate
                part.backward()
                loss += part.item()
            zero.step()
            zero.zero_grad()
            steps.set_postfix(loss=f"{loss:.3f}", refresh=False)
        after = train.evaluate(zero, validation, rank)
        if rank.rank == 0:
            print(f"{name}: loss on held-out text {before:.3f} before and {after:.3f} after training, in nats a token; "
                  f"{sum(param.numel() for param in model.parameters()):,} parameters on a rank")

    main()
