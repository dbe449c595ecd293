"""`generate` at its edges: arguments, errors, statistics by hand, synchronisation, drafters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings

import pytest
import torch
from generate_models import TableModel, pair, tables
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_ext
from specdec_ext.decoding import Draft, GenerationError, NoDrafter, Statistics
from specdec_ext.decoding.stats import PHASES

IDS = torch.tensor([[1, 2], [3, 0]])


@pytest.fixture
def models():
    return tables(5)


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a Tensor, got list"),
        (
            {"input_ids": torch.tensor([1])},
            ValueError,
            r"input_ids must be \[B, P\].*got \[1\] int64",
        ),
        ({"input_ids": torch.zeros(1, 2)}, ValueError, r"got \[1, 2\] float32"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, ValueError, r"P >= 1.*got \[2, 0\]"),
        ({"attention_mask": [[1, 1]]}, TypeError, "attention_mask must be a Tensor, got list"),
        ({"attention_mask": torch.ones(2, 3)}, ValueError, r"\[B, P\] = \[2, 2\], got \[2, 3\]"),
        ({"attention_mask": torch.tensor([[1, 1], [1, 0]])}, ValueError, "left.*request 1"),
        ({"gamma": -1}, ValueError, r"gamma must be in \[0, 65534\], got -1"),
        ({"gamma": 2.0}, TypeError, "gamma must be an int or a GammaPolicy, got float 2.0"),
        ({"max_new_tokens": -3}, ValueError, "max_new_tokens must be at least 0, got -3"),
        ({"max_new_tokens": [1, 2, 3]}, ValueError, r"max_new_tokens must be .* \[2\], got \[3\]"),
        ({"temperature": [1.0, -1.0]}, ValueError, "temperature .* request 1: -1.0"),
        ({"max_new_tokens": "7"}, TypeError, "max_new_tokens must be an int.*got str '7'"),
        ({"max_new_tokens": [1, 2.0]}, TypeError, "of request 1 must be an int, got float 2.0"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number.*got str"),
        ({"temperature": [None, 1.0]}, TypeError, "request 0 must be a number, got NoneType"),
        ({"temperature": math.nan}, ValueError, "temperature .* request 0: nan"),
        ({"top_p": math.nan}, ValueError, "top_p .* request 0: nan"),
        ({"min_p": 1.5}, ValueError, "min_p .* request 0: 1.5"),
        ({"top_k": [1]}, ValueError, r"top_k must be .* \[2\], got \[1\]"),
        (
            {"seeds": torch.zeros(2)},
            ValueError,
            r"seeds must be \[B\] = \[2\] int64, got .*float32",
        ),
        ({"seeds": [1, 2, 3]}, ValueError, r"seeds must be .* \[2\], got \[3\]"),
        ({"seeds": 1, "generator": torch.Generator()}, ValueError, "seeds or generator"),
        ({"rule": "nosuch", "temperature": 1.0}, ValueError, "block.*token"),
        ({"lenience": 0.0, "rule": "lenient"}, ValueError, "lenience"),
    ],
)
def test_arguments_are_named_in_errors(models, arguments, error, text):
    target, draft = models
    given = {"target": target, "draft": draft, "input_ids": IDS, **arguments}
    with pytest.raises(error, match=text):
        specdec_ext.generate(**given)


REFUSED = {
    "openai-gpt": ("OpenAIGPTLMHeadModel has no key-value cache", {"n_head": 2}),
    "t5": ("encoder-decoder", {"d_kv": 4, "d_ff": 8, "num_heads": 2}),
}


@pytest.mark.parametrize("static_cache", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_remembers_nothing_of_its_own_is_refused(kind, static_cache):
    """As target and as draft; models with recurrent state are in test_recurrent.py."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    text, options = REFUSED[kind]
    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **small, **options)
    factory = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model, ids = factory.from_config(config).eval(), torch.tensor([[1, 2]])
    attention, _ = pair()
    for target, draft in ((model, None), (attention, model)):
        with pytest.raises(ValueError, match=text):
            specdec_ext.generate(target, draft, ids, max_new_tokens=3, static_cache=static_cache)


def test_training_mode_warns(models):
    target, draft = models
    target.train()
    with pytest.warns(UserWarning, match=r"eval\(\)"):
        specdec_ext.generate(target, draft, IDS, max_new_tokens=1)


def test_no_request_and_no_new_token(models):
    target, draft = models
    none = torch.zeros(0, 3, dtype=torch.long)
    assert specdec_ext.generate(target, draft, none).sequences.shape == (0, 3)
    assert specdec_ext.generate(target, draft, none, temperature=1.0).statistics.rounds == 0
    sequences, statistics = specdec_ext.generate(target, draft, IDS, max_new_tokens=0)
    assert torch.equal(sequences, IDS)
    assert statistics.rounds == 0 and math.isnan(statistics.accepted_of_tested)
    sequences, statistics = specdec_ext.generate(target, draft, IDS, max_new_tokens=[0, 3])
    assert statistics.new_tokens == [0, 3]


