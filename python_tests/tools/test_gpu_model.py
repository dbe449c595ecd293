"""The model of a multiprocessor: small kernels with known results and known cycles.

What nvcc compiles is left out where there is none; the PTX written by hand is not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_checks import assert_same

from specdec_ext.testing import make_case

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu import predict  # noqa: E402
from gpu.model import cases, launches, profile, ptx  # noqa: E402
from gpu.model.machine import H200, Latencies  # noqa: E402
from gpu.model.memory import GlobalMemory, ProcessMemory  # noqa: E402
from gpu.model.prediction import Prediction, over_budget, total  # noqa: E402
from gpu.model.semantics import Program  # noqa: E402
from gpu.model.simulation import LaunchRun, Simulation  # noqa: E402

LATENCIES = replace(Latencies(), fetch=0.0)  # which has a test of its own

HEAD = ".version 9.0\n.target sm_90\n.address_size 64\n\n"


def by_hand(body: str, registers: str = "", latencies: Latencies = LATENCIES) -> Program:
    """A kernel with one pointer, which %rd1 holds."""
    text = (
        f"{HEAD}.visible .entry kernel(\n\t.param .u64 kernel_param_0\n)\n.maxntid 64, 1, 1\n"
        "{\n\t.reg .pred %p<9>;\n\t.reg .b32 %r<9>;\n\t.reg .f32 %f<9>;\n\t.reg .b64 %rd<9>;\n"
        f"{registers}\tld.param.u64 %rd1, [kernel_param_0];\n{body}\n\tret;\n}}\n"
    )
    return Program(ptx.Module(text).kernel("kernel"), latencies)


def run(
    program: Program,
    *arguments: Any,
    blocks: int = 1,
    threads: int = 32,
    together: bool = False,
    cold: tuple[range, ...] = (),
) -> tuple[LaunchRun, GlobalMemory]:
    """Run a whole launch; arrays are passed by their addresses, numbers as they are."""
    memory = GlobalMemory(ProcessMemory(), cold)
    packed = program.pack(
        [
            np.uint64(x.ctypes.data).tobytes() if isinstance(x, np.ndarray) else x.tobytes()
            for x in arguments
        ]
    )
    simulation = Simulation(program, range(blocks), blocks, threads, packed, memory, together)
    return simulation.run(), memory


def left(memory: GlobalMemory, array: np.ndarray) -> np.ndarray:
    """What a kernel left in the model's copy of an array."""
    addresses = np.uint64(array.ctypes.data) + np.arange(array.nbytes, dtype=np.uint64)
    found = memory.view(np.dtype(np.uint8))[memory.places(addresses)]
    return found.view(array.dtype).reshape(array.shape)


# ---- PTX -----------------------------------------------------------------------------------------

CALLS = f"""{HEAD}.func (.param .b32 func_retval0) _Z5twicei(
\t.param .b32 _Z5twicei_param_0
)
;
.func (.param .b32 func_retval0) _Z5twicei(
\t.param .b32 _Z5twicei_param_0
)
{{
\t.reg .pred %p<2>;
\t.reg .b32 %r<3>;
\t.loc 2 7 1
\tld.param.u32 %r1, [_Z5twicei_param_0];
\tsetp.lt.s32 %p1, %r1, 3;
\t@%p1 bra $L__BB0_1;
\tmov.u32 %r1, 100;
$L__BB0_1:
\tshl.b32 %r2, %r1, 1;
\tst.param.b32 [func_retval0+0], %r2;
\tret;
}}
.visible .entry _ZN4mine6kernelEPi(
\t.param .u64 _ZN4mine6kernelEPi_param_0
)
.maxntid 256, 1, 1
.minnctapersm 3
{{
\t.reg .b32 %r<4>;
\t.reg .b64 %rd<3>;
\t.shared .align 8 .b8 _ZZ6kernelE4room[24];
\tld.param.u64 \t%rd1, [_ZN4mine6kernelEPi_param_0]; // where
\t.loc 1 5 3
\t.loc 1 9 1, function_name $L__info_string0, inlined_at 1 5 3
\tmov.u32 %r1, %tid.x;
\t{{ // callseq 0, 0
\t.param .b32 param0;
\tst.param.b32 [param0+0], %r1;
\t.param .b32 retval0;
\tcall.uni (retval0),
\t_Z5twicei,
\t(
\tparam0
\t);
\tld.param.b32 %r2, [retval0+0];
\t}} // callseq 0
\tmul.wide.u32 %rd2, %r1, 4;
\tadd.s64 %rd2, %rd1, %rd2;
\tst.global.u32 [%rd2], %r2;
\tret;
}}
\t.file 1 "/some/where/kernel.cu"
\t.file 2 "/some/where/twice.h"
\t.section .debug_str
\t{{
$L__info_string0:
.b8 95,90,78,52,109,105,110,101,53,105
.b8 110,110,101,114,69,118,0

\t}}
"""


