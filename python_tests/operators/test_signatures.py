"""One signature, three places: schema, public wrapper and reference say the same."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import specdec_ext
from specdec_ext import _fake, beams, ops, reference

OPERATORS = tuple(_fake.FAKES)
# What the public function takes beside the operator's arguments, at its end.
EXTRA = {
    "row_law": ["backend"],
    "sample": ["generator", "backend"],
    "verify": ["generator", "backend"],
    "verify_tree": ["generator", "backend"],
    "acceptance": ["backend"],
    "uniforms": ["backend"],
    "tree_mask": ["backend"],
    "compact_kv": ["backend"],
    "beam_verify": ["backend"],
    "tree_attention": ["return_lse", "backend"],
}
RESULTS = {
    "row_law": specdec_ext.RowLaw,
    "sample": specdec_ext.SampleResult,
    "verify": specdec_ext.VerifyResult,
    "verify_tree": specdec_ext.VerifyTreeResult,
    "tree_mask": specdec_ext.TreeMaskResult,
    "beam_verify": specdec_ext.BeamVerifyResult,
    "tree_attention": specdec_ext.TreeAttentionResult,
}
# What returns a single tensor that is not called like the operator.
RETURNS = {"compact_kv": "status"}
CSRC = Path(__file__).parents[2] / "csrc"

REQUIRED = inspect.Parameter.empty


def schema_of(name):
    return getattr(torch.ops.specdec, name).default._schema


def schema_arguments(name):
    """(name, keyword only, default) of each argument of the registered operator."""
    return [
        (a.name, a.kwarg_only, a.default_value if a.has_default_value() else REQUIRED)
        for a in schema_of(name).arguments
    ]


def python_arguments(function):
    return [
        (p.name, p.kind is inspect.Parameter.KEYWORD_ONLY, p.default)
        for p in inspect.signature(function).parameters.values()
    ]


def definition_order(module, names):
    lines = inspect.getsource(module).splitlines()
    found = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"def (\w+)\(", line))}
    return sorted(names, key=found.__getitem__)


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_reads_arguments_of_the_schema(name):
    read = set(inspect.signature(_fake._SHAPES[name]).parameters) - {"_"}
    assert read and read <= {argument for argument, _, _ in schema_arguments(name)}


@pytest.mark.parametrize("name", OPERATORS)
def test_reference_matches_schema(name):
    assert python_arguments(getattr(reference, name)) == schema_arguments(name)


@pytest.mark.parametrize("name", OPERATORS)
def test_wrapper_matches_schema(name):
    arguments = python_arguments(getattr(specdec_ext, name))
    extra = len(EXTRA[name])
    assert arguments[:-extra] == schema_arguments(name)
    defaults = {"generator": None, "return_lse": False, "backend": "auto"}
    assert arguments[-extra:] == [(e, True, defaults[e]) for e in EXTRA[name]]


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_names_of_the_schema(name):
    returned = [r.name for r in schema_of(name).returns]
    single = [RETURNS.get(name, name)]
    assert returned == list(getattr(RESULTS.get(name), "_fields", single))


#: Schemas of what specdec_ext/distributed calls, and what calls it.
PRIVATE = ("verify_sharded", "exchange")


def test_operators_stand_in_one_order():
    listed, library = (
        (CSRC / "torch" / "operators.h").read_text(),
        (CSRC / "library.cpp").read_text(),
    )
    declared = re.findall(r"^  OPERATOR\((\w+), \w+\)", listed, re.MULTILINE)
    assert len(declared) == 10 and list(OPERATORS) == declared
    schemas = re.findall(r"^constexpr char (\w+)\[\]", library, re.MULTILINE)
    assert [name for name in schemas if name not in PRIVATE] == declared
    assert set(PRIVATE) <= set(schemas)
    of_beams = "beam_verify"  # has a file of its own
    assert definition_order(beams, [of_beams]) == [of_beams]
    rest = [name for name in declared if name != of_beams]
    assert definition_order(ops, rest) == rest
    fakes = definition_order(_fake, [f"_{name}" for name in OPERATORS])
    assert fakes == [f"_{name}" for name in declared]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("draft_probs", "allowed_mask"), ("allowed_mask", "draft_token_ids")),
        *(("draft_token_ids", "seeds"), ("stream", "temperature"), ("min_p", "rule")),
        ("rule", "raw_logprobs"),
    ],
)
def test_arguments_stand_by_their_roles(first, second):
    """Rows, masks and maps beside the logits, then randomness, the laws' parameters, the rule."""
    orders = [[argument for argument, _, _ in schema_arguments(name)] for name in OPERATORS]
    both = [names for names in orders if first in names and second in names]
    assert both and all(names.index(first) < names.index(second) for names in both)


