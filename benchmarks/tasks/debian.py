"""Debian packages and package lists, fetched by apt into a folder of its own.

Nothing is installed, and nothing of the system's own apt is read or changed except its keyring:
apt keeps its state in the folder, and checks signatures as always.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks.records import SourceError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Fixed, so that every machine gets the same packages.
ARCHITECTURE = "amd64"


class Debian:
    """One release of Debian on one mirror.

    Parameters
    ----------
    folder : Path
        Keeps apt's state and the packages.
    suite : str
        The release, ``bookworm``.
    mirror : str
        The URL of the archive.
    """

    def __init__(self, folder: Path, suite: str, mirror: str) -> None:
        self.folder, self.suite, self.mirror = folder.resolve() / suite, suite, mirror
        self._is_current = False

    def package(self, name: str) -> Path:
        """Fetch a package.

        Raises
        ------
        SourceError
            Without apt, without its keyring, and where the mirror does not have the package.
        """
        self.packages([name])
        return self._kept(name)[0]

    def packages(self, names: Sequence[str]) -> None:
        """Fetch the packages that are not in the folder yet, all at once."""
        missing = [name for name in names if not self._kept(name)]
        if missing:
            self._update()
            self._apt("download", *missing)
        lost = [name for name in missing if not self._kept(name)]
        if lost:
            raise SourceError(f"apt-get download ended well, but without {', '.join(lost)}")

    def lists(self, ending: str) -> Path:
        """Fetch a package list, by the end of its name: ``Packages`` or ``Translation-de``."""
        found = sorted((self.folder / "lists").glob(f"*_{ending}"))
        if not found:
            self._update()
            found = sorted((self.folder / "lists").glob(f"*_{ending}"))
        if not found:
            raise SourceError(f"{self.mirror} has no list {ending} of {self.suite}")
        return found[0]

    def _kept(self, name: str) -> list[Path]:
        return sorted((self.folder / "packages").glob(f"{name}_*.deb"))

    def _update(self) -> None:
        if self._is_current:
            return
        if not KEYRING.exists():
            raise SourceError(
                f"{KEYRING} is missing, with which apt checks {self.mirror}; on Ubuntu the package "
                "debian-archive-keyring has it"
            )
        for name in ("lists/partial", "cache/archives/partial", "packages"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        line = f"deb [signed-by={KEYRING}] {self.mirror} {self.suite} main\n"
        (self.folder / "sources.list").write_text(line)
        self._apt("update", "--error-on=any")
        self._is_current = True

    def _apt(self, *arguments: str) -> None:
        """Run apt-get on the folder's own state."""
        options = {
            "Dir::State": self.folder,
            "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": "/dev/null",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Architecture": ARCHITECTURE,
            "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
            "Acquire::Languages": "en,de",
            "Acquire::GzipIndexes": "false",
            "Acquire::Retries": "3",
        }
        if shutil.which("apt-get") is None:
            raise SourceError(
                "apt-get is missing: this source comes from Debian packages; run it on Debian, "
                "Ubuntu or in a container of theirs, or leave the source out with --only"
            )
        set_ = [f"-o{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            ["apt-get", "-qq", *set_, *arguments],
            cwd=self.folder / "packages",
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            what = " ".join(arguments)[:200]
            raise SourceError(f"apt-get {what} failed at {self.mirror} ({self.suite}): {said}")


def version(package: Path) -> str:
    """Return the version in a package's file name."""
    return package.name.split("_")[1].replace("%3a", ":")


def files_of(package: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a package's plain files, those that are wanted.

    Names are without the leading ``./``. Links are left out: what they point to comes by itself.
    """
    if shutil.which("dpkg-deb") is None:
        raise SourceError("dpkg-deb is missing, which reads Debian packages: it is part of dpkg")
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if member.isreg() and wanted(name):
                        content = archive.extractfile(member)
                        assert content is not None
                        yield name, content.read()
        except tarfile.ReadError as error:
            said = process.stderr.read().decode(errors="replace").strip()
            raise SourceError(f"{package} cannot be read as a package: {said or error}") from error
        process.stdout.read()  # padding after the archive: dpkg-deb must not find the pipe closed


def paragraphs(path: Path) -> Iterator[dict[str, str]]:
    """Yield the entries of a package list, as fields to texts with their line breaks."""
    with path.open(encoding="utf-8") as lines:
        yield from parse_paragraphs(lines)


def parse_paragraphs(lines: Iterator[str] | io.TextIOBase) -> Iterator[dict[str, str]]:
    """Parse the format of Debian's control files (deb822)."""
    fields: dict[str, str] = {}
    name = ""
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            if fields:
                yield fields
            fields, name = {}, ""
        elif line[0] in " \t":
            if name:
                fields[name] += "\n" + line[1:]
        else:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if fields:
        yield fields
