"""The proof on hardware, tried without hardware: checks, benchmark and report on the CPU.

What only a GPU can say is in test_gpu.py; here it is made sure that nothing in its checks, in the
benchmark or in the report runs for the first time there, and that the checks can fail.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import types
from dataclasses import dataclass, replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import gpu_checks as checks
import gpu_guard
import pytest
import torch
from gpu_checks import Target

from specdec_ext import reference
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.ops import TREE_RULES
from specdec_ext.testing import make_case, make_tree_case

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_tree_attention  # noqa: E402
import common  # noqa: E402
from gpu import bench as bench_gpu  # noqa: E402
from gpu import peers, replays  # noqa: E402
from gpu import report as gpu_report  # noqa: E402
from gpu import tables as gpu_tables  # noqa: E402
from gpu import trees as gpu_trees  # noqa: E402
from gpu.peers import Sampling  # noqa: E402
from gpu.tables import Cell  # noqa: E402

CPU = torch.device("cpu")
TARGET = Target("cpu", CPU)


# ---- the checks of test_gpu.py ------------------------------------------------------------------


def test_parity_checks_pass_on_the_cpu():
    for k, rule in enumerate(RULES):
        checks.check_verify(TARGET, make_case(k, rule=rule, layout="padded"))
        checks.check_against_cpu(TARGET, make_case(k, rule=rule, packed=True))
        checks.check_verify(TARGET, checks.hostile_case(k, rule), ties=2)
    checks.check_row_law(TARGET, 1, 33, torch.bfloat16, "padded")
    checks.check_sample(TARGET, 2, 33, torch.float16, "contiguous")
    checks.check_acceptance(TARGET, 3, 33, 17, torch.float32)
    checks.check_features(TARGET, 4, 33, torch.float16, "padded")
    checks.check_uniforms(TARGET)
    checks.check_tree_mask(TARGET, 70)
    checks.check_compact_kv(TARGET, torch.bfloat16, 2, 8)
    checks.check_beam_verify(TARGET, 33, 4, torch.bfloat16)
    checks.check_tree_attention(TARGET, 9, 32, torch.bfloat16, 2**-7)
    checks.check_empty(TARGET)
    checks.check_exact_law(TARGET, "block", 0, dtype=torch.bfloat16, temperature=0.7, top_k=2)


def test_tree_checks_pass_on_the_cpu():
    cases = [
        make_tree_case(k, rule=rule, philox=True, vocab=33) for k, rule in enumerate(TREE_RULES)
    ]
    for case in cases:
        checks.check_verify(TARGET, case)
        checks.check_against_cpu(TARGET, case)
    checks.check_twice(TARGET, cases[0])
    checks.check_batch(TARGET, cases[0])
    checks.check_threads(TARGET, cases, threads=3)
    checks.check_streams(TARGET, cases)
    same_shape = [make_tree_case(k, vocab=33) for k in range(3)]
    checks.check_replay(TARGET, same_shape, replays.record)
    checks.check_exact_tree_law(TARGET, "recursive", 0)


def test_other_checks_pass_on_the_cpu():
    cases = [make_case(k, rule=rule, vocab=33, batch=4) for k, rule in enumerate(RULES)]
    for case in cases[:2]:
        checks.check_twice(TARGET, case)
        checks.check_batch(TARGET, case)
    checks.check_threads(TARGET, cases, threads=3)
    checks.check_streams(TARGET, cases)
    blocks = [make_case(k, vocab=33, batch=4) for k in range(3)]
    checks.check_replay(TARGET, blocks, replays.record)
    checks.check_far(TARGET, 30, 501)
    checks.check_compiled(TARGET, "token", "aot_eager")
    inputs = checks.large_inputs(CPU, 2, 3, 700, True, "token")
    assert TARGET.verify(**inputs).status.tolist() == [0, 0]
    assert TARGET.overload("verify") is torch.ops.specdec.verify.default


def test_a_hostile_case_is_hostile():
    seen = 0
    for seed in range(3):
        for bits in checks.hostile_case(seed, "token").run(reference.verify).status.tolist():
            seen |= bits
    assert seen == 1 | 2 | 4 | 8


@dataclass(frozen=True)
class Wrong(Target):
    """A backend that does something to the arguments or the outcome of verify."""

    before: object = None
    after: object = None

    def call(self, operator, *args, **kwargs):
        if self.before is not None:
            kwargs = self.before(dict(kwargs))
        found = super().call(operator, *args, **kwargs)
        return found if self.after is None else self.after(found, kwargs)


def wrong(before=None, after=None):
    return Wrong("cpu", CPU, before, after)


def test_checks_see_wrong_backends():
    case = make_case(1, rule="token", batch=8, filters=False, greedy_rows=False)
    other_coins = wrong(lambda kwargs: {**kwargs, "uniforms": 1 - kwargs["uniforms"]})
    with pytest.raises(AssertionError):
        checks.check_verify(other_coins, case, ties=8)
    with pytest.raises(AssertionError):
        checks.check_against_cpu(other_coins, case, ties=8)
    count = itertools.count(1)
    late = wrong(after=lambda found, _: [found[0], found[1], found[2] * next(count), *found[3:]])
    with pytest.raises(AssertionError):
        checks.check_twice(late, case)
    first_decides = wrong(
        lambda kwargs: {**kwargs, "uniforms": kwargs["uniforms"][:1].expand_as(kwargs["uniforms"])}
    )
    with pytest.raises(AssertionError):
        checks.check_batch(first_decides, case)
    with pytest.raises(AssertionError):
        checks.check_exact_law(other_coins, "block", 0, draft_temperature=0.1)
    with pytest.raises(AssertionError):
        checks.check_exact_tree_law(other_coins, "traversal", 0)
    with pytest.raises(AssertionError):
        checks.check_verify(other_coins, make_tree_case(1, batch=20, vocab=33), ties=20)
    with pytest.raises(AssertionError):
        checks.check_replay(TARGET, [case, case], lambda work, _: work() or (lambda: None))


def test_offsets_that_wrap_are_seen():
    def wrap(kwargs):
        rows = kwargs.get("target_rows")
        return kwargs if rows is None else {**kwargs, "target_rows": rows % 16}

    with pytest.raises(AssertionError):
        checks.check_far(wrong(wrap), 30, 501)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded"])
def test_placed_keeps_strides_and_misalignment(layout):
    rows = make_case(1, layout=layout, dtype=torch.bfloat16).inputs["target_logits"]
    there = checks.placed(rows, torch.device("meta"))
    assert there.stride() == rows.stride() and there.storage_offset() == rows.storage_offset()
    assert there.shape == rows.shape and there.dtype == rows.dtype


def test_a_cpu_is_given_copies_too():
    plain = torch.arange(6.0).reshape(2, 3)
    here = checks.placed(plain, CPU, always=True)
    assert here is not plain and torch.equal(here, plain)
    assert checks.placed(here, CPU, always=True) is here and checks.placed(plain, CPU) is plain
    expanded = torch.arange(3).expand(2, 3)
    there = checks.placed(expanded, CPU, always=True)
    assert torch.equal(there, expanded) and there.stride() == (0, 1)
    assert there.data_ptr() != expanded.data_ptr()
    with pytest.raises(AssertionError, match="dimension 0 is expanded there"):
        checks.write(there, plain.long())
    # The gaps between rows are no copies of what lay there.
    rows = checks.placed(torch.zeros(2, 4)[:, :3], CPU, always=True)
    assert rows.as_strided((4,), (1,))[3].isnan()


def test_shared_children_rows_are_given_and_replayed():
    cases = [make_tree_case(k, packed=True, shared_rows=True, vocab=33) for k in range(3)]
    assert cases[0].inputs["children_rows"].stride(0) == 0
    checks.check_verify(TARGET, cases[0])
    checks.check_replay(TARGET, cases, replays.record)


def test_a_broken_device_ends_the_session(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    item = types.SimpleNamespace(nodeid="test_x")
    gpu_guard.pytest_runtest_teardown(item)  # nothing was started: nothing to wait for
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(pytest.exit.Exception, match="test_x broke the device"):
        gpu_guard.pytest_runtest_teardown(item)
    left = []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(pytest.exit.Exception):
        gpu_guard.pytest_runtest_teardown(item)
    assert left == [70]


# ---- timing --------------------------------------------------------------------------------------


def test_time_run_is_per_call():
    calls = []
    timing = replays.time_run(lambda: calls.append(time.sleep(0.004)), 2, CPU, 0.0, samples=3)
    assert 0.0015 < timing.min <= timing.median and timing.calls == 3 and len(calls) == 4


class FakeCuda:
    """Stands in for torch.cuda: notes what is called in which order."""

    def __init__(self, monkeypatch, capturable=True):
        self.seen, self.clock = [], 0.0
        note = self.seen.append
        fake = self

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_stream(self, other):
                note("wait")

        class Graph:
            def replay(self):
                note("replay")
                fake.clock += 2.0

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.clock

            def synchronize(self):
                note("synchronize")

            def elapsed_time(self, end):
                return end.at - self.at

        @contextlib.contextmanager
        def graph(graph):
            note("capture")
            if not capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            yield
            note("captured")

        for name, value in dict(
            Stream=Stream,
            CUDAGraph=Graph,
            Event=Event,
            graph=graph,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda device: Stream(),
            synchronize=lambda device=None: note("synchronize"),
            memory_allocated=lambda device: 100,
            max_memory_allocated=lambda device: 142,
            reset_peak_memory_stats=lambda device: note("reset"),
        ).items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_what_is_called_of_cuda(monkeypatch):
    fake, device = FakeCuda(monkeypatch), torch.device("cuda", 0)
    run = replays.record(lambda: fake.seen.append("work"), device)
    assert fake.seen == "wait work wait synchronize capture work captured".split()
    fake.seen.clear()
    timing = replays.time_run(run, 4, device, budget=0.0, samples=2)
    assert timing.median == pytest.approx(2e-3 / 4) and timing.calls == 2
    # The first measurement says that five replays fill 10 ms; one more goes ahead of each clock.
    assert fake.seen == [*["replay"] * 2, "synchronize", *([*["replay"] * 6, "synchronize"] * 2)]
    assert checks.peak_growth(lambda: None, device) == 42
    with pytest.raises(replays.CaptureFailed, match="not permitted"):
        FakeCuda(monkeypatch, capturable=False)
        replays.record(lambda: None, device)


def test_ceilings_launches_and_facts():
    assert min(replays.read_ceiling(CPU, 1 << 20).values()) > 1e6
    assert replays.copy_ceiling(CPU, 1 << 20) > 1e6
    assert replays.launches(lambda: torch.ones(3).sum(), CPU) == {}
    facts = replays.facts(CPU)
    assert facts["torch"] == torch.__version__ and json.dumps(facts)


def test_launches_reads_the_trace(monkeypatch):
    import torch.profiler

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def export_chrome_trace(self, path):
            cats = ["kernel", "cpu_op", "kernel", "gpu_memset", None]
            events = [
                {"cat": cat, "name": "void a::(anonymous namespace)::x<3, (b::E)1>(c)", "dur": 4}
                if cat
                else {"name": "y"}
                for cat in cats
            ]
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert replays.launches(lambda: None, CPU) == {"kernel": 2, "gpu_memset": 1}
    assert replays.durations(lambda: None, 2, CPU) == {"x<3, 1>": 6.0}
    assert replays.short_name("decide(specdec::VerifyParams, specdec::cuda::Scratch)") == "decide"
    assert replays.short_name("_scan_kernel") == "_scan_kernel"
    assert replays.sm_clock(lambda: None, CPU) is None


READER = """
import torch
from gpu import replays
data = torch.arange(2 * replays.READ_BLOCK, dtype=torch.int32)
seen = []
kernel = replays._read_kernel
class Spy:
    def __getitem__(self, grid):
        def launch(words, found, **constants):
            kernel[grid](words, found, **constants)
            seen.append((grid, found.tolist()))
        return launch
