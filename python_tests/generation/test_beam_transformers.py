"""Iterating `beam_verify` gives what transformers' own beam search gives, ids and scores."""

from __future__ import annotations

import pytest
import torch
from beams import Settings, mixture, prefix_law, speculative_search
from conftest import CPU, REFERENCE
from torch import nn
from transformers import (
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.generation import utils
from transformers.modeling_outputs import CausalLMOutput

PROMPT = (1, 3)


class PrefixConfig(PretrainedConfig):
    model_type = "prefix-law"
    vocab_size = 12


class PrefixModel(PreTrainedModel, GenerationMixin):
    """A model whose rows depend on all tokens so far, the same bits in every batch."""

    config_class = PrefixConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.unused = nn.Parameter(torch.zeros(1))
        self.law = None

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}

    def forward(self, input_ids, **_):
        rows = [self.law(tuple(row)) for row in input_ids.tolist()]
        return CausalLMOutput(logits=torch.stack(rows)[:, None])


def transformers_search(model, s):
    with torch.no_grad():
        found = model.generate(
            torch.tensor([PROMPT]),
            num_beams=s.width,
            num_return_sequences=s.width,
            max_new_tokens=s.max_new,
            length_penalty=s.length_penalty,
            early_stopping=s.early_stopping,
            eos_token_id=list(s.eos),
            pad_token_id=s.eos[0],
            do_sample=False,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    ids = found.sequences[:, len(PROMPT) :].tolist()
    return [
        (cut(row, s.eos), score)
        for row, score in zip(ids, found.sequences_scores.tolist(), strict=True)
    ]


def cut(row, eos):
    """The tokens up to the first EOS."""
    ends = [i + 1 for i, token in enumerate(row) if token in eos]
    return tuple(row[: ends[0]] if ends else row)


def settings(case):
    width = (1, 2, 4, 5, 8)[case % 5]
    width = max(width, 2)  # one beam is transformers' greedy search, without scores
    return Settings(
        width,
        eos=((2,), (0, 5), (7, 3, 11))[case % 3],
        max_new=(6, 12, 1, 20)[case % 4],
        length_penalty=(1.0, 0.0, 2.0, -0.5)[case // 2 % 4],
        early_stopping=(False, True, "never")[case // 3 % 3],
    )


def after_prompt(law):
    return lambda tokens: law(PROMPT + tokens)


def stable_topk(values, k, **_):
    found = values.sort(dim=-1, descending=True, stable=True)
    return found.values[..., :k], found.indices[..., :k]


class StableTorch:
    """torch, but for the order of equal values."""

    topk = staticmethod(stable_topk)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("part", range(2))
def test_the_same_bits_from_the_same_rows(part, ties, monkeypatch):
    if ties:
        monkeypatch.setattr(utils, "torch", StableTorch())
    model = PrefixModel(PrefixConfig())
    for case in range(part * 20, part * 20 + 20):
        s = settings(case)
        model.law = prefix_law(case, 12, step=1.0 if ties else None)
        draft = mixture(model.law, prefix_law(case + 100, 12), (0.1, 0.4, 1.0)[case % 3])
        laws = (after_prompt(model.law), after_prompt(draft))
        beams, gamma = s.width * (1 + case % 2), 1 + case % 6
        run = speculative_search(REFERENCE.beam_verify, *laws, s, beams, gamma)
        found = [(h.tokens, h.score) for h in run.ended.kept]
        assert found == transformers_search(model, s), case


@pytest.mark.parametrize("case", range(6))
def test_a_small_gpt2(case):
    torch.manual_seed(case)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.5
    )
    model, small = (GPT2LMHeadModel(config).eval() for _ in range(2))

    def law_of(of):
        @torch.no_grad()
        def law(tokens):
            return of(torch.tensor([PROMPT + tokens])).logits[0, -1]

        return law

    s = Settings((2, 4, 5)[case % 3], (2, 9), max_new=8, early_stopping=case % 2 == 1)
    expected = transformers_search(model, s)
    draft = mixture(law_of(model), law_of(small), 0.3)
    for backend in (REFERENCE, CPU):
        run = speculative_search(backend.beam_verify, law_of(model), draft, s, s.width, 3)
        assert [h.tokens for h in run.ended.kept] == [tokens for tokens, _ in expected]
        for h, (_, score) in zip(run.ended.kept, expected, strict=True):
            assert abs(h.score - score) < 1e-5
