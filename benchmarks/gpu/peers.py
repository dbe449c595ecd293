"""Other ways from raw logits to emitted tokens, called as their documentation says.

eager, compile
    `baselines` with a temperature, and a race of exponentials for the last token:
    ``torch.multinomial`` waits for the host, which no graph can hold.
flashinfer
    softmax of target and draft, ``top_k_renorm_probs``, ``top_p_renorm_probs``,
    ``chain_speculative_sampling``. A deterministic draft is a one-hot law in a buffer kept for it.
vllm
    What its ``RejectionSampler`` does without logprobs, penalties and bookkeeping: bonus token
    first, then ``apply_sampling_constraints`` and ``rejection_sample``.

All get their parameters as Python numbers or prepared tensors, whichever is faster for them, and
all use the token rule. What is not installed here is left out, with the reason.
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
from types import SimpleNamespace
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
    help_compiler(Path(tempfile.mkdtemp(prefix="libcuda-")))
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


# -------------------------------------------------------------------------------------------------
# vLLM
# -------------------------------------------------------------------------------------------------


def vllm_verifier(
    sampling: Sampling, batch: int, gamma: int, vocab: int, device: torch.device
) -> Verifier:
    """Call vLLM's rejection sampler below its metadata classes."""
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")
    filters: Any = import_module("vllm.v1.sample.ops.topk_topp_sampler")

    def per_request(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    asked = SimpleNamespace(
        temperature=per_request(sampling.temperature, torch.float32),
        top_k=per_request(sampling.top_k, torch.int32) if sampling.top_k > 0 else None,
        top_p=per_request(sampling.top_p, torch.float32) if sampling.top_p < 1 else None,
        all_greedy=False,
        all_random=True,
        generators={},
    )
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device=device) * gamma

    def constrained(logits: Tensor) -> Tensor:
        rows = logits.reshape(-1, vocab).to(torch.float32, copy=True)  # changed in place
        limits = sampler.apply_sampling_constraints(rows, ends, asked)
        return limits.softmax(-1, dtype=torch.float32)

    def verify(inputs: Inputs) -> Tensor:
        bonus = inputs.target[:, -1].float() / asked.temperature[:, None]
        bonus = filters.apply_top_k_top_p(bonus, asked.top_k, asked.top_p)
        drawn = filters.random_sample(bonus.softmax(-1, dtype=torch.float32), {})
        # The draft's law is part of the work; a serving engine has made it while drafting.
        draft_probs = None if inputs.draft is None else constrained(inputs.draft)
        return sampler.rejection_sample(
            inputs.tokens32.view(-1),
            [gamma] * batch,
            gamma,
            ends,
            draft_probs,
            constrained(inputs.target[:, :-1]),
            drawn.view(-1, 1).int(),
            asked,
        )

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


def absences() -> Mapping[str, str | None]:
    """Map every peer that is a package of its own to why it is left out, None if it is there."""
    return {name: missing(name) for name in ("flashinfer", "vllm")}


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
    reasons = absences()
    for name, reason in reasons.items():
        if reason is None:
            try:
                tiny_call(name, device)
                reason = "works"
            except Exception as error:
                reason = f"fails: {type(error).__name__}: {error}"
        print(f"{name}: {reason}", flush=True)
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


if __name__ == "__main__":
    sys.exit(main())
