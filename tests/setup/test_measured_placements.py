"""Placements of tiny models, opened and measured."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import load
from edgespec.draft.costs import PassCosts, pass_costs
from edgespec.errors import IntegrityError
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device, import_onnxruntime
from edgespec.setup.device_choice import Placement
from edgespec.setup.measured_placements import MeasuredPlacements, splits_of
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.profile import FILE_NAME, MeasuringTime, read_learned_stats, write_learned_stats
from edgespec.system.file_hashes import FileRecord

CPU = find_device("cpu")


@pytest.fixture
def target(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME))


@pytest.fixture
def other(tiny_drafter: Path, tmp_path: Path) -> Path:
    """The drafter under another name."""
    folder = shutil.copytree(tiny_drafter, tmp_path / "other")
    manifest = folder / "edgespec.json"
    manifest.write_text(manifest.read_text().replace('"name": "tiny-int4"', '"name": "other"', 1))
    return folder


def placements(said: list[str], target: Path, *drafters: Path) -> MeasuredPlacements:
    models = [ModelFolder(folder, read_manifest(folder)) for folder in (target, *drafters)]
    placement = Placement(device=CPU, drafter_device=CPU, num_threads=2, deterministic=True)
    return MeasuredPlacements(
        target=models[0], drafters=models[1:], placement=placement, longest=600, report=said.append
    )


def threads_of(placement: Placement, *, has_drafters: bool) -> list[tuple[int | None, int | None]]:
    return [(each.num_threads, each.drafter_threads) for each in splits_of(placement, has_drafters)]


def test_threads_are_shared_and_split() -> None:
    four, one = (Placement(device=CPU, drafter_device=CPU, num_threads=num_threads) for num_threads in (4, 1))
    assert threads_of(four, has_drafters=True) == [(4, 4), (3, 1), (2, 2)]
    assert threads_of(four, has_drafters=False) == [(4, 4)]
    assert threads_of(one, has_drafters=True) == [(1, 1)]


def test_target_is_measured_once_for_all_its_drafters_in_a_placement(
    target: Path, tiny_drafter: Path, other: Path
) -> None:
    said: list[str] = []
    layouts, took = placements(said, target, tiny_drafter, other).layouts(remeasure=True)
    assert [(each.drafter, each.target.num_threads) for each in layouts] == [
        ("tiny-int4", 2), ("other", 2), ("tiny-int4", 1), ("other", 1),
    ]  # fmt: skip
    assert [line.split(":")[0] for line in said] == 2 * [
        "measuring how long passes take",
        *2 * ["measuring how long drafts take"],
    ]
    assert min(took) > 0


def test_only_what_is_not_known_is_measured(target: Path, tiny_drafter: Path, other: Path) -> None:
    said: list[str] = []
    first, took = placements(said, target, tiny_drafter).layouts(remeasure=False)
    assert min(took) > 0
    assert placements(said, target, tiny_drafter).layouts(remeasure=False) == (first, MeasuringTime())
    said.clear()
    layouts, _ = placements(said, target, tiny_drafter, other).layouts(remeasure=False)
    assert said == ["measuring how long drafts take: other on cpu, 2 threads"]
    assert layouts[0].profile.passes_s == first[0].profile.passes_s


def test_drafter_is_opened_and_measured_with_threads_of_its_own(target: Path, tiny_drafter: Path) -> None:
    for drafter_threads in (2, None):
        with load(target, drafter=str(tiny_drafter), num_threads=1, drafter_threads=drafter_threads) as engine:
            assert engine.generate("the in the", max_tokens=5).token_ids
    (profile,) = read_learned_stats(target, pytest.fail).profiles.values()
    assert list(profile.drafters) == ["tiny-int4 on cpu, 2 threads", "tiny-int4 on cpu, 1 thread"]


def test_use_refines_what_a_plan_rests_on(target: Path, tiny_drafter: Path) -> None:
    said: list[str] = []
    known, _ = placements(said, target, tiny_drafter).layouts(remeasure=False)
    with load(target, drafter=f"suffix+{tiny_drafter}", num_threads=2) as engine:
        for _ in range(3):
            engine.generate("the in the in the in", max_tokens=40)
    said.clear()
    (refined, *_), took = placements(said, target, tiny_drafter).layouts(remeasure=False)
    assert (said, took) == ([], MeasuringTime())
    used = read_learned_stats(target, pytest.fail)
    (ratios,), (drafts,) = used.ratios.values(), used.drafts.values()
    assert refined.profile.costs().ratios == pytest.approx(
        pass_costs(
            {width: PassCosts(dict(ratios)).ratio(width) for width in known[0].profile.costs().ratios}
        ).ratios
    )
    costs = refined.profile.draft_costs("tiny-int4 on cpu, 2 threads")
    assert (costs.step, costs.row) == pytest.approx(drafts["tiny-int4 on cpu, 2 threads"])
    (machine,), (step, row) = used.drafts, drafts["tiny-int4 on cpu, 2 threads"]
    write_learned_stats(
        target, replace(used, drafts={machine: {**drafts, "tiny-int4 on cpu, 2 threads": (3 * step, row)}})
    )
    (dearer, *_), _ = placements(said, target, tiny_drafter).layouts(remeasure=False)
    assert dearer.profile.draft_costs("tiny-int4 on cpu, 2 threads").step == pytest.approx(3 * step)


def test_another_version_of_the_runtime_or_of_what_drives_a_device_is_measured_anew(
    target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    placements(said, target, tiny_drafter).layouts(remeasure=False)
    anew = ["measuring how long passes take", "measuring how long drafts take"]
    for change, wanted in (
        (lambda: None, []),
        (
            lambda: monkeypatch.setattr(
                "edgespec.setup.device_choice.hardware_and_drivers", lambda device: ("driver 2",)
            ),
            anew[1:],
        ),
        (lambda: monkeypatch.setattr(import_onnxruntime(), "__version__", "0.0"), anew),
    ):
        change()
        said.clear()
        placements(said, target, tiny_drafter).layouts(remeasure=False)
        assert [line.split(":")[0] for line in said] == wanted


def test_files_are_hashed_before_any_placement_is_measured(target: Path, tiny_drafter: Path) -> None:
    with (target / "model.onnx.data").open("r+b") as weights:
        weights.write(b"?")
    said: list[str] = []
    with pytest.raises(IntegrityError):
        placements(said, target, tiny_drafter).layouts(remeasure=True)
    assert said == []


def test_files_are_hashed_once_for_all_placements(
    target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def file_record(path: Path, *more: object) -> FileRecord:
        hashed.append(path.name)
        return read_manifest(path.parent).files[path.name]

    monkeypatch.setattr("edgespec.system.file_hashes.file_record", file_record)
    placements([], target).layouts(remeasure=True)
    once = len(hashed)
    hashed.clear()
    placements([], target, tiny_drafter).layouts(remeasure=True)
    assert hashed.count("tokenizer.json") == 3  # the target's once, the drafter's in both placements
    assert once == len(read_manifest(target).files)