def test_ptx_is_read_with_its_calls_and_places():
    module = ptx.Module(CALLS)
    assert module.kernels == ["_ZN4mine6kernelEPi"]
    kernel = module.kernel(module.kernels[0])
    assert kernel.blocks == 3 and [p.bytes for p in kernel.parameters] == [8]
    (room,) = module.function(module.kernels[0]).shared
    assert (room.alignment, room.bytes) == (8, 24)
    frames = next(i.frames for i in kernel.code if i.opcode[0] == "shl")
    assert [(f.function, f.file, f.line) for f in frames] == [
        ("kernel", "kernel.cu", 5),
        ("inner", "kernel.cu", 9),
        ("twice", "twice.h", 7),
    ]
    out = np.zeros(32, np.int32)
    _, memory = run(Program(kernel, LATENCIES), out)
    assert left(memory, out).tolist() == [0, 2, 4] + [200] * 29


def test_what_is_not_known_is_an_error():
    with pytest.raises(NotImplementedError, match="does not know wgmma.fence"):
        by_hand("\twgmma.fence %r1;")
    with pytest.raises(ValueError, match="8 bytes were expected, got 4"):
        by_hand("").pack([bytes(4)])


# ---- cycles --------------------------------------------------------------------------------------


def chain(number: int, opcode: str = "add.f32 %f1, %f1, %f1") -> str:
    return "\n".join([f"\t{opcode};"] * number)


def cycles(body: str, *, threads: int = 32, cold: bool = False) -> float:
    data = np.zeros(1024, np.uint64)
    inside = (range(data.ctypes.data, data.ctypes.data + data.nbytes),) if cold else ()
    return run(by_hand(body), data, threads=threads, cold=inside)[0].cycles


def test_an_instruction_waits_for_what_it_reads():
    dependent = cycles(chain(20)) - cycles(chain(10))
    assert dependent == 10 * 5  # the latency of an addition
    independent = "\n".join(f"\tadd.f32 %f{k % 8}, %f8, %f8;" for k in range(20))
    assert cycles(independent) < cycles(chain(20)) / 3
    assert cycles(chain(20, "add.s64 %rd2, %rd2, %rd2")) > cycles(chain(20))


def test_code_is_waited_for_once_by_a_block():
    def cycles_of(rounds: int, threads: int, fetch: float) -> float:
        body = (
            f"\tmov.u32 %r1, {rounds};\n$again:\n{chain(50)}\n\tsub.s32 %r1, %r1, 1;\n"
            "\tsetp.gt.s32 %p1, %r1, 0;\n\t@%p1 bra $again;"
        )
        program = by_hand(body, latencies=replace(LATENCIES, fetch=fetch))
        (block,) = run(program, np.zeros(1, np.uint64), threads=threads)[0].blocks
        return block.cycles

    extra = {
        key: cycles_of(*key, 20.0) - cycles_of(*key, 0.0) for key in ((1, 32), (1, 64), (9, 32))
    }
    assert 50 * 14 < extra[1, 32] < 70 * 20  # the additions hide up to 5 cycles of each
    assert extra[1, 64] == extra[1, 32]  # the other warp takes what the first one asked for
    assert extra[9, 32] == pytest.approx(extra[1, 32], abs=10)  # a loop asks once


