"""What is read from machine code, on listings written by hand: no CUDA toolkit is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu import budgets, sass  # noqa: E402
from gpu.budgets import Budget, Stream  # noqa: E402

SYMBOL = (
    "_ZN7specdec4cuda41_GLOBAL__N__5aa4a994_9_verify_cu_a84dcbc39scan_laws"
    "ILb0ELNS0_8ElementsE1EEEvNS_12VerifyParamsE"
)

# A loop over two vectors: 0x30 to 0xc0 with a way round a misaligned row (0x60 to 0x80), an
# endless loop behind it, and a call for what is rare.
LISTING = """
\t\tFunction : SYMBOL
        /*0000*/                   LDC R1, c[0x0][0x28] ;                   /* 0x00000a00ff017b82 */
                                                                            /* 0x000fe20000000800 */
        /*0010*/                   STL [R1], R0 ;                           /* 0x00016f0000057ab9 */
        /*0020*/                   NOP ;                                    /* 0x0000000000000000 */
        /*0030*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ; /* 0x0 */
        /*0040*/                   BSSY B0, 0xa0 ;                          /* 0x0 */
        /*0050*/              @!P0 BRA 0x90 ;                               /* 0x0 */
        /*0060*/                   LDG.E R8, desc[UR4][R2.64] ;             /* 0x0 */
        /*0070*/                   DADD R10, R10, R8 ;                      /* 0x0 */
        /*0080*/                   NOP ;                                    /* 0x0 */
        /*0090*/                   BSYNC B0 ;                               /* 0x0 */
        /*00a0*/                   MUFU.EX2 R9, R8 ;                        /* 0x0 */
        /*00b0*/                   F2F.F64.F32 R10, R9 ;                    /* 0x0 */
        /*00c0*/               @P1 BRA 0x30 ;                               /* 0x0 */
        /*00d0*/                   EXIT ;                                   /* 0x0 */
        /*00e0*/                   BRA 0xe0;                                /* 0x0 */
"""

USAGE = """
Fatbin elf code:
 Function SYMBOL:
  REG:66 STACK:8 SHARED:3224 LOCAL:0 CONSTANT[0]:1000 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def kernel(monkeypatch):
    """The listing as cuobjdump would give it."""
    monkeypatch.setattr(sass, "cuobjdump", lambda: Path("cuobjdump"))

    def run(command, **_):
        text = USAGE if "-res-usage" in command else LISTING
        text = text.replace("SYMBOL", SYMBOL)
        return type("Done", (), {"stdout": text})

    monkeypatch.setattr(sass.subprocess, "run", run)
    (found,) = sass.kernels(Path("library"), 90)
    return found


def test_what_a_kernel_takes(kernel):
    assert kernel.name == "scan_laws<0, 1>"
    assert (kernel.registers, kernel.stack, kernel.shared) == (66, 8, 3224)
    assert len(kernel.code) == 15 and kernel.bytes == 240 and kernel.spills == 1


def test_the_cheapest_way_round_a_loop_that_does_the_work(kernel):
    loop = kernel.streaming_loop({"LDG.E.128": 1, "MUFU.EX2": 1})
    assert [i.address for i in loop.instructions] == [
        *(0x30, 0x40, 0x50, 0x90, 0xA0, 0xB0, 0xC0)  # and not what a misaligned row takes
    ]
    assert loop.count("LDG") == 1 and loop.fp64 == 1
    # The work may be on the longer way only.
    longer = kernel.streaming_loop({"DADD": 1})
    assert len(longer.instructions) == 10 and longer.fp64 == 2
    assert kernel.streaming_loop({"LDG.E.128": 2}) is None
    assert kernel.streaming_loop({"BRA": 1, "MUFU": 0}).instructions[0].address == 0xE0


def test_costs_and_budgets(kernel):
    stream = Stream(loads=1, exponentials=1, entries=8)
    cost = budgets.cost_of(kernel, stream)
    assert cost.per_entry == round(7 / 8, 2) and cost.fp64 == 0.125
    # 66 registers are given as 72 a thread: 3 blocks of 256; 63,488 bytes would be 4.
    assert cost.blocks == 3 and cost.spills == 1
    assert budgets.cost_of(kernel, None).per_entry is None
    enough = Budget(1, spills=1, registers=66, stream=stream, per_entry=1, fp64=0.125)
    assert cost.excess(enough) == []
    little = Budget(0, spills=0, registers=65, stream=stream, per_entry=0.5)
    assert [line.split(", the")[0] for line in cost.excess(little)] == [
        f"scan_laws<0, 1>: {what}"
        for what in (
            *("0.2 KB of code", "1 spills", "66 registers", "0.88 instructions an entry"),
            "0.125 float64 instructions an entry",
        )
    ]


def test_a_kernel_above_its_budget_or_missing_fails(kernel, monkeypatch, capsys):
    enough = Budget(1, spills=1, registers=66)
    monkeypatch.setattr(budgets, "BUDGETS", {kernel.name: enough})
    assert budgets.main(["library"]) == 0
    printed = capsys.readouterr().out
    assert "| scan_laws<0, 1> |" in printed and "all within their budgets" in printed
    monkeypatch.setattr(budgets, "BUDGETS", {})  # then no spills are allowed
    assert budgets.main(["library"]) == 1
    assert "scan_laws<0, 1>: 1 spills, the budget is 0" in capsys.readouterr().out
    monkeypatch.setattr(budgets, "BUDGETS", {kernel.name: enough, "gone": enough})
    assert budgets.main(["library"]) == 1
    assert "gone: there is no such kernel" in capsys.readouterr().out


def test_of_kernels_with_one_name_the_worst(kernel):
    cost = budgets.cost_of(kernel, None)
    other = budgets.Cost(cost.name, 9.0, 0, 10, 8)
    most = budgets.Cost(cost.name, 9.0, 1, 66, 3)
    assert budgets.worst([other, cost]) == budgets.worst([cost, other]) == [most]


def test_a_loop_that_is_not_found_is_no_loop_within_its_budget(kernel):
    stream = Stream(loads=2, exponentials=1, entries=8)
    (line,) = budgets.cost_of(kernel, stream).excess(Budget(1, 1, 66, stream, per_entry=99))
    assert "no loop with" in line