def test_rules_are_those_of_the_operator():
    assert tuple(reference.RULES) == ops.RULES
    with pytest.raises(ValueError, match=", ".join(f'"{rule}"' for rule in ops.RULES)):
        specdec_ext.verify(*dense_inputs()[:2], rule="no such rule")
    assert tuple(reference.TREE_RULES) == ops.TREE_RULES
    with pytest.raises(ValueError, match=", ".join(f'"{rule}"' for rule in ops.TREE_RULES)):
        logits, tokens, _ = dense_inputs(gamma=0)
        specdec_ext.verify_tree(logits, logits[..., 0].long(), tokens, rule="no such rule")


# --------------------------------------------------------------------------------------------------
# The fake and the operator agree on what comes out
# --------------------------------------------------------------------------------------------------


def dense_inputs(batch=2, gamma=3, vocab=11, dtype=torch.float32, requires_grad=False):
    """Target logits, draft tokens and a draft that equals the target: all is accepted, so that no
    output is NaN (opcheck compares NaN as different)."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(batch, gamma + 1, vocab, generator=generator).to(dtype)
    tokens = torch.randint(vocab, (batch, gamma), generator=generator)
    draft = target[:, :gamma].clone()
    return target.requires_grad_(requires_grad), tokens, draft.requires_grad_(requires_grad)


def sample_calls(**kwargs):
    """One plain and one crowded call of every operator."""
    target, _, draft = dense_inputs(**kwargs)
    tokens = target[:, :-1].argmax(-1)  # which every filter keeps
    batch, gamma = tokens.shape
    seeds, positions = torch.arange(batch), torch.arange(batch) * 7
    uniforms = torch.full((batch, gamma + 1), 0.25, dtype=torch.float64)
    temperature = torch.full((batch,), 0.5)
    top_k = torch.full((batch,), 5)
    share = torch.full((batch,), 0.9)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": share, "min_p": share / 10}
    draft_filters = {f"draft_{name}": value for name, value in filters.items()}
    row, draft_row = target[:, 0], target[:, -1]
    rows = torch.arange(batch * (gamma + 1)).view(batch, gamma + 1)
    packed = target.flatten(0, 1)
    yield "row_law", (row,), {}
    yield "row_law", (row,), filters
    yield "sample", (row, uniforms[:, 0]), {}
    yield "sample", (row,), {"seeds": seeds, "positions": positions, "domain": 1, **filters}
    yield "verify", (target, tokens, draft), {"uniforms": uniforms}
    everything = {**filters, **draft_filters, "draft_lengths": top_k - 5 + gamma}
    yield (
        "verify",
        (target, tokens, draft),
        {"seeds": seeds, "positions": positions, "stream": 3, "rule": "token", **everything},
    )
    yield (
        "verify",
        (packed, tokens),
        {
            "draft_probs": packed.softmax(-1),
            "target_rows": rows,
            "draft_rows": rows[:, :gamma],
            "draft_kinds": torch.ones(batch, gamma, dtype=torch.int8),
            "uniforms": uniforms,
            "raw_logprobs": True,
        },
    )
    yield "verify", (target, tokens), {"rule": "greedy", "full_accept_probs": True}
    chain = torch.arange(-1, gamma).expand(batch, -1)
    tree = (target, torch.cat([tokens.new_zeros(batch, 1), tokens], 1), chain)
    kinds = torch.ones(batch, gamma + 1, dtype=torch.int8)
    yield "verify_tree", (*tree, target), {"uniforms": uniforms * 0}
    yield (
        "verify_tree",
        (packed, *tree[1:]),
        {
            "draft_probs": target.softmax(-1),
            "children_rows": chain + 1,
            "target_rows": rows,
            "kinds": kinds,
            "uniforms": uniforms * 0,
            "rule": "recursive",
            "raw_logprobs": True,
        },
    )
    words = torch.full((batch, gamma + 1, (target.shape[-1] + 31) // 32), -1, dtype=torch.int32)
    crowd = {"allowed_mask": words[:, 0], "draft_token_ids": torch.arange(target.shape[-1])}
    yield "row_law", (row,), {"allowed_mask": words[:, 0]}
    yield "sample", (row,), {"seeds": seeds, "positions": positions, "domain": 3, **crowd}
    yield "verify", (target, tokens, draft), {"uniforms": uniforms, **crowd, "allowed_mask": words}
    greedy = {"temperature": torch.zeros(batch), "rule": "coupled"}
    yield "verify", (target, tokens), {"seeds": seeds, "positions": positions, **greedy}
    yield "acceptance", (row, draft_row), crowd
    yield "acceptance", (row, draft_row), {}
    yield "acceptance", (row, draft_row), {**filters, **draft_filters}
    yield "uniforms", (seeds, positions, gamma + 1), {}
    yield "uniforms", (seeds, positions, 1), {"stream": 255}
    parents = torch.tensor([[-1, 0, 0, 1, 2, -1], [-1, 0, 1, 2, 3, 4]]).repeat(batch, 1)[:batch]
    yield "tree_mask", (parents,), {}
    keys, values = (torch.randn(batch, 9, 2, 8).to(dtype) for dtype in (row.dtype, torch.float64))
    some = torch.ones(batch, dtype=torch.int32)
    yield "compact_kv", (keys, values, parents + 2, some, some), {}
    beam = (target, torch.zeros(batch, 1), tree[1], chain, gamma)
    yield "beam_verify", beam, {}
    yield "beam_verify", beam, {"eos_token_ids": seeds, "rule": "subset", "log_probs": True}
    q = torch.randn(batch, 6, 4, 8).to(row.dtype).requires_grad_(row.requires_grad)
    ancestors = reference.tree_mask(parents).ancestors
    yield "tree_attention", (q, keys, keys, ancestors, some), {}
    yield "tree_attention", (q, keys, keys, ancestors, some), {"scale": 0.5, "soft_cap": 3.0}
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    yield "tree_attention", (q, keys, keys, ancestors, some), {"block_table": table, "window": 2}
    small = keys.to(torch.float8_e5m2)
    factors = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([0.5, 2.0])}
    yield "tree_attention", (q, small, small[..., :6], ancestors, some), factors


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", range(26))
def test_opcheck(case, requires_grad):
    name, args, kwargs = list(sample_calls(requires_grad=requires_grad))[case]
    operator = getattr(torch.ops.specdec, name).default
    torch.library.opcheck(operator, args, kwargs)
    outputs = operator(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert not any(o.requires_grad for o in outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [dict(batch=2, gamma=3), dict(batch=0, gamma=3), dict(batch=2, gamma=0), dict(vocab=1)],
    ids=str,
)
def test_reference_returns_what_the_fake_says(sizes, dtype):
    for name, args, kwargs in sample_calls(**sizes, dtype=dtype):
        found = getattr(reference, name)(*args, **kwargs)
        said = _fake.FAKES[name](*args, **kwargs)
        names = [argument for argument, _, _ in schema_arguments(name)]
        named = _fake.FAKES[name](**dict(zip(names, args, strict=False)), **kwargs)
        found = found if isinstance(found, tuple) else (found,)
        said = said if isinstance(said, tuple) else (said,)
        named = named if isinstance(named, tuple) else (named,)
        assert len(found) == len(said)
        assert [(t.shape, t.dtype) for t in named] == [(t.shape, t.dtype) for t in said]
        for a, b in zip(found, said, strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), name
            assert a.is_contiguous() and b.is_contiguous()


@pytest.mark.parametrize("dynamic", [False, True])
def test_wrappers_trace_whole(dynamic):
    def step(target, tokens, draft, seeds, positions, temperature):
        verified = specdec_ext.verify(
            target, tokens, draft, seeds=seeds, positions=positions, temperature=temperature
        )
        words = torch.full((target.shape[0], 4, 1), 255, dtype=torch.int32)
        raced = specdec_ext.verify(
            target, tokens, seeds=seeds, positions=positions, rule="coupled", allowed_mask=words
        )
        ids = torch.arange(draft.shape[-1])
        drafted = specdec_ext.sample(
            draft[:, 1], seeds=seeds, positions=positions, draft_token_ids=ids
        )
        law = specdec_ext.row_law(target[:, 0], top_k=3)
        drawn = specdec_ext.sample(draft[:, 0], seeds=seeds, positions=positions, top_p=0.9)
        coins = specdec_ext.uniforms(seeds, positions, 4)
        shared = specdec_ext.acceptance(target[:, 0], draft[:, 0], temperature=temperature)
        return *verified, *raced, *drafted, *law, *drawn, coins, shared

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=dynamic)
    for batch in (2, 5) if dynamic else (2,):
        target, tokens, draft = dense_inputs(batch=batch)
        inputs = (target, tokens, draft.flip(-1), *(torch.arange(batch),) * 2, torch.ones(batch))
        for found, expected in zip(compiled(*inputs), step(*inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_default_generator_traces_whole():
    compiled = torch.compile(specdec_ext.verify, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 5):
        assert compiled(*dense_inputs(batch=batch)).tokens.shape == (batch, 4)


# --------------------------------------------------------------------------------------------------
# The public functions: scalars, sequences, randomness, types
# --------------------------------------------------------------------------------------------------


def same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_scalars_and_sequences_are_tensors():
    logits = dense_inputs()[0][:, 0]
    tensors = {
        "temperature": torch.tensor([0.5, 0.5]),
        "top_k": torch.tensor([3, 3]),
        "top_p": torch.tensor([0.9, 0.9]),
        "min_p": torch.tensor([0.01, 0.01]),
    }
    expected = specdec_ext.row_law(logits, **tensors)
    scalars = specdec_ext.row_law(logits, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
    lists = specdec_ext.row_law(logits, **{name: t.tolist() for name, t in tensors.items()})
    same(scalars, expected)
    same(lists, expected)
    same(specdec_ext.row_law(logits, temperature=2), specdec_ext.row_law(logits, temperature=2.0))


def test_generator_draws_seeds_and_nothing_else():
    target, tokens, draft = dense_inputs(batch=4, vocab=40)
    draft = draft.flip(-1)

    def run(generator):
        return specdec_ext.verify(target, tokens, draft, generator=generator)

    first = run(torch.Generator().manual_seed(5))
    same(first, run(torch.Generator().manual_seed(5)))
    seeds = torch.randint(2**63 - 1, (4,), generator=torch.Generator().manual_seed(5))
    positions = torch.zeros(4, dtype=torch.int64)
    same(first, specdec_ext.verify(target, tokens, draft, seeds=seeds, positions=positions))

    torch.manual_seed(5)
    same(first, run(None))  # torch's default generator
    before = torch.get_rng_state()
    specdec_ext.verify(target, tokens, rule="greedy")
    specdec_ext.verify(target, tokens, draft, seeds=seeds, positions=positions)
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_beside_other_randomness_is_refused():
    target, tokens, draft = dense_inputs()
    zeros = torch.zeros(2, dtype=torch.int64)
    generator = torch.Generator()
    with pytest.raises(ValueError, match="generator must be None where seeds are given"):
        specdec_ext.verify(target, tokens, draft, seeds=zeros, positions=zeros, generator=generator)
    with pytest.raises(ValueError, match="generator must be None where uniforms are given"):
        specdec_ext.sample(target[:, 0], zeros.double(), generator=generator)


def test_verify_of_seeds_is_verify_of_their_uniforms():
    target, tokens, draft = dense_inputs(batch=5)
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 2**40, -1, 7, 2**33])
    coins = specdec_ext.uniforms(seeds, positions, 4, stream=9)
    same(
        specdec_ext.verify(
            target, tokens, draft.flip(-1), seeds=seeds, positions=positions, stream=9
        ),
        specdec_ext.verify(target, tokens, draft.flip(-1), uniforms=coins),
    )


TYPE_ERRORS = [
    ("row_law", {"logits": [[0.0]]}, "logits must be a Tensor, got list"),
    ("row_law", {"temperature": "1"}, "temperature must be a Tensor, a number, a list"),
    ("row_law", {"temperature": True}, "temperature must be a Tensor, a number, a list"),
    ("row_law", {"top_k": 2.0}, "top_k must be a Tensor, an int, a list"),
    ("row_law", {"top_k": [1, 2.0]}, "top_k must be a Tensor, an int, a list"),
    ("sample", {"uniforms": 0.5}, "uniforms must be a Tensor or None, got float"),
    ("sample", {"seeds": 1}, "seeds must be a Tensor or None, got int"),
    ("sample", {"draft_index": 1.0}, "draft_index must be an int, got float"),
    ("sample", {"generator": 1}, "generator must be a torch.Generator or None, got int"),
    ("verify", {"draft_tokens": [[1]]}, "draft_tokens must be a Tensor, got list"),
    ("verify", {"draft_lengths": [1, 1]}, "draft_lengths must be a Tensor or None, got list"),
    ("verify", {"draft_top_p": b"0.5"}, "draft_top_p must be a Tensor, a number, a list"),
    ("verify", {"rule": 1}, "rule must be a str, got int"),
    ("verify", {"beta": 3.0}, "beta must be an int, got float"),
    ("verify", {"tau": "1"}, "tau must be a number, got str"),
    ("verify", {"raw_logprobs": 1}, "raw_logprobs must be a bool, got int"),
    ("acceptance", {"draft_logits": None}, "draft_logits must be a Tensor, got NoneType"),
    ("uniforms", {"seeds": 3}, "seeds must be a Tensor, got int"),
    ("uniforms", {"n": True}, "n must be an int, got bool"),
]


@pytest.mark.parametrize(("name", "changes", "message"), TYPE_ERRORS, ids=lambda v: str(v)[:40])
def test_type_errors_name_the_argument(name, changes, message):
    target, tokens, draft = dense_inputs()
    zeros = torch.zeros(2, dtype=torch.int64)
    inputs = {
        "row_law": {"logits": target[:, 0]},
        "sample": {"logits": target[:, 0]},
        "verify": {"target_logits": target, "draft_tokens": tokens, "draft_logits": draft},
        "acceptance": {"target_logits": target[:, 0], "draft_logits": draft[:, 0]},
        "uniforms": {"seeds": zeros, "positions": zeros, "n": 3},
    }[name]
    with pytest.raises(TypeError, match=f"^{name}: {re.escape(message)}"):
        getattr(specdec_ext, name)(**{**inputs, **changes})


def test_backend_choice():
    logits = dense_inputs()[0][:, 0]
    expected = specdec_ext.row_law(logits)
    same(specdec_ext.row_law(logits, backend="cpu"), expected)
    torch.testing.assert_close(
        specdec_ext.row_law(logits, backend="reference").log_z, expected.log_z
    )
    with pytest.raises(ValueError, match="backend must be one of auto"):
        specdec_ext.row_law(logits, backend="gpu")
    with pytest.raises(ValueError, match="backend 'cpu' needs CPU tensors, got meta"):
        specdec_ext.row_law(logits.to("meta"), backend="cpu")
