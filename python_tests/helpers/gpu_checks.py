"""What is checked of a backend on a GPU; test_gpu.py runs it there, test_gpu_report.py on the CPU.

Everything takes a `Target`, so that no line of it runs for the first time on hardware, but for the
few calls of ``torch.cuda`` behind ``is_cuda``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from beam_inputs import assert_like, make_inputs
from torch import Tensor

import specdec_ext
from specdec_ext import reference
from specdec_ext.backend import resolve
from specdec_ext.contract import BeamVerifyResult
from specdec_ext.testing import (
    TreeCase,
    VerifyCase,
    VerifyOutcome,
    assert_tokens_match,
    assert_trees_match,
    exact_law,
    exact_tree_law,
    make_case,
    toy_models,
)

Case = VerifyCase | TreeCase
Outcome = VerifyOutcome | specdec_ext.VerifyTreeResult

SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Target:
    """A backend on a device."""

    name: str
    device: torch.device  # with its index, as tensors name theirs

    @property
    def is_cuda(self) -> bool:
        """Whether ``torch.cuda`` knows the device."""
        return self.device.type == "cuda"

    @property
    def operators(self) -> Any:
        """The namespace with the schemas' operators."""
        return resolve("verify", self.name, self.device)

    def overload(self, operator: str) -> Any:
        """Give what is registered with torch, as ``opcheck`` wants it."""
        namespace = "specdec_triton" if self.name == "triton" else "specdec"
        return getattr(getattr(torch.ops, namespace), operator).default

    def call(self, operator: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call an operator with tensors from anywhere; what it returns stays on the device."""
        args = tuple(placed(value, self.device, always=True) for value in args)
        kwargs = {k: placed(value, self.device, always=True) for k, value in kwargs.items()}
        result = getattr(self.operators, operator)(*args, **kwargs)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def verify(self, *args: Any, **kwargs: Any) -> VerifyOutcome:
        """Verify, with the outcome on the CPU."""
        return VerifyOutcome(*(t.cpu() for t in self.call("verify", *args, **kwargs)))

    def verify_tree(self, *args: Any, **kwargs: Any) -> specdec_ext.VerifyTreeResult:
        """Verify a tree, with the outcome on the CPU."""
        found = self.call("verify_tree", *args, **kwargs)
        return specdec_ext.VerifyTreeResult(*(t.cpu() for t in found))

    def run(self, case: Case) -> Outcome:
        """Verify a case."""
        return case.run(getattr(self, operator_of(case)))


def operator_of(case: Case) -> str:
    """Name the operator that a case is for."""
    return "verify_tree" if isinstance(case, TreeCase) else "verify"


def placed(value: Any, device: torch.device, *, always: bool = False) -> Any:
    """Copy a tensor with its strides and its misalignment; the gaps hold NaN (integers: -7).

    One that is on the device stays. With `always` only one that this function has made does there
    too, so that a CPU, where all tensors are from the start, meets the copies that a GPU is given.
    """
    if not isinstance(value, Tensor) or hasattr(value, "specdec_placed"):
        return value
    if value.device == device and not (always and device.type == "cpu"):
        return value
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    size = value.storage_offset() + (last + 1 if value.numel() else 0)
    filling = torch.nan if value.dtype.is_floating_point else -7
    flat = torch.full((size,), filling, dtype=value.dtype, device=device)
    view = flat.as_strided(value.shape, value.stride(), value.storage_offset())
    write(view, value)
    view.specdec_placed = True
    return view


def write(there: Tensor, value: Tensor) -> None:
    """Copy a tensor into another; what both repeat by a stride of 0 is copied once."""
    for dim, (n, stride) in enumerate(zip(there.shape, there.stride(), strict=True)):
        if n > 1 and stride == 0:
            assert value.stride(dim) == 0, f"dimension {dim} is expanded there, but not here"
            there, value = there.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    there.copy_(value)


def on(case: Case, device: torch.device) -> Case:
    """Place a case, as copies on a CPU too."""
    inputs = {k: placed(v, device, always=True) for k, v in case.inputs.items()}
    return type(case)(inputs, case.name)


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check equality bit for bit, NaN where NaN."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def poison(device: torch.device) -> None:
    """Leave NaN and nonsense in the memory that the next allocations get."""
    sizes = [1 << k for k in range(9, 25)]
    rubbish = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes * 2]
    del rubbish
    gc.collect()


# -------------------------------------------------------------------------------------------------
# Parity
# -------------------------------------------------------------------------------------------------


def _check_like(target: Target, case: Case, operators: Any, ties: int) -> None:
    match = assert_trees_match if isinstance(case, TreeCase) else assert_tokens_match
    expected = case.run(getattr(operators, operator_of(case)))
    excused = match(target.run(case), expected, case)
    assert excused <= ties, f"{excused} near-ties"


def check_verify(target: Target, case: Case, ties: int = 1) -> None:
    """Equal to the float64 reference, but for few near-ties."""
    _check_like(target, case, reference, ties)


def check_against_cpu(target: Target, case: Case, ties: int = 1) -> None:
    """Equal to the CPU operator, but for few near-ties."""
    _check_like(target, case, torch.ops.specdec, ties)


def hostile_case(seed: int, rule: str, vocab: int = 257) -> VerifyCase:
    """Draw a case full of what a host cannot see: rows without a law, ids and numbers out of range.

    At most one such thing a request, at random places.
    """
    batch, gamma = 24, 3
    case = make_case(seed, rule=rule, batch=batch, gamma=gamma, vocab=vocab, kinds="mixed")
    inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(gamma, (batch,), generator=generator).tolist()
    columns = torch.randint(vocab, (batch,), generator=generator).tolist()

    def put(name: str, values: Sequence[float], start: int) -> None:
        for k, value in enumerate(values):
            b = start + k
            if name.endswith("logits"):
                entry = (b, rows[b]) if value == -torch.inf else (b, rows[b], columns[b])
                inputs[name][entry] = value
            elif inputs[name].dim() == 2:
                inputs[name][b, rows[b]] = value
            else:
                inputs[name][b] = value

    put("target_logits", [torch.nan, torch.inf, -torch.inf], 0)
    put("draft_logits", [torch.nan, torch.inf, -torch.inf], 3)
    put("draft_tokens", [vocab, -2, 2**40], 6)
    if "uniforms" in inputs:
        put("uniforms", [torch.nan, -0.5, 1.0], 9)
    put("temperature", [torch.nan, -1.0, torch.inf], 12)
    put("top_p", [torch.nan, -0.1], 15)
    put("min_p", [torch.nan, 1.5], 17)
    put("draft_lengths", [-3, gamma + 9], 19)
    put("draft_kinds", [5, -1], 21)
    return VerifyCase(inputs, f"hostile, {case.name}")


def parameters(case: VerifyCase, prefix: str = "") -> dict[str, Tensor]:
    """Give the sampling parameters of a case."""
    return {prefix + name: case.inputs[name] for name in SAMPLING}


def check_row_law(target: Target, seed: int, vocab: int, dtype: torch.dtype, layout: str) -> None:
    """Equal to the reference: exactly where it is exact, and in what is kept."""
    case = make_case(seed, batch=24, gamma=1, vocab=vocab, dtype=dtype, layout=layout)
    logits, params = case.inputs["target_logits"][:, 0], parameters(case)
    expected = specdec_ext.RowLaw(*reference.row_law(logits, **params))
    got = specdec_ext.RowLaw(*(t.cpu() for t in target.call("row_law", logits, **params)))
    assert_same((got.max, got.scale, got.argmax), (expected.max, expected.scale, expected.argmax))
    kept = [logits.float() >= law.cutoff[:, None] for law in (got, expected)]
    assert torch.equal(*kept)
    torch.testing.assert_close(got.cutoff, expected.cutoff, rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(got.log_z, expected.log_z, rtol=0, atol=2e-6)


def check_sample(target: Target, seed: int, vocab: int, dtype: torch.dtype, layout: str) -> None:
    """Equal to the reference: a draw is the last draw of a verification without a draft."""
    case = make_case(seed, batch=24, gamma=1, vocab=vocab, dtype=dtype, layout=layout)
    logits, params = case.inputs["target_logits"][:, :1], parameters(case)
    u = case.inputs["uniforms"][:, :1].contiguous()
    tokens, logprobs = target.call("sample", logits[:, 0], u[:, 0].contiguous(), **params)
    empty = torch.zeros(24, 0, dtype=torch.int64)
    draw = VerifyCase(
        {"target_logits": logits, "draft_tokens": empty, "uniforms": u, "rule": "token", **params},
        f"sample, {case.name}",
    )
    expected = draw.run(reference.verify)
    found = expected._replace(tokens=tokens.cpu()[:, None], logprobs=logprobs.cpu()[:, None])
    assert assert_tokens_match(found, expected, draw) <= 1


def check_acceptance(target: Target, seed: int, vocab: int, width: int, dtype: torch.dtype) -> None:
    """Equal to the reference."""
    cases = [make_case(seed + k, batch=24, gamma=1, vocab=v) for k, v in enumerate((vocab, width))]
    rows = [case.inputs["target_logits"][:, 0].to(dtype) for case in cases]
    params = {**parameters(cases[0]), **parameters(cases[1], "draft_")}
    (got,) = target.call("acceptance", *rows, **params)
    expected = reference.acceptance(*rows, **params)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=5e-6)


def check_features(target: Target, seed: int, vocab: int, dtype: torch.dtype, layout: str) -> None:
    """Masks, a reduced vocabulary and races in the other operators.

    A mask gives what -inf gives, bit for bit; a map gives the tokens of entries; a race that of the
    CPU.
    """
    options = dict(batch=24, gamma=1, vocab=vocab, dtype=dtype, layout=layout, allowed_mask=True)
    case = make_case(seed, draft_vocab=max(1, vocab // 3), draft_token_ids=True, **options)
    inputs, params = case.inputs, parameters(case)
    rows, draft, words = (
        inputs[name][:, 0] for name in ("target_logits", "draft_logits", "allowed_mask")
    )
    ids = inputs["draft_token_ids"]
    allowed = (words[..., None] >> torch.arange(32) & 1).flatten(-2)[:, :vocab].bool()
    hidden = rows.masked_fill(~allowed, -torch.inf)
    draft_hidden = draft.masked_fill(~allowed[:, ids], -torch.inf)
    dense = torch.full_like(hidden, -torch.inf)
    dense[:, ids] = draft_hidden
    u = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    noise = dict(seeds=torch.arange(24), positions=torch.arange(24) * 2**33, domain=3)
    mask = dict(allowed_mask=words)

    def same(name: str, got: Sequence[Any], expected: Sequence[Any], **given: Any) -> None:
        masked = target.call(name, *got, **given, **mask)
        assert_same(masked, target.call(name, *expected, **given))

    same("row_law", [rows], [hidden], **params)
    same("sample", [rows, u], [hidden, u], **params)
    same("sample", [rows], [hidden], **noise, **params)
    same("acceptance", [rows, rows], [hidden, hidden], **params)
    given = dict(draft_token_ids=ids, **mask)
    tokens, logprobs = target.call("sample", draft, u, **given)
    entries, of_entries = target.call("sample", draft_hidden, u)
    known = torch.where(entries < 0, entries, ids.to(entries.device)[entries.clamp(min=0)].long())
    assert_same([tokens, logprobs], [known, of_entries])
    (overlap,) = target.call("acceptance", rows, draft, **given)
    (expected,) = target.call("acceptance", hidden, dense)
    torch.testing.assert_close(overlap, expected, rtol=0, atol=5e-6, equal_nan=True)
    for logits, more in ((rows, mask), (draft, given)):
        raced, _ = target.call("sample", logits, **noise, **more)
        there, _ = torch.ops.specdec.sample(logits, **noise, **more)
        assert int((raced.cpu() != there).sum()) <= 1  # near-ties


def check_uniforms(target: Target) -> None:
    """Equal to the reference bit for bit, and what verify draws from seeds."""
    case = make_case(3, batch=40, gamma=4, philox=True, stream=9)
    keys = (case.inputs["seeds"], case.inputs["positions"], 5)
    (coins,) = target.call("uniforms", *keys, stream=9)
    assert_same([coins], [reference.uniforms(*keys, stream=9)])
    given = case.replace(seeds=None, positions=None, uniforms=coins.cpu())
    assert_same(target.run(given), target.run(case))


def trees(sizes: Sequence[int], nodes: int, seed: int = 0) -> Tensor:
    """Parents of random trees of these sizes, padded."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((len(sizes), nodes), -1)
    for b, size in enumerate(sizes):
        for v in range(1, size):
            parents[b, v] = torch.randint(max(0, v - 40), v, (), generator=generator)
    return parents


def check_tree_mask(target: Target, nodes: int) -> None:
    """Equal to the reference bit for bit; what is no tree is reported."""
    parents = trees([nodes, max(nodes - 3, 1), 1], nodes)
    wrong = parents.clone()
    wrong[0, 0] = 0
    for some in (parents, wrong):
        expected = reference.tree_mask(some)
        assert_same(target.call("tree_mask", some), expected)
        assert_same(target.call("tree_mask", some.int()), expected)


def check_compact_kv(target: Target, dtype: torch.dtype, heads: int, size: int) -> None:
    """Equal to the reference bit for bit, in two layouts; what is behind the path stays."""
    path = torch.tensor([[1, 2, 5, 8, 9, 12, -1], [1, 2, -1, -1, -1, -1, -1]])
    lengths = (torch.tensor([6, 2], dtype=torch.int32), torch.tensor([2, 0]))
    keys, values = (
        (torch.arange(2 * 21 * heads * size) * 7 % 251 + k).view(2, 21, heads, size).to(dtype)
        for k in (1, 2)
    )
    expected = [keys.clone(), values.clone()]
    status = reference.compact_kv(*expected, path, *lengths)
    for swapped in (False, True):
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) if swapped else x.clone()
                 for x in (keys, values)]  # fmt: skip
        caches = [placed(x, target.device, always=True) for x in given]
        assert_same(target.call("compact_kv", *caches, path, *lengths), [status])
        assert_same(caches, expected)