def test_memory_takes_what_its_place_takes():
    def load(cold: bool, times: int = 1, before: str = "") -> float:
        each = "\tld.global.u64 %rd2, [%rd1];\n\tadd.s64 %rd1, %rd1, %rd2;\n"
        return cycles(before + each * times, cold=cold)

    nothing = cycles("")
    assert LATENCIES.l2 <= load(False) - nothing < LATENCIES.l2 + 20
    assert LATENCIES.dram <= load(True) - nothing < LATENCIES.dram + 20
    again = load(True, times=2) - load(True)  # the same line, now in the L1
    assert LATENCIES.l1 <= again < LATENCIES.l1 + 20
    wait = chain(200)
    fetched = "\tprefetch.global.L2 [%rd1];\n" + wait + "\n\tcvt.rzi.u64.f32 %rd3, %f1;\n"
    fetched += "\tadd.s64 %rd1, %rd1, %rd3;\n"
    assert load(True, before=fetched) - cycles(fetched) < LATENCIES.l2 + 20


def test_a_barrier_ends_with_the_last_warp_and_the_path_is_its():
    body = (
        "\tmov.u32 %r1, %tid.x;\n\tsetp.lt.u32 %p1, %r1, 32;\n\t@%p1 bra $skip;\n"
        + chain(100)
        + "\n$skip:\n\tbar.sync 0;"
    )
    data = np.zeros(1, np.uint64)
    program = by_hand(body)
    (block,) = run(program, data, threads=64)[0].blocks
    assert 500 < block.cycles < 600
    assert block.cycles == pytest.approx(sum(block.path.values()))
    adding = sum(
        c for p, c in block.path.items() if program.kernel.code[p].opcode == ("add", "f32")
    )
    assert adding > 480
    assert block.instructions < 2 * 20 + 100


def test_threads_that_wait_in_vain_are_an_error():
    program = by_hand(
        "\tmov.u32 %r1, %tid.x;\n\tsetp.eq.u32 %p1, %r1, 0;\n\t@%p1 bra $on;\n"
        "\tshfl.sync.idx.b32 %r2, %r1, 0, 31, -1;\n\tret;\n$on:\n\tbar.sync 0;\n\tbar.sync 0;"
    )
    with pytest.raises(RuntimeError, match="threads wait for others that never come"):
        run(program, np.zeros(1, np.uint64))


# ---- memory --------------------------------------------------------------------------------------


def test_memories_are_compared_byte_by_byte():
    out = np.zeros(64, np.float32)
    program = by_hand("\tmov.f32 %f1, 0f3F800000;\n\tst.global.f32 [%rd1], %f1;")
    _, memory = run(program, out)
    assert out[0] == 0  # the process's own memory is left alone
    assert memory.compare().different == 1
    out[0] = 1.000001
    assert memory.compare() == (0, 1, 0) and memory.compare().agrees
    out[0] = 1
    assert memory.compare() == (1, 0, 0)
    out[1] = 7  # the other half of that word, which may be padding
    assert memory.compare().agrees
    out[1], out[10] = 0, 5  # and here the kernel wrote nothing
    assert memory.compare().agrees
    watched = [range(out.ctypes.data, out.ctypes.data + out.nbytes)]
    assert memory.compare(watched) == (1, 0, 1)


def test_a_bad_address_is_an_error():
    nowhere = np.zeros(1, np.uint64)
    program = by_hand("\tmov.u64 %rd1, 4096;\n\tld.global.u32 %r1, [%rd1];")
    with pytest.raises(OSError):
        run(program, nowhere)


# ---- what nvcc compiles --------------------------------------------------------------------------

