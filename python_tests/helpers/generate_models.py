"""Models for the tests of `specdec_ext.generate`: a table, and tiny Hugging Face models."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)


class TableModel(nn.Module):
    """A causal model whose law after tokens .., a, b is row (a, b) of a table, bit-equal always.

    It finds its context in the cache alone, by position id, as attention does. A query that does
    not see every position before its own exactly once gets NaN: a wrong crop, hole or position id
    does not pass. The mask may be one of a tree, ``[B, 1, n, slots]``, which is added to scores.
    """

    def __init__(self, table: torch.Tensor, eos_token_id: int | None = None) -> None:
        super().__init__()
        self.table = table  # [V, V, V]
        self.config = SimpleNamespace(vocab_size=table.shape[0], eos_token_id=eos_token_id)
        self.fed: list[list[int]] = []  # batch and length of each call
        # Nodes of a tree that are past a row's end are run at this position, beside their parents.
        self.last_position: int | None = None
        self.eval()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=True,
        logits_to_keep=0,
    ):
        batch, new = input_ids.shape
        self.fed.append([batch, new])
        past = past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + new).expand(batch, -1)
        states = torch.stack([input_ids, position_ids], -1)[:, None].double()
        keys, _ = past_key_values.update(states, states, 0)
        tokens, positions = keys[:, 0].long().unbind(-1)  # [B, slots]
        slots = tokens.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(batch, slots, dtype=torch.long)
        if attention_mask.dim() == 4:
            assert attention_mask.shape == (batch, 1, new, slots)
            visible = attention_mask[:, 0] == 0  # [B, new, slots]
        else:
            assert attention_mask.shape == (batch, slots)
            causal = torch.arange(slots) <= torch.arange(past, slots)[:, None]
            visible = causal & attention_mask[:, None].bool()
        here = position_ids[..., None]
        seen = torch.where(visible, positions[:, None], -1).sort(-1).values  # -1.., 0, 1, .., here
        expected = torch.arange(slots) - (slots - 1) + here
        right = (seen == expected.clamp(min=-1)).all(-1) | (position_ids == self.last_position)
        before = (visible & (positions[:, None] == here - 1)) * tokens[:, None]
        logits = self.table[before.sum(-1).clamp(max=self.table.shape[0] - 1), input_ids]
        logits = torch.where(right[..., None], logits, torch.nan)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


class TableWithStates(TableModel):
    """A table whose hidden states are its rows: the head that turns them into logits is none."""

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=True,
        logits_to_keep=0,
        output_hidden_states=False,
    ):
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        if output_hidden_states:
            output.hidden_states = (output.logits,)
        output.logits = output.logits[:, -logits_to_keep:]
        return output


def tables(
    vocabulary: int, noise: float = 1.0, seed: int = 0, scale: float = 1.5
) -> tuple[TableModel, TableModel]:
    """Return a target, and a draft whose logits differ by ``noise`` standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocabulary,) * 3
    target = scale * torch.randn(shape, generator=generator)
    draft = target + noise * torch.randn(shape, generator=generator)
    return TableModel(target), TableModel(draft)


def joint_law(
    model: TableModel, prompt: list[int], length: int, temperature: float = 1.0
) -> torch.Tensor:
    """Return the law of the next ``length`` tokens, ``[V ** length]`` float64."""
    law = (model.table.double() / temperature).softmax(-1)
    vocabulary = law.shape[0]
    joint = []
    for tokens in itertools.product(range(vocabulary), repeat=length):
        text, p = [0, *prompt], 1.0
        for token in tokens:
            p *= law[text[-2], text[-1], token].item()
            text.append(token)
        joint.append(p)
    return torch.tensor(joint, dtype=torch.float64)


SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TINY = {  # where layers and heads have these names
    "vocab_size": 67,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**TINY, n_embd=32, n_positions=128)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "gemma3_alternating": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GROUPED,
            head_dim=8,
            sliding_window=6,
            sliding_window_pattern=2,
            tie_word_embeddings=False,
        )
    ),
    "bloom_alibi": lambda: BloomForCausalLM(
        BloomConfig(**TINY, hidden_size=32, tie_word_embeddings=False)
    ),
}

# Its softmax is float32 whatever the model's dtype, and float64's smallest number overflows there.
FLOAT32_ONLY = ("bloom_alibi",)


def pair(architecture: str = "llama", noise: float = 0.03, seed: int = 0):
    """Return a random target in float64 (no near ties), and a draft: the same, perturbed."""
    torch.manual_seed(seed)
    target = ARCHITECTURES[architecture]().eval()
    if architecture not in FLOAT32_ONLY:
        target = target.double()
    return target, perturbed(target, noise)


def perturbed(model: nn.Module, noise: float) -> nn.Module:
    """Return a copy with noise, of this many standard deviations, on every weight."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += noise * torch.randn_like(parameter)
    return draft


def seeded_prompts(rows: int, vocabulary: int):
    """Return prompts of 5 to 1 tokens in turn, padded on the left, their mask and seeds."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (rows, 5), generator=generator)
    mask = (torch.arange(5) >= torch.arange(rows)[:, None] % 5).long()
    return ids, mask, torch.randint(2**62, (rows,), generator=generator)


def prompts(lengths: list[int], vocabulary: int = 67, seed: int = 0):
    """Return random left-padded prompts and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()
