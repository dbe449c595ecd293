"""The layout for Hugging Face `kernels`, loaded by it: run by `make test-hub`.

    python python_tests/helpers/hub.py build/hub alone|beside

``alone``: nothing of another specdec_ext can be imported. ``beside``: one was imported before, and
its operators, fakes and Triton registrations are there.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
#: vLLM's; a command line; libraries of operators, which are no modules.
LEFT_OUT = ("engines.vllm.v1", "engines.vllm.v2", "__main__", "._C", "._C_cuda")


def check_metadata(folder: Path) -> str:
    """The files are those that the metadata lists, as `kernels` hashes them; gives the id."""
    # Here, and not above: pytest looks for examples in this file where there is no `kernels`.
    from kernels._rust import Digest, DigestAlgorithm

    (variant,) = (folder / "build").iterdir()
    for cache in variant.rglob("__pycache__"):
        for path in cache.iterdir():
            path.unlink()
        cache.rmdir()
    metadata = json.loads((variant / "metadata.json").read_text())
    found = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    assert found.files == metadata["digest"]["files"]
    return metadata["id"]


def drafted() -> dict[str, torch.Tensor]:
    """Make the arguments of a call of `verify`."""
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(2, 4, 300, generator=generator)
    draft = target[:, :3] + torch.randn(2, 3, 300, generator=generator)
    tokens = {"draft_tokens": draft.argmax(-1), "draft_logits": draft}
    randomness = {"seeds": torch.arange(2), "positions": torch.tensor([5, 9])}
    return {"target_logits": target, **tokens, **randomness}


def check_package(kernel: ModuleType, name: str) -> None:
    """Operators, fakes, generation and the host module work under the name of the layout."""
    assert kernel.__name__ == name
    assert kernel._ops.NAMESPACE == name
    operators = getattr(torch.ops, name)
    call = drafted()
    tokens = kernel.verify(**call).tokens
    assert torch.equal(tokens, operators.verify(**call)[0])
    assert torch.equal(tokens, kernel.reference.verify(**call)[0])
    compiled = torch.compile(kernel.verify, fullgraph=True, backend="aot_eager")
    assert torch.equal(tokens, compiled(**call).tokens)
    assert str(operators.verify.default._schema).startswith(f"{name}::verify(")
    assert hasattr(getattr(torch.ops, f"{name}_triton"), "verify")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert torch.equal(tokens, kernel.distributed.verify_sharded(**call).tokens)
    matcher = kernel.decoding.drafters.aggressive.InputMatcher([1, 2, 3])
    matcher.append([2])
    assert matcher.unique_end == 1


def import_all(kernel: ModuleType) -> int:
    """Import every module of the layout; give their number."""
    names = [
        module.name
        for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}.")
        if not module.name.endswith(LEFT_OUT)
    ]
    for name in names:
        importlib.import_module(name)
    return len(names)


def main() -> None:
    """Load the layout with nothing of the name specdec_ext, or beside it."""
    from kernels import get_local_kernel

    folder, where = Path(sys.argv[1]), sys.argv[2]
    name = check_metadata(folder)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    if where == "beside":
        sys.path.insert(0, str(ROOT))
        import specdec_ext

        before = specdec_ext.verify(**drafted()).tokens
    else:
        sys.modules["specdec_ext"] = None  # type: ignore[assignment]
    kernel = get_local_kernel(folder)
    count = import_all(kernel)
    check_package(kernel, name)
    if where == "beside":
        assert torch.equal(before, kernel.verify(**drafted()).tokens)
        assert torch.equal(before, specdec_ext.verify(**drafted()).tokens)
        sharded = importlib.import_module("specdec_ext.distributed").verify_sharded
        assert torch.equal(before, sharded(**drafted()).tokens)
        assert torch.ops.specdec.verify is not getattr(torch.ops, name).verify
        assert specdec_ext.verify is not kernel.verify
    print(f"kernels: {name} {where}, {count} modules")


if __name__ == "__main__":
    main()
