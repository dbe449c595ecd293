"""Greedy output is transformers' own, row by row: drafter x policy x batch x cache x host."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from generate_models import GROUPED, perturbed, prompts
from test_encoder_decoder import MODELS, inputs_of, start
from test_encoder_decoder import models as encoder_decoders
from test_policies import POLICIES
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMixin

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import (
    AggressiveDrafter,
    EarlyExitDrafter,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    RenewalRule,
    StackedDrafter,
    Statistics,
    SuffixDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.encoder_decoder import encoded

NEW = 12
FEW = 9  # tokens: even uniform drafts are accepted now and then
LIMITS = [NEW, NEW, 7]
BATCHES = {"one": [0], "three": [0, 1, 2]}  # rows of a case
GAP = 5e-4  # between the two largest logits; float32's error is measured beside it


class Case(NamedTuple):
    """Prompts on a host, and what transformers makes of each of them alone."""

    models: list[Any]  # the target, and others ever less like it
    ids: torch.Tensor
    mask: torch.Tensor
    eos: int
    expected: list[list[int]]  # new tokens, the last of them the EOS if a row meets it
    vocabulary: int

    def sources(self, rows):
        """What the output repeats but for one token."""
        return [[*self.expected[b][:4], 3, *self.expected[b][5:]] for b in rows]


#: Each is given the draft models, the case, and which of its rows are in the batch.
DRAFTERS = {
    "none": lambda models, case, rows: None,
    "model": lambda models, case, rows: ModelDrafter(models[1]),
    "n-gram drawn": lambda models, case, rows: NgramDrafter(case.vocabulary, 2),
    "n-gram deterministic": lambda models, case, rows: NgramDrafter(
        case.vocabulary, 2, sampled=False
    ),
    "lookup": lambda models, case, rows: LookupDrafter(min_match=1),
    "suffix": lambda models, case, rows: SuffixDrafter(),
    "aggressive": lambda models, case, rows: AggressiveDrafter(case.sources(rows)),
    "uniform": lambda models, case, rows: UniformDrafter(case.vocabulary),
    "early exit": lambda models, case, rows: EarlyExitDrafter(models[0], 1),
    "hierarchy": lambda models, case, rows: HierarchicalDrafter(models[1], models[2], 2),
    "refilled": lambda models, case, rows: HierarchicalDrafter(
        models[1], models[2], 2, refill=True
    ),
    "three levels": lambda models, case, rows: HierarchicalDrafter(
        models[1], HierarchicalDrafter(models[2], models[3], 1), 2
    ),
    "stack": lambda models, case, rows: StackedDrafter(LookupDrafter(), models[1]),
    "stack, continued": lambda models, case, rows: StackedDrafter(
        LookupDrafter(), models[1], continued=True
    ),
}


def uneven():
    """A clock by which rounds differ, but not from run to run."""
    return itertools.accumulate(itertools.cycle([1.0, 3.0, 2.0])).__next__


GAMMAS = {
    **POLICIES, "renewal": lambda: RenewalRule(limit=4, c=0.3, probe=3, clock=uneven()),
}  # fmt: skip


def check(found: torch.Tensor, case: Case, rows: list[int], limits: list[int]) -> None:
    """Each row is the expected one up to its limit, and padding behind it."""
    width = found.shape[1] - case.ids.shape[1]
    expected = [case.expected[b][: limits[b]] for b in rows]
    assert found[:, case.ids.shape[1] :].tolist() == [
        row + [0] * (width - len(row)) for row in expected
    ]


@torch.no_grad()
def check_gaps(target: Any, tokens: list[int], **inputs: Any) -> None:
    """The last rows choose these tokens, by far more than rounding can undo."""
    rows = target(**inputs).logits[0, -len(tokens) :]
    top = rows.topk(2, -1)
    assert top.indices[:, 0].tolist() == tokens
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = copy.deepcopy(target).double()(**wide).logits[0, -len(tokens) :]
    assert (exact - rows).abs().max() < GAP / 20
    assert (top.values[:, 0] - top.values[:, 1]).min() > GAP


def check_seen(total: Statistics) -> None:
    """Something was accepted and something rejected, or the comparison has tested nothing."""
    assert total.accepted > 0 and total.rejected > 0


# --- a decoder, in our loop and in transformers' ----------------------------------------------


@pytest.fixture(scope="module")
def causal() -> Case:
    torch.manual_seed(34)
    target = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "vocab_size": FEW})).eval()
    models = [target, *(perturbed(target, noise) for noise in (0.02, 0.03, 0.05))]
    ids, mask = prompts([6, 4, 5], vocabulary=FEW)
    eos, expected = 3, []
    for row, real in zip(ids, mask.bool(), strict=True):
        alone = row[real][None]
        text = target.generate(
            alone, do_sample=False, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0
        )
        expected.append(text[0, alone.shape[1] :].tolist())
        check_gaps(target, expected[-1], input_ids=text[:, :-1])
    assert len({row[-1] == eos for row in expected}) == 2  # some meet it, some do not
    return Case(models, ids, mask, eos, expected, FEW)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_generate(causal, name, batch, static):
    rows = BATCHES[batch]
    own = slice(0, len(rows))
    total = Statistics(4)
    for policy in GAMMAS.values():
        found, statistics = specdec_ext.generate(
            causal.models[0], DRAFTERS[name](causal.models, causal, rows), causal.ids[own],
            attention_mask=causal.mask[own], max_new_tokens=LIMITS[own], gamma=policy(),
            eos_token_id=causal.eos, pad_token_id=0, static_cache=static,
        )  # fmt: skip
        check(found, causal, rows, LIMITS)
        total += statistics
    if name != "none":
        check_seen(total)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_generate_fn(causal, name, batch):
    rows = BATCHES[batch]
    own = slice(0, len(rows))
    total = Statistics(4)
    for policy, cache in (("fixed", "dynamic"), ("renewal", "static")):
        found = causal.models[0].generate(
            causal.ids[own], attention_mask=causal.mask[own], do_sample=False, max_new_tokens=NEW,
            eos_token_id=causal.eos, pad_token_id=0, return_dict_in_generate=True,
            cache_implementation=cache, custom_generate=hf.generate_fn, gamma=GAMMAS[policy](),
            draft_model=DRAFTERS[name](causal.models, causal, rows),
        )  # fmt: skip
        check(found.sequences, causal, rows, [NEW] * len(rows))
        total += found.statistics
    if name != "none":
        check_seen(total)


ASSISTANTS = {
    "model": lambda models: {"assistant_model": models[1]},
    "early exit": lambda models: {"assistant_early_exit": 1},
    "lookup": lambda models: {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_assisted_generation(causal, monkeypatch, name, rule):
    """Sampling from the one most likely token is greedy, and goes through the operator."""
    accepted = []
    verify = hf.ops.verify

    def counting(*args, **kwargs):
        found = verify(*args, **kwargs)
        accepted.append((int(found.num_accepted), args[1].shape[1]))
        return found

    def generated(b):
        alone = causal.ids[b : b + 1, causal.mask[b].bool()]
        found = causal.models[0].generate(
            alone, do_sample=True, top_k=1, max_new_tokens=NEW, eos_token_id=causal.eos,
            pad_token_id=0, **ASSISTANTS[name](causal.models),
        )  # fmt: skip
        return found[0, alone.shape[1] :].tolist()

    expected = causal.expected
    if name == "lookup":  # 5.17 says nothing where the prompt ends with the end token
        own = [generated(b) for b in range(3)]
        assert all(row in ([], known) for row, known in zip(own, expected, strict=True))
        expected = own
    monkeypatch.setattr(hf.ops, "verify", counting)
    with hf.assisted_generation(rule):
        assert [generated(b) for b in range(3)] == expected
    if name == "lookup":  # transformers compares its candidates itself: they have no law
        assert not accepted
    else:
        assert any(n for n, _ in accepted) and any(n < drafted for n, drafted in accepted)


# --- encoder-decoders --------------------------------------------------------------------------

EOS = {"t5": 10, "bart": 64, "marian": 36, "whisper": 58}
LENGTHS = [9, 4, 6]


def inputs_of_rows(inputs: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    """What the encoder reads for these rows; one row alone has no padding."""
    own = {name: value[rows] for name, value in inputs.items()}
    if len(rows) == 1 and "attention_mask" in own:
        own = {name: value[:, : LENGTHS[rows[0]]] for name, value in own.items()}
    return own


@pytest.fixture(scope="module", params=MODELS)
def encoder_decoder(request) -> tuple[Case, dict[str, torch.Tensor]]:
    target, draft = encoder_decoders(request.param)
    models = [target, draft, perturbed(target, 0.04), perturbed(target, 0.05)]
    models = [model.float() for model in models]
    inputs = inputs_of(request.param, LENGTHS)
    if "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].float()
    eos, expected = EOS[request.param], []
    for b in range(3):
        own = inputs_of_rows(inputs, [b])
        text = GenerationMixin.generate(  # Whisper's own, around it, cuts the text up
            target, **own, do_sample=False, max_new_tokens=NEW, eos_token_id=eos
        )
        expected.append(text[0, 1:].tolist())
        check_gaps(target, expected[-1], **own, decoder_input_ids=text[:, :-1])
    assert len({row[-1] == eos for row in expected}) == 2
    assert len(set(map(tuple, expected))) == 3
    return Case(models, start(3), torch.ones(3, 1), eos, expected, 67), inputs


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "early exit"])
def test_encoder_decoders(encoder_decoder, name):
    case, inputs = encoder_decoder
    total = Statistics(4)
    for rows in BATCHES.values():
        own = slice(0, len(rows))
        models = [encoded(model, **inputs_of_rows(inputs, rows)) for model in case.models]
        for policy in ("heuristic", "entropy"):
            found, statistics = specdec_ext.generate(
                models[0], DRAFTERS[name](models, case, rows), case.ids[own],
                max_new_tokens=LIMITS[own], gamma=GAMMAS[policy](), eos_token_id=case.eos,
            )  # fmt: skip
            check(found, case, rows, LIMITS)
            total += statistics
    if name == "uniform":  # of 67 tokens
        assert total.rejected > 0
    elif name != "none":
        check_seen(total)
