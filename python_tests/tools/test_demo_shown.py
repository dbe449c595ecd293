"""``demo --race`` and ``demo --html``: what is replayed, and what the page says, is what ran."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from test_demo import ROOT, command, here, on_terminal, pair, run  # noqa: F401

from specdec_ext.commands import demo, html_page, race, runs
from specdec_ext.commands.page import ACCEPTED, REPLACED, TARGET
from specdec_ext.commands.pair import find_prompts, load_pair
from specdec_ext.commands.pieces import Piece, Reader, pieces_of
from specdec_ext.decoding import Burst, RoundRecord, SuffixDrafter, generate
from specdec_ext.decoding.tracing import ModelCall, RecordedRound

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """Tokens (attributes and text), ids, rounds of the speculative lane, and addresses named."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[tuple[dict[str, str], str]] = []
        self.ids: list[str] = []
        self.rounds = {"speculative": 0, "plain": 0}
        self.scripts = self.rows = 0
        self.loaded: list[str] = []
        self._lane = ""
        self._in_token = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.loaded += [values[name] for name in ("src", "href") if name in values]
        self.scripts += tag == "script"
        self.rows += tag == "tr"
        if values.get("id") in self.rounds:
            self._lane = values["id"]
        if values.get("class") == "round":
            self.rounds[self._lane] += 1
        self._in_token = values.get("role") == "option"
        if self._in_token:
            self.tokens.append((values, ""))

    def handle_endtag(self, tag):
        self._in_token = False

    def handle_data(self, data):
        if self._in_token:
            values, text = self.tokens[-1]
            self.tokens[-1] = values, text + data


def options_of(pair: Path, *more: str) -> argparse.Namespace:  # noqa: F811
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(command(pair, *more)[4:])


@pytest.fixture(scope="module")
def recorded(pair):  # noqa: F811
    """Return the models, the prompt, the options and both runs."""
    args = options_of(pair)
    models = load_pair(args.target, args.draft)
    prompt = find_prompts(models, args.prompt)[0]
    return models, prompt, args, *runs.both_ways(models, prompt, args, turns=1)


# --- what is recorded ---------------------------------------------------------------------------


def test_a_recorded_run_is_the_run(recorded):
    models, prompt, args, plain, speculative = recorded
    expected, statistics = generate(
        models.target,
        models.draft,
        prompt.ids,
        max_new_tokens=24,
        gamma=3,
        temperature=0.8,
        seeds=0,
    )
    assert speculative.tokens == expected[0, prompt.ids.shape[1] :].tolist()
    assert len(speculative.rounds) == statistics.rounds == speculative.calls("target")
    assert speculative.calls("draft") >= statistics.draft_calls > 0
    assert len(plain.tokens) == len(plain.rounds) == plain.calls("target") == 24
    assert plain.calls("draft") == 0


def test_times_are_in_order_and_within_their_round(recorded):
    for run_ in recorded[3:]:
        now = 0.0
        for found in run_.rounds:
            assert found.begin == now
            for call in found.calls:
                assert now <= call.begin < call.end
                now = call.end
            assert now <= found.end
            now = found.end
        assert run_.seconds == now


def test_no_hook_stays():
    model = torch.nn.Linear(2, 2)
    with RoundRecord(model) as record:
        model(torch.ones(2))
        record([])
    assert [call.model for call in record.rounds[0].calls] == ["target"]
    model(torch.ones(2))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_one_model_for_both_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="target and draft must be two objects, got one"):
        RoundRecord(model, model)


def test_probabilities_are_those_of_the_run(recorded):
    models, prompt, _, _, speculative = recorded
    found = runs.written(models, prompt, speculative, 0.8)
    logprobs = [x for r in speculative.rounds for burst in r.bursts for x in burst.logprobs]
    emitted = [w for w in found if w.piece.kind != REPLACED]
    assert [w.position for w in emitted] == list(range(24))
    assert [w.target for w in emitted] == pytest.approx([math.exp(x) for x in logprobs], rel=1e-3)
    assert [w.piece.token for w in emitted] == speculative.tokens
    replaced = [i for i, w in enumerate(found) if w.piece.kind == REPLACED]
    assert replaced and all(found[i].draft > 0 for i in replaced)
    for i in replaced:
        assert found[i + 1].piece.kind == TARGET
        assert found[i + 1].position == found[i].position


# --- the page -----------------------------------------------------------------------------------


def page_of(recorded, prompt: str = "a prompt", **changes) -> str:
    models, its, _, plain, speculative = recorded
    tokens = changes.pop("tokens", None) or runs.written(models, its, speculative, 0.8)
    both = (plain, speculative)
    return html_page.page_of(prompt, tokens, *both, "settings", greedy=False, **changes)


