"""`verify_sharded` on several processes: the bits of one, refusals everywhere, few bytes."""

import inspect
from functools import cache
from itertools import combinations

import pytest
import ranks
import torch
import torch.distributed as dist

import specdec_ext
from specdec_ext.distributed import TILE, even_bounds, verify_sharded

CASES = 120
#: For Triton's interpreter, which is slow: no request, and small cases of every rule in which
#: borders cut tiles.
FEW = [0, 8, 107, 330, 347, 423, 424, 452]
#: Small ones, too: with them every pair of values of `features` that the first sixty have is tried.
MORE = [
    *(31, 43, 56, 63, 75, 90, 111, 144, 145, 170, 204, 228, 302, 314, 324, 332, 365, 393, 397, 438),
    *(448, 465, 483, 496, 505, 545, 554, 574),
]
#: Each control of `ranks.CONTROLS` breaks all of them.
BREAKABLE = [393, 545]
VOCAB = 128_256

JOBS = {
    "cases": ("compare", {"first": 0, "count": CASES}),
    "refusals": ("refuse", {}),
    "inside": ("fail_inside", {}),
    "tensors": ("distributed_tensors", {"vocab": 4100}),
    "even": ("hand", {"vocab": VOCAB, "even": True, "rule": "block"}),
    "uneven": ("hand", {"vocab": VOCAB, "even": False, "rule": "block"}),
    "filtered": (
        "hand",
        {"vocab": VOCAB, "even": True, "rule": "token", "top_k": 50, "top_p": 0.9},
    ),
    "histograms": (
        "hand",
        {"vocab": VOCAB, "even": True, "rule": "token", "top_k": 5000, "top_p": 0.9},
    ),
    "coupled": ("hand", {"vocab": VOCAB, "even": True, "rule": "coupled"}),
    "triton": ("compare", {"numbers": FEW, "way": "triton"}),
    **{
        f"control: {name}": ("compare", {"numbers": BREAKABLE, "control": name})
        for name in ranks.CONTROLS
    },
}


TRITON_JOBS = {
    "cases": ("compare", {"numbers": MORE, "way": "triton"}),
    "refusals": ("refuse", {"way": "triton"}),
    **{
        f"control: {name}": ("compare", {"numbers": BREAKABLE, "way": "triton", "control": name})
        for name in ranks.CONTROLS
    },
}


@pytest.fixture(scope="module")
def four():
    """What four processes return of every job."""
    return ranks.start(JOBS, 4)


def test_bits_are_those_of_one_rank(four):
    assert [result["cases"]["wrong"] for result in four] == [[]] * 4
    seen = four[0]["cases"]["seen"]
    # What was tried is not nothing: any number of ranks, rules, borders, values that are no law.
    for rule in specdec_ext.ops.RULES:
        assert seen[f"rule {rule}"] >= 5, seen
    assert all(seen[f"ranks {n}"] >= 20 for n in (1, 2, 3, 4)), seen
    assert min(seen["borders inside tiles"], seen["several tiles"], seen["empty parts"]) >= 20, seen
    assert all(seen[f"status {bit} of requests"] >= 1 for bit in (1, 2, 4, 8)), seen


def test_bits_of_tritons_kernels_are_those_of_one_rank(four):
    assert [result["triton"]["wrong"] for result in four] == [[]] * 4
    seen = four[0]["triton"]["seen"]
    assert all(seen[f"rule {rule}"] >= 1 for rule in specdec_ext.ops.RULES), seen
    assert all(seen[f"ranks {n}"] >= 1 for n in (2, 3, 4)), seen
    assert seen["borders inside tiles"] >= 5, seen


