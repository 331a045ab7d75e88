import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import UsageError
from edgespec.memory.free_memory import free_in_groups, free_memory
from edgespec.system.units import parse_bytes


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("512M", 512_000_000),
        ("2G", 2 * 10**9),
        ("1.5g", 15 * 10**8),
        ("2GiB", 2 << 30),
        ("2gi", 2 << 30),
        ("3 MB", 3_000_000),
        ("1048576", 1 << 20),
        (1 << 30, 1 << 30),
    ],
)
def test_sizes_are_read_as_people_write_them(written: int | str, wanted: int) -> None:
    assert parse_bytes(written) == wanted


@pytest.mark.parametrize(
    "written",
    [
        "",
        "G",
        "-2G",
        "2X",
        "0",
        "5",
        12,
        -1,
        True,
        2.5,
        "1e9",
        "99999999T",
        "9" * 400,
        "9" * 5000,
        "9" * 400 + ".5G",
    ],
)
def test_what_is_no_size_is_refused(written: int | str) -> None:
    with pytest.raises(UsageError, match="such as 2G or 512M"):
        parse_bytes(written)


def test_a_limit_of_the_user_counts_what_this_process_holds() -> None:
    room = free_memory(1 << 20)
    assert room.free_bytes == 0
    assert "memory limit" in room.bound


def test_without_limits_the_machine_bounds() -> None:
    assert 0 < free_memory(1 << 58).free_bytes <= free_memory().free_bytes + (1 << 30)


def group(folder: Path, limit: str, used: int, idle: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"cache 7\n{key} {idle}\n")


def test_groups_of_the_second_version_bound_with_all_above_them(tmp_path: Path) -> None:
    group(tmp_path / "a" / "b", "max\n", 50, 0, version=2)
    group(tmp_path / "a", "1000\n", 700, 100, version=2)
    assert [each.free_bytes for each in free_in_groups("0::/a/b\n", tmp_path)] == [400]


def test_groups_of_the_first_version_bound(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "a", "1000\n", 700, 100, version=1)
    group(tmp_path / "memory", "9223372036854771712\n", 900, 0, version=1)
    assert [each.free_bytes for each in free_in_groups("5:cpu:/a\n4:memory:/a\n0::/\n", tmp_path)] == [400]


def test_a_group_of_the_host_is_the_mount_itself_within_a_container(tmp_path: Path) -> None:
    group(tmp_path, "1000\n", 700, 0, version=2)
    assert [each.free_bytes for each in free_in_groups("0::/docker/123\n", tmp_path)] == [300]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit of the address space")
def test_the_limit_of_the_address_space_bounds() -> None:
    code = (
        "import resource, psutil; from edgespec.memory.free_memory import free_memory\n"
        "limit = psutil.Process().memory_info().vms + (64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "room = free_memory(); assert 32 << 20 < room.free_bytes <= 64 << 20, room; print(room.bound)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ulimit -v" in done.stdout
