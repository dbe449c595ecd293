"""Builds the native libraries by driving CMake with Ninja; all metadata is in pyproject.toml.

``SPECDEC_CUDA=1`` builds the CUDA kernels whatever torch has, ``SPECDEC_CUDA=0`` leaves them out.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, OptionError, PlatformError

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
TORCH_FLOOR = "2.11.0"
CUDA = {"": "AUTO", "0": "OFF", "1": "ON"}
BUILD_TOOLS = "'setuptools>=77' 'cmake>=3.26' ninja 'pybind11>=2.13'"
TOOLS = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}  # where their Python packages have them
COMPILERS = ("c++", "g++", "clang++")


if int(setuptools.__version__.split(".")[0]) < 77:  # it cannot read pyproject.toml
    sys.exit(
        f"specdec_ext needs setuptools 77 or later, got {setuptools.__version__}: "
        f"pip install {BUILD_TOOLS}"
    )


def find_tool(name: str) -> Path:
    """Find a program of the build: that of the Python package of its name, or one on the PATH."""
    if find_spec(name) is not None:
        folder: str = getattr(import_module(name), TOOLS[name])
        return Path(folder) / name
    found = shutil.which(name)
    if found is None:
        raise PlatformError(f"building specdec_ext needs {name}: pip install {BUILD_TOOLS}")
    return Path(found)


def check_requirements() -> None:
    """Say in one line what the build needs and does not find."""
    for module in ("torch", "pybind11"):
        if find_spec(module) is None:
            raise PlatformError(
                f"building specdec_ext needs the Python package {module}, which is not in "
                f"{sys.prefix}: pip install 'torch>={TORCH_FLOOR.removesuffix('.0')}' "
                f"{BUILD_TOOLS}, then build again, with --no-build-isolation"
            )
    torch = version("torch")
    if tuple(map(int, torch.split(".")[:2])) < tuple(map(int, TORCH_FLOOR.split(".")[:2])):
        raise PlatformError(f"building specdec_ext needs torch {TORCH_FLOOR} or later, got {torch}")
    compiler = os.environ.get("CXX", "").split()[:1] or COMPILERS
    if not any(map(shutil.which, compiler)):
        raise PlatformError(
            f"building specdec_ext needs a C++17 compiler, and there is no {', '.join(compiler)} "
            "on the PATH: install g++ or clang++ (Debian, Ubuntu: apt install g++), or set CXX"
        )


def run(*command: object) -> None:
    """Run a command; where it fails, its own output says why."""
    # The jobs that a `make --jobs` grants go to programs that it starts itself: Ninja, which would
    # ask for them, is told of none.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run([str(word) for word in command], env=environment)
    if done.returncode != 0:
        raise ExecError(f"{Path(str(command[0])).name} failed with status {done.returncode}")


def run_cmake(folder: Path, target: str, *options: str) -> None:
    """Configure CMakeLists.txt in a folder of its own, and build a target."""
    check_requirements()
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    run(
        *(cmake, "-S", ROOT, "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *options,
    )
    run(cmake, "--build", folder, "--target", target)


def build_options(debug: bool = False) -> list[str]:
    """Give CMake's options of a build that is used."""
    cuda = os.environ.get("SPECDEC_CUDA", "")
    if cuda not in CUDA:
        raise OptionError(f"SPECDEC_CUDA must be 0 or 1, got {cuda!r}")
    return [
        f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}",
        f"-DSPECDEC_CUDA={CUDA[cuda]}",
        f"-DSPECDEC_WERROR={'ON' if os.environ.get('CI') == 'true' else 'OFF'}",
    ]


class FreshBuild(build):
    """Assemble a wheel's files from nothing: setuptools keeps modules that were deleted since."""

    def run(self) -> None:
        """Empty the folder, then build."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Configure, build and install CMakeLists.txt into the package."""

    def run(self) -> None:
        """Put the libraries into the source tree (in place, editable) or into the wheel's."""
        in_place = self.inplace or self.editable_mode
        prefix = ROOT if in_place else Path(self.build_lib).resolve()
        run_cmake(BUILD, "all", *build_options(self.debug))
        run(find_tool("cmake"), "--install", BUILD, "--prefix", prefix)


class BareCommand(Command):
    """A command without options."""

    user_options = []

    def initialize_options(self) -> None:
        """Nothing to set."""

    def finalize_options(self) -> None:
        """Nothing to check."""


