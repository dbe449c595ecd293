"""Tables of Xia et al.: each runs on a tiny family with an untrained drafter."""

from __future__ import annotations

import csv
import ctypes
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from tiny_family import make_family

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.seq2seq.block_drafter import KIND, build_drafter  # noqa: E402
from pair.seq2seq.models import load_family, save_model  # noqa: E402
from tables import __main__ as command  # noqa: E402
from tables import (  # noqa: E402
    decode,
    rows,
    shared,
    xia,
    xia_attention,
    xia_energy,
    xia_figures,
    xia_memory,
)
from tables.registry import XIA  # noqa: E402

from specdec_ext.models.heads import BlockwiseHeads  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A family that was trained for a few seconds, and two drafters of its largest model."""
    base = tmp_path_factory.mktemp("xia")
    work, data = base / "family" / "correction", base / "data" / "correction"
    make_family(work, data)
    family = load_family(work)
    for name, block in (("spec-drafter", 12), ("small", 4)):
        drafter = build_drafter(
            family.models[family.largest], block=block, encoder_layers=1, decoder_layers=1,
            dropout=0.0, seed=0, from_target=False,
        )  # fmt: skip
        save_model(drafter, work, name, {"options": {"start": ""}, "steps": 7}, KIND)
    target = family.models[family.largest]
    ids = torch.ones(1, 2, dtype=torch.int64)
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    for number in (3, 11):  # in the order of their numbers, not of their names
        heads = BlockwiseHeads.from_target(target, number, inputs=inputs, intermediate_size=8)
        folder = heads_folder(work) / f"blockwise-{number}"
        heads.save_pretrained(folder)
        facts = json.dumps({"options": {}, "steps": 10 * number})
        (folder / "training.json").write_text(facts)
    (heads_folder(work) / "medusa-4").mkdir()  # other heads are not theirs
    return work, data


def heads_folder(work):
    return work.parent / "heads"


def bench_of(folders, *arguments):
    work, data = folders
    given = ["--task", str(work), "--data", str(data), "--heads", str(heads_folder(work))]
    given += arguments
    return shared.Bench(load_family(work), command.parse(given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", XIA)
def test_every_table_runs(name, folders, tmp_path, capsys):
    work, data = folders
    found = command.main(
        [name, "--quick", "--task", str(work), "--data", str(data), "--output", str(tmp_path),
         "--record", "found", "--heads", str(heads_folder(work))]
    )  # fmt: skip
    assert found == 0
    assert (tmp_path / "found.md").read_text().split("\n\n")[1] in capsys.readouterr().out
    with (tmp_path / "found.csv").open() as lines:
        records = list(csv.DictReader(lines))
    ways = [record["way"] for record in records]
    assert len(ways) > 1 and (name == "xia_figure6" or decode.PLAIN in ways)
    of_heads = ["3 blockwise heads", "11 blockwise heads"]
    assert [way for way in ways if "heads" in way] == of_heads * (name in ("xia1", "xia2"))
    if name == "xia1":
        assert float(records[ways.index(of_heads[1])]["relative_bleu"]) == pytest.approx(100)
    if name == "xia2":
        assert {"spec-drafter", "small"} <= set(ways)
        begun = {record["way"]: record["start"] for record in records}
        assert begun["spec-drafter"] == "random weights" and begun[decode.PLAIN] == ""
        steps = {record["way"]: record["steps"] for record in records if record["steps"]}
        assert steps == {"spec-drafter": "7", "small": "7"} | dict(
            zip(of_heads, ("30", "110"), strict=True)
        )
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.thorough
def test_what_is_added_to_a_row(folders):
    """Text that verification by equality gives is the greedy one; a block's time is its rounds'."""
    bench = bench_of(folders, "xia1", "--quick")
    name, model = xia.first_drafter(bench)
    assert name == "spec-drafter" and xia.chosen(bench, (5, 12, 25), model) == [12]
    alike = {
        decode.PLAIN: decode.plain_way(bench, 0.0),
        "block": xia.vanilla(bench, model, 12),
    }
    found = xia.measured(bench, alike, {"loose": xia.relaxed(bench, model, 12, 99, 99.0)})
    own = {record["way"]: record for record in found.records}
    assert own["block"]["relative_bleu"] == pytest.approx(100)
    assert own["loose"]["relative_bleu"] < 100  # everything was accepted
    assert own["loose"]["tokens_a_call"] > own["block"]["tokens_a_call"]
    assert "draft_milliseconds" not in own[decode.PLAIN]
    statistics = [run.statistics for run in found.runs["block"]]
    seconds = sum(s.seconds["draft"] for s in statistics) / sum(s.rounds for s in statistics)
    assert own["block"]["draft_milliseconds"] == pytest.approx(1000 * seconds)
    assert xia.tokens_bar(found, "block", "loose").endswith("PASS")
    assert xia.tokens_bar(found, "loose", "block").endswith("FAIL")


def test_a_drafter_is_wanted(tmp_path):
    options = command.parse(["xia1", "--task", str(tmp_path / "translation")])
    with pytest.raises(ValueError, match="no drafter is in .*drafters: run .* drafter` first"):
        xia.drafters_of(shared.Bench(None, options))


def test_printed_rows():
    record = {}
    xia.beside(record, xia.TABLE_1[False, xia.BASE][25])
    assert record == {"paper_bleu": 28.93, "paper_speed": 5.1}
    for part in xia.TABLE_1.values():  # heads change no text, and are slower the more there are
        speeds = [part[xia.HEADS, block].speed for block in xia.BLOCKS]
        assert part[xia.HEADS, 10].bleu == part[decode.PLAIN].bleu and speeds[0] > speeds[1]
    assert xia.TABLE_1[True, xia.DEEP][25] == (None, 32.48, 3.3)
    assert set(xia.TABLE_3) == set(xia.EVERY_BLOCK)
    assert set(xia.TABLE_4) == {(beta, tau) for beta in xia.BETAS for tau in xia.TAUS}
    # The development set's row of Table 3 at 25 is Table 4's at beta 3 and tau 1.
    assert xia.TABLE_3[25][:2] == xia.TABLE_4[3, 1.0][:2]
    assert rows.COUNTS[0] in xia.NOTES
    assert list(xia.TAUS) == sorted(xia.TAUS)


# ---- Table 5 -------------------------------------------------------------------------------------


def test_rouge_wants_english_texts(tmp_path):
    for folder in ("translation", "translation-reverse"):
        options = command.parse(["xia5", "--task", str(tmp_path / folder)])
        with pytest.raises(ValueError, match=f"one of summarisation, correction .*got {folder}$"):
            xia.table5(shared.Bench(None, options))


# ---- Tables 8 and 9 ------------------------------------------------------------------------------


def test_the_peak_of_allocations_and_frees():
    assert xia_memory.peak_of_events([]) == 0
    assert xia_memory.peak_of_events([4, 8, -8, 2, -4, -2]) == 12
    assert xia_memory.peak_of_events([-100, 4]) == 0  # what was there before, and less since


def test_peak_bytes_of_what_is_known():
    """Two tensors at once are more than three, one after the other."""
    device, size = torch.device("cpu"), 1 << 20

    def by_turns():
        for _ in range(3):
            torch.zeros(size, dtype=torch.uint8)

    def together():
        return [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    assert size <= xia_memory.peak_bytes(by_turns, device) < 1.1 * size
    assert 2 * size <= xia_memory.peak_bytes(together, device) < 2.1 * size
    assert xia_memory.peak_bytes(lambda: None, device) < 0.1 * size


def test_bytes_of_weights_that_are_shared():
    layer = torch.nn.Linear(4, 4, bias=False)
    assert xia_memory.weight_bytes(torch.nn.Sequential(layer, layer)) == 64


@pytest.mark.thorough
def test_memory_grows_with_the_batch(folders):
    bench = bench_of(folders, "xia8", "--sentences", "8", "--tokens", "8")
    records = {(r["way"], r["batch"]): r for r in xia_memory.make(bench).records}
    assert set(records) == {
        (way, size) for way in (decode.PLAIN, xia_figures.VANILLA) for size in (1, 4, 8)
    }
    for way in (decode.PLAIN, xia_figures.VANILLA):
        peaks = [records[way, size]["peak"] for size in (1, 4, 8)]
        assert 0 < peaks[0] < peaks[1] < peaks[2]
    _, model = xia.first_drafter(bench)
    weights = [records[way, 1]["weights"] for way in (decode.PLAIN, xia_figures.VANILLA)]
    own = sum(parameter.nbytes for parameter in model.parameters())
    assert (weights[1] - weights[0]) * 2**20 == pytest.approx(own)
    assert records[decode.PLAIN, 8]["paper_total"] == 301.4


# ---- Table 15 ------------------------------------------------------------------------------------


class Counter:
    """NVML as far as the meter asks it: 50 joules more at every reading."""

    def __init__(self, **codes):
        self.codes, self.millijoules, self.uuid = codes, 7_000_000, None

    def __getattr__(self, name):
        def called(*given):
            if name == "nvmlDeviceGetHandleByUUID":
                self.uuid = given[0].value
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                self.millijoules += 50_000
                ctypes.cast(given[1], ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
            return self.codes.get(name, 0)

        return called


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU that has an identity and nothing else."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return torch.device("cuda:0")


def test_the_meter_reads_joules_of_this_gpu(one_gpu, monkeypatch):
    counter = Counter()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: counter)
    meter = xia_energy.open_meter(one_gpu)
    assert meter() == 7_100 and meter() == 7_150 and counter.uuid == b"GPU-a-b"


def test_why_there_is_no_meter(one_gpu, monkeypatch):
    with pytest.raises(xia_energy.NoMeterError, match="the models run on a CPU"):
        xia_energy.open_meter(torch.device("cpu"))
    monkeypatch.setattr(xia_energy, "LIBRARY", "no-such-library.so")
    with pytest.raises(xia_energy.NoMeterError, match="no-such-library.so cannot be loaded"):
        xia_energy.open_meter(one_gpu)
    name = "nvmlDeviceGetTotalEnergyConsumption"
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Counter(**{name: 3}))
    with pytest.raises(xia_energy.NoMeterError, match=f"{name} returned 3"):
        xia_energy.open_meter(one_gpu)


def test_energy_by_the_papers_formulas():
    """Table 15's first row: 86 W for .27 hours are 25.54 Wh and 9.83 g."""
    found = xia_energy.energy_of(86 * 0.27 * 3600, 0.27 * 3600)
    assert found == pytest.approx({"power": 86, "energy": 25.54, "carbon": 9.83}, abs=6e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("has_meter", [True, False])
def test_energy_is_measured_or_named_as_missing(folders, has_meter, monkeypatch):
    bench = bench_of(folders, "xia15", "--quick")
    readings = iter(range(0, 10_000, 36))
    if has_meter:
        monkeypatch.setattr(xia_energy, "open_meter", lambda _: lambda: float(next(readings)))
    found = xia_energy.make(bench)
    assert [record["way"] for record in found.records][0] == decode.PLAIN
    for record in found.records:
        assert ("missing" in record) != has_meter and record["seconds"] > 0
        if has_meter:
            assert record["energy"] == pytest.approx(0.011)
            assert record["power"] == pytest.approx(36 / record["seconds"])
    if not has_meter:
        assert "The energy is missing: the models run on a" in found.text()


# ---- Figure 3 ------------------------------------------------------------------------------------


def test_likeness_of_maps_by_hand():
    one = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert xia_attention.likeness(one, one) == (1.0, 0.0)
    assert xia_attention.likeness(one, one.flip(0)) == (0.0, 1.0)
    shared_by_all = torch.tensor([[0.6, 0.8], [0.6, 0.8]])
    assert xia_attention.likeness(shared_by_all, shared_by_all) == pytest.approx((1, 1))
    assert math.isnan(xia_attention.likeness(one[:1], one[:1])[1])


@pytest.mark.thorough
@torch.inference_mode()
def test_maps_are_where_the_decoders_look(folders):
    """The target's are transformers' own; a drafter with one query for all has equal rows."""
    bench = bench_of(folders, "xia_figure3", "--quick")
    _, drafter = xia.first_drafter(bench)
    source, text = bench.sentences[0].source, [5, 6, 7, 1]
    attention = drafter.decoder.block[-1].layer[1].EncDecAttention
    implementation = attention.config._attn_implementation
    maps = xia_attention.maps_of(bench.target, drafter, source, text)
    assert attention.config._attn_implementation == implementation
    for weights in maps:
        assert weights.shape == (len(text), len(source))
        assert (weights.sum(1) - 1).abs().max() < 1e-5
    bench.target.set_attn_implementation("eager")
    output = bench.target(
        input_ids=torch.tensor([source]), labels=torch.tensor([text]), output_attentions=True
    )
    expected = output.cross_attentions[-1][0].mean(0)
    assert (maps.decoder - expected).abs().max() < 1e-5
    attention.q.weight.zero_()  # all queries are one: all rows are alike
    same = xia_attention.maps_of(bench.target, drafter, source, text).block
    assert (same - same[:1]).abs().max() < 1e-6 < (maps.block - maps.block[:1]).abs().max()
