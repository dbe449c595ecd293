"""Time `specdec_ext.tree_attention` against a dense mask, FlexAttention and FlashInfer.

    python benchmarks/bench_tree_attention.py --quick    # a few settings, under two minutes
    python benchmarks/bench_tree_attention.py            # the grid
    python benchmarks/bench_tree_attention.py --device cuda

Every contestant is first compared with the float64 reference on the inputs that are timed; what
differs by more than rounding is not timed, and the exit code is 1. All read the same caches, which
lie as those of Hugging Face do, [B, Hkv, L, D]; FlashInfer, where it is installed and there is a
GPU, gets copies that lie as it likes them. The masks (a dense one in q's dtype, FlexAttention's of
blocks, FlashInfer's of bits with its plan) are made beforehand, outside the timing: a loop has to
make a new one for every tree.

Bars: on the CPU no slower than ``scaled_dot_product_attention``; on a GPU 1.5 times as fast at
N = 64, L = 8,192.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import specdec_ext
from specdec_ext import reference

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402
from gpu import peers, tables  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
OURS, DENSE, FLEX = "specdec_ext", "sdpa, dense mask", "flex_attention, compiled"
FLASHINFER = "flashinfer, custom mask"
HEAD_SIZE = 128
PAGE = 16


@dataclass(frozen=True)
class Setting:
    """One point of the grid; prefixes fill the cache but for the tree."""

    batch: int
    nodes: int
    heads: int
    key_heads: int
    places: int
    dtype: str
    ragged: bool = False
    cache: str = ""  # what engines have: "paged", "float8"; the others get keys as they are

    def label(self) -> str:
        """Say it on one line."""
        ragged = " ragged" * self.ragged + f" {self.cache}" * bool(self.cache)
        return (
            f"B={self.batch} N={self.nodes} H={self.heads}/{self.key_heads} D={HEAD_SIZE} "
            f"L={self.places} {self.dtype}{ragged}"
        )


def bar(setting: Setting, device: torch.device) -> float | None:
    """Give the ratio to the dense mask that the project asks for, which reads no such caches."""
    if setting.cache:
        return None
    if device.type == "cpu":
        return 1.0
    return 1.5 if (setting.nodes, setting.places) == (64, 8192) else None


def grid(quick: bool, device: torch.device) -> list[Setting]:
    """List the settings."""
    if quick:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        return [
            Setting(1, 64, 32, 8, 8192, dtype),
            Setting(1, 64, 8, 8, 8192, dtype),
            Setting(2, 16, 32, 8, 2048, dtype, True),
            Setting(1, 64, 32, 8, 8192, dtype, cache="paged"),
            Setting(1, 64, 32, 8, 8192, dtype, cache="float8"),
        ]
    shapes = itertools.product((1, 4), (16, 64, 256), ((32, 8), (32, 32)), (1024, 8192))
    dtypes = ("float32", "bfloat16") if device.type == "cpu" else ("bfloat16",)
    return [
        Setting(batch, nodes, *heads, places, dtype, ragged)
        for batch, nodes, heads, places in shapes
        for dtype in dtypes
        for ragged in ((False, True) if batch > 1 else (False,))
    ]


def make_call(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """Make the arguments: random trees, of which the last is padded."""
    generator = torch.Generator().manual_seed(0)
    s = setting
    parents = torch.full((s.batch, s.nodes), -1)
    for v in range(1, s.nodes):
        parents[:, v] = torch.randint(v, (s.batch,), generator=generator)
    parents[-1, s.nodes - s.nodes // 8 :] = -1
    ancestors = specdec_ext.tree_mask(parents).ancestors.to(device)
    q, k, v = (
        torch.randn(s.batch, h, n, HEAD_SIZE, generator=generator).to(device, DTYPES[s.dtype])
        for h, n in ((s.heads, s.nodes), (s.key_heads, s.places), (s.key_heads, s.places))
    )
    lens = torch.full((s.batch,), s.places - s.nodes)
    if s.ragged:
        lens -= torch.arange(s.batch) * (s.places // (2 * s.batch))
    if s.cache == "float8":  # numbers that such a cache holds, for all
        k, v = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v))
    turned = (t.transpose(1, 2) for t in (q, k, v))
    return dict(
        zip(("q", "k_cache", "v_cache"), turned, strict=True),
        ancestors=ancestors,
        seq_lens=lens.to(device),
    )


def in_cache(setting: Setting, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the arguments with keys and values as the setting's cache holds them."""
    caches = {name: call[name] for name in ("k_cache", "v_cache")}
    if setting.cache == "float8":
        caches = {name: t.to(torch.float8_e4m3fn) for name, t in caches.items()}
    if setting.cache == "paged":
        pages = -(-setting.places // PAGE)
        order = torch.randperm(setting.batch * pages, generator=torch.Generator().manual_seed(1))
        order = order.to(call["q"].device)
        for name, t in caches.items():
            padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * PAGE - setting.places))
            blocks = padded.reshape(-1, PAGE, *t.shape[2:])
            caches[name] = torch.empty_like(blocks).index_copy_(0, order, blocks)
        caches["block_table"] = order.view(setting.batch, pages).int()
    return {**call, **caches}


