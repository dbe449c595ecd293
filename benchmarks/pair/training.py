"""The training of the two models: the target on text, the draft on text and on the target."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pair.data import POSITIONS, VOCABULARY, Data, sample_batch, save_atomically

TARGET_SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 3,
}
DRAFT_SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 448,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
}


def build_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def build_optimizers(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(step: int, steps: int, warmup_steps: int, decay_share: float) -> float:
    """Warm up linearly, stay at 1, then decay linearly to 0 over the last ``decay_share``."""
    return min(1.0, (step + 1) / warmup_steps, (steps - step) / (decay_share * steps))


def sequence_length(step: int, steps: int, args: argparse.Namespace) -> int:
    """Return the crop length: short first, because attention costs; the full context at the end."""
    return POSITIONS if step >= (1.0 - args.long_share) * steps else args.short_length


def forward_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, args: argparse.Namespace
) -> torch.Tensor:
    """Return float32 logits ``[rows * length, V]`` of ``inputs [rows, length]``, autocast."""
    with torch.autocast(args.device.type, torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return logits.flatten(0, 1).float()


LossFunction = Callable[[LlamaForCausalLM, torch.Tensor, float], torch.Tensor]


def train(
    name: str,
    model: LlamaForCausalLM,
    data: Data,
    loss_function: LossFunction,
    steps: int,
    decay_share: float,
    key: int,
    args: argparse.Namespace,
) -> None:
    """Train ``model`` in place, resuming from the checkpoint ``name`` and leaving one at the end.

    Parameters
    ----------
    name : str
        The checkpoint's name in the work folder.
    model : LlamaForCausalLM
        Trained in place.
    data : Data
        Token streams.
    loss_function : callable
        ``(model, crops [rows, length + 1], progress in [0, 1)) -> scalar``.
    steps : int
        Number of steps.
    decay_share : float
        The last share of the steps, over which the learning rates decay.
    key : int
        First key of the batches, so that the phases see different crops.
    args : argparse.Namespace
        The options.
    """
    optimizers = build_optimizers(model, args)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    path = args.work_dir / f"{name}.pt"
    first, loss_average = 0, float("nan")
    if path.exists():
        state = torch.load(path, map_location=args.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, loss_average = state["step"], state["loss"]
    model.train()
    bar = tqdm(range(first, steps), desc=name, initial=first, total=steps, mininterval=5.0)
    for step in bar:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * lr_factor(
                step, steps, args.warmup_steps, decay_share
            )
        crops = sample_batch(data, args, key + step, sequence_length(step, steps, args))
        loss = loss_function(model, crops, step / steps)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        loss_average = value if math.isnan(loss_average) else 0.98 * loss_average + 0.02 * value
        bar.set_postfix(loss=f"{loss_average:.4f}", refresh=False)
        if (step + 1) % args.checkpoint_steps == 0 or step + 1 == steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step + 1,
                "loss": loss_average,
            }
            save_atomically(state, path)
    model.eval()


def text_loss(args: argparse.Namespace) -> LossFunction:
    """Return the cross-entropy of the text itself."""

    def loss(model: LlamaForCausalLM, crops: torch.Tensor, progress: float) -> torch.Tensor:
        logits = forward_logits(model, crops[:, :-1], args)
        return F.cross_entropy(logits, crops[:, 1:].flatten())

    return loss


def distillation_loss(target: LlamaForCausalLM, args: argparse.Namespace) -> LossFunction:
    """Return a mixture of KL(p || q) and the total variation distance 1 - sum min(p, q).

    The second is what speculative decoding pays for, but its gradient is flat where the draft is
    far off; the KL term leads at first and keeps ``--final-kl`` of the weight at the end.
    """

    def loss(draft: LlamaForCausalLM, crops: torch.Tensor, progress: float) -> torch.Tensor:
        with torch.no_grad():
            target_law = forward_logits(target, crops[:, :-1], args).softmax(-1)
        draft_log = forward_logits(draft, crops[:, :-1], args).log_softmax(-1)
        total_variation = 0.5 * (target_law - draft_log.exp()).abs().sum(-1).mean()
        # Up to p's entropy, which does not depend on the draft.
        cross_entropy = -(target_law * draft_log).sum(-1).mean()
        weight = 1.0 - (1.0 - args.final_kl) * min(1.0, 2.0 * progress)
        return weight * cross_entropy + (1.0 - weight) * total_variation

    return loss


def train_target(
    tokenizer: PreTrainedTokenizerFast, data: Data, args: argparse.Namespace
) -> LlamaForCausalLM:
    """Train the target on the text, or load it where it is finished."""
    torch.manual_seed(args.seed)
    target = build_model(TARGET_SHAPE, tokenizer).to(args.device)
    steps, decay = args.target_steps, args.target_decay_share
    train("target", target, data, text_loss(args), steps, decay, 0, args)
    return target


def train_draft(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: Data,
    args: argparse.Namespace,
) -> LlamaForCausalLM:
    """Train the draft on the text, then distil it from the target."""
    torch.manual_seed(args.seed + 1)
    draft = build_model(DRAFT_SHAPE, tokenizer).to(args.device)
    steps, decay = args.draft_text_steps, args.draft_decay_share
    train("draft-text", draft, data, text_loss(args), steps, decay, 10_000_000, args)
    loss = distillation_loss(target, args)
    train("draft", draft, data, loss, args.draft_steps, decay, 20_000_000, args)
    return draft
