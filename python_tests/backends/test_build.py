"""The build: what it needs, one namespace per instruction set, choice at run time.

Wheels are tested by `make test-wheels`: helpers/installed.py.
"""

import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fibres
import pytest
import torch
from processes import output_of

import specdec_ext
from specdec_ext import backend
from specdec_ext._fake import FAKES
from specdec_ext._host import build_info
from specdec_ext.backend import has_kernels

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "specdec_ext"
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
VARIANTS = backend.cpu_variants()


def checked_output_of(*command, **kwargs):
    status, output = output_of(*command, **kwargs)
    assert status == 0, output
    return output


def info_of(output):
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())


# ---- the operator library ------------------------------------------------------------------------


def test_operator_library_needs_nothing_of_python():
    needs = checked_output_of("nm", "-D", "--undefined-only", str(PACKAGE / "_C.so"))
    assert "aoti_torch" in needs  # it is the stable ABI that it uses
    of_python = re.findall(r"(\w) (_?Py[A-Z_]\w*)", needs)
    # Those that every Python has, and weak: see csrc/torch/value_error.h.
    assert set(of_python) == {("w", "PyErr_SetString"), ("w", "PyExc_ValueError")}


HOST = """
#include <dlfcn.h>
#include <stdio.h>
int main(int, char** paths) {
  const bool loads = dlopen(paths[1], RTLD_NOW) != nullptr;
  puts(loads ? "loaded" : dlerror());
}
"""


@pytest.mark.thorough
def test_operator_library_loads_where_there_is_no_python(tmp_path):
    (tmp_path / "host.cpp").write_text(HOST)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    checked_output_of(*compiler, tmp_path / "host.cpp", "-o", tmp_path / "host", "-ldl")
    libraries = str(Path(torch.__file__).parent / "lib")
    said = checked_output_of(tmp_path / "host", PACKAGE / "_C.so", LD_LIBRARY_PATH=libraries)
    assert said == "loaded\n"


def test_what_is_wrong_is_a_value_error():
    """Through torch alone, which has had two ways to translate what an operator throws."""
    for operator in (torch.ops.specdec.row_law, torch.ops.specdec.row_law.default):
        with pytest.raises(ValueError, match=r"^row_law: logits must be \[R, V\] .*, got \[3\]"):
            operator(torch.zeros(3))


def test_operator_library_depends_on_nothing_of_this_machine():
    dynamic = checked_output_of("readelf", "-d", str(PACKAGE / "_C.so"))
    libraries = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in libraries
    assert not [name for name in libraries if "python" in name]
    assert not re.search("RPATH|RUNPATH", dynamic)
    code = (PACKAGE / "_C.so").read_bytes()
    assert str(ROOT).encode() not in code
    assert str(Path(torch.__file__).parent).encode() not in code


# ---- one namespace per instruction set -----------------------------------------------------------


def objects_of(isa):
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    return [str(BUILD / c["output"]) for c in commands if f"/cpu_{isa}.dir/" in c["output"]]


@pytest.mark.parametrize("isa", VARIANTS)
def test_no_function_of_a_variant_has_a_name_that_others_share(isa):
    # The linker keeps one function per name: it may be the one that dies on older machines.
    symbols = checked_output_of("nm", "-C", "--defined-only", "--extern-only", *objects_of(isa))
    functions = re.findall(r"^[0-9a-f]+ [TWiu] (.*)$", symbols, re.MULTILINE)
    assert any(f"specdec::{isa}::verify(" in name for name in functions)
    assert [name for name in functions if f"specdec::{isa}::" not in name] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 registers")
@pytest.mark.parametrize(
    ("isa", "present", "absent"),
    [("baseline", "%xmm", "%[yz]mm"), ("avx2", "%ymm", "%zmm"), ("avx512", "%zmm", None)],
)
def test_instructions_of_a_variant(isa, present, absent):
    code = checked_output_of("objdump", "-d", "--no-show-raw-insn", *objects_of(isa))
    assert re.search(present, code)
    assert absent is None or not re.search(absent, code)


