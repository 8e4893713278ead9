"""Weights leave as a safetensors file that a plain model loads, and come back; from transformers' files, too."""

import json
import re
import sys

import pytest
import torch
import toys
from house.saved_models import Model, disk_has
from safetensors.torch import load_file, save_file
from thorough import sample

from zero_minimal.__main__ import main
from zero_minimal.checkpoint import saved_state
from zero_minimal.core.mesh import make_mesh
from zero_minimal.processes import interrupts
from zero_minimal.programs import progress
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.zero_100b import System

SIZES = GPTConfig(layers=2, hidden=8, heads=4, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)


def save(stage, folder, dtype):
    torch.manual_seed(1)
    model = Model().to(dtype)
    zero = toys.STAGES[stage](model, torch.optim.AdamW, lr=0.01)
    model(*toys.tokens(0, 0)).backward()
    zero.step()
    saved_state.save(zero, folder)
    with zero.gather_parameters():
        return {name: value.clone() for name, value in model.state_dict().items()}


def load(stage, folder, dtype):
    torch.manual_seed(2)
    model = Model().to(dtype)
    zero = toys.STAGES[stage](model, torch.optim.AdamW, lr=0.02)
    assert saved_state.load(zero, folder) == {"step": 0, "batches": 0, "scaler": None}
    assert zero.optimizer.param_groups[0]["lr"] == 0.02 and not zero.optimizer.state, "weights alone"
    model(*toys.tokens(0, 1)).backward()
    zero.zero_grad()
    with zero.gather_parameters():
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage, world, dtype", sample(
    [(stage, world, ("float32", "bfloat16")[(stage + world) % 2]) for stage in range(4) for world in (1, 2, 3)],
    [(3, 2, "bfloat16")]))
