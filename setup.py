"""Builds the native libraries by driving CMake with Ninja; all metadata is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
# SPECDEC_CUDA in the environment. By default CUDA kernels are built where torch has CUDA and nvcc
# is there.
CUDA = {"": "AUTO", "0": "OFF", "1": "ON"}


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
        command = Path(cmake.CMAKE_BIN_DIR) / "cmake"
        cuda = os.environ.get("SPECDEC_CUDA", "")
        if cuda not in CUDA:
            raise ValueError(f"SPECDEC_CUDA must be 0 or 1, got {cuda!r}")
        prefix = ROOT if in_place else Path(self.build_lib).resolve()
        subprocess.run(
            [
                command,
                *("-S", ROOT, "-B", BUILD, "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
                f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DSPECDEC_CUDA={CUDA[cuda]}",
                f"-DSPECDEC_WERROR={'ON' if os.environ.get('CI') == 'true' else 'OFF'}",
            ],
            check=True,
        )
        subprocess.run([command, "--build", BUILD], check=True)
        subprocess.run([command, "--install", BUILD, "--prefix", prefix], check=True)


setup(
    # One entry makes the wheel a platform wheel; what is built, and how, is CMake's.
    ext_modules=[Extension("specdec_ext._host", sources=[])],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
