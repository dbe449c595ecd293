"""The ways of running a family, and the verdict on each.

The oracle is the model's own uncached, unpadded forward pass of one row, greedy, token by token.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin

import specdec_ext
from families import models as tiny
from specdec_ext import hf
from specdec_ext.decoding import (
    AggressiveDrafter,
    Burst,
    EarlyExitDrafter,
    GrownTree,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    StackedDrafter,
    StaticTree,
    SuffixDrafter,
    UniformDrafter,
)
from specdec_ext.decoding.cache_names import cache_of, own_cache_name
from specdec_ext.decoding.encoder_decoder import encoded

NEW = 12
#: Lengths of prompts: of batches without padding, and of padded ones. The first one runs alone.
EQUAL, RAGGED = (11, 11, 11), (11, 7, 9)
#: Of an encoder's inputs, and the decoder's prompts behind its start token.
READ_EQUAL, READ_RAGGED = (9, 9, 9), (9, 4, 6)
SEEDS, VARIED = 3, 10  # attempts, and how many different tokens are enough
TIE = {torch.float64: 1e-5, torch.float32: 2e-3}  # of the two largest logits
BATCHES = ("one", "equal", "ragged")

RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "WRONG", "crash"
TIED = "tie"  # another token where the two largest logits are as good as equal
HOST = "host"  # what transformers itself says with a cache, which is not what it says without
ABSENT = "n/a"  # transformers itself cannot
OURS_AT_FAULT = (WRONG, CRASH)


class Prompts(NamedTuple):
    """A batch, and what each of its rows alone must become."""

    texts: list[list[int]]  # without padding
    expected: list[list[int]]  # new tokens
    gaps: list[list[float]]  # between the two largest logits, relative to the largest
    inputs: dict[str, Tensor]  # what an encoder reads; empty where there is none

    @property
    def new(self) -> int:
        """How many tokens each row must get."""
        return len(self.expected[0])


class Case(NamedTuple):
    """A family's target, ever less exact copies of it, and the batches."""

    models: list[nn.Module]
    batches: dict[str, Prompts]
    dtype: torch.dtype
    encoder: bool


class Counts(NamedTuple):
    """Draft tokens that were kept, and rejections."""

    accepted: int
    rejected: int


class Cell(NamedTuple):
    """What came of one mode."""

    mode: str
    verdict: str
    detail: str = ""
    accepted: int = -1
    rejected: int = -1


# --- the oracle -----------------------------------------------------------------------------------


@torch.inference_mode()
def forward(model: Any, text: list[int], inputs: dict[str, Tensor]) -> Tensor:
    """Run one row without cache and padding; return its logits ``[n, V]``."""
    ids = torch.tensor([text])
    if not inputs:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    else:
        logits = model(**inputs, decoder_input_ids=ids, use_cache=False).logits[0]
    return logits


def continuation(
    model: Any, text: list[int], inputs: dict[str, Tensor], new: int
) -> tuple[list[int], list[float]]:
    """Return the greedy new tokens of one row, and how clear each was."""
    if inputs:
        inputs = _read_once(model, inputs)
    found: list[int] = []
    gaps: list[float] = []
    for _ in range(new):
        row = forward(model, text + found, inputs)[-1].double()
        top = row.topk(2)
        found.append(int(top.indices[0]))
        gaps.append(float((top.values[0] - top.values[1]) / row.abs().max().clamp(min=1e-30)))
    return found, gaps