replays._read_kernel = Spy()
replays.reader(data)()
assert seen == [((2,), [replays.READ_BLOCK - 1, 2 * replays.READ_BLOCK - 1])], seen
print("read everything")
"""


@pytest.mark.thorough
def test_the_read_kernel_reads_everything(run_python):
    benchmarks = str(common.ROOT / "benchmarks")
    paths = os.pathsep.join(filter(None, [benchmarks, os.environ.get("PYTHONPATH", "")]))
    done = run_python(READER, TRITON_INTERPRET="1", PYTHONPATH=paths)
    assert "read everything" in done.stdout, done.stderr


# ---- peers ---------------------------------------------------------------------------------------


def law_of_small_requests(drafter, sampling, requests=20_000):
    return bench_gpu.law_inputs(drafter, sampling, requests, 64, CPU)


SAMPLINGS = [Sampling(0.8), Sampling(0.8, 20, 0.9)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["temperature", "filters"])
@pytest.mark.parametrize("drafter", bench_gpu.DRAFTERS)
def test_eager_peers_have_the_law(drafter, sampling):
    inputs, p, alpha = law_of_small_requests(drafter, sampling)
    for name in peers.eager_laws(sampling):
        verify = peers.verifier(name, sampling, (20_000, 2, 64), CPU)
        assert "first token TV" in bench_gpu.check_law(verify, inputs, p, alpha)


def emit_target(inputs):
    """Wrong: the residual is forgotten."""
    found = peers.eager(peers.softmax_probs, Sampling(0.8), inputs)
    drawn = peers.race(inputs.target[:, 0].float().div(0.8).softmax(-1))
    return found.where(torch.arange(3) != 0, found).where((found[:, 1:2] >= 0), drawn)


def accept_all(inputs):
    """Wrong: accepts whatever comes."""
    return torch.nn.functional.pad(inputs.tokens, (0, 1), value=5)


def other_temperature(inputs):
    """Wrong: another law."""
    return peers.eager(peers.softmax_probs, Sampling(1.3), inputs)


@pytest.mark.parametrize("verify", [emit_target, accept_all, other_temperature])
def test_wrong_peers_are_refused(verify):
    inputs, p, alpha = law_of_small_requests("dense", SAMPLINGS[0])
    with pytest.raises(AssertionError, match="total variation"):
        bench_gpu.check_law(verify, inputs, p, alpha)


def flashinfer_stand_in():
    """FlashInfer's functions as its documentation describes them."""

    def softmax(logits, temperature=None, enable_pdl=None):
        assert logits.dim() == 2 and logits.is_contiguous()
        return (logits.float() / temperature).softmax(-1)

    def top_k_renorm_probs(probs, top_k):
        kept = probs.where(probs >= probs.topk(top_k).values[:, -1:], 0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p_renorm_probs(probs, top_p):
        ranked, order = probs.sort(-1, descending=True)
        ranked = ranked.where(ranked.cumsum(-1) - ranked < top_p, 0)
        kept = torch.zeros_like(probs).scatter_(-1, order, ranked)
        return kept / kept.sum(-1, keepdim=True)

    def chain_speculative_sampling(
        draft_probs,
        draft_token_ids,
        target_probs,
        maybe_output_accepted_token_num=None,
        maybe_output_emitted_draft_token_num=None,
        deterministic=True,
        generator=None,
        seed=None,
        offset=None,
    ):
        assert draft_token_ids.dtype == torch.int32
        assert seed.shape == offset.shape == (1,) and seed.dtype == torch.int64
        coins = torch.rand(*draft_token_ids.shape, generator=torch.Generator().manual_seed(3))
        coins = torch.nn.functional.pad(coins, (0, 1)).double()
        verdict = peers.baselines.verify_token(
            target_probs, draft_token_ids.long(), draft_probs, coins, lambda p: p, peers.race
        )
        return verdict.tokens.int(), verdict.num_accepted, verdict.num_accepted

    return types.SimpleNamespace(**locals())


def vllm_stand_in():
    """The functions of vLLM's sampler, by their signatures; python_tests/engines runs the real."""

    def apply_temperature(logits, expanded_idx_mapping, temperature):
        logits.div_(temperature[expanded_idx_mapping][:, None])

    def apply_top_k_top_p_triton(logits, k, p, mask_value=float("-inf")):
        assert logits.dtype == torch.float32 and logits.dim() == 2
        if k is not None:
            assert k.shape == (len(logits),) and k.dtype == torch.int32
            limits = torch.stack(
                [row.topk(int(n)).values[-1] for row, n in zip(logits, k, strict=True)]
            )
            logits = logits.masked_fill(logits < limits[:, None], mask_value)
        if p is not None:
            assert p.shape == (len(logits),)
            ranked, order = logits.softmax(-1).sort(-1, descending=True)
            far = ranked.cumsum(-1) - ranked >= p[:, None]
            logits = logits.masked_fill(torch.zeros_like(far).scatter_(-1, order, far), mask_value)
        return logits

    def rejection_sample(
        target_logits,
        draft_logits,
        draft_sampled,
        cu_num_logits,
        pos,
        idx_mapping,
        expanded_idx_mapping,
        expanded_local_pos,
        temperature,
        seed,
        num_speculative_steps,
        synthetic_conditional_rates=None,
        use_fp64=False,
        use_block_verification=False,
        contexts=None,
        watermarking=None,
        watermarking_skip_mask=None,
        watermark_key=None,
    ):
        batch, count = len(idx_mapping), num_speculative_steps + 1
        assert (
            pos.shape == expanded_idx_mapping.shape == expanded_local_pos.shape == (batch * count,)
        )
        assert torch.equal(cu_num_logits.diff(), torch.full_like(idx_mapping, count))
        assert pos.dtype == seed.dtype == torch.int64 and len(seed) == batch
        p = target_logits.view(batch, count, -1).float().softmax(-1)
        tokens = draft_sampled.view(batch, count)[:, 1:].long()
        q = torch.zeros_like(p[:, 1:]).scatter_(-1, tokens[..., None], 1.0)
        if draft_logits is not None:  # as drawn: before their temperature
            q = (draft_logits.float() / temperature[:, None, None]).softmax(-1)
        coins = torch.rand(batch, count, dtype=torch.float64)
        verdict = peers.baselines.verify_token(p, tokens, q, coins, lambda x: x, peers.race)
        emitted = verdict.num_accepted.int() + 1
        # What is beyond the end is left as it was.
        beyond = torch.arange(count) >= emitted[:, None]
        return verdict.tokens.masked_fill(beyond, 7), emitted

    return {
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": dict(
            rejection_sample=rejection_sample
        ),
        "vllm.v1.worker.gpu.sample.gumbel": dict(apply_temperature=apply_temperature),
        "vllm.v1.sample.ops.topk_topp_triton": dict(
            apply_top_k_top_p_triton=apply_top_k_top_p_triton
        ),
    }