# ---- choice at run time --------------------------------------------------------------------------

DRAW = """
import torch, specdec_ext
from specdec_ext import backend
from specdec_ext._fake import FAKES
drawn = specdec_ext.sample(torch.zeros(3, 7), uniforms=torch.tensor([0, 0.5, 0.99]).double())
print(backend.cpu_capability(), drawn.tokens.tolist())
"""


def supported(isa):
    return VARIANTS.index(isa) >= VARIANTS.index(best_variant())


def best_variant():
    environment = {k: v for k, v in os.environ.items() if k != "SPECDEC_CPU_CAPABILITY"}
    command = [
        sys.executable,
        "-c",
        "from specdec_ext import backend as b; print(b.cpu_capability())",
    ]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize("isa", VARIANTS)
def test_capability_is_respected_or_refused(isa):
    status, output = output_of(sys.executable, "-c", DRAW, SPECDEC_CPU_CAPABILITY=isa)
    if supported(isa):
        assert (status, output) == (0, f"{isa} [0, 3, 6]\n")
    else:
        assert status != 0 and "SPECDEC_CPU_CAPABILITY must be one of" in output


@pytest.mark.thorough
@pytest.mark.parametrize("value", ["avx", "", "AVX2"])
def test_unknown_capability_is_refused(value):
    status, output = output_of(sys.executable, "-c", DRAW, SPECDEC_CPU_CAPABILITY=value)
    assert status != 0
    assert f"SPECDEC_CPU_CAPABILITY must be one of {', '.join(VARIANTS)}" in output
    assert repr(value) in output


# ---- backends ------------------------------------------------------------------------------------


def test_backend_is_resolved():
    cpu = torch.device("cpu")
    assert backend.resolve("verify", "auto", cpu) is torch.ops.specdec
    assert backend.resolve("verify", "cpu", cpu) is torch.ops.specdec
    assert backend.resolve("verify", "reference", cpu).__name__ == "specdec_ext.reference"