SOURCE = """
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_pipeline.h>

__device__ __attribute__((noinline)) int64_t mixed(int64_t a, int64_t b) {
  return b == 0 ? a : a / b + a % b;
}

extern "C" __global__ void integers(const int64_t* a, const int64_t* b, int64_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int64_t* row = out + 8 * i;
  row[0] = mixed(a[i], b[i]);
  row[1] = static_cast<int64_t>(__umul64hi(a[i], b[i]));
  row[2] = a[i] >> (i % 64);
  row[3] = __funnelshift_r(static_cast<unsigned>(a[i]), static_cast<unsigned>(b[i]), i);
  row[4] = __popcll(a[i]) + __clzll(b[i]) + static_cast<int64_t>(__brev(a[i]) * 256);
  row[5] = max(a[i], b[i]) - min(a[i], b[i]);
  row[6] = static_cast<int32_t>(a[i]) * 37 + static_cast<int16_t>(b[i]);
  unsigned highest;
  asm("bfind.u64 %0, %1;" : "=r"(highest) : "l"(a[i]));
  row[5] += static_cast<int>(highest);
  row[7] = __byte_perm(static_cast<unsigned>(a[i]), static_cast<unsigned>(b[i]), 0x7531);
}

__device__ __attribute__((noinline)) float smaller(float a, float b) { return fminf(a, b); }

extern "C" __global__ void floats(const float* x, const double* y, double* out) {
  const int i = threadIdx.x;
  double* row = out + 6 * i;
  row[0] = exp2f(-fabsf(x[i])) + x[i] * x[i];
  row[1] = fma(y[i], y[i], 1.0) / (1.0 + y[i] * y[i]);
  row[2] = sqrt(fabs(y[i])) + rint(y[i]);
  row[3] = __bfloat162float(__ushort_as_bfloat16(0x3FC0)) + __half2float(__ushort_as_half(0x3E00));
  row[4] = static_cast<double>(static_cast<uint64_t>(fabsf(x[i]) * 1048576.0f));
  row[5] = fmaxf(x[i], 0.5f) - smaller(x[i], static_cast<float>(y[i]));
}

extern "C" __global__ void warps(const int* in, int* out) {
  const int lane = threadIdx.x % 32, number = in[threadIdx.x];
  int* row = out + 8 * threadIdx.x;
  row[0] = __shfl_sync(~0u, number, (lane + 5) % 32);
  row[1] = __shfl_up_sync(~0u, number, 3);
  row[2] = __shfl_down_sync(~0u, number, 3, 8);
  row[3] = __ballot_sync(~0u, number % 3 == 0);
  row[4] = __reduce_max_sync(~0u, number);
  row[5] = __any_sync(~0u, number == 7) + 2 * __all_sync(~0u, number >= 0);
  int sum = number;  // two halves of a warp go ways of their own
  if (lane < 16) {
    for (int i = 8; i > 0; i /= 2) sum += __shfl_xor_sync(0xFFFFu, sum, i);
  } else {
    sum = __shfl_sync(0xFFFF0000u, sum, 16);
  }
  row[6] = sum;
  row[7] = __syncthreads_or(number == 7) + 2 * __syncthreads_and(number < 7);
}

// Each block leaves a sum; the last one to arrive adds them up.
extern "C" __global__ void last_block(const double* in, double* partial, unsigned* arrived,
                                      double* out) {
  __shared__ double sums[256];
  __shared__ bool last;
  const int t = threadIdx.x;
  sums[t] = in[blockIdx.x * 256 + t];
  __syncthreads();
  for (int k = 128; k > 0; k /= 2) {
    if (t < k) sums[t] += sums[t + k];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = sums[0];
    __threadfence();
    last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || t != 0) return;
  double total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += partial[b];
  out[0] = total;
}

extern "C" __global__ void histogram(const int* in, unsigned* out, int64_t* most) {
  __shared__ unsigned cells[16];
  if (threadIdx.x < 16) cells[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&cells[in[threadIdx.x] & 15], 1u);
  __syncthreads();
  if (threadIdx.x < 16) out[threadIdx.x] = cells[threadIdx.x];
  atomicMax(reinterpret_cast<long long*>(most), static_cast<long long>(in[threadIdx.x]));
}

// Two halves of a row come while the first one is used.
extern "C" __global__ void copies(const int4* in, int4* out) {
  __shared__ int4 room[2][32];
  const int t = threadIdx.x;
  __pipeline_memcpy_async(&room[0][t], in + t, 16);
  __pipeline_commit();
  __pipeline_memcpy_async(&room[1][t], in + 32 + t, 16);
  __pipeline_commit();
  __pipeline_wait_prior(1);
  __syncthreads();
  out[t] = room[0][31 - t];
  __pipeline_wait_prior(0);
  __syncthreads();
  out[32 + t] = room[1][31 - t];
}

// Block b waits until all blocks before it have passed.
extern "C" __global__ void in_turn(unsigned* turn, int* who) {
  if (threadIdx.x != 0) return;
  const volatile unsigned* shown = turn;
  const unsigned mine = gridDim.x - 1 - blockIdx.x;
  while (*shown != mine) __nanosleep(100);
  who[mine] = blockIdx.x;
  __threadfence();
  atomicAdd(turn, 1u);
}

extern "C" __global__ void local_memory(const int* in, int* out) {
  int numbers[8];
  for (int k = 0; k < 8; ++k) numbers[k] = in[threadIdx.x] + k;
  out[threadIdx.x] = numbers[in[threadIdx.x] & 7];
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels of `SOURCE`."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "known.cu").write_text(SOURCE)
    command = ["nvcc", *launches.NVCC_FLAGS, "-ptx", "known.cu", "-o", "known.ptx"]
    subprocess.run(command, cwd=folder, check=True)
    module = ptx.Module.read(folder / "known.ptx")
    return lambda name: Program(module.kernel(name), LATENCIES)


def test_integers(compiled):
    random = np.random.default_rng(0)
    a, b = random.integers(-(2**63), 2**63 - 1, (2, 100))
    b[::7] = 0
    b[1::7] >>= 40
    out = np.zeros((128, 8), np.int64)
    _, memory = run(compiled("integers"), a, b, out, np.int32(100), blocks=2, threads=64)
    found = left(memory, out)
    for i in range(100):
        x, y = int(a[i]), int(b[i])
        ux, uy = x % 2**64, y % 2**64
        low, high = ux % 2**32, uy % 2**32
        quotient = 0 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        octets = low.to_bytes(4, "little") + high.to_bytes(4, "little")
        expected = [
            x if y == 0 else quotient + (x - quotient * y),
            ux * uy >> 64,
            x >> i % 64,
            ((high << 32 | low) >> (i & 31)) % 2**32,
            bin(ux).count("1") + 64 - uy.bit_length() + int(f"{low:032b}"[::-1], 2) * 256 % 2**32,
            max(x, y) - min(x, y) + ux.bit_length() - 1,
            wrapped(wrapped(x, 32) * 37 + wrapped(y, 16), 32),
            int.from_bytes(octets[1::2], "little"),
        ]
        assert found[i].tolist() == [wrapped(value, 64) for value in expected]
    assert not found[100:].any()


def wrapped(value: int, bits: int) -> int:
    """The value as a signed integer of so many bits."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def test_floats(compiled):
    random = np.random.default_rng(1)
    x = random.normal(size=64).astype(np.float32) * 3
    y = random.normal(size=64) * 3
    out = np.zeros((64, 6))
    _, memory = run(compiled("floats"), x, y, out, threads=64)
    expected = [
        np.exp2(-np.abs(x)) + x * x,
        np.ones(64),
        np.sqrt(np.abs(y)) + np.rint(y),
        np.full(64, 3.0),
        np.floor(np.abs(x) * np.float32(2**20)),
        np.maximum(x, 0.5) - np.minimum(x, y.astype(np.float32)),
    ]
    np.testing.assert_allclose(left(memory, out), np.stack(expected, 1), rtol=1e-6)


