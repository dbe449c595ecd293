"""Every Triton kernel compiles to machine code, GPU or not.

The interpreter runs kernels as numpy, which takes more than Triton's compiler does. Here real
launches, on CPU tensors whose data nothing reads, go to the compiler alone: the same arguments, so
the same signatures and specialisations as on a GPU.

It tests the Triton that Python finds; `make triton-floor` runs it with the oldest one supported.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import pkgutil, sys
from importlib import import_module

import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import code_generator
from triton.runtime import driver

import specdec_ext.triton as backend
from specdec_ext.triton import sharded
from specdec_ext.testing import make_case
from specdec_ext.testing import make_tree_case

kind, arch, warp, *extents = sys.argv[1:]
arch = int(arch) if arch.isdigit() else arch
# Bytes of a program.
SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024, "gfx942": 64 * 1024}


class Driver:
    def get_current_target(self):
        return GPUTarget(kind, arch, int(warp))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


# Within branches and loops, Triton 3.6 works on clones of what a scope holds, made by their types:
# a constant that a type does not know is None there, without a word.
clone = getattr(code_generator, "_clone_triton_value", None)


def clone_all(value):
    made = clone(value)
    assert str(made) == str(value), f"{value} became {made} in a branch or loop"
    return made


if clone is not None:
    code_generator._clone_triton_value = clone_all

# A loop carries the names whose values have changed when its body was tried out. A name that its
# body sets to another's value has not, where both had one value before (Triton 3.6 to 3.9): it is
# then what it was before the loop, in every round and afterwards. So what a loop does not carry
# must have its value when the body ends.
generator, region, loops = code_generator.CodeGenerator, code_generator.enter_sub_region, {}
find_carries, leave, looked_at = generator._find_carries, region.__exit__, set()


def find_and_note(self, node, liveins, ignore=frozenset()):
    found = find_carries(self, node, liveins, ignore)
    loops[id(liveins)] = {*found[0], *ignore}
    return found


def handles_of(value):
    return code_generator.flatten_values_to_ir([value])


def check_and_leave(self, error=None, *rest):
    carried = loops.pop(id(self.liveins), None)
    if carried is not None and error is None:
        looked_at.add(self.generator.function_name)
        for name, before in self.liveins.items():
            if name not in carried and code_generator._is_triton_value(before):
                after = self.generator.lscope[name]
                assert handles_of(after) == handles_of(before), f"a loop does not carry {name}"
    return leave(self, error, *rest)


generator._find_carries, region.__exit__ = find_and_note, check_and_leave
driver.set_active(Driver())
backend.is_interpreted = lambda: True  # lets CPU tensors pass
attention = import_module("specdec_ext.triton.tree_attention")
attention.shared_memory = lambda device: SHARED_MEMORY[arch]
run, compiled = triton.JITFunction.run, {}


def compile_only(kernel, *args, grid, warmup, **options):
    made = run(kernel, *args, grid=grid, warmup=True, **options)
    binary = made.asm["cubin" if kind == "cuda" else "hsaco"]
    assert len(binary) > 500, kernel.__name__
    assert made.metadata.shared <= SHARED_MEMORY[arch], (kernel.__name__, made.metadata.shared)
    compiled.setdefault(kernel.__name__, set()).add(made.hash)


triton.JITFunction.run = compile_only
operators = torch.ops.specdec_triton
f16, bf16, i32 = torch.float16, torch.bfloat16, torch.int32
filters = dict(
    temperature=torch.ones(2), top_k=torch.ones(2, dtype=torch.int64), top_p=torch.ones(2),
    min_p=torch.ones(2),
)
seeds = torch.ones(2, dtype=torch.int64)
row = torch.zeros(2, 32_000, dtype=bf16)
words, ids = torch.zeros(2, 1000, dtype=i32), torch.arange(999, dtype=i32)
at = dict(seeds=seeds, positions=seeds)


def verify(rule, **options):
    case = make_case(0, **{"rule": rule, "batch": 2, "gamma": 3, "vocab": 2048, **options})
    operators.verify(**case.inputs)


def verify_tree(rule, **options):
    case = make_tree_case(0, **{"rule": rule, "batch": 2, "nodes": 9, "vocab": 2048, **options})
    operators.verify_tree(**case.inputs)


# Two ranks beside this one, as far as the shapes of what they send go.
class Others:
    rank, size = 1, 3

    def gather(self, mine):
        return mine.repeat(3, 1)

    def total(self, mine):
        return mine


def verify_part(rule, bounds=(0, 4100, 8300, 9001), **options):
    case = make_case(0, **{"rule": rule, "batch": 2, "gamma": 3, "vocab": 9001, **options})
    schema = torch.ops.specdec.verify.default._schema.arguments
    given = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    given.update(case.inputs)
    parts = {}
    for name in ("target_logits", "draft_logits", "draft_probs"):
        if given[name] is None:
            continue
        rows, cut = given[name], bounds[2] // 4096 * 4096
        tail = rows[..., cut : cut + 4096].contiguous() if bounds[2] > cut else None
        given[name] = rows[..., bounds[1] : bounds[2]]
        parts[name] = sharded.Part(given[name], list(bounds), tail)
    draft = parts.get("draft_logits", parts.get("draft_probs"))
    sharded.verify_parts(Others(), given, parts["target_logits"], draft)


def search_beams(width, nodes, vocab, dtype, eos=0, id_dtype=torch.int64, **options):
    rows, ids = torch.zeros(2, nodes, vocab, dtype=dtype), torch.zeros(2, nodes, dtype=id_dtype)
    ends = torch.zeros(eos, dtype=torch.int64) if eos > 0 else None
    scores = torch.zeros(2, width)
    operators.beam_verify(rows, scores, ids, ids, 1, eos_token_ids=ends, **options)


def attend(
    nodes, size, dtype, places=9000, heads=8, key_heads=2, value_size=None, cached=None, page=0,
    latent=False, **options,
):
    q = torch.zeros(2, nodes, heads, size, dtype=dtype)
    shape = (700, page, key_heads) if page else (2, places, key_heads)
    keys, values = (
        torch.zeros(*shape, n, dtype=cached or dtype) for n in (size, value_size or size)
    )
    if latent:
        values = keys[..., :value_size]
    if page:
        options["block_table"] = torch.zeros(2, -(-places // page), dtype=i32)
    bits = torch.zeros(2, nodes, (nodes + 63) // 64, dtype=torch.int64)
    operators.tree_attention(q, keys, values, bits, seeds, **options)


if "every kernel" in extents:
    verify("block", dtype=bf16, draft_filters=True)
    verify("top_beta", dtype=bf16, filters=False)
    verify_part("block", dtype=bf16, draft_filters=True)
    verify_tree("traversal", dtype=bf16, packed=True)
    operators.row_law(row, **filters)
    operators.sample(row, torch.zeros(2, dtype=torch.float64))
    operators.uniforms(seeds, seeds, 4)
    operators.sample(row, domain=3, **at)
    operators.acceptance(row, row[:, :999], allowed_mask=words, draft_token_ids=ids)
    parents = torch.zeros(2, 64, dtype=torch.int64)
    operators.tree_mask(parents)
    caches = [torch.zeros(2, 99, 8, 64, dtype=bf16) for _ in range(2)]
    operators.compact_kv(*caches, parents, seeds, seeds)
    search_beams(5, 45, 32_000, bf16, eos=2)
    attend(64, 128, bf16)
if "shards" in extents:
    mixed = dict(draft="probs", kinds="mixed")
    verify_part("token", filters=False, packed=True, allowed_mask=True, **mixed)
    verify_part("typical", draft="none", dtype=f16, bounds=(0, 4096, 8192, 9001))
    verify_part("top_beta", draft="probs", layout="padded", bounds=(0, 0, 5000, 9001))
    verify_part("coupled", philox=True, dtype=bf16, raw_logprobs=True)
    verify_part("greedy", gamma=0, ragged=False, bounds=(0, 9001, 9001, 9001))
if "masks and maps" in extents:
    hidden = dict(allowed_mask=True)
    verify("block", dtype=bf16, draft="probs", packed=True, draft_token_ids=True, **hidden)
    verify("coupled", philox=True, **hidden)
    masked = dict(allowed_mask=torch.zeros(2, 9, 64, dtype=i32))
    case = make_tree_case(0, batch=2, nodes=9, vocab=2048, draft_vocab=999, dtype=bf16)
    operators.verify_tree(**case.inputs, **masked, draft_token_ids=ids)
    case = make_tree_case(0, batch=2, nodes=9, vocab=2048, rule="coupled", philox=True)
    operators.verify_tree(**case.inputs, **masked)
    operators.sample(row[:, :999], domain=3, draft_token_ids=ids, **at)
    operators.sample(row[:, :999], allowed_mask=words, draft_token_ids=ids, **at, **filters)
if "lists" in extents:
    verify("block", dtype=bf16, draft="lists", packed=True, allowed_mask=True)
    verify("token", draft="lists", id_dtype=i32)
    case = make_tree_case(0, batch=2, nodes=9, vocab=2048, draft="probs", dtype=bf16)
    top = case.inputs["draft_probs"].topk(7)
    case = case.replace(draft_probs=top.values, draft_probs_ids=top.indices)
    operators.verify_tree(**case.inputs)
if "attention" in extents:
    mla = dict(key_heads=1, value_size=512, page=64)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    factors = dict(k_scale=torch.ones(()), v_scale=torch.ones(2))
    attend(64, 128, bf16, page=16)
    attend(64, 256, f16, page=24, window=512, soft_cap=30.0)
    attend(64, 64, bf16, window=4096)
    attend(64, 192, bf16, value_size=128)
    attend(1, 576, bf16, heads=128, latent=True, **mla)
    attend(16, 576, f16, heads=16, **mla)
    attend(2, 576, torch.float32, heads=16, latent=True, **mla)
    attend(64, 128, bf16, cached=e4m3, page=16, **factors)
    attend(16, 256, f16, cached=e5m2, **factors)
    attend(8, 576, bf16, heads=16, cached=e4m3, latent=True, **mla)
if "more variants" in extents:
    verify("token", filters=False, philox=True, packed=True, id_dtype=i32, kinds="mixed")
    verify("lenient", dtype=f16, draft="probs", vocab=1, raw_logprobs=True, layout="padded")
    verify("typical", dtype=bf16, vocab=9001, draft="none", stream=1, philox=True)
    verify("greedy", gamma=1, ragged=False)
    verify("block", draft="probs", filters=False, gamma=1, vocab=300, kinds="mixed")
    verify("block", draft="none", gamma=0, dtype=f16, filters=False)
    verify_tree("recursive", philox=True, shared_rows=True, draft="probs", vocab=9001)
    verify_tree("target_only", nodes=1, draft="none", raw_logprobs=True, dtype=f16)
    verify_tree("traversal", nodes=1024, id_dtype=i32, filters=False, draft_filters=True)
    verify_tree("greedy", nodes=100)
    operators.sample(row.float(), seeds=seeds, positions=seeds, stream=1, domain=1, **filters)
    operators.acceptance(row, row.float()[:, :999], draft_top_p=torch.ones(2))
    parents = torch.zeros(2, 1000, dtype=i32)
    operators.tree_mask(parents)
    caches = [torch.zeros(3, 2, 4, 99, 80, dtype=f16).transpose(2, 3), torch.zeros(3, 2, 99, 1, 7)]
    operators.compact_kv(*caches, parents, seeds.int(), seeds.int())
    search_beams(1, 7, 1, torch.float32, id_dtype=i32, rule="subset", log_probs=True)
    search_beams(64, 1024, 9001, f16, eos=300)
    for nodes, size, dtype, options in (
        (1, 64, f16, {}), (70, 80, f16, dict(soft_cap=30.0, places=100)),
        (64, 256, torch.float32, {}),
    ):
        attend(nodes, size, dtype, **options)

kernels = set()
for module in pkgutil.iter_modules(backend.__path__):
    for name, value in vars(import_module(f"specdec_ext.triton.{module.name}")).items():
        # A kernel, as opposed to a device function, says what its grid is.
        if isinstance(value, triton.JITFunction) and "Grid:" in value.fn.__doc__:
            kernels.add(value.__name__)
left = kernels - set(compiled) if "every kernel" in extents else set()
assert not left and set(compiled) <= kernels, (left, compiled)
assert looked_at, "no loop was looked at"
print(len(kernels), "kernels,", sum(map(len, compiled.values())), "variants")
"""

# What is compiled for one GPU shares a process, and there is one for each of two workers. 8.6 would
# have the launches of 8.9, whose shared memory is as small, and instructions of 8.0.
TARGETS = [
    ("cuda", "90", "32", "every kernel", "lists", "shards"),
    ("cuda", "90", "32", "more variants", "masks and maps", "attention"),
    ("cuda", "80", "32", "every kernel", "attention"),
    ("cuda", "89", "32", "attention"),
    ("hip", "gfx942", "64", "every kernel", "attention"),
]


def test_all_is_compiled_for_the_newest():
    extents = set(re.findall(r'^if "(.+)" in extents:$', SCRIPT, re.MULTILINE))
    compiled = [extent for _, arch, _, *own in TARGETS if arch == "90" for extent in own]
    assert len(compiled) == len(extents) > 4 and set(compiled) == extents


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: "-".join(target))
def test_kernels_compile(run_python, target, tmp_path):
    # A cache of its own: what Triton finds in one it does not compile, and no loop is looked at.
    done = run_python(SCRIPT, *target, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    kernels, variants = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kernels > 10 and variants > 10
