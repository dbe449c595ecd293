"""Translation with an encoder-decoder and a smaller one over the same tokens.

    python examples/translate.py TARGET DRAFT "A text to translate." ["Another."]

TARGET and DRAFT are local checkpoints, T5 or Marian models for instance. Every model encodes the
texts once; the loop then runs the decoders.
"""

import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import specdec_ext
from specdec_ext.decoding.encoder_decoder import encoded


def translate(target, draft, tokenizer, texts, **options):
    """Return the translations of some texts, and the loop's statistics."""
    inputs = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False
    )
    start = torch.full((len(texts), 1), target.generation_config.decoder_start_token_id)
    sequences, statistics = specdec_ext.generate(
        encoded(target, **inputs), encoded(draft, **inputs), start, **options
    )
    return tokenizer.batch_decode(sequences, skip_special_tokens=True), statistics


def main():
    """Translate: TARGET DRAFT TEXT..."""
    if len(sys.argv) < 4:
        sys.exit("usage: python examples/translate.py TARGET DRAFT TEXT [TEXT ...]")
    target_folder, draft_folder, *texts = sys.argv[1:]
    target, draft = (
        AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (target_folder, draft_folder)
    )
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    translations, statistics = translate(target, draft, tokenizer, texts, max_new_tokens=128)
    print(*translations, sep="\n")
    print(f"{statistics.tokens_per_target_call:.2f} tokens a target call", file=sys.stderr)


if __name__ == "__main__":
    main()