def test_the_page_has_every_token_and_round(recorded):
    models, prompt, _, plain, speculative = recorded
    tokens = runs.written(models, prompt, speculative, 0.8)
    page = Page(page_of(recorded))
    assert len(page.tokens) == len(tokens) == page.rows - 1
    for (values, _), found in zip(page.tokens, tokens, strict=True):
        assert values["data-kind"] == found.piece.kind
        assert values["data-round"] == str(found.round)
        assert values["data-position"] == str(found.position)
        for said in (f"probability {found.target:.3g}", f"round {found.round}, position"):
            assert said in values["title"] and said in values["aria-label"]
    assert page.rounds == {"speculative": len(speculative.rounds), "plain": len(plain.rounds)}
    assert [values["tabindex"] for values, _ in page.tokens].count("0") == 1
    assert len(set(page.ids)) == len(page.ids)


def test_the_page_loads_nothing(recorded):
    text = page_of(recorded)
    assert Page(text).loaded == [] and "{{" not in text
    assert not re.search(r"url\(|@import|fetch\(|https?:", text)


def test_what_looks_like_markup_is_text(recorded):
    script = "</script><script>alert(1)</script>"
    texts = [script, '"><b>', "<!--", "&amp;", "{{rows}}", "a\x1b\x00"]
    tokens = [
        runs.Written(Piece(ACCEPTED, i, text), 1, i, 0.5, None) for i, text in enumerate(texts)
    ]
    page = Page(page_of(recorded, prompt="</textarea><script>{{notes}}", tokens=tokens))
    assert page.scripts == 1
    assert [text for _, text in page.tokens] == [*texts[:-1], "a␛␀"]
    assert "draft's probability" not in page.tokens[0][0]["title"]


def test_characters_of_several_tokens_are_whole(pair, recorded):  # noqa: F811
    tokenizer = recorded[0].tokenizer
    text = "日本 <🙂>\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    reader = Reader(tokenizer, [])
    burst = Burst(0, ids, len(ids), None, [0.0] * len(ids))
    tokens = [
        runs.Written(piece, 1, i, 0.5, 0.5) for i, piece in enumerate(pieces_of(burst, reader))
    ]
    page = Page(page_of(recorded, tokens=tokens))
    assert "".join(text for _, text in page.tokens) == text
    parts = [values for values, text in page.tokens if not text]
    assert len(parts) == 2 + 2 + 3
    assert all(values["data-mark"] == "▫" and "part of" in values["title"] for values in parts)


def test_a_special_token_has_its_name(recorded):
    tokens = [runs.Written(Piece(TARGET, 0, ""), 1, 0, 0.5, 0.5)]
    names = html_page.names_of(recorded[0], tokens)
    page = Page(page_of(recorded, tokens=tokens, names=names))
    assert page.tokens[0][0]["data-mark"] == "</s>" and page.tokens[0][1] == ""


def rectangles(svg: str, lane: str) -> list[tuple[str, float, float]]:
    part = svg.partition(f'<g id="{lane}">')[2].partition("</g></g>")[0]
    found = re.findall(r'<rect class="(\w+)-bar" x="([\d.]+)" y="\d+" width="([\d.]+)"', part)
    return [(kind, float(x), float(width)) for kind, x, width in found]


