"""A few calls of every operator, compared with the reference: for sanitizers and foreign libraries.

    python python_tests/helpers/gpu_smoke.py --device cuda:0 --backends cuda triton

Small on purpose: under compute-sanitizer each launch costs much. Nothing but copies runs on the
device beside the operators.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_checks  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext.contract import CHAIN_RULES as RULES
from specdec_ext.ops import TREE_RULES  # noqa: E402
from specdec_ext.testing import TreeCase, VerifyCase, make_case, make_tree_case  # noqa: E402


def cases() -> Iterator[VerifyCase]:
    """Every rule and filter, every dtype, misaligned and packed rows, one tile and several."""
    for seed, rule in enumerate(RULES):
        yield make_case(seed, rule=rule, batch=3, gamma=2, vocab=33, draft_filters=True)
        yield make_case(
            seed, rule=rule, batch=2, gamma=2, vocab=8193, dtype=torch.bfloat16, layout="padded"
        )
    yield make_case(7, batch=3, gamma=2, vocab=4099, filters=False, greedy_rows=False)
    yield make_case(8, batch=3, gamma=2, vocab=777, packed=True, dtype=torch.float16)
    yield make_case(9, batch=3, gamma=2, vocab=501, draft="none", philox=True)
    yield make_case(10, batch=3, gamma=2, vocab=501, draft="probs", id_dtype=torch.int32)
    features = dict(allowed_mask=True, draft_vocab=700, draft_token_ids=True)
    for seed, rule in enumerate(("block", "token", "coupled"), 12):
        yield make_case(seed, rule=rule, batch=3, gamma=2, vocab=4133, layout="padded", **features)
    # Longer than what a block looks at in one round.
    for draft in ("none", "logits"):
        yield make_case(15, rule="block", batch=3, gamma=40, vocab=501, draft=draft)
    yield gpu_checks.hostile_case(11, "block", vocab=129)


def tree_cases() -> Iterator[TreeCase]:
    """Every rule on one tile and on several, with each way of giving rows and draft laws."""
    for seed, rule in enumerate(TREE_RULES):
        yield make_tree_case(seed, rule=rule, batch=3, nodes=9, vocab=33, philox=True)
        yield make_tree_case(
            seed, rule=rule, batch=2, nodes=12, vocab=8193, dtype=torch.bfloat16, philox=True
        )
    yield make_tree_case(6, batch=2, nodes=8, vocab=4099, draft="probs", raw_logprobs=True)
    yield make_tree_case(7, batch=2, nodes=8, vocab=4133, packed=True, shared_rows=True)
    # One after another in the same scratch memory, which a launch reads before it waits.
    for seed in range(8, 16):
        yield make_tree_case(seed, batch=1, nodes=8, vocab=33, philox=True)


def main() -> int:
    """Check each backend; the exit code says whether all agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--backends", nargs="+", default=["cuda"])
    options = parser.parse_args()
    print(f"specdec_ext of {Path(specdec_ext.__file__).parent}, torch {torch.__version__}")
    for name in options.backends:
        target = gpu_checks.Target(name, options.device)
        count = 0
        for case in cases():
            gpu_checks.check_verify(target, case)
            count += 1
        for tree in tree_cases():
            gpu_checks.check_verify(target, tree)
            count += 1
        for dtype in (torch.float32, torch.bfloat16):
            gpu_checks.check_row_law(target, 1, 4099, dtype, "padded")
            gpu_checks.check_sample(target, 2, 4099, dtype, "padded")
            gpu_checks.check_acceptance(target, 3, 4099, 517, dtype)
            gpu_checks.check_features(target, 4, 4099, dtype, "padded")
        gpu_checks.check_uniforms(target)
        print(f"{name}: {count} verifications and the other operators agree with the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