def check_beam_verify(target: Target, vocab: int, width: int, dtype: torch.dtype) -> None:
    """Equal to the reference; bit for bit where nothing is summed."""
    inputs = make_inputs(vocab, 3, width, 2, vocab, dtype)
    for options in ({}, {"rule": "subset"}, {"log_probs": True}):
        found = (t.cpu() for t in target.call("beam_verify", **inputs, **options))
        expected = reference.beam_verify(**inputs, **options)
        assert_like(BeamVerifyResult(*found), expected, exact="log_probs" in options)


def check_tree_attention(
    target: Target, nodes: int, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Close to the reference, in units of the largest output; out of pages and in a window too."""
    generator = torch.Generator().manual_seed(nodes + size)
    places, heads, groups = nodes + 300, 2, 4
    q, k, v = (
        torch.randn(3, *shape, size, generator=generator).to(dtype)
        for shape in ((nodes, heads * groups), (places, heads), (places, heads))
    )
    parents = trees([nodes, max(nodes - 2, 1), 1], nodes)
    ancestors = reference.tree_mask(parents)[0]
    lengths = torch.tensor([places - nodes, 17, 0])
    doubles = (x.double() for x in (q, k, v))
    wide = list(doubles)
    # As many pages of 4 places as the caches have, behind a table that turns their order.
    count = 3 * places // 4
    table = torch.arange(count - count % 3).flip(0).view(3, -1)
    pages = [x.flatten(0, 1)[: count * 4].unflatten(0, (-1, 4)) for x in (k, v, *wide[1:])]
    fits = torch.minimum(lengths, torch.tensor(table.shape[1] * 4 - nodes))
    options = dict(block_table=table, window=nodes + 20, soft_cap=20.0)
    for caches, exact, lens, extra in (
        ((k, v), wide[1:], lengths, {}),
        (pages[:2], pages[2:], fits, options),
    ):
        expected = reference.tree_attention(wide[0], *exact, ancestors, lens, **extra)
        found = target.call("tree_attention", q, *caches, ancestors, lens, **extra)
        assert found[0].dtype == dtype
        for a, b in zip(found, expected, strict=True):
            seen = b.isfinite()
            error = float((a.cpu().double() - b.double())[seen].abs().max())
            assert error <= tolerance * max(1.0, float(b[seen].abs().max())), error
            assert torch.equal(a.cpu().isfinite(), seen)


def check_empty(target: Target) -> None:
    """No requests, no columns, one token in the vocabulary."""
    for shape in (dict(gamma=0), dict(vocab=1), dict(gamma=0, vocab=1)):
        check_verify(target, make_case(1, **shape))
    for shape in (dict(batch=0), dict(batch=0, gamma=0)):
        case = make_case(1, **shape)
        assert_same(target.run(case), case.run(reference.verify))


def check_exact_law(target: Target, rule: str, seed: int, **options: Any) -> None:
    """The exact law of what is emitted is the target's."""
    models = toy_models(seed, 3, 2, dtype=options.pop("dtype", torch.float32))
    law = exact_law(target.verify, *models, rule=rule, bits=34, **options)
    assert law.tv < 1e-6 and law.threshold_gap < 1e-6, (law.tv, law.threshold_gap)


def check_exact_tree_law(target: Target, rule: str, seed: int, **options: Any) -> None:
    """The same of a tree with children of every kind."""
    for kinds in ([0, 1, 1, 1], [0, 2, 2, 0], [0, 3, 0, 1]):
        models = toy_models(seed, 3, 2)
        law = exact_tree_law(
            target.verify_tree, [-1, 0, 0, 1], kinds, *models, rule=rule, bits=34, **options
        )
        assert law.tv < 1e-6 and law.threshold_gap < 1e-6, (kinds, law.tv, law.threshold_gap)


# -------------------------------------------------------------------------------------------------
# Repeatability
# -------------------------------------------------------------------------------------------------


def check_twice(target: Target, case: Case) -> None:
    """All outputs are bit-identical from run to run, whatever the memory held before."""
    here = on(case, target.device)
    first = target.call(operator_of(case), **here.inputs)
    for _ in range(3):
        poison(target.device)
        assert_same(target.call(operator_of(case), **here.inputs), first)


def check_batch(target: Target, case: Case) -> None:
    """Results depend neither on batch mates nor on their order."""
    whole = target.run(case)
    backwards = list(range(case.batch))[::-1]
    for chosen in (backwards, [0], [case.batch - 1], backwards[::3], [1] * 5):
        expected = [output[torch.tensor(chosen)] for output in whole]
        assert_same(target.run(case.select(chosen)), expected)


def check_threads(target: Target, cases: Sequence[Case], threads: int = 6) -> None:
    """Calls from several Python threads at once give what they give one by one."""
    here = [on(case, target.device) for case in cases]
    expected = [target.run(case) for case in here]

    def worker(k: int) -> None:
        with on_stream(new_stream(target.device)):
            for j in range(3 * len(here)):
                i = (5 * k + j) % len(here)
                assert_same(target.run(here[i]), expected[i])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(worker, range(threads)))