class CudaGate(BareCommand):
    """Compile and link the CUDA library with warnings as errors, on any machine with nvcc."""

    def run(self) -> None:
        """Build it where nothing loads it from."""
        gate = ROOT / "build" / "cuda-gate"
        # Each architecture takes minutes; those that have code of their own for the sake of speed
        # alone (CMakeLists.txt) see no other source than these.
        architectures = "-DCMAKE_CUDA_ARCHITECTURES=80-real;90"
        run_cmake(gate, "_C_cuda", "-DSPECDEC_CUDA=ON", "-DSPECDEC_WERROR=ON", architectures)


class TorchFloor(BareCommand):
    """Compile what includes torch's headers against those of the oldest torch supported."""

    def run(self) -> None:
        """Take the headers out of its wheel, once, and compile."""
        folder = ROOT / "build" / f"torch-{TORCH_FLOOR}"
        headers = folder / "torch" / "include"
        if not headers.exists():
            self.fetch(folder)
        run_cmake(
            folder / "cmake",
            "torch_headers",
            f"-DSPECDEC_TORCH_HEADERS={headers}",
            "-DSPECDEC_CUDA=OFF",
            "-DSPECDEC_WERROR=ON",
        )

    def fetch(self, folder: Path) -> None:
        """Download torch without what it depends on, and keep its headers alone."""
        with tempfile.TemporaryDirectory() as place:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            wanted = ["--only-binary=:all:", "--dest", place, f"torch=={TORCH_FLOOR}"]
            subprocess.run([*pip, *wanted], check=True)
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [x for x in archive.namelist() if x.startswith("torch/include/")]
                archive.extractall(Path(place) / "kept", names)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(place) / "kept" / "torch", folder / "torch")


class Sanitize(BareCommand):
    """Run the CPU kernels under AddressSanitizer and UBSan, on inputs of every kind."""

    def run(self) -> None:
        """Build the driver, see that it finds what is wrong on purpose, then run it."""
        folder = ROOT / "build" / "sanitize"
        run_cmake(folder, "sanitize", "-DSPECDEC_SANITIZE=ON", "-DSPECDEC_CUDA=OFF")
        driver = folder / "sanitize"
        for fault, words in [("address", "heap-buffer-overflow"), ("overflow", "signed integer")]:
            done = subprocess.run([driver, "--break", fault], capture_output=True, text=True)
            if done.returncode == 0 or words not in done.stderr:
                raise RuntimeError(f"sanitize: the control {fault!r} was not found: {done.stderr}")
        subprocess.run([driver], check=True)


class ForPythons(Command):
    """A command that builds the host module for other Pythons as well."""

    user_options = [
        ("pythons=", None, "interpreters beside this one, separated by commas"),
        ("dist-dir=", None, "where what is made goes"),
    ]

    def initialize_options(self) -> None:
        """Set the defaults."""
        self.pythons = ""
        self.dist_dir = self.folder

    def finalize_options(self) -> None:
        """Split the list; CMake runs each, wherever it stands."""
        found = {name: shutil.which(name) for name in self.pythons.split(",") if name}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise OptionError(f"--pythons: there is no {', '.join(missing)}")
        self.others = [str(path) for path in found.values()]

    def build(self, target: str, *options: str) -> list[Path]:
        """Build a target, and give the host modules of the other Pythons."""
        hosts = BUILD / "hosts"
        shutil.rmtree(hosts, ignore_errors=True)
        pythons = f"-DSPECDEC_PYTHONS={';'.join(self.others)}"
        run_cmake(BUILD, target, *build_options(), pythons, *options)
        run(find_tool("cmake"), "--build", BUILD, "--target", "hosts")
        return sorted(hosts.glob("_host.*.so"))


class Wheels(ForPythons):
    """Build a wheel for each of several Pythons: their operator libraries are one and the same."""

    description = "build wheels for several Pythons, with the manylinux tags that auditwheel finds"
    folder = "dist"

    def run(self) -> None:
        """Build this Python's wheel, make the others of it, and let auditwheel name them all."""
        if find_spec("auditwheel") is None:
            raise PlatformError("wheels need auditwheel: pip install auditwheel")
        folder = ROOT / "build" / "wheels"
        shutil.rmtree(folder, ignore_errors=True)
        hosts = self.build("all")
        bdist = self.reinitialize_command("bdist_wheel", dist_dir=str(folder))
        bdist.ensure_finalized()
        self.run_command("bdist_wheel")
        (first,) = folder.glob("*.whl")
        wheels = [first, *(with_host(first, host) for host in hosts)]
        # torch brings its own libraries; nothing is left to be copied, so nothing is patched.
        torch = ("--exclude", "libtorch_cpu.so", "--exclude", "libtorch_cuda.so")
        run(
            *(sys.executable, "-m", "auditwheel", "repair", "--patcher", "none", *torch),
            *("--wheel-dir", self.dist_dir, *wheels),
        )


