"""A decoding loop of one's own around transformers' dynamic caches: draft, verify, roll back.

    python examples/cached_loop.py "def main():"

`complete` is the loop of examples/drop_in_loop.py, with the caches that make it fast: no token is
run twice through a model, and what verification rejects is cropped from both caches. Verification
is the operator itself, `torch.ops.specdec.verify`. (For attention over the whole text: caches of
sliding windows and of recurrent models do not roll back so; `specdec_ext.generate` handles those,
and batches.)
"""

import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

import specdec_ext
from specdec_ext.commands.pair import find_pair

# The argument by which models take their caches: past_key_values before transformers 5.24.
NAMES = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in NAMES else "past_key_values"


def crop(cache, length):
    """Forget what a cache holds beyond ``length`` tokens."""
    beyond = cache.get_seq_length() - length
    if beyond > 0:
        cache.crop(-beyond)


@torch.inference_mode()
def complete(target, draft, tokens, new_tokens, *, gamma=4, temperature=0.8, seed=0):
    """Return ``tokens`` [1, n] and ``new_tokens`` more, distributed as if the target drew each."""
    end = tokens.shape[1] + new_tokens
    law = {"temperature": torch.tensor([temperature])}
    of_target, of_draft = DynamicCache(config=target.config), DynamicCache(config=draft.config)
    if tokens.shape[1] > 1:  # the last token is run in the first round, which wants its logits
        target(tokens[:, :-1], **{CACHE: of_target})
        draft(tokens[:, :-1], **{CACHE: of_draft})
    while tokens.shape[1] < end:
        # Where the round begins. It keys the randomness, and grows: no round reuses a coin.
        where = {"seeds": torch.tensor([seed]), "positions": torch.tensor([tokens.shape[1]])}

        text, rows = tokens, []
        for i in range(gamma):  # propose; at first the cache may lack two tokens
            lacking = text[:, of_draft.get_seq_length() :]
            rows.append(draft(lacking, **{CACHE: of_draft}).logits[:, -1:])
            drawn = specdec_ext.sample(rows[i][:, 0], draft_index=i, **law, **where)
            text = torch.cat([text, drawn.tokens[:, None]], 1)

        lacking = text[:, of_target.get_seq_length() :]  # one call for gamma + 1 rows
        logits = target(lacking, **{CACHE: of_target}).logits
        emitted, accepted, *_ = torch.ops.specdec.verify(
            logits, text[:, -gamma:], torch.cat(rows, 1), **law, **where
        )

        tokens = torch.cat([tokens, emitted[:, : int(accepted) + 1]], 1)
        for cache in (of_target, of_draft):  # all but the last token, which is run next
            crop(cache, tokens.shape[1] - 1)
    return tokens[:, :end]


def main():
    """Complete a text: TEXT [TARGET DRAFT], by default with the pair of specdec-ext-pair."""
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