def test_warps(compiled):
    numbers = np.random.default_rng(2).permutation(64).astype(np.int32)
    out = np.zeros((64, 8), np.int32)
    _, memory = run(compiled("warps"), numbers, out, threads=64)
    found = left(memory, out)
    for warp in (0, 1):
        own = numbers[32 * warp : 32 * warp + 32]
        lane = np.arange(32)
        rows = found[32 * warp : 32 * warp + 32].T
        assert (rows[0] == own[(lane + 5) % 32]).all()
        assert (rows[1] == own[np.where(lane >= 3, lane - 3, lane)]).all()
        assert (rows[2] == own[np.where(lane % 8 < 5, (lane + 3) % 32, lane)]).all()
        ballot = sum(1 << k for k in range(32) if own[k] % 3 == 0)
        assert (rows[3].view(np.uint32) == ballot).all()
        assert (rows[4] == own.max()).all()
        assert (rows[5] == (7 in own) + 2).all()
        assert (rows[6] == np.where(lane < 16, own[:16].sum(), own[16])).all()
        assert (rows[7] == 1).all()  # of the block


def test_the_last_block_sees_what_the_others_left(compiled):
    data = np.random.default_rng(3).normal(size=(3, 256))
    partial, arrived, out = np.zeros(3), np.zeros(1, np.uint32), np.zeros(1)
    done, memory = run(
        compiled("last_block"), data, partial, arrived, out, blocks=3, threads=256, together=True
    )
    assert left(memory, arrived) == 3
    np.testing.assert_allclose(left(memory, out), data.sum())
    # A barrier waits for the fence and the atomic operation: the ticket has come by then.
    assert min(block.cycles for block in done.blocks) > LATENCIES.fence + LATENCIES.global_atomic