@pytest.mark.thorough
def test_tritons_kernels_in_more_cases():
    results = ranks.start(TRITON_JOBS, 4, 900.0)
    assert [result["cases"]["wrong"] for result in results] == [[]] * 4
    for name in ranks.CONTROLS:
        wrong = [result[f"control: {name}"]["wrong"] for result in results]
        assert all(len(cases) == len(BREAKABLE) for cases in wrong), name
    for name, (_, words) in ranks.REFUSALS.items():
        assert all(words in result["refusals"]["said"][name][1] for result in results), name
    assert [result["refusals"]["after"] for result in results] == [[]] * 4


@cache
def features(number):
    """What a case has, of all that chooses kernels or the path through them."""
    pick = ranks.Pick(number)
    size = 1 + pick.below(4)
    inputs = ranks.sharded_case(number).inputs
    vocab, gamma = inputs["target_logits"].shape[-1], inputs["draft_tokens"].shape[1]
    bounds = ranks.make_bounds(pick, vocab, size)
    found = {name: name in inputs for name in OPTIONAL}
    found |= {name: bool(inputs.get(name)) for name in ("full_accept_probs", "raw_logprobs")}
    found |= {"rule": inputs["rule"], "dtype": str(inputs["target_logits"].dtype), "ranks": size}
    found |= {"several tiles": vocab > TILE, "cut tiles": any(b % TILE for b in bounds[1:-1])}
    return found | {"empty parts": len(set(bounds)) <= size, "no draft": gamma == 0}


#: Arguments that a case may be without.
OPTIONAL = (
    *("draft_logits", "draft_probs", "draft_kinds", "target_rows", "allowed_mask", "seeds"),
    *("top_k", "draft_top_k"),
)


def pairs(numbers):
    """Every two features that a case has together."""
    tried = [sorted(features(n).items()) for n in numbers]
    return {pair for one in tried for pair in combinations(one, 2)}


def test_cases_left_out_have_no_pair_of_features_of_their_own():
    every = pairs(range(60))
    assert every <= pairs([*FEW, *MORE])
    assert not every <= pairs([*FEW, *MORE[:-1]])  # the last of them has one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("number", sorted({1, torch.cuda.device_count()}))
def test_on_gpus(number):
    jobs = {
        "cases": ("compare", {"first": 0, "count": CASES, "way": "gpu"}),
        "refusals": ("refuse", {"way": "gpu"}),
        "waits": ("wait_for_nothing", {}),
    }
    for result in ranks.start(jobs, number, 1800.0, backend="nccl"):
        assert result["cases"]["wrong"] == []
        assert result["waits"] == {"wrong": [], "a wait is seen": True}
        assert result["refusals"]["after"] == []


@pytest.mark.parametrize("name", ranks.CONTROLS)
def test_what_is_wrong_is_found(four, name):
    assert all(len(result[f"control: {name}"]["wrong"]) == len(BREAKABLE) for result in four)


@pytest.mark.parametrize("name", ranks.REFUSALS)
def test_what_is_wrong_on_one_rank_is_refused_on_all(four, name):
    words = ranks.REFUSALS[name][1]
    for rank, result in enumerate(four):
        kind, text = result["refusals"]["said"][name]
        assert words in text and "verify" in text, (rank, kind, text)
        # A TypeError is that of the rank whose argument it is.
        assert kind == ("TypeError" if name == "no tensor" and rank == 3 else "ValueError")


def test_a_refusal_leaves_the_ranks_together(four):
    assert [result["refusals"]["after"] for result in four] == [[]] * 4


def test_a_failed_collective_is_what_is_raised(four):
    assert [result["inside"] for result in four] == ["the line is cut"] * 4


def test_tensors_of_a_mesh(four):
    for result in four:
        assert result["tensors"]["wrong"] == []
        assert len(result["tensors"]["said"]) == 2
        assert all("must be Shard(2)" in text for text in result["tensors"]["said"])


