"""vLLM's rejection sampler and whole steps of its engine, its own against ours, on a CPU.

    make bench-vllm                                    # both, and a record in benchmarks/results
    python benchmarks/bench_vllm.py --what sampler     # in vLLM's environment: one of the two

*sampler*: one call with random logits [B * 5, 128,256], 4 draft tokens a request drawn from a law
near the target's; what the model runner collects for ours beforehand is timed with it. *overhead*
is what the adapter adds to the operator, in a vocabulary so small that the operator takes no time.
*step*: medians over the steps of an engine that runs the shipped pair, widened to 128,256 tokens,
with drawn drafts; an engine is a process of its own.

vLLM's own sampling on CPUs leaves temperature and filters uninitialised (its issue 55005): here it
is timed with that fault repaired. Greedy tokens of both are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python_tests" / "engines"))

import common  # noqa: E402
import vllm_process  # noqa: E402

import specdec_ext  # noqa: E402

V, GAMMA = 128_256, 4
BATCHES = (1, 8, 32)
#: Name to what a request asks for.
SETTINGS: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "T = 0.8": {"temperature": 0.8},
    "T = 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "T = 0.8, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def repair() -> None:
    """Let the CPU's expansion of a request's parameters to its rows write what it computes."""
    from vllm.utils import cpu_triton_utils

    def expand(
        output: Tensor, values: Tensor, ends: Tensor, old: Any, new: Any, MAX_NUM_TOKENS: Any = None
    ) -> None:
        counts = ends.to(torch.int64).diff(prepend=torch.zeros(1, dtype=torch.int64))
        changed = torch.where(values == old, torch.full_like(values, new), values)
        output.copy_(changed.repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


# -------------------------------------------------------------------------------------------------
# One call of the sampler
# -------------------------------------------------------------------------------------------------


class Call:
    """A batch of B requests with GAMMA draft tokens each, for vLLM's sampler and for ours."""

    def __init__(self, batch: int, vocabulary: int, params: dict[str, Any]) -> None:
        from vllm.v1.outputs import SamplerOutput
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        from specdec_ext.engines.vllm.settings import Settings
        from specdec_ext.engines.vllm.v1 import make_step, sampler_class

        generator = torch.Generator().manual_seed(0)
        rows = 4 * torch.randn(batch, GAMMA + 1, vocabulary, generator=generator)
        noise = torch.randn(batch, GAMMA, vocabulary, generator=generator)
        self.draft = rows[:, :GAMMA] + 0.6 * noise
        temperature = params["temperature"] or 1.0
        probs = (self.draft / temperature).softmax(-1)
        # From the filtered law, as our drafts are; theirs would be drawn from `probs`.
        each_row = dict(
            seeds=torch.arange(batch * GAMMA), positions=torch.zeros(batch * GAMMA).long()
        )
        tokens = specdec_ext.sample(self.draft.flatten(0, 1), **each_row, **params).tokens
        drawn = bool(params["temperature"])  # an engine keeps no laws where all are greedy
        self.probs = probs.flatten(0, 1) if drawn else None
        self.logits = rows.flatten(0, 1)
        each = torch.arange(batch)
        inner = (each[:, None] * (GAMMA + 1) + torch.arange(GAMMA)).flatten()
        self.metadata = SpecDecodeMetadata(
            draft_token_ids=tokens.to(torch.int32),
            num_draft_tokens=[GAMMA] * batch,
            cu_num_draft_tokens=((each + 1) * GAMMA).to(torch.int32),
            cu_num_sampled_tokens=((each + 1) * (GAMMA + 1)).to(torch.int32),
            target_logits_indices=inner.to(torch.int32),
            bonus_logits_indices=(each * (GAMMA + 1) + GAMMA).to(torch.int32),
            logits_indices=torch.arange(len(self.logits), dtype=torch.int32),
        )
        self.sampling = sampling_metadata(batch, vocabulary, params)
        self.their_sampler = RejectionSampler(Sampler())
        self.settings = Settings("block")
        self.our_sampler = sampler_class(RejectionSampler, SamplerOutput, self.settings)(Sampler())
        self.our_sampler.specdec.draws_logits = True
        names = [f"request {b}" for b in range(batch)]
        self.runner = SimpleNamespace(
            rejection_sampler=self.our_sampler,
            input_batch=SimpleNamespace(req_ids=names),
            model_config=SimpleNamespace(seed=0),
            requests={n: SimpleNamespace(req_id=n, sampling_params=None) for n in names},
            device=torch.device("cpu"),
            seq_lens=torch.full((batch,), 100, dtype=torch.int32),
            _draft_probs=self.draft if drawn else None,
            _draft_prob_req_ids=names,
        )
        self.make_step = make_step

    def theirs(self, _: int) -> Tensor:
        """Call vLLM's: it gets the draft's laws as probabilities, made while drafting."""
        tokens: Tensor = self.their_sampler(
            self.metadata, self.probs, self.logits, self.sampling
        ).sampled_token_ids
        return tokens

    def ours(self, _: int) -> Tensor:
        """Call ours: it gets the draft's logits where they lie."""
        self.our_sampler.specdec.step = self.make_step(self.runner, self.metadata)
        tokens: Tensor = self.our_sampler(
            self.metadata, None, self.logits, self.sampling
        ).sampled_token_ids
        return tokens

    def operator(self, _: int) -> Tensor:
        """Call the operator alone, as a loop would that has nothing packed."""
        batch = self.draft.shape[0]
        emitted: Tensor = torch.ops.specdec.verify(
            self.logits.view(batch, GAMMA + 1, -1),
            self.tokens,
            self.draft,
            seeds=self.seeds,
            positions=self.seeds,
            temperature=self.temperature,
            rule="block",
        )[0]
        return emitted

    def prepare_operator(self) -> None:
        """Make the operator's arguments, which a loop has anyway."""
        batch = self.draft.shape[0]
        self.tokens = self.metadata.draft_token_ids.view(batch, GAMMA).to(torch.int64)
        self.seeds = torch.arange(batch)
        given = self.sampling.temperature
        self.temperature = torch.zeros(batch) if given is None else given