def test_atomic_operations(compiled):
    numbers = np.random.default_rng(4).integers(0, 1000, 128).astype(np.int32)
    out, most = np.zeros(16, np.uint32), np.zeros(1, np.int64)
    _, memory = run(compiled("histogram"), numbers, out, most, threads=128)
    assert (left(memory, out) == np.bincount(numbers & 15, minlength=16)).all()
    assert left(memory, most) == numbers.max()


def test_local_memory(compiled):
    numbers, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    _, memory = run(compiled("local_memory"), numbers, out)
    assert (left(memory, out) == numbers + numbers % 8).all()


def test_asynchronous_copies(compiled):
    numbers, out = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    cold = (range(numbers.ctypes.data, numbers.ctypes.data + numbers.nbytes),)
    done, memory = run(compiled("copies"), numbers, out, cold=cold)
    rows = numbers.reshape(2, 32, 4)[:, ::-1]
    assert (left(memory, out).reshape(2, 32, 4) == rows).all()
    assert LATENCIES.dram < done.cycles < 2 * LATENCIES.dram  # both on their way at once


def test_blocks_that_wait_for_each_other(compiled):
    program = compiled("in_turn")
    assert program.waits and not compiled("warps").waits
    turn, who = np.zeros(1, np.uint32), np.full(6, -1, np.int32)
    done, memory = run(program, turn, who, blocks=6, together=True)
    assert left(memory, who).tolist() == [5, 4, 3, 2, 1, 0]
    ends = [block.cycles for block in done.blocks]
    assert ends == sorted(ends, reverse=True)
    each = LATENCIES.fence + LATENCIES.global_atomic  # what a turn takes, at least
    assert ends[0] - ends[4] > 4 * LATENCIES.fence and ends[5] < 3 * each


# ---- launches through the stand-in ---------------------------------------------------------------


def test_an_observer_sees_launches_and_blocks_in_order(monkeypatch):
    monkeypatch.setattr(launches, "THREADS", 32)
    stand_in = launches.StandIn(None)
    case = make_case(3, rule="block")
    alone = case.run(stand_in.operators.verify)
    events: list[tuple[str, int, int, int]] = []

    def observe(launch: Any, moment: int, block: int, meetings: int) -> None:
        symbol = stand_in.symbol(launch)
        assert launch.name.decode() in symbol and launch.threads == 32
        assert all(p.bytes > 0 for p in launch.parameters[: launch.num_parameters])
        assert launch.chained == any(e[0] != symbol for e in events)  # all but the first
        events.append((symbol, moment, block, launch.blocks))

    watched = stand_in.watch(observe, lambda: case.run(stand_in.operators.verify))
    assert_same(watched, alone)
    begins = [e for e in events if e[1] == launches.LAUNCH_BEGINS]
    ends = [e for e in events if e[1] == launches.LAUNCH_ENDED]
    assert [e[0] for e in begins] == [e[0] for e in ends] and len(begins) >= 3
    started = [e for e in events if e[1] == launches.BLOCK_BEGINS]
    assert sorted(started) == sorted((*e[:1], 1, b, e[3]) for e in begins for b in range(e[3]))
    assert len(stand_in.scratch()) > 0
    count = len(events)
    case.run(stand_in.operators.verify)  # nobody watches any more
    assert len(events) == count
    with pytest.raises(ZeroDivisionError):
        stand_in.watch(lambda *_: 1 / 0, lambda: case.run(stand_in.operators.verify))


