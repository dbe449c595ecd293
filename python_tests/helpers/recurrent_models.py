"""Models with recurrent state for the tests: tiny ones of transformers, and one whose law is known.

Not all families: one of each way of taking, keeping and giving back a state.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

BASE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HYBRID = {
    **BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


class Kind(NamedTuple):
    """How a model is made, and how it was seen to continue: way, fewest tokens, shares."""

    make: Callable[[], nn.Module]
    found: tuple[str, int, bool]
    dtype: torch.dtype = torch.float64


KINDS = {
    # Scans that begin at zero: over all channels, in a hybrid, over heads one by one.
    "mamba": Kind(
        lambda: hf.MambaForCausalLM(hf.MambaConfig(**BASE, state_size=8, time_step_rank=4)),
        ("scan", 1, True),
    ),
    "jamba": Kind(
        lambda: hf.JambaForCausalLM(
            hf.JambaConfig(
                **{**HYBRID, "num_hidden_layers": 3},
                attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=8,
                mamba_dt_rank=4, use_mamba_kernels=False,
            )
        ),
        ("scan", 1, True),
        torch.float32,  # its experts
    ),
    # Chunks that begin at the state; alone, beside attention, with positions to be told.
    "mamba2": Kind(
        lambda: hf.Mamba2ForCausalLM(
            hf.Mamba2Config(
                **BASE, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8
            )
        ),
        ("whole", 1, True),
    ),
    "bamba": Kind(
        lambda: hf.BambaForCausalLM(hf.BambaConfig(**HYBRID, **SSM, attn_layer_indices=[1])),
        ("whole", 1, True),
    ),
    "qwen3_next": Kind(
        lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **HYBRID, head_dim=8, layer_types=["linear_attention", "full_attention"],
                linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
                linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=24, shared_expert_intermediate_size=24,
            )
        ),
        ("whole", 1, True),
        torch.float32,
    ),
    "lfm2": Kind(
        lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**HYBRID, layer_types=["conv", "full_attention"])),
        ("whole", 1, True),
    ),
    # A layer with both; time steps that only calls on several tokens keep above their limit.
    "zamba2": Kind(
        lambda: hf.Zamba2ForCausalLM(
            hf.Zamba2Config(
                **{**HYBRID, "num_hidden_layers": 3},
                layers_block_type=["mamba", "hybrid", "mamba"], hybrid_layer_ids=[1],
                mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1, chunk_size=8,
                num_mem_blocks=1, adapter_rank=8,
            )
        ),
        ("whole", 2, True),
    ),
    # State in attributes of modules, in a list, in an object that the model makes.
    "recurrent_gemma": Kind(
        lambda: hf.RecurrentGemmaForCausalLM(
            hf.RecurrentGemmaConfig(
                **{**HYBRID, "num_hidden_layers": 3},
                lru_width=32, head_dim=8, attention_window_size=6,
                block_types=["recurrent", "recurrent", "attention"],
            )
        ),
        ("stepwise", 1, True),
    ),
    "rwkv": Kind(
        lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**BASE, attention_hidden_size=32)),
        ("whole", 1, False),  # one token of each of several rows goes wrong in transformers
    ),
    "xlstm": Kind(
        lambda: hf.xLSTMForCausalLM(
            hf.xLSTMConfig(
                **{**BASE, "hidden_size": 128},
                num_heads=4, chunk_size=8, mode="inference", return_last_states=True,
            )
        ),
        ("whole", 1, True),
    ),
}  # fmt: skip


@functools.cache
def small(kind: str) -> nn.Module:
    """Return a random model whose every weight matters, or it would repeat one token."""
    torch.manual_seed(0)
    model = KINDS[kind].make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, 0.3)
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    return model.to(KINDS[kind].dtype)


@torch.inference_mode()
def greedy(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """Return each row's greedy continuation by a forward pass on its whole text for each token."""
    rows = []
    for row, real in zip(ids, mask.bool(), strict=True):
        text = row[real][None]
        for _ in range(new):
            logits = model(input_ids=text, use_cache=False).logits[:, -1:]
            text = torch.cat([text, logits.argmax(-1)], 1)
        rows.append(torch.cat([row[~real], text[0]]))
    return torch.stack(rows)


class Folding(nn.Module):
    """A model that folds its text into one number, which it keeps as its state, in place.

    Its law after a text is row ``number`` of a table, bit-equal in whatever calls and batches the
    text was read.
    """

    def __init__(self, seed: int, vocabulary: int = 6, numbers: int = 53, noise: float = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(numbers, vocabulary, generator=generator)
        if noise:
            self.table = self.table + noise * torch.randn(numbers, vocabulary, generator=generator)
        self.config = SimpleNamespace(vocab_size=vocabulary, eos_token_id=None)
        self.eval()

    def forward(self, input_ids: Any, state: Any = None, use_cache: bool = True) -> Any:
        """Read tokens; the state is written to, as models do."""
        if state is None:
            state = [torch.ones(len(input_ids), 1, dtype=torch.int64)]
        numbers = []
        for token in input_ids.T:
            folded = (state[0][:, 0] * 7 + 11 * token + 3) % len(self.table)
            state[0][:, 0] = folded
            numbers.append(folded)
        logits = self.table[torch.stack(numbers, 1)]
        return SimpleNamespace(logits=logits, state=state if use_cache else None)

    def joint_law(self, prompt: list[int], length: int) -> torch.Tensor:
        """Return the law of the next ``length`` tokens, ``[V ** length]`` float64."""
        joint = []
        for tokens in itertools.product(range(self.table.shape[1]), repeat=length):
            text = torch.tensor([[*prompt, *tokens]])
            law = self(text, use_cache=False).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
            joint.append(law.gather(1, text[0, len(prompt) :, None]).prod().item())
        return torch.tensor(joint, dtype=torch.float64)


class WholeText:
    """Runs each row's whole text in every call: what a `HostedModel` must be equal to."""

    def __init__(self, model: nn.Module, ends: torch.Tensor) -> None:
        self.model, self.calls, self.features = model, 0, None
        self.texts: list[list[int]] = [[] for _ in ends]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(text) for text in self.texts]

    def prefill(self, input_ids: Any, attention_mask: Any, *, rides: bool = False) -> None:
        """Take the prompts, whether they could wait or not."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.texts = [row[real].tolist() for row, real in zip(input_ids, mask.bool(), strict=True)]

    def forward(self, tokens: Any, *, last_only: bool = False) -> Any:
        """Append tokens; return their logits."""
        self.calls += 1
        rows = []
        clamped = tokens.clamp(0, self.model.config.vocab_size - 1)
        for text, more in zip(self.texts, clamped.tolist(), strict=True):
            text += more
            logits = self.model(torch.tensor([text]), use_cache=False).logits
            rows.append(logits[:, -1 if last_only else -len(more) :])
        return torch.cat(rows)

    def rollback(self, drop: Any, *, across_holes: bool = False) -> None:
        """Forget the last tokens."""
        self.texts = [text[: len(text) - n] for text, n in zip(self.texts, drop.host, strict=True)]

    def select(self, rows: Any, indices: Any) -> None:
        """Keep only these rows."""
        self.texts = [self.texts[i] for i in indices]
