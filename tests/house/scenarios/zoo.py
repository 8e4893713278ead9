"""Scenarios: models of the `transformers` library, tiny and without weights of anybody's, unchanged."""

import warnings

import torch
from house.scenarios.stand import Scenario
from torch.optim import AdamW

ZOO: dict = {}
COARSE = dict(dtype=torch.float32, tolerance=1e-3)
WORDS = 37
COMMON = dict(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
LLAMA = dict(num_key_value_heads=1, max_position_embeddings=32)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
PAIR = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=1)


def text(me, step):
    words = me.words(step, WORDS - 3, 2, 7) + 3
    return dict(input_ids=words, labels=words)


def pixels(me, step, size=8):
    return dict(pixel_values=me.x(step, 2, 3, size, size), labels=me.words(step, 2, 2))


def picture_and_text(me, step):
    return dict(pixel_values=me.x(step, 2, 3, 8, 8), input_ids=me.words(step, WORDS - 3, 2, 5) + 3, return_loss=True)


def sound(me, step):
    return dict(input_features=me.x(step, 2, 8, 12), labels=me.words(step, WORDS - 3, 2, 5) + 3)


def sentence(me, step):
    return dict(input_ids=me.words(step, WORDS - 3, 2, 7) + 3, labels=me.words(step, 2, 2))


def clip():
    part = dict(SMALL, projection_dim=8)
    return dict(text_config=dict(part, vocab_size=WORDS, max_position_embeddings=16, eos_token_id=2, bos_token_id=1,
                                 pad_token_id=0),
                vision_config=dict(part, image_size=8, patch_size=4), projection_dim=8)


# name → (its class, its configuration's class, options, batch, whether it generates)
KINDS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", dict(COMMON, n_positions=32, n_embd=16, n_layer=2, n_head=2,
              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), text, True),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", COMMON | SMALL | LLAMA, text, True),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", COMMON | SMALL | LLAMA | dict(tie_word_embeddings=True), text,
                    True),
    "Mistral": ("MistralForCausalLM", "MistralConfig", COMMON | SMALL | LLAMA | dict(sliding_window=4), text, True),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", COMMON | SMALL | LLAMA | dict(num_local_experts=3,
                output_router_logits=True), text, True),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", COMMON | SMALL | LLAMA, text, True),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", COMMON | SMALL | LLAMA | dict(head_dim=8), text, True),
    "Phi": ("PhiForCausalLM", "PhiConfig", COMMON | SMALL | dict(max_position_embeddings=32, resid_pdrop=0.0), text,
            True),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON | SMALL | dict(max_position_embeddings=32), text, True),
    "Falcon": ("FalconForCausalLM", "FalconConfig", dict(COMMON, hidden_size=16, num_hidden_layers=2,
               num_attention_heads=2, max_position_embeddings=32, ffn_hidden_size=24), text, True),
    "Bloom": ("BloomForCausalLM", "BloomConfig", dict(COMMON, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.0,
              attention_dropout=0.0), text, True),
    "OPT": ("OPTForCausalLM", "OPTConfig", dict(COMMON, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0), text, True),
    "Mamba": ("MambaForCausalLM", "MambaConfig", dict(COMMON, hidden_size=16, state_size=4, num_hidden_layers=2,
              time_step_rank=2), text, True),
    "BERT": ("BertForMaskedLM", "BertConfig", COMMON | SMALL | QUIET | dict(max_position_embeddings=32), text, False),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", COMMON | SMALL | QUIET | dict(max_position_embeddings=32), text,
                False),
    "DistilBERT": ("DistilBertForMaskedLM", "DistilBertConfig", dict(vocab_size=WORDS, pad_token_id=0, dim=16,
                   n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, dropout=0.0,
                   attention_dropout=0.0), text, False),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", COMMON | SMALL | QUIET | dict(embedding_size=8,
               max_position_embeddings=32), text, False),
    "ELECTRA": ("ElectraForSequenceClassification", "ElectraConfig", COMMON | SMALL | QUIET | dict(embedding_size=8,
                max_position_embeddings=32), sentence, False),
    "DeBERTa": ("DebertaV2ForSequenceClassification", "DebertaV2Config", COMMON | SMALL | QUIET | dict(
                max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"]), sentence, False),
    "T5": ("T5ForConditionalGeneration", "T5Config", dict(COMMON, d_model=16, d_kv=8, d_ff=24, num_layers=2,
           num_heads=2, dropout_rate=0.0, decoder_start_token_id=0), text, True),
    "BART": ("BartForConditionalGeneration", "BartConfig", COMMON | PAIR | dict(max_position_embeddings=32,
             dropout=0.0, forced_eos_token_id=2), text, True),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", COMMON | PAIR | dict(num_mel_bins=8,
                max_source_positions=6, max_target_positions=16, dropout=0.0, begin_suppress_tokens=None,
                suppress_tokens=None), sound, False),
    "ViT": ("ViTForImageClassification", "ViTConfig", SMALL | QUIET | dict(image_size=8, patch_size=4), pixels, False),
    "CLIP": ("CLIPModel", "CLIPConfig", clip(), picture_and_text, False),
}


def build(name):
    import transformers

    transformers.logging.set_verbosity_error()
    kind, configuration, options, _, _ = KINDS[name]
    return getattr(transformers, kind)(getattr(transformers, configuration)(**options))


def train(me, name, model, steps=3):
    batch, generates = KINDS[name][3:]
    zero = me.wrap(model, AdamW, lr=0.01, bucket_bytes=4000)
    for step in range(steps):
        loss = model(**batch(me, step)).loss
        loss.backward()
        me.note(loss, zero.clip_grad_norm_(1.0))
        zero.step()
        zero.zero_grad()
        with torch.no_grad():
            me.note(model(**batch(me, 100 + step)).loss)
    if generates:
        model.eval()
        inputs = {"inputs": batch(me, 7)["input_ids"][:, :4]}
        me.note(model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False))


def play(me, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(me, name, build(name).to(torch.get_default_dtype()))


for name in KINDS:
    # torch has no grouped products in fp64, which Mixtral uses
    precise = {} if name == "Mixtral" else dict(dtype=torch.float64, tolerance=1e-8)
    ZOO[name] = Scenario(name, lambda me, name=name: play(me, name), **{**COARSE, **precise})