class RaggedAttention:
    """FlashInfer's wrapper of that job by its documentation, on tensors of torch."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert custom_mask.dtype == torch.bool and custom_mask.dim() == 1
        self.queries, self.keys = qo_indptr.tolist(), kv_indptr.tolist()
        self.heads, self.mask, self.dtype = (num_qo_heads, num_kv_heads), custom_mask, q_data_type

    def run(self, q, k, v):
        assert q.shape[1] == self.heads[0] and k.shape[1] == v.shape[1] == self.heads[1]
        assert q.dtype == self.dtype and k.is_contiguous() and v.is_contiguous()
        out, masks = [], self.mask
        for b in range(len(self.queries) - 1):
            rows = slice(*self.queries[b : b + 2])
            places = slice(*self.keys[b : b + 2])
            shape = (rows.stop - rows.start, places.stop - places.start)
            mask, masks = masks[: shape[0] * shape[1]].view(shape), masks[shape[0] * shape[1] :]
            turned = [t.transpose(0, 1)[None] for t in (q[rows], k[places], v[places])]
            found = torch.nn.functional.scaled_dot_product_attention(
                *turned, attn_mask=mask, enable_gqa=True
            )
            out.append(found[0].transpose(0, 1))
        assert not len(masks)
        return torch.cat(out)


@pytest.fixture
def packages(monkeypatch):
    """Other packages' place taken by stand-ins of the same signatures."""
    stand_ins = {
        "flashinfer": types.SimpleNamespace(__spec__=object()),
        "flashinfer.sampling": flashinfer_stand_in(),
        "flashinfer.prefill": types.SimpleNamespace(
            BatchPrefillWithRaggedKVCacheWrapper=RaggedAttention
        ),
        "vllm": types.SimpleNamespace(__spec__=object()),
        **{name: types.SimpleNamespace(**has) for name, has in vllm_stand_in().items()},
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "help_compiler", lambda folder: None)
    peers.missing.cache_clear()
    yield
    peers.missing.cache_clear()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["temperature", "filters"])
