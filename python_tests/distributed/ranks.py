"""Jobs for several processes that hold a vocabulary together, and how they are started.

    python python_tests/distributed/ranks.py --cases 10000    # more cases than the tests run

A job is a function of this file that every process calls with the same arguments; what it returns
comes back from each. Processes meet in a file, and are ended when they take too long.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import specdec_ext
from specdec_ext.distributed import TILE, even_bounds, sharded, verify_sharded
from specdec_ext.distributed.exchange import Exchange
from specdec_ext.testing import VerifyCase, make_case

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("target_logits", "draft_logits", "draft_probs")
OUTPUTS = ("tokens", "num_accepted", "logprobs", "accept_probs", "status")


# ---- processes -----------------------------------------------------------------------------------


def start(
    jobs: dict[str, tuple[str, dict[str, Any]]],
    ranks: int,
    timeout: float = 240.0,
    script: str = __file__,
    backend: str = "gloo",
) -> list[dict[str, Any]]:
    """Run jobs, one after the other, in as many processes; returns what each has returned.

    ``jobs`` has a function's name and its arguments for each name of a result; ``script`` has the
    functions, and hands its option ``--order`` to `obey`. With nccl each has a GPU.

    Raises
    ------
    RuntimeError
        One of them has failed, or they took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        if backend == "gloo":  # Triton's kernels run on CPU tensors too
            environment["TRITON_INTERPRET"] = "1"
        orders = [
            json.dumps([jobs, rank, ranks, timeout, folder, backend]) for rank in range(ranks)
        ]
        running = [
            subprocess.Popen(
                [sys.executable, script, "--order", order],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for order in orders
        ]
        end = time.monotonic() + timeout
        try:
            errors = [p.communicate(timeout=max(1.0, end - time.monotonic()))[1] for p in running]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{list(jobs)} took longer than {timeout} seconds") from None
        finally:
            for process in running:
                process.kill()
        failed = [e for p, e in zip(running, errors, strict=True) if p.returncode != 0]
        if failed:
            raise RuntimeError("\n".join(error[-3000:] for error in failed))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def obey(order: str, functions: dict[str, Any]) -> None:
    """Run jobs as one of their processes."""
    jobs, rank, ranks, timeout, folder, backend = json.loads(order)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(folder, "meeting")), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    results = {name: functions[job](**arguments) for name, (job, arguments) in jobs.items()}
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


# ---- cases ---------------------------------------------------------------------------------------