@torch.inference_mode()
def _read_once(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Run the encoder, so that every step of the oracle need not."""
    mask = inputs.get("attention_mask")
    own = {"encoder_outputs": model.get_encoder()(**inputs)}
    return own | ({} if mask is None else {"attention_mask": mask})


# --- a case ---------------------------------------------------------------------------------------


def case_of(family: tiny.Family, new: int = NEW) -> Case:
    """Build the models of a family and its prompts, with the ``new`` tokens that must come.

    Some random models repeat a token for ever; of a few, the one with most to say is taken.
    """
    best = None
    for seed in range(SEEDS):
        found = _case_of(family, seed, new)
        if best is None or variety(found[1]) > variety(best[1]):
            best = found
        if variety(best[1]) >= VARIED:
            break
    assert best is not None
    target, batches, dtype = best
    return Case(_drafts(target, batches), batches, dtype, bool(target.config.is_encoder_decoder))


def variety(batches: dict[str, Prompts]) -> int:
    """Count the different tokens of all expected texts; a text that holds padding is worth none."""
    tokens = {token for batch in batches.values() for row in batch.expected for token in row}
    return 0 if tiny.PAD in tokens else len(tokens)


def _case_of(
    family: tiny.Family, seed: int, new: int
) -> tuple[nn.Module, dict[str, Prompts], torch.dtype]:
    target = tiny.build(family, seed)
    encoder = bool(target.config.is_encoder_decoder)
    texts = {
        "one": tiny.words(RAGGED[:1], seed),
        "equal": tiny.words(EQUAL, seed + 1),
        "ragged": tiny.words(RAGGED, seed),
    }
    read: dict[str, list[dict[str, Tensor]]] = {name: [{}] * 3 for name in BATCHES}
    if encoder:
        texts, read = _decoder_texts(seed), tiny_inputs(target, family, seed)
    dtype = _dtype(target, texts["one"][0], read["one"][0])
    target = target.to(dtype)
    batches = {}
    for name in BATCHES:
        rows = [_cast(inputs, dtype) for inputs in read[name]]
        known = [
            continuation(target, text, own, new)
            for text, own in zip(texts[name], rows, strict=False)
        ]
        batches[name] = Prompts(
            texts[name], [k[0] for k in known], [k[1] for k in known], _stacked(rows, len(known))
        )
    return target, batches, dtype


def _dtype(target: Any, text: list[int], inputs: dict[str, Tensor]) -> torch.dtype:
    """Choose float64 where the family runs in it."""
    for dtype in (torch.float64, torch.float32):
        target.to(dtype)
        own = _cast(inputs, dtype)
        try:
            logits = forward(target, text, own)
        except (RuntimeError, TypeError, ValueError):
            if dtype == torch.float32:
                raise
            continue
        if logits.isfinite().all() and (dtype == torch.float32 or _pads(target, text, own)):
            return dtype
    raise tiny.NotBuilt("its logits are not finite")


@torch.inference_mode()
def _pads(target: Any, text: list[int], inputs: dict[str, Tensor]) -> bool:
    """Tell whether padding works in this type: some fill float32 masks with float64's minimum."""
    ids, mask = tiny.padded([text, text[1:]], left=True)
    if inputs or len(text) < 2:
        return True
    try:
        logits = target(input_ids=ids, attention_mask=mask, use_cache=False).logits
    except (RuntimeError, TypeError, ValueError):
        return True  # not a question of type
    return bool(logits[mask.bool()].isfinite().all())


def _cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def _decoder_texts(seed: int) -> dict[str, list[list[int]]]:
    tails = tiny.words((2, 0, 1), seed)
    ragged = [[tiny.START, *tail] for tail in tails]
    return {"one": ragged[:1], "equal": [[tiny.START]] * 3, "ragged": ragged}


def tiny_inputs(target: Any, family: tiny.Family, seed: int) -> dict[str, list[dict[str, Tensor]]]:
    """Return what the encoder reads, one mapping a row, for each batch."""
    if getattr(target.get_encoder(), "main_input_name", "input_ids") == "input_ids":

        def rows(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
            texts = tiny.words(lengths, seed + 2)
            return [
                {"input_ids": torch.tensor([t]), "attention_mask": torch.ones(1, len(t)).long()}
                for t in texts
            ]

        ragged = rows(READ_RAGGED)
        return {"one": ragged[:1], "equal": rows(READ_EQUAL), "ragged": ragged}
    sounds = tiny.sounds(target, family, seed)
    return {"one": sounds[:1], "equal": sounds, "ragged": sounds}


def _stacked(rows: list[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Batch what an encoder reads, padded on the right."""
    if not rows or not rows[0]:
        return {}
    if "input_ids" not in rows[0]:
        return {name: torch.cat([row[name] for row in rows[:count]]) for name in rows[0]}
    ids, mask = tiny.padded([row["input_ids"][0].tolist() for row in rows[:count]], left=False)
    return {"input_ids": ids, "attention_mask": mask}


def _row(inputs: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """Take one row of what an encoder reads, without its padding."""
    own = {name: value[b : b + 1] for name, value in inputs.items()}
    if "attention_mask" in own and "input_ids" in own:
        length = int(own["attention_mask"].sum())
        own = {name: value[:, :length] for name, value in own.items()}
    return own


def _drafts(target: nn.Module, batches: dict[str, Prompts]) -> list[nn.Module]:
    """Return the target, and copies with such noise that they agree with it now and then."""
    low, high, found = 0.0, 0.4, None
    prompts = batches["ragged"]
    for _ in range(7):
        noise = (low + high) / 2
        draft = tiny.perturbed(target, noise, seed=1)
        agreed = _agreement(draft, prompts)
        if 0.45 <= agreed <= 0.85:
            found = noise
            break
        if agreed > 0.85:
            low = noise
        else:
            high = noise
    noise = noise if found is None else found
    return [target, *(tiny.perturbed(target, noise * k, seed=i) for i, k in
                      ((1, 1.0), (2, 1.3), (3, 1.6)))]  # fmt: skip


def _agreement(draft: Any, prompts: Prompts) -> float:
    """Return how often a draft names the very next token of the expected texts."""
    agreed = []
    for b, (text, new) in enumerate(zip(prompts.texts, prompts.expected, strict=True)):
        rows = forward(draft, text + new[:-1], _row(prompts.inputs, b))[len(text) - 1 :]
        agreed += (rows.argmax(-1) == torch.tensor(new)).tolist()
    return sum(agreed) / len(agreed)


# --- modes ----------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """A way of running: which batch, and how to get its new tokens."""

    batch: str
    run: Callable[[Case, Prompts], tuple[Tensor, Any]]


def _batched(prompts: Prompts) -> tuple[Tensor, Tensor | None]:
    ids, mask = tiny.padded(prompts.texts, left=True)
    return ids, None if mask.all() else mask


def _loop(drafter: Callable[[list[Any], Case, Prompts], Any], **options: Any) -> Any:
    """Run `specdec_ext.generate`."""

    def run(case: Case, prompts: Prompts) -> tuple[Tensor, Any]:
        ids, mask = _batched(prompts)
        models: list[Any] = list(case.models)
        if case.encoder:
            models = [encoded(model, **prompts.inputs) for model in models]
        draft = drafter(models, case, prompts)
        found, statistics = specdec_ext.generate(
            models[0], draft, ids, attention_mask=mask, max_new_tokens=prompts.new,
            eos_token_id=(), pad_token_id=tiny.PAD, **options,
        )  # fmt: skip
        return found[:, ids.shape[1] :], statistics

    return run


def _hosted(drafter: Callable[[list[Any], Case, Prompts], Any], **options: Any) -> Any:
    """Run `hf.generate_fn` inside the model's own generate."""

    def run(case: Case, prompts: Prompts) -> tuple[Tensor, Any]:
        seen: list[Burst] = []
        found = _their_generate(
            case, prompts, custom_generate=hf.generate_fn, on_round=seen.extend,
            draft_model=drafter(list(case.models), case, prompts), **options,
        )  # fmt: skip
        rejected = sum(burst.replaced is not None for burst in seen)
        return found, Counts(sum(burst.accepted for burst in seen), rejected)

    return run


def _assisted(case: Case, prompts: Prompts) -> tuple[Tensor, Any]:
    """Run transformers' assisted generation with our verification."""
    with hf.assisted_generation():
        return _their_assisted(case, prompts), None


def _their_assisted(case: Case, prompts: Prompts) -> Tensor:
    return _their_generate(case, prompts, do_sample=True, top_k=1, assistant_model=case.models[1])


def _their_generate(case: Case, prompts: Prompts, **options: Any) -> Tensor:
    """Run transformers' generate (not Whisper's own around it); return the new tokens."""
    ids, mask = _batched(prompts)
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": prompts.new} | options
    if case.encoder:
        names = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        given |= prompts.inputs | {k: v for k, v in names.items() if v is not None}
    else:
        given |= {"input_ids": ids}
        given["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    torch.manual_seed(0)
    return GenerationMixin.generate(case.models[0], **given)[:, ids.shape[1] :]


def _sources(prompts: Prompts) -> list[list[int]]:
    """What the output repeats but for one token."""
    return [[*new[:4], tiny.FIRST_WORD, *new[5:]] for new in prompts.expected]


def _none(models: list[Any], case: Case, prompts: Prompts) -> Any:
    return None


def _model(models: list[Any], case: Case, prompts: Prompts) -> Any:
    return models[1]


DRAFTERS: dict[str, Callable[[list[Any], Case, Prompts], Any]] = {
    "n-gram": lambda models, case, prompts: NgramDrafter(tiny.VOCABULARY, 2),
    "lookup": lambda models, case, prompts: LookupDrafter(),
    "suffix": lambda models, case, prompts: SuffixDrafter(),
    "aggressive": lambda models, case, prompts: AggressiveDrafter(_sources(prompts)),
    "uniform": lambda models, case, prompts: UniformDrafter(tiny.VOCABULARY),
    "early exit": lambda models, case, prompts: EarlyExitDrafter(models[0], 1),
    "hierarchy": lambda models, case, prompts: HierarchicalDrafter(models[1], models[2], 2),
    "stack": lambda models, case, prompts: StackedDrafter(LookupDrafter(), models[1]),
}
_STATIC = StaticTree.from_widths((3, 2, 1))
_GROWN = GrownTree(9, 4, 3)

MODES: dict[str, Mode] = {
    "plain 1": Mode("one", _loop(_none)),
    "plain ragged": Mode("ragged", _loop(_none)),
    "chain 1": Mode("one", _loop(_model, gamma=3)),
    "chain equal": Mode("equal", _loop(_model, gamma=3)),
    "chain ragged": Mode("ragged", _loop(_model, gamma=3)),
    "gamma 1 ragged": Mode("ragged", _loop(_model, gamma=1)),
    "gamma 8 1": Mode("one", _loop(_model, gamma=8)),
    "gamma 8 equal": Mode("equal", _loop(_model, gamma=8)),
    "static plain 1": Mode("one", _loop(_none, static_cache=True)),
    "static chain 1": Mode("one", _loop(_model, gamma=3, static_cache=True)),
    "static chain ragged": Mode("ragged", _loop(_model, gamma=3, static_cache=True)),
    "tree 1": Mode("one", _loop(_model, tree=_STATIC)),
    "tree ragged": Mode("ragged", _loop(_model, tree=_STATIC)),
    "grown tree 1": Mode("one", _loop(_model, tree=_GROWN)),
    "grown tree equal": Mode("equal", _loop(_model, tree=_GROWN)),
    "static tree ragged": Mode("ragged", _loop(_model, tree=_STATIC, static_cache=True)),
    **{f"{name} ragged": Mode("ragged", _loop(made, gamma=3)) for name, made in DRAFTERS.items()},
    "lookup 1": Mode("one", _loop(DRAFTERS["lookup"], gamma=3)),
    "aggressive 1": Mode("one", _loop(DRAFTERS["aggressive"])),
    "generate_fn 1": Mode("one", _hosted(_model, gamma=3)),
    "generate_fn plain ragged": Mode("ragged", _hosted(_none)),
    "generate_fn ragged": Mode("ragged", _hosted(_model, gamma=3)),
    "generate_fn static 1": Mode("one", _hosted(_model, gamma=3, cache_implementation="static")),
    "assisted 1": Mode("one", _assisted),
}


# --- verdicts -------------------------------------------------------------------------------------


def classify(name: str, case: Case) -> Cell:
    """Run one mode and say what came of it."""
    mode = MODES[name]
    prompts = case.batches[mode.batch]
    try:
        found, statistics = mode.run(case, prompts)
    except Exception as error:  # any: the verdict is about which
        return _classify_error(name, case, error)
    counts = (-1, -1)
    if statistics is not None:
        counts = int(statistics.accepted), int(statistics.rejected)
    difference = first_difference(found.tolist(), prompts)
    if difference is None:
        return Cell(name, RIGHT, "", *counts)
    row, at = difference
    gap = prompts.gaps[row][at]
    got = found[row, at] if at < found.shape[1] else None
    detail = f"row {row}, token {at}: {got} for {prompts.expected[row][at]}, gap {gap:.1e}"
    if gap < TIE[case.dtype]:
        return Cell(name, TIED, detail, *counts)
    theirs = _theirs(name, case)
    if theirs is not None and theirs == found.tolist():
        return Cell(name, HOST, detail, *counts)
    if not is_causal(case):
        return Cell(name, HOST, f"not causal without a cache; {detail}", *counts)
    return Cell(name, WRONG, detail, *counts)


def is_causal(case: Case) -> bool:
    """Tell whether later tokens leave earlier logits alone, in the model's own uncached pass."""
    for prompts in case.batches.values():
        for row, text in enumerate(prompts.texts):
            inputs = _row(prompts.inputs, row)
            whole = forward(case.models[0], text + prompts.expected[row], inputs)
            part = forward(case.models[0], text, inputs)
            error = (whole[: len(part)] - part).abs().max() / part.abs().max()
            if float(error) >= TIE[case.dtype] / 10:
                return False
    return True


def first_difference(found: list[list[int]], prompts: Prompts) -> tuple[int, int] | None:
    """Return row and place of the first token that is not the expected one."""
    for b, (row, expected) in enumerate(zip(found, prompts.expected, strict=True)):
        for i, token in enumerate(expected):
            if i >= len(row) or row[i] != token:
                return b, i
    return None


def _theirs(name: str, case: Case) -> list[list[int]] | None:
    """Return what transformers itself makes of each row alone with a cache, None if it fails.

    Inside ``model.generate`` that is what generate gives without us; for our own loop, what the
    model says when it is fed token by token, with nothing but ids and its cache.
    """
    prompts = case.batches[MODES[name].batch]
    cache = "static" if name.startswith("generate_fn static") else None
    rows = []
    for b, text in enumerate(prompts.texts):
        alone = Prompts([text], prompts.expected[b : b + 1], [], _row(prompts.inputs, b))
        try:
            if name.startswith("assisted"):
                rows.append(_their_assisted(case, alone)[0].tolist())
            elif name.startswith("generate_fn"):
                rows.append(_their_generate(case, alone, cache_implementation=cache)[0].tolist())
            else:
                rows.append(cached_continuation(case.models[0], alone))
        except Exception:  # theirs
            return None
    return rows


@torch.inference_mode()
def cached_continuation(model: Any, prompts: Prompts) -> list[int]:
    """Return the greedy new tokens of one row by transformers' own cache."""
    given: dict[str, Any] = _read_once(model, prompts.inputs) if prompts.inputs else {}
    name = "decoder_input_ids" if prompts.inputs else "input_ids"
    found: list[int] = []
    feed, cache = prompts.texts[0], None
    while len(found) < prompts.new:
        fed = {name: torch.tensor([feed]), own_cache_name(): cache}
        out = model(**given, **fed, use_cache=True)
        cache = cache_of(out)
        found.append(int(out.logits[0, -1].argmax()))
        feed = found[-1:]
    return found


def _classify_error(name: str, case: Case, error: Exception) -> Cell:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    where = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in where if "specdec_ext" in frame.filename]
    hosted = name.startswith(("generate_fn", "assisted"))
    if hosted and where[-1] not in ours and _theirs(name, case) is None:
        return Cell(name, ABSENT, f"transformers: {said}")
    if is_refusal(error, where[-1], case.models[0]):
        return Cell(name, REFUSED, said)
    last = f" (below {ours[-1].name}, line {ours[-1].lineno})" if ours else ""
    return Cell(name, CRASH, said + last)


def is_refusal(error: Exception, raised: traceback.FrameSummary, model: Any) -> bool:
    """Tell an error that this library raised itself, and that names what is not supported."""
    if type(error) not in (ValueError, TypeError):
        return False
    text = str(error)
    if text.startswith("generate") or type(model).__name__ in text:
        return True
    deliberate = (raised.line or "").startswith("raise") and "specdec_ext" in raised.filename
    return deliberate and re.match(r"[a-z_ ]+: ", text) is not None
