"""Damage to config.json, generation_config.json and the files of the tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.damage.change import JUNK, SIZES, Change, Damage, dumped, json_way

EVERY = (
    "architectures", "auto_map", "model_type", "vocab_size", "tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id",
    "eos_token_id", "pad_token_id", "num_labels", "id2label", "label2id", "text_config", "is_encoder_decoder", "use_cache",
    "attn_implementation", "_attn_implementation", "pruned_heads", "chunk_size_feed_forward", "transformers_version", "name_or_path",
    "_name_or_path", "output_attentions", "output_hidden_states", "return_dict", "problem_type", "quantization_config",
    "compression_config", "export_model_type", "base_model_tp_plan", "_commit_hash", "is_decoder", "add_cross_attention",
    "tokenizer_class",
)  # fmt: skip
LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range", "pretraining_tp",
)  # fmt: skip
FIELDS = {
    "llama": LLAMA,
    "qwen3": (*LLAMA, "layer_types", "layer_types", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    "mixture": (*LLAMA, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
    "gpt2": ("n_embd", "n_layer", "n_head", "n_positions", "n_inner", "activation_function", "layer_norm_epsilon", "scale_attn_weights", "summary_type"),
}  # fmt: skip
MODEL_TYPES = (
    "llama4", "bert", "t5", "clip", "whisper", "gpt2", "mistral", "mixtral", "gemma3", "mamba", "qwen2_vl", "deepseek_v3", "LLAMA",
    "phi3", "opt", "timm_wrapper", "llama ",
)  # fmt: skip
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "mrope", "x", None, 3, ["yarn"])
ROPE_FIELDS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "rope_theta", "mscale", "type",
)  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention", "x", None, 3)
METHODS = (
    "gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "compressed-tensors", "quanto", "aqlm", "eetq", "hqq", "torchao", "bitnet",
    "fbgemm_fp8", "spqr", "vptq", "x", "", None, 3, [], {}, "../x",
)  # fmt: skip


def set_in(name: str, value: Callable[[Random], Any]) -> Change:
    return lambda random, raw: dumped({**json.loads(raw), name: value(random)})


def rope(random: Random) -> dict[str, Any]:
    kind = random.choice(("rope_type", "rope_type", "type"))
    return {
        kind: random.choice(ROPES),
        **{name: random.choice((*JUNK, 2.0, 8, [1.0] * 4, [1.0] * 3)) for name in random.sample(ROPE_FIELDS, random.randrange(4))},
    }


OWN_CODE: tuple[dict[str, Any], ...] = (
    {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoModel": "own.M"},
    {"AutoConfig": "own.C"},
    {"AutoConfig": ["own.C", None]},
    {"AutoModelForCausalLM": "own.M"},
    {"AutoConfig": "../own.C"},
    {"AutoConfig": "x/y--own.C"},
    {"AutoTokenizer": ["own.T", "own.T"]},
)


def own_code(random: Random, raw: bytes) -> bytes:
    """With a type that is known to all, or by that code alone."""
    told = {"auto_map": random.choice(OWN_CODE)} | ({"model_type": "own"} if random.random() < 0.5 else {})
    return dumped({**json.loads(raw), **told})


def layer_types(random: Random) -> list[Any]:
    return [random.choice(LAYER_TYPES) for _ in range(random.choice((0, 1, 2, 2, 2, 3, 1000)))]


def config(random: Random) -> Damage:
    source = random.choice(("llama", "llama", "qwen3", "mixture", "gpt2"))
    special, file = random.randrange(14), "config.json"
    if special == 0:
        name = random.choice(("rope_scaling", "rope_parameters"))
        return Damage(source, file, name, set_in(name, rope), ("rope",))
    if special == 1:
        return Damage("qwen3", file, "layer_types", set_in("layer_types", layer_types))
    if special == 2:
        return Damage(source, file, "model_type", set_in("model_type", lambda r: r.choice(MODEL_TYPES)), ("architecture",))
    if special == 3:
        return Damage(source, file, "own code", own_code, ("own code",))
    if special == 4:
        sizes = [n for n in FIELDS[source] if n.startswith(("n_", "num", "hidden_size", "inter", "head", "max", "moe"))]
        name, value = random.choice([*sizes, "vocab_size"]), random.choice(SIZES)
        return Damage(source, file, f"{name} = {value!r}", set_in(name, lambda _: value), (name,))
    what, change, words = json_way(random, (*EVERY, *FIELDS[source], *FIELDS[source]))
    return Damage(source, file, what, change, words)


SETTINGS = (
    "desc_act", "sym", "weight_block_size", "load_in_4bit", "load_in_8bit", "config_groups", "format", "version", "modules_to_not_convert", "ignore",
    "dynamic",
)  # fmt: skip


def quantization(random: Random) -> Damage:
    source = random.choice(("llama", "gptq", "gptq"))

    def change(inner: Random, raw: bytes) -> bytes:
        whole = json.loads(raw)
        told = copy.deepcopy(whole.get("quantization_config") or {"quant_method": "gptq", "bits": 4, "group_size": 32})
        for _ in range(inner.randint(1, 2)):
            name = inner.choice((*told, *SETTINGS))
            told[name] = inner.choice(METHODS) if name == "quant_method" else inner.choice(JUNK)
        place = inner.choice(("quantization_config", "quantization_config", "compression_config", "text_config"))
        whole[place] = {"quantization_config": told} if place == "text_config" else inner.choice((told, told, told, *JUNK[:8]))
        return dumped(whole)

    return Damage(source, "config.json", "quantization", change)


GENERATION = (
    "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "temperature", "top_k", "top_p", "do_sample",
    "cache_implementation", "suppress_tokens", "forced_eos_token_id", "transformers_version", "num_beams",
)  # fmt: skip


def generation(random: Random) -> Damage:
    what, change, words = json_way(random, GENERATION)
    return Damage("llama", "generation_config.json", what, change, words)


TOKENIZER = {
    "tokenizer.json": (
        "model",
        "added_tokens",
        "pre_tokenizer",
        "decoder",
        "normalizer",
        "post_processor",
        "truncation",
        "padding",
        "version",
    ),
    "tokenizer_config.json": (
        "tokenizer_class",
        "bos_token",
        "eos_token",
        "pad_token",
        "model_max_length",
        "auto_map",
        "added_tokens_decoder",
    ),
}


def tokenizer(random: Random) -> Damage:
    file = random.choice(list(TOKENIZER))
    what, change, words = json_way(random, TOKENIZER[file])
    return Damage("tokenized", file, what, change, (*words, "tokenizer"))
