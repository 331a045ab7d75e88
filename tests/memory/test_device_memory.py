"""What drivers tell, on fakes of them: of no GPU, but in the words of the real package."""

import os
from pathlib import Path

import pytest
from fake_nvml import Gpu, install_driver

from edgespec.errors import UnknownMemory
from edgespec.memory import device_memory
from edgespec.memory.device_memory import Places, amd_readers, nvidia_reader, read_nvidia_driver
from edgespec.memory.free_memory import HOST, FreeMemory, device_reserve

GIB = 1 << 30
HOST_ROOM = FreeMemory(7 * GIB, "the memory of this machine")


def on_device(free: int, name: str, total: int) -> FreeMemory:
    return FreeMemory(free, f"the memory of {name}", reserve=device_reserve(total))


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's files, of no GPU so far, on a machine that hides no GPU from CUDA."""
    monkeypatch.setattr(device_memory, "_SYSFS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def places(kinds: list[str], said: list[str] | None = None) -> Places:
    return Places(kinds, lambda: HOST_ROOM, [].append if said is None else said.append)


def card(sysfs: Path, name: str, total: int | str, used: int | str) -> Path:
    device = sysfs / name / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{total}\n")
    (device / "mem_info_vram_used").write_text(f"{used}\n")
    return device


def test_the_real_library_tells_figures_or_that_there_is_no_driver() -> None:
    try:
        free = nvidia_reader({})()
    except UnknownMemory as error:
        assert "NVIDIA's driver does not report it" in str(error)  # noqa: PT017
        assert read_nvidia_driver() is None
    else:
        assert 0 <= free.free_bytes < 1 << 42


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        (None, ["first", "second"]),
        ("1", ["second"]),
        ("1,0", ["second", "first"]),
        ("GPU-b", ["second"]),
        (" 0", ["first"]),
        ("0,7,1", ["first"]),
    ],
)
def test_devices_are_those_that_cuda_sees_in_its_order(
    visible: str | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(monkeypatch, Gpu("first", GIB, uuid="GPU-a"), Gpu("second", 2 * GIB, uuid="GPU-b"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    bounds = [nvidia_reader(os.environ, index)().bound for index in range(len(wanted))]
    assert bounds == [f"the memory of {name}" for name in wanted]
    with pytest.raises(UnknownMemory, match=rf"lists {len(wanted)} GPUs"):
        nvidia_reader(os.environ, len(wanted))
    found = read_nvidia_driver()
    assert found is not None
    assert [gpu.name for gpu in found.gpus] == wanted


@pytest.mark.parametrize("visible", ["", "7", "-1", "GPU-none"])
def test_a_device_that_is_not_there_tells_nothing(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Gpu("it", GIB))
    with pytest.raises(UnknownMemory):
        nvidia_reader({"CUDA_VISIBLE_DEVICES": visible})


def test_the_memory_of_each_device_of_a_provider_is_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Gpu("first", GIB), Gpu("second", 2 * GIB))
    found = places(["cuda", "cuda:1"])
    assert [found.place_of(kind) for kind in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    assert {place: free.free_bytes for place, free in found().items() if place != HOST} == {
        "cuda": GIB,
        "cuda:1": 2 * GIB,
    }


def test_free_memory_is_asked_of_the_driver_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA H200", 3 * GIB)
    library = install_driver(monkeypatch, gpu)
    found = places(["cpu", "cuda"])
    assert (found.place_of("cpu"), found.place_of("cuda")) == (HOST, "cuda")
    assert found() == {HOST: HOST_ROOM, "cuda": on_device(3 * GIB, "NVIDIA H200", 24 * GIB)}
    gpu.free = GIB
    assert found()["cuda"].free_bytes == GIB
    assert library.num_inits == 1


def test_a_device_that_tells_no_more_is_told_once_and_not_checked_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, said = Gpu("it", GIB), list[str]()
    install_driver(monkeypatch, gpu)
    found = places(["cuda"], said)
    gpu.is_lost = True
    assert set(found()) == set(found()) == {HOST}
    assert said == ["the free memory of cuda is not checked: NVIDIA's driver does not report it (GPU is lost)"]
    assert found.place_of("cuda") == "cuda", "and what lies there is still not the host's"


def test_cuda_without_a_driver_that_tells_is_not_checked_and_not_counted_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    install_driver(monkeypatch, has_driver=False)
    found = places(["cuda"], said)
    assert (found.place_of("cuda"), set(found())) == ("cuda", {HOST})
    assert said == [
        "the free memory of cuda is not checked: NVIDIA's driver does not report it (Driver Not Loaded)"
    ]


def test_nothing_is_asked_of_any_driver_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "open_nvml", lambda: pytest.fail("asked"))
    assert places(["cpu"])() == {HOST: HOST_ROOM}


def test_amdgpu_tells_what_is_free_in_files(sysfs: Path) -> None:
    device = card(sysfs, "card1", 16 * GIB, 4 * GIB)
    (sysfs / "card1-DP-1").mkdir()
    (read,) = amd_readers()
    assert read() == on_device(12 * GIB, "card1", 16 * GIB)
    (device / "mem_info_vram_used").write_text(f"{17 * GIB}\n")
    assert read().free_bytes == 0
    (device / "mem_info_vram_used").write_text("busy\n")
    with pytest.raises(UnknownMemory, match="does not report it"):
        read()


def test_the_small_share_of_an_apu_is_no_memory_of_its_own(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card(sysfs, "card0", GIB // 2, 0)
    card(sysfs, "card1", "none", 0)
    assert amd_readers() == []
    install_driver(monkeypatch, has_driver=False)
    found = places(["webgpu"])
    assert (found.place_of("webgpu"), found()) == (HOST, {HOST: HOST_ROOM})


def test_of_several_gpus_that_webgpu_may_run_on_the_roomiest_counts(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(sysfs, "card0", 8 * GIB, 2 * GIB)
    gpu = Gpu("NVIDIA", 5 * GIB)
    install_driver(monkeypatch, gpu)
    found = places(["webgpu"])
    assert found()["webgpu"] == on_device(6 * GIB, "card0", 8 * GIB)
    gpu.free = 7 * GIB
    assert found()["webgpu"] == on_device(7 * GIB, "NVIDIA", 24 * GIB)