@pytest.mark.parametrize("drafter", bench_gpu.DRAFTERS)
@pytest.mark.parametrize("name", ["flashinfer", "vllm"])
def test_packages_are_called_as_documented(packages, name, drafter, sampling):
    assert peers.absences(torch.device("cuda")) == {"flashinfer": None, "vllm": None}
    assert all("GPU" in reason for reason in peers.absences(CPU).values())
    requests = 20_000 if name == "flashinfer" or sampling.top_k == 0 else 5_000
    inputs, p, alpha = law_of_small_requests(drafter, sampling, requests)
    before = inputs.target.clone()
    verify = peers.verifier(name, sampling, (requests, 2, 64), CPU)
    bench_gpu.check_law(verify, inputs, p, alpha)
    bench_gpu.check_law(verify, inputs, p, alpha)  # nothing is left over from the first call
    assert torch.equal(inputs.target, before)
    assert peers.tiny_call(name, CPU).shape == (2, 3)


def test_attention_of_flashinfer_is_called_as_documented(packages):
    """On the inputs of the benchmark, whose check it has to pass."""
    setting = bench_tree_attention.Setting(2, 9, 4, 2, 40, "float32", ragged=True)
    call = bench_tree_attention.make_call(setting, CPU)
    where = dict(prefix_lens=call["seq_lens"], prefix_width=31, layout="packed")
    contestant = bench_tree_attention.Flashinfer(call, where)
    expected = reference.tree_attention(**call).out
    padding = (call["ancestors"] == 0).all(2)
    checked = (bench_tree_attention.FLASHINFER, contestant(), expected, padding)
    assert bench_tree_attention.check(*checked) == ""
    call["ancestors"] = call["ancestors"].roll(1, 0)  # the control: the other request's tree
    assert bench_tree_attention.check("other", contestant(), expected, padding) == ""
    other = bench_tree_attention.Flashinfer(call, where)()
    assert "differs" in bench_tree_attention.check("other", other, expected, padding)
    assert peers.tiny_attention(CPU).shape == (2, 3, 8, 128)


def test_absent_packages_are_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    peers.missing.cache_clear()
    assert "vllm" in peers.absences(CPU)["vllm"]
    peers.missing.cache_clear()


