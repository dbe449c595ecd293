"""The benchmark: its baselines are correct, and it writes what it says. Nothing here is timed."""

import csv
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from specdec_ext import reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import baselines  # noqa: E402
import bench_tree_attention as bench_trees  # noqa: E402
import bench_verify as bench  # noqa: E402
import common  # noqa: E402

FILTERED = [(filters, law) for filters, laws in bench.LAWS.items() for law in laws]
ACCEPTANCES = ["full", "0.7", "masses"]


def inputs_of(rule, filters, acceptance, dtype, *, batch=6, gamma=4, vocab=997, seed=0):
    setting = bench.Setting(rule, batch, gamma, vocab, dtype, filters, acceptance)
    return bench.make_inputs(setting, torch.Generator().manual_seed(seed))


# ---- baselines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize(("filters", "law"), FILTERED)
@pytest.mark.parametrize("rule", baselines.RULES)
def test_baselines_emit_the_tokens_of_the_reference(rule, filters, law, dtype, acceptance):
    verifier = partial(baselines.RULES[rule], probs=bench.LAWS[filters][law])
    excused = 0
    for seed in range(3):
        inputs = inputs_of(rule, filters, acceptance, dtype, seed=seed)
        expected = bench.expect(inputs, rule, None)
        assert bench.check_operator(inputs, rule, expected) <= 1
        excused += bench.check_baseline(verifier, inputs, expected)
    assert excused <= 1  # of 18 requests; ties within 1e-5 are rare


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_emits_the_tokens_of_the_reference(dtype, acceptance):
    pytest.importorskip("transformers")
    excused = 0
    for seed in range(8):
        gamma = 1 + seed % 4
        inputs = inputs_of("token", "none", acceptance, dtype, batch=1, gamma=gamma, seed=seed)
        expected = bench.expect(inputs, "token", None)
        excused += bench.check_baseline(baselines.verify_transformers, inputs, expected)
    assert excused <= 1


@pytest.mark.parametrize(("filters", "law"), FILTERED)
def test_laws_keep_ties(filters, law):
    # Logits on a lattice of 1/2: every threshold has ties. Sums of few such values are exact enough
    # that top-p cuts on the same side.
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(20, 211, generator=generator) * 6).round() / 2
    if law == "eager topk":  # more ties than it looks for are its documented limit
        logits += torch.rand(logits.shape, generator=generator) * 0.01
        logits[:, ::50] = logits[:, 1:2]
    wanted = torch.stack([reference.law(row, **bench.FILTERS[filters]) for row in logits])
    found = bench.LAWS[filters][law](logits)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)


def from_target(probs):
    """The residual is forgotten: draws from p after a rejection (field note A2)."""

    def verifier(target, tokens, draft, uniforms):
        p, n = probs(target), baselines.verify_token(target, tokens, draft, uniforms).num_accepted
        return baselines._emit(tokens, n, p, torch.zeros_like(p[:, :-1]), torch.ones(len(n)))

    return verifier


