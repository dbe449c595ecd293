"""benchmarks/gpu/hotspots.py: samples of Nsight Compute by line of the sources."""

from __future__ import annotations

import gzip
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import hotspots  # noqa: E402

SYMBOL = "_ZN7specdec4cuda41_GLOBAL__N__5aa4a994_9_verify_cu_a84dcbc36decideILNS0_8ElementsE1EEEv"
DISASSEMBLY = f"""
\t.section\t.text.{SYMBOL},"ax",@progbits
\t//## File "/a/csrc/cuda/decide.cuh", line 10
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/a/csrc/cuda/tile.cuh", line 42 inlined at "/a/csrc/cuda/decide.cuh", line 12
\t//## File "/a/csrc/cuda/decide.cuh", line 12
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   FADD R2, R2, R3 ;
\t.section\t.nv.info,"",@"SHT_CUDA_INFO"
        /*0030*/                   FADD R2, R2, R3 ;
"""
NAME = (
    "void specdec::cuda::<unnamed>::decide<(specdec::cuda::Elements)1>(specdec::VerifyParams, long)"
)
HEADER = ["Address", "Source", hotspots.SAMPLES, hotspots.EXECUTED]
HEADER += ["stall_wait", "stall_long_sb", "stall_wait (Not Issued)"]
SAMPLES = f'''"Kernel Name","{NAME}",
{",".join(f'"{column}"' for column in HEADER)}
"1","LDC R1","1","8","1","0","1"
"2","BRA","2","8","0","2","9"
"3","FADD","5","16","2","3","9"
'''


def test_lines_of_instructions():
    assert hotspots.read_places(DISASSEMBLY) == {
        "decide<1>": ["decide.cuh:10", "tile.cuh:42", "tile.cuh:42"]
    }


def test_samples_are_added_up_by_line():
    (launch,) = hotspots.read_samples(SAMPLES.splitlines())
    assert launch.kernel == "decide<1>"
    places = hotspots.read_places(DISASSEMBLY)["decide<1>"]
    assert hotspots.hottest(launch, places, 5) == [
        ["87.5 %", "24", "long_sb 5, wait 2", "tile.cuh:42"],
        ["12.5 %", "8", "wait 1", "decide.cuh:10"],
    ]
    assert len(hotspots.hottest(launch, places, 1)) == 1
    with pytest.raises(ValueError, match="3 instructions were sampled, the object has 2"):
        hotspots.hottest(launch, places[:2], 5)


def test_every_launch_is_shown(tmp_path, monkeypatch, capsys):
    path = tmp_path / "samples.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(SAMPLES + SAMPLES.replace("decide<", "draw_extra<"))
    monkeypatch.setattr(hotspots, "places_of", lambda _: hotspots.read_places(DISASSEMBLY))
    assert hotspots.main(["lines", str(path), str(tmp_path / "verify.cu.o")]) == 0
    said = capsys.readouterr().out
    assert said.count("tile.cuh:42") == 1
    assert said.rstrip().endswith("draw_extra<1>\n\nnone of the objects has it")


def test_the_calls_are_made(capsys):
    every = [*hotspots.CHAINS, hotspots.TREE]
    assert hotspots.main(["calls", "--device", "cpu", "--vocab", "700"]) == 0
    assert capsys.readouterr().out == f"made {len(every)} calls: {', '.join(every)}\n"
