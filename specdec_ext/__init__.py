"""Speculative-decoding verification as PyTorch operators.

`verify` takes the raw logits of a target model and a draft and returns the tokens to emit,
`verify_tree` does so where the draft is a tree; `row_law`, `sample`, `acceptance` and `uniforms`
are what a decoding loop needs beside them, and `generate` is such a loop; `tree_mask`,
`tree_attention` and `compact_kv` are what a target model needs for draft trees
(`merge_attention` joins attention over two sets of keys); `beam_verify` decides levels of a beam
search. `hf` works inside Hugging Face
transformers.
``torch.ops.specdec`` holds the operators themselves.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._installed import find_complete

__version__ = "0.1.0"

# Under another name this is a build for `kernels`, which is what it is.
_here = Path(__file__).parent
_elsewhere = find_complete(_here, __version__) if __name__ == "specdec_ext" else None
if _elsewhere is not None:
    warnings.warn(
        f"{_here} was not built: the copy that is installed in {_elsewhere} is used in its place",
        stacklevel=2,
    )
    __path__ = [str(_elsewhere)]  # where every module of the package is looked for

from .backend import load_libraries  # noqa: E402

load_libraries()

from . import _fake, attention, triton  # noqa: E402

attention.register()
triton.register(_fake.FAKES, _fake.count_mutation)

from .attention import merge_attention  # noqa: E402
from .ops import (  # noqa: E402
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    BeamVerifyResult,
    RowLaw,
    SampleResult,
    TreeAttentionResult,
    TreeMaskResult,
    VerifyResult,
    VerifyTreeResult,
    acceptance,
    beam_verify,
    compact_kv,
    row_law,
    sample,
    tree_attention,
    tree_mask,
    uniforms,
    verify,
    verify_tree,
)
from .tree_masks import dense_tree_mask, tree_mask_mod, tree_position_ids  # noqa: E402

if TYPE_CHECKING:
    from . import hf as hf
    from .decoding.chain_generation import Burst, Generated, GenerationError
    from .decoding.generate import generate, stream
    from .decoding.stats import Statistics

__all__ = [
    "BeamVerifyResult",
    "Burst",
    "Generated",
    "GenerationError",
    "STATUS_INVALID_DRAFT_TOKEN",
    "STATUS_INVALID_TREE",
    "STATUS_NO_DRAFT_LAW",
    "STATUS_NO_TARGET_LAW",
    "STATUS_PARAMETER_OUT_OF_RANGE",
    "RowLaw",
    "SampleResult",
    "Statistics",
    "TreeAttentionResult",
    "TreeMaskResult",
    "VerifyResult",
    "VerifyTreeResult",
    "acceptance",
    "beam_verify",
    "compact_kv",
    "dense_tree_mask",
    "generate",
    "merge_attention",
    "row_law",
    "sample",
    "stream",
    "tree_attention",
    "tree_mask",
    "tree_mask_mod",
    "tree_position_ids",
    "uniforms",
    "verify",
    "verify_tree",
]


_OF_THE_LOOP = ("Burst", "Generated", "GenerationError", "Statistics", "generate", "stream")


def __getattr__(name: str) -> Any:
    # The generation loop is loaded when it is first asked for: operators alone do without it.
    if name in _OF_THE_LOOP:
        from . import decoding

        return getattr(decoding, name)
    if name == "hf":
        # Not in __all__: it needs transformers, and a star import must not.
        try:
            return import_module(".hf", __name__)
        except ImportError as error:
            raise AttributeError(
                f"module {__name__!r} has no attribute 'hf' here: {error}"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