@pytest.mark.parametrize(
    "name, share", [("even", 0.05), ("filtered", 0.05), ("histograms", 0.08), ("coupled", 0.05)]
)
def test_logits_are_not_gathered(four, name, share):
    for result in four:
        handed = result[name]
        assert handed["wrong"] == []
        assert 0 < sum(handed["bytes"].values()) < share * handed["logits"], handed
        assert "all_to_all_single" not in handed["calls"]


def test_a_border_inside_a_tile_costs_less_than_a_tile_a_row(four):
    for even, uneven in ((result["even"], result["uneven"]) for result in four):
        assert uneven["wrong"] == []
        assert uneven["bytes"].get("all_to_all_single", 0) < (2 * 4 + 2 * 3) * TILE * 2
        rest = sum(uneven["bytes"].values()) - uneven["bytes"]["all_to_all_single"]
        assert rest == pytest.approx(sum(even["bytes"].values()), rel=0.2)
    assert max(result["uneven"]["bytes"]["all_to_all_single"] for result in four) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 2, 3])
def test_other_numbers_of_processes(number):
    jobs = {"cases": ("compare", {"first": 2000, "count": 60})}
    if number > 1:
        jobs["refusals"] = ("refuse", {})
    results = ranks.start(jobs, number)
    assert [result["cases"]["wrong"] for result in results] == [[]] * number
    assert all(not result["refusals"]["after"] for result in results if number > 1)


# ---- in this process -----------------------------------------------------------------------------


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_group_there_is_a_message():
    with pytest.raises(ValueError, match="verify_sharded: torch.distributed has no process group"):
        verify_sharded(**{k: v for k, v in ranks.usual().items()})


def test_a_call_without_requests(alone):
    tokens, logits = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 4, 9)
    result = verify_sharded(logits, tokens, rule="greedy")
    assert [tuple(output.shape) for output in result] == [(0, 4), (0,), (0, 4), (0, 3), (0,)]


def test_a_rank_alone_takes_numbers_and_lists(alone):
    inputs = {**ranks.usual(), "temperature": [0.5, 1.5], "top_p": 0.7}
    assert ranks.differences(verify_sharded(**inputs), specdec_ext.verify(**inputs)) == []


def test_outputs_never_require_grad(alone):
    inputs = ranks.usual()
    inputs["target_logits"] = inputs["target_logits"].requires_grad_()
    assert not any(output.requires_grad for output in verify_sharded(**inputs))


def test_parameters_are_those_of_verify():
    of_one = inspect.signature(specdec_ext.verify).parameters
    of_many = inspect.signature(verify_sharded).parameters
    assert [n for n in of_many if n not in of_one] == ["vocab_start", "group"]
    left_out = {"draft_token_ids", "draft_probs_ids", "generator", "backend"}
    assert {n for n in of_one if n not in of_many} == left_out
    for name in of_many.keys() & of_one.keys():
        assert of_many[name].default == of_one[name].default, name


def test_tiles_are_those_of_the_kernels():
    header = (ranks.ROOT / "csrc" / "core" / "rows.h").read_text()
    assert f"#define SPECDEC_TILE {TILE}\n" in header


@pytest.mark.parametrize("vocab, number", [(1, 1), (1, 4), (4096, 2), (4097, 2), (128_256, 8)])
def test_even_bounds(vocab, number):
    bounds = even_bounds(vocab, number)
    widths = [-(-(b - a) // TILE) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert bounds[0] == 0 and bounds[-1] == vocab and len(bounds) == number + 1
    assert all(bound % TILE == 0 for bound in bounds[:-1] if bound < vocab)
    assert min(widths) >= 0 and max(widths) - min(widths) <= 1


def test_even_bounds_of_nothing():
    with pytest.raises(ValueError, match="at least 1, got 0, 2"):
        even_bounds(0, 2)


def test_a_graph_leaves_it_out(alone):
    compiled = torch.compile(verify_sharded, backend="eager")
    inputs = ranks.usual()
    assert ranks.differences(compiled(**inputs), specdec_ext.verify(**inputs)) == []
