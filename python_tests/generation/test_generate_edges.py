"""Where requests end, what logits processors see, and bursts as they come."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys

import pytest
import torch
from generate_models import pair, prompts, tables
from test_generate_law import ALPHA, chi_square
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

import specdec_ext
from specdec_ext.decoding import GrownTree, StaticTree, chain_generation
from specdec_ext.decoding.processors import Processors
from specdec_ext.decoding.stopping import Stops
from specdec_ext.decoding.texts import Texts

NEW = 24
DRAWS = 4000
PROMPT = [1, 2]
TREES = {"chain": None, "tree": StaticTree.from_widths((2, 2)), "grown": GrownTree(8, 3, 3)}


# ---- processors ----------------------------------------------------------------------------------


def never_the_next(ids, scores):
    """A grammar: after token t comes anything but t + 1. Changes its argument, as many do."""
    scores[:, (ids[0, -1] + 1) % scores.shape[1]] = -torch.inf
    return scores


def seldom_again(ids, scores):
    """Tokens of the last four places are less likely."""
    recent = torch.zeros(scores.shape[1], dtype=torch.bool)
    recent[ids[0, -4:]] = True
    return torch.where(recent, scores - 1.2, scores)


def law_of(target, processors, length, temperature, **filters):
    """The joint law of the next tokens, ``[V ** length]``, from the definition."""
    vocabulary = target.config.vocab_size
    law = torch.zeros(vocabulary**length, dtype=torch.float64)
    for code, tokens in enumerate(itertools.product(range(vocabulary), repeat=length)):
        text, p = [0, *PROMPT], 1.0
        for token in tokens:
            scores = target.table[text[-2], text[-1]].clone()[None]
            for processor in processors:
                scores = processor(torch.tensor([text[1:]]), scores)
            p *= float(filtered(scores[0].double() / temperature, **filters)[token])
            text.append(token)
        law[code] = p
    return law


def filtered(logits, top_k=0, top_p=1.0):
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    p = logits.softmax(-1)
    above = torch.stack([p[p > value].sum() for value in p])
    return torch.where(above < top_p, p, 0.0) / torch.where(above < top_p, p, 0.0).sum()


def sampled(target, draft, length, draws=DRAWS, **options):
    """Counts of the next tokens, ``[V ** length]``."""
    ids = torch.tensor([PROMPT]).repeat(draws, 1)
    sequences, _ = specdec_ext.generate(
        target, draft, ids, max_new_tokens=length, seeds=torch.arange(draws) * 7919,
        eos_token_id=(), **options,
    )  # fmt: skip
    code = torch.zeros(draws, dtype=torch.int64)
    for token in sequences[:, len(PROMPT) :].unbind(1):
        code = code * target.config.vocab_size + token
    return torch.bincount(code, minlength=target.config.vocab_size**length)


def p_value(target, draft, processors, length=2, temperature=1.0, **options):
    filters = {k: options[k] for k in ("top_k", "top_p") if k in options}
    law = law_of(target, processors, length, temperature, **filters)
    counts = sampled(
        target, draft, length, temperature=temperature, logits_processor=processors, **options
    )
    assert counts[law == 0].sum() == 0
    return chi_square(counts[law > 0], law[law > 0])


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["plain", "filters"]
)
def test_two_token_law_under_processors(rule, options):
    target, draft = tables(6)
    processors = [seldom_again, never_the_next]
    assert p_value(target, draft, processors, rule=rule, gamma=2, **options) > ALPHA


@pytest.mark.thorough
def test_law_under_processors_in_plain_decoding_and_with_another_vocabulary():
    target, _ = tables(4)
    _, wide = tables(6, seed=1)
    for draft in (None, wide):
        assert p_value(target, draft, [never_the_next, seldom_again], gamma=2) > ALPHA


def test_control_processors_that_see_only_what_was_committed(monkeypatch):
    """Field note A.13."""

    class Blind(Processors):
        def chain(self, running, drafted, logits, **how):
            nothing = [[]] * len(running)
            rows = (row[:, None] for row in logits.unbind(1))
            return torch.cat([super(Blind, self).chain(running, nothing, r) for r in rows], 1)

    target, draft = tables(4)
    monkeypatch.setattr(chain_generation, "Processors", Blind)
    law = law_of(target, [never_the_next], 2, 1.0)
    counts = sampled(target, draft, 2, temperature=1.0, gamma=2, logits_processor=never_the_next)
    assert counts[law == 0].sum() > 0


@pytest.mark.parametrize("tree", TREES)
def test_greedy_under_processors_is_that_of_transformers(tree):
    target, draft = pair(noise=0.02)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            NoBadWordsLogitsProcessor([[5], [7, 9]], eos_token_id=0),
        ]
    )
    lengths = [6, 3]
    ids, mask = prompts(lengths)
    found, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=3, tree=TREES[tree],
        logits_processor=processors, eos_token_id=(),
    )  # fmt: skip
    assert statistics.accepted > 0
    for b, length in enumerate(lengths):
        alone = ids[b : b + 1, -length:]
        expected = target.generate(
            alone, max_new_tokens=NEW, do_sample=False, logits_processor=processors,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert found[b, ids.shape[1] :].tolist() == expected[0, length:].tolist()


def test_rows_are_processed_after_their_own_prefix():
    seen = []

    def record(ids, scores):
        seen.append(ids[0].tolist())
        return scores + len(ids[0])

    def processors(texts):
        given = Processors([record], Texts(texts, [[] for _ in texts], pad=0), whole_batch=False)
        given.chain([0], [[]], torch.zeros(1, 1, 10))  # which looks at what kind they are
        seen.clear()
        return given

    logits = torch.zeros(2, 3, 7)
    out = processors([[1, 2], [3]]).chain([0, 1], [[4, 5], [6, -1]], logits)
    assert sorted(seen) == [[1, 2], [1, 2, 4], [1, 2, 4, 5], [3], [3, 6]]
    assert out[:, :, 0].tolist() == [[2, 3, 4], [1, 2, 0]] and (logits == 0).all()
    out = processors([[1, 2], [3]]).chain([0, 1], [[4, 5], [6, -1]], logits[:, :1])
    assert seen == [[1, 2, 4, 5]] and out[:, 0, 0].tolist() == [4, 0]
    tokens, parents = [[2, 7, 8, -1, 9, 6]], [[-1, 0, 0, 1, 3, 1]]
    out = processors([[1, 2]]).tree([0], tokens, parents, torch.zeros(1, 6, 10))
    assert seen == [[1, 2], [1, 2, 7], [1, 2, 8], [1, 2, 7, 6]]
    assert out[0, :, 0].tolist() == [2, 3, 3, 0, 0, 4]


# ---- where a request ends ------------------------------------------------------------------------


class UpToAnEnd:
    """As a trie: behind an end token nothing may come, and to be asked what may is an error."""

    def __init__(self, width, end, first_end=False):
        self.width, self.end, self.first_end = width, end, first_end

    def __call__(self, ids, scores):
        new = ids[0, self.width :].tolist()
        if self.end in new:
            raise ValueError(f"nothing may come behind {new}")
        if self.first_end:  # the only text there is
            scores = scores.clone()
            scores[:, : self.end] = scores[:, self.end + 1 :] = -torch.inf
        return scores


@pytest.mark.parametrize("tree", TREES)
def test_no_processor_is_asked_behind_an_end_token(tree):
    target, _ = pair()
    ids, _ = prompts([5])
    whole = plain_tokens(target, ids, None)[0]
    end = whole[4]
    found, statistics = specdec_ext.generate(
        target, target, ids, gamma=9, tree=TREES[tree], max_new_tokens=NEW, eos_token_id=end,
        logits_processor=UpToAnEnd(5, end),
    )  # fmt: skip
    assert found[0, 5:].tolist() == whole[: whole.index(end) + 1]
    assert statistics.accepted > 0


def test_a_processor_that_lets_nothing_but_an_end_come():
    """It is asked twice, to see whether it keeps state, but not about a text that has ended."""
    target, _ = pair()
    ids, mask = prompts([5, 5])
    for options in ({}, {"padded_texts": True}):
        found, _ = specdec_ext.generate(
            target, target, ids, attention_mask=mask, gamma=3, max_new_tokens=NEW, eos_token_id=7,
            logits_processor=UpToAnEnd(5, 7, first_end=True), **options,
        )  # fmt: skip
        assert found[:, 5:].tolist() == [[7], [7]]


@pytest.mark.parametrize("tree", TREES)
def test_a_row_without_a_law_behind_an_end_is_no_error(tree):
    target, _ = tables(6)
    end = plain_tokens(target, torch.tensor([PROMPT]), None)[0][2]
    target.table[:, end] = torch.nan  # the rows behind it
    target.last_position = len(PROMPT) + NEW - 1
    options = {"max_new_tokens": NEW, "eos_token_id": end}
    plain, _ = specdec_ext.generate(target, None, torch.tensor([PROMPT]), **options)
    draft = tables(6)[0]  # the same, with laws everywhere
    draft.last_position = target.last_position
    for gamma in (1, 2, 3, 9):
        found, _ = specdec_ext.generate(
            target, draft, torch.tensor([PROMPT]), gamma=gamma, tree=TREES[tree], **options
        )
        assert torch.equal(found, plain)


def plain_tokens(target, ids, mask):
    plain, _ = specdec_ext.generate(
        target, None, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=()
    )
    return plain[:, ids.shape[1] :].tolist()


def is_cut(found, expected, ends):
    """Whether each row is the expected one up to its end, and padding after it."""
    return all(
        row == [*whole[:end], *[0] * (len(row) - end)]
        for row, whole, end in zip(found, expected, ends, strict=True)
    )


def run_until(tree, **stops):
    """Generate greedily with stops; also plainly without them."""
    target, draft = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    whole = plain_tokens(target, ids, mask)
    found, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4, tree=TREES[tree],
        eos_token_id=(), pad_token_id=0, **stops,
    )  # fmt: skip
    return whole, found[:, ids.shape[1] :].tolist(), statistics


def check_stop_sequences(tree):
    """Each row ends at the first token behind which one of the sequences stands."""
    target, _ = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    whole = plain_tokens(target, ids, mask)
    sequences = [whole[0][9:12], whole[1][4:6]]
    ends = [
        min(
            [
                n
                for n in range(NEW + 1)
                for s in sequences
                if n >= len(s) and row[n - len(s) : n] == s
            ]
            + [NEW]
        )
        for row in whole
    ]
    assert min(ends) < NEW
    whole, found, statistics = run_until(tree, stop_sequences=sequences)
    assert is_cut(found, whole, ends)
    assert statistics.new_tokens == ends and statistics.emitted == sum(ends)


@pytest.mark.parametrize("tree", TREES)
def test_stop_sequences(tree):
    check_stop_sequences(tree)


def check_criteria(tree):
    """They are asked at every token of every row up to its end, and nowhere else."""
    asked = []

    def ends_at_a_multiple_of_seven(ids, scores):
        assert scores is None and ids.shape[0] == 1
        asked.append(ids[0].tolist())
        return torch.tensor([ids.shape[1] > 9 and int(ids[0, -1]) % 7 == 0])

    criteria = StoppingCriteriaList([ends_at_a_multiple_of_seven])
    whole, found, statistics = run_until(tree, stopping_criteria=criteria)
    ids, _ = prompts([6, 3, 5])
    ends = []
    for length, row in zip([6, 3, 5], whole, strict=True):
        ends.append(
            next((n for n in range(1, NEW + 1) if length + n > 9 and row[n - 1] % 7 == 0), NEW)
        )
    assert min(ends) < NEW and is_cut(found, whole, ends)
    assert statistics.new_tokens == ends
    texts = [
        ids[b, 6 - length :].tolist() + row[:n]
        for b, (length, row, end) in enumerate(zip([6, 3, 5], whole, ends, strict=True))
        for n in range(1, end + 1)
    ]
    assert sorted(asked) == sorted(texts)


@pytest.mark.parametrize("tree", TREES)
def test_criteria_are_asked_at_every_token(tree):
    check_criteria(tree)


def check_stop_strings():
    """The output ends at the first token behind which the text holds the string."""
    from specdec_ext.commands.pair import find_prompts, load_pair

    models = load_pair()
    prompt = find_prompts(models)[0]
    options = {"max_new_tokens": 40, "gamma": 4, "eos_token_id": ()}
    whole, _ = specdec_ext.generate(models.target, models.draft, prompt.ids, **options)
    new = whole[0, prompt.ids.shape[1] :]
    text = models.tokenizer.decode(new)
    inside = 0
    for place in range(len(text) // 4, len(text) - 3, 5):
        string, bursts = text[place : place + 3], []
        ends = (n for n in range(1, 41) if string in models.tokenizer.decode(new[:n]))
        end = next(ends)
        found, statistics = specdec_ext.generate(
            models.target, models.draft, prompt.ids, stop_strings=string,
            tokenizer=models.tokenizer, on_round=bursts.extend, **options,
        )  # fmt: skip
        assert found[0, prompt.ids.shape[1] :].tolist() == new[:end].tolist()
        assert statistics.emitted == end
        inside += bursts[-1].accepted == len(bursts[-1].tokens) < 4
    assert inside > 0  # bursts had more behind the end


def test_stop_strings():
    check_stop_strings()


def test_the_rest_of_a_batch_goes_on_after_a_stop():
    target, draft = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    whole = plain_tokens(target, ids, mask)
    bursts = []
    specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=(),
        stop_sequences=[whole[1][1:3]], on_round=bursts.append,
    )  # fmt: skip
    tokens = {b: [] for b in range(3)}
    for burst in itertools.chain(*bursts):
        tokens[burst.request] += burst.tokens
    assert tokens[1] == whole[1][:3] and max(map(len, tokens.values())) == NEW


def test_a_sequence_is_looked_for_in_the_new_tokens():
    stops = Stops([], [[5, 6]])
    assert stops.kept([1, 5], [], [6, 2]) is None
    assert stops.kept([1], [5], [6, 2]) == 1


def test_refused():
    target, draft = pair()
    ids, _ = prompts([4])
    for options, error, message in (
        ({"stop_strings": "x"}, ValueError, "need a tokenizer"),
        ({"stop_sequences": [[]]}, ValueError, "at least one token"),
        ({"stopping_criteria": [3]}, TypeError, "got int"),
        ({"logits_processor": 3}, TypeError, "got int"),
    ):
        with pytest.raises(error, match=message):
            specdec_ext.generate(target, draft, ids, **options)
        with pytest.raises(error, match=message):  # at once
            specdec_ext.stream(target, draft, ids, **options)


# ---- bursts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_streaming_gives_what_generate_gives(tree):
    target, draft = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    options = {
        "attention_mask": mask, "max_new_tokens": [NEW, 7, 1], "temperature": 0.9, "seeds": 3,
        "tree": TREES[tree],
    }  # fmt: skip
    whole, expected = specdec_ext.generate(target, draft, ids, **options)
    running = specdec_ext.stream(target, draft, ids, **options)
    tokens, accepted = {b: [] for b in range(3)}, 0
    while True:
        try:
            burst = next(running)
        except StopIteration as end:
            result = end.value
            break
        assert not torch.is_inference_mode_enabled()
        tokens[burst.request] += burst.tokens
        assert len(burst.flags) == len(burst.logprobs) == len(burst.tokens)
        assert burst.flags == sorted(burst.flags, reverse=True)
        accepted += sum(burst.flags)
    assert torch.equal(result.sequences, whole)
    for b, row in enumerate(whole[:, 6:].tolist()):
        assert row[: len(tokens[b])] == tokens[b]
    assert accepted == expected.accepted == result.statistics.accepted


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_logprobs_of_bursts(tree, raw):
    target, draft = pair(noise=0.02)
    ids, _ = prompts([5])
    sequences, logprobs = None, []
    options = {"temperature": 0.7, "top_k": 9, "seeds": 1, "raw_logprobs": raw}
    result = specdec_ext.generate(
        target, draft, ids, max_new_tokens=NEW, tree=TREES[tree], **options,
        on_round=lambda bursts: logprobs.extend(bursts[0].logprobs),
    )  # fmt: skip
    sequences = result.sequences
    assert result.logprobs.tolist() == [logprobs] and not result.logprobs.is_inference()
    with torch.inference_mode():
        rows = target(input_ids=sequences).logits[0, 4:-1]
    if not raw:
        rows = rows.masked_fill(rows < rows.topk(9).values[:, -1:], -torch.inf) / 0.7
    expected = rows.log_softmax(-1).gather(1, sequences[0, 5:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), expected.float(), atol=1e-4)


def test_logprobs_of_a_batch_whose_requests_end_apart():
    """Beside the pair that `generate` returns, which stays one; copies and pickles keep them."""
    target, draft = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    of_bursts = [[], [], []]

    def keep(bursts):
        for burst in bursts:
            of_bursts[burst.request] += burst.logprobs

    result = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=[NEW, 7, 0], temperature=0.9,
        seeds=3, on_round=keep,
    )  # fmt: skip
    assert list(map(len, of_bursts)) == [NEW, 7, 0]
    padded = [row + [0.0] * (NEW - len(row)) for row in of_bursts]
    for same in (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        sequences, statistics = same
        assert sequences.shape == (3, 6 + NEW) and statistics.emitted == NEW + 7
        assert same.logprobs.tolist() == padded


def test_options_of_generate_that_streaming_does_without():
    target, draft = pair()
    ids, _ = prompts([4])
    with pytest.raises(TypeError, match="on_round is of generate"):
        specdec_ext.stream(target, draft, ids, on_round=print)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        specdec_ext.stream(target, draft, ids, gama=3)


def test_progress(capsys, monkeypatch):
    target, draft = pair()
    ids, _ = prompts([4])
    specdec_ext.generate(target, draft, ids, max_new_tokens=5, progress=True, eos_token_id=())
    assert "5/5" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        specdec_ext.generate(target, draft, ids, max_new_tokens=5, progress=True)
