"""The data of the tasks: readers, cleaning, division, errors. Nothing here needs a network."""

import io
import json
import struct
import sys
import tarfile
import zipfile
from collections import Counter

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from tasks import __main__ as command  # noqa: E402
from tasks import (  # noqa: E402
    align,
    catalogues,
    clean,
    correction,
    debian,
    descriptions,
    docstrings,
    manpages,
    markup,
    pypi,
    sources,
    split,
)
from tasks.records import (  # noqa: E402
    CORRECTION,
    PERMISSIVE,
    SUMMARISATION,
    TRANSLATION,
    Record,
    SourceError,
    sentences,
)


def record(source, target, document="pages/one", licence="MPL-2.0", origin="pages"):
    return Record(source, target, document, origin, licence)


# ---- readers -------------------------------------------------------------------------------------


def test_sentences_are_told_from_abbreviations():
    text = "Use a file, e.g. Makefile. It ends here! Done? Yes."
    assert sentences(text) == ["Use a file, e.g. Makefile.", "It ends here!", "Done?", "Yes."]
    assert sentences("Am 3. Oktober geht z. B. Anna. Dann Otto.") == [
        "Am 3. Oktober geht z. B. Anna.",
        "Dann Otto.",
    ]


def test_alignment_wants_the_same_kinds():
    def blocks(*texts):
        return [align.Block(kind, text, kind == "h") for kind, text in texts]

    ours = blocks(("h", "A"), ("p", "a1"), ("p", "a2"), ("h", "B"), ("p", "b"))
    theirs = blocks(("h", "X"), ("p", "x"), ("h", "Y"), ("p", "y"))
    # The first section lost a paragraph: which one, nobody knows.
    assert list(align.aligned(ours, theirs)) == [("B", "Y"), ("b", "y")]
    assert list(align.aligned(ours, theirs[:2])) == []
    assert len(list(align.aligned(ours, ours))) == 5


def test_help_pages_are_paired_by_identity():
    ours = """<script>var x = "<p>";</script><p id="par_1">The <b>first</b>&amp; one</p>
        <p>nameless</p><h2 id="hd_2">Heading</h2><p id="par_3">twice</p><p id="par_3">twice</p>"""
    theirs = """<h2 id="hd_2">Überschrift</h2><div><p id="par_1">Der<br>erste</p></div>
        <p id="par_3">zweimal</p><p id="par_4">mehr</p>"""
    assert list(markup.by_identity(ours, theirs)) == [
        ("The first& one", "Der erste"),
        ("Heading", "Überschrift"),
    ]


def test_pages_are_paired_by_structure():
    ours = "<page><info><mal:name>A. Body</mal:name></info><title>One</title><p>a <em>b</em></p>"
    theirs = "<page><info/><title>Eins</title><p><em>b</em> c</p></page>"
    people = frozenset({"info"})
    assert list(markup.by_structure(ours, theirs, people)) == [("One", "Eins"), ("a b", "b c")]
    assert list(markup.by_structure(ours, theirs)) == [("One", "Eins"), ("a b", "b c")]
    other = theirs.replace("<p>", "<item>").replace("</p>", "</item>")
    assert list(markup.by_structure(ours, other, people)) == []


PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgctxt "menu|open"
msgid "Open"
msgstr "Öffnen"

msgid "Untouched"
msgstr ""

#, fuzzy
msgid "Guessed"
msgstr "Geraten"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

