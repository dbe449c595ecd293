"""Speculative decoding inside ``model.generate``: everything else about the call stays as it is.

python examples/inside_transformers.py "def main():"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import specdec_ext
from specdec_ext.commands.pair import find_pair


def main():
    """Complete a text: TEXT [TARGET DRAFT], by default with the pair of specdec-ext-pair."""
    text, *folders = sys.argv[1:] or ["import os\nimport sys\n\n\nclass Reader:\n"]
    target_folder, draft_folder = folders or (find_pair() / "target", find_pair() / "draft")
    tokenizer = AutoTokenizer.from_pretrained(
        target_folder if folders else find_pair() / "tokenizer"
    )
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (target_folder, draft_folder)
    )
    set_seed(0)
    out = target.generate(
        **tokenizer(text, return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=64,
        do_sample=True,
        temperature=0.8,
        repetition_penalty=1.05,
        return_dict_in_generate=True,
        # These are the change:
        custom_generate=specdec_ext.hf.generate_fn,
        draft_model=draft,
        gamma=4,
    )
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
    print(f"{out.statistics.tokens_per_target_call:.2f} tokens a target call", file=sys.stderr)


if __name__ == "__main__":
    main()
