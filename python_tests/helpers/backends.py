"""The table of backends: every implementation of the operators, and which tests it joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import fibres
import interpreter
import pytest
import torch
from gpu_checks import placed

import specdec_ext
from specdec_ext import reference
from specdec_ext.contract import BeamVerifyResult
from specdec_ext.testing import TreeCase, VerifyCase, VerifyOutcome


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators, called with the schemas' arguments.

    `shares` says for a test, or else for a file, that the backend takes every n-th case (0: none);
    `otherwise` is said of the rest. Of a choice of the cases (``--representative``), the backend
    takes up to `most` of a test, and only of the tests in `chosen`, unless that is None.
    """

    name: str
    load: Callable[[], Any]  # the namespace of the operators, when it is first asked for
    device: str
    tolerance: float  # of decisions, see specdec_ext.testing.explain_outcome
    tv: float  # bound on the total variation of an exact law
    shares: Mapping[str, int] = field(default_factory=dict)
    otherwise: int = 1
    most: int = 1
    chosen: frozenset[str] | None = None

    def share(self, item: pytest.Function) -> int:
        module = item.path.stem
        test = f"{module}.{item.originalname}"
        return self.shares.get(test, self.shares.get(module, self.otherwise))

    def is_chosen(self, item: pytest.Function) -> bool:
        return self.chosen is None or f"{item.path.stem}.{item.originalname}" in self.chosen

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        device = torch.device(self.device)
        result = getattr(self.load(), name)(
            *(placed(value, device) for value in args),
            **{key: placed(value, device) for key, value in kwargs.items()},
        )
        if isinstance(result, torch.Tensor):
            return result.cpu()
        return tuple(output.cpu() for output in result)

    def verify(self, *args: Any, **kwargs: Any) -> VerifyOutcome:
        return VerifyOutcome(*self._call("verify", *args, **kwargs))

    def verify_tree(self, *args: Any, **kwargs: Any) -> specdec_ext.VerifyTreeResult:
        return specdec_ext.VerifyTreeResult(*self._call("verify_tree", *args, **kwargs))

    def beam_verify(self, *args: Any, **kwargs: Any) -> BeamVerifyResult:
        return BeamVerifyResult(*self._call("beam_verify", *args, **kwargs))

    def row_law(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.RowLaw(*self._call("row_law", *args, **kwargs))

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.SampleResult(*self._call("sample", *args, **kwargs))

    def acceptance(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call("acceptance", *args, **kwargs)

    def uniforms(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call("uniforms", *args, **kwargs)

    def tree_mask(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.TreeMaskResult(*self._call("tree_mask", *args, **kwargs))

    def tree_attention(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.TreeAttentionResult(*self._call("tree_attention", *args, **kwargs))

    def compact_kv(self, k_cache: Any, v_cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        caches = [placed(cache, torch.device(self.device)) for cache in (k_cache, v_cache)]
        status = self._call("compact_kv", *caches, *args, **kwargs)
        for given, written in zip((k_cache, v_cache), caches, strict=True):
            if written is not given:
                given.copy_(written)
        return status

    def run(self, case: VerifyCase) -> VerifyOutcome:
        return case.run(self.verify)

    def run_tree(self, case: TreeCase) -> specdec_ext.VerifyTreeResult:
        return case.run(self.verify_tree)


# Every n-th case for Triton's interpreter, which is slow; test_triton.py has what is written for it
# alone.
INTERPRETED = {
    "test_coupled": 18,
    # 1,000 races and more. They are the CPU's, token by token: test_triton.test_races_over_tiles.
    "test_coupled.test_a_shared_race_is_kept_more_often_than_noise_of_its_own": 0,
    "test_coupled.test_noise_keyed_by_the_call_is_not_that_of_plain_sampling": 0,
    "test_coupled.test_the_race_is_among_what_filters_keep": 0,
    "test_draft_lists": 40,
    "test_draft_lists.test_lists_without_a_law": 18,
    "test_draft_lists.test_a_packed_table_without_lists": 1,
    "test_draft_lists.test_a_chain_is_block_verification_to_the_bit": 0,
    "test_draft_lists.test_the_order_of_a_list_and_its_types_do_not_matter": 0,
    "test_draft_vocabulary": 12,
    "test_draft_vocabulary.test_verify_is_that_of_scattered_logits": 36,
    "test_draft_vocabulary.test_a_packed_table_without_rows": 1,
    "test_draft_vocabulary.test_a_tree_without_draft_rows": 1,
    "test_masks": 12,
    "test_masks.test_verify_is_that_of_masked_logits": 36,
    "test_errors.test_value_errors": 6,
    "test_errors.test_message_in_full": 1,
    "test_filters.test_kept_tokens": 1,
    "test_filters.test_ties_at_the_top_stay": 2,
    "test_filters.test_masked_tokens_are_never_kept": 1,
    "test_filters.test_cutoffs_against_sorting": 4,
    "test_filters.test_crowded_rows_against_sorting": 4,
    "test_filters.test_negative_zero_ties_with_zero": 1,
    "test_filters.test_target_and_draft_have_laws_of_their_own": 2,
    "test_filters.test_draft_token_outside_the_draft_filters": 1,
    "test_invariance.test_what_follows_the_draft_is_not_read": 3,
    "test_invariance.test_strides_of_the_small_arguments": 2,
    "test_invariance.test_expanded_rows": 1,
    "test_invariance.test_inputs_are_not_changed": 8,
    "test_invariance.test_outputs_do_not_require_grad": 1,
    "test_parity.test_row_law": 5,
    "test_parity.test_sample": 4,
    "test_parity.test_acceptance": 6,
    "test_parity.test_outputs_have_the_documented_types": 4,
    "test_philox.test_uniforms_are_counters": 1,
    "test_philox.test_draws_of_sample_are_counters": 3,
    "test_philox.test_number_of_slots": 1,
    "test_philox.test_operators_agree_bit_for_bit": 1,
    "test_relaxed.test_lenience_at_temperature_zero": 1,
    "test_relaxed.test_threshold_of_typical_is_strict": 1,
    "test_relaxed.test_entropy_of_typical_is_of_the_filtered_law_in_nats": 1,
    "test_relaxed.test_failure_of_typical_may_be_the_token_that_failed": 1,
    "test_relaxed.test_equations_in_one_call": 1,
    "test_status": 3,
    "test_tables": 2,
    "test_tables.test_empty_batches": 1,
    "test_tables.test_no_draft_columns": 1,
    "test_tables.test_row_law_of_what_has_none": 1,
    "test_thresholds.test_coin_at_a_dyadic_threshold": 4,
    "test_thresholds.test_coin_at_a_rational_threshold": 4,
    "test_thresholds.test_p_of_zero_accepts_no_coin": 2,
    "test_thresholds.test_deterministic_token": 3,
    "test_thresholds.test_block_threshold_of_an_inner_node": 1,
    "test_thresholds.test_block_residual_is_scaled_by_the_inflow": 1,
    "test_thresholds.test_boundaries_of_a_uniform_draw": 2,
    "test_thresholds.test_boundaries_between_tiles": 1,
    "test_thresholds.test_boundaries_of_a_residual_draw": 2,
    "test_thresholds.test_a_rejected_deterministic_token_is_excluded": 6,
    "test_thresholds.test_differences_of_logits_that_no_float32_holds": 1,
    "test_thresholds.test_an_empty_residual_leaves_the_targets_law": 2,
    "test_thresholds.test_an_empty_residual_in_a_tree": 1,
    "test_thresholds.test_equal_laws_leave_no_mass": 1,
    "test_thresholds.test_a_residual_behind_next_to_no_inflow": 4,
    "test_thresholds.test_what_draft_probs_sum_to_does_not_matter": 6,
    "test_thresholds.test_large_logits": 3,
    "test_thresholds.test_largest_float16_and_float32_logits": 1,
    "test_tree": 5,
    "test_tree.test_a_deterministic_sibling_after_a_child_that_is_certain": 1,
    "test_tree.test_accept_probs_and_residual": 1,
    "test_tree.test_coin_of_a_node": 4,
    "test_tree.test_invalid_trees": 8,
    "test_tree.test_ids_out_of_range": 7,
    "test_tree.test_rows_without_a_law": 4,
    "test_tree.test_a_chain_is_block_verification_to_the_bit": 0,
    "test_tree.test_masks": 10,
    "test_tree.test_temperature_zero": 0,
    "test_tree.test_a_deep_tree": 0,
    "test_tree.test_parity": 48,
    "test_tree.test_value_errors": 9,
    "test_beam_verify": 1,
    "test_beam_verify.test_like_the_reference": 13,
    "test_beam_verify.test_a_request_does_not_depend_on_the_others": 0,
    "test_beam_law.test_like_plain_search_to_the_bit": 24,
    "test_beam_law.test_a_draft_that_is_the_target_decides_every_level": 1,
    "test_beam_law.test_wide_beams_hold_every_hypothesis": 1,
    "test_tree_mask": 1,
    "test_tree_mask.test_like_the_reference": 2,
    "test_tree_attention": 1,
    "test_tree_attention.test_like_a_dense_mask": 2,
    "test_tree_attention.test_window": 2,
    "test_tree_attention.test_pages": 2,
    "test_tree_attention.test_a_page_that_is_no_block": 3,
    "test_tree_attention.test_keys_and_values_of_other_sizes": 2,
    "test_compact_kv": 1,
    "test_compact_kv.test_like_the_reference": 3,
}

# One test of each operator, in the interpreter; of verify, test_triton.py has others.
STAND_FOR_TRITON = frozenset(
    {
        "test_parity.test_row_law",
        "test_parity.test_sample",
        "test_draft_vocabulary.test_acceptance",
        "test_philox.test_operators_agree_bit_for_bit",
        "test_tree.test_parity",
        "test_beam_verify.test_a_level_by_hand",
        "test_tree_mask.test_like_the_reference",
        "test_tree_attention.test_like_a_dense_mask",
        "test_compact_kv.test_like_the_reference",
    }
)

# Blocks of one warp run everything that they can run in good time and that is about kernels;
# blocks of several, what their collectives can change.
ONE_WARP = {
    "test_law.test_many_pairs_of_models": 0,
    "test_errors.test_more_columns_than_counters": 0,
    "test_law.test_block_accepts_at_least_as_much_as_token": 6,  # 20 s each
    "test_tree_law.test_other_draft_vocabularies": 2,
    # 200,000 draws a call: their noise is that of csrc/core, as on the CPU.
    "test_statistics": 0,
}
FOUR_WARPS = {
    **dict.fromkeys(
        (
            *("test_parity", "test_filters", "test_status", "test_tables", "test_thresholds"),
            *("test_coupled", "test_masks", "test_draft_vocabulary"),
            *("test_tree", "test_tree_mask", "test_compact_kv", "test_beam_verify"),
        ),
        1,
    ),
    "test_tree_law.test_emitted_law_is_the_targets": 9,
    # Every variant, type and rule, though not all of them together.
    "test_parity.test_verify": 2,
    "test_masks.test_verify_is_that_of_masked_logits": 2,
    "test_draft_vocabulary.test_verify_is_that_of_scattered_logits": 2,
}

REFERENCE = Backend("reference", lambda: reference, "cpu", tolerance=1e-9, tv=1e-9)
CPU = Backend("cpu", lambda: torch.ops.specdec, "cpu", tolerance=1e-5, tv=1e-6, most=2)


def on_fibres(threads: int, shares: Mapping[str, int], otherwise: int) -> Backend:
    """The CUDA kernels on the host, in blocks of so many threads."""
    load = partial(fibres.operators, threads)
    return Backend(f"fibres{threads}", load, "cpu", 1e-5, 1e-6, shares, otherwise)


FIBRES32 = on_fibres(32, ONE_WARP, 1)
FIBRES128 = on_fibres(128, FOUR_WARPS, 0)
HAS_GPU = torch.cuda.is_available()
TRITON = Backend(
    "triton",
    lambda: torch.ops.specdec_triton,
    "cuda" if HAS_GPU else "cpu",
    tolerance=1e-5,
    tv=1e-6,
    shares={} if HAS_GPU else INTERPRETED,
    otherwise=1 if HAS_GPU else 0,
    chosen=None if HAS_GPU else STAND_FOR_TRITON,
)
OPERATORS = [CPU, FIBRES32, FIBRES128, *([TRITON] if find_spec("triton") else [])]
BACKENDS = [REFERENCE, *OPERATORS]


if TRITON in OPERATORS and not HAS_GPU:
    interpreter.speed_up()
