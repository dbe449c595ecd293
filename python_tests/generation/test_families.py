"""One family of each kind of cache, position and window, in every mode: right, or refused by name.

The table says what is supported. Every other pair of family and mode must give the text of the
model's own uncached, unpadded forward pass. ``benchmarks/families`` does the same for all families.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from families import models as tiny  # noqa: E402
from families import modes  # noqa: E402

NEW = 8  # tokens: half of the rounds reject something

STATIC = {"static plain 1", "static chain 1", "static chain ragged", "static tree ragged",
          "generate_fn static 1"}  # fmt: skip
TREES = {"tree 1", "tree ragged", "grown tree 1", "grown tree equal", "static tree ragged"}
EARLY_EXIT = {"early exit ragged"}
#: Where Mamba is concerned, transformers hands over as its static cache what it always hands over.
HANDED_OVER = {"generate_fn static 1"}

#: What each family is there for, and the modes that are refused.
FAMILIES: dict[str, tuple[str, set[str]]] = {
    "llama": ("rotary positions, grouped heads", set()),
    "gpt2": ("learned positions, given as position_ids", set()),
    "bart": ("learned positions, counted in cache slots", TREES),
    "bloom": ("ALiBi, from the mask", TREES),
    "falcon:alibi": ("ALiBi, beside position_ids that are not read", TREES),
    "gpt_neo": ("a local window that no cache layer shows", TREES | STATIC),
    "mistral": ("a sliding window in every layer", TREES),
    "gemma3_text": ("sliding windows and full attention by turns", TREES),
    "roberta": ("positions that begin behind the padding id", set()),
    "deepseek_v3": ("latent attention, experts", set()),
    "mamba": ("a recurrent state", (TREES | STATIC) - HANDED_OVER),
    "qwen3_next": ("a recurrent state beside attention", TREES | STATIC),
    "t5:encoded": ("relative positions behind an encoder", set()),
    "bart:encoded": ("learned positions behind an encoder", set()),
    "whisper:encoded": ("an encoder of audio", set()),
}
#: Families that transformers' own assisted generation does not take.
STATEFUL = {"mamba", "qwen3_next"}
CELLS = [(family, mode) for family in FAMILIES for mode in modes.MODES]


@functools.cache
def case(family: str) -> modes.Case:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for models as small as these
    try:
        return modes.case_of(tiny.families()[family], NEW)
    finally:
        torch.set_num_threads(threads)


@functools.cache
def cell(family: str, mode: str) -> modes.Cell:
    return modes.classify(mode, case(family))


@pytest.mark.parametrize(("family", "mode"), CELLS, ids=[f"{f}, {m}" for f, m in CELLS])
def test_right_or_refused(family, mode):
    found = cell(family, mode)
    expected = modes.REFUSED if mode in FAMILIES[family][1] else modes.RIGHT
    if mode == "assisted 1" and family in STATEFUL:
        expected = modes.ABSENT
    # Their own loop may part from a run without a cache, with our verification and without.
    also = modes.HOST if mode == "assisted 1" else expected
    assert found.verdict in (expected, also), found.detail


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("cpmant", "cannot go on behind a cache"),  # it wants the whole text in each call
        ("blt", "transformers cannot make a cache"),  # nor can its own generate
    ],
)
def test_what_cannot_be_run_is_refused_in_every_mode(family, why):
    for mode in ("plain 1", "chain ragged", "static chain 1", "tree 1", "lookup 1"):
        found = cell(family, mode)
        assert found.verdict == modes.REFUSED and why in found.detail, found


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        # Indices of sparse attention beside keys and values; positions ``[3, B, n]``.
        ("deepseek_v32", "chain equal"),
        ("qwen4_exp_text", "chain equal"),
        # An encoder that reads sound by another name than the model does.
        ("speech-encoder-decoder:encoded", "generate_fn 1"),
    ],
)
def test_families_with_oddities_of_their_own(family, mode):
    found = cell(family, mode)
    assert found.verdict == modes.RIGHT, found.detail


@pytest.mark.parametrize("family", FAMILIES)
def test_something_was_rolled_back(family):
    """Some draft tokens were accepted and some rejected, or the comparison has tested nothing."""
    chains = [cell(family, mode) for mode in ("chain 1", "chain equal", "chain ragged")]
    assert sum(found.accepted for found in chains) > 0
    assert sum(found.rejected for found in chains) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_varied(family):
    assert modes.variety(case(family).batches) >= 6


# --- the page of docs/ that says so ---------------------------------------------------------------

KINDS = {"trees": TREES, "static caches": STATIC, "early exit": EARLY_EXIT}


def test_the_page_names_what_is_tested():
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    rows = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            family, kind, refused = (cell.strip() for cell in line.strip("|").split("|"))
            rows[family.strip("`")] = (kind, refused)
    assert rows.keys() == FAMILIES.keys()
    for family, (kind, refused) in FAMILIES.items():
        wholly = {name for name, names in KINDS.items() if names - HANDED_OVER <= refused}
        assert rows[family] == (kind, ", ".join(sorted(wholly)) or "nothing")


# --- controls: the bench finds what is wrong ------------------------------------------------------


@pytest.fixture
def altered(monkeypatch):
    """The loop gets one token wrong: the third of the last row."""
    generate = modes.specdec_ext.generate

    def wrong(target, draft, ids, **options):
        sequences, statistics = generate(target, draft, ids, **options)
        place = sequences[-1, ids.shape[1] + 2]
        place.copy_((place + 1) % tiny.VOCABULARY)
        return sequences, statistics

    monkeypatch.setattr(modes.specdec_ext, "generate", wrong)


def test_another_text_is_found(altered):
    found = modes.classify("chain ragged", case("llama"))
    assert found.verdict == modes.WRONG and found.detail.startswith("row 2, token 2")


def test_a_tie_excuses_its_own_place_only(altered):
    known = case("llama")
    ragged = known.batches["ragged"]

    def verdict(gaps):
        batches = {**known.batches, "ragged": ragged._replace(gaps=gaps)}
        return modes.classify("plain ragged", known._replace(batches=batches)).verdict

    elsewhere = [[0.0] * NEW, [0.0] * NEW, [0.0, 0.0, 0.5, *[0.0] * (NEW - 3)]]
    assert verdict(elsewhere) == modes.WRONG
    assert verdict([*elsewhere[:2], [0.5, 0.5, 0.0, *[0.5] * (NEW - 3)]]) == modes.TIED


def test_an_error_that_is_no_refusal_is_a_crash(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(modes.specdec_ext, "generate", fail)
    assert modes.classify("plain 1", case("llama")).verdict == modes.CRASH


def test_errors_of_other_libraries_are_crashes(monkeypatch):
    """A ValueError that transformers or Python raise says nothing of what is supported."""

    def fail(*args, **kwargs):
        return dict(zip("ab", [1], strict=True))

    monkeypatch.setattr(modes.specdec_ext, "generate", fail)
    found = modes.classify("plain 1", case("llama"))
    assert found.verdict == modes.CRASH and "ValueError" in found.detail


def test_padding_of_the_encoder_is_in_the_batches():
    ragged = case("bart:encoded").batches["ragged"]
    assert ragged.inputs["attention_mask"].sum(1).tolist() == list(modes.READ_RAGGED)
    assert len({len(text) for text in ragged.texts}) == 3
