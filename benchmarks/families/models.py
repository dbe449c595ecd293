"""Builds tiny random models of all families that the installed transformers knows.

A configuration is shrunk by the names of its fields: widths to 32, two heads groups, a few layers
with one of each kind, windows shorter than the prompts. `HINTS` has what cannot be seen from a
name. Weights are large, and heads are no copies of the embeddings: else these models repeat one
token whatever they read, and no mistake about positions, rows or rollbacks would show.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 67
PAD, START = 0, 1
FIRST_WORD = 3  # prompts are made of ids from here on
SPREAD = 0.3  # standard deviation of every weight matrix

HEADS = 4
KEY_HEADS = r".*(kv_heads|key_value_heads|kv_n_heads|query_groups)"

#: What a field becomes whose name matches, if that makes it smaller; the first match counts.
SHRINK: list[tuple[str, int]] = [
    (r"(src_|tgt_|decoder_|unpadded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r".*max_.*position.*|n_positions|n_ctx|max_seq_len|context_length|model_max_length", 128),
    (r"(attention_|sliding_)?window(_size)?|sliding_window_size|keep_window_size", 6),
    (r"local_attention|attention_chunk_size|local_attention_window_len", 12),
    (r"moe_.*intermediate_size|expert_ffn_hidden_size|moe_.*hidden_size", 24),
    (r".*(intermediate_size(_mlp)?|ffn_dim|d_ff|dff|d_inner|dim_ff|ffn_hidden_size|mlp_dim)", 48),
    (r"feed_forward_size", 48),
    (KEY_HEADS, 2),
    (r"index_n_heads", 32),  # with few, scores tie at 0, and the width of a call breaks the tie
    (r"(.*_)?(head_dim|d_head|d_kv|dim_head|kv_channels|headdim)|attention_head_size", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r".*(heads?|n_head|heads_per_layer)", HEADS),
    (r"rotary_dim", 4),
    (r"(.*_)?lora_rank|hidden_size_per_layer_input|laurel_rank|gated_norm_rank|d_rel", 16),
    (r"adapter_rank|hc_lowrank", 16),
    (r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size|lru_width", 32),
    (r"(word_embed_proj|input_embedding|output_embedding)_?(dim|size)", 32),
    (r"(cross|backbone|encoder|audio|router|projector)_hidden_size", 32),
    (r"(state|ssm_state|d_state)_?(size)?|mamba_d_state", 8),
    (r"(mamba_)?chunk_size|block_size|index_block_size", 8),
    (r"(moe_)?(num_|n_)?(routed_|local_|moe_)*experts|moe_num_experts", 4),
    (r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"encoder_hash_byte_group_vocab", 67),
    (r"index_topk", 8),
    (r"index_topk_blocks", 2),
    (r"(.*_)?(num_layers|num_hidden_layers|n_layers?|num_blocks)", 2),
    (r"(en|de)coder_layers|num_(en|de)coder_layers|conf_num_hidden_layers|depth", 2),
    (r"hidden_dim", 32),
    (r"num_filters", 4),
    (r"image_size", 28),
    (r"num_mel_bins|feature_size|input_feat_per_channel|input_feat_size", 8),
]  # fmt: skip
LAYERS = re.compile(r"(num_|n_)(hidden_)?layers?|num_blocks")
MOST_LAYERS = 4

#: Token ids and habits that every family gets, where its configuration has them.
COMMON: dict[str, Any] = {
    "bos_token_id": START,
    "eos_token_id": 2,  # (some must have one; generation is told of none)
    "pad_token_id": PAD,
    "sep_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "initializer_range": SPREAD,
    "init_std": SPREAD,
    "initializer_factor": 1.0,
    "tie_word_embeddings": False,
    "use_cache": True,
}


class Family(NamedTuple):
    """A model class, and what its configuration is given beyond the rules."""

    name: str
    config: str  # a model type
    model: str  # a class of transformers
    hints: dict[str, Any]


@functools.cache
def families() -> dict[str, Family]:
    """List all families by name, their variants included."""
    found: dict[str, Family] = {}

    def add(name: str, kind: str, model: str, **hints: Any) -> None:
        found[name] = Family(name, kind, model, {**HINTS.get(name, {}), **hints})

    for kind, model in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        add(kind, kind, model)
    for kind, model in (
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items(),
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.items(),
    ):
        if model not in {family.model for family in found.values()}:
            name = f"{kind}:encoded"
            add(f"{name}:speech" if name in found else name, kind, model)
    for name, (of, hints) in VARIANTS.items():
        if of in found:
            add(name, found[of].config, found[of].model, **{**found[of].hints, **hints})
    return found


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

TWO_MODELS = {"encoder": {"is_decoder": False}, "decoder": {"add_cross_attention": True}}
WINDOWED = ["sliding_attention", "full_attention"]
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

#: What the rules cannot see.
HINTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "layer_types": WINDOWED, "max_window_layers": 0,
    },
    "dots3_note_text": {"sliding_window": 6, **{f"swa_{k}": v for k, v in LATENT.items()}},
    "encoder-decoder:encoded": TWO_MODELS,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 8},
    "hrm_text": {"num_layers_per_stack": 1},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"rope_parameters": ROPE, "head_dim": 8},
    "nemotron": {
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "num_key_value_heads": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 67, "ple_layer_ids": [1],
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "speech-encoder-decoder:encoded": TWO_MODELS,
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

#: Beside the families themselves: configurations that change what a cache or a position is.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon:alibi": ("falcon", {"alibi": True}),
    "falcon:grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode:heads": ("gpt_bigcode", {"multi_query": False}),
    "mistral:no window": ("mistral", {"sliding_window": None}),
    "qwen2:window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3:window": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "llama:dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama:yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "laguna:window": ("laguna", {"layer_types": WINDOWED}),
    "mellum:window": ("mellum", {"layer_types": WINDOWED}),
    "mixtral:window": ("mixtral", {"sliding_window": 6}),
    "phi3:window": ("phi3", {"sliding_window": 6}),
    "starcoder2:window": ("starcoder2", {"sliding_window": 6}),
    "opt:projected": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}  # fmt: skip


# --- configurations -------------------------------------------------------------------------------


def shrunk(given: Any, hints: dict[str, Any]) -> Any:
    """Build a small configuration of the class of ``given``, which has that class's defaults."""
    kind = type(given)
    fields = {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    values = {name: _value(given, fields[name]) for name in fields} or dict(given.to_dict())
    subordinate = set(getattr(given, "sub_configs", {}))
    picked = _picked_layers(values)
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        derived = name in fields and fields[name].default is None
        if name in COMMON:
            chosen[name] = COMMON[name]
        elif name in subordinate:
            if value is not None:
                chosen[name] = shrunk(value, hints.get(name, {}))
        elif isinstance(value, list) and picked and len(value) == _layers(values):
            chosen[name] = [_small(name, value[i]) for i in picked]
        elif isinstance(value, int) and not isinstance(value, bool) and not derived:
            small = _small(name, value)
            if re.fullmatch(KEY_HEADS, name) and value == values.get("num_attention_heads"):
                small = HEADS  # every head has keys of its own
            if picked and LAYERS.fullmatch(name) and value == _layers(values):
                small = len(picked)
            if small != value:
                chosen[name] = small
    if "is_decoder" in values and not getattr(given, "is_encoder_decoder", False):
        chosen["is_decoder"] = True
    chosen.update({name: value for name, value in hints.items() if name not in subordinate})
    return kind(**chosen)


def _value(config: Any, field: Any) -> Any:
    """Return a field's value; where layers differ in it, the class's own default."""
    try:
        return getattr(config, field.name, None)
    except Exception:  # transformers has an error of its own here
        return field.default


def _small(name: str, value: Any) -> Any:
    """Shrink a number by its field's name."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in SHRINK:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _layers(values: dict[str, Any]) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"):
        if isinstance(values.get(name), int):
            return int(values[name])
    return None


def _picked_layers(values: dict[str, Any]) -> list[int]:
    """Choose layers to keep: one of each kind that the lists of a value a layer tell apart."""
    layers = _layers(values)
    lists = [v for v in values.values() if isinstance(v, list) and layers and len(v) == layers > 1]
    if not lists:
        return []
    kinds: dict[str, int] = {}
    for i in range(layers or 0):
        kinds.setdefault(repr([v[i] for v in lists if not isinstance(v[i], float)]), i)
    picked = sorted(kinds.values())[:MOST_LAYERS]
    for i in range(layers or 0):
        if len(picked) < 2 and i not in picked:
            picked.append(i)
    return sorted(picked)


# --- models ---------------------------------------------------------------------------------------


class NotBuilt(Exception):
    """Transformers could not make a small model of this family."""


def build(family: Family, seed: int = 0) -> nn.Module:
    """Return a random model of a family, in evaluation mode and, where it runs, in float64."""
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model_class = getattr(transformers, family.model)
            kind = CONFIG_MAPPING[family.config]
            model = model_class(_config(kind, model_class, family))
    except Exception as error:  # whatever the family raises, it is not this library's doing
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:200]}") from error
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # the others have no float64
    randomize(model, SPREAD * (1 + seed / 2))
    model.generation_config = GenerationConfig(
        bos_token_id=START, eos_token_id=None, pad_token_id=PAD, decoder_start_token_id=START
    )
    return model.eval()


def _config(kind: Any, model_class: Any, family: Family) -> Any:
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not issubclass(kind, wanted):  # the text part of a larger one
        kind = wanted
    return shrunk(kind(), family.hints)


@torch.no_grad()
def randomize(model: nn.Module, spread: float) -> None:
    """Make all weights matter: matrices that were drawn too small are drawn again, heads untied."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    tied = getattr(head, "weight", None) is getattr(embedding, "weight", ())
    if tied:
        head.weight = nn.Parameter(torch.randn_like(head.weight) * spread)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if not parameter.isfinite().all():  # never initialized
            parameter.normal_(0, spread)
        elif parameter.dim() > 1 and "A_log" not in name and parameter.std() < 0.9 * spread:
            parameter.normal_(0, spread)
        elif parameter.dim() <= 1:  # norms at one and gates at zero would hide what they do
            parameter += 0.1 * torch.randn_like(parameter)
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if weight is not None and len(weight) == VOCABULARY:
        weight[PAD] = 0  # a text that holds the padding id means nothing to models that look for it
        if bias is not None:
            bias[PAD] = -10


@torch.no_grad()
def perturbed(model: nn.Module, noise: float, seed: int) -> nn.Module:
    """Return a copy with noise, of this many standard deviations, on every weight."""
    generator = torch.Generator().manual_seed(seed)
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        if parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += noise * drawn.to(parameter.dtype)
    return draft


# --- inputs ---------------------------------------------------------------------------------------


def words(lengths: Iterable[int], seed: int) -> list[list[int]]:
    """Return one random text for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(FIRST_WORD, VOCABULARY, (n,), generator=generator).tolist() for n in lengths
    ]


def padded(texts: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Return texts as ``[B, n]``, and their mask."""
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), PAD)
    mask = torch.zeros(len(texts), width, dtype=torch.int64)
    for b, text in enumerate(texts):
        where = slice(width - len(text), width) if left else slice(0, len(text))
        ids[b, where], mask[b, where] = torch.tensor(text), 1
    return ids, mask