def test_names_of_one_kernel_by_two_compilers():
    ours = "_ZN7specdec4cuda12_GLOBAL__N_19scan_lawsILb0ELNS0_8ElementsE1EEEvNS_12VerifyParamsE"
    nvccs = (
        "_ZN7specdec4cuda41_GLOBAL__N__c4642d16_9_verify_cu_a84dcbc39scan_laws"
        "ILb0ELNS0_8ElementsE1EEEvNS_12VerifyParamsE"
    )
    assert launches.symbol_key(nvccs) == launches.symbol_key(ours) == ours


def test_which_blocks_are_run():
    assert launches.sample_of([1] * 12, 3) == [2, 6, 10, 11]
    assert launches.sample_of([1, 5, 1, 1], 1) == [1, 2]
    assert launches.sample_of([1], 3) == [0]


@pytest.mark.thorough
def test_blocks_of_the_kernels_leave_what_the_stand_in_leaves():
    if shutil.which("nvcc") is None or launches.sass.cuobjdump() is None:
        pytest.skip("no nvcc, or no cuobjdump")
    source = launches.common.ROOT / "csrc" / "cuda" / cases.CHAINS
    sources = launches.Sources([source], LATENCIES)
    for case in cases.CASES:
        if case.source != cases.CHAINS or not case.name.startswith("B 1 "):
            continue
        call = case.make(20_000)
        stand_in = launches.StandIn(H200)
        operator = getattr(stand_in.operators, call.operator)
        recorder = launches.Recorder(stand_in, sources, H200, 2)
        found = recorder.record(lambda o=operator, c=call: o(**c.arguments), call.addresses())
        assert len(found) == (3 if "dense" in case.name else 2)
        for launch in found:
            prediction = Prediction(launch, H200)
            assert prediction.agrees, (case.name, launch.name, launch.comparisons)
            assert 100 < prediction.typical <= prediction.slowest < 1e5
            assert prediction.instructions > 100 and launch.resident > 0
        rows = sum(len(addresses) for addresses in call.addresses())
        # Of a few blocks it is not known which tiles of draft tokens another one has read before.
        again = 0 if "dense" in case.name else call.arguments["draft_tokens"].numel() * 4096 * 2
        read = sum(launch.cold_bytes for launch in found)
        assert read == pytest.approx(rows + again / 2, rel=0.2)
        assert "cycles" not in profile.describe(found[0].program.kernel, {})


# ---- predictions ---------------------------------------------------------------------------------


def launched(name: str, cycles: list[float], blocks: int, resident: int = 2, **others: Any) -> Any:
    """A launch as the recorder leaves it."""
    hidden = others.pop("hidden", 0.0)
    runs = [
        SimpleNamespace(cycles=c, hidden=hidden, instructions=1000, block=k)
        for k, c in enumerate(cycles)
    ]
    found = {"together": False, "cold_bytes": 0.0, "read_bytes": 0.0, "comparisons": [], **others}
    found = {"chained": False, **found}
    return SimpleNamespace(
        name=name,
        blocks=blocks,
        block_runs=runs,
        scale=blocks / len(cycles),
        resident=resident,
        **found,
    )


def test_a_launch_takes_what_its_tightest_bound_takes():
    few = Prediction(launched("scan", [2000, 1000, 1000], 264), H200)
    assert (few.waves, few.typical, few.slowest, few.cycles) == (1, 1000, 2000, 2000)
    assert few.bound == "latency"
    assert few.microseconds == pytest.approx(2000 / H200.gigahertz / 1e3)
    many = Prediction(launched("scan", [2000, 1000, 1000], 265), H200)
    assert many.waves == 2 and many.cycles == 3000
    crowded = Prediction(launched("scan", [2000, 1000, 1000], 132 * 40, resident=40), H200)
    assert crowded.bound == "issue"
    assert crowded.issue_cycles == pytest.approx(40 * 1000 / (4 * H200.issue))
    of_ten_microseconds = H200.read_gigabytes * 1e4
    bytes_of = dict.fromkeys(("cold_bytes", "read_bytes"), of_ten_microseconds)
    reading = Prediction(launched("scan", [2000], 1, **bytes_of), H200)
    assert reading.bound == "memory" and reading.microseconds == pytest.approx(10)
    waiting = Prediction(launched("decide", [500, 900], 1000, together=True), H200)
    assert waiting.cycles == 900
    assert Prediction(launched("draw", [1], 1, chained=True), H200).gap < few.gap == H200.gap
    assert total([few, reading]) == pytest.approx(
        few.microseconds + reading.microseconds + 2 * H200.gap
    )