def test_compilers_are_helped(tmp_path, monkeypatch):
    headers = tmp_path / "nvidia/cu13/include"
    headers.mkdir(parents=True)
    (headers / "curand.h").touch()
    monkeypatch.setattr(peers.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("CPATH", "/elsewhere")
    peers.help_compiler(tmp_path)
    assert os.environ["CPATH"] == f"{headers}{os.pathsep}/elsewhere"


# ---- the benchmark -------------------------------------------------------------------------------

CENTRAL = Cell("deterministic", "temperature", 32, 5, 151_936)


def generator():
    return torch.Generator().manual_seed(11)


def test_floor_of_the_project():
    # B = 32, gamma 5, V = 151,936 in bf16 at 4.3 TB/s: about 13.5 us for the target's rows.
    assert CENTRAL.floor_bytes(0.0) / 4.3e6 == pytest.approx(13.57, abs=0.01)
    dense = replace(CENTRAL, drafter="dense")
    assert dense.floor_bytes(0.0) / CENTRAL.floor_bytes(0.0) == pytest.approx(13 / 6)
    assert dense.floor_bytes(1.0) / CENTRAL.floor_bytes(0.0) == pytest.approx(12 / 6)


@pytest.mark.parametrize("filters", ["temperature", "top_k+top_p"])
def test_dense_drafts_are_accepted_as_the_name_says(filters):
    cell = Cell("dense", filters, 24, 3, 4000)
    inputs = bench_gpu.make_inputs(cell, generator(), CPU)
    law = bench_gpu.law_of(cell.sampling)
    alpha = torch.minimum(law(inputs.target[:, :-1]), law(inputs.draft)).sum(-1).mean()
    assert float(alpha) == pytest.approx(0.7, abs=0.06)
    full = bench_gpu.make_inputs(replace(cell, acceptance="full"), generator(), CPU)
    assert bench_gpu.acceptance_seen(cell, full)["full_share"] == 1.0


def test_deterministic_drafts_are_accepted_as_the_name_says():
    cell = Cell("deterministic", "temperature", 4, 3, 4000)
    inputs = bench_gpu.make_inputs(cell, generator(), CPU)
    p = bench_gpu.law_of(cell.sampling)(inputs.target[:, :-1])
    drafted = p.gather(-1, inputs.tokens[..., None])
    torch.testing.assert_close(drafted, torch.full_like(drafted, 0.7), atol=0.02, rtol=0)
    assert inputs.draft is None and torch.equal(inputs.tokens, inputs.tokens32.long())


@pytest.mark.parametrize("drafter", bench_gpu.DRAFTERS)
def test_ours_is_checked(drafter):
    cell = Cell(drafter, "top_k+top_p", 6, 2, 700)
    inputs = bench_gpu.make_inputs(cell, generator(), CPU)
    case = bench_gpu.case_of(cell, inputs, "block")
    assert case.inputs.keys() >= {"temperature", "top_k", "top_p", "uniforms"}
    verify = torch.ops.specdec.verify
    assert "0 ties" in bench_gpu.check_ours(verify, case, 2)

    def without_filters(**kwargs):
        return verify(**{k: v for k, v in kwargs.items() if k != "top_k"})

    with pytest.raises(AssertionError):
        bench_gpu.check_ours(without_filters, case, 2)


@pytest.mark.parametrize("rule", bench_gpu.RULES)
@pytest.mark.parametrize("filters", bench_gpu.SAMPLING)
@pytest.mark.parametrize("drafter", bench_gpu.DRAFTERS)
def test_ours_is_checked_where_everything_is_accepted(drafter, filters, rule):
    cell = Cell(drafter, filters, 32, 5, 4000, "full")
    case = bench_gpu.case_of(cell, bench_gpu.make_inputs(cell, generator(), CPU), rule)
    assert "0 ties" in bench_gpu.check_ours(torch.ops.specdec.verify, case, 2)


@pytest.mark.parametrize("contestant", bench_gpu.named("cpu")[2:])
def test_rules_and_features_on_demand(tmp_path, contestant):
    cell = Cell("dense", "temperature", 6, 2, 700)
    assert contestant in bench_gpu.named("cpu", cell)
    assert contestant not in bench_gpu.contestants(cell, options_of(tmp_path))
    options = options_of(tmp_path, "--contestants", contestant)
    assert bench_gpu.contestants(cell, options) == [contestant]
    less = options_of(tmp_path, "--contestants", contestant, "eager", "--without", contestant)
    assert bench_gpu.contestants(cell, less) == ["eager"]
    _, rule, feature = bench_gpu.backend_of(contestant)
    inputs = bench_gpu.make_inputs(cell, generator(), CPU)
    case = bench_gpu.case_of(cell, inputs, rule, feature)
    keys = {"masked": "allowed_mask", "reduced": "draft_token_ids", "tree": "uniforms", "": "seeds"}
    assert keys[feature] in case.inputs
    assert "0 ties" in bench_gpu.check(contestant, cell, [inputs], None, options)
    (call,) = bench_gpu.calls_of(contestant, cell, [inputs], CPU)
    accepted = call().num_accepted
    assert torch.equal(accepted, case.run(torch.ops.specdec.verify).num_accepted)
    assert int(accepted.sum()) > 0


def test_the_mean_number_accepted_is_checked():
    cell = Cell("dense", "temperature", 64, 3, 500)
    sets = [bench_gpu.make_inputs(cell, generator(), CPU) for _ in range(2)]
    good = peers.verifier("eager", cell.sampling, (64, 3, 500), CPU)
    assert "expected" in bench_gpu.check_accepted(good, cell, sets)
    with pytest.raises(AssertionError):
        bench_gpu.check_accepted(accept_all, cell, sets)


def options_of(tmp_path, *more):
    tiny = "--device cpu --quick --vocab 300 --batch 2 --gamma 2 --cell-s 0 --seed 3".split()
    return bench_gpu.parse([*tiny, "--out", str(tmp_path), *more])


def test_jobs_begin_with_the_targets(tmp_path):
    options = bench_gpu.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    jobs = list(bench_gpu.jobs_of(options))
    first = [cell for cell, _ in jobs[:8]]
    assert {(c.batch, c.gamma, c.vocab) for c in first} == {(32, 5, 151_936), (1, 5, 151_936)}
    assert [(c.batch, names) for c, names in jobs[8:12]] == [(32, ("compile",))] * 4
    assert all("compile" not in names for _, names in jobs[:8])
    assert len(set(jobs)) == len(jobs) and {c.vocab for c, _ in jobs} == set(options.vocab)
    options.quick = False
    grid = [cell for cell, _ in bench_gpu.jobs_of(options)]
    assert len(set(grid)) == 4 * 3 * 3 * 2 * 2 and grid[0].batch == 32


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    options = options_of(tmp_path)
    state = bench_gpu.State(tmp_path / "state.json")
    cell = Cell("dense", "temperature", 2, 2, 300)
    sets = [bench_gpu.make_inputs(cell, generator(), CPU)]

    def run(error):
        def fail(*_):
            raise error

        monkeypatch.setattr(bench_gpu, "run_contestant", fail)
        return bench_gpu.attempt("cpu token", cell, sets, state, options)

    assert run(AssertionError("wrong token")) and state.records[-1]["status"] == "unequal"
    assert run(ValueError("no")) and state.records[-1]["status"] == "failed"
    assert not run(RuntimeError("CUDA error: misaligned address"))
    assert state.records[-1]["status"] == "failed"
    count = len(state.records)
    assert not run(replays.CaptureFailed("RuntimeError: ... when stream is capturing"))
    assert state.ungraphable == ["cpu token"] and len(state.records) == count
    again = bench_gpu.State(tmp_path / "state.json")
    assert vars(again) == vars(state) and again.done() == {(cell, "cpu token")}
    table = gpu_tables.problems_table({"records": state.records})
    assert "wrong token" in table and "misaligned address" in table


def test_ungraphable_work_is_timed_as_it_is(tmp_path):
    options = options_of(tmp_path)
    state = bench_gpu.State(tmp_path / "state.json")
    state.ungraphable.append("cpu token")
    cell = Cell("dense", "temperature", 2, 2, 300)
    sets = [bench_gpu.make_inputs(cell, generator(), CPU)]
    found = bench_gpu.run_contestant("cpu token", cell, sets, state, options)
    assert found["status"] == "ok" and found["graph"] is False and found["us"] > 0


def test_a_crashed_worker_is_replaced(tmp_path, monkeypatch):
    options = options_of(tmp_path)
    options.budget_s = 60
    cell = Cell("dense", "temperature", 2, 2, 300)
    codes = iter([-11, bench_gpu.OUT_OF_TIME, 0])

    def watch(command, path, patience, until):
        state = bench_gpu.State(path)
        state.facts = {"read_gb_s": 1.0, "copy_gb_s": 1.0}
        code = next(codes)
        state.started = None if code == 0 else {"cell": vars(cell), "contestant": "cuda token"}
        state.save()
        return code

    monkeypatch.setattr(bench_gpu, "watch", watch)
    state = bench_gpu.supervise(options, [])
    assert [r["status"] for r in state.records] == ["crashed", "cut off"]
    assert "ended with -11" in state.records[0]["reason"]


def test_workers_that_learn_nothing_are_not_repeated_for_ever(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(bench_gpu, "watch", lambda *_: calls.append(1) or 1)
    assert bench_gpu.supervise(options_of(tmp_path), []).records == [] and len(calls) == 2


def test_watch_kills_what_hangs(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    begin = time.time()
    said = bench_gpu.watch(sleep, tmp_path / "nothing", 0.5, begin + 60)
    assert "without progress" in said and time.time() - begin < 20
    assert bench_gpu.watch(sleep, tmp_path / "nothing", 60, time.time()) == bench_gpu.OUT_OF_TIME
    leave = [sys.executable, "-c", "import sys; sys.exit(75)"]
    assert bench_gpu.watch(leave, tmp_path / "nothing", 60, time.time() + 60) == 75


def record_of(cell, contestant, us, **more):
    found = {"cell": vars(cell), "contestant": contestant, "status": "ok", "us": us}
    return {**found, "full_share": 0.2, "graph": True, "launches": {"kernel": 3}, **more}


def test_kernels_of_ours_have_a_table():
    kernels = {"scan_laws<0, 1>": 17.25, "decide": 3.0}
    records = [
        record_of(CENTRAL, "cuda token", 30.0, kernels=kernels, sm_mhz=1755.0),
        record_of(CENTRAL, "eager", 300.0, kernels=kernels),
        record_of(CENTRAL, "triton token", 30.0),
    ]
    (row,) = gpu_tables.kernels_table({"records": records}).splitlines()[2:]
    assert "| cuda token |" in row and "scan_laws<0, 1> 17.25, decide 3.00 | 1755 |" in row
    assert gpu_tables.kernels_table({"records": records[1:]}) == ""


@pytest.mark.parametrize("wrong", [False, True])
def test_trees_are_checked_and_timed(tmp_path, monkeypatch, capsys, wrong):
    out = tmp_path / "trees.json"
    arguments = "--device cpu --nodes 9 --batch 2 --vocab 300 --seconds 0 --out".split()
    if wrong:  # the control: an operator that is off is not timed
        verify = torch.ops.specdec.verify_tree
        off = types.SimpleNamespace(
            verify_tree=lambda **k: verify(**{**k, "uniforms": 1 - k["uniforms"]})
        )
        monkeypatch.setattr(gpu_trees, "resolve", lambda *_: off)
        with pytest.raises(AssertionError):
            gpu_trees.main([*arguments, str(out)])
        return
    assert gpu_trees.main([*arguments, str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    assert [(r["backend"], r["rule"], r["sets"]) for r in records] == [
        ("cpu", "traversal", 64),
        ("cpu", "recursive", 64),
    ]
    assert all(r["us"] > 0 and r["floor_us"] > 0 and r["kernels"] == {} for r in records)
    assert "traversal, B=2 N=9 V=300" in capsys.readouterr().out


def test_targets():
    one = replace(CENTRAL, batch=1)
    filtered = replace(CENTRAL, filters="top_k+top_p")
    state = {
        "facts": {"read_gb_s": 4300.0, "copy_gb_s": 4300.0},
        "records": [
            record_of(CENTRAL, "cuda token", 20.0),
            record_of(CENTRAL, "triton token", 21.0),
            record_of(CENTRAL, "eager", 500.0),
            record_of(CENTRAL, "flashinfer", 59.0),
            record_of(CENTRAL, "read", 14.0),
            record_of(one, "cuda block", 11.9),
            record_of(filtered, "cuda token", 30.0),
            {**record_of(filtered, "vllm", 1.0), "status": "failed", "reason": "no | way"},
        ],
    }
    marks = {
        (t["target"], t["contestant"], t["bound"]): t["mark"] for t in gpu_tables.targets(state)
    }
    assert marks == {
        ("us / reading once", "cuda token", 1.5): "PASS",
        ("us / reading once", "triton token", 1.5): "FAIL",
        ("times faster than flashinfer", "cuda token", 3.0): "FAIL",
        ("times faster than flashinfer", "triton token", 3.0): "FAIL",
        ("us, one request", "cuda block", 12.0): "PASS",
        ("us / reading once", "cuda token", 2.5): "PASS",
    }
    text = gpu_tables.markdown(state)
    assert "### Not timed" in text and "no / way" in text and "cuda block | " in text


# ---- the report ----------------------------------------------------------------------------------


def test_verbose_lines_of_pytest():
    text = """
[gw0] [  1%] PASSED python_tests/backends/test_gpu.py::test_a[cuda-plain]
[gw1] [ 10%] FAILED python_tests/backends/test_gpu.py::test_b[no draft law]
[gw1] [ 10%] ERROR python_tests/backends/test_gpu.py::test_a[cuda-plain]
python_tests/backends/test_gpu.py::test_c[x y] SKIPPED (needs a second GPU)       [ 50%]
python_tests/backends/test_gpu.py::test_d PASSED                                  [100%]
SKIPPED [1] python_tests/backends/test_gpu.py:48: needs a second GPU
"""
    assert gpu_report.test_outcomes(text) == {
        "python_tests/backends/test_gpu.py::test_a[cuda-plain]": "ERROR",
        "python_tests/backends/test_gpu.py::test_b[no draft law]": "FAILED",
        "python_tests/backends/test_gpu.py::test_c[x y]": "SKIPPED",
        "python_tests/backends/test_gpu.py::test_d": "PASSED",
    }


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "ok"),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "ok"),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", 0, "failed"),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error", 99, "failed"),
        ("========= Error: Device not supported. Please refer", 1, "refused"),
        ("cpu: a dtype not supported on this\n========= ERROR SUMMARY: 0 errors", 0, "ok"),
        ("AssertionError: cuda differs\n========= ERROR SUMMARY: 0 errors", 1, "failed"),
        ("Traceback: no such file", 1, "failed"),
        ("nothing at all", 0, "refused"),
    ],
)
def test_what_sanitizers_say(text, code, status):
    step = gpu_report.Step("memcheck", status="ok" if code == 0 else "failed", code=code)
    assert gpu_report.read_sanitizer(step, text).status == status


