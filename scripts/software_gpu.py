"""Runs a command with a GPU in software: a Vulkan driver that computes on the processor.

    python scripts/software_gpu.py pytest -m webgpu -n 0

The driver is Mesa's lavapipe, which has half floats, and where that cannot be had SwiftShader, which has none: it
is part of the package chromium. Both come from the archive of the system's own distribution (Debian, Ubuntu), for
Debian 12 with its backports, whose Mesa is new enough. The packages are unpacked into a cache folder: nothing is
installed, apt's sources and lists stay as they are, and no rights are needed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import platformdirs

_OS_RELEASE = Path("/etc/os-release")
_APT = Path("/etc/apt")
_CACHE = "edgespec-tests"
_APT_LIMIT_S = 300
_TRY_LIMIT_S = 120


class Driver(NamedTuple):
    """A Vulkan driver. packages: what holds it and the loader. file: its description, as a pattern below /usr."""

    name: str
    packages: tuple[str, ...]
    file: str
    note: str


DRIVERS = (
    Driver("lavapipe", ("libvulkan1", "mesa-vulkan-drivers"), "share/vulkan/icd.d/lvp_icd*.json", "half floats"),
    Driver("swiftshader", ("libvulkan1", "chromium"), "lib/chromium/vk_swiftshader_icd.json", "no half floats"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--driver", choices=[driver.name for driver in DRIVERS], help="this one and no other")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    arguments = parser.parse_args()
    drivers = [driver for driver in DRIVERS if arguments.driver in (None, driver.name)]
    cache = os.environ.get("EDGESPEC_TEST_CACHE") or platformdirs.user_cache_dir(_CACHE, appauthor=False)
    found = find_driver(drivers, Path(cache) / "software-gpu")
    if found is None:
        print(
            "no Vulkan driver that runs on the processor can be had here; the lines above say why", file=sys.stderr
        )
        return 1
    os.environ.update(found)
    return subprocess.run(arguments.command).returncode if arguments.command else 0


def find_driver(drivers: Sequence[Driver], cache: Path) -> dict[str, str] | None:
    """The environment of the first driver that computes: the system's own, one unpacked before, or a new one."""
    for driver in drivers:
        for root in (Path("/usr"), cache / driver.name / "usr", None):
            root = root or _fetch(driver, cache)
            if root is None or not (files := sorted(root.glob(driver.file))):
                continue
            environment = _environment(_description(files[0], root, cache), root, cache)
            if problem := _problem(environment):
                print(f"{driver.name} in {root} is of no use: {problem}", file=sys.stderr)
                continue
            print(f"the GPU is {driver.name} ({driver.note}) from {root}", file=sys.stderr)
            return environment
    return None


def _description(file: Path, root: Path, cache: Path) -> Path:
    """The driver's description; a copy that names its library here, if it was unpacked and not installed."""
    if not root.is_relative_to(cache):
        return file
    document = json.loads(file.read_text())
    name = Path(document["ICD"]["library_path"]).name
    libraries = sorted(root.glob(f"lib/**/{name}"))
    if not libraries:
        return file
    document["ICD"]["library_path"] = str(libraries[0])
    copy = cache / f"{file.stem}.json"
    text = json.dumps(document)
    if not (copy.is_file() and copy.read_text() == text):
        copy.write_text(text)
    return copy


def _environment(file: Path, root: Path, cache: Path) -> dict[str, str]:
    libraries = sorted({str(path.parent) for path in root.glob("lib/**/libvulkan.so.1")})
    shaders, runtime = cache / "shaders-128", cache / "runtime"
    shaders.mkdir(parents=True, exist_ok=True)
    runtime.mkdir(mode=0o700, exist_ok=True)
    return {
        "VK_DRIVER_FILES": str(file),
        "VK_ICD_FILENAMES": str(file),  # the older name
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep),
        "MESA_SHADER_CACHE_DIR": str(shaders),  # compiling takes minutes of processor time, once
        "LP_NATIVE_VECTOR_WIDTH": "128",  # compiles in half the time of 256
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or str(runtime),
        "EDGESPEC_TEST_WEBGPU": "1",
    }


def _problem(environment: Mapping[str, str]) -> str:
    """Why the WebGPU provider cannot compute with it; empty where it can."""
    command = [sys.executable, "-P", "-m", "edgespec.runtimes.driver_check", "webgpu"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_TRY_LIMIT_S
    )
    return "" if done.returncode == 0 else (done.stdout.strip() or f"the process ended with {done.returncode}")


def _fetch(driver: Driver, cache: Path) -> Path | None:
    """Unpack a driver's packages, and those that they need and the system lacks; None where they cannot be had."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        print(f"{driver.name} is not installed, and only apt can fetch it", file=sys.stderr)
        return None
    print(f"fetching {driver.name} with apt", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="apt-") as made:
        apt = _Apt(Path(made))
        problem = apt.download(driver.packages)
        if problem:
            print(f"{driver.name} cannot be fetched: {problem}", file=sys.stderr)
            return None
        root = cache / driver.name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for package in apt.packages():
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    return root / "usr"


class _Apt:
    """apt with lists, sources and archives of its own in a folder; the installed packages are the system's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for part in ("lists/partial", "archives/partial", "sources"):
            (folder / part).mkdir(parents=True)
        (folder / "sources.list").touch()
        for source in _system_sources():
            shutil.copy(source, folder / "sources" / source.name)
        backports = _backports()
        if backports:
            (folder / "sources" / "backports.list").write_text(backports)
        self._suite = backports.split()[-2] if backports else ""

    def download(self, packages: Sequence[str]) -> str:
        """Returns what went wrong; empty where all were downloaded."""
        self._run("update", "-q")  # a source that does not answer is not always needed
        newest = ["-t", self._suite] if self._suite else []
        options = ["install", "--download-only", "-y", "-q", "--no-install-recommends", "--reinstall"]
        done = self._run(*options, *newest, *packages)
        if done.returncode and newest:  # there are no backports for this machine
            done = self._run(*options, *packages)
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""

    def packages(self) -> list[Path]:
        return sorted((self._folder / "archives").glob("*.deb"))

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": self._folder / "sources",
            "Dir::State::lists": self._folder / "lists",
            "Dir::Cache::archives": self._folder / "archives",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "1",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(
            ["apt-get", *options, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=_APT_LIMIT_S,
        )


def _system_sources() -> Iterator[Path]:
    for path in (_APT / "sources.list", *sorted((_APT / "sources.list.d").glob("*"))):
        if path.suffix in (".list", ".sources") and path.is_file():
            yield path


def _backports() -> str:
    """A line of sources.list for the backports of a Debian release, from the mirror that the system uses."""
    stated = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _OS_RELEASE.read_text(), re.MULTILINE))
    if stated.get("ID") != "debian" or "VERSION_CODENAME" not in stated:
        return ""
    for source in _system_sources():
        text = source.read_text(errors="replace")
        if mirror := re.search(r"(https?://\S+?/debian)/?(?=\s)", text):
            key = re.search(r"(?im)^signed-by:\s*(/\S+)|\[[^]]*signed-by=(/[^\] ]+)", text)
            signed = f"[signed-by={key[1] or key[2]}] " if key else ""
            return f"deb {signed}{mirror[1]} {stated['VERSION_CODENAME']}-backports main\n"
    return ""


if __name__ == "__main__":
    sys.exit(main())