def test_sequences_are_ordinary_tensors_of_the_prompts_type(models):
    target, draft = models
    sequences, _ = specdec_ext.generate(target, draft, IDS.int(), max_new_tokens=3)
    assert sequences.dtype == torch.int32
    assert not sequences.is_inference()


def test_gamma_0_and_no_draft_are_plain_decoding(models):
    target, draft = models
    options = {"max_new_tokens": 9, "temperature": 1.0, "seeds": 2}
    plain = specdec_ext.generate(target, None, IDS, **options)
    zero = specdec_ext.generate(target, draft, IDS, gamma=0, **options)
    assert torch.equal(plain.sequences, zero.sequences)
    assert plain.statistics.rounds == zero.statistics.rounds == 9
    assert plain.statistics.draft_calls == zero.statistics.draft_calls == 0
    assert plain.statistics.histogram == [18] and plain.statistics.bonus == 18


# --- failure ----------------------------------------------------------------------------------


def broken(target: TableModel, token: int, value: float) -> TableModel:
    """Return a model with rows of one bad value after ``token``."""
    table = target.table.clone()
    table[:, token] = value
    return TableModel(table)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_without_a_law_raises_and_keeps_what_there_was(models, value, gamma, temperature):
    target, draft = models
    options = {"max_new_tokens": 40, "temperature": temperature, "seeds": [3, 8], "gamma": gamma}
    good = specdec_ext.generate(target, draft, IDS, **options).sequences
    bad_token = good[1, 2 + 7].item()
    with pytest.raises(GenerationError, match=r"request \d.*NaN.*status 1") as caught:
        specdec_ext.generate(broken(target, bad_token, value), draft, IDS, **options)
    error = caught.value
    assert set(error.status) == {1}
    for request in range(2):
        count = error.statistics.new_tokens[request]
        row = error.sequences[request, 2 : 2 + count].tolist()
        text = IDS[request, -1:].tolist() + row
        # It stops right behind the token whose law is bad, and all until then stands.
        assert bad_token not in text[:-1]
        if request in error.requests:
            assert text[-1] == bad_token
        if temperature == 0 or gamma == 0:  # else the bad row has moved thresholds before it
            assert row == good[request, 2 : 2 + count].tolist()
    assert specdec_ext.generate(target, draft, IDS, **options).sequences.shape == (2, 42)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_without_a_law_only_costs_time(models, temperature):
    target, draft = models
    options = {"max_new_tokens": 30, "temperature": temperature, "seeds": 3}
    _, statistics = specdec_ext.generate(target, broken(draft, 1, math.nan), IDS, **options)
    assert statistics.emitted == 60
    mute = TableModel(torch.full((5, 5, 5), math.nan))
    sequences, statistics = specdec_ext.generate(target, mute, IDS, gamma=3, **options)
    assert statistics.accepted == 0 or temperature == 0
    if temperature:  # nothing was drafted, so nothing was rejected
        assert statistics.drafted == statistics.rejected == 0
        plain = specdec_ext.generate(target, None, IDS, **options).sequences
        assert torch.equal(sequences, plain)


# --- statistics -------------------------------------------------------------------------------


class Script:
    """A drafter that proposes what it is told, round by round."""

    def __init__(self, rounds):
        self.rounds, self.calls = iter(rounds), 0

    def start(self, requests):
        pass

    def propose(self, gamma, positions, go_on=None):
        return Draft(torch.tensor([next(self.rounds)], dtype=torch.int64)[:, :gamma])

    def commit(self, tokens, accepted):
        pass

    def select(self, rows, indices):
        pass


def counter(vocabulary: int = 20) -> TableModel:
    """Return a model that counts: after token t comes t + 1."""
    table = torch.zeros(vocabulary, vocabulary, vocabulary)
    table[:, torch.arange(vocabulary), (torch.arange(vocabulary) + 1) % vocabulary] = 9.0
    return TableModel(table)