def test_bars_are_as_long_as_calls_took():
    def round_(begin: float, end: float, *calls: ModelCall) -> RecordedRound:
        return RecordedRound(begin, end, [Burst(0, [1, 2], 1, None, [0.0, 0.0])], list(calls))

    call = ModelCall
    fast = runs.Recording(
        [round_(0, 4, call("draft", 0.5, 1), call("target", 1, 3)),
         round_(4, 6, call("target", 4, 6))], 6.0,
    )  # fmt: skip
    slow = runs.Recording([round_(0, 12, call("target", 0, 12))], 12.0)
    svg = html_page._timeline(slow, fast)
    kinds, starts, widths = zip(*rectangles(svg, "speculative"), strict=True)
    assert kinds == ("other", "draft", "target", "other", "target")
    scale = widths[0] / 4  # pixels a second
    assert list(widths) == pytest.approx([n * scale for n in (4, 0.5, 2, 2, 2)], abs=0.6)
    assert [x - starts[0] for x in starts] == pytest.approx(
        [n * scale for n in (0, 0.5, 1, 4, 4)], abs=0.02
    )
    (_, _, whole), (_, _, target) = rectangles(svg, "plain")
    assert whole == pytest.approx(12 * scale, abs=0.02) and target <= whole


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_of_text_can_be_read_in_light_and_dark():
    schemes = html_page.TEMPLATE.read_text().split("prefers-color-scheme: dark")
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        page = luminance(colours["page"])
        for name in ("ink", "faint", "accepted", "replaced", "target"):
            low, high = sorted((page, luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name
    assert len(schemes) == 2


def test_the_command_writes_the_page(here, tmp_path):  # noqa: F811
    status, output, _ = here(f"--html={tmp_path / 'page.html'}")
    assert status == 0 and f"wrote {tmp_path / 'page.html'}" in output
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len([v for v, _ in page.tokens if v["data-kind"] != REPLACED]) == 24
    status, _, errors = here("--html=/nowhere/page.html")
    assert status == 2 and "there is no folder /nowhere" in errors


def test_a_target_alone_is_drafted_for_by_lookup(pair, recorded, tmp_path, capsys):  # noqa: F811
    args = options_of(pair, "--temperature=0", f"--html={tmp_path / 'page.html'}")
    args.draft = None
    assert isinstance(load_pair(args.target, needs_draft=False).drafter, SuffixDrafter)
    assert demo.run(args) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "SuffixDrafter(), copies of the text" in text and "those of temperature 1" in text
    assert "draft&#x27;s probability" not in text
    capsys.readouterr()


SCRIPT = """<script>
const first = tokens[0];
first.focus();
document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
const said = [document.activeElement === tokens[1], !tip.hidden,
  tip.textContent.includes("round " + tokens[1].dataset.round),
  tokens[0].tabIndex, tokens[1].tabIndex, document.querySelectorAll(".token[title]").length,
  document.querySelectorAll(".round.same").length];
document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
rounds[0].dispatchEvent(new MouseEvent("mouseenter"));
said.push(tip.textContent.startsWith("round 1,"),
  document.querySelectorAll('.token.same:not([data-round="1"])').length);
document.title = JSON.stringify(said);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(recorded, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(recorded).replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert "<title>[true,true,true,-1,0,0,1,true,0]</title>" in shown


# --- the race -----------------------------------------------------------------------------------


def test_the_race_as_text(pair):  # noqa: F811
    done = run(pair, "--race")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for said in ("plain: ", "speculative: ", "«accepted»   ~replaced~", "times the tokens a second",
                 "24 tokens in", "calls of the target against 24."):  # fmt: skip
        assert said in done.stdout


@pytest.mark.thorough
def test_no_colour_is_text(pair):  # noqa: F811
    text = on_terminal(pair, "--race", NO_COLOR="1")
    assert "\x1b[3" not in text and "«accepted»" in text


@pytest.mark.thorough
def test_the_race_on_a_terminal(pair):  # noqa: F811
    pytest.importorskip("rich")
    text = on_terminal(pair, "--race", COLUMNS="100", LINES="30")
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "slow motion, " in bare and "24 tokens, " in bare and " a second  done" in bare
    assert "times the tokens a second" in bare and "\x1b[32m" in text


def test_the_final_frame_holds_both_texts(recorded):
    console_of = pytest.importorskip("rich.console").Console
    models, prompt, _, *both = recorded
    timed = [race._timed(models, prompt, found) for found in both]
    console = console_of(width=100, height=40, file=open("/dev/null", "w"), record=True)

    def frame(now: float) -> str:
        console.print(race._frame(console, timed, tuple(both), now, 5))
        return console.export_text()

    begun, ended = frame(0.0), frame(max(found.seconds for found in both))
    assert begun.count("0 tokens, 0.0 a second") == 2 and "done" not in begun
    assert ended.count("24 tokens") == 2 and ended.count("done") == 2
    assert f"{both[1].speed:.1f} a second" in ended and "5 times slower" in ended


@pytest.mark.parametrize(("seconds", "factor"), [(7.0, 1), (4.0, 2), (0.3, 20), (0.001, 1000)])
def test_slow_motion(seconds, factor):
    assert race.slow_motion(seconds) == factor


def test_rich_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"pip install 'specdec_ext\[race\]'"):
        race._need_rich()


# --- the picture --------------------------------------------------------------------------------


def test_the_readme_has_the_picture():
    picture = ROOT / "docs" / "demo.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size < 200_000
    assert "(docs/demo.png)" in (ROOT / "README.md").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_picture_is_taken_of_a_page(recorded, tmp_path):
    spec = importlib.util.spec_from_file_location("draw_page", ROOT / "docs" / "draw_page.py")
    draw_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_page)
    (tmp_path / "page.html").write_text(page_of(recorded), encoding="utf-8")
    draw_page.take(tmp_path / "page.html", tmp_path / "page.png", "300,200")
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert header[1:4] == b"PNG" and header[16:24] == bytes([0, 0, 1, 44, 0, 0, 0, 200])