class Pick:
    """Choices that a number determines."""

    def __init__(self, number: int) -> None:
        self.generator = torch.Generator().manual_seed(number)

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.generator))

    def of(self, *choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(torch.rand((), generator=self.generator) < share)


VOCABULARIES = (1, 2, 5, 33, 127, 129, 1000, 4095, 4096, 4097, 8192, 9001, 12289, 20000)


def sharded_case(number: int) -> VerifyCase:
    """A call of `verify` of any kind: rules, laws, filters, masks, packed rows, bad values."""
    pick = Pick(number)
    vocab = pick.of(*VOCABULARIES)
    around = (vocab, max(1, vocab - 1), vocab + 1, max(1, vocab // 2), vocab + 4100)
    case = make_case(
        number,
        batch=pick.of(1, 2, 3, 4) if number % 50 else 0,
        gamma=pick.of(0, 1, 2, 3, 4),
        vocab=vocab,
        draft_vocab=pick.of(None, None, None, *around),
        rule=pick.of(*specdec_ext.ops.RULES, "block"),
        dtype=pick.of(torch.float32, torch.bfloat16, torch.bfloat16, torch.float16),
        draft_dtype=pick.of(None, None, torch.float32, torch.bfloat16),
        layout=pick.of("contiguous", "transposed", "padded"),
        packed=pick.chance(0.25),
        draft=pick.of("logits", "logits", "logits", "probs", "none"),
        kinds=pick.of(None, None, "mixed", "deterministic"),
        philox=pick.chance(0.5),
        filters=pick.chance(0.6),
        draft_filters=pick.chance(0.3),
        id_dtype=pick.of(torch.int64, torch.int32),
        allowed_mask=pick.chance(0.25),
        full_accept_probs=pick.chance(0.5),
        raw_logprobs=pick.chance(0.3),
        lenience=pick.of(1.0, 0.5),
        beta=pick.of(1, 3, 40),
        tau=pick.of(0.0, 1.0, 30.0),
        epsilon=pick.of(0.09, 0.7),
        delta=pick.of(0.3, 2.0),
    )
    inputs = dict(case.inputs)
    for name in ("top_k", "draft_top_k"):
        if name in inputs and pick.chance(0.6):  # few logits, or histograms
            inputs[name] = torch.tensor(
                [pick.of(3, 50, 300, 512, 513, 2000) for _ in inputs[name]], dtype=torch.int64
            )
    if pick.chance(0.25):  # ties, more than any short list holds
        for name in ("target_logits", "draft_logits"):
            if name in inputs:
                inputs[name] = inputs[name].mul(pick.of(0.5, 2)).round()
    if pick.chance(0.2):
        spoil(inputs, pick)
    return VerifyCase(inputs, case.name)


def spoil(inputs: dict[str, Any], pick: Pick) -> None:
    """Put values somewhere that only the status reports."""
    names = [n for n in (*ROWS, "uniforms", "temperature", "top_p") if n in inputs]
    name = pick.of(*names)
    values = inputs[name].clone()
    bad = float(pick.of("nan", "inf", "-inf", -1.0))
    if values.numel() == 0:
        return
    values[tuple(pick.below(n) for n in values.shape)] = bad
    inputs[name] = values


def make_bounds(pick: Pick, vocab: int, ranks: int) -> list[int]:
    """Where parts begin: anywhere, evenly, at tiles, or next to tiles."""
    style = pick.below(4)
    if style == 0:
        inner = [pick.below(vocab + 1) for _ in range(ranks - 1)]
    elif style == 1:  # as DTensor splits
        inner = [min(vocab, -(-vocab // ranks) * r) for r in range(1, ranks)]
    elif style == 2:
        return even_bounds(vocab, ranks)
    else:
        inner = [
            min(vocab, max(0, pick.below(vocab // TILE + 1) * TILE + pick.of(-1, 1)))
            for _ in range(ranks - 1)
        ]
    return [0, *sorted(inner), vocab]


def part_of(name: str, rows: torch.Tensor, bounds: list[int], rank: int) -> torch.Tensor:
    """A rank's columns; of the draft's, those that go with the target's."""
    width = rows.shape[-1]
    begin, end = (min(bound, width) for bound in bounds[rank : rank + 2])
    if name != "target_logits" and rank + 2 == len(bounds):
        end = width
    return rows[..., begin:end]


def local_inputs(
    inputs: dict[str, Any], bounds: list[int], rank: int, contiguous: bool = False
) -> dict[str, Any]:
    """The inputs of one rank."""
    parts = {k: part_of(k, v, bounds, rank) for k, v in inputs.items() if k in ROWS}
    if contiguous:
        parts = {k: v.contiguous() for k, v in parts.items()}
    return {**inputs, **parts, "vocab_start": bounds[rank]}


def moved(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """The inputs on a device, with their strides."""
    if device == "cpu":
        return dict(inputs)
    from gpu_checks import placed

    return {name: placed(value, torch.device(device)) for name, value in inputs.items()}


def differences(got: Any, expected: Any) -> list[str]:
    """Names of the outputs that are not the same to the bit."""
    return [
        name
        for name, a, b in zip(OUTPUTS, got, expected, strict=True)
        if a.dtype != b.dtype
        or not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    ]


def groups() -> list[Any]:
    """Groups of the first 1, 2, ... ranks."""
    return [dist.new_group(list(range(n + 1))) for n in range(dist.get_world_size())]


# ---- kernels -------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One implementation of the call, and of what it is compared with."""

    sharded: Callable[..., Any]
    whole: Callable[..., Any]
    device: str = "cpu"


def sharded_on_triton(
    *, group: Any = None, vocab_start: int | None = None, **inputs: Any
) -> specdec_ext.VerifyResult:
    """`verify_sharded` by Triton's kernels wherever the tensors are."""
    names = inspect.signature(verify_sharded).parameters
    defaults = {n: p.default for n, p in names.items() if n not in ("group", "vocab_start")}
    given = {**defaults, "draft_token_ids": None, "draft_probs_ids": None, **inputs}
    return sharded._verify(given, vocab_start, group, on_triton=True)


def whole_on_triton(**inputs: Any) -> specdec_ext.VerifyResult:
    """`verify` by Triton's kernels."""
    return specdec_ext.verify(**inputs, backend="triton")


def whole_in_interpreter(**inputs: Any) -> specdec_ext.VerifyResult:
    """`verify` by Triton's interpreter, which is slow: one rank runs it for all."""
    outputs = [whole_on_triton(**inputs) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outputs)
    assert outputs[0] is not None
    return outputs[0]


WAYS = {
    "cpu": Way(verify_sharded, specdec_ext.verify),
    "triton": Way(sharded_on_triton, whole_in_interpreter),
    "gpu": Way(verify_sharded, whole_on_triton, "cuda"),
}


# ---- jobs ----------------------------------------------------------------------------------------


def compare(
    first: int = 0,
    count: int = 0,
    control: str = "",
    way: str = "cpu",
    numbers: list[int] | None = None,
) -> dict[str, Any]:
    """Compare `verify_sharded` with `verify` in cases ``first``, ``first + 1``, ..., or others."""
    if way != "cpu":
        sys.path.insert(0, str(ROOT / "python_tests" / "helpers"))
    if way == "triton":
        import_module("interpreter").speed_up()
    rank, wrong, seen = dist.get_rank(), [], Counter()
    group_of = groups()
    run, whole, device = WAYS[way]
    together = whole is whole_in_interpreter
    for number in numbers or range(first, first + count):
        pick = Pick(number)
        ranks = 1 + pick.below(dist.get_world_size())
        if control:
            ranks = dist.get_world_size()
        case = sharded_case(number)
        inputs = moved(case.inputs, device)
        if together or rank < ranks:
            expected = whole(**inputs)
        if rank >= ranks:
            continue
        vocab = inputs["target_logits"].shape[-1]
        bounds = make_bounds(pick, vocab, ranks)
        local = local_inputs(inputs, bounds, rank, pick.chance(0.3))
        with broken(control):
            got = run(**local, group=group_of[ranks - 1])
        found = differences(got, expected)
        if found:
            wrong.append(f"{number}, {ranks} ranks {bounds}, {case.name}: {found}")
        seen.update([f"ranks {ranks}", f"rule {inputs['rule']}"])
        seen.update([f"{k} of {v}" for k, v in counts_of(expected).items() if v])
        seen["borders inside tiles"] += any(b % TILE for b in bounds[1:-1])
        seen["empty parts"] += len(set(bounds)) <= ranks
        seen["several tiles"] += vocab > TILE
    return {"wrong": wrong, "seen": dict(seen)}


def counts_of(result: Any) -> dict[str, str]:
    """What a result shows of the paths it took."""
    bits = {bit for status in result.status.tolist() for bit in (1, 2, 4, 8) if status & bit}
    return {f"status {bit}": "requests" for bit in bits}


@contextmanager
def broken(control: str) -> Iterator[None]:
    """Plant a mistake that a comparison has to find."""
    if not control:
        yield
        return
    name, replacement = CONTROLS[control]
    target = Exchange if name in ("gather", "swap") else sharded
    original = getattr(target, name)
    setattr(target, name, replacement(original))
    try:
        yield
    finally:
        setattr(target, name, original)


def _in_wrong_order(original: Any) -> Any:
    def tails(exchange: Any, parts: Any) -> Any:
        found = original(exchange, parts)
        return [None if tail is None else tail.flip(-1).contiguous() for tail in found]

    return tails


def _one_further(original: Any) -> Any:
    def swap(self: Any, sent: Any, sizes: Any) -> Any:
        return [piece.roll(2) for piece in original(self, sent, sizes)]

    return swap


def _ranks_reversed(original: Any) -> Any:
    def gather(self: Any, mine: Any) -> Any:
        found = original(self, mine)
        return found.flip(0) if mine.dtype == torch.uint8 else found

    return gather


def _one_off(original: Any) -> Any:
    def run(exchange: Any, local: Any, table: Any) -> Any:
        rows = local.arguments["target_logits"]
        if exchange.rank == 1:
            rows = rows.roll(1, -1)
        return original(
            exchange, local._replace(arguments={**local.arguments, "target_logits": rows}), table
        )

    return run


#: Mistakes by their names: what is replaced, and by what.
CONTROLS = {
    "a border tile in the wrong order": ("complete_tiles", _in_wrong_order),
    "a border's logits one place further": ("swap", _one_further),
    "tiles combined in another order of ranks": ("gather", _ranks_reversed),
    "a part one entry off": ("_run", _one_off),
}


def wait_for_nothing() -> dict[str, Any]:
    """On a GPU: once the ranks agree, nothing on the host waits for the device."""
    rank = dist.get_rank()
    inputs = moved({**usual(), "temperature": 0.7, "top_k": 40, "top_p": 0.9}, "cuda")
    bounds = [*(13 * r for r in range(dist.get_world_size())), 50]
    run, local = sharded._run, local_inputs(inputs, bounds, rank)
    expected = verify_sharded(**local)  # kernels are compiled and loaded

    def without_waiting(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    sharded._run = without_waiting
    try:
        wrong = differences(verify_sharded(**local), expected)
    finally:
        sharded._run = run
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.zeros(1, device="cuda").item()
        seen = False
    except RuntimeError:
        seen = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"wrong": wrong, "a wait is seen": seen}


# ---- refusals ------------------------------------------------------------------------------------


def usual() -> dict[str, Any]:
    """A call that nothing is wrong with."""
    case = make_case(1, batch=2, gamma=2, vocab=50, filters=True, draft="logits")
    return dict(case.inputs)


def some_bounds() -> list[int]:
    """Where the parts of that call begin, for up to four ranks."""
    return [*(13 * rank for rank in range(dist.get_world_size())), 50]


def _off(change: Any) -> Any:
    """What a rank's arguments are spoiled with, if it is the last rank."""
    return lambda local, rank, last: {**local, **change(local)} if rank == last else local


REFUSALS = {
    "other seeds": (_off(lambda a: {"uniforms": a["uniforms"] * 0.5}), "uniforms must be the same"),
    "another rule": (_off(lambda a: {"rule": "token"}), "rule must be the same on all ranks"),
    "another filter": (_off(lambda a: {"top_p": 0.5}), "top_p must be the same on all ranks"),
    "an unknown rule": (_off(lambda a: {"rule": "tokens"}), "rule must be one of"),
    "another dtype": (
        _off(lambda a: {"target_logits": a["target_logits"].half()}),
        "target_logits: dtype and shape",
    ),
    "a gap": (_off(lambda a: {"vocab_start": a["vocab_start"] + 1}), "leave a gap"),
    "an overlap": (_off(lambda a: {"vocab_start": a["vocab_start"] - 1}), "neither overlap"),
    "fewer rows": (
        _off(lambda a: {"target_logits": a["target_logits"][:, :-1]}),
        "target_logits must be",
    ),
    "no draft": (
        _off(lambda a: {"draft_logits": None, "draft_temperature": None}),
        "draft_logits: dtype and shape",
    ),
    "a draft split elsewhere": (
        lambda local, rank, last: (
            local if rank else {**local, "draft_logits": local["draft_logits"][..., 1:]}
        ),
        "must be split as the target's",
    ),
    "no tensor": (_off(lambda a: {"target_logits": [1.0]}), "must be a Tensor"),
    "another device": (
        _off(lambda a: {"target_logits": a["target_logits"].to("meta")}),
        "must be on",
    ),
    "a mask too narrow": (
        lambda local, rank, last: {
            **local,
            "allowed_mask": torch.ones(2, 3, 1, dtype=torch.int32, device=local["uniforms"].device),
        },
        "allowed_mask must be",
    ),
    "no randomness": (
        lambda local, rank, last: {**local, "uniforms": None},
        "expected uniforms, or seeds",
    ),
}


def refuse(way: str = "cpu") -> dict[str, Any]:
    """Spoil a call in each way, on one rank or on all, and then call rightly."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    run, whole, device = WAYS[way]
    inputs, said = moved(usual(), device), {}
    bounds = some_bounds()
    for name, (spoiled, _) in REFUSALS.items():
        local = spoiled(local_inputs(inputs, bounds, rank), rank, last)
        try:
            run(**local)
            said[name] = ["nothing", ""]
        except (ValueError, TypeError) as error:
            said[name] = [type(error).__name__, str(error)]
    after = differences(run(**local_inputs(inputs, bounds, rank)), whole(**inputs))
    return {"said": said, "after": after}


def fail_inside() -> str:
    """A collective that fails in the middle of a call is what comes out of it."""

    def failing(self: Any, mine: Any) -> Any:
        raise ConnectionError("the line is cut")

    inputs = usual()
    original, Exchange.total = Exchange.total, failing
    try:
        verify_sharded(**local_inputs(inputs, some_bounds(), dist.get_rank()))
    except ConnectionError as error:
        return str(error)
    finally:
        Exchange.total = original
    return "nothing"


# ---- bytes ---------------------------------------------------------------------------------------


class Handed:
    """Bytes that this process hands to collectives, whoever calls them."""

    NAMES = ("all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single")

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Handed:
        self.originals = {n: getattr(dist, n) for n in self.NAMES if hasattr(dist, n)}
        for name, original in self.originals.items():
            setattr(dist, name, self.counting(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def counting(self, name: str, original: Any) -> Any:
        place = 0 if name == "all_reduce" else 1  # of what is sent

        def call(*arguments: Any, **named: Any) -> Any:
            self.bytes[name] += arguments[place].nbytes
            self.calls[name] += 1
            return original(*arguments, **named)

        return call


def hand(vocab: int, even: bool, rule: str, **filters: Any) -> dict[str, Any]:
    """Count what one call hands to collectives, and what an all-gather of its logits would."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 4, vocab, generator=generator).mul(3).bfloat16()
    draft = (target[:, :3] + 0.5).bfloat16()
    inputs = {
        **dict(target_logits=target, draft_logits=draft, draft_tokens=target[:, :3].argmax(-1)),
        **dict(rule=rule, seeds=torch.arange(2), positions=torch.arange(2), **filters),
    }
    if even:
        bounds = even_bounds(vocab, ranks)
    else:
        bounds = [min(vocab, -(-vocab // ranks) * r) for r in range(ranks + 1)]
    local = local_inputs(inputs, bounds, rank)
    with Handed() as handed:
        got = verify_sharded(**local)
    return {
        "bytes": dict(handed.bytes),
        "calls": dict(handed.calls),
        "logits": local["target_logits"].nbytes + local["draft_logits"].nbytes,
        "wrong": differences(got, specdec_ext.verify(**inputs)),
    }


# ---- DTensors ------------------------------------------------------------------------------------


def distributed_tensors(vocab: int) -> dict[str, Any]:
    """DTensors sharded on their last dimension, and those that are not."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    inputs = dict(make_case(3, batch=2, gamma=3, vocab=vocab, draft="logits").inputs)
    expected = specdec_ext.verify(**inputs)

    def sharded(name: str, placement: Any) -> DTensor:
        return distribute(inputs[name].contiguous(), mesh, placement)

    rows = {k: sharded(k, Shard(2)) for k in ROWS if k in inputs}
    wrong = differences(verify_sharded(**{**inputs, **rows}), expected)
    rows["uniforms"] = sharded("uniforms", Replicate())
    wrong += differences(verify_sharded(**{**inputs, **rows}), expected)
    said = []
    for placement in (Shard(0), Replicate()):
        try:
            verify_sharded(**{**inputs, "target_logits": sharded("target_logits", placement)})
        except ValueError as error:
            said.append(str(error))
    two = init_device_mesh("cpu", (ranks // 2, 2)) if ranks % 2 == 0 else None
    if two is not None:  # two groups that each hold everything
        both = {
            k: distribute(inputs[k].contiguous(), two, Replicate(), Shard(-1))
            for k in ROWS
            if k in inputs
        }
        wrong += differences(verify_sharded(**{**inputs, **both}), expected)
    return {"wrong": wrong, "said": said}


def distribute(values: torch.Tensor, mesh: Any, *placements: Any) -> DTensor:
    """A DTensor of a tensor that all ranks have."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, mesh, list(placements))


# ---- command -------------------------------------------------------------------------------------


def main() -> None:
    """Compare many cases, in four processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--order")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if options.order:
        obey(options.order, globals())
        return
    begin = time.monotonic()
    arguments = {"first": options.first, "count": options.cases}
    results = [
        result["cases"]
        for result in start({"cases": ("compare", arguments)}, options.ranks, 7200.0)
    ]
    wrong = sorted({line for result in results for line in result["wrong"]})
    print(f"{options.cases} cases, {time.monotonic() - begin:.0f} s: {len(wrong)} differ")
    print("\n".join(wrong[:20]))
    for name, count in sorted(results[0]["seen"].items()):
        print(f"{name}: {count}")
    sys.exit(len(wrong) > 0)


if __name__ == "__main__":
    main()
