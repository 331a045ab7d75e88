"""What drivers tell, on fakes of them: of no GPU, but in the words of the real package."""

from pathlib import Path

import pytest
from fake_nvml import FakeNvml, Gpu, opened

from edgespec.errors import UnknownMemory
from edgespec.memory.device_memory import (
    Drivers,
    Places,
    amd_readers,
    nvidia_reader,
    open_nvml,
    read_nvidia_driver,
)
from edgespec.memory.free_memory import HOST, FreeMemory, device_reserve

GIB = 1 << 30
HOST_ROOM = FreeMemory(7 * GIB, "the memory of this machine")


def on_device(free: int, name: str, total: int) -> FreeMemory:
    return FreeMemory(free, f"the memory of {name}", reserve=device_reserve(total))


def drivers(*gpus: Gpu, sysfs: Path = Path("/none"), has_driver: bool = True) -> Drivers:
    return Drivers(opened(*gpus, has_driver=has_driver), sysfs, {})


def places(kinds: list[str], with_drivers: Drivers, said: list[str] | None = None) -> Places:
    return Places(kinds, lambda: HOST_ROOM, [].append if said is None else said.append, with_drivers)


def card(sysfs: Path, name: str, total: int | str, used: int | str) -> Path:
    device = sysfs / name / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{total}\n")
    (device / "mem_info_vram_used").write_text(f"{used}\n")
    return device


def test_the_real_library_tells_figures_or_that_there_is_no_driver() -> None:
    try:
        free = nvidia_reader(open_nvml, {})()
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
def test_devices_are_those_that_cuda_sees_in_its_order(visible: str | None, wanted: list[str]) -> None:
    driver = opened(Gpu("first", GIB, uuid="GPU-a"), Gpu("second", 2 * GIB, uuid="GPU-b"))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    bounds = [nvidia_reader(driver, environment, index)().bound for index in range(len(wanted))]
    assert bounds == [f"the memory of {name}" for name in wanted]
    with pytest.raises(UnknownMemory, match=rf"lists {len(wanted)} GPUs"):
        nvidia_reader(driver, environment, len(wanted))
    found = read_nvidia_driver(driver, environment)
    assert found is not None
    assert [gpu.name for gpu in found.gpus] == wanted


@pytest.mark.parametrize("visible", ["", "7", "-1", "GPU-none"])
def test_a_device_that_is_not_there_tells_nothing(visible: str) -> None:
    with pytest.raises(UnknownMemory):
        nvidia_reader(opened(Gpu("it", GIB)), {"CUDA_VISIBLE_DEVICES": visible})


def test_the_memory_of_each_device_of_a_provider_is_a_place_of_its_own() -> None:
    found = places(["cuda", "cuda:1"], drivers(Gpu("first", GIB), Gpu("second", 2 * GIB)))
    assert [found.place_of(kind) for kind in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    assert {place: free.free_bytes for place, free in found().items() if place != HOST} == {
        "cuda": GIB,
        "cuda:1": 2 * GIB,
    }


def test_free_memory_is_asked_of_the_driver_each_time() -> None:
    gpu = Gpu("NVIDIA H200", 3 * GIB)
    library = FakeNvml([gpu])
    found = places(["cpu", "cuda"], Drivers(library.open, Path("/none"), {}))
    assert (found.place_of("cpu"), found.place_of("cuda")) == (HOST, "cuda")
    assert found() == {HOST: HOST_ROOM, "cuda": on_device(3 * GIB, "NVIDIA H200", 24 * GIB)}
    gpu.free = GIB
    assert found()["cuda"].free_bytes == GIB
    assert library.num_inits == 1


def test_a_device_that_tells_no_more_is_told_once_and_not_checked_any_more() -> None:
    gpu, said = Gpu("it", GIB), list[str]()
    found = places(["cuda"], drivers(gpu), said)
    gpu.is_lost = True
    assert set(found()) == set(found()) == {HOST}
    assert said == ["the free memory of cuda is not checked: NVIDIA's driver does not report it (GPU is lost)"]
    assert found.place_of("cuda") == "cuda", "and what lies there is still not the host's"


def test_cuda_without_a_driver_that_tells_is_not_checked_and_not_counted_to_the_host() -> None:
    said: list[str] = []
    found = places(["cuda"], drivers(has_driver=False), said)
    assert (found.place_of("cuda"), set(found())) == ("cuda", {HOST})
    assert said == [
        "the free memory of cuda is not checked: NVIDIA's driver does not report it (Driver Not Loaded)"
    ]


def test_nothing_is_asked_of_any_driver_for_the_cpu() -> None:
    def asked() -> None:
        pytest.fail("asked")

    assert places(["cpu"], Drivers(asked, Path("/none"), {}))() == {HOST: HOST_ROOM}


def test_amdgpu_tells_what_is_free_in_files(tmp_path: Path) -> None:
    device = card(tmp_path, "card1", 16 * GIB, 4 * GIB)
    (tmp_path / "card1-DP-1").mkdir()
    (read,) = amd_readers(tmp_path)
    assert read() == on_device(12 * GIB, "card1", 16 * GIB)
    (device / "mem_info_vram_used").write_text(f"{17 * GIB}\n")
    assert read().free_bytes == 0
    (device / "mem_info_vram_used").write_text("busy\n")
    with pytest.raises(UnknownMemory, match="does not report it"):
        read()


def test_the_small_share_of_an_apu_is_no_memory_of_its_own(tmp_path: Path) -> None:
    card(tmp_path, "card0", GIB // 2, 0)
    card(tmp_path, "card1", "none", 0)
    assert amd_readers(tmp_path) == []
    found = places(["webgpu"], drivers(sysfs=tmp_path, has_driver=False))
    assert (found.place_of("webgpu"), found()) == (HOST, {HOST: HOST_ROOM})


def test_of_several_gpus_that_webgpu_may_run_on_the_roomiest_counts(tmp_path: Path) -> None:
    card(tmp_path, "card0", 8 * GIB, 2 * GIB)
    gpu = Gpu("NVIDIA", 5 * GIB)
    found = places(["webgpu"], drivers(gpu, sysfs=tmp_path))
    assert found()["webgpu"] == on_device(6 * GIB, "card0", 8 * GIB)
    gpu.free = 7 * GIB
    assert found()["webgpu"] == on_device(7 * GIB, "NVIDIA", 24 * GIB)
