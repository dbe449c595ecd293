"""Encoder-decoders of four sizes that copy a few words, trained in seconds, and their records."""

import json
import random

import torch

WORDS = ("red", "green", "blue", "small", "large", "old", "new", "cat", "dog", "bird", "tree")
SHAPES = {
    "mini": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    "small": {"d_model": 24, "d_ff": 48, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    "base": {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2},
    "large": {"d_model": 48, "d_ff": 96, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2},
}


def write_records(folder):
    """Records as `benchmarks/tasks` writes them, of two origins with words of their own."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for split, number in (("train", 300), ("valid", 40), ("test", 40)):
        with (folder / f"{split}.jsonl").open("w") as lines:
            for k in range(number):
                words = WORDS[:7] if k % 2 else WORDS[4:]
                text = " ".join(draw.choices(words, k=draw.randint(4, 7)))
                record = {
                    "source": text,
                    "target": text,
                    "document": f"{split} {k}",
                    "origin": ("pages", "dialogs")[k % 2],
                    "licence": "MPL-2.0",
                    "permissive": True,
                }
                lines.write(json.dumps(record) + "\n")


def make_family(work_folder, data_folder, steps=30):
    """Prepare, train briefly and save everything that `load_family` reads."""
    from pair.seq2seq.data import load_prepared, prepare
    from pair.seq2seq.models import save_model
    from pair.seq2seq.schedule import Pace
    from pair.seq2seq.sizes import build_model
    from pair.seq2seq.training import Options, train

    write_records(data_folder)
    prepare(data_folder, work_folder, permissive_only=False)
    tokenizer, splits, _ = load_prepared(work_folder)
    for name, shape in SHAPES.items():
        options = Options(batch_tokens=512, dropout=0.0)
        model = build_model(shape, len(tokenizer), 0.0, 0)
        folder = work_folder / "training" / name
        train(name, model, splits["train"], Pace(steps=steps), options, folder, torch.device("cpu"))
        save_model(model, work_folder, name, {"steps": steps})