@pytest.mark.parametrize(
    ("op", "name", "device", "message"),
    [
        # torch.ops would find Triton's kernels in the place of CUDA's.
        ("tree_attention", "cuda", "cuda", "has no kernels for it, only cpu, triton, reference"),
    ],
)
def test_operators_that_a_backend_lacks(op, name, device, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        backend.resolve(op, name, torch.device(device))


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cpu", "cuda", "verify: backend 'cpu' needs CPU tensors, got cuda"),
        (
            "gpu",
            "cpu",
            "verify: backend must be one of auto, cpu, cuda, triton, reference, got 'gpu'",
        ),
    ],
)
def test_explicit_backend_never_falls_back(name, device, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        backend.resolve("verify", name, torch.device(device))


@pytest.fixture
def torch_with_cuda(monkeypatch, tmp_path):
    """Pretends that torch has CUDA and finds a device; the library is at the path returned."""
    library = tmp_path / "_C_cuda.so"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_CUDA_LIBRARY", library)
    monkeypatch.setattr(backend, "_cuda_load_error", None)
    backend.absences.cache_clear()
    yield library
    backend.absences.cache_clear()


def refusal_of_cuda(device="cuda"):
    with pytest.raises(ValueError) as refused:
        backend.resolve("verify", "cuda", torch.device(device))
    return str(refused.value)


def test_cuda_where_torch_has_none(torch_with_cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    expected = f"verify: backend 'cuda' is absent: torch {torch.__version__} has no CUDA"
    assert refusal_of_cuda() == expected


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [("there was no nvcc", "built without CUDA kernels: there was no nvcc"), ("", " is missing")],
)
def test_cuda_that_was_not_built(torch_with_cuda, monkeypatch, left_out, reason):
    facts = {**build_info(), "cuda_left_out": left_out}
    monkeypatch.setattr("specdec_ext._host.build_info", lambda: facts)
    assert refusal_of_cuda().endswith(reason)


def test_cuda_library_that_does_not_load(torch_with_cuda):
    torch_with_cuda.write_bytes(b"no library" * 100)
    with pytest.warns(UserWarning, match="without CUDA kernels: _C_cuda.so did not load: .+header"):
        backend.load_libraries()
    assert re.search("is absent: _C_cuda.so did not load: .*header", refusal_of_cuda())
    assert backend.resolve("verify", "cpu", torch.device("cpu")) is torch.ops.specdec


def test_cuda_without_a_device(torch_with_cuda, monkeypatch):
    torch_with_cuda.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal_of_cuda().endswith("is absent: torch finds no CUDA device")


def test_cuda_serves_cuda_tensors_only(torch_with_cuda):
    torch_with_cuda.touch()
    assert backend.resolve("verify", "cuda", torch.device("cuda", 1)) is torch.ops.specdec
    assert refusal_of_cuda("cpu") == "verify: backend 'cuda' needs CUDA tensors, got cpu"


# ---- facts ---------------------------------------------------------------------------------------


def test_build_info():
    facts = build_info()
    assert facts["cpu_variants"] == VARIANTS
    assert facts["cxx_standard"] == 17
    assert facts["build_type"] == "Release"
    assert re.fullmatch(r"\w+ \d+(\.\d+)*", facts["compiler"])
    assert bool(facts["cuda_compiler"]) != bool(facts["cuda_left_out"])


def test_info_command():
    info = info_of(checked_output_of(sys.executable, "-m", "specdec_ext", "info"))
    assert info["specdec_ext"] == specdec_ext.__version__
    assert info["python"] == platform.python_version()
    assert info["torch"] == torch.__version__
    assert info["cpu capability"].split()[0] == backend.cpu_capability()
    assert info["cpu variants"].split(", ") == VARIANTS
    assert info["backend cpu"] == info["backend reference"] == "present"
    built = info["cuda kernels"].startswith("built with NVIDIA ")
    assert built == (PACKAGE / "_C_cuda.so").exists()
    assert built or info["cuda kernels"].startswith("left out: ")
    reason = backend.absences()["cuda"]
    assert info["backend cuda"] == ("present" if reason is None else f"absent: {reason}")
    assert info["backend triton"].startswith("present" if find_spec("triton") else "absent")


# ---- CUDA ----------------------------------------------------------------------------------------

OPERATORS = [name for name in FAKES if has_kernels(name, "cuda")]


@pytest.fixture(scope="module")
def cuda_library():
    """The CUDA library, compiled and linked with warnings as errors."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    with fibres.one_at_a_time("cuda-gate"):
        checked_output_of(sys.executable, "setup.py", "--quiet", "cuda_gate")
    return ROOT / "build" / "cuda-gate" / "_C_cuda.so"


def embedded_code(library, tmp_path):
    """What nvcc put into a library: ("code" or "ptx", compute capability) of every piece."""
    section = tmp_path / "fatbin"
    checked_output_of(
        *("objcopy", "-O", "binary", "--only-section=.nv_fatbin"), str(library), str(section)
    )
    data, at, found = section.read_bytes(), 0, set()
    while at < len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:  # between two containers
            at += 8
            continue
        piece, at = at + header, at + header + size
        while piece < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, piece)
            (capability,) = struct.unpack_from("<I", data, piece + 28)
            found.add(({1: "ptx", 2: "code"}[kind], capability))
            piece += header + size
    return found


@pytest.mark.thorough  # make cuda-gate builds it, too
def test_cuda_library_has_code_for_both_and_ptx(cuda_library, tmp_path):
    expected = {("code", 80), ("code", 90), ("ptx", 90)}
    assert embedded_code(cuda_library, tmp_path) == expected


@pytest.mark.thorough
def test_cuda_library_depends_on_torch_alone(cuda_library):
    dynamic = checked_output_of("readelf", "-d", str(cuda_library))
    libraries = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(libraries)
    assert not [name for name in libraries if "python" in name or "cudart" in name]
    assert not re.search("RPATH|RUNPATH", dynamic)
    exported = checked_output_of("nm", "-D", "--defined-only", str(cuda_library))
    assert not re.search(r"\bcuda|specdec", exported)
    code = cuda_library.read_bytes()
    assert str(ROOT).encode() not in code
    assert str(Path(torch.__file__).parent).encode() not in code


LOAD_CUDA = """
import ctypes, sys, torch
schemas, library, stub, *operators = sys.argv[1:]
torch.ops.load_library(schemas)  # not the package: Triton takes what no library has registered
for name in operators:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has(f"specdec::{name}", "CUDA")
ctypes.CDLL(stub)
torch.ops.load_library(library)
print([has(f"specdec::{name}", "CUDA") for name in operators])
"""


@pytest.mark.thorough
def test_cuda_library_registers_every_operator(cuda_library):
    # A torch without CUDA has all but one of the symbols, and the build made a stub for that one.
    stub = cuda_library.with_name("libtorch_cuda.so")
    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA: the tests of the GPU load the library")
    arguments = (str(PACKAGE / "_C.so"), str(cuda_library), str(stub), *OPERATORS)
    output = checked_output_of(sys.executable, "-c", LOAD_CUDA, *arguments)
    assert output == f"{[True] * len(OPERATORS)}\n"


@pytest.mark.thorough
def test_cuda_that_is_asked_for_needs_nvcc(tmp_path):
    status, output = output_of(
        *(sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(tmp_path)),
        *("-DSPECDEC_CUDA=ON", "-DSPECDEC_NVCC=", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    assert status != 0
    assert "SPECDEC_CUDA=1 asks for the CUDA kernels, and there is no nvcc" in output


def test_values_of_the_switch():
    status, output = output_of(
        sys.executable, "setup.py", "build_ext", "--inplace", SPECDEC_CUDA="yes"
    )
    assert status != 0 and "SPECDEC_CUDA must be 0 or 1, got 'yes'" in output


ONLY_ON_THE_HOST = {
    # A block does these with its threads side by side (chain.cuh, chain_nodes.cuh,
    # selection.cuh, tile.cuh, tree.cuh).
    *("node_facts", "block_step", "open_request", "radix_descend", "tile_groups", "tree_size"),
    *("open_tree", "link_children", "has_valid_kinds", "find_reachable"),
    # The same of offers (beam_verify.cu), which are numbers there.
    *("count_finished", "is_decided"),
}


def test_every_core_function_is_compiled_for_the_device():
    # Called by a kernel, or by a core function that is.
    headers = sorted((ROOT / "csrc" / "core").glob("*.h"))
    core = "\n".join(path.read_text() for path in headers)
    pieces = re.split(r"^(?=SPECDEC_HD )", core, flags=re.MULTILINE)[1:]
    bodies = {re.match(r"SPECDEC_HD [^(]*?(\w+)\(", piece)[1]: piece for piece in pieces}
    kernels = [*(ROOT / "csrc" / "cuda").glob("*.cu"), *(ROOT / "csrc" / "cuda").glob("*.cuh")]
    todo, called = ["\n".join(path.read_text() for path in kernels)], set()
    while todo:
        text = todo.pop()
        new = {name for name in bodies if re.search(rf"\b{name}\(", text)} - called
        called |= new
        todo += [bodies[name].split("{", 1)[1] for name in new]
    assert len(bodies) > 30 and called == set(bodies) - ONLY_ON_THE_HOST


@pytest.mark.parametrize(
    ("package", "file", "name"),
    [
        ("transformers", "Makefile", "TRANSFORMERS_FLOOR :="),
        ("triton", "Makefile", "TRITON_FLOOR :="),
        ("torch", "setup.py", "TORCH_FLOOR ="),
    ],
)
def test_what_is_tested_as_the_oldest_version_is_what_the_metadata_names(package, file, name):
    said = re.findall(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    tested = re.search(rf'^{name} "?([\d.]+)', (ROOT / file).read_text(), re.MULTILINE)
    assert said and {f"{version}.0" for version in said} == {tested[1]}
