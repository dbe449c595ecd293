"""Fuzz all operators: any shapes, strides, dtypes, parameters and values, beside unreadable pages.

    python python_tests/helpers/fuzz.py --examples 20000 --seed 7    # more and other cases than CI

A process of its own, because a read out of bounds ends it. `test_fuzz.py` runs a bounded, fixed
part. Every tensor touches a page that cannot be read (guard.py). A call with arguments as they must
be returns what float64 admits, the status included (`specdec_ext.testing.explain_outcome`, or the
reference); a call with one argument spoiled raises ValueError, naming the operator.

A new argument is an option of `make_case`, a line in `make_wild` with what the host cannot see, and
one in `SPOILED` with what it refuses.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import math
import sys
from collections import Counter
from typing import Any

import torch
from guard import PAGE, allocate, at, forbid
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import specdec_ext  # noqa: F401
from specdec_ext import ops, reference
from specdec_ext.testing import VerifyCase, VerifyOutcome, explain_outcome, make_case

OPS = torch.ops.specdec
FILTERS = ("temperature", "top_k", "top_p", "min_p")
BAD_FLOATS = [math.nan, math.inf, -math.inf, -1.0, 1e30]
BAD_IDS = [-2, -1, 2**31 - 1, -(2**31)]
SEEN: Counter[str] = Counter()


# ---- memory --------------------------------------------------------------------------------------


class Fence:
    """Slots between unreadable pages, used anew for every call."""

    SIZE = 256 * PAGE

    def __init__(self, count: int) -> None:
        self.slots = [allocate(self.SIZE + 2 * PAGE) + PAGE for _ in range(count)]
        for slot in self.slots:
            forbid(slot - PAGE, PAGE)
            forbid(slot + self.SIZE, PAGE)
        self.used = 0

    def place(self, values: torch.Tensor, end: bool) -> torch.Tensor:
        """The same values and strides, the last or the first byte beside an unreadable page."""
        if values.numel() == 0:
            return values
        reach = 1 + sum(
            (n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True) if n > 1
        )
        size = reach * values.element_size()
        assert size <= self.SIZE, "a slot is too small"
        slot = self.slots[self.used % len(self.slots)]
        self.used += 1
        flat = at(slot + (self.SIZE - size if end else 0), reach, values.dtype)
        view = flat.as_strided(values.shape, values.stride())
        if 0 in values.stride():  # expanded: one write each
            flat.copy_(values.as_strided((reach,), (1,)))
            return view
        return view.copy_(values)


FENCE = Fence(40)


def call(name: str, arguments: dict[str, Any], end: bool) -> Any:
    placed = {
        k: FENCE.place(v, end) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    return BROKEN[0](name, placed)


# ---- operators, and what they must not do --------------------------------------------------------


def operator(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(OPS, name)(**arguments)


def forgets_the_status(name: str, arguments: dict[str, Any]) -> Any:
    result = operator(name, arguments)
    return (*result[:4], result[4] & ~2) if name == "verify" else result


def emits_a_neighbour(name: str, arguments: dict[str, Any]) -> Any:
    result = operator(name, arguments)
    if name != "sample" or not len(result[0]):
        return result
    return ((result[0] + 1) % arguments["logits"].shape[-1], result[1])


def reads_one_too_far(name: str, arguments: dict[str, Any]) -> Any:
    result = operator(name, arguments)
    ctypes.string_at(FENCE.slots[0] + FENCE.SIZE, 1)
    return result


def refuses_nothing(name: str, arguments: dict[str, Any]) -> Any:
    try:
        return operator(name, arguments)
    except ValueError:
        return None


#: The controls: each must be found.
CONTROLS = (forgets_the_status, emits_a_neighbour, reads_one_too_far, refuses_nothing)
BROKEN = [operator]


# ---- values --------------------------------------------------------------------------------------


def sprinkle(generator: torch.Generator, values: torch.Tensor, bad: list[float], share: float):
    """Put bad values at a few places, or now and then all over a row."""
    mask = torch.rand(values.shape, generator=generator) < share
    if values.dim() > 1:
        mask |= torch.rand((*values.shape[:-1], 1), generator=generator) < share / 4
    if values.dtype == torch.int32:
        bad = [min(max(b, -(2**31)), 2**31 - 1) for b in bad]
    if values.dtype == torch.int8:
        bad = [2, -1, 127, -128]
    choice = torch.tensor(bad, dtype=torch.float64 if values.is_floating_point() else torch.int64)
    chosen = choice[torch.randint(len(bad), values.shape, generator=generator)]
    out = values.clone(memory_format=torch.preserve_format)
    out[mask] = chosen[mask].to(values.dtype)
    return out


def make_wild(generator: torch.Generator, inputs: dict[str, Any]) -> dict[str, Any]:
    """Values that only the device sees: NaN, +inf, ids and parameters out of range."""
    bad: dict[str, list[float]] = {
        "target_logits": [math.nan, math.inf, -math.inf],
        "draft_logits": [math.nan, math.inf, -math.inf],
        "draft_probs": [math.nan, math.inf, -1.0, 0.0],
        "uniforms": [-1.0, 1.0, math.nan, math.inf, 0.0, 1 - 2**-53],
        "draft_tokens": [*BAD_IDS, -(2**63), 2**63 - 1],
        "draft_lengths": [-1, 99, 2**31 - 1],
        "draft_kinds": [2, -1],
        "target_rows": [-1, 2**31 - 1, 10**6],
        "draft_rows": [-1, 2**31 - 1, 10**6],
        "allowed_mask": [0, -1, 1, -(2**31)],
        "draft_token_ids": [0, 1, -1, 2**31 - 1, -(2**31), 10**4],
        **{name: BAD_FLOATS for name in FILTERS if name != "top_k"},
        **{f"draft_{name}": BAD_FLOATS for name in FILTERS if name != "top_k"},
    }
    rare = {"target_logits": 0.01, "draft_logits": 0.05}
    wild = dict(inputs)
    for name, choices in bad.items():
        value = wild.get(name)
        if isinstance(value, torch.Tensor) and value.numel():
            if torch.rand((), generator=generator) < 0.4:
                wild[name] = sprinkle(generator, value, choices, rare.get(name, 0.1))
    return wild


# ---- cases ---------------------------------------------------------------------------------------

case_options = st.fixed_dictionaries(
    dict(
        batch=st.sampled_from([4, 3, 2, 1, 5, 0]),
        gamma=st.sampled_from([2, 1, 3, 4, 0]),
        vocab=st.one_of(st.integers(1, 70), st.sampled_from([127, 1023, 4095, 4096, 4097, 9001])),
        draft_vocab=st.one_of(st.none(), st.integers(1, 70), st.just(4099)),
        rule=st.sampled_from(ops.RULES),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        draft_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
        layout=st.sampled_from(["contiguous", "transposed", "padded"]),
        packed=st.booleans(),
        draft=st.sampled_from(["logits", "logits", "probs", "none"]),
        kinds=st.sampled_from([None, None, "mixed", "deterministic"]),
        philox=st.booleans(),
        draft_filters=st.booleans(),
        filters=st.booleans(),
        id_dtype=st.sampled_from([torch.int64, torch.int32]),
        full_accept_probs=st.booleans(),
        raw_logprobs=st.booleans(),
        lenience=st.sampled_from([1.0, 0.5, 0.01]),
        beta=st.sampled_from([1, 3, 2**62]),
        tau=st.sampled_from([0.0, 1.0, 1e6]),
        epsilon=st.sampled_from([0.09, 0.7]),
        delta=st.sampled_from([0.3, 2.0]),
        allowed_mask=st.booleans(),
        draft_token_ids=st.booleans(),
    )
)


def verify_case(number: int, options: dict[str, Any], wild: bool) -> VerifyCase | None:
    """The case that the options describe, None where they describe none."""
    options = dict(options)
    if options["batch"] * (options["gamma"] + 1) * options["vocab"] > 60_000:
        options["batch"] = min(options["batch"], 1)
    if options["rule"] == "coupled":
        options["philox"] = True
    if options["draft"] == "none":
        options["kinds"] = None
    if options["draft"] == "none":
        options["draft_token_ids"] = False
    elif options["draft_token_ids"] and (options["draft_vocab"] or 0) > options["vocab"]:
        options["draft_vocab"] = None
    case = make_case(number, **options)
    generator = torch.Generator().manual_seed(number)
    inputs = make_wild(generator, dict(case.inputs)) if wild else dict(case.inputs)
    return VerifyCase(inputs, case.name)


# ---- what must hold ------------------------------------------------------------------------------


def check_verify(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    case = verify_case(number, options, wild)
    result = VerifyOutcome(*call("verify", dict(case.inputs), end))
    for b in range(case.batch):
        reason = explain_outcome(result, case, b)
        assert reason == "", f"request {b}: {reason}"
        SEEN["verify"] += 1
        for bit in (1, 2, 4, 8):
            SEEN[f"status {bit}"] += bool(int(result.status[b]) & bit)


def rows_of(number: int, options: dict[str, Any], wild: bool) -> dict[str, Any]:
    """One row a request out of a case, with its filters, mask, map and randomness."""
    options = {**options, "gamma": 1, "draft": "logits", "packed": False, "kinds": None}
    inputs = verify_case(number, options, wild).inputs
    names = (*FILTERS, *(f"draft_{name}" for name in FILTERS), "draft_token_ids")
    found = {k: inputs[k] for k in (*names, "seeds", "positions") if k in inputs}
    for name in ("target_logits", "draft_logits", "allowed_mask"):
        if name in inputs:
            found[name] = inputs[name][:, 0]
    if "uniforms" in inputs:
        found["uniforms"] = inputs["uniforms"][:, -1]
    return found


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(got.double(), expected.double(), tolerance, tolerance, equal_nan=True)


def check_row_law(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    rows = rows_of(number, options, wild)
    arguments = {k: v for k, v in rows.items() if k in ("allowed_mask", *FILTERS)}
    arguments["logits"] = rows["target_logits"]
    got = ops.RowLaw(*call("row_law", arguments, end))
    expected = reference.row_law(**arguments)
    assert torch.equal(got.argmax, expected.argmax)
    assert close(got.max, expected.max, 0) and close(got.scale, expected.scale, 1e-12)
    same = (got.cutoff == expected.cutoff) | (got.cutoff.isnan() & expected.cutoff.isnan())
    assert close(got.log_z[same], expected.log_z[same], 1e-5)
    assert int((~same).sum()) <= 1  # top-p within rounding of a tie
    SEEN["row_law"] += len(same)


def check_sample(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    rows = rows_of(number, options, wild)
    names = ("uniforms", "seeds", "positions", "allowed_mask", "draft_token_ids", *FILTERS)
    arguments = {k: v for k, v in rows.items() if k in names}
    drafts = "draft_token_ids" in arguments  # the mask is then as wide as the target
    arguments["logits"] = rows["draft_logits" if drafts else "target_logits"]
    if "seeds" in arguments:
        arguments |= dict(domain=number % 3 + 1, draft_index=number % 65536, stream=number % 256)
    got = ops.SampleResult(*call("sample", arguments, end))
    expected = reference.sample(**arguments)
    assert torch.equal(got.tokens == -1, expected.tokens == -1)
    assert torch.equal(got.logprobs.isnan(), expected.logprobs.isnan())
    differ = got.tokens != expected.tokens
    assert close(got.logprobs[~differ], expected.logprobs[~differ], 2e-5)
    assert int(differ.sum()) <= 1  # a draw within rounding of a boundary
    assert bool((got.logprobs[differ] > -math.inf).all())
    SEEN["sample"] += len(differ)
    SEEN["excused"] += int(differ.sum())


def check_acceptance(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    rows = rows_of(number, options, wild)
    arguments = {k: v for k, v in rows.items() if k not in ("uniforms", "seeds", "positions")}
    got, expected = call("acceptance", arguments, end), reference.acceptance(**arguments)
    assert torch.equal(got.isnan(), expected.isnan())
    differ = (got - expected).abs() > 1e-5
    # Top-p within rounding of a tie moves a token in or out of a law.
    assert int(differ.sum()) <= int(any(name.endswith("top_p") for name in arguments))
    SEEN["acceptance"] += len(got)
    SEEN["excused"] += int(differ.sum())


def check_uniforms(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    generator = torch.Generator().manual_seed(number)
    batch, n = options["batch"], options["gamma"] + 1
    words = torch.randint(-(2**63), 2**63 - 1, (2, batch), generator=generator)
    arguments = dict(seeds=words[0], positions=words[1], n=n, stream=number % 256)
    assert torch.equal(call("uniforms", arguments, end), reference.uniforms(**arguments))
    SEEN["uniforms"] += batch


def attention_of(number: int, wild: bool) -> dict[str, Any]:
    """A call of tree_attention: any bits, lengths and pages, in the cache or (wild) not."""
    generator = torch.Generator().manual_seed(number)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, nodes, groups = one_of(2, 1, 3, 0), one_of(5, 1, 12, 66), one_of(2, 1)
    size, value_size = one_of((8, 8), (16, 16), (24, 5), (3, 3))
    dtype = one_of(torch.float32, torch.bfloat16, torch.float16)
    cached = one_of(dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2)
    block, pages = one_of(0, 16, 5), one_of(1, 9, 20)
    places = block * pages if block else nodes + one_of(0, 1, 60)
    shape = (one_of(7, 40), block, groups) if block else (batch, places, groups)
    q, keys, values = (
        torch.randn(*s, generator=generator).to(kind)
        for s, kind in (
            ((batch, nodes, groups * one_of(1, 3), size), dtype),
            ((*shape, size), cached),
            ((*shape, value_size), cached),
        )
    )
    bits = integers(-(2**63), 2**63 - 1, batch, nodes, (nodes + 63) // 64)
    arguments = dict(q=q, k_cache=keys, v_cache=values, ancestors=bits & one_of(-1, 5))
    arguments["seq_lens"] = integers(0, max(places - nodes, 0) + 1, batch)
    if block:
        low, high = (-1, shape[0] + 1) if wild else (0, shape[0])
        arguments["block_table"] = integers(low, high, batch, pages).to(torch.int32)
    if wild:
        wrong = [-1, places - nodes + 1, 2**62, -(2**63), 2**63 - 1]
        arguments["seq_lens"] = sprinkle(generator, arguments["seq_lens"], wrong, 0.2)
    for name in ("k_scale", "v_scale"):
        arguments[name] = one_of(None, torch.tensor(0.5), torch.rand(groups, generator=generator))
    options = dict(window=one_of(0, 1, 6, 2**31 - 1), soft_cap=one_of(0.0, 2.0))
    return {**arguments, **options, "scale": one_of(None, 0.4)}


def check_tree_attention(number: int, options: dict[str, Any], wild: bool, end: bool) -> None:
    arguments = attention_of(number, wild)
    got, expected = call("tree_attention", arguments, end), reference.tree_attention(**arguments)
    for found, right in zip(got, expected, strict=True):
        assert torch.equal(found.isnan(), right.isnan())
        assert close(
            found, right, {torch.float32: 1e-4, torch.float16: 5e-3}.get(found.dtype, 3e-2)
        )
    SEEN["tree_attention"] += len(expected.lse)
    SEEN["no attention"] += int(expected.lse.flatten(1).isnan().any(1).sum())


CHECKS = [
    *(check_verify, check_verify, check_row_law, check_sample, check_acceptance, check_uniforms),
    check_tree_attention,
]


# ---- calls that must be refused ------------------------------------------------------------------


def other_dtype(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.int16 if value.dtype != torch.int16 else torch.int8)


def wider(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value[..., :1]], -1) if value.numel() else value.new_zeros(3, 7)


def deeper(value: torch.Tensor) -> torch.Tensor:
    return value[None]


def spread(value: torch.Tensor) -> torch.Tensor:
    """The same values, every second one in memory; one alone has no stride to be wrong."""
    return torch.stack([value, value], -1)[..., 0] if value.shape[-1] > 1 else deeper(value)


#: How to spoil an argument so that no shape of the others makes it right again.
SPOILED = {
    "target_logits": (other_dtype, deeper, spread),
    "draft_logits": (other_dtype, deeper, spread),
    "draft_probs": (other_dtype, deeper, spread),
    "draft_tokens": (other_dtype, deeper),
    "draft_kinds": (lambda v: v.to(torch.int16), wider, deeper),
    "draft_lengths": (other_dtype, wider, deeper),
    "target_rows": (other_dtype, wider, deeper),
    "draft_rows": (other_dtype, wider, deeper),
    "uniforms": (lambda v: v.float(), wider, deeper),
    "seeds": (lambda v: v.int(), wider, deeper),
    "positions": (lambda v: v.int(), wider, deeper),
    "temperature": (lambda v: v.double(), wider, deeper),
    "top_p": (lambda v: v.double(), wider, deeper),
    "top_k": (lambda v: v.float(), wider, deeper),
    "allowed_mask": (other_dtype, wider, deeper),
    "draft_token_ids": (other_dtype, wider, deeper),
    "rule": (lambda v: v + "x",),
    "lenience": (lambda v: 0.0, lambda v: 1.1, lambda v: math.nan),
    "beta": (lambda v: 0,),
    "tau": (lambda v: -1.0, lambda v: math.inf),
    "epsilon": (lambda v: 0.0, lambda v: math.nan),
    "delta": (lambda v: -1.0,),
}


def check_refusal(number: int, options: dict[str, Any], end: bool) -> None:
    case = verify_case(number, options, wild=False)
    names = [name for name in SPOILED if name in case.inputs]
    name = names[number % len(names)]
    how = SPOILED[name][number // len(names) % len(SPOILED[name])]
    inputs = {**case.inputs, name: how(case.inputs[name])}
    try:
        call("verify", inputs, end)
    except ValueError as error:
        assert str(error).startswith("verify: "), error
        SEEN["refused"] += 1
        return
    raise AssertionError(f"{name} was spoiled, and nothing said so")


# ---- the command ---------------------------------------------------------------------------------


def run(examples: int, start: int, phases: list[Phase]) -> None:
    @seed(start)
    @settings(max_examples=examples, deadline=None, database=None, phases=phases)
    @given(
        number=st.integers(0, 2**31),
        options=case_options,
        which=st.integers(0, len(CHECKS)),
        wild=st.booleans(),
        end=st.booleans(),
    )
    def target(number, options, which, wild, end):
        if which == len(CHECKS):
            check_refusal(number, options, end)
        else:
            CHECKS[which](number, options, wild, end)

    target()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    names = {control.__name__: control for control in CONTROLS}
    parser.add_argument("--control", choices=names, help="break the operators on purpose")
    arguments = parser.parse_args()
    BROKEN[0] = names.get(arguments.control, operator)
    faulthandler.enable()  # a read out of bounds prints where it came from
    torch.set_num_threads(1)
    # Nobody reads a control's failure: it need not be made small.
    phases = [Phase.generate] if arguments.control else [Phase.generate, Phase.shrink]
    run(arguments.examples, arguments.seed, phases)
    print(f"unharmed: {dict(sorted(SEEN.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