def test_there_and_back(stage, world, dtype, tmp_path, capsys):
    dtype, file = getattr(torch, dtype), tmp_path / "model.safetensors"
    expected = toys.run(save, world, stage, tmp_path / "a", dtype)[0]
    main(["export", str(tmp_path / "a"), str(file)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", file.name]
    (other := tmp_path / "other").touch()
    assert file.stat().st_mode == other.stat().st_mode, "who may read a new file may read this one"
    plain = Model().to(dtype)
    plain.load_state_dict(load_file(file))  # strict: all names, and no others
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    assert {value.dtype for value in plain.state_dict().values()} == {dtype, torch.int64}
    main(["import", str(file), str(tmp_path / "b")])
    again = toys.run(load, world, stage, tmp_path / "b", dtype)[0]
    assert all(torch.equal(again[name], value) for name, value in expected.items() if name != "seen")
    said = capsys.readouterr().out
    assert said == (f"{file}: 7,056 parameters of {tmp_path / 'a' / 'step-00000000'}\n"
                    f"{tmp_path / 'b'}: 42 tensors. Go on with --resume {tmp_path / 'b'}\n")


def test_a_terminal_is_cleared_of_what_is_under_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.meanwhile("reading …"):
        pass
    assert re.fullmatch(r"\r +\rreading …\r +\r", capsys.readouterr().err)
    progress.announce("building …")
    with pytest.raises(SystemExit):
        interrupts.refuse("error: no")
    assert re.fullmatch(r"\r +\rbuilding …\r +\rerror: no\n", capsys.readouterr().err)


def save_system(folder):
    torch.manual_seed(1)
    saved_state.save(System("C2", SIZES, make_mesh(2), 4, torch.float32, "cpu", torch.optim.AdamW), folder)


def test_from_a_model_that_is_cut(tmp_path, capsys):
    toys.run(save_system, 2, tmp_path / "a")
    main(["export", str(tmp_path / "a"), str(tmp_path / "model.safetensors")])
    plain, loaded = GPT(SIZES), GPT(SIZES)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    saved_state.load_plain(plain, None, tmp_path / "a")
    assert toys.identical(plain.parameters(), loaded.parameters())


# ------------------------------------------------------------------------------------------------------ transformers


def of_transformers(model):
    """The weights of our GPT as transformers' GPT2LMHeadModel has them, its masks too."""
    weights = {}
    names = {"token_embedding": "wte", "position_embedding": "wpe", "norm": "ln_f", "attention_norm": "ln_1",
             "attention.query_key_value": "attn.c_attn", "attention.projection": "attn.c_proj", "mlp_norm": "ln_2",
             "mlp.expansion": "mlp.c_fc", "mlp.projection": "mlp.c_proj"}
    for name, param in model.named_parameters():
        path, _, kind = name.rpartition(".")
        block = ""
        if path.startswith("blocks."):
            _, number, path = path.split(".", 2)
            block = f"h.{number}."
        is_matrix = names[path].split(".")[-1].startswith("c_") and kind == "weight"
        tensor = param.data.t() if is_matrix else param.data
        weights[f"transformer.{block}{names[path]}.{kind}"] = tensor.contiguous()
    for block in range(SIZES.layers):
        weights[f"transformer.h.{block}.attn.bias"] = torch.ones(1, 1, 4, 4).tril().bool()
        weights[f"transformer.h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    return weights


@pytest.mark.parametrize("form", ("file", "folder", "shards", "without the prefix"))
def test_from_transformers(form, tmp_path):
    torch.manual_seed(4)
    model = GPT(SIZES)
    weights = of_transformers(model)
    source = tmp_path / "hub"
    source.mkdir()
    if form == "shards":
        halves = {"one": list(weights)[::2], "two": list(weights)[1::2]}
        for half, names in halves.items():
            save_file({name: weights[name] for name in names}, source / f"{half}.safetensors")
        (source / "model.safetensors.index.json").write_text(json.dumps({
            "weight_map": {name: f"{half}.safetensors" for half, names in halves.items() for name in names}}))
    else:
        if form == "without the prefix":
            weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        save_file(weights, source / "model.safetensors")
    main(["import", str(source / "model.safetensors" if form == "file" else source), str(tmp_path / "b")])
    plain = GPT(SIZES)
    saved_state.load_plain(plain, torch.optim.AdamW(plain.parameters()), tmp_path / "b")
    assert toys.identical(plain.parameters(), model.parameters())


def test_heads_are_taken_from_the_config(tmp_path):
    """No weight has them in its shape: resume.py compares them."""
    (tmp_path / "hub").mkdir()
    save_file(of_transformers(GPT(SIZES)), tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text('{"n_head": 2}')
    main(["import", str(tmp_path / "hub"), str(tmp_path / "b")])
    assert saved_state.load_plain(GPT(SIZES), None, tmp_path / "b")["settings"] == {"heads": 2}


def test_a_head_of_its_own_is_no_weight_of_a_tied_model(tmp_path):
    """One that is the embedding's is; so is what export writes."""
    model = GPT(SIZES)
    for name, head in (("same", model.token_embedding.weight.data.clone()), ("other", torch.ones(SIZES.vocabulary, 8)),
                       ("larger", torch.ones(SIZES.vocabulary + 1, 8))):
        save_file(of_transformers(model) | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / name)])
    saved_state.load_plain(GPT(SIZES), None, tmp_path / "same")
    for name in ("other", "larger"):
        with pytest.raises(ValueError, match=r"two weights that are one here: token_embedding.weight and head.weight$"):
            saved_state.load_plain(GPT(SIZES), None, tmp_path / name)


# ---------------------------------------------------------------------------------------------------------- refused


def test_says_what_cannot_be(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, more in (("lora", "h.0.attn.c_attn.lora_A.weight"), ("cross", "h.0.crossattention.c_attn.weight"),
                       ("score", "score.weight"), ("pointless", "temperature")):
        save_file(of_transformers(GPT(SIZES)) | {more: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors.index.json").write_text("{}")
    good = tmp_path / "good.safetensors"
    save_file(of_transformers(GPT(SIZES)), good)
    main(["import", str(good), str(tmp_path / "a")])
    for words, reason in (
        (["export", str(tmp_path / "none"), str(tmp_path / "m.safetensors")], "there is no checkpoint in"),
        (["export", str(tmp_path), str(tmp_path / "m.bin")], "must end in .safetensors"),
        (["import", str(tmp_path / "model.safetensors"), str(tmp_path / "b")], "cannot be read as safetensors"),
        (["import", str(tmp_path / "nothing.safetensors"), str(tmp_path / "b")], "nothing.safetensors cannot be read"),
        (["import", str(tmp_path / "model.safetensors"), str(tmp_path / "full")], "is not empty: name a new folder"),
        (["import", str(tmp_path / "lora.safetensors"), str(tmp_path / "b")], "place: h.0.attn.c_attn.lora_A.weight."),
        (["import", str(tmp_path / "cross.safetensors"), str(tmp_path / "b")], ": h.0.crossattention.c_attn.weight."),
        (["import", str(tmp_path / "score.safetensors"), str(tmp_path / "b")], "has no place: score.weight."),
        (["import", str(tmp_path / "pointless.safetensors"), str(tmp_path / "b")], "has no place: temperature."),
        (["import", str(tmp_path / "hub"), str(tmp_path / "b")], "index.json cannot be read, or has no 'weight_map'"),
        (["import", str(good), str(good / "b")], f"{good / 'b'} cannot be written: Not a directory"),
        (["import", str(good), "x" * 300], "cannot be written: File name too long"),
        (["export", "x" * 300, str(tmp_path / "m.safetensors")], "cannot be looked into (File name too long)"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_disk_that_is_full(tmp_path, capsys):
    save_file(of_transformers(GPT(SIZES)), tmp_path / "model.safetensors")
    main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "a")])
    capsys.readouterr()
    disk_has(1000)
    try:
        for words in (["import", str(tmp_path / "model.safetensors"), str(tmp_path / "b")],
                      ["export", str(tmp_path / "a"), str(tmp_path / "m.safetensors")]):
            with pytest.raises(SystemExit):
                main(words)
    finally:
        disk_has(None)
    said = capsys.readouterr().err
    assert said.count("cannot be written: ") == 2 and "File too large" in said
    assert not list((tmp_path / "b").iterdir()) and not list(tmp_path.glob(".*")), "nothing half-written is left"
