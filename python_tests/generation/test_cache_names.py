"""Models name their key-value cache ``past_key_values`` or ``cache``; both are run alike."""

import inspect
import warnings

import pytest
import torch
from generate_models import pair, prompts
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import specdec_ext
from specdec_ext.decoding.cache_names import cache_name, cache_of, own_cache_name
from specdec_ext.decoding.checks import is_model

NEW = 12


class Old(torch.nn.Module):
    """Takes ``past_key_values``, as models did before transformers 5.24."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.dtype = inner, inner.config, inner.dtype
        self.eval()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                use_cache=None, logits_to_keep=0):  # fmt: skip
        return self.run(
            past_key_values, input_ids=input_ids, attention_mask=attention_mask,
            position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep,
        )  # fmt: skip

    def run(self, cache, **given):
        return self.inner(**{own_cache_name(): cache}, **given)


class New(Old):
    """Takes ``cache``, as they do since."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None,
                use_cache=None, logits_to_keep=0):  # fmt: skip
        return self.run(
            cache, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            use_cache=use_cache, logits_to_keep=logits_to_keep,
        )  # fmt: skip


class Neither(Old):
    """Takes none."""

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return self.run(None, input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("kind", [Old, New])
def test_either_name_is_run(kind):
    target, draft = pair()
    ids, mask = prompts([5, 9])
    given = {
        "gamma": 3,
        "max_new_tokens": NEW,
        "temperature": 0.8,
        "seeds": 3,
        "attention_mask": mask,
    }
    expected = specdec_ext.generate(target, draft, ids, **given)
    found = specdec_ext.generate(kind(target), kind(draft), ids, **given)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.statistics.request_calls == expected.statistics.request_calls
    assert is_model(kind(target))


def test_a_model_without_a_cache_is_refused():
    target, _ = pair()
    ids, _ = prompts([5])
    with pytest.raises(ValueError, match="Neither has no key-value cache"):
        specdec_ext.generate(Neither(target), None, ids, max_new_tokens=2)


def test_the_installed_transformers_is_asked_by_its_own_name():
    """Asked by an older one it answers, and warns in every call."""
    target, draft = pair()
    ids, _ = prompts([5])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        specdec_ext.generate(target, draft, ids, gamma=2, max_new_tokens=NEW, temperature=0.0)


def test_names_by_hand():
    assert cache_name({"input_ids", "past_key_values"}) == "past_key_values"
    assert cache_name(["cache", "input_ids"]) == "cache"
    assert cache_name({"input_ids", "cache_params"}) is None
    assert own_cache_name() in inspect.signature(LlamaForCausalLM.forward).parameters
    held = object()
    assert cache_of(CausalLMOutputWithPast(**{own_cache_name(): held})) is held
    assert cache_of(CausalLMOutputWithPast()) is None
