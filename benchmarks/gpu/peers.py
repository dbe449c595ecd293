"""Other ways from raw logits to emitted tokens, and of attention over trees, called as documented.

eager, compile
    `baselines` with a temperature, and a race of exponentials for the last token:
    ``torch.multinomial`` waits for the host, which no graph can hold.
flashinfer
    softmax of target and draft, ``top_k_renorm_probs``, ``top_p_renorm_probs``,
    ``chain_speculative_sampling``. A deterministic draft is a one-hot law in a buffer kept for it.
    Trees: ``BatchPrefillWithRaggedKVCacheWrapper`` with a custom mask.
vllm
    What the sampler of its V2 model runner launches, without logprobs, penalties and bookkeeping: a
    copy in float32, ``apply_temperature``, ``apply_top_k_top_p_triton``, ``rejection_sample``. From
    an installed vLLM, or from the few files of one that carry_vllm.py took along.

All get their parameters as Python numbers or prepared tensors, whichever is faster for them, and
verify by the token rule. What is not installed here is left out, with the reason.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import baselines  # noqa: E402


@dataclass(frozen=True)
class Sampling:
    """What every request asks for; 0 and 1 mean off, as in `specdec_ext.row_law`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filtered(self) -> bool:
        """Whether there is a filter."""
        return self.top_k > 0 or self.top_p < 1


class Inputs(NamedTuple):
    """One set of inputs on a device."""

    target: Tensor  # [B, G+1, V]
    draft: Tensor | None  # [B, G, V]; None: a deterministic drafter
    tokens: Tensor  # [B, G] int64
    tokens32: Tensor  # [B, G] int32, the same: what serving engines hold
    uniforms: Tensor  # [B, G+1] float64
    seed: Tensor  # [1] int64, for generators inside kernels


#: From inputs to tokens [B, G+1], -1 after the end.
Verifier = Callable[[Inputs], Tensor]


# -------------------------------------------------------------------------------------------------
# Eager PyTorch
# -------------------------------------------------------------------------------------------------


def softmax_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """No filter."""
    return torch.softmax(logits.float() / sampling.temperature, -1)


def sort_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """One descending sort of every row."""
    logits = logits.float() / sampling.temperature
    return baselines.sort_probs(logits, sampling.top_k, sampling.top_p)


def topk_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """``torch.topk``, everything after it on those entries alone, scattered into zeros.

    Ties beyond the 50 and a few are dropped, as `baselines.topk_probs` says.
    """
    count = min(sampling.top_k + baselines.TIES, logits.shape[-1])
    values, indices = logits.topk(count)
    values = values.float() / sampling.temperature
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    kept = baselines.sort_probs(values, sampling.top_k, sampling.top_p)
    return probs.scatter_(-1, indices, kept)


