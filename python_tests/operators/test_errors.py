"""Every refusal: ValueError from operators, TypeError from the Python functions, and what they say.

A message names the argument, the shape in symbols, and what came.
"""

from __future__ import annotations

import re

import pytest
import torch
from conftest import CPU, f64

import specdec_ext

B, G, V = 2, 3, 5


def ints(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def floats(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def words(*shape):
    return ints(*shape, dtype=torch.int32)


def arguments(op):
    """Arguments that the operator takes."""
    if op == "verify":
        return dict(
            target_logits=floats(B, G + 1, V),
            draft_tokens=ints(B, G),
            draft_logits=floats(B, G, V),
            uniforms=floats(B, G + 1, dtype=torch.float64),
        )
    if op == "sample":
        return dict(logits=floats(B, V), uniforms=floats(B, dtype=torch.float64))
    if op == "row_law":
        return dict(logits=floats(B, V))
    if op == "acceptance":
        return dict(target_logits=floats(B, V), draft_logits=floats(B, V))
    if op == "tree_mask":
        return dict(parents=-torch.ones(B, 3, dtype=torch.int64))
    if op == "compact_kv":
        small = dict(path=ints(B, 3), num_accepted=ints(B), seq_lens=ints(B))
        return dict(k_cache=floats(B, 9, 2, 4), v_cache=floats(B, 9, 2, 4), **small)
    if op == "tree_attention":
        caches = dict(k_cache=floats(B, 9, 2, 4), v_cache=floats(B, 9, 2, 4))
        return dict(q=floats(B, 3, 4, 4), **caches, ancestors=ints(B, 3, 1), seq_lens=ints(B))
    return dict(seeds=ints(B), positions=ints(B), n=4)


def too_wide(*shape):
    """Rows of more entries than a draw in integers can sum; no memory is touched."""
    return torch.empty(*shape, 2**24, dtype=torch.bfloat16)


def strided(*shape):
    return floats(*shape, 2)[..., 0]


SEEDS = dict(seeds=ints(B), positions=ints(B), uniforms=None)
ROWS = dict(target_rows=ints(B, G + 1), target_logits=floats(7, V))
DRAFT_ROWS = dict(draft_rows=ints(B, G), draft_logits=floats(7, V))
PAGED = dict(block_table=ints(B, 3))
PROBS = dict(draft_logits=None, draft_probs=floats(B, G, V))

# (operator, changed arguments, everything that the message must contain, between bars)
VALUE_ERRORS = [
    # target_logits
    ("verify", dict(target_logits=floats(B, G, V)),
     "target_logits | [B, G+1, V] | [2, 3, 5] float32"),
    ("verify", dict(target_logits=floats(B + 1, G + 1, V)),
     "target_logits | [B, G+1, V] | [3, 4, 5]"),
    ("verify", dict(target_logits=floats(B * (G + 1), V)), "target_logits | [B, G+1, V] | [8, 5]"),
    ("verify", dict(target_logits=floats(B, G + 1, V, dtype=torch.float64)),
     "target_logits | float32, bfloat16 or float16 | float64"),
    ("verify", dict(target_logits=ints(B, G + 1, V)),
     "target_logits | float32, bfloat16 or float16 | int64"),
    ("verify", dict(target_logits=floats(B, G + 1, 0)),
     "target_logits | at least one vocabulary entry | [2, 4, 0]"),
    ("verify", dict(target_logits=strided(B, G + 1, V)), "target_logits | unit stride | stride 2"),
    # draft_tokens
    ("verify", dict(draft_tokens=ints(3, dtype=torch.int64)),
     "draft_tokens | [B, G] int32 or int64 | [3] int64"),
    ("verify", dict(draft_tokens=floats(B, G)),
     "draft_tokens | [B, G] int32 or int64 | [2, 3] float32"),
    ("verify", dict(draft_tokens=ints(B, G, dtype=torch.int16)),
     "draft_tokens | int32 or int64 | int16"),
    ("verify", dict(draft_tokens=ints(B, G, 1)), "draft_tokens | [B, G] | [2, 3, 1]"),
    # the draft's law
    ("verify", dict(draft_logits=floats(B, G + 1, V)), "draft_logits | [B, G, Vd] | [2, 4, 5]"),
    ("verify", dict(draft_logits=floats(B, G, V, dtype=torch.float64)), "draft_logits | float64"),
    ("verify", dict(target_logits=too_wide(B, G + 1)), "target_logits | at most 16777215"),
    ("verify", dict(draft_logits=too_wide(B, G)), "draft_logits | at most 16777215"),
    ("verify", dict(draft_logits=floats(B, G, 0)), "draft_logits | at least one vocabulary entry"),
    ("verify", dict(draft_logits=strided(B, G, V)), "draft_logits | unit stride | stride 2"),
    ("verify", dict(draft_probs=floats(B, G, V)), "draft_logits | draft_probs | both"),
    ("verify", {**PROBS, "draft_probs": floats(B, V)}, "draft_probs | [B, G, Vd] | [2, 5]"),
    ("verify", {**PROBS, "draft_probs": ints(B, G, V)},
     "draft_probs | float32, bfloat16 or float16 | int64"),
    ("verify", {**PROBS, "draft_temperature": floats(B)},
     "draft_temperature | draft_logits | draft_probs"),
    ("verify", {**PROBS, "draft_top_k": ints(B)}, "draft_top_k | draft_probs"),
    ("verify", {**PROBS, "draft_top_p": floats(B)}, "draft_top_p | draft_probs"),
    ("verify", {**PROBS, "draft_min_p": floats(B)}, "draft_min_p | draft_probs"),
    ("verify", dict(draft_logits=None, draft_temperature=floats(B)),
     "draft_ | draft_logits or draft_probs | neither"),
    ("verify", dict(draft_logits=None, draft_rows=ints(B, G)),
     "draft_rows | draft_logits or draft_probs | neither"),
    # kinds, lengths, rows
    ("verify", dict(draft_kinds=ints(B, G)), "draft_kinds | [B, G] | int8 | int64"),
    ("verify", dict(draft_kinds=ints(B, G + 1, dtype=torch.int8)),
     "draft_kinds | [B, G] | [2, 4] int8"),
    ("verify", dict(draft_lengths=ints(B + 1)), "draft_lengths | [B] | [3] int64"),
    ("verify", dict(draft_lengths=floats(B)), "draft_lengths | [B] | int32 or int64 | float32"),
    ("verify", {**ROWS, "target_rows": ints(B, G)}, "target_rows | [B, G+1] | [2, 3] int64"),
    ("verify", {**ROWS, "target_rows": floats(B, G + 1)}, "target_rows | int32 or int64 | float32"),
    ("verify", dict(target_rows=ints(B, G + 1)),
     "target_logits | [R, V] | target_rows | [2, 4, 5]"),
    ("verify", {**DRAFT_ROWS, "draft_rows": ints(B, G + 1)}, "draft_rows | [B, G] | [2, 4] int64"),
    ("verify", dict(draft_rows=ints(B, G)), "draft_logits | Vd] | draft_rows | [2, 3, 5]"),
    # randomness
    ("verify", dict(uniforms=None), "uniforms | seeds | positions | neither"),
    ("verify", {**SEEDS, "uniforms": floats(B, G + 1, dtype=torch.float64)},
     "uniforms | seeds | both"),
    ("verify", {**SEEDS, "positions": None}, "seeds | positions | only seeds"),
    ("verify", {**SEEDS, "seeds": None}, "seeds | positions | only positions"),
    ("verify", {**SEEDS, "seeds": ints(B, dtype=torch.int32)}, "seeds | [B] | int64 | int32"),
    ("verify", {**SEEDS, "seeds": ints(B + 1)}, "seeds | [B] | [3] int64"),
    ("verify", {**SEEDS, "positions": floats(B)}, "positions | [B] | int64 | float32"),
    ("verify", {**SEEDS, "positions": ints(B, 1)}, "positions | [B] | [2, 1] int64"),
    ("verify", dict(uniforms=floats(B, G + 1)), "uniforms | [B, G+1] | float64 | [2, 4] float32"),
    ("verify", dict(uniforms=floats(B, G, dtype=torch.float64)),
     "uniforms | [B, G+1] | [2, 3] float64"),
    ("verify", dict(stream=-1), "stream | [0, 256) | -1"),
    ("verify", dict(stream=256), "stream | [0, 256) | 256"),
    # parameters
    ("verify", dict(temperature=floats(B + 1)), "temperature | [B] | float32 | [3]"),
    ("verify", dict(temperature=floats(B, dtype=torch.float64)),
     "temperature | [B] | float32 | float64"),
    ("verify", dict(top_k=floats(B)), "top_k | [B] | int32 or int64 | float32"),
    ("verify", dict(top_p=ints(B)), "top_p | [B] | float32 | int64"),
    ("verify", dict(min_p=floats(B, 1)), "min_p | [B] | [2, 1]"),
    ("verify", dict(draft_temperature=floats(1)), "draft_temperature | [B] | [1]"),
    ("verify", dict(draft_top_k=floats(B)), "draft_top_k | int32 or int64 | float32"),
    ("verify", dict(draft_top_p=floats(B + 1)), "draft_top_p | [B] | [3]"),
    ("verify", dict(draft_min_p=ints(B)), "draft_min_p | float32 | int64"),
    # the rule and its numbers, checked whatever the rule
    ("verify", dict(rule="magic"),
     "rule | block | token | greedy | lenient | top_beta | typical | coupled | magic"),
    ("verify", dict(rule=""), "rule | block"),
    ("verify", dict(rule="coupled"), 'rule "coupled" | seeds | positions | uniforms'),
    ("verify", {**SEEDS, "rule": "coupled", "positions": None}, "seeds | positions | only seeds"),
    # masks and maps
    ("verify", dict(allowed_mask=words(B, G, 1)),
     "allowed_mask | [B, G+1, ceil(V/32)] = [2, 4, 1] int32 | got [2, 3, 1] int32"),
    ("verify", dict(allowed_mask=words(B, G + 1, 2)),
     "allowed_mask | [B, G+1, ceil(V/32)] | [2, 4, 2]"),
    ("verify", dict(allowed_mask=words(B, 1)), "allowed_mask | [B, G+1, ceil(V/32)] | [2, 1]"),
    ("verify", dict(allowed_mask=ints(B, G + 1, 1)), "allowed_mask | int32 | int64"),
    ("verify", dict(allowed_mask=ints(B, G + 1, V, dtype=torch.bool)), "allowed_mask | bool"),
    ("verify", dict(target_logits=floats(B, G + 1, 40), allowed_mask=words(B, G + 1, 2, 2)[..., 0]),
     "allowed_mask | unit stride | stride 2"),
    ("verify", dict(target_logits=floats(B, G + 1, 40), allowed_mask=words(B, G + 1, 1)),
     "allowed_mask | [2, 4, 1]"),
    ("verify", dict(draft_token_ids=ints(V + 1)), "draft_token_ids | [Vd] | [6] int64"),
    ("verify", dict(draft_token_ids=ints(1, V)), "draft_token_ids | [Vd] | [1, 5]"),
    ("verify", dict(draft_token_ids=floats(V)), "draft_token_ids | int32 or int64 | float32"),
    ("verify", dict(draft_token_ids=ints(V, dtype=torch.int16)), "draft_token_ids | int16"),
    ("verify", dict(draft_logits=None, draft_token_ids=ints(V)),
     "draft_token_ids | draft_logits or draft_probs | neither"),
    ("verify", dict(draft_logits=floats(B, G, V + 1), draft_token_ids=ints(V + 1)),
     "draft_token_ids | Vd = 6 > V = 5"),
    ("verify", dict(lenience=0.0), "lenience | (0, 1] | 0"),
    ("verify", dict(lenience=1.5), "lenience | (0, 1] | 1.5"),
    ("verify", dict(lenience=float("nan")), "lenience | nan"),
    ("verify", dict(beta=0), "beta | at least 1 | 0"),
    ("verify", dict(tau=-0.5), "tau | >= 0 | -0.5"),
    ("verify", dict(tau=float("inf")), "tau | finite | inf"),
    ("verify", dict(epsilon=0.0), "epsilon | > 0 | 0"),
    ("verify", dict(epsilon=float("inf")), "epsilon | finite | inf"),
    ("verify", dict(delta=-1.0), "delta | > 0 | -1"),
    ("verify", dict(delta=float("nan")), "delta | nan"),
    # sample
    ("sample", dict(logits=floats(B, 1, V)), "logits | [B, V] | [2, 1, 5]"),
    ("sample", dict(logits=floats(B, V, dtype=torch.float64)), "logits | float64"),
    ("sample", dict(logits=floats(B, 0)), "logits | at least one vocabulary entry"),
    ("sample", dict(logits=too_wide(B)), "logits | at most 16777215 vocabulary entries | 16777216"),
    ("sample", dict(logits=strided(B, V)), "logits | unit stride"),
    ("sample", dict(uniforms=floats(B)), "uniforms | [B] | float64 | float32"),
    ("sample", dict(uniforms=floats(B, 1, dtype=torch.float64)), "uniforms | [B] | [2, 1]"),
    ("sample", dict(uniforms=None), "uniforms | neither"),
    ("sample", dict(seeds=ints(B), positions=ints(B)), "uniforms | both"),
    ("sample", dict(uniforms=None, seeds=ints(B)), "positions | only seeds"),
    ("sample", dict(domain=0), "domain | 1 (RESIDUAL) | 2 (DRAFT) | 0"),
    ("sample", dict(domain=4), "domain | 1 (RESIDUAL) | 2 (DRAFT) | 3 (COUPLED) | 4"),
    ("sample", dict(domain=3), "domain 3 | seeds | positions | uniforms"),
    ("sample", dict(allowed_mask=words(B, 2)),
     "allowed_mask | [B, ceil(V/32)] = [2, 1] int32 | [2, 2]"),
    ("sample", dict(allowed_mask=words(B + 1, 1)), "allowed_mask | [3, 1]"),
    ("sample", dict(allowed_mask=words(B, 1, 1)), "allowed_mask | [2, 1, 1]"),
    ("sample", dict(allowed_mask=floats(B, 1)), "allowed_mask | int32 | float32"),
    ("sample", dict(draft_token_ids=ints(V), allowed_mask=words(B, 0)),
     "allowed_mask | at least one word | [2, 0]"),
    ("sample", dict(draft_token_ids=ints(V), allowed_mask=words(B, 2, 2)[..., 0]),
     "allowed_mask | unit stride | stride 2"),
    ("sample", dict(draft_token_ids=ints(V - 1)), "draft_token_ids | [4] int64"),
    ("sample", dict(draft_token_ids=floats(V)), "draft_token_ids | int32 or int64 | float32"),
    ("sample", dict(draft_index=-1), "draft_index | 65536 | -1"),
    ("sample", dict(draft_index=65536), "draft_index | 65536"),
    ("sample", dict(stream=256), "stream | [0, 256)"),
    ("sample", dict(temperature=floats(B + 1)), "temperature | [B] | [3]"),
    ("sample", dict(top_k=floats(B)), "top_k | int32 or int64"),
    # row_law
    ("row_law", dict(logits=floats(V)), "logits | [R, V] | [5]"),
    ("row_law", dict(logits=ints(B, V)), "logits | float32, bfloat16 or float16 | int64"),
    ("row_law", dict(logits=too_wide(B)), "logits | at most 16777215 vocabulary entries"),
    ("row_law", dict(logits=strided(B, V)), "logits | unit stride"),
    ("row_law", dict(top_p=floats(B, dtype=torch.float64)), "top_p | float32 | float64"),
    ("row_law", dict(min_p=floats(1)), "min_p | [1]"),
    ("row_law", dict(allowed_mask=words(B, 2)),
     "allowed_mask | [R, ceil(V/32)] = [2, 1] int32 | [2, 2]"),
    ("row_law", dict(allowed_mask=ints(B, 1)), "allowed_mask | int32 | int64"),
    # acceptance
    ("acceptance", dict(target_logits=floats(B, 1, V)), "target_logits | [R, V] | [2, 1, 5]"),
    ("acceptance", dict(draft_logits=floats(B + 1, V)), "draft_logits | [R, Vd] | [3, 5]"),
    ("acceptance", dict(draft_logits=ints(B, V)), "draft_logits | int64"),
    ("acceptance", dict(draft_top_k=floats(B)), "draft_top_k | int32 or int64"),
    ("acceptance", dict(temperature=floats(B + 1)), "temperature | [3]"),
    ("acceptance", dict(allowed_mask=words(B, 2)), "allowed_mask | [R, ceil(V/32)] | [2, 2]"),
    ("acceptance", dict(draft_token_ids=ints(V + 1)), "draft_token_ids | [Vd] | [6]"),
    ("acceptance", dict(draft_logits=floats(B, V + 1), draft_token_ids=ints(V + 1)),
     "draft_token_ids | Vd = 6 > V = 5"),
    # uniforms
    ("uniforms", dict(seeds=floats(B)), "seeds | int64 | float32"),
    ("uniforms", dict(seeds=ints(B, 1)), "seeds | [B] | [2, 1]"),
    ("uniforms", dict(positions=ints(B + 1)), "positions | [B] | [3]"),
    ("uniforms", dict(n=0), "n  | 0"),
    ("uniforms", dict(n=70_000), "n  | 70000"),
    ("uniforms", dict(stream=256), "stream | [0, 256)"),
    # tree_mask
    ("tree_mask", dict(parents=ints(3)), "parents | [B, N] int32 or int64 | [3] int64"),
    ("tree_mask", dict(parents=floats(B, 3)), "parents | int32 or int64 | float32"),
    ("tree_mask", dict(parents=ints(B, 0)), "parents | [1, 1025) | 0"),
    ("tree_mask", dict(parents=ints(B, 1025)), "parents | [1, 1025) | 1025"),
    # compact_kv
    ("compact_kv", dict(k_cache=floats(B, 9, 8)),
     "k_cache | [B, L, H, D] or [Y, B, L, H, D] | [2, 9, 8]"),
    ("compact_kv", dict(k_cache=floats(B, 9, 2, 4, dtype=torch.complex128)),
     "k_cache | 1, 2, 4 or 8 bytes | got"),
    ("compact_kv", dict(v_cache=floats(B, 8, 2, 4)),
     "v_cache | B and L | [2, 9, 2, 4] | [2, 8, 2, 4]"),
    ("compact_kv", dict(v_cache=floats(3, B, 9, 2, 4)), "v_cache | [3, 2, 9, 2, 4]"),
    ("compact_kv", dict(k_cache=floats(3, B, 9, 2, 4)), "v_cache | Y, B and L"),
    ("compact_kv", dict(k_cache=floats(B, 9, 1, 4).expand(-1, -1, 2, -1)),
     "k_cache | overlap | stride 0 | 2 entries of dimension 2"),
    ("compact_kv", dict(v_cache=floats(1, 9, 2, 4).expand(B, -1, -1, -1)), "v_cache | overlap"),
    ("compact_kv", dict(path=ints(B + 1, 3)), "path | [B, N] | [3, 3]"),
    ("compact_kv", dict(path=floats(B, 3)), "path | int32 or int64 | float32"),
    ("compact_kv", dict(num_accepted=ints(B, 1)), "num_accepted | [B] | [2, 1]"),
    ("compact_kv", dict(seq_lens=floats(B)), "seq_lens | int32 or int64 | float32"),
]  # fmt: skip

# Of the operator that has no kernels in C++.
ATTENTION_ERRORS = [
    ("tree_attention", dict(q=floats(B, 3, 4)), "q | [B, N, H, D] | [2, 3, 4]"),
    ("tree_attention", dict(q=floats(B, 3, 4, 4, dtype=torch.float64)),
     "q | float32, bfloat16 or float16 | float64"),
    ("tree_attention", dict(q=strided(B, 3, 4, 4)), "q | unit stride | stride 2"),
    ("tree_attention", dict(q=floats(B, 0, 4, 4)), "q | [1, 1025) | 0"),
    ("tree_attention", dict(q=floats(B, 3, 4, 577)), "q | D | [1, 577) | 577"),
    ("tree_attention", dict(v_cache=floats(B, 9, 2, 513)), "v_cache | Dv | [1, 513) | 513"),
    ("tree_attention", dict(v_cache=floats(B, 9, 2, 0)), "v_cache | Dv | [1, 513) | 0"),
    ("tree_attention", dict(k_cache=floats(B, 9, 2, 4, dtype=torch.float8_e5m2)),
     "one dtype | [2, 9, 2, 4] float8_e5m2 and [2, 9, 2, 4] float32"),
    ("tree_attention", dict(k_cache=floats(B, 9, 2, 4, dtype=torch.float8_e4m3fnuz)),
     "k_cache | float32, bfloat16, float16, float8_e4m3fn or float8_e5m2"),
    ("tree_attention", dict(q=floats(B, 3, 4, 4, dtype=torch.float8_e4m3fn)),
     "q | float32, bfloat16 or float16 | float8_e4m3fn"),
    ("tree_attention", dict(k_scale=floats(3)), "k_scale | [Hkv] = [2], [1] or [] float32 | [3]"),
    ("tree_attention", dict(v_scale=floats(1, dtype=torch.float64)), "v_scale | float32 | float64"),
    ("tree_attention", dict(v_scale=floats(1, 2)), "v_scale | [Hkv] = [2] | [1, 2]"),
    ("tree_attention", dict(q=floats(B, 3, 3, 4)), "H | multiple of Hkv | 3 and 2"),
    ("tree_attention", dict(k_cache=floats(B, 9, 2, 5)),
     "k_cache | [B, L, Hkv, D] | [2, 9, 2, 5]"),
    ("tree_attention", dict(k_cache=strided(B, 9, 2, 4)), "k_cache | unit stride"),
    ("tree_attention", dict(k_cache=floats(B, 9, 2, 4, dtype=torch.bfloat16)),
     "one dtype | that of q | bfloat16"),
    ("tree_attention", dict(v_cache=floats(B, 8, 2, 4)),
     "v_cache | [B, L, Hkv, Dv] | [2, 8, 2, 4]"),
    ("tree_attention", dict(ancestors=ints(B, 3, 2)),
     "ancestors | [B, N, ceil(N/64)] | [2, 3, 2]"),
    ("tree_attention", dict(ancestors=ints(B, 3, 1, dtype=torch.int32)),
     "ancestors | int64 | int32"),
    ("tree_attention", dict(seq_lens=ints(1)), "seq_lens | [B] | [1]"),
    ("tree_attention", dict(scale=float("inf")), "scale | finite"),
    ("tree_attention", dict(soft_cap=-1.0), "soft_cap | >= 0 | -1"),
    ("tree_attention", dict(soft_cap=float("nan")), "soft_cap | finite"),
    ("tree_attention", dict(window=-1), "window | [0, 2147483648) | -1"),
    ("tree_attention", dict(window=2**31), "window | [0, 2147483648) | 2147483648"),
    ("tree_attention", dict(PAGED, block_table=ints(B + 1, 3)),
     "block_table | [B, P] | int32 or int64 | [3, 3]"),
    ("tree_attention", dict(PAGED, block_table=floats(B, 3)), "block_table | int32 or int64"),
    ("tree_attention", dict(PAGED, k_cache=floats(B, 9, 2, 5)),
     "k_cache | [num_blocks, block_size, Hkv, D] | [2, 9, 2, 5]"),
    ("tree_attention", dict(PAGED, v_cache=floats(3, 9, 2, 4)),
     "v_cache | [num_blocks, block_size, Hkv, Dv] | [3, 9, 2, 4]"),
    ("tree_attention", dict(PAGED, k_cache=floats(B, 0, 2, 4), v_cache=floats(B, 0, 2, 4)),
     "k_cache | block_size of at least 1 | [2, 0, 2, 4]"),
]  # fmt: skip


def describe(entry):
    op, changes, _ = entry
    shown = [
        f"{k}={list(v.shape)}:{str(v.dtype)[6:]}" if isinstance(v, torch.Tensor) else f"{k}={v}"
        for k, v in changes.items()
    ]
    return f"{op}-{'-'.join(shown)}"


@pytest.mark.parametrize("entry", VALUE_ERRORS, ids=describe)
def test_value_errors(operator, entry):
    op, changes, words = entry
    call = {k: v for k, v in {**arguments(op), **changes}.items() if v is not None}
    getattr(operator, op)(**{k: v for k, v in arguments(op).items() if v is not None})  # is legal
    with pytest.raises(ValueError) as raised:
        getattr(operator, op)(**call)
    message = str(raised.value)
    assert message.startswith(f"{op}: ")
    assert all(word in message for word in words.split(" | ")), message
    assert re.search(r"got |must ", message)


@pytest.mark.parametrize("entry", ATTENTION_ERRORS, ids=describe)
def test_value_errors_of_attention(entry):
    test_value_errors(CPU, entry)


@pytest.mark.parametrize("entry", VALUE_ERRORS + ATTENTION_ERRORS, ids=describe)
def test_value_errors_through_the_functions(entry):
    # The Python functions pass tensors on untouched: the same ValueErrors, except where they supply
    # the randomness themselves.
    op, changes, _ = entry
    call = {k: v for k, v in {**arguments(op), **changes}.items() if v is not None}
    if changes in (dict(uniforms=None), {**SEEDS, "seeds": None}):
        assert getattr(specdec_ext, op)(**call) is not None
        return
    with pytest.raises(ValueError, match=f"^{op}: "):
        getattr(specdec_ext, op)(**call)


def test_message_in_full(operator):
    with pytest.raises(ValueError) as raised:
        operator.verify(**{**arguments("verify"), "draft_tokens": floats(3)})
    expected = "verify: draft_tokens must be [B, G] int32 or int64, got [3] float32"
    assert str(raised.value) == expected


def test_more_columns_than_counters(operator):
    gamma = 65_535
    with pytest.raises(ValueError, match="65534 columns, got .*65535"):
        operator.verify(floats(1, gamma + 1, 1), ints(1, gamma), rule="greedy")
    gamma = 65_534
    result = operator.verify(floats(1, gamma + 1, 1), ints(1, gamma), rule="greedy")
    assert result.num_accepted.tolist() == [gamma]


@pytest.mark.parametrize("rule", ["greedy", "top_beta"])
def test_rules_that_need_no_randomness(operator, rule):
    call = arguments("verify")
    del call["uniforms"]
    assert operator.verify(**call, rule=rule).status.tolist() == [0, 0]
    # What is given is still checked.
    with pytest.raises(ValueError, match="uniforms must be"):
        operator.verify(**call, rule=rule, uniforms=floats(B, G + 1))


# ---- TypeErrors of the Python functions ---------------------------------------------------------

TYPE_ERRORS = [
    ("verify", dict(target_logits=[[0.0]]), "target_logits must be a Tensor, got list"),
    ("verify", dict(draft_tokens=None), "draft_tokens must be a Tensor, got NoneType"),
    ("verify", dict(draft_logits="x"), "draft_logits must be a Tensor or None, got str"),
    ("verify", dict(draft_probs=1.0), "draft_probs must be a Tensor or None, got float"),
    ("verify", dict(draft_kinds=[1]), "draft_kinds must be a Tensor or None, got list"),
    ("verify", dict(draft_lengths=3), "draft_lengths must be a Tensor or None, got int"),
    ("verify", dict(target_rows=(0,)), "target_rows must be a Tensor or None, got tuple"),
    ("verify", dict(draft_rows={}), "draft_rows must be a Tensor or None, got dict"),
    ("verify", dict(uniforms=0.5), "uniforms must be a Tensor or None, got float"),
    ("verify", dict(seeds=7, uniforms=None), "seeds must be a Tensor or None, got int"),
    ("verify", dict(positions=[0]), "positions must be a Tensor or None, got list"),
    ("verify", dict(temperature="hot"), "temperature must be .*, got str"),
    ("verify", dict(top_k=1.5), "top_k must be .*, got float"),
    ("verify", dict(top_p=["x"]), "top_p must be .*, got list"),
    ("verify", dict(min_p=True), "min_p must be .*, got bool"),
    ("verify", dict(draft_temperature=b"1"), "draft_temperature must be .*, got bytes"),
    ("verify", dict(rule=1), "rule must be a str, got int"),
    ("verify", dict(stream=1.0), "stream must be an int, got float"),
    ("verify", dict(beta=True), "beta must be an int, got bool"),
    ("verify", dict(lenience="1"), "lenience must be a number, got str"),
    ("verify", dict(full_accept_probs=1), "full_accept_probs must be a bool, got int"),
    ("verify", dict(raw_logprobs="no"), "raw_logprobs must be a bool, got str"),
    ("verify", dict(allowed_mask=[[1]]), "allowed_mask must be a Tensor or None, got list"),
    ("verify", dict(draft_token_ids=(1, 2)), "draft_token_ids must be a Tensor or None, got tuple"),
    ("verify", dict(uniforms=None, generator=3), "generator must be a torch.Generator or None"),
    ("sample", dict(logits=None), "logits must be a Tensor, got NoneType"),
    ("sample", dict(uniforms=[0.5]), "uniforms must be a Tensor or None, got list"),
    ("sample", dict(draft_index=None), "draft_index must be an int, got NoneType"),
    ("sample", dict(domain="x"), "domain must be an int, got str"),
    ("sample", dict(allowed_mask=7), "allowed_mask must be a Tensor or None, got int"),
    ("sample", dict(draft_token_ids=[3]), "draft_token_ids must be a Tensor or None, got list"),
    ("row_law", dict(allowed_mask="all"), "allowed_mask must be a Tensor or None, got str"),
    ("acceptance", dict(draft_token_ids=[3]), "draft_token_ids must be a Tensor or None, got list"),
    ("row_law", dict(logits=1), "logits must be a Tensor, got int"),
    ("row_law", dict(top_k=object()), "top_k must be .*, got object"),
    ("acceptance", dict(draft_logits=None), "draft_logits must be a Tensor, got NoneType"),
    ("uniforms", dict(n=2.0), "n must be an int, got float"),
    ("uniforms", dict(seeds=5), "seeds must be a Tensor, got int"),
    ("tree_mask", dict(parents=[-1]), "parents must be a Tensor, got list"),
    ("compact_kv", dict(seq_lens=3), "seq_lens must be a Tensor, got int"),
    ("tree_attention", dict(ancestors=None), "ancestors must be a Tensor, got NoneType"),
    ("tree_attention", dict(scale="1"), "scale must be a number or None, got str"),
    ("tree_attention", dict(soft_cap=True), "soft_cap must be a number, got bool"),
    ("tree_attention", dict(block_table=[0]), "block_table must be a Tensor or None, got list"),
    ("tree_attention", dict(k_scale="1"), "k_scale must be a Tensor, a number or None, got str"),
    ("tree_attention", dict(v_scale=True), "v_scale must be a Tensor, a number or None, got bool"),
    ("tree_attention", dict(window=1.0), "window must be an int, got float"),
    ("tree_attention", dict(return_lse=1), "return_lse must be a bool, got int"),
]


@pytest.mark.parametrize("op, changes, message", TYPE_ERRORS)
def test_type_errors(op, changes, message):
    with pytest.raises(TypeError, match=f"^{op}: {message}"):
        getattr(specdec_ext, op)(**{**arguments(op), **changes})


@pytest.mark.parametrize(
    "op",
    [
        *("verify", "sample", "row_law", "acceptance", "uniforms"),
        *("tree_mask", "compact_kv", "tree_attention"),
    ],
)
def test_backends_by_name(op):
    call = arguments(op)
    for name in ("auto", "cpu", "reference"):
        assert getattr(specdec_ext, op)(**call, backend=name) is not None
    with pytest.raises(ValueError, match=f"^{op}: backend 'cuda' (is absent|has no kernels)"):
        getattr(specdec_ext, op)(**call, backend="cuda")
    with pytest.raises(ValueError, match=f"^{op}: backend must be one of .*, got 'tpu'"):
        getattr(specdec_ext, op)(**call, backend="tpu")


# ---- what the Python functions add --------------------------------------------------------------


@pytest.mark.parametrize("backend_name", ["cpu", "reference"])
def test_parameters_as_numbers_sequences_and_tensors(backend_name):
    call = arguments("verify")
    call["target_logits"] = torch.randn(B, G + 1, V, generator=torch.Generator().manual_seed(0))
    call["uniforms"] = call["uniforms"] + 0.4
    ways = [
        dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, draft_temperature=2),
        dict(
            temperature=[0.5, 0.5], top_k=(3, 3), top_p=[0.9] * 2, min_p=[0.01] * 2,
            draft_temperature=[2.0, 2.0],
        ),
        dict(
            temperature=torch.full((B,), 0.5), top_k=torch.full((B,), 3),
            top_p=torch.full((B,), 0.9), min_p=torch.full((B,), 0.01),
            draft_temperature=torch.full((B,), 2.0),
        ),
    ]  # fmt: skip
    first, *others = (specdec_ext.verify(**call, **way, backend=backend_name) for way in ways)
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_sequences_of_the_wrong_length():
    with pytest.raises(ValueError, match=r"temperature must be \[B\]"):
        specdec_ext.verify(**arguments("verify"), temperature=[1.0, 1.0, 1.0])


def test_fresh_randomness():
    call = arguments("sample")
    call["logits"] = torch.zeros(B, 1000)
    del call["uniforms"]
    torch.manual_seed(3)
    one, two = specdec_ext.sample(**call).tokens, specdec_ext.sample(**call).tokens
    torch.manual_seed(3)
    again = specdec_ext.sample(**call).tokens
    assert torch.equal(one, again) and not torch.equal(one, two)
    own = [
        specdec_ext.sample(**call, generator=torch.Generator().manual_seed(s)).tokens
        for s in (5, 5, 6)
    ]
    assert torch.equal(own[0], own[1]) and not torch.equal(own[0], own[2])


@pytest.mark.parametrize(
    "given", [dict(uniforms=f64([0.5, 0.5])), dict(seeds=ints(B), positions=ints(B))]
)
def test_a_generator_beside_other_randomness(given):
    with pytest.raises(ValueError, match="generator must be None where"):
        specdec_ext.sample(floats(B, V), **given, generator=torch.Generator())


def test_nothing_is_written_after_a_refusal(operator):
    # A refused call leaves no half-filled output behind: it returns nothing at all.
    call = arguments("verify")
    before = {k: v.clone() for k, v in call.items()}
    with pytest.raises(ValueError):
        operator.verify(**call, rule="magic")
    assert all(torch.equal(call[k], before[k]) for k in call)