def with_host(wheel: Path, host: Path) -> Path:
    """Make a wheel for the Python of a host module of one that was built for another."""
    tag = "cp" + re.match(r"_host\.cpython-(\d+)-", host.name)[1]
    name, release, old, _, platform = wheel.stem.split("-")
    made = wheel.with_name(f"{name}-{release}-{tag}-{tag}-{platform}.whl")
    facts = f"{name}-{release}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    files = {
        path: data for path, data in files.items() if not path.startswith("specdec_ext/_host.")
    }
    files[f"specdec_ext/{host.name}"] = host.read_bytes()
    words = files[f"{facts}/WHEEL"].decode().replace(f"{old}-{old}-", f"{tag}-{tag}-")
    files[f"{facts}/WHEEL"] = words.encode()
    del files[f"{facts}/RECORD"]
    lines = [f"{path},sha256={digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{facts}/RECORD"] = "\n".join([*lines, f"{facts}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return made


def digest(data: bytes) -> str:
    """Give a file's SHA-256 as wheels' records have it."""
    return base64.urlsafe_b64encode(sha256(data)).rstrip(b"=").decode()


class Hub(ForPythons):
    """Lay out the package as Hugging Face `kernels` loads it, in a namespace of its own."""

    description = "lay out a build for Hugging Face kernels (build.toml)"
    folder = "build/hub"

    def run(self) -> None:
        """Build the libraries once more under the layout's own name, and put all files in place."""
        from setuptools.compat.py310 import tomllib

        general = tomllib.loads((ROOT / "build.toml").read_text())["general"]
        run_cmake(BUILD, "_host", *build_options())
        cuda = self.cuda_facts()
        backend = {"type": "cuda", "archs": cuda["archs"]} if cuda else {"type": "cpu"}
        name = f"_{general['name'].replace('-', '_')}_{backend['type']}_{source_digest()}"
        shutil.rmtree(BUILD / "hub", ignore_errors=True)  # another build's libraries
        hosts = self.build("hub", f"-DSPECDEC_HUB_NAMESPACE={name}")
        abi = TORCH_FLOOR.removesuffix(".0").replace(".", "")
        framework = f"cu{cuda['version']}" if cuda else "cpu"
        variant = f"torch-stable-abi{abi}-{framework}-{os.uname().machine}-linux"
        place = ROOT / self.dist_dir / "build" / variant
        self.copy_files([*hosts, *BUILD.glob("_host.*.so"), *(BUILD / "hub").glob("*.so")], place)
        facts = {key: general[key] for key in ("name", "version", "license")}
        facts |= {"id": name, "backend": backend, "python-depends": [], "digest": digests(place)}
        (place / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(f"{place}\n  loaded by kernels.get_local_kernel(Path({self.dist_dir!r}))")

    def copy_files(self, libraries: list[Path], place: Path) -> None:
        """Put the package's code and its libraries into a folder of their own."""
        shutil.rmtree(place, ignore_errors=True)
        package = ROOT / "specdec_ext"
        for path in package.rglob("*.py"):
            (place / path.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place / path.relative_to(package))
        for path in libraries:
            shutil.copy(path, place)

    def cuda_facts(self) -> dict:
        """Give nvcc's version and the architectures, as `kernels` writes them; empty without."""
        facts = json.loads((BUILD / "cuda_facts.json").read_text())
        if not facts["version"]:
            return {}
        archs = []
        for arch in facts["architectures"]:
            number = arch.removesuffix("-real")
            archs.append(f"{number[:-1]}.{number[-1]}" + ("" if number != arch else "+PTX"))
        return {"archs": archs, "version": "".join(facts["version"].split(".")[:2])}


def sha256(data: bytes) -> bytes:
    """Give a SHA-256."""
    return hashlib.sha256(data).digest()


def digests(place: Path) -> dict:
    """Give the hashes of the files of a folder as `kernels` has them."""
    files = {
        str(path.relative_to(place)): base64.b64encode(sha256(path.read_bytes())).decode()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def source_digest() -> str:
    """Name the sources of a build: other sources have another name."""
    found = hashlib.sha256((ROOT / "CMakeLists.txt").read_bytes())
    code = [*(ROOT / "csrc").rglob("*"), *(ROOT / "specdec_ext").rglob("*.py")]
    for path in sorted(path for path in code if path.is_file()):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:10]


setup(
    # One entry makes the wheel a platform wheel; what is built, and how, is CMake's.
    ext_modules=[Extension("specdec_ext._host", sources=[])],
    cmdclass={
        "build": FreshBuild,
        "build_ext": CMakeBuild,
        "cuda_gate": CudaGate,
        "hub": Hub,
        "sanitize": Sanitize,
        "torch_floor": TorchFloor,
        "wheels": Wheels,
    },
)
