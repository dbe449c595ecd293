"""Builds the native libraries by driving CMake with Ninja; all metadata is in pyproject.toml.

``SPECDEC_CUDA=1`` builds the CUDA kernels whatever torch has, ``SPECDEC_CUDA=0`` leaves them out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import cmake
import ninja
from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
CMAKE = Path(cmake.CMAKE_BIN_DIR) / "cmake"
TORCH_FLOOR = "2.11.0"
CUDA = {"": "AUTO", "0": "OFF", "1": "ON"}


def run_cmake(folder: Path, target: str, *options: str) -> None:
    """Configure CMakeLists.txt in a folder of its own, and build a target."""
    subprocess.run(
        [
            CMAKE,
            *("-S", ROOT, "-B", folder, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *options,
        ],
        check=True,
    )
    subprocess.run([CMAKE, "--build", folder, "--target", target], check=True)


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
        cuda = os.environ.get("SPECDEC_CUDA", "")
        if cuda not in CUDA:
            raise ValueError(f"SPECDEC_CUDA must be 0 or 1, got {cuda!r}")
        run_cmake(
            BUILD,
            "all",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DSPECDEC_CUDA={CUDA[cuda]}",
            f"-DSPECDEC_WERROR={'ON' if os.environ.get('CI') == 'true' else 'OFF'}",
        )
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", prefix], check=True)


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


setup(
    # One entry makes the wheel a platform wheel; what is built, and how, is CMake's.
    ext_modules=[Extension("specdec_ext._host", sources=[])],
    cmdclass={
        "build": FreshBuild,
        "build_ext": CMakeBuild,
        "cuda_gate": CudaGate,
        "sanitize": Sanitize,
        "torch_floor": TorchFloor,
    },
)