def sampling_metadata(batch: int, vocabulary: int, params: dict[str, Any]) -> Any:
    """Make vLLM's description of how a batch is sampled."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    greedy = not params["temperature"]

    def each(name: str, dtype: torch.dtype) -> Tensor | None:
        return torch.full((batch,), params[name], dtype=dtype) if name in params else None

    none = torch.empty(0)
    return SamplingMetadata(
        temperature=None if greedy else each("temperature", torch.float32),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=each("top_p", torch.float32),
        top_k=each("top_k", torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@torch.inference_mode()
def time_samplers(batches: tuple[int, ...], budget: float) -> list[dict[str, Any]]:
    """Time a call of both samplers in every setting."""
    records = []
    for batch in batches:
        for name, params in SETTINGS.items():
            call = Call(batch, V, params)
            if not params["temperature"] and not torch.equal(call.theirs(0), call.ours(0)):
                raise RuntimeError(f"greedy tokens differ at B = {batch}")
            load = common.Load()
            times = common.measure({"theirs": call.theirs, "ours": call.ours}, budget=budget)
            records.append(record("sampler", batch, name, times, others=load.share()))
    return records


@torch.inference_mode()
def time_overhead(batches: tuple[int, ...], budget: float) -> list[dict[str, Any]]:
    """Time what the adapter adds to the operator."""
    records = []
    for batch in batches:
        call = Call(batch, 64, SETTINGS["T = 0.8"])
        call.prepare_operator()
        load = common.Load()
        times = common.measure({"operator": call.operator, "ours": call.ours}, budget=budget)
        records.append(record("overhead", batch, "V = 64", times, others=load.share()))
    return records


def record(what: str, batch: int, setting: str, times: Any, **more: Any) -> dict[str, Any]:
    """Put milliseconds of all contestants into one line."""
    line: dict[str, Any] = {"what": what, "B": batch, "setting": setting}
    for name, timing in times.items():
        line[f"{name}_ms"] = round(1e3 * timing.median, 3)
        line[f"{name}_min_ms"] = round(1e3 * timing.min, 3)
    return {**line, **more}


# -------------------------------------------------------------------------------------------------
# Steps of an engine
# -------------------------------------------------------------------------------------------------


def widen(folder: Path) -> None:
    """Give the pair in a folder a vocabulary of V tokens; the added ones are never likely."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    for name in ("target", "draft"):
        where = folder / name
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        with torch.no_grad():
            ids = torch.arange(3, 259)[None]
            hidden = model.model(ids).last_hidden_state[0].mean(0)
        # Where the text is usual, the state is near its mean; against it, logits are low.
        against = -hidden / hidden.norm() ** 2
        weights = load_file(where / "model.safetensors")
        config = json.loads((where / "config.json").read_text())
        added = V - config["vocab_size"]
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        rows = 40 * against + 0.01 * torch.randn(added, len(against))
        weights["lm_head.weight"] = torch.cat([head, rows.to(head.dtype)])
        embedded = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = torch.cat([embedded, embedded[:1].expand(added, -1)])
        config.update(vocab_size=V, tie_word_embeddings=False)
        save_file(weights, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(config))


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Run one engine on B requests in every setting; give milliseconds a step."""
    repair()
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    times: list[float] = []
    execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens

    def timed_execute(self: Any, *given: Any, **named: Any) -> Any:
        self.bench_begin = time.perf_counter()
        return execute(self, *given, **named)

    def timed_sample(self: Any, *given: Any, **named: Any) -> Any:
        output = sample(self, *given, **named)
        times.append(time.perf_counter() - self.bench_begin)
        return output

    GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = timed_execute, timed_sample
    llm = LLM(
        **job["llm"],
        enforce_eager=True,
        max_model_len=256,
        dtype="float32",
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": list(range(300 + i, 330 + i))} for i in range(job["batch"])]
    results: dict[str, Any] = {"sampler": vllm_process.sampler_of(llm)}
    for name, params in {"": SETTINGS["T = 0.8"], **SETTINGS}.items():  # the first warms up
        times.clear()
        before = vllm_process.counts(llm)
        load = common.Load()
        asked = SamplingParams(
            max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **params
        )
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        after = vllm_process.counts(llm)
        if name:
            results[name] = {
                "seconds": times[2:],  # after the prompts, and the first round of drafts
                "others": load.share(),
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                **{key: after[key] - before[key] for key in after},
            }
    return results


def time_steps(batches: tuple[int, ...], tokens: int) -> list[dict[str, Any]]:
    """Time the steps of an engine with vLLM's sampler and of one with ours."""
    records = []
    with tempfile.TemporaryDirectory() as place:
        folder = vllm_process.checkpoints(Path(place) / "pair")
        widen(folder)
        draft = {"method": "draft_model", "model": str(folder / "draft")}
        draft |= {"num_speculative_tokens": GAMMA, "draft_sample_method": "probabilistic"}
        for batch in batches:
            llm = {"model": str(folder / "target"), "speculative_config": draft}
            job = {"llm": {**llm, "max_num_seqs": batch}, "batch": batch, "tokens": tokens}
            both = {name: in_a_process(job, rule) for name, rule in OURS_AND_THEIRS.items()}
            if both["ours"]["T = 0"]["tokens"] != both["theirs"]["T = 0"]["tokens"]:
                raise RuntimeError(f"greedy tokens differ at B = {batch}")
            for name in SETTINGS:
                times = {who: common.summarize(both[who][name]["seconds"]) for who in both}
                more = {f"{who}_accepted": per_round(both[who][name]) for who in both}
                others = max(both[who][name]["others"] or 0.0 for who in both)
                records.append(record("step", batch, name, times, **more, others=others))
    return records