def contestants(setting: Setting, call: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Give what is timed; all return [B, N, H, D], and may prepare themselves at the first call."""
    q, k, v = (call[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))
    where: dict[str, Any] = dict(
        prefix_lens=call["seq_lens"], prefix_width=setting.places - setting.nodes, layout="packed"
    )
    dense = specdec_ext.dense_tree_mask(call["ancestors"], **where, dtype=q.dtype)
    grouped = setting.heads != setting.key_heads
    mod = specdec_ext.tree_mask_mod(call["ancestors"], **where)
    blocks = create_block_mask(
        mod, setting.batch, None, setting.nodes, setting.places, device=q.device
    )
    flex = torch.compile(flex_attention, fullgraph=True)

    held: dict[str, Any] = in_cache(setting, call)

    def ours() -> Tensor:
        return specdec_ext.tree_attention(**held)

    def masked() -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=grouped)
        return out.transpose(1, 2)

    def flexible() -> Tensor:
        return flex(q, k, v, block_mask=blocks, enable_gqa=grouped).transpose(1, 2)

    found = {OURS: ours, DENSE: masked, FLEX: flexible}
    if q.is_cuda and peers.missing("flashinfer") is None:
        found[FLASHINFER] = Flashinfer(call, where)
    return found


class Flashinfer:
    """FlashInfer's attention, planned at the first call: what it cannot do, it says there."""

    def __init__(self, call: dict[str, Tensor], where: dict[str, Any]) -> None:
        self.call, self.where = call, where
        self.run: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        if self.run is None:
            call = self.call
            allowed = specdec_ext.dense_tree_mask(call["ancestors"], **self.where, dtype=torch.bool)
            lengths = (call["seq_lens"] + call["q"].shape[1]).tolist()
            caches = (call["k_cache"], call["v_cache"])
            self.run = peers.flashinfer_attention(call["q"], *caches, allowed[:, 0], lengths)
        return self.run()


def check(name: str, found: Tensor, expected: Tensor, padding: Tensor) -> str:
    """Say what is wrong, "" if nothing is. Padding nodes are ours alone to define."""
    wrong = (found.double() - expected.double()).abs()
    if name != OURS:
        wrong = wrong.masked_fill(padding[..., None, None], 0.0)
    bound = TOLERANCE[found.dtype] * max(1.0, float(expected.abs().max()))
    error = float(wrong.max())
    return "" if error <= bound else f"{name} differs from the reference by {error:.2e}"


def run(setting: Setting, device: torch.device, budget: float) -> tuple[dict[str, Any], bool]:
    """Check and time one setting; give the record, and whether all were right."""
    call = make_call(setting, device)
    expected = reference.tree_attention(**call).out
    padding = (call["ancestors"] == 0).all(2)
    right, timed = True, {}
    for name, contestant in contestants(setting, call).items():
        try:
            fault = check(name, contestant(), expected, padding)
        except Exception as error:  # they do not compile everywhere
            if name not in (FLEX, FLASHINFER):
                raise
            print(f"  {name} left out: {str(error).splitlines()[0][:120]}")
            continue
        if fault:
            print(f"  {fault}")
            right = False
        else:
            timed[name] = lambda _, contestant=contestant: contestant()
    load = common.Load()
    timings = common.measure(timed, budget=budget, device=device)
    facts = {"setting": setting.label(), "others": load.share()}
    record: dict[str, Any] = {**asdict(setting), **facts}
    for name, timing in timings.items():
        record[f"{name} median ms"] = timing.median * 1e3
        record[f"{name} min ms"] = timing.min * 1e3
    if OURS in timings and DENSE in timings:
        record["ratio"] = timings[DENSE].median / timings[OURS].median
        record["bar"] = bar(setting, device)
    return record, right


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few settings")
    parser.add_argument("--first", type=int, metavar="K", help="only the first K settings")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds a setting")
    parser.add_argument("--out", type=Path, help="write a record: a path without suffix")
    options = parser.parse_args()
    device = torch.device(options.device)
    records, all_right = [], True
    for setting in grid(options.quick, device)[: options.first]:
        print(setting.label(), flush=True)
        record, right = run(setting, device, options.budget)
        records.append(record)
        all_right = all_right and right
        if options.out is not None:  # after each setting: a time limit may end this
            common.write_record(options.out, common.machine_facts(), records)
    print(tables.attention_table(records))
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
