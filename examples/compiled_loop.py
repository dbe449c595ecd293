"""A loop in the style of gpt-fast: static caches, fixed shapes, models compiled once, no rollback.

    python examples/compiled_loop.py ["def main():"]

A cache has a slot for every position, and a query sees the slots up to its own. So a rejected token
needs no rollback: the next round writes over its slot before anything sees it. Every call has one
of three shapes, and each compiles once.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import specdec_ext
from specdec_ext.commands.pair import find_pair


class StaticLlama(nn.Module):
    """A Llama of transformers, run on a cache of fixed length."""

    def __init__(self, model, length):
        super().__init__()
        config, self.body, self.head = model.config, model.model, model.lm_head
        self.head_dim = self.body.layers[0].self_attn.head_dim
        shape = (2, 1, config.num_key_value_heads, length, self.head_dim)
        self.caches = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=model.dtype), requires_grad=False)
            for _ in self.body.layers
        )

    def forward(self, tokens, positions):
        """Run tokens [1, m] at positions [m]; give logits [1, m, V]."""
        x = self.body.embed_tokens(tokens)
        rope = self.body.rotary_emb(x, positions[None])
        slots = torch.arange(self.caches[0].shape[3], device=tokens.device)
        seen = slots <= positions[:, None]
        for layer, cache in zip(self.body.layers, self.caches, strict=True):
            h = layer.input_layernorm(x)
            x = x + self.attend(layer.self_attn, h, rope, seen, cache, positions)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.body.norm(x))

    def attend(self, attention, h, rope, seen, cache, positions):
        """Write keys and values to their slots, then attend to all that a position sees."""
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = apply_rotary_pos_emb(q, k, *rope)
        cache[0].index_copy_(2, positions, k)
        cache[1].index_copy_(2, positions, v)
        out = scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2))


@torch.inference_mode()
def complete(
    target, draft, tokens, new_tokens, *, gamma=4, temperature=0.8, seed=0, backend="inductor"
):
    """Return ``tokens`` [1, n] and ``new_tokens`` more, distributed as if the target drew each."""
    tokens = tokens.clone()  # an inference tensor like all to come: another kind is a graph more
    end = tokens.shape[1] + new_tokens
    models = [StaticLlama(model, end + gamma + 1) for model in (target, draft)]
    before = torch.arange(tokens.shape[1] - 1)
    for model in models:  # the prompt, whose length is anybody's guess, is not compiled
        model(tokens[:, :-1], before)
    target, draft = (
        torch.compile(m, backend=backend, fullgraph=True, dynamic=False) for m in models
    )
    seeds = torch.tensor([seed])
    while tokens.shape[1] < end:
        last = tokens.shape[1] - 1
        where = {"seeds": seeds, "positions": torch.tensor([last + 1])}

        drafted, rows = [], []
        # The token before the last one is fed again: after full acceptance the draft lacks it.
        # (A slice of a row, because tokens[:, -2:] has other strides in every round: new graphs.)
        feed, at = tokens[0, -2:][None], torch.arange(last - 1, last + 1)
        for i in range(gamma):
            rows.append(draft(feed, at)[:, -1:])
            drawn = specdec_ext.sample(
                rows[i][:, 0], draft_index=i, temperature=temperature, **where
            )
            drafted.append(drawn.tokens[:, None])
            feed, at = drafted[i], torch.tensor([last + 1 + i])

        proposed = torch.cat(drafted, 1)
        logits = target(
            torch.cat([tokens[:, -1:], proposed], 1), torch.arange(last, last + gamma + 1)
        )
        verified = specdec_ext.verify(
            logits, proposed, torch.cat(rows, 1), temperature=temperature, **where
        )
        emitted = int(verified.num_accepted) + 1
        tokens = torch.cat([tokens, verified.tokens[:, :emitted]], 1)
    return tokens[:, :end]


def main():
    """Complete a text: TEXT [TARGET DRAFT], two Llamas, by default those of specdec-ext-pair."""
    text, *folders = sys.argv[1:] or ["import os\nimport sys\n\n\nclass Reader:\n"]
    target, draft = folders or (find_pair() / "target", find_pair() / "draft")
    tokenizer = AutoTokenizer.from_pretrained(target if folders else find_pair() / "tokenizer")
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (target, draft)
    ]
    tokens = tokenizer(text, return_tensors="pt").input_ids
    print(tokenizer.decode(complete(*models, tokens, 64)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
