"""Speculative decoding on a model whose vocabulary is sharded by transformers' tensor parallelism.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Loading a model in parts needs the package accelerate (`pip install accelerate`).

A target model of random weights is written to a folder and loaded by all ranks, a part of it on
each. The plan of its class for tensor parallelism would gather the logits; one entry of it, changed
here, keeps them where they are, and `verify_sharded` takes them. The draft is small: every rank
runs all of it, and passes its share of the draft's logits. At the end the tokens are compared with
those of the whole model and `verify`.
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import specdec_ext
from specdec_ext.distributed import verify_sharded

VOCAB, GAMMA, ROUNDS = 1003, 4, 6  # the ranks' parts need not be even


def write_models(folder):
    """Write a target and a draft with random weights, the same whoever writes them."""
    for name, layers in (("target", 2), ("draft", 1)):
        torch.manual_seed(0)
        config = LlamaConfig(
            **dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=128),
            **dict(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4),
            **dict(initializer_range=0.15, bos_token_id=None, eos_token_id=None),
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)


def load_sharded(folder):
    """Load a model in parts: the plan of its class, but for logits that stay where they are."""
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan={"lm_head": "colwise"})
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=plan, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def complete(draft, tokens, verified):
    """Extend ``tokens`` [1, n] by rounds; ``verified`` does what the target has to do."""
    seeds = torch.tensor([7])
    for _ in range(ROUNDS):
        where = {"seeds": seeds, "positions": torch.tensor([tokens.shape[1]])}
        text, rows = tokens, []
        for i in range(GAMMA):
            rows.append(draft(text).logits[:, -1:])
            drawn = specdec_ext.sample(rows[i][:, 0], draft_index=i, temperature=0.8, **where)
            text = torch.cat([text, drawn.tokens[:, None]], 1)
        result = verified(text, torch.cat(rows, 1), dict(**where, temperature=0.8, top_p=0.9))
        tokens = torch.cat([tokens, result.tokens[:, : int(result.num_accepted) + 1]], 1)
    return tokens


def compare(path):
    """Decode with the target in parts, and with all of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draft = AutoModelForCausalLM.from_pretrained(path / "draft", dtype=torch.float32).eval()
    target = load_sharded(path / "target")
    whole = AutoModelForCausalLM.from_pretrained(path / "target", dtype=torch.float32).eval()
    widths = [None] * ranks  # of the ranks' parts of the vocabulary
    dist.all_gather_object(widths, target.lm_head.weight.to_local().shape[0])
    start, end = sum(widths[:rank]), sum(widths[: rank + 1])

    def by_all(text, rows, options):
        logits = target(text).logits[:, -GAMMA - 1 :]  # [1, G+1, end - start]
        return verify_sharded(logits, text[:, -GAMMA:], rows[..., start:end], **options)

    def by_one(text, rows, options):
        logits = whole(text).logits[:, -GAMMA - 1 :]
        return specdec_ext.verify(logits, text[:, -GAMMA:], rows, **options)

    prompt = torch.tensor([[1, 2, 3]])
    tokens, expected = complete(draft, prompt, by_all), complete(draft, prompt, by_one)
    print(f"rank {rank}, logits {start} to {end} of {VOCAB}:", tokens[0].tolist())
    # A model in parts adds up in another order: its logits may differ in their last bits, and a
    # token where two of them were equally good.
    print(f"rank {rank}, as with the whole model:", torch.equal(tokens, expected))


def main():
    """Meet the other ranks, and share a folder."""
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    folder = [tempfile.mkdtemp() if is_first else None]
    dist.broadcast_object_list(folder)
    if is_first:
        write_models(Path(folder[0]))
    dist.barrier()
    compare(Path(folder[0]))
    dist.barrier()
    if is_first:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