def stops_never(target, tokens, draft, uniforms):
    """Counts successes instead of stopping at the first failure."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    index = tokens[..., None]
    accepted = uniforms[:, :-1] * q.gather(-1, index)[..., 0] < p[:, :-1].gather(-1, index)[..., 0]
    n = accepted.sum(-1)
    return baselines._emit(tokens, n, p, q, torch.ones(len(n)))


@pytest.mark.parametrize(
    "wrong",
    [
        from_target(baselines.softmax_probs),
        stops_never,
        baselines.verify_block,
        partial(baselines.verify_token, probs=partial(baselines.sort_probs, top_p=0.9)),
    ],
    ids=["from_target", "stops_never", "other_rule", "other_law"],
)
def test_a_wrong_baseline_is_refused(wrong):
    inputs = inputs_of("token", "none", "0.7", "float32", batch=40)
    expected = bench.expect(inputs, "token", None)
    with pytest.raises(AssertionError):
        bench.check_baseline(wrong, inputs, expected)


def test_compiled_baselines_must_agree_with_eager_ones():
    inputs = inputs_of("token", "none", "0.7", "float32", batch=40)
    bench.check_compiled(baselines.verify_token, baselines.verify_token, inputs)
    with pytest.raises(AssertionError):
        bench.check_compiled(stops_never, baselines.verify_token, inputs)


def test_given_randomness_replaces_both_sources():
    uniforms = torch.tensor([[0.25, 0.75, 0.5]], dtype=torch.float64)
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    with baselines.GivenRandomness(uniforms):
        assert torch.rand_like(torch.zeros(2)).tolist() == [0.25, 0.75]
        assert torch.multinomial(weights, 1).tolist() == [[3]]  # the prefix must exceed u * total
    assert baselines.inverse_cdf(weights, torch.tensor([0.0])).tolist() == [[1]]
    assert baselines.inverse_cdf(weights, torch.tensor([0.49])).tolist() == [[1]]


# ---- inputs and bars -----------------------------------------------------------------------------


def test_acceptance_is_what_the_name_says():
    for filters in bench.FILTERS:
        full = inputs_of("token", filters, "full", "float32", vocab=8192)
        some = inputs_of("token", filters, "0.7", "float32", vocab=8192, batch=16)
        alphas = [
            bench.mean_acceptance(x.target[:, :-1].flatten(0, 1), x.draft.flatten(0, 1), filters)
            for x in (full, some)
        ]
        assert alphas == [pytest.approx(1.0), pytest.approx(0.7, abs=0.08)]


def test_masses_leaves_every_inflow_below_one():
    inputs = inputs_of("block", "none", "masses", "float32", vocab=8192)
    p, q = inputs.target[:, :-1].softmax(-1), inputs.draft.softmax(-1)
    index = inputs.tokens[..., None]
    ratio = p.gather(-1, index) / q.gather(-1, index)
    assert bool((ratio < 1).all()) and float(ratio.mean()) > 0.5


@pytest.mark.parametrize(
    ("rule", "accepted", "rows"),
    [("token", [0, 1, 2], [2 + 2, 4 + 2, 5 + 1]), ("block", [0, 2], [5 + 2, 5 + 1])],
)
def test_rows_to_read(rule, accepted, rows):
    setting = bench.Setting(rule, len(accepted), 2, 8, "float32", "none", "0.7")
    assert bench.rows_to_read(torch.tensor(accepted), setting) == sum(rows)


def test_bars_of_the_project():
    def bar(rule, filters, batch, baseline):
        setting = bench.Setting(rule, batch, 5, 128_256, "bfloat16", filters, "full")
        return bench.bar(setting, baseline)

    assert [bar("token", "none", b, "eager") for b in (1, 8)] == [10, 12]
    assert [bar("block", "none", b, "eager") for b in (1, 8)] == [8, 8]
    assert bar("token", "top_k+top_p", 1, "eager sort") == 100
    assert bar("token", "top_k+top_p", 1, "eager topk") == 5
    assert bar("token", "top_p", 1, "eager sort") == 30
    assert bar("token", "none", 1, "compile") is None


@pytest.mark.parametrize(
    ("theirs", "mark"),
    [
        ((12.0, 20.0), "PASS"),
        ((9.0, 20.0), "pass by median"),
        ((12.0, 9.0), "pass by minimum"),
        ((9.0, 9.0), "FAIL"),
    ],
)
def test_marks(theirs, mark):
    setting = bench.Setting("token", 1, 5, 128_256, "float32", "none", "full")
    timings = {
        bench.OURS: common.Timing(1, 1.0, 1.0, 1.0),
        bench.READ: common.Timing(1, 0.4, 0.5, 1.0),
        "eager": common.Timing(1, *theirs, 30.0),
    }
    result = bench.Result(setting, timings, 1.0, 5.0, 0.8, 0, None)
    assert result.mark("eager") == mark
    assert result.floor_percent() == pytest.approx(40.0)  # reads x median


def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.LAWS["none"], "eager", partial(baselines.sort_probs, top_p=0.5))
    arguments = "--vocab 300 --batch 40 --gamma 2 --dtype float32 --filters none --rule token"
    options = [*arguments.split(), "--baselines", "eager", "--threads", "1", "--seed", "7"]
    threads = torch.get_num_threads()
    try:
        assert bench.main([*options, "--output", str(tmp_path), "--check-requests", "40"]) == 1
    finally:
        torch.set_num_threads(threads)
    assert "NOT EQUAL, not timed" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    assert len(payload["machine"]["refused"]) == 1 and payload["records"] == []


# ---- timing and writers --------------------------------------------------------------------------


def test_measure_takes_turns():
    calls = []
    contestants = {
        name: lambda i, name=name: calls.append((name, i)) or torch.zeros(200_000).exp_().sum()
        for name in "AB"
    }
    timings = common.measure(contestants, budget=0.0, min_rounds=3, slice_seconds=0.0)
    assert calls[4:] == [(name, i) for i in range(3) for name in "AB"]  # four calls to warm up
    assert all(t.calls == 3 and 0 < t.min <= t.median <= t.p90 for t in timings.values())


def test_the_calmest_attempt_is_kept(monkeypatch):
    shares = iter([0.5, 0.2, 0.3, 0.6, 0.01])
    monkeypatch.setattr(common.Load, "share", lambda self: next(shares))
    monkeypatch.setattr(common, "measure", lambda timed, **_: {})
    options = bench.parse(["--retries", "2", "--seed", "0"])
    assert bench.measure_calmly({}, options) == ({}, 0.2)
    assert bench.measure_calmly({}, options) == ({}, 0.01)


@pytest.mark.parametrize("size", [4, 5])
def test_as_words_sees_the_same_memory(size):
    data = torch.ones(1, size, dtype=torch.bfloat16)
    assert common.as_words(data).tolist() == [0x3F803F80] * 2


def test_markdown_table():
    table = common.markdown_table(["name", "x"], [["a", "1.0"], ["long name", "22"]])
    assert table.splitlines() == [
        "| name      |   x |",
        "| --------- | --: |",
        "| a         | 1.0 |",
        "| long name |  22 |",
    ]
    narrow = common.markdown_table(["n", "T"], [["a", "1"]])  # a rule needs a dash
    assert narrow.splitlines() == ["| n  |  T |", "| -- | -: |", "| a  |  1 |"]


def test_csv_takes_the_columns_of_all_records(tmp_path):
    common.write_csv(tmp_path / "x.csv", [{"a": 1}, {"a": 2, "b": 3}])
    assert (tmp_path / "x.csv").read_text().splitlines() == ["a,b", "1,", "2,3"]


def test_plot_says_when_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert common.plot_times(tmp_path / "x.png", ["g"], {"s": [1.0]}, "t") is False
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["--quick", "--bars", None])
def test_smoke(mode, tmp_path, capsys):
    threads = torch.get_num_threads()
    tiny = "--vocab 300 --batch 1 --gamma 2 --dtype float32 bfloat16 --budget 0 --min-rounds 1"
    arguments = [*tiny.split(), "--threads", "1", "--seed", "7", "--output", str(tmp_path)]
    arguments += ["--retries", "0"]  # other tests use the machine, as ever
    # torch.compile takes longer than all else here together.
    arguments += ["--baselines", *(b for b in bench.BASELINES if b != "compile")]
    try:
        assert bench.main(arguments + ([mode] if mode else [])) == 0
    finally:
        torch.set_num_threads(threads)

    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    assert payload["machine"]["seed"] == 7 and payload["machine"]["cores"] >= 1
    records = payload["records"]
    names = {r["contestant"] for r in records}
    assert {bench.OURS, bench.EXPONENTIALS, "eager", "eager sort", "eager topk"} <= names
    for record in records:
        assert 0 < record["min_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["ratio_median"] > 0 and record["floor_percent"] > 0
        assert (record["bar"] is not None) == (record["mark"] != "")
    with path.with_suffix(".csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["contestant"] for line in lines] == [r["contestant"] for r in records]

    out = capsys.readouterr().out
    assert "bars pass" in out and "| rule, filters, dtype, B" in out
    assert path.with_suffix(".png").exists() or "matplotlib is missing" in out


# ---- tree attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["", "paged", "float8"])
@pytest.mark.parametrize("dtype", bench_trees.DTYPES)
def test_contestants_of_tree_attention_agree(dtype, cache):
    setting = bench_trees.Setting(2, 9, 4, 2, 40, dtype, True, cache)
    call = bench_trees.make_call(setting, torch.device("cpu"))
    expected = reference.tree_attention(**call).out
    padding = (call["ancestors"] == 0).all(2)
    assert padding.any()
    found = bench_trees.contestants(setting, call)
    assert list(found) == [bench_trees.OURS, bench_trees.DENSE, bench_trees.FLEX]
    for name in (bench_trees.OURS, bench_trees.DENSE):  # to compile the third takes long
        out = found[name]()
        assert bench_trees.check(name, out, expected, padding) == ""
        assert "differs from the reference" in bench_trees.check(name, out * 1.1, expected, padding)


def test_table_of_tree_attention(monkeypatch):
    monkeypatch.setattr(bench_trees, "flex_attention", None)
    monkeypatch.setattr(torch, "compile", fails_to_compile)
    setting = bench_trees.Setting(1, 8, 2, 1, 40, "float32")
    record, right = bench_trees.run(setting, torch.device("cpu"), budget=0.01)
    assert right and record["ratio"] > 0 and record["bar"] == 1.0
    other = {**record, f"{bench_trees.FLEX} median ms": 1.0}
    table = bench_trees.tables.attention_table([record, other]).splitlines()
    cells = table[2].split("|")
    assert setting.label() in cells[1] and cells[4].strip() == "-"
    assert table[3].split("|")[4].strip() == "1"
    assert cells[6].strip() == ("PASS" if record["ratio"] >= 1.0 else "FAIL")
    assert [s.dtype for s in bench_trees.grid(True, torch.device("cuda"))] == ["bfloat16"] * 5


def fails_to_compile(*args, **kwargs):
    def call(*args, **kwargs):
        raise RuntimeError("no compiler")

    return call