OURS_AND_THEIRS = {"theirs": "", "ours": "block"}


def per_round(result: dict[str, Any]) -> float:
    """Give the draft tokens accepted in a round with drafts."""
    return round(result["accepted"] / max(result["drafts"], 1), 2)


def in_a_process(job: dict[str, Any], rule: str) -> Any:
    """Run a job elsewhere: an engine takes a process for itself, and vLLM an environment."""
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "job.json", Path(place) / "result.json"
        asked.write_text(json.dumps(job))
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        variables = vllm_process.environment(rule, **threads)
        command = [sys.executable, __file__, "--job", asked, answer]
        subprocess.run(command, env=variables, check=True)
        return json.loads(answer.read_text())


def run_job(job: dict[str, Any]) -> Any:
    """Do what `in_a_process` was asked for."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "llm" in job:
        return run_engine(job)
    from vllm.platforms import current_platform

    repair()  # first: registering takes the functions that are there
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    return {"sampler": time_samplers, "overhead": time_overhead}[job["what"]](
        tuple(job["batches"]), job["budget"]
    )


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------

KINDS = ("overhead", "sampler", "step")


def measured(what: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Give the records of one of `KINDS`."""
    if what == "step":
        return time_steps(tuple(args.batches), args.tokens)
    job = {"what": what, "batches": args.batches, "budget": args.budget}
    records: list[dict[str, Any]] = in_a_process(job, "")
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Format what was measured."""
    header = ["what", "requests", "setting", "before, ms", "ours, ms", "ratio", "others' load"]
    rows = []
    for line in records:
        before = line.get("theirs_ms", line.get("operator_ms"))
        ratio = f"{before / line['ours_ms']:.2f}x"
        if line["what"] == "overhead":
            ratio = f"+{line['ours_ms'] - before:.3f} ms"
        load = f"{line['others'] or 0:.0%}"
        rows.append(
            [
                line["what"],
                str(line["B"]),
                line["setting"],
                str(before),
                str(line["ours_ms"]),
                ratio,
                load,
            ]
        )
    return common.markdown_table(header, rows)


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--what", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds a cell")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--tokens", type=int, default=48, help="of each request of an engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a record: this path with .csv, .json and .md")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.job:
        job, answer = args.job
        answer.write_text(json.dumps(run_job(json.loads(job.read_text()))))
        return
    records = [line for what in args.what or KINDS for line in measured(what, args)]
    print(table(records))
    if args.out:
        import vllm

        facts = {**common.machine_facts(), "vllm": vllm.__version__, "command": sys.argv}
        common.write_record(args.out, facts, records, table(records))


if __name__ == "__main__":
    main()
