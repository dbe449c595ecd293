"""Models with recurrent state: how they continue, checkpoints and replays, rows, refusals."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers as hf
from generate_models import pair, perturbed, prompts
from recurrent_models import KINDS, Folding, WholeText, greedy, small
from test_generate_law import chi_square
from torch import nn

import specdec_ext
from specdec_ext.commands import check
from specdec_ext.decoding import continuation, hosting, recurrent
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.early_exit import EarlyExitDrafter
from specdec_ext.decoding.drafters.hierarchy import HierarchicalDrafter
from specdec_ext.decoding.drafters.lookup import LookupDrafter
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafters.stacked import StackedDrafter
from specdec_ext.decoding.recurrent import RecurrentModel
from specdec_ext.decoding.states import State, state_argument
from specdec_ext.decoding.trees import StaticTree
from specdec_ext.hf import generate_fn

NEW = 9
CPU = torch.device("cpu")


def rolled(host, drop, **how):
    host.rollback(Counts.on(CPU, drop), **how)


# --- models of transformers ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_that_of_the_forward_pass(kind):
    """Plainly and speculatively, alone and in ragged batches; none in a worse way than it must."""
    target = small(kind)
    found = continuation.continuation(target, CPU)
    assert (found.way, found.fewest, found.shares) == KINDS[kind].found
    draft = perturbed(target, 0.02)
    ids, mask = prompts([6, 3, 6])
    expected = greedy(target, ids, mask, NEW)
    for model in (None, draft):
        sequences, statistics = specdec_ext.generate(
            target, model, ids, attention_mask=mask, max_new_tokens=NEW, gamma=3, eos_token_id=()
        )
        assert torch.equal(sequences, expected)
        alone = specdec_ext.generate(
            target, model, ids[:1], max_new_tokens=NEW, gamma=3, eos_token_id=()
        )
        assert torch.equal(alone.sequences, expected[:1])
    assert 0 < statistics.accepted_of_tested < 1  # rejections and acceptances were seen


def test_long_generation_runs_through_several_replays():
    target = small("mamba2")
    ids, mask = prompts([5, 4])
    sequences, statistics = specdec_ext.generate(
        target, perturbed(target, 0.1), ids, attention_mask=mask, max_new_tokens=32, gamma=3,
        eos_token_id=(),
    )  # fmt: skip
    assert torch.equal(sequences, greedy(target, ids, mask, 32))
    assert statistics.rejected > 24 / 2


DRAFTERS = {
    "model": lambda target: small("mamba"),
    "hierarchy": lambda target: HierarchicalDrafter(small("mamba"), small("rwkv"), gamma=2),
    "three levels": lambda target: HierarchicalDrafter(
        perturbed(target, 0.01),
        HierarchicalDrafter(perturbed(target, 0.02), small("rwkv"), gamma=2),
        gamma=3,
    ),
    "stack": lambda target: StackedDrafter(LookupDrafter(), ModelDrafter(small("mamba"))),
    "early exit": lambda target: EarlyExitDrafter(target, 2),
}


@pytest.mark.parametrize("architecture", ["llama", "bamba"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_as_drafts(architecture, name):
    target = pair("llama")[0] if architecture == "llama" else small(architecture)
    ids, mask = prompts([6, 4])
    drafter = DRAFTERS[name](target)
    sequences, _ = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4, eos_token_id=()
    )
    assert torch.equal(sequences, greedy(target, ids, mask, NEW))


def test_a_model_drafts_for_itself_without_a_rejection():
    """Draft and target take their states from different calls; any slip of either would show."""
    target = small("mamba2")
    ids, mask = prompts([5, 3])
    _, statistics = specdec_ext.generate(
        target, target, ids, attention_mask=mask, max_new_tokens=25, gamma=4, temperature=1.0,
        seeds=0, eos_token_id=(), rule="coupled",
    )  # fmt: skip
    assert statistics.accepted_of_tested == 1.0 and statistics.tokens_per_target_call == 5.0


def test_one_model_serves_several_threads():
    """RecurrentGemma keeps its state in its modules: each generation has copies of them."""
    target = small("recurrent_gemma")
    ids = [prompts([n], seed=n)[0] for n in (4, 5, 6, 7)]
    expected = [greedy(target, i, torch.ones_like(i), NEW) for i in ids]
    before = {name: dict(vars(module)) for name, module in target.named_modules()}
    found = {}

    def run(job):
        found[job] = specdec_ext.generate(
            target, target, ids[job], max_new_tokens=NEW, gamma=2, eos_token_id=()
        ).sequences

    threads = [threading.Thread(target=run, args=(job,)) for job in range(len(ids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[job], expected[job]) for job in range(len(ids)))
    for name, module in target.named_modules():  # as it was
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "bamba"])
def test_inside_transformers(kind):
    target = small(kind)
    ids, _ = prompts([6])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = target.generate(ids, **options)
    given = target.generate(
        ids, custom_generate=generate_fn, draft_model=perturbed(target, 0.02), gamma=3, **options
    )
    assert torch.equal(given, expected)
    name = state_argument(target)
    if kind != "rwkv":
        used = getattr(target(input_ids=ids, use_cache=True), name)
        with pytest.raises(ValueError, match=f"{name} that are not empty"):
            target.generate(ids, custom_generate=generate_fn, **{name: used}, **options)


def test_check_asks_a_recurrent_target_again():
    target = small("mamba")
    ids, _ = prompts([9])
    logits, precision = check._ask_again(target, ids)
    assert logits.shape == (67,) and 0 < precision < 1e-4


@pytest.mark.parametrize("options", [{"static_cache": True}, {"tree": StaticTree.from_widths([2])}])
def test_trees_and_static_caches_are_refused(options):
    model, (attention, _) = small("mamba"), pair()
    ids, _ = prompts([4])
    for target, draft in ((model, attention), (attention, model)):
        with pytest.raises(ValueError, match=r"MambaForCausalLM keeps .*recurrent state.*chains"):
            specdec_ext.generate(target, draft, ids, max_new_tokens=2, **options)
    host = RecurrentModel(model, torch.tensor([9]))
    with pytest.raises(ValueError, match="branches of a tree"):
        host.begin_tree()


# --- the way in which a model continues ---------------------------------------------------------


class Faulty(Folding):
    """Continues from a state as some models of transformers do."""

    def __init__(self, fault: str) -> None:
        super().__init__(seed=1)
        self.fault = fault

    def forward(self, input_ids, state=None, use_cache=True):
        several = input_ids.shape[1] > 1
        if state is not None:
            forgotten = {"several": several, "one": not several, "all": True}.get(self.fault)
            if forgotten:
                state = [torch.zeros_like(part) for part in state]
            elif self.fault == "batch" and len(input_ids) > 1:
                state[0][:] = state[0][:1]
        return super().forward(input_ids, state, use_cache)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", ("whole", 1, True)),
        ("several", ("single", 1, True)),
        ("one", ("whole", 2, True)),
        ("batch", ("whole", 1, False)),
    ],
)
def test_faults_are_found_out(fault, expected):
    model = Faulty(fault)
    found = continuation.continuation(model, CPU)
    assert (found.way, found.fewest, found.shares) == expected
    ids, mask = prompts([5, 3, 1], vocabulary=6)
    right = greedy(model, ids, mask, NEW)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": ()}
    assert torch.equal(specdec_ext.generate(model, None, ids, **options).sequences, right)
    # As a draft it may be called as often as it must be.
    other = Folding(seed=2)
    given = specdec_ext.generate(other, model, ids, gamma=3, **options).sequences
    assert torch.equal(given, greedy(other, ids, mask, NEW))
    if found.way == "single":
        with pytest.raises(ValueError, match=r"every draft token would cost a call.*draft=None"):
            specdec_ext.generate(model, other, ids, gamma=3, **options)
    else:
        given = specdec_ext.generate(model, other, ids, gamma=3, **options).sequences
        assert torch.equal(given, right)


def test_a_model_that_cannot_continue_is_refused():
    ids, _ = prompts([4], vocabulary=6)
    with pytest.raises(ValueError, match="Faulty keeps a state.*neither rolled back nor decoded"):
        specdec_ext.generate(Faulty("all"), None, ids, max_new_tokens=2)


def test_a_model_without_any_state_is_refused():
    config = hf.OpenAIGPTConfig(vocab_size=16, n_embd=8, n_layer=1, n_head=2)
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel has no key-value cache"):
        specdec_ext.generate(hf.OpenAIGPTLMHeadModel(config).eval(), None, ids, max_new_tokens=2)


@pytest.mark.parametrize("gated", [False, True])
def test_a_scan_from_a_state_is_the_recurrence(gated):
    """Against the recurrence, token by token, from the state that its first half leaves."""
    torch.manual_seed(0)
    b, d, n, length = 2, 5, 3, 9
    inputs, steps = torch.randn(2, b, d, length, dtype=torch.float64)
    rates = -torch.rand(d, n, dtype=torch.float64)
    into, out_of = torch.randn(2, b, n, length, dtype=torch.float64)
    skip, bias = torch.randn(2, d, dtype=torch.float64)
    z = torch.randn(b, d, length, dtype=torch.float64) if gated else None

    def scan(inputs, steps, rates, into, out_of, before=None, z=None, **kwargs):
        h = torch.zeros(b, d, n, dtype=torch.float64) if before is None else before
        dt, rows = nn.functional.softplus(steps + bias[:, None]), []
        for t in range(inputs.shape[2]):
            h = (rates * dt[:, :, t, None]).exp() * h
            h = h + (dt * inputs)[:, :, t, None] * into[:, None, :, t]
            rows.append((h * out_of[:, None, :, t]).sum(-1) + skip * inputs[:, :, t])
        y = torch.stack(rows, -1)
        return (y if z is None else y * nn.functional.silu(z)), h

    parts = [(x[..., :4], x[..., 4:]) for x in (inputs, steps, into, out_of)]
    (u0, u1), (s0, s1), (b0, b1), (c0, c1) = parts
    _, before = scan(u0, s0, rates, b0, c0)
    late = None if z is None else z[..., 4:]
    expected = scan(u1, s1, rates, b1, c1, before, late)
    given = continuation.scan_from(
        before, scan, u1, s1, rates, b1, c1, z=late, delta_bias=bias, delta_softplus=True,
        return_last_state=True,
    )  # fmt: skip
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- checkpoints and replays --------------------------------------------------------------------


def reference(monkeypatch, run):
    """Run with models that read the whole text again in every call: nothing is remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(hosting, "host_model", lambda model, ends, **how: WholeText(model, ends))
        return run()


