"""The build: no Python ABI, one namespace per instruction set, choice at run time, the wheel."""

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import specdec_ext
from specdec_ext import backend
from specdec_ext._host import build_info

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specdec_ext"
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
VARIANTS = backend.cpu_variants()


def output_of(*command, cwd=ROOT, **environment):
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def checked_output_of(*command, **kwargs):
    status, output = output_of(*command, **kwargs)
    assert status == 0, output
    return output


def info_of(output):
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())


# ---- the operator library ------------------------------------------------------------------------


def test_operator_library_has_no_python_abi():
    needs = checked_output_of("nm", "-D", "--undefined-only", str(PACKAGE / "_C.so"))
    assert "aoti_torch" in needs  # it is the stable ABI that it uses
    assert not re.search(r"\b_?Py[A-Z_]", needs)


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


@pytest.mark.parametrize("isa", VARIANTS)
def test_capability_is_respected_or_refused(isa):
    status, output = output_of(sys.executable, "-c", DRAW, SPECDEC_CPU_CAPABILITY=isa)
    if supported(isa):
        assert (status, output) == (0, f"{isa} [0, 3, 6]\n")
    else:
        assert status != 0 and "SPECDEC_CPU_CAPABILITY must be one of" in output


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
    ("name", "device", "message"),
    [
        ("cpu", "cuda", "verify: backend 'cpu' needs CPU tensors, got cuda"),
        ("cuda", "cpu", "verify: backend 'cuda' is absent: no CUDA kernels"),
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


# ---- facts ---------------------------------------------------------------------------------------


def test_build_info():
    facts = build_info()
    assert facts["cpu_variants"] == VARIANTS
    assert facts["cxx_standard"] == 17
    assert facts["build_type"] == "Release"
    assert re.fullmatch(r"\w+ \d+(\.\d+)*", facts["compiler"])


def test_info_command():
    info = info_of(checked_output_of(sys.executable, "-m", "specdec_ext", "info"))
    assert info["specdec_ext"] == specdec_ext.__version__
    assert info["python"] == platform.python_version()
    assert info["torch"] == torch.__version__
    assert info["cpu capability"].split()[0] == backend.cpu_capability()
    assert info["cpu variants"].split(", ") == VARIANTS
    assert info["backend cpu"] == info["backend reference"] == "present"
    assert info["backend cuda"].startswith("absent: no CUDA kernels in this version")
    assert info["backend triton"].startswith("present" if find_spec("triton") else "absent")


# ---- wheel and gate ------------------------------------------------------------------------------


def test_wheel_is_complete_and_runs(tmp_path):
    checked_output_of(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--quiet", "--wheel-dir", str(tmp_path), str(ROOT)),
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-{sys.implementation.cache_tag.replace('cpython-', 'cp')}-" in wheel.name
    archive = zipfile.ZipFile(wheel)
    packed = {name for name in archive.namelist() if name.startswith("specdec_ext/")}
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix in {".py", ".pyi", ".typed", ".so", ".json", ".safetensors"}
    }
    other_pythons = {name for name in in_tree if "/_host." in name and name.endswith(".so")}
    assert packed - other_pythons >= in_tree - other_pythons
    assert packed & other_pythons

    installed = tmp_path / "installed"
    archive.extractall(installed)
    print_path = "import specdec_ext; print(specdec_ext.__file__)"
    where = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
    assert str(installed) in checked_output_of(sys.executable, "-c", print_path, **where)
    info = info_of(checked_output_of(sys.executable, "-m", "specdec_ext", "info", **where))
    assert info["backend cpu"] == "present"


def test_compile_gate_calls_every_core_function():
    gate = (ROOT / "csrc" / "cuda" / "compile_gate.cu").read_text()
    for header in sorted((ROOT / "csrc" / "core").glob("*.h")):
        assert f'"../core/{header.name}"' in gate or header.name == "platform.h"
        for name in re.findall(r"^SPECDEC_HD .*?(\w+)\(", header.read_text(), re.MULTILINE):
            assert re.search(rf"\b{name}\(", gate), f"{header.name}: {name}"