# -------------------------------------------------------------------------------------------------
# Streams and graphs
# -------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Give a stream of its own that has seen all that was queued so far; None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Make a stream the current one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def check_streams(target: Target, cases: Sequence[Case]) -> None:
    """Work is queued on the current stream: it sees inputs that arrive there late."""
    expected = [target.run(case) for case in cases]
    here = [on(case, target.device) for case in cases]
    late = [{k: _blank(v) for k, v in case.inputs.items()} for case in here]
    streams = [new_stream(target.device) for _ in cases]
    found = []
    for stream, case, inputs in zip(streams, here, late, strict=True):
        with on_stream(stream):
            if target.is_cuda:
                torch.cuda._sleep(50_000_000)  # some 30 ms in which the inputs are still blank
            fill(inputs, case)
            found.append(target.call(operator_of(case), **inputs))
    for stream, outcome, wanted in zip(streams, found, expected, strict=True):
        if stream is not None:
            stream.synchronize()
        assert_same(outcome, wanted)


def _blank(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def fill(inputs: dict[str, Any], case: Case) -> None:
    """Copy a case's tensors into others."""
    for name, value in case.inputs.items():
        if isinstance(value, Tensor):
            write(inputs[name], value)


def check_replay(
    target: Target,
    cases: Sequence[Case],
    record: Callable[[Callable[[], object], torch.device], Callable[[], object]],
) -> None:
    """A captured call, replayed on other inputs, gives what an eager call gives.

    Parameters
    ----------
    target : Target
        What is tested.
    cases : sequence of VerifyCase or TreeCase
        Of equal shapes; the first is captured.
    record : callable
        From work and a device to what replays it.
    """
    inputs = dict(on(cases[0], target.device).inputs)
    found: list[tuple[Tensor, ...]] = []
    operator = operator_of(cases[0])
    run = record(lambda: found.append(target.call(operator, **inputs)), target.device)
    for case in [*cases[1:], cases[0]]:
        fill(inputs, case)
        for output in found[-1]:
            output.fill_(-3)
        run()
        assert_same(found[-1], target.run(case))


# -------------------------------------------------------------------------------------------------
# Resources
# -------------------------------------------------------------------------------------------------


def large_inputs(
    device: torch.device, batch: int, gamma: int, vocab: int, filters: bool, rule: str
) -> dict[str, Any]:
    """Make bf16 inputs on the device itself."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, gamma + 1, vocab)
    target = torch.randn(shape, generator=generator, device=device).mul_(3).bfloat16()
    draft = target[:, :gamma] + torch.randn(batch, gamma, vocab, device=device).bfloat16()
    size = (batch, gamma + 1)
    inputs: dict[str, Any] = {
        "target_logits": target,
        "draft_tokens": draft.argmax(2),
        "draft_logits": draft,
        "temperature": torch.full((batch,), 0.8, device=device),
        "rule": rule,
    }
    if rule == "coupled":
        inputs["seeds"] = inputs["positions"] = torch.arange(batch, device=device)
    else:
        kind = dict(device=device, dtype=torch.float64)
        inputs["uniforms"] = torch.rand(size, generator=generator, **kind)
    if filters:
        inputs["top_k"] = torch.full((batch,), 50, device=device)
        inputs["top_p"] = torch.full((batch,), 0.9, device=device)
        inputs["min_p"] = torch.full((batch,), 0.01, device=device)
    return inputs


def peak_growth(work: Callable[[], object], device: torch.device) -> int:
    """Give the most bytes that torch's allocator held beyond what it held before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def check_far(target: Target, rows: int, vocab: int) -> None:
    """Rows at the far end of a large table are found, dense, packed and by the other operators."""
    generator = torch.Generator(target.device).manual_seed(5)
    table = torch.empty(rows, vocab, dtype=torch.bfloat16, device=target.device)
    table.normal_(0.0, 3.0, generator=generator)
    gamma = 2
    requests = rows // (gamma + 1)
    dense = table[: requests * (gamma + 1)].view(requests, gamma + 1, vocab)
    tokens = torch.randint(vocab, (requests, gamma), generator=generator, device=target.device)
    size = (requests, gamma + 1)
    u = torch.rand(size, generator=generator, device=target.device, dtype=torch.float64)
    some = torch.tensor([0, requests // 2, requests - 2, requests - 1], device=target.device)
    near = dense[some].contiguous()
    # Accepted drafts and rejected ones: half of the coins are 0.
    tokens[some[::2]] = near[::2, :gamma].argmax(2)
    u[some[::2], :gamma] = 0.0
    for rule in ("token", "block"):
        expected = target.call("verify", near, tokens[some], uniforms=u[some], rule=rule)
        assert int(expected[1].max()) == gamma and int(expected[1].min()) == 0
        whole = target.call("verify", dense, tokens, uniforms=u, rule=rule)
        assert_same([output[some] for output in whole], expected)
        index = some[:, None] * (gamma + 1) + torch.arange(gamma + 1, device=target.device)
        packed = {"target_rows": index, "uniforms": u[some], "rule": rule}
        assert_same(target.call("verify", table, tokens[some], **packed), expected)
        law = {"draft_logits": table, "draft_rows": index[:, :gamma].contiguous(), **packed}
        beside = {**packed, "draft_logits": near[:, :gamma].contiguous()}
        assert_same(
            target.call("verify", table, tokens[some], **law),
            target.call("verify", table, tokens[some], **beside),
        )
    last = torch.tensor([0, rows // 2, rows - 1], device=target.device)
    rows_there = table[last].contiguous()
    law_of_all = target.call("row_law", table)
    assert_same([output[last] for output in law_of_all], target.call("row_law", rows_there))
    v = torch.rand(rows, generator=generator, device=target.device, dtype=torch.float64)
    drawn = target.call("sample", table, v)
    assert_same([output[last] for output in drawn], target.call("sample", rows_there, v[last]))


def check_compiled(target: Target, rule: str, compiler: str) -> None:
    """``torch.compile(fullgraph=True)`` changes no bit."""

    def step(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        logits = inputs["target_logits"] * 1.0
        given = {**inputs, "target_logits": logits, "rule": rule}
        result = specdec_ext.verify(**given, backend=target.name)
        length = result.num_accepted.long() + 1
        return (*result, length, result.tokens.gather(1, length[:, None] - 1))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for seed in range(2):
        case = on(make_case(seed, batch=4, vocab=1033, philox=True), target.device)
        tensors = {k: v for k, v in case.inputs.items() if isinstance(v, Tensor)}
        assert_same(compiled(tensors), step(tensors))
