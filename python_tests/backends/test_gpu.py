"""Every backend that a GPU has, on the GPU: parity, law, streams, graphs, memory, launches.

Runs where torch finds a GPU (benchmarks/gpu/report.py). With ``SPECDEC_TEST_DEVICE=cpu`` the CPU
operators take the backends' place, to try all this where there is none; what only CUDA has is then
skipped. The checks are in gpu_checks.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpu_checks as checks
import pytest
import torch
from gpu_checks import Target
from test_compile import VERIFY_SAMPLES, fully_accepted, split
from test_parity import RULES, VARIANTS
from test_tree import VARIANTS as TREE_VARIANTS
from torch.library import opcheck

import specdec_ext
from specdec_ext import reference
from specdec_ext.backend import absences, has_kernels
from specdec_ext.contract import rule_names
from specdec_ext.ops import TREE_RULES
from specdec_ext.testing import assert_tokens_match, filtered_law, make_case, make_tree_case

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu import replays  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device(os.environ.get("SPECDEC_TEST_DEVICE", "cuda:0"))
BACKENDS = ("cuda", "triton") if DEVICE.type == "cuda" else ("cpu",)
LOSSLESS = rule_names(chains=True, lossless=True, takes_coins=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of tree_attention; float32 products may be done in TF32 where a GPU does them so.
TOLERANCES = {torch.float32: 2**-9, torch.bfloat16: 2**-7, torch.float16: 2**-10}
VOCABULARIES = (50_257, 128_256, 151_936, 152_063)
MEGABYTE = 2**20


@pytest.fixture(params=BACKENDS)
def target(request):
    reason = absences()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return Target(request.param, DEVICE)


@pytest.fixture
def on_gpu(target):
    """The target where it is on a GPU: for what there is no counterpart of on a CPU."""
    if not target.is_cuda:
        pytest.skip(f"nothing to see on {target.device}")
    return target


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_is_present(name):
    # Everything else here is skipped for a backend that is absent: this is what then fails.
    assert absences()[name] is None


# ---- parity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_verify(target, variant, rule):
    for seed in range(2):
        checks.check_verify(target, make_case(seed, rule=rule, **VARIANTS[variant]))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_large_vocabularies(target, vocab, dtype, rule):
    for layout, packed in (("padded", False), ("contiguous", True)):
        case = make_case(
            vocab, rule=rule, batch=3, vocab=vocab, dtype=dtype, layout=layout, packed=packed
        )
        checks.check_verify(target, case)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", ["logits", "none"])
def test_large_vocabulary_with_every_filter(target, draft, rule):
    options = dict(draft_filters=True, draft_vocab=151_936) if draft == "logits" else {}
    case = make_case(
        6, rule=rule, batch=4, gamma=5, vocab=151_936, dtype=torch.bfloat16, draft=draft, **options
    )
    checks.check_verify(target, case)


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_any_alignment(target, dtype, offset):
    vocab = 4096 + offset
    plain = make_case(9, batch=4, vocab=vocab, dtype=dtype)
    shifted = {}
    for name in ("target_logits", "draft_logits"):
        rows = plain.inputs[name]
        storage = torch.full((*rows.shape[:-1], vocab + 9), torch.nan, dtype=dtype)
        shifted[name] = storage[..., offset : offset + vocab].copy_(rows)
    case = plain.replace(**shifted)
    checks.check_verify(target, case)
    # Alignment changes no bit.
    checks.assert_same(target.run(case), target.run(plain))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_what_the_host_cannot_see(target, seed, rule):
    checks.check_verify(target, checks.hostile_case(seed, rule), ties=2)
    checks.check_verify(target, checks.hostile_case(seed, rule, vocab=9001), ties=2)


def test_many_requests(target):
    checks.check_verify(target, make_case(6, batch=1000, gamma=2, vocab=500), ties=5)


@pytest.mark.parametrize("layout", ["contiguous", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 17, 4097, 151_936])
def test_other_operators(target, vocab, dtype, layout):
    checks.check_row_law(target, vocab, vocab, dtype, layout)
    checks.check_sample(target, vocab, vocab, dtype, layout)
    checks.check_acceptance(target, vocab, vocab, vocab, dtype)
    checks.check_acceptance(target, vocab, vocab, vocab + 2, dtype)
    checks.check_features(target, vocab, vocab, dtype, layout)


def test_uniforms(target):
    checks.check_uniforms(target)


def test_empty(target):
    checks.check_empty(target)


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 200, 1024])
def test_tree_mask(target, nodes):
    checks.check_tree_mask(target, nodes)


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES], ids=str)
@pytest.mark.parametrize(("heads", "size"), [(2, 128), (3, 5), (1, 300)])
def test_compact_kv(target, heads, size, dtype):
    checks.check_compact_kv(target, dtype, heads, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4, 5, 64])
@pytest.mark.parametrize("vocab", [33, 9001, 152_063])
def test_beam_verify(target, vocab, width, dtype):
    checks.check_beam_verify(target, vocab, width, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("nodes", [1, 9, 64, 130])
def test_tree_attention(target, nodes, size, dtype):
    if not has_kernels("tree_attention", target.name):
        pytest.skip(f"{target.name} has no tree_attention: Triton's serves its tensors")
    checks.check_tree_attention(target, nodes, size, dtype, TOLERANCES[dtype])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [33, 9001, 151_936])
def test_tokens_of_all_backends_are_equal(vocab, rule):
    present = [name for name in BACKENDS if absences()[name] is None]
    case = make_case(21, rule=rule, batch=6, vocab=vocab, dtype=torch.bfloat16)
    outcomes = [Target(name, DEVICE).run(case) for name in present]
    outcomes.append(case.run(torch.ops.specdec.verify))
    for outcome in outcomes[:-1]:
        assert assert_tokens_match(outcome, outcomes[-1], case) <= 1


# ---- law ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(dtype=torch.bfloat16),
        dict(temperature=0.6),
        dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05),
        dict(temperature=0.8, draft_temperature=1.4, draft_top_k=2),
        dict(kinds=(0, 1)),
        dict(as_probs=True),
    ],
    ids=str,
)
def test_emitted_law_is_the_targets(target, options, rule):
    for seed in range(2):
        checks.check_exact_law(target, rule, seed, **options)


# ---- trees ---------------------------------------------------------------------------------------


def tree_cases(count=1, **options):
    options = {"vocab": 9001, "nodes": 16, "philox": True, **options}
    return [make_tree_case(k, rule=rule, **options) for k in range(count) for rule in TREE_RULES]


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("variant", TREE_VARIANTS)
def test_trees(target, variant, rule):
    options = {**TREE_VARIANTS[variant], **(dict(philox=True) if rule == "coupled" else {})}
    for seed in range(2):
        checks.check_verify(target, make_tree_case(seed, rule=rule, **options))


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("batch, nodes, vocab", [(2, 64, 128_256), (40, 24, 9001), (3, 1024, 130)])
def test_large_trees(target, batch, nodes, vocab, rule):
    options = dict(batch=batch, nodes=nodes, vocab=vocab, dtype=torch.bfloat16, philox=True)
    case = make_tree_case(5, rule=rule, **options)
    checks.check_against_cpu(target, case, ties=2)
    checks.check_twice(target, case)


@pytest.mark.parametrize("rule", ["traversal", "recursive", "target_only"])
def test_law_of_trees(target, rule):
    checks.check_exact_tree_law(target, rule, 0)
    checks.check_exact_tree_law(target, rule, 1, temperature=0.7, top_k=2, draft_top_k=3)


def test_repeatability_of_trees(target):
    for case in tree_cases(batch=12):
        checks.check_twice(target, case)
        checks.check_batch(target, case)
    checks.check_threads(target, tree_cases())
    checks.check_streams(target, tree_cases())


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("size", [dict(vocab=9001), dict(batch=1, nodes=8, vocab=33)], ids=str)
def test_graph_replay_of_trees(target, size, rule):
    cases = [make_tree_case(k, rule=rule, philox=True, **size) for k in range(4)]
    checks.check_replay(target, cases, replays.record)


@pytest.mark.parametrize("batch, nodes", [(1, 64), (32, 16)])
@pytest.mark.parametrize("rule", TREE_RULES)
def test_launches_of_trees(on_gpu, rule, batch, nodes):
    if on_gpu.name != "cuda":
        pytest.skip("the bound is that of the CUDA kernels")
    case = make_tree_case(6, rule=rule, batch=batch, nodes=nodes, vocab=9001, philox=True)
    inputs = checks.on(case, DEVICE).inputs
    found = replays.launched(lambda: on_gpu.operators.verify_tree(**inputs), DEVICE)
    assert 1 <= len(found) <= 5, found


def never_waits(operator, cases):
    inputs = [checks.on(case, DEVICE).inputs for case in cases]
    for given in inputs:  # libraries and workspaces are there after a first call
        operator(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in inputs:
            operator(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_tree_waits_for_the_device(on_gpu, target):
    never_waits(target.operators.verify_tree, tree_cases())


# ---- repeatability ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [501, 151_936])
def test_twice_the_same(target, vocab, rule):
    checks.check_twice(target, make_case(31, rule=rule, vocab=vocab, dtype=torch.bfloat16))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [501, 40_001])
def test_batch_mates_change_nothing(target, vocab, rule):
    checks.check_batch(target, make_case(32, rule=rule, batch=12, vocab=vocab, kinds="mixed"))


def test_several_python_threads(target):
    cases = [make_case(k, rule=rule, vocab=9001, batch=4) for k, rule in enumerate(RULES)]
    checks.check_threads(target, cases)


# ---- streams, graphs, devices -------------------------------------------------------------------


def test_streams_of_their_own(target):
    cases = [make_case(k, rule=rule, vocab=9001, batch=4) for k, rule in enumerate(RULES)]
    checks.check_streams(target, cases)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", ["plain", "philox", "packed", "no draft law", "no filters"])
def test_graph_replay_on_other_inputs(target, variant, rule):
    options = {**VARIANTS[variant], "rule": rule, "vocab": 9001, "batch": 4}
    cases = [make_case(k, **options) for k in range(4)]
    checks.check_replay(target, cases, replays.record)


def test_nothing_waits_for_the_device(on_gpu):
    cases = [make_case(k, rule=rule, vocab=9001) for k, rule in enumerate(RULES)]
    never_waits(on_gpu.operators.verify, cases)


def test_second_device(on_gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    second = Target(on_gpu.name, torch.device("cuda", 1))
    for k, rule in enumerate(RULES):
        case = make_case(k, rule=rule, vocab=9001)
        checks.assert_same(second.run(case), on_gpu.run(case))
        assert torch.cuda.current_device() == 0


# ---- resources ----------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_extra_memory_is_small(on_gpu, rule, filters):
    # Logits of 107 MB; as float32 they would be 214 MB.
    inputs = checks.large_inputs(DEVICE, 32, 5, 151_936, filters, rule)
    on_gpu.operators.verify(**inputs)
    growth = checks.peak_growth(lambda: on_gpu.operators.verify(**inputs), DEVICE)
    assert growth < 8 * MEGABYTE, growth
    # The control: what one probability tensor takes is seen.
    softmax = checks.peak_growth(lambda: inputs["target_logits"].softmax(-1), DEVICE)
    assert softmax > 50 * MEGABYTE


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_launches(on_gpu, rule, batch):
    if on_gpu.name != "cuda":
        pytest.skip("the bound is that of the CUDA kernels")
    inputs = checks.large_inputs(DEVICE, batch, 5, 151_936, False, rule)
    found = replays.launched(lambda: on_gpu.operators.verify(**inputs), DEVICE)
    assert 1 <= len(found) <= 3, found


def test_offsets_beyond_32_bits(on_gpu):
    rows, vocab = 30_000, 151_936
    assert rows * vocab > 2**32
    free, _ = torch.cuda.mem_get_info(DEVICE)
    if free < 24 * 2**30:
        pytest.skip(f"needs 24 GiB of free device memory, there are {free / 2**30:.0f}")
    checks.check_far(on_gpu, rows, vocab)


def test_rows_at_the_end_of_a_table(target):
    checks.check_far(target, 90, 4099)


# ---- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", VERIFY_SAMPLES)
def test_opcheck_verify(target, sample):
    options = {"batch": 3, "vocab": 9, "masks": False, **VERIFY_SAMPLES[sample]}
    args, kwargs = split(checks.on(make_case(1, **options), target.device))
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(target.overload("verify"), args, kwargs, test_utils=some)
    # The fourth check compares without equal_nan.
    case = fully_accepted(make_case(1, **{**options, "filters": False, "ragged": False}))
    args, kwargs = split(checks.on(case, target.device))
    opcheck(target.overload("verify"), args, kwargs)


def test_opcheck_other_operators(target):
    case = checks.on(make_case(3, batch=4, gamma=1, vocab=9, masks=False), target.device)
    logits, draft = (case.inputs[k][:, 0] for k in ("target_logits", "draft_logits"))
    params = checks.parameters(case)
    seeds = torch.arange(4, device=target.device)
    u = case.inputs["uniforms"][:, 0].contiguous()
    opcheck(target.overload("row_law"), (logits,), params)
    opcheck(target.overload("sample"), (logits, u), params)
    opcheck(target.overload("sample"), (logits,), dict(seeds=seeds, positions=seeds, stream=3))
    opcheck(target.overload("acceptance"), (logits, draft), params)
    opcheck(target.overload("uniforms"), (seeds, seeds, 5), dict(stream=1))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_fullgraph_equals_eager(target, compiler, rule):
    checks.check_compiled(target, rule, compiler)


def test_auto_and_fresh_randomness(target):
    # Without randomness given, seeds are drawn on the device; "auto" finds a kernel there.
    p = filtered_law(torch.tensor([0.0, 1.0, 2.0]), temperature=0.7)
    logits = torch.tensor([0.0, 1.0, 2.0], device=target.device).expand(60_000, 2, 3).contiguous()
    tokens = torch.zeros(60_000, 1, dtype=torch.int64, device=target.device)
    torch.manual_seed(5)
    for backend in ("auto", target.name):
        result = specdec_ext.verify(logits, tokens, temperature=0.7, backend=backend)
        law = torch.bincount(result.tokens[:, 0].cpu(), minlength=3).double() / 60_000
        assert 0.5 * float((law - p).abs().sum()) < 0.02
    generator = torch.Generator(target.device).manual_seed(1)
    one = specdec_ext.verify(logits, tokens, generator=generator, backend=target.name)
    again = specdec_ext.verify(
        logits, tokens, generator=generator.manual_seed(1), backend=target.name
    )
    checks.assert_same(one, again)


def test_a_wrong_result_is_seen(target):
    # The comparison itself, through all that moves tensors: another rule is not excused.
    case = make_case(41, rule="token", batch=40, filters=False, greedy_rows=False)
    wrong = case.replace(uniforms=1 - case.inputs["uniforms"])
    with pytest.raises(AssertionError):
        assert_tokens_match(target.run(wrong), case.run(reference.verify), case)


if DEVICE.type == "cuda" and not torch.cuda.is_available():
    # Last, so that all of the above was executed; one line of the summary, not hundreds.
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)
