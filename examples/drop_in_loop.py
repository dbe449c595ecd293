"""A decoding loop of one's own, with specdec_ext dropped in: propose, verify, commit.

    python examples/drop_in_loop.py "def main():"

The whole algorithm is `complete`. It runs both models on everything, every time, to stay short;
`specdec_ext.generate` is the same loop with key-value caches, batches, stop tokens and statistics.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec_ext
from specdec_ext.commands.pair import find_pair


@torch.inference_mode()
def complete(target, draft, tokens, new_tokens, *, gamma=4, temperature=0.8, seed=0):
    """Return ``tokens`` [1, n] and ``new_tokens`` more, distributed as if the target drew each."""
    end = tokens.shape[1] + new_tokens
    seeds = torch.tensor([seed])
    while tokens.shape[1] < end:
        # Where the round begins. It keys the randomness, and grows: no round reuses a coin.
        where = {"seeds": seeds, "positions": torch.tensor([tokens.shape[1]])}

        text, rows = tokens, []
        for i in range(gamma):  # propose
            rows.append(draft(text).logits[:, -1:])
            drawn = specdec_ext.sample(
                rows[i][:, 0], draft_index=i, temperature=temperature, **where
            )
            text = torch.cat([text, drawn.tokens[:, None]], 1)

        logits = target(text).logits[:, -gamma - 1 :]  # one call for gamma + 1 rows
        verified = specdec_ext.verify(
            logits, text[:, -gamma:], torch.cat(rows, 1), temperature=temperature, **where
        )

        emitted = int(verified.num_accepted) + 1  # what was accepted, and one token more
        tokens = torch.cat([tokens, verified.tokens[:, :emitted]], 1)
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