def check_example_by_hand():
    """Prompt 0; the target counts 1, 2, 3, ... until the stop token 12; gamma 3.

    round  drafted      outcome                          accepted  rejected  emitted
    1      1 2 9        1 2 accepted, 9 replaced by 3    2         1         1 2 3
    2      9 9 9        first replaced by 4              0         1         4
    3      5 6 7        all accepted, bonus 8            3         0         5 6 7 8
    4      9 -1 -1      all (of one) accepted, bonus 10  1         0         9 10
    5      11 12 13     all accepted, cut behind 12      2         0         11 12
    """
    rounds = [[1, 2, 9], [9, 9, 9], [5, 6, 7], [9, -1, -1], [11, 12, 13]]
    bursts = []
    sequences, statistics = specdec_ext.generate(
        counter(), Script(rounds), torch.tensor([[0]]), max_new_tokens=40, gamma=3,
        eos_token_id=12, on_round=bursts.extend,
    )  # fmt: skip
    assert sequences[0].tolist() == list(range(13))
    assert [burst.tokens for burst in bursts] == [
        [1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [11, 12],
    ]  # fmt: skip
    assert [burst.replaced for burst in bursts] == [9, 9, None, None, None]
    assert statistics.rounds == statistics.request_calls == 5
    assert statistics.emitted == 12
    assert statistics.drafted == 3 + 3 + 3 + 1 + 3
    assert statistics.accepted == 2 + 0 + 3 + 1 + 2
    assert statistics.rejected == 2
    assert statistics.bonus == 2  # 8 and 10: the bonus of the last round lies behind the stop
    assert statistics.tokens_per_target_call == 12 / 5
    assert statistics.accepted_of_tested == 8 / 10
    assert statistics.mean_accepted_length == 8 / 5
    assert statistics.histogram == [1, 1, 2, 1]
    assert statistics.tested == [5, 3, 2]
    assert statistics.passed == [4, 3, 1]
    assert statistics.conditional_acceptance == [4 / 5, 3 / 3, 1 / 2]
    assert statistics.acceptance_by_position == [4 / 5, 3 / 5, 1 / 5]
    assert sum(statistics.acceptance_by_position) == pytest.approx(statistics.mean_accepted_length)
    found = statistics.summary()
    assert [found[f"acceptance_at_{i}"] for i in (1, 2, 3)] == statistics.acceptance_by_position
    assert found["emitted"] == statistics.emitted and found["seconds_draft"] >= 0


def test_statistics_of_an_example_by_hand():
    check_example_by_hand()


def test_statistics_when_the_replacement_is_the_stop_token():
    bursts = []
    _, statistics = specdec_ext.generate(
        counter(), Script([[1, 9, 9]]), torch.tensor([[0]]), gamma=3, eos_token_id=2,
        on_round=bursts.extend,
    )  # fmt: skip
    assert bursts[0].tokens == [1, 2] and bursts[0].replaced == 9
    assert (statistics.accepted, statistics.rejected, statistics.emitted) == (1, 1, 2)


def test_statistics_of_invalid_draft_tokens():
    """An id that is no token ends the draft: nothing was rejected there."""
    _, statistics = specdec_ext.generate(
        counter(), Script([[1, 77, 3], [3, 4, 5]]), torch.tensor([[0]]), gamma=3, max_new_tokens=6
    )
    assert statistics.drafted == 2 + 3 or statistics.drafted == 3 + 3
    assert (statistics.accepted, statistics.rejected, statistics.bonus) == (4, 0, 2)


def test_statistics_add_up_and_go_to_json(models):
    target, draft = models
    runs = [
        specdec_ext.generate(target, draft, IDS, max_new_tokens=9, gamma=gamma).statistics
        for gamma in (2, 4)
    ]
    both = runs[0] + runs[1]
    assert both.gamma == 4
    for name in ("rounds", "request_calls", "drafted", "accepted", "rejected", "emitted", "bonus"):
        assert getattr(both, name) == sum(getattr(run, name) for run in runs)
    assert both.histogram[0] == runs[0].histogram[0] + runs[1].histogram[0]
    assert both.new_tokens == [9, 9, 9, 9]
    assert both.decode_seconds == pytest.approx(sum(run.decode_seconds for run in runs))
    assert json.loads(json.dumps(both.as_dict(), allow_nan=False))["rounds"] == both.rounds
    assert Statistics(2).as_dict()["accepted_of_tested"] is None
    assert Statistics(2).__add__(1) is NotImplemented


def test_a_summary_is_finite_numbers_alone(models):
    target, draft = models
    for gamma, others in ((3, {"measure_alpha": True}), (3, {}), (0, {})):
        statistics = specdec_ext.generate(
            target, draft, IDS, max_new_tokens=9, gamma=gamma, temperature=0.9, seeds=0, **others
        ).statistics
        found = statistics.summary()
        assert all(type(value) in (int, float) and math.isfinite(value) for value in found.values())
        assert ("alpha" in found) == bool(others) and ("accepted_of_tested" in found) == (gamma > 0)
    assert "tokens_per_second" not in Statistics(2).summary()


def test_times_sum_to_the_wall_time():
    import time

    target, draft = pair()
    ids = torch.tensor([[1, 2, 3]])
    specdec_ext.generate(target, draft, ids, max_new_tokens=2)
    begin = time.perf_counter()
    _, statistics = specdec_ext.generate(target, draft, ids, max_new_tokens=60)
    wall = time.perf_counter() - begin
    assert tuple(statistics.seconds) == PHASES
    assert all(seconds > 0 for seconds in statistics.seconds.values())
    assert 0.5 * wall < sum(statistics.seconds.values()) <= wall
    assert statistics.seconds["target"] > statistics.seconds["verify"]
    assert 0 < statistics.verify_share < 1


# --- synchronisation --------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device, outside the models."""

    def __init__(self):
        super().__init__()
        self.count, self.paused = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        waits = ("_local_scalar_dense", "nonzero", "equal", "masked_select")
        if not self.paused and any(word in name for word in waits):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_host_synchronisation_a_round(monkeypatch, temperature):
    target, draft = tables(6)
    reads = Reads()
    for model in (target, draft):
        forward = model.forward

        def quiet(*args, forward=forward, **kwargs):
            reads.paused = True
            try:
                return forward(*args, **kwargs)
            finally:
                reads.paused = False

        quiet.__signature__ = __import__("inspect").signature(forward)
        model.forward = quiet
    for name in ("tolist", "cpu", "numpy", "item", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, original=original, name=name, **kwargs):
            if not reads.paused:
                reads.count += name in ("tolist", "cpu", "numpy")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    counts = []

    def after(bursts):
        counts.append(reads.count)
        reads.count = 0

    with reads:
        specdec_ext.generate(
            target, draft, torch.tensor([[1, 2]] * 7), max_new_tokens=[30] * 7, gamma=3, seeds=0,
            temperature=temperature, on_round=after,
        )  # fmt: skip
    assert len(counts) > 5
    assert counts[1:] == [1] * (len(counts) - 1)


# --- other drafters, other things ---------------------------------------------------------------


def test_no_drafter_is_a_drafter(models):
    target, _ = models
    plain = specdec_ext.generate(target, None, IDS, max_new_tokens=5)
    same = specdec_ext.generate(target, NoDrafter(), IDS, max_new_tokens=5)
    assert torch.equal(plain.sequences, same.sequences)
    assert same.statistics.accepted == 0


def test_a_drafter_may_propose_fewer_than_asked(models):
    """Up to gamma: none, or one, or tokens that end early; the output is plain greedy output."""
    rounds = [[1], [], [4, -1, 5, 6], [-1], [7, 8, 9], [9, 9, 9, 9], [12, 13]]
    sequences, statistics = specdec_ext.generate(
        counter(), Script(rounds), torch.tensor([[0]]), gamma=4, max_new_tokens=13
    )
    assert sequences[0].tolist() == list(range(14))
    assert statistics.rounds == 7
    assert statistics.drafted == 1 + 0 + 1 + 0 + 3 + 2 + 1  # the limit of 13 cuts the last two
    assert statistics.rejected == 1


def test_rule_greedy_ignores_the_temperature(models):
    target, draft = models
    state = torch.get_rng_state()
    greedy = specdec_ext.generate(target, draft, IDS, max_new_tokens=9).sequences
    given = specdec_ext.generate(
        target, draft, IDS, max_new_tokens=9, rule="greedy", temperature=2.0, top_k=3
    ).sequences
    assert torch.equal(given, greedy)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_large_limit_allocates_little(models):
    target, draft = models
    sequences, _ = specdec_ext.generate(
        target, draft, IDS, max_new_tokens=10**12, temperature=1.0, seeds=0, eos_token_id=3
    )
    assert sequences.shape[1] < 100


def test_caches_grow_beyond_what_was_allocated(monkeypatch):
    monkeypatch.setattr(sys.modules["specdec_ext.decoding.chain_generation"], "ROOM", 3)
    target, draft = tables(5)
    few = specdec_ext.generate(
        target, draft, IDS, max_new_tokens=50, temperature=1.0, seeds=0
    ).sequences
    monkeypatch.undo()
    many = specdec_ext.generate(
        target, draft, IDS, max_new_tokens=50, temperature=1.0, seeds=0
    ).sequences
    assert torch.equal(few, many)


def test_operators_alone_do_not_import_transformers():
    code = (
        "import sys, torch, specdec_ext\n"
        "specdec_ext.sample(torch.zeros(1, 4), seeds=torch.zeros(1).long(),"
        " positions=torch.zeros(1).long())\n"
        "specdec_ext.generate\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_warnings(models):
    target, draft = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specdec_ext.generate(target, draft, torch.tensor([[1, 2, 3]]), max_new_tokens=5)
