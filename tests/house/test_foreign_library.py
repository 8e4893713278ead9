"""--model with the library transformers itself, where it is installed: Llama, GPT-2 and BERT."""

import json

import pytest
import torch
import toys
from house.test_foreign_models import beside, outcomes

from zero_minimal.__main__ import main
from zero_minimal.offload import Offloaded1, Offloaded2, Offloaded3
from zero_minimal.processes import ranks
from zero_minimal.programs.measured import measure
from zero_minimal.workload import loop
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers", reason="needs the library transformers")

KINDS = {
    "llama": dict(vocab_size=300, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64),
    "gpt2": dict(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "bert": dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=64),
}
LARGE = {
    "llama": dict(vocab_size=2000, hidden_size=256, intermediate_size=896, num_hidden_layers=6, num_attention_heads=8,
                  num_key_value_heads=2, max_position_embeddings=512),
    "gpt2": dict(vocab_size=2000, n_embd=256, n_layer=6, n_head=8, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0,
                 attn_pdrop=0.0),
    "bert": dict(vocab_size=2000, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
                 max_position_embeddings=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}


def config(folder, kind, sizes=KINDS):
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind} | sizes[kind]))
    return str(file)


@pytest.mark.parametrize(("kind", "dtype", "recompute"), [
    ("llama", "fp32", True), ("gpt2", "bf16", False), ("bert", "fp32", False)])
def test_all_stages_have_the_same_losses_bit_for_bit(kind, dtype, recompute, tmp_path):
    settings = Settings(model=config(tmp_path, kind), sequence=16, batch=2, steps=3, dtype=dtype, recompute=recompute)
    away = (Offloaded1, Offloaded2, Offloaded3) if kind == "llama" else ()
    for found in ranks.run(outcomes, 2, toys.STAGES, settings, away, device="cpu"):
        assert all(losses == found["Stage0"] for losses in found.values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_librarys(kind, tmp_path):
    """Drawn from the same distributions, and the same function of them."""
    file = config(tmp_path, kind, LARGE)
    torch.manual_seed(1)
    model = ForeignModel(file, 16, recompute=False).build().eval()
    plain = type(model).__mro__[2](model.config).eval()
    for (name, ours), (_, its) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if ours.ndim > 1:
            near = 0.05 if ours.numel() > 10_000 else 0.2
            assert ours.std().item() == pytest.approx(its.std().item(), rel=near), name
            assert abs(ours.mean().item() - its.mean().item()) < 0.004, name
        else:
            assert torch.equal(ours, its), name
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens), plain(input_ids=tokens).logits)


FEW_WORDS, MANY = (2000, 16, "bf16", 8), (20000, 2, "fp32", 1)  # vocabulary, ranks, dtype, batch
GRID = [(kind, stage, 512, stage == 3, *FEW_WORDS, 1.01) for kind in LARGE for stage in (3, 2)]
GRID += [(kind, stage, tokens, False, *MANY, 1.02) for kind in LARGE for stage in range(4) for tokens in (32, 256)]


@pytest.mark.parametrize(("kind", "stage", "tokens", "recompute", "words", "world", "dtype", "batch", "most"), GRID)
def test_the_plan_is_what_running_code_peaks_at(kind, stage, tokens, recompute, words, world, dtype, batch, most,
                                                tmp_path):
    """Stated bound: the code is at most 1% above the plan, as for our GPT, with many words 2%; and at most 8% below.
    Where embedding and head are one, its gradients are two and their sum: they were counted as activations, too, and a
    plan was up to 26% high."""
    file = config(tmp_path, kind, {kind: LARGE[kind] | {"vocab_size": words}})
    told, ratio = beside(ForeignModel(file, tokens, recompute), batch, dtype, stage, world)
    assert told["tied"] == (kind != "llama")
    assert 1 / most < ratio < 1 / 0.92


def test_a_tokenizer_of_the_model(tmp_path):
    """Its tokens are what is read, and those it has are what the model must have."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["[MASK]"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    text = tmp_path / "text.txt"
    text.write_text("to see the same lesson again and again, à la carte " * 40)
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(file := tmp_path / "tokenizer.json"))
    model = config(tmp_path, "llama")
    settings = Settings(model=model, tokenizer=str(file), text=str(text), sequence=8)
    assert settings.read_tokens().tolist() == tokenizer.encode(text.read_text()).ids
    assert max(next(loop.training_batches(settings, 0))[0].flatten()) < tokenizer.get_vocab_size()
    (tmp_path / "bert").mkdir()
    masked = Settings(model=config(tmp_path / "bert", "bert", {"bert": KINDS["bert"] | {"vocab_size": 300}}),
                      tokenizer=str(file), sequence=8)
    assert masked.gap == tokenizer.token_to_id("[MASK]")
    with pytest.raises(ValueError, match=rf'has {tokenizer.get_vocab_size()}: write "vocab_size": '):
        Settings(model=config(tmp_path, "gpt2"), tokenizer=str(file), sequence=8)
    text.write_bytes(b"\xff\xfe no text")
    with pytest.raises(ValueError, match="not UTF-8"):
        settings.read_tokens()


@pytest.mark.parametrize("kind", LARGE)
def test_kinds_of_attention_are_measured(kind, tmp_path):
    """In the library's own code: unfused attention keeps scores, once or as softmax and its copy."""
    model = ForeignModel(config(tmp_path, kind, LARGE), 256, recompute=False)
    found = {name: measure(model, 2, "bf16", name) for name in ("fused", "unfused", "recomputed")}
    assert all(each.attention == name and each.dropout for name, each in found.items())
    scores = 2 * 8 * 256**2 * 2  # bytes of a matrix of scores
    kept = (found["unfused"].all - found["recomputed"].all) / scores / 6
    # and Llama's groups share keys and values, which unfused attention copies for each head
    assert kept == pytest.approx(round(kept), abs=0.2 if kind == "llama" else 0.1) and 1 <= round(kept) <= 4
    # of these groups the fused kernel keeps the copies, and recomputation what they were made of
    assert found["recomputed"].all == pytest.approx(found["fused"].all, rel=0.1 if kind == "llama" else 0.06)
    assert len({each.matrix_operations for each in found.values()}) == 1
    assert found["unfused"].attention_operations / 3 == pytest.approx(found["fused"].attention_operations / 3.5)


def test_attention_with_dropout_is_measured_without_it(tmp_path, capsys):
    """torch's fused kernel for CPUs has none; those of GPUs have."""
    file = config(tmp_path, "gpt2")
    main(["plan", "--model", file, "--sequence", "32", "--ranks", "2", "--dtype", "bf16"])
    said = " ".join(capsys.readouterr().out.split())
    assert "ran torch's fused kernel" in said and "Dropout was off" in said