def sounds(target: Any, family: Family, seed: int) -> list[dict[str, Tensor]]:
    """Return three rows of what an encoder of audio reads, all of one length."""
    generator = torch.Generator().manual_seed(seed)
    shape = SOUNDS.get(family.config, _spectrum)(target.config)
    name = target.get_encoder().main_input_name
    return [
        {name: torch.randn((1, *shape), generator=generator, dtype=torch.float64)} for _ in range(3)
    ]


def _spectrum(config: Any) -> tuple[int, ...]:
    """Return Whisper's shape: two frames for each of the encoder's positions."""
    return config.num_mel_bins, 2 * config.max_source_positions


#: Shape of one row for encoders that read something else: frames of features, or samples.
SOUNDS: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "canary": lambda config: (64, config.encoder_config.num_mel_bins),
    "cohere_asr": lambda config: (64, config.encoder_config.num_mel_bins),
    "moonshine": lambda config: (2000,),
    "seamless_m4t": lambda config: (24, config.feature_projection_input_dim),
    "seamless_m4t_v2": lambda config: (24, config.feature_projection_input_dim),
    "speech-encoder-decoder": lambda config: (4000,),
    "speech_to_text": lambda config: (24, config.input_feat_per_channel),
    "speecht5": lambda config: (4000,),
}
