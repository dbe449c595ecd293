"""One engine of vLLM in a process of its own: a job in JSON comes in, texts go out.

Run by test_vllm.py and by benchmarks/bench_vllm.py in vLLM's environment, where no other package of
the tests is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "benchmarks" / "pair" / "package" / "specdec_ext_pair" / "stdlib-pair"

#: Set before vLLM is imported; a process's environment may say otherwise.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def environment(rule: str, **more: str) -> dict[str, str]:
    """Give the environment of a process with vLLM, in which it finds this checkout's plugin."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"  # vLLM's kernels are slow without it
    preload = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    here = {"PYTHONPATH": str(ROOT), "SPECDEC_VLLM": rule}
    # The tests set it for themselves; vLLM would take it for its kernels.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, **ENVIRONMENT, **preload, **here, **more}


def checkpoints(folder: Path) -> Path:
    """Lay out the shipped pair as vLLM wants it: each model with its tokenizer, and an EAGLE head.

    The head is untrained: nearly all that it drafts is rejected.
    """
    for model in ("target", "draft"):
        shutil.copytree(PAIR / model, folder / model)
        for path in (PAIR / "tokenizer").iterdir():
            shutil.copy(path, folder / model)
    eagle_head(folder / "eagle", json.loads((PAIR / "target" / "config.json").read_text()))
    return folder


def eagle_head(folder: Path, target: dict[str, Any]) -> None:
    """Write an EAGLE head of one layer with random weights."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    size = target.get("head_dim") or hidden // heads
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (heads * size, hidden),
        "layers.0.self_attn.k_proj": (kv_heads * size, hidden),
        "layers.0.self_attn.v_proj": (kv_heads * size, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * size),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {**target, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def plant_wrong_temperature(factor: float) -> None:
    """Make the adapter pass another temperature than the request's: what a test has to see."""
    from specdec_ext.engines.vllm import v1

    filters = v1._filters

    def wrong(*arguments: Any) -> dict[str, Any]:
        given = filters(*arguments)
        return {**given, "temperature": given["temperature"] * factor}

    v1._filters = wrong


def sampler_of(llm: Any) -> str:
    """Name the class that verifies drafts; empty where it is in another process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return ""
    runner = core.model_executor.driver_worker.worker.model_runner
    return type(getattr(runner, "rejection_sampler", None)).__name__


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Build an engine and run the job's calls, one after the other."""
    if job.get("triton_interpreter"):
        let_vllm_use_the_interpreter()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = dict(enforce_eager=True, max_model_len=512, dtype="float32", max_num_seqs=8)
    llm = LLM(**{**options, **job["llm"]}, disable_log_stats=False)
    if "temperature_factor" in job:
        plant_wrong_temperature(job["temperature_factor"])
    results: dict[str, Any] = {"sampler": sampler_of(llm)}
    for name, call in job["calls"].items():
        params = []
        for given in call["params"]:
            given = dict(given)
            if "regex" in given:
                given["structured_outputs"] = StructuredOutputsParams(regex=given.pop("regex"))
            params.append(SamplingParams(**{"max_tokens": 48, "ignore_eos": True, **given}))
        before = counts(llm)
        outputs = llm.generate(call["prompts"], params, use_tqdm=False)
        results[name] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "texts": [output.outputs[0].text for output in outputs],
            "logprobs": [chosen_logprobs(output.outputs[0]) for output in outputs],
            **{key: value - before[key] for key, value in counts(llm).items()},
        }
    return results


def chosen_logprobs(output: Any) -> list[list[float]] | None:
    """Give what is reported of each token: its log-probability, then those of the likeliest."""
    if not output.logprobs:
        return None
    return [
        [table[token].logprob, *sorted((v.logprob for v in table.values()), reverse=True)]
        for token, table in zip(output.token_ids, output.logprobs, strict=True)
    ]


def counts(llm: Any) -> dict[str, int]:
    """Count rounds with drafts, and draft tokens accepted, since the engine was built."""
    names = {"drafts": "spec_decode_num_drafts", "accepted": "spec_decode_num_accepted_tokens"}
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {key: values.get(f"vllm:{name}", 0) for key, name in names.items()}


def let_vllm_use_the_interpreter() -> None:
    """Make Triton's interpreter pass for a CPU backend, which the V2 model runner then runs on."""
    import types

    import numpy as np
    from triton.backends import backends
    from triton.runtime import interpreter

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    def with_bool_mask(access: Any, place: int) -> Any:
        def wrapped(self: Any, *arguments: Any) -> Any:
            given = list(arguments)
            mask = given[place]
            if mask.data.dtype != np.bool_:  # the interpreter's loads and stores want one
                given[place] = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return access(self, *given)

        return wrapped

    backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_bool_mask(builder.create_masked_store, 2)


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    job, result = Path(sys.argv[1]), Path(sys.argv[2])
    result.write_text(json.dumps(run(json.loads(job.read_text()))))


if __name__ == "__main__":
    main()