FOLDING = Folding(seed=1), Folding(seed=1, noise=0.7)


def sampled(longest_replay=None, monkeypatch=None, *, gamma=3, rule="block", new=40, **options):
    """Sample from folding models in a ragged batch; logits are equal bit for bit in any batch."""
    if longest_replay is not None:
        kept = RecurrentModel.__init__.__kwdefaults__
        monkeypatch.setattr(
            RecurrentModel.__init__, "__kwdefaults__", {**kept, "longest_replay": longest_replay}
        )
    ids, mask = prompts([6, 2, 6, 1], vocabulary=6)
    return specdec_ext.generate(
        *FOLDING, ids, attention_mask=mask, max_new_tokens=[new, new, new - 7, 9],
        temperature=1.0, gamma=gamma, rule=rule, seeds=5, pad_token_id=0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
@pytest.mark.parametrize("longest", [0, 2, 24, 1000])
def test_sampled_tokens_are_those_of_models_that_read_everything_again(monkeypatch, rule, longest):
    """With equal logits and seeds: equal tokens, whatever is replayed."""
    expected = reference(monkeypatch, lambda: sampled(rule=rule))
    found = sampled(longest, monkeypatch, rule=rule)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.statistics.accepted == expected.statistics.accepted > 0
    assert found.statistics.rejected == expected.statistics.rejected > 0


def test_joint_law():
    """6,000 requests in one batch: rows that accept alike share their calls."""
    target, draft = Folding(seed=1), Folding(seed=1, noise=0.7)
    prompt = [1, 2]
    sequences, _ = specdec_ext.generate(
        target, draft, torch.tensor([prompt]).repeat(6_000, 1), max_new_tokens=3, gamma=2,
        temperature=1.0, seeds=torch.arange(6_000) * 7919, eos_token_id=(),
    )  # fmt: skip
    law = target.joint_law(prompt, 3)
    code = (sequences[:, 2] * 6 + sequences[:, 3]) * 6 + sequences[:, 4]
    assert chi_square(torch.bincount(code, minlength=len(law)), law) > 1e-9
    wrong = target.joint_law([2, 1], 3)
    assert chi_square(torch.bincount(code, minlength=len(law)), wrong) < 1e-9


class Noting(Folding):
    """Notes how many tokens each call runs."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.fed: list[int] = []

    def forward(self, input_ids, state=None, use_cache=True):
        if use_cache:
            self.fed.append(input_ids.shape[1])
        return super().forward(input_ids, state, use_cache)


@pytest.mark.parametrize("longest", [3, 1000])
def test_no_target_call_is_added_but_for_long_replays(monkeypatch, longest):
    kept = RecurrentModel.__init__.__kwdefaults__
    monkeypatch.setattr(
        RecurrentModel.__init__, "__kwdefaults__", {**kept, "longest_replay": longest}
    )
    target, draft = Noting(seed=1), Folding(seed=1, noise=2.0)
    ids = torch.tensor([[1, 2, 3, 4]])
    continuation.continuation(target, CPU)  # its calls are not counted
    target.fed.clear()
    _, statistics = specdec_ext.generate(
        target, draft, ids, max_new_tokens=40, gamma=2, temperature=1.0, seeds=3, eos_token_id=()
    )
    prefill, *fed = target.fed
    assert prefill == 3 and statistics.rejected > 5
    flushes = len(fed) - statistics.rounds
    if longest == 1000:
        assert flushes == 0 and max(fed) > 2 + 1 + 3
    else:
        assert 0 < flushes < statistics.rounds / 2
        # A replay of up to 3 tokens rides along; one of up to 3 + 3 is run by itself.
        assert max(fed) <= 3 + 3
    assert sum(fed) < 40 * (2 + 1 + 8)


def test_plain_decoding_runs_each_token_once_and_keeps_no_checkpoint(monkeypatch):
    target = Noting(seed=1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    continuation.continuation(target, CPU)
    target.fed.clear()
    saved = []
    monkeypatch.setattr(State, "load", lambda self, other: saved.append(other))
    specdec_ext.generate(target, None, ids, max_new_tokens=9, eos_token_id=())
    assert target.fed == [2, *[1] * 9] and not saved


@pytest.mark.parametrize("kind", ["fold", "mamba2", "bamba"])
def test_rollbacks_of_any_depth(kind):
    """Behind the last commit, and behind all of them: the text is what counts."""
    model = Folding(seed=1) if kind == "fold" else small(kind)
    text = prompts([30], vocabulary=6)[0]
    with torch.inference_mode():
        expected = model(input_ids=text, use_cache=False).logits.float()
        host = RecurrentModel(model, torch.tensor([40]), longest_replay=6)
        host.prefill(text[:, :8], None)
        at = 8
        for new, drop in [(3, 0), (4, 4), (2, 1), (3, 0), (1, 0), (5, 9), (8, 6), (3, 11), (6, 0)]:
            logits = host.forward(text[:, at : at + new])
            torch.testing.assert_close(
                logits, expected[:, at : at + new], rtol=1e-4, atol=1e-4, check_dtype=False
            )
            rolled(host, [drop], across_holes=drop > new)
            at += new - drop
            assert host.lengths == [at]


def test_rows_go_on_with_parts_of_a_state():
    model = small("mamba2")
    texts = prompts([20, 20, 20])[0]
    with torch.inference_mode():
        expected = model(input_ids=texts, use_cache=False).logits.float()
        host = RecurrentModel(model, torch.tensor([40, 40, 40]))
        host.prefill(texts[:, :5], None)
        host.forward(texts[:, 5:9])
        assert host.calls == 1
        rolled(host, [1, 0, 1])
        assert [group.rows for group in host._groups] == [[0, 2], [1]]
        at = [8, 9, 8]
        feed = torch.stack([texts[b, at[b] : at[b] + 3] for b in range(3)])
        logits = host.forward(feed)
        assert host.calls == 3
        for b in range(3):
            there = expected[b, at[b] : at[b] + 3]
            torch.testing.assert_close(logits[b], there, rtol=1e-4, atol=1e-4, check_dtype=False)
        rolled(host, [0, 2, 0])
        host.select(torch.tensor([2, 1]), [2, 1])
        assert host.lengths == [11, 10]
        feed = torch.stack([texts[2, 11:13], texts[1, 10:12]])
        logits = host.forward(feed)
        for found, there in zip(logits, [expected[2, 11:13], expected[1, 10:12]], strict=True):
            torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-4, check_dtype=False)


# --- controls: mistakes that must show ----------------------------------------------------------


def forgets_to_restore(monkeypatch):
    monkeypatch.setattr(State, "load", lambda self, saved: setattr(self, "seen", saved.seen))


def forgets_the_replay(monkeypatch):
    rollback = recurrent._Group.rollback

    def wrong(self, drop):
        rollback(self, drop)
        self.checkpoints[-1].seen = self.length

    monkeypatch.setattr(recurrent._Group, "rollback", wrong)


def shares_the_checkpoint(monkeypatch):
    def wrong(self, saved):
        self.value, self.seen = saved.value, saved.seen

    monkeypatch.setattr(State, "load", wrong)


def mixes_up_rows(monkeypatch):
    select = State.select
    monkeypatch.setattr(State, "select", lambda self, rows, n: select(self, rows.flip(0) * 0, n))


@pytest.mark.parametrize(
    "mistake", [forgets_to_restore, forgets_the_replay, shares_the_checkpoint, mixes_up_rows]
)
def test_controls(monkeypatch, mistake):
    expected = sampled().sequences
    mistake(monkeypatch)
    assert not torch.equal(sampled().sequences, expected)