def test_time_is_shared():
    names = list(gpu_report.STEPS)
    assert gpu_report.limit_of("bench", ["bench"], 100.0) == 100.0
    assert gpu_report.limit_of("build", names[1:], 500.0) == 240.0
    assert gpu_report.limit_of("smoke", names[4:], 30.0) == 30.0
    after = names[names.index("tests") :]
    assert gpu_report.limit_of("tests", after, 1700.0) == pytest.approx(600.0)


@pytest.mark.thorough
def test_the_report_needs_no_package_before_it_is_built():
    script = (
        "import sys; sys.modules['specdec_ext'] = None; from gpu import report; print('imported')"
    )
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT / "benchmarks")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "imported" in done.stdout, done.stderr


def test_a_step_ends_with_everything_it_started(tmp_path):
    options = gpu_report.parse(["--device", "cpu", "--out", str(tmp_path)])
    report = gpu_report.Report(options)
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=1)"
    command = [sys.executable, "-c", f"{script}; p.wait()"]
    step, text = gpu_report.run(report, "hangs", command, 2.0, SOME="thing")
    assert step.status == "timeout" and step.command.startswith("SOME=thing python -c")
    deadline = time.time() + 10
    while not dead(int(text)) and time.time() < deadline:
        time.sleep(0.05)
    assert dead(int(text))
    step, _ = gpu_report.run(report, "absent", [str(tmp_path / "no-such-program")], 2.0)
    assert step.status == "failed" and "no-such-program" in step.note