#~ msgid "Old"
#~ msgstr "Alt"
"""


def machine_object(messages):
    """Write a gettext .mo file."""
    keys = sorted(messages)
    texts = [key.encode() for key in keys] + [messages[key].encode() for key in keys]
    place, table, data = 28 + 16 * len(keys), b"", b""
    for text in texts:
        table += struct.pack("<II", len(text), place + len(data))
        data += text + b"\0"
    head = (0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 28)
    return struct.pack("<7I", *head) + table + data


def test_catalogues():
    pytest.importorskip("polib")
    expected = [
        ("menu|open", "Open", "Öffnen"),
        ("", "%d file", "%d Datei"),
        ("", "%d files", "%d Dateien"),
    ]
    assert list(catalogues.gettext_pairs(PO.encode())) == expected
    compiled = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        "menu|open\x04Open": "Öffnen",
        "%d file\0%d files": "%d Datei\0%d Dateien",
    }
    assert sorted(catalogues.gettext_pairs(machine_object(compiled))) == sorted(expected)


def test_catalogues_without_their_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "polib", None)
    with pytest.raises(SourceError, match="pip install polib"):
        list(catalogues.gettext_pairs(PO.encode()))


def test_messages_of_dialogs():
    assert catalogues.without_accelerator("Ä_ndern …") == "Ändern …"
    assert catalogues.without_accelerator("~Datei") == "Datei"
    assert catalogues.without_accelerator("a_b_c") == "a_b_c"
    assert catalogues.dialog("sw", "pagedialog|ok") == "sw/pagedialog"
    # These name no dialog: the whole catalogue is one document.
    assert catalogues.dialog("sw", "STR_A") == catalogues.dialog("sw", "STR_B") == "sw"


def test_json_files_are_paired_by_key():
    english = {"title": "Title", "step": {"a": "One", "b": "Two"}, "list": ["x"]}
    german = {"step": {"b": "Zwei", "c": "Drei"}, "title": "Titel"}
    pairs = catalogues.json_pairs(json.dumps(english).encode(), json.dumps(german).encode())
    assert list(pairs) == [("Title", "Titel"), ("Two", "Zwei")]


ENGLISH_PAGE = r"""'\" t
.\" a comment
.TH CP 1
.SH "SEE ALSO"
copy \- files
and more
.PP
Use
.B \-a
or
.BR ls (1).
.nf
example
.fi
.TP
.BR \-f ", " \-\-force
Do it.
"""
GERMAN_PAGE = r"""
.TH CP 1
.SH "SIEHE AUCH"
copy \- Dateien
.PP
\fB\-a\fP oder \fBls\fP(1) nehmen\&.
.nf
Beispiel
.fi
.TP
\fB\-f\fP, \fB\-\-force\fP
Tu es\(em bald.
.SH ÜBERSETZUNG
Von jemand.
"""


def test_manual_pages():
    assert list(manpages.pairs(ENGLISH_PAGE, GERMAN_PAGE)) == [
        ("SEE ALSO", "SIEHE AUCH"),
        ("copy - files and more", "copy - Dateien"),
        ("Use -a or ls(1).", "-a oder ls(1) nehmen."),
        ("-f, --force", "-f, --force"),
        ("Do it.", "Tu es— bald."),
    ]
    # What cannot be read keeps its place, and gives no pair.
    unknown = GERMAN_PAGE.replace("copy", r"\[nosuchglyph]")
    assert len(list(manpages.pairs(ENGLISH_PAGE, unknown))) == 4
    assert list(manpages.pairs(".Dd today\n.Sh NAME\ntext", GERMAN_PAGE)) == []


PACKAGES = """Package: libfoo1
Source: foo (1.2-3)

Package: foo-doc
Source: foo

Package: bar
"""
ENGLISH_LIST = """Package: libfoo1
Description-md5: 11
Description-en: reads foo files
 Foo is a format. It is old.
 Many files have it.
 .
 Features:
  * fast
  * small

Package: bar
Description-md5: 22
Description-en: draws bars
 Nothing else.
"""
GERMAN_LIST = """Package: libfoo1
Description-md5: 11
Description-de: liest Foo-Dateien
 Foo ist ein Format. Es ist alt. Viele Dateien haben es.
 .
 Eigenschaften:
  * schnell
  * klein

Package: bar
Description-md5: 33
Description-de: einer anderen Fassung
"""


def entries(text):
    return list(debian.parse_paragraphs(io.StringIO(text)))


def test_descriptions():
    known = descriptions.source_packages(entries(PACKAGES))
    assert known == {"libfoo1": "foo", "foo-doc": "foo", "bar": "bar"}
    found = descriptions.translations(entries(ENGLISH_LIST), entries(GERMAN_LIST), known)
    assert list(found) == [
        ("foo", "reads foo files", "liest Foo-Dateien"),
        ("foo", "Foo is a format.", "Foo ist ein Format."),
        ("foo", "It is old.", "Es ist alt."),
        ("foo", "Many files have it.", "Viele Dateien haben es."),
        ("foo", "Features:", "Eigenschaften:"),
        ("foo", "* fast", "* schnell"),
        ("foo", "* small", "* klein"),
    ]
    assert list(descriptions.summaries(entries(ENGLISH_LIST), known))[1] == (
        "bar",
        "Nothing else.",
        "draws bars",
    )
    assert descriptions.sentence_pairs("One. Two.", "Eins und zwei.") == [
        ("One. Two.", "Eins und zwei.")
    ]


def test_docstrings():
    text = '''
class A:
    @cached
    def f(self, x):
        """Return x, e.g. Y. And more.

        Long.
        """
        # why
        return x

    def only(self):
        """Nothing but this."""

async def g(): return 1
'''
    assert list(docstrings.functions(text)) == [
        ("def f(self, x):\n    # why\n    return x", "Return x, e.g. Y.")
    ]
    assert list(docstrings.functions("def f(:")) == []
    with pytest.raises(SourceError, match="pip install no_such_package"):
        list(docstrings.modules("no_such_package"))
    assert any(name == "bisect.py" for name, _ in docstrings.modules("stdlib"))


# ---- correction ----------------------------------------------------------------------------------

LIST = """recieve->receive
teh->the
wich->which, witch,
occured->occurred
occurrd->occurred
alot->a lot
"""


def test_corruption_is_the_list_backwards():
    corrections = correction.read_list(LIST)
    assert corrections == {
        "recieve": "receive",
        "teh": "the",
        "occured": "occurred",
        "occurrd": "occurred",
    }
    misspellings, known = correction.backwards(corrections), correction.listed(LIST)
    assert misspellings["occurred"] == ["occured", "occurrd"] and "wich" in known
    right = "The errors that occurred when we receive the mail, which RECEIVE alone shows."
    texts = [right, "Nothing known here.", "Already teh wrong word, with the other.", "Wich the?"]
    found = list(correction.corrupted(texts, misspellings, known))
    assert [target for _, target in found] == [right]
    ((wrong, _),) = found
    changed = [
        (a, b) for a, b in zip(wrong.split(), right.split(), strict=True) if a != b
    ]  # as many words
    assert changed
    for misspelt, word in changed:
        assert corrections[misspelt.strip(".,").lower()] == word.strip(".,").lower()
        assert misspelt[0].isupper() == word[0].isupper()
        assert misspelt.isupper() == word.isupper()
    assert list(correction.corrupted(texts, misspellings, known)) == found


def test_another_share_misspells_more(monkeypatch):
    misspellings = {"the": ["teh"]}
    text = "the " * 200
    few = correction.corrupt(text, misspellings).count("teh")
    monkeypatch.setattr(correction, "SHARE", 1.0)
    assert 10 <= few <= 60 and correction.corrupt(text, misspellings).count("teh") == 200


# ---- cleaning ------------------------------------------------------------------------------------

TOO_LONG = "Wort " * (clean.MOST_WORDS + 1)


@pytest.mark.parametrize(
    "task, source, target, why",
    [
        (TRANSLATION, "Open the file.", "Die Datei öffnen.", None),
        (TRANSLATION, "It costs 1,000.5 now", "Es kostet jetzt 1.000,5", None),
        (TRANSLATION, "100 % of %s in {name}", "In {name}: %s, und 100 %", None),
        (TRANSLATION, "Open", " ", "empty"),
        (TRANSLATION, "Open it", "Öff\ufffdnen", "unreadable characters"),
        (TRANSLATION, "Version", "version", "not translated"),
        (TRANSLATION, "a b c d e f g", "a b c d e f h", "not translated"),
        (TRANSLATION, "-a, --all", "-a, -- ALLE", "no words"),
        (TRANSLATION, "All words " * 50, TOO_LONG, "too long"),
        (TRANSLATION, "Open the file that was chosen before", "Auf", "length ratio"),
        (TRANSLATION, "Version 3 of it", "Fassung 4 davon", "numbers differ"),
        (TRANSLATION, "Version 3 of it", "Fassung davon", "numbers differ"),
        (TRANSLATION, "%(user)s was here", "%(nutzer)s war hier", "placeholders differ"),
        (TRANSLATION, "Open <b>it</b> now", "Jetzt öffnen", "placeholders differ"),
        (TRANSLATION, "Delete $name$ now?", "Name jetzt löschen?", "placeholders differ"),
        (SUMMARISATION, "def add(a, b):\n    return a + b", "Add two numbers.", None),
        (SUMMARISATION, "def add(a, b):\n    return a + b", "", "empty"),
        (SUMMARISATION, "def add(a, b):\n    return a + b", "Adds.", "summary too short"),
        (SUMMARISATION, "x = 1\n" * 300, "Add two numbers.", "too long"),
        (SUMMARISATION, "def a(): pass", "Add two numbers.", "no shorter than the source"),
        (SUMMARISATION, "word " * 90, "word " * 41, "summary too long"),
        (CORRECTION, "We recieve all mail.", "We receive all mail.", None),
        (CORRECTION, "We receive all mail.", "We receive all mail.", "nothing to correct"),
        (CORRECTION, "Teh end.", "The end.", "not 4 to 60 words"),
        (CORRECTION, "we recieve all mail", "we receive all mail", "no sentence"),
    ],
)
def test_cleaning_rules(task, source, target, why):
    assert clean.fault(task, record(source, target)) == why


def test_what_is_dropped_is_counted():
    given = [
        record("Open the file", "Datei öffnen"),
        record("", "x"),
        record("Version", "Version"),
        record("Name", "Name"),
    ]
    dropped = Counter()
    kept = list(clean.cleaned(TRANSLATION, given, dropped))
    assert kept == given[:1]
    assert dropped == {"empty": 1, "not translated": 2}


def test_every_task_has_rules_that_every_record_can_break():
    assert set(clean.RULES) == {TRANSLATION, SUMMARISATION, CORRECTION}
    for rules in clean.RULES.values():
        assert len({name for name, _ in rules}) == len(rules) > 3


# ---- licences ------------------------------------------------------------------------------------


def test_only_named_licences_are_permissive():
    assert record("a", "b", licence="MPL-2.0").permissive
    assert not record("a", "b", licence="MPL-2.0 AND CC-BY-SA-3.0").permissive
    assert not record("a", "b", licence="each package's own").permissive
    permissive = {name for name, source in sources.SOURCES.items() if source.licence in PERMISSIVE}
    assert permissive == {
        *("libreoffice-help", "libreoffice-messages", "home-assistant", "django", "jupyterlab"),
        *("docstrings-stdlib", "docstrings-torch", "docstrings-sympy", "docstrings-transformers"),
    }


# ---- division ------------------------------------------------------------------------------------


def many(documents=2000, each=4):
    return [
        record(f"text {d} {i}", f"Satz {d} {i}", f"pages/{d}")
        for d in range(documents)
        for i in range(each)
    ]


def shared_documents(divided):
    found = [{r.document for r in divided[name]} for name in split.SPLITS]
    return found[0] & found[1] | found[0] & found[2] | found[1] & found[2]


def test_no_document_is_in_two_splits():
    given = many()
    divided = split.divide(given, Counter())
    assert sum(map(len, divided.values())) == len(given)
    assert not shared_documents(divided)
    assert 30 <= len({r.document for r in divided[split.TEST]}) <= 95
    assert 18 <= len({r.document for r in divided[split.VALID]}) <= 70
    # The control: sentences divided one by one share documents.
    by_sentence = {name: [] for name in split.SPLITS}
    for one in given:
        by_sentence[split.split_of(one.document + one.source)].append(one)
    assert len(shared_documents(by_sentence)) > 100


def test_the_division_depends_on_nothing_but_documents():
    given = many(documents=300)
    divided = split.divide(given, Counter())
    again = split.divide(given[::-2], Counter())
    for name in split.SPLITS:
        assert {r.document for r in again[name]} == {r.document for r in divided[name]}
    assert split.split_of("pages/1") == split.split_of("pages/1") == split.TRAIN
    assert split.split_of("libreoffice-help/shared/0") in split.SPLITS


def test_descriptions_and_summaries_share_documents():
    assert sources.SOURCES["debian-summaries"].shelf == "debian"
    assert sources.SOURCES["debian-translations"].shelf == "debian"


def documents_of(name, count):
    return [f"d/{i}" for i in range(1000) if split.split_of(f"d/{i}") == name][:count]


def test_held_out_texts_are_not_in_training():
    (train,), (valid,), (test,) = (documents_of(name, 1) for name in split.SPLITS)
    given = [
        record("Open  File", "Datei öffnen", train),
        record("open file", "Öffne Datei", test),  # its source was seen
        record("Load it", "datei ÖFFNEN", test),  # its target was seen
        record("Save it", "Speichern", test),
        record("Save it", "Sichern", valid),
        record("Print it", "Drucken", valid),
    ]
    leaked = Counter()
    divided = split.divide(given, leaked)
    assert [r.source for name in split.SPLITS for r in divided[name]] == [
        "Open  File",
        "Print it",
        "Save it",
    ]
    assert leaked == {"pages": 3}


def test_pairs_come_once():
    repeated = Counter()
    given = [record("A b", "C"), record("a  B", "c"), record("a b", "d")]
    assert list(split.distinct(given, repeated)) == [given[0], given[2]]
    assert repeated == {"pages": 1}


# ---- fetching ------------------------------------------------------------------------------------


def executable(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def keyring(monkeypatch, tmp_path):
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "keyring.gpg")
    debian.KEYRING.touch()


def archive(tmp_path):
    return debian.Debian(tmp_path / "debian", "bookworm", "http://mirror.invalid/debian")


def test_without_apt(monkeypatch, tmp_path, keyring):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match="apt-get is missing.*--only"):
        archive(tmp_path).package("hello")
    with pytest.raises(SourceError, match="dpkg-deb is missing"):
        list(debian.files_of(tmp_path / "hello_1_all.deb", lambda name: True))


def test_without_the_keyring(monkeypatch, tmp_path):
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "absent.gpg")
    with pytest.raises(SourceError, match="absent.gpg is missing.*debian-archive-keyring"):
        archive(tmp_path).lists("Packages")


def test_without_network(monkeypatch, tmp_path, keyring):
    tools = tmp_path / "bin"
    tools.mkdir()
    executable(tools / "apt-get", "echo 'E: Could not resolve mirror.invalid' >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    with pytest.raises(
        SourceError, match="apt-get update .* failed at http://mirror.invalid.*E: C"
    ):
        archive(tmp_path).package("hello")


def test_apt_is_asked_once_and_keeps_to_its_folder(monkeypatch, tmp_path, keyring):
    tools = tmp_path / "bin"
    tools.mkdir()
    said = tmp_path / "said"
    executable(tools / "apt-get", f'echo "$@" >> {said}; touch hello_2%3a1_all.deb')
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    one = archive(tmp_path)
    path = one.package("hello")
    assert debian.version(path) == "2:1"
    assert one.package("hello") == path  # kept: not asked again
    calls = said.read_text().splitlines()
    assert [call.split()[-2:] for call in calls] == [
        ["update", "--error-on=any"],
        ["download", "hello"],
    ]
    for call in calls:
        assert f"-oDir::State={tmp_path}/debian/bookworm " in call
        assert f"-oDir::Cache={tmp_path}/debian/bookworm/cache " in call
        assert "-oDir::Etc::sourceparts=- " in call
    with pytest.raises(SourceError, match="without other"):
        one.packages(["other"])


def test_packages_are_read_as_a_stream(monkeypatch, tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as packed:
        for name, text in (("./usr/a.txt", b"one"), ("./usr/b.bin", b"two")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("./usr/c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        packed.addfile(link)
    (tmp_path / "x.deb").write_bytes(content.getvalue())
    executable(tmp_path / "dpkg-deb", 'cat "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = dict(debian.files_of(tmp_path / "x.deb", lambda name: name.endswith(".txt")))
    assert found == {"usr/a.txt": b"one"}
    executable(tmp_path / "dpkg-deb", "echo 'no archive' >&2; exit 2")
    with pytest.raises(SourceError, match="no archive"):
        list(debian.files_of(tmp_path / "x.deb", lambda name: True))


def test_wheels(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "two_words-1.5-py3-none-any.whl", "w") as packed:
        packed.writestr("b.txt", "b")
        packed.writestr("a.txt", "a")
        packed.writestr("c.py", "c")
    path = pypi.wheel(tmp_path, "Two-Words", "1.5")  # there already
    assert list(pypi.files_of(path, lambda n: n.endswith(".txt"))) == [
        ("a.txt", b"a"),
        ("b.txt", b"b"),
    ]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SourceError, match="pip could not fetch Two-Words 1.6: .*1.6"):
        pypi.wheel(tmp_path, "Two-Words", "1.6")


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def one_source(monkeypatch, tmp_path):
    """Two sources of one task whose records are known, and a list of misspellings."""

    def read(store):
        for i in range(200):
            yield (
                str(i),
                f"We receive the message number {i} here.",
                f"Hier kommt Nachricht {i} an.",
            )
        yield "0", "Version", "Version"
        yield "1", "We receive the message number 1 here.", "Hier kommt Nachricht 1 an."

    known = sources.Source("pages", TRANSLATION, "MPL-2.0", "made up", read)
    monkeypatch.setitem(sources.SOURCES, "pages", known)
    with zipfile.ZipFile(tmp_path / "codespell-2.4.3-py3.whl", "w") as packed:
        packed.writestr("codespell_lib/data/dictionary.txt", LIST)
    monkeypatch.setattr(sources.Store, "wheel", lambda *_: tmp_path / "codespell-2.4.3-py3.whl")


def test_the_command_writes_what_it_counts(one_source, tmp_path, capsys):
    assert command.main(["--only", "pages,codespell", "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    note = manifest["sources"]["pages"]
    assert (note["read"], note["dropped"], note["clean"]) == (202, {"not translated": 1}, 201)
    assert note["repeated"] == 1
    documents = {}
    for task in (TRANSLATION, CORRECTION):
        total = 0
        for name in split.SPLITS:
            path = tmp_path / task / f"{name}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            said = manifest["tasks"][task][name]
            assert said["records"] == len(lines) > 0
            assert said["sha256"] == command.hash_of(path)
            assert {line["permissive"] for line in lines} == {task == TRANSLATION}
            documents[task, name] = {line["document"] for line in lines}
            total += len(lines)
        assert total == 200
    for name in split.SPLITS:  # the sentences to correct are where their documents are
        assert documents[TRANSLATION, name] == documents[CORRECTION, name]
    assert "MPL-2.0" in capsys.readouterr().out
    assert "| pages | translation | MPL-2.0 |" in command.table(manifest)


def test_a_source_that_cannot_be_had_stops_everything(one_source, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "manifest.json")
    debian.KEYRING.touch()
    out = tmp_path / "out"
    assert command.main(["--only", "pages,gnome-help", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "apt-get is missing" in said and "Nothing was written" in said
    assert not (out / "translation").exists() and not (out / "manifest.json").exists()


def test_correction_needs_sentences(tmp_path, capsys):
    assert command.main(["--only", "codespell", "--out", str(tmp_path)]) == 1
    assert "choose a translation source" in capsys.readouterr().err


def test_names_are_checked_and_listed(capsys):
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])
    assert "no such source: nothing" in capsys.readouterr().err
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(sources.SOURCES)