def test_blocks_that_have_nothing_to_do_count_for_nothing():
    def scale(meetings: list[int], sample: list[int]) -> float:
        runs: Any = [SimpleNamespace(blocks=[SimpleNamespace(block=k) for k in sample])]
        program: Any = None
        return launches.Launched("scan", "s", len(meetings), meetings, program, 2, runs).scale

    assert scale([4, 4, 0, 0], [0]) == 2  # four blocks, of which two do something
    assert scale([4, 4, 0, 0], [0, 2]) == 2
    assert scale([8, 8, 8, 8, 2, 2], [0, 5]) == 4  # two see that they have nothing to do
    assert scale([3, 3, 3, 9], [3]) == 4  # one does something besides
    assert scale([0, 0, 0, 0], [1, 2]) == 2  # nothing is known but their number


def test_what_a_chained_launch_does_before_its_wait_is_hidden():
    wait = "\tgriddepcontrol.wait;\n"
    program = by_hand(chain(100) + "\n" + wait + chain(50))
    data = np.zeros(1, np.uint64)

    def ran(early: float, of: Program = program) -> Any:
        packed = of.pack([np.uint64(data.ctypes.data).tobytes()])
        memory = GlobalMemory(ProcessMemory())
        return Simulation(of, range(1), 1, 32, packed, memory, early=early).run().blocks[0]

    alone, partly, early = ran(0.0), ran(200.0), ran(9000.0)
    assert (alone.hidden, partly.hidden) == (0, 200)
    assert alone.cycles == pytest.approx(partly.cycles)  # the same work, some of it earlier
    assert 450 < early.hidden < 550 and 200 < early.cycles - early.hidden < 300
    assert ran(9000.0, by_hand(chain(100))).hidden == 0  # nothing is waited for

    before = launched("scan", [1000, 1000, 1400], 132 * 3, resident=4)
    small = launched("decide", [500], 132, resident=4, chained=True)
    assert launches.head_start(small, before, H200) == 1400  # a fourth block beside three
    large = launched("decide", [500], 132, resident=2, chained=True)
    assert launches.head_start(large, before, H200) == 400  # when blocks end
    assert launches.head_start(launched("decide", [500], 1), before, H200) == 0
    hidden = Prediction(launched("draw", [2000, 1000, 1000], 1, hidden=300.0), H200)
    assert (hidden.slowest, hidden.remaining, hidden.cycles) == (2000, 1700, 1700)


def test_an_atomic_that_releases_waits_for_stores():
    plain = "\tatom.global.add.u32 %r1, [%rd1], 1;\n\tadd.u32 %r2, %r1, %r1;"
    releasing = plain.replace("atom.global", "atom.acq_rel.gpu.global")
    assert cycles(releasing) - cycles(plain) == LATENCIES.fence


def test_budgets_of_cycles():
    within = [
        Prediction(launched("decide", [5000], 1), H200),
        Prediction(launched("draw_extra", [3000, 6000], 1), H200),
    ]
    assert over_budget(within) == []
    slow = [
        Prediction(launched("decide_x", [5001], 1), H200),
        Prediction(launched("draw", [6001], 1), H200),
        Prediction(launched("scan", [24_000], 1), H200),
    ]
    assert [line.split(":")[0] for line in over_budget(slow)] == [
        *("cycles of decide", "waves x cycles of the call", "cycles of the last block of draw")
    ]
    # Whoever decides and draws may take as long as two.
    assert over_budget([Prediction(launched("decide", [11_000], 1), H200)]) == []
    (alone,) = over_budget([Prediction(launched("decide", [11_001], 1), H200)])
    assert "the budget is 11,000" in alone
    assert over_budget([]) == ["cycles of decide: no such launch"]


def test_the_command_says_which_cases_there_are(capsys):
    assert predict.main(["--only", "nothing"]) == 1
    assert "no such case; there are: B 32 deterministic, token" in capsys.readouterr().out