def dead(pid):
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_failing_step_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(report, limit):
        raise OSError("no space left")

    def passing(report, limit):
        return gpu_report.Step("bench", status="ok", code=0)

    monkeypatch.setattr(gpu_report, "ACTIONS", {"facts": broken, "info": broken, "bench": passing})
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", "info", "bench"]
    assert gpu_report.main(arguments) == 1
    (path,) = tmp_path.glob("*.json")
    steps = {step["name"]: step for step in json.loads(path.read_text())["steps"]}
    assert {k: v["status"] for k, v in steps.items()} == {
        "facts": "failed",
        "info": "failed",
        "bench": "ok",
    }
    assert "no space left" in steps["info"]["note"]
    assert "no space left" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("status", ["ok", "timeout"])
def test_the_bench_waits_for_no_compiler_again(tmp_path, monkeypatch, status):
    commands = []

    def run(report, name, command, limit):
        commands.append(command)
        return gpu_report.Step(name, status="ok", code=0), ""

    monkeypatch.setattr(gpu_report, "run", run)
    report = gpu_report.Report(gpu_report.parse(["--device", "cpu", "--out", str(tmp_path)]))
    report.steps["peers"] = gpu_report.Step("peers", status=status)
    gpu_report.bench(report, 100.0)
    assert (commands[0][-2:] == ["--without", "flashinfer"]) == (status == "timeout")


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """A folder with libraries, and a package without."""
    host = f"_host{EXTENSION_SUFFIXES[0]}"
    for name in ("_C.so", "_C_cuda.so", host, "_host.cpython-299-x86_64-linux-gnu.so"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(gpu_report, "PACKAGE", tmp_path / "package")
    gpu_report.PACKAGE.mkdir()
    return tmp_path, host


@pytest.mark.parametrize(("device", "cuda"), [("cuda:0", True), ("cpu", True), ("cpu", False)])
def test_what_was_built_elsewhere_is_put_in_place(carried, monkeypatch, device, cuda):
    folder, host = carried
    if not cuda:
        (folder / "_C_cuda.so").unlink()
    monkeypatch.setattr(gpu_report, "run", lambda *_, **__: pytest.fail("something was built"))
    report = gpu_report.Report(
        gpu_report.parse(["--device", device, "--prebuilt", str(folder), "--out", str(folder)])
    )
    (gpu_report.PACKAGE / "_C.so").write_text("an older one")
    step = gpu_report.build(report, 1.0)
    assert step.status == "ok" and host in step.note
    found = {path.name: path.read_text() for path in gpu_report.PACKAGE.iterdir()}
    assert found == {name: name for name in ["_C.so", *["_C_cuda.so"] * cuda, host]}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_was_not_built_elsewhere_is_said(carried, missing):
    folder, host = carried
    name = ("_C.so", "_C_cuda.so", host)[missing]
    (folder / name).unlink()
    step = gpu_report.put_in_place(folder, torch.device("cuda", 0))
    assert step.status == "failed" and step.note == f"{folder} has no {name}"
    assert not list(gpu_report.PACKAGE.iterdir())


SANITIZER = f"""#!/bin/sh
while [ "$1" != "{sys.executable}" ]; do shift; done
"$@"
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.thorough
def test_dry_run(tmp_path, monkeypatch, capsys):
    """All of it at once, but for the build: see the tests of it."""
    tools, out = (tmp_path / name for name in ("tools", "out"))
    tools.mkdir()
    (tools / "compute-sanitizer").write_text(SANITIZER)
    (tools / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    arguments = "--device cpu --budget-s 900 --workers 1 --sanitize cpu --steps".split()
    arguments += "peers smoke tests memcheck trees attention bench".split()
    arguments += ["--trees", "--nodes 9 --batch 2 --vocab 300 --seconds 0"]
    arguments += ["--attention", "--quick --first 1 --budget 0"]
    arguments += ["--out", str(out)]
    arguments += ["--tests", "python_tests/backends/test_gpu.py -k 'present or test_uniforms'"]
    bench = "--quick --vocab 300 --batch 1 --gamma 2 --cell-s 0 --seed 3 --drafter dense"
    arguments += ["--bench", f"{bench} --contestants 'cpu token' eager 'eager topk' read"]
    code = gpu_report.main(arguments)
    said = capsys.readouterr().out
    (path,) = out.glob("*.json")
    payload = json.loads(path.read_text())
    steps = {step["name"]: step for step in payload["steps"]}
    statuses = {name: step["status"] for name, step in steps.items()}
    assert code == 0 and statuses.pop("peers") == "skipped", said
    assert set(statuses.values()) == {"ok"}, statuses
    assert steps["tests"]["details"]["counts"] == {"PASSED": 2}
    assert steps["memcheck"]["note"] == "ERROR SUMMARY: 0 errors"
    assert steps["smoke"]["note"] == "cpu: ok. "
    records = payload["bench"]["records"]
    assert {r["status"] for r in records} == {"ok"} and len(records) >= 6
    assert (
        payload["facts"]["torch"] == torch.__version__ and "read_gb_s" in payload["bench"]["facts"]
    )
    text = path.with_suffix(".md").read_text()
    assert steps["trees"]["note"] == "2 measured" and "## Trees" in text
    assert steps["attention"]["note"] == "1 measured" and "## Attention" in text
    assert "### Targets" in text and "### Timings" in text and "times faster than eager" in text
    assert "verifications and the other operators agree" in path.with_suffix(".log").read_text()
    assert sorted(p.suffix for p in out.iterdir()) == [".json", ".log", ".md"]

    # A later run's steps replace the earlier ones'.
    later = {"facts": {"gpu": "H"}, "bench": {}, "steps": [vars(gpu_report.Step("smoke"))]}
    later["steps"] += [vars(gpu_report.Step("tests", status="failed", note="1 failed"))]
    (tmp_path / "later.json").write_text(json.dumps(later))
    merged = ["--merge", str(path), str(tmp_path / "later.json"), "--out", str(tmp_path / "both")]
    assert gpu_report.main(merged) == 1
    (path,) = (tmp_path / "both").glob("gpu-h-*.json")
    payload = json.loads(path.read_text())
    statuses = {step["name"]: step["status"] for step in payload["steps"]}
    assert statuses["smoke"] == "ok" and statuses["tests"] == "failed"
    assert payload["bench"]["records"] == records
