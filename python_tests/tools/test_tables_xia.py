"""Tables of Xia et al.: each runs on a tiny family with an untrained drafter."""

from __future__ import annotations

import csv
import sys

import pytest
from conftest import ROOT
from tiny_family import make_family

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.seq2seq.block_drafter import KIND, build_drafter  # noqa: E402
from pair.seq2seq.models import load_family, save_model  # noqa: E402
from tables import __main__ as command  # noqa: E402
from tables import decode, rows, shared, xia  # noqa: E402
from tables.registry import XIA  # noqa: E402


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
        save_model(drafter, work, name, {}, KIND)
    return work, data


def bench_of(folders, *arguments):
    work, data = folders
    given = ["--task", str(work), "--data", str(data), *arguments]
    return shared.Bench(load_family(work), command.parse(given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", XIA)
def test_every_table_runs(name, folders, tmp_path, capsys):
    work, data = folders
    found = command.main(
        [name, "--quick", "--task", str(work), "--data", str(data), "--output", str(tmp_path),
         "--record", "found"]
    )  # fmt: skip
    assert found == 0
    assert (tmp_path / "found.md").read_text().split("\n\n")[1] in capsys.readouterr().out
    with (tmp_path / "found.csv").open() as lines:
        records = list(csv.DictReader(lines))
    ways = [record["way"] for record in records]
    assert len(ways) > 1 and (name == "xia_figure6" or decode.PLAIN in ways)
    if name == "xia2":
        assert {"spec-drafter", "small"} <= set(ways)
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
    xia.beside(record, xia.TABLE_1[25])
    assert record == {"paper_bleu": 28.93, "paper_speed": 5.1}
    assert set(xia.TABLE_3) == set(xia.EVERY_BLOCK)
    assert set(xia.TABLE_4) == {(beta, tau) for beta in xia.BETAS for tau in xia.TAUS}
    # The development set's row of Table 3 at 25 is Table 4's at beta 3 and tau 1.
    assert xia.TABLE_3[25][:2] == xia.TABLE_4[3, 1.0][:2]
    assert rows.COUNTS[0] in xia.NOTES
    assert list(xia.TAUS) == sorted(xia.TAUS)