def race(weights: Tensor) -> Tensor:
    """Draw from each row of ``[B, V]`` weights without the host: arg max of weight / noise."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)


def verify_deterministic(
    target_logits: Tensor,
    tokens: Tensor,
    uniforms: Tensor,
    probs: baselines.Probs,
    draw: baselines.Draw,
) -> baselines.Verdict:
    """Token rule for a drafter without a law: accept with p(x); else draw from p without x."""
    p = probs(target_logits)
    gamma = tokens.shape[1]
    accepted = uniforms[:, :-1] < p[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)
    n = accepted.long().cumprod(-1).sum(-1)
    requests = torch.arange(len(n), device=n.device)
    weights = p[requests, n]
    rejected = tokens[requests, n.clamp(max=gamma - 1)][:, None]
    kept = weights.gather(-1, rejected) * (n == gamma)[:, None]
    return baselines.place_tokens(tokens, n, draw(weights.scatter(-1, rejected, kept)))


def eager(
    law: Callable[[Tensor, Sampling], Tensor],
    sampling: Sampling,
    inputs: Inputs,
    draw: baselines.Draw = race,
) -> Tensor:
    """Verify with a law of this file."""
    probs = partial(law, sampling=sampling)
    target, tokens, uniforms = inputs.target, inputs.tokens, inputs.uniforms
    if inputs.draft is None:
        return verify_deterministic(target, tokens, uniforms, probs, draw).tokens
    return baselines.verify_token(target, tokens, inputs.draft, uniforms, probs, draw).tokens


def eager_laws(sampling: Sampling) -> dict[str, Callable[[Tensor, Sampling], Tensor]]:
    """List the laws of eager PyTorch for such a request, by contestant; the fastest last."""
    if not sampling.filtered:
        return {"eager": softmax_probs}
    laws = {"eager sort": sort_probs}
    return {**laws, "eager topk": topk_probs} if sampling.top_k > 0 else laws


@cache
def compiled(law: Callable[[Tensor, Sampling], Tensor], sampling: Sampling) -> Verifier:
    """Compile eager PyTorch for static shapes (the fastest code)."""
    # One process sees many shapes: no silent falling back to eager.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    function = torch.compile(partial(eager, law, sampling), dynamic=False)
    return lambda inputs: function(inputs)


# -------------------------------------------------------------------------------------------------
# FlashInfer
# -------------------------------------------------------------------------------------------------


def help_compiler(folder: Path) -> None:
    """Let FlashInfer's compiler find what small CUDA installations lack.

    cuRAND's headers may be in a Python package alone, and ``-lcuda`` needs a ``libcuda.so`` where
    often there is only the driver's ``libcuda.so.1``: `folder` gets a link to it.
    """
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = [*sorted(packages.glob("cu*/include")), packages / "curand/include"]
    _prepend("CPATH", [f for f in found if (f / "curand.h").exists()])
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    drivers = {line.split()[-1] for line in lines if "/libcuda.so" in line}
    if drivers:
        link = folder / "libcuda.so"
        if not link.exists():
            link.symlink_to(min(drivers))
        _prepend("LIBRARY_PATH", [folder])


@cache
def _folder_of_links() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="libcuda-")


def _prepend(variable: str, folders: Sequence[Path]) -> None:
    before = os.environ.get(variable, "").split(os.pathsep)
    paths = [*map(str, folders), *filter(None, before)]
    if paths:
        os.environ[variable] = os.pathsep.join(dict.fromkeys(paths))


def flashinfer_verifier(
    sampling: Sampling, batch: int, gamma: int, vocab: int, device: torch.device
) -> Verifier:
    """Compose FlashInfer's sampling kernels.

    The random state is a tensor, as its documentation asks for under CUDA graphs.
    """
    help_compiler(Path(_folder_of_links().name))
    kernels: Any = import_module("flashinfer.sampling")
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    one_hot: list[Tensor] = []  # made when first needed: [B, G, V] zeros between calls

    def probs(logits: Tensor) -> Tensor:
        found = kernels.softmax(logits.view(-1, vocab), temperature=sampling.temperature)
        if 0 < sampling.top_k < vocab:
            found = kernels.top_k_renorm_probs(found, sampling.top_k)
        if sampling.top_p < 1:
            found = kernels.top_p_renorm_probs(found, sampling.top_p)
        return found.view(batch, -1, vocab)

    def verify(inputs: Inputs) -> Tensor:
        target_probs = probs(inputs.target)
        if inputs.draft is not None:
            draft_probs = probs(inputs.draft)
        else:
            if not one_hot:
                one_hot.append(target_probs.new_zeros(batch, gamma, vocab))
            draft_probs = one_hot[0].scatter_(-1, inputs.tokens[..., None], 1.0)
        tokens, _, _ = kernels.chain_speculative_sampling(
            draft_probs, inputs.tokens32, target_probs, seed=inputs.seed, offset=offset
        )
        if inputs.draft is None:
            draft_probs.scatter_(-1, inputs.tokens[..., None], 0.0)
        return tokens

    return verify


def flashinfer_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, allowed: Tensor, lengths: Sequence[int]
) -> Callable[[], Tensor]:
    """Attend over caches under masks of their own, all made and planned before it is called.

    q ``[B, N, H, D]``, caches ``[B, L, Hkv, D]`` of which request b has the first ``lengths[b]``
    places, allowed ``[B, N, L]`` bool; gives ``[B, N, H, D]``. Keys and values lie as the kernel
    likes them best, one request behind the other.
    """
    help_compiler(Path(_folder_of_links().name))
    prefill: Any = import_module("flashinfer.prefill")
    batch, nodes, heads, size = q.shape
    k, v = (
        torch.cat([row[:length] for row, length in zip(cache, lengths, strict=True)])
        for cache in (k_cache, v_cache)
    )
    masks = [row[:, :length].flatten() for row, length in zip(allowed, lengths, strict=True)]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=q.device) * nodes,
        ends.to(q.device),
        heads,
        k.shape[1],
        size,
        custom_mask=torch.cat(masks),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    packed = q.reshape(-1, heads, size)
    return lambda: wrapper.run(packed, k, v).view(q.shape)


# -------------------------------------------------------------------------------------------------
# vLLM
# -------------------------------------------------------------------------------------------------


def vllm_verifier(
    sampling: Sampling, batch: int, gamma: int, vocab: int, device: torch.device
) -> Verifier:
    """Call vLLM's kernels below its metadata classes, which keep these index tensors up to date."""
    kernels: Any = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    scaling: Any = import_module("vllm.v1.worker.gpu.sample.gumbel")
    filters: Any = import_module("vllm.v1.sample.ops.topk_topp_triton")

    def full(rows: int, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    def counted(rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.int32, device=device)

    requests, steps = counted(batch), counted(gamma + 1)
    asked = full(batch, sampling.temperature, torch.float32)

    def constrained(logits: Tensor) -> Tensor:
        rows, count = logits.shape[0] * logits.shape[1], logits.shape[1]
        scaled = torch.empty((rows, vocab), dtype=torch.float32, device=device)
        scaled.copy_(logits.reshape(rows, vocab))
        if sampling.temperature != 1:
            scaling.apply_temperature(scaled, requests_of[count], asked)
        if sampling.filtered:
            scaled = filters.apply_top_k_top_p_triton(scaled, top_k[count], top_p[count])
        return scaled.view(logits.shape)

    # By rows a request: gamma + 1 of the target, gamma of the draft.
    counts = (gamma, gamma + 1)
    requests_of = {n: requests.repeat_interleave(n) for n in counts}
    top_k = {n: full(batch * n, sampling.top_k, torch.int32) for n in counts}
    top_p = {n: full(batch * n, sampling.top_p, torch.float32) for n in counts}
    if sampling.top_k <= 0:
        top_k = dict.fromkeys(counts)
    if sampling.top_p >= 1:
        top_p = dict.fromkeys(counts)
    # Its drafts are drawn with a temperature alone, by which rejection_sample divides their logits.
    # A draft's law with filters is made as the target's is, and then has its temperature.
    divides = full(batch, 1.0, torch.float32) if sampling.filtered else asked
    seeds, ends = requests.to(torch.int64), counted(batch + 1) * (gamma + 1)
    of_step = steps.repeat(batch)
    positions = of_step.to(torch.int64)

    def verify(inputs: Inputs) -> Tensor:
        target, draft = inputs.target, inputs.draft
        if sampling != Sampling():
            target = constrained(target)
        if draft is not None and sampling.filtered:
            draft = constrained(draft)
        tokens, emitted = kernels.rejection_sample(
            target.view(-1, vocab),
            draft,
            torch.nn.functional.pad(inputs.tokens32, (1, 0)).view(-1),
            ends,
            positions,
            requests,
            requests_of[gamma + 1],
            of_step,
            divides,
            seeds,
            gamma,
        )
        return tokens.masked_fill(steps >= emitted[:, None], -1)

    return verify


# -------------------------------------------------------------------------------------------------
# What there is
# -------------------------------------------------------------------------------------------------


@cache
def missing(package: str) -> str | None:
    """Say why a package cannot be used here; None if it can be imported."""
    if find_spec(package) is None:
        return f"{package} is not installed"
    try:
        import_module(package)
    except Exception as error:
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return None


def absences(device: torch.device) -> Mapping[str, str | None]:
    """Map every peer that is a package of its own to why it is left out, None if it is there."""
    reason = None if device.type == "cuda" else "its kernels need a GPU"
    return {name: missing(name) or reason for name in ("flashinfer", "vllm")}


def verifier(
    name: str, sampling: Sampling, shape: tuple[int, int, int], device: torch.device
) -> Verifier:
    """Give a peer for inputs of shape (B, G, V); what is compiled, is when it is first called."""
    laws = eager_laws(sampling)
    if name in laws:
        return partial(eager, laws[name], sampling)
    if name == "compile":
        return compiled(list(laws.values())[-1], sampling)
    packages = {"flashinfer": flashinfer_verifier, "vllm": vllm_verifier}
    return packages[name](sampling, *shape, device)


def main() -> int:
    """Build what peers compile at their first call, and say what there is."""
    device = torch.device("cuda", 0)
    for name, reason in absences(device).items():
        calls = {name: partial(tiny_call, name, device)}
        if name == "flashinfer":
            calls["flashinfer's attention"] = partial(tiny_attention, device)
        for what, call in calls.items():
            said = reason
            if said is None:
                try:
                    call()
                    said = "works"
                except Exception as error:
                    said = f"fails: {type(error).__name__}: {error}"
            print(f"{what}: {said}", flush=True)
    return 0


def tiny_call(name: str, device: torch.device) -> Tensor:
    """Verify two requests of a small vocabulary, with filters."""
    target = torch.randn(2, 3, 128, device=device).bfloat16()
    tokens = torch.zeros(2, 2, dtype=torch.int64, device=device)
    uniforms = torch.rand(2, 3, dtype=torch.float64, device=device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    draft = target[:, 1:].contiguous()
    inputs = Inputs(target, draft, tokens, tokens.int(), uniforms, seed)
    return verifier(name, Sampling(0.8, 20, 0.9), (2, 2, 128), device)(inputs).cpu()


def tiny_attention(device: torch.device) -> Tensor:
    """Attend over two short caches, in the head sizes and dtype that are timed."""
    q = torch.randn(2, 3, 8, 128, device=device).bfloat16()
    k, v = (torch.randn(2, 9, 2, 128, device=device).bfloat16() for _ in range(2))
    allowed = torch.ones(2, 3, 9, dtype=torch.bool, device=device)
    return flashinfer_attention(q, k, v, allowed, [7, 9])().cpu()


if __name__ == "__main__":
    sys.exit(main())
