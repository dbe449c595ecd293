"""Threads and instruction sets: neither changes a bit, resp. anything but a near-tie."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import REFERENCE

import specdec_ext
from specdec_ext.backend import cpu_capability, cpu_variants
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.testing import VerifyOutcome, assert_tokens_match, make_case


def cases():
    """Large enough to be split over threads: several tiles a row, many rows."""
    for seed, rule in enumerate(RULES):
        yield make_case(seed, batch=4, gamma=2, vocab=9001, rule=rule, philox=True)
        yield make_case(seed + 50, batch=40, gamma=2, vocab=700, rule=rule, draft_filters=True)
    yield make_case(90, batch=1, gamma=1, vocab=150_001, dtype=torch.bfloat16)
    yield make_case(91, batch=3, gamma=2, vocab=9001, draft="probs", layout="padded")


def everything(case):
    """All operators on one case."""
    inputs = case.inputs
    logits, draft = inputs["target_logits"][:, 0], inputs.get("draft_logits")
    params = {k: inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    seeds = torch.arange(case.batch)
    ops = torch.ops.specdec
    outputs = [
        *ops.verify(**inputs),
        *ops.row_law(logits, **params),
        *ops.sample(logits, seeds=seeds, positions=seeds, **params),
        ops.uniforms(seeds, seeds, 7),
    ]
    if draft is not None:
        outputs.append(ops.acceptance(logits, draft[:, 0], **params))
    return outputs


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_number_of_threads_changes_nothing(threads):
    for case in cases():
        threads(1)
        expected = everything(case)
        for count in (2, 3):
            threads(count)
            assert_same(everything(case), expected)


def test_calls_from_several_python_threads(threads):
    threads(2)
    work = list(cases())
    expected = [everything(case) for case in work]
    start = threading.Barrier(6)

    def worker(k):
        start.wait()
        order = [(k * 5 + j) % len(work) for j in range(len(work))]
        return [(j, everything(work[j])) for j in order]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as pool:
            for results in pool.map(worker, range(6)):
                for j, outputs in results:
                    assert_same(outputs, expected[j])
    finally:
        sys.setswitchinterval(switch)


def test_refusals_from_several_python_threads():
    # An error in one thread leaves the others alone.
    case = make_case(1, batch=4, vocab=33)
    expected = everything(case)

    def worker(k):
        for _ in range(20):
            if k % 2:
                with pytest.raises(ValueError, match="rule must be"):
                    specdec_ext.verify(**{**case.inputs, "rule": "magic"})
            else:
                assert_same(everything(case), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(worker, range(4)))


def test_inside_a_torch_thread_of_its_own(threads):
    # Called from within another parallel region's thread: nested, still the same bits.
    threads(2)
    case = make_case(2, batch=3, vocab=9001)
    expected = everything(case)
    found = []
    thread = threading.Thread(target=lambda: found.append(everything(case)))
    thread.start()
    thread.join()
    assert_same(found[0], expected)


# ---- instruction sets ----------------------------------------------------------------------------

SCRIPT = """
import sys, torch
import specdec_ext
from specdec_ext.backend import cpu_capability
from test_threads import cases, everything, assert_same
results = []
for case in cases():
    torch.set_num_threads(1)
    results.append(everything(case))
    torch.set_num_threads(2)
    assert_same(everything(case), results[-1])
torch.save((cpu_capability(), results), sys.argv[1])
"""

FLAGS = {"avx512": "avx512bw", "avx2": "avx2", "baseline": "fpu"}


def processor_has(variant):
    with open("/proc/cpuinfo") as info:
        return f" {FLAGS[variant]} " in info.read().replace("\n", " ")


def run_variant(run_python, script, variant, said):
    """Run a script with a variant of the CPU kernels; a processor without it refuses."""
    done = run_python(script, SPECDEC_CPU_CAPABILITY=variant)
    if processor_has(variant):
        assert done.returncode == 0 and said in done.stdout, done.stderr
    else:
        assert done.returncode != 0


@pytest.mark.parametrize("variant", cpu_variants())
def test_variants_agree(run_python, tmp_path, variant):
    path = str(tmp_path / "results.pt")
    done = run_python(SCRIPT, path, SPECDEC_CPU_CAPABILITY=variant)
    if not processor_has(variant):
        assert done.returncode != 0 and "SPECDEC_CPU_CAPABILITY" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    name, results = torch.load(path)
    assert name == variant
    excused = 0
    for case, outputs in zip(cases(), results, strict=True):
        outcome = VerifyOutcome(*outputs[:5])
        excused += assert_tokens_match(outcome, VerifyOutcome(*everything(case)[:5]), case)
        law = dict(zip(specdec_ext.RowLaw._fields, outputs[5:10], strict=True))
        expected = REFERENCE.row_law(
            case.inputs["target_logits"][:, 0],
            **{k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")},
        )
        assert torch.equal(law["argmax"], expected.argmax)
        torch.testing.assert_close(law["log_z"], expected.log_z, rtol=0, atol=5e-6)
    assert excused <= 2


def test_the_best_variant_is_the_default():
    assert cpu_variants()[-1] == "baseline"
    assert cpu_capability() == next(v for v in cpu_variants() if processor_has(v))


def test_a_variant_that_does_not_exist(run_python):
    done = run_python("import specdec_ext", SPECDEC_CPU_CAPABILITY="sse9")
    assert done.returncode != 0
    assert "SPECDEC_CPU_CAPABILITY" in done.stderr and "sse9" in done.stderr
