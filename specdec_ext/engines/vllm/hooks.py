"""What is replaced in vLLM or read there, with the signatures that it must have.

Nothing here is public in vLLM. Each entry was read and run in the versions listed.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import NamedTuple

__all__ = ["HOOKS", "VERSIONS", "Hook", "mismatch"]

#: Versions of vLLM, by their first two numbers, that this was run in.
VERSIONS = ("0.32",)


class Hook(NamedTuple):
    """A function or class of vLLM's and the parameters that it must have."""

    module: str
    name: str
    parameters: str

    def mismatch(self) -> str | None:
        """Say what is not as it should be, if anything is."""
        where = f"{self.module}.{self.name}"
        try:
            found = import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
            got = " ".join(inspect.signature(found).parameters)  # type: ignore[arg-type]
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"{where} is not there ({error})"
        if got != self.parameters:
            return f"{where} takes ({got.replace(' ', ', ')}), not what this was written for"
        return None


HOOKS = (
    # What both runners share.
    Hook("vllm.sampling_params", "SamplingParams._validate_spec_decode", "self speculative_config"),
    # V1: what is replaced ...
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        "self metadata draft_probs logits sampling_metadata",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        "self logits spec_decode_metadata",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._get_spec_decode_draft_probs",
        "self spec_decode_metadata",
    ),
    Hook(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        "self num_speculative_tokens target_token_ids target_positions target_hidden_states "
        "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata "
        "mm_embed_inputs num_rejected_tokens_gpu slot_mappings",
    ),
    Hook(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._sample_from_logits",
        "self logits sampling_metadata",
    ),
    # ... and what is called or read.
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.__init__",
        "self sampler spec_config device",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.apply_logits_processors",
        "self logits sampling_metadata metadata",
    ),
    Hook(
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        "self logits sampling_metadata predict_bonus_token",
    ),
    Hook("vllm.v1.sample.sampler", "Sampler.gather_logprobs", "logprobs num_logprobs token_ids"),
    Hook("vllm.v1.sample.sampler", "Sampler.compute_logprobs", "logits"),
    Hook(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        "draft_token_ids num_draft_tokens cu_num_draft_tokens cu_num_sampled_tokens "
        "target_logits_indices bonus_logits_indices logits_indices",
    ),
    Hook(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "temperature all_greedy all_random top_p top_k generators max_num_logprobs no_penalties "
        "prompt_token_ids frequency_penalties presence_penalties repetition_penalties "
        "output_token_ids allowed_token_ids_mask bad_words_token_ids logitsprocs "
        "logprob_token_ids spec_token_ids thinking_budget_state_holder",
    ),
    # V2: what is replaced ...
    Hook(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "RejectionSampler._verify",
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
        "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
    ),
    Hook(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "gumbel_sample",
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting "
        "logits_cache logits_cache_col use_fp64 logits_cache_source",
    ),
    Hook("vllm.v1.worker.gpu.sample.sampler", "Sampler.__call__", "self logits input_batch"),
    # ... and what is called or read.
    Hook(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "RejectionSampler.__init__",
        "self sampler spec_config device watermark_key",
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
        "expanded_local_pos seq_lens_upper_bound_np skip_top_k_top_p",
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext",
        "expanded_idx_mapping idx_mapping idx_mapping_np expanded_local_pos input_ids pos "
        "seq_lens_upper_bound_np",
    ),
)


def mismatch() -> str | None:
    """Say in one line why the vLLM that is installed is not one to touch; None: it is."""
    version = str(import_module("vllm").__version__)
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        return f"version {version}, where {', '.join(VERSIONS)} is known"
    return next((reason for hook in HOOKS if (reason := hook.mismatch()) is not None), None)
