"""The plan command on tiny models."""

import json
import shutil
from pathlib import Path

import commands
import pytest
import tiny
from imitated import CPU, EMULATOR, Machine

from edgespec import load
from edgespec.cli.main import main
from edgespec.export.convert import export_model
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.manifest import read_manifest
from edgespec.memory.estimate import estimate_full_context, estimate_memory
from edgespec.memory.free_memory import RESERVE_BYTES, FreeMemory
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup.home import ModelHome
from edgespec.setup.pair import PairCheck, record_check
from edgespec.setup.planner import SCHEDULES
from edgespec.setup.profile import FILE_NAME


@pytest.fixture
def target(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "target", ignore=shutil.ignore_patterns(FILE_NAME))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return commands.run(capsys, "plan", *arguments, "--offline")


def test_plan_of_a_pair_is_one_document(
    capsys: pytest.CaptureFixture[str], target: Path, tiny_drafter: Path
) -> None:
    options = [target, "--drafter", tiny_drafter, "--threads", 2]
    code, out, err = run(capsys, *options, "--measure", "--json")
    document = json.loads(out)
    assert code == 0
    assert "measuring" in err
    assert list(document) == [
        "model", "schedule", "target_device", "target_threads", "drafter", "drafter_device", "drafter_threads",
        "draft_length", "wait", "context_length", "memory_bytes", "tokens_per_second", "reason", "basis",
        "drafters", "downgrades", "command", "plain_tokens_per_second", "options", "refused", "chances",
        "measured", "took", "ranked_drafters",
    ]  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    keys = {*document, *document["options"][0], *document["measured"][0], *document["ranked_drafters"][0]}
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert 0 < document["took"]["opening_s"] + document["took"]["measuring_s"] < 10
    done = [document, *document["refused"]]
    assert {(option["schedule"], option["target_threads"]) for option in done} == {
        (schedule, threads) for schedule in SCHEDULES for threads in (1, 2)
    }
    assert all(option["reason"] and option["tokens_per_second"] > 0 for option in done)
    assert document["context_length"] == 700
    assert document["chances"]["tiny-int4"]["is_counted"] is False
    assert all(set(map(int, taken)) >= {1, 32} for taken in document["measured"][0]["passes_s"].values())
    code, again, err = run(capsys, *options, "--json")
    assert (code, err) == (0, "")
    kept = json.loads(again)
    assert kept["took"] == {"opening_s": 0.0, "measuring_s": 0.0}
    assert [each["passes_s"] for each in kept["measured"]] == [each["passes_s"] for each in document["measured"]]
    assert kept["tokens_per_second"] == pytest.approx(document["tokens_per_second"])


def test_devices_are_compared_and_the_command_takes_the_best(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast GPU, which is imitated; that a CPU is slower is foreseen, and nothing is exported for it."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    num_bytes = plan_model(tiny_gguf, ExportOptions(precision="fp32")).cost.write_bytes
    rates = {"cpu": num_bytes / 0.06, "webgpu": num_bytes / 0.024}
    probes = {name: DeviceProbe(bytes_per_s=rate, node_s=0.0, start_s=0.0) for name, rate in rates.items()}
    pace_s = {("fp32", "webgpu"): 0.024, ("fp32", "cpu"): 0.06, ("int4", "webgpu"): 0.08, ("int4", "cpu"): 0.006}
    command = [f"{tiny_gguf}:fp32", "--drafter", f"{tiny_gguf}:int4"]
    with Machine(pace_s, probes).in_use() as machine:
        code, out, _ = run(capsys, *command, "--json")
        document = json.loads(out)
        assert (code, document["target_device"], document["drafter_device"]) == (0, "webgpu", "cpu")
        assert document["schedule"] in ("pipelined", "hedged")
        options = document["options"]
        assert options[0] == {key: document[key] for key in options[0]}
        assert options[1:] == document["refused"]
        basis = {(each["target_device"], each["drafter_device"]): each["basis"] for each in options}
        assert basis["webgpu", "cpu"] == "measured"
        assert basis["cpu", "cpu"] == basis["cpu", None] == "foreseen"
        assert all(each["reason"] and each["tokens_per_second"] > 0 for each in options)
        assert {each["schedule"] for each in options} == {*SCHEDULES}
        assert "--device webgpu --drafter-device cpu" in document["command"]
        machine.opened.clear()
        assert main([*document["command"].split()[1:], "--prompt", "the", "--max-tokens", "3"]) == 0
        assert machine.opened == [("fp32", "webgpu"), ("int4", "cpu")]
        text = run(capsys, *command)[1]
        assert "~" in text
        assert "estimated from the model's size and a short probe" in text
        assert "webgpu; drafter cpu, " in text, "threads are the CPU's"
        assert f"and plan again:\n  edgespec models pull {tiny_gguf}:fp32 --device cpu\n" in text
        assert main(["models", "pull", f"{tiny_gguf}:fp32", "--device", "cpu"]) == 0
        capsys.readouterr()
        again = json.loads(run(capsys, *command, "--json")[1])
        assert {each["basis"] for each in again["options"] if each["drafter"] is None} == {"measured"}
        assert "webgpu is faster than the CPU (" in again["reason"]
        assert "the CPU (about " in document["reason"]
        assert "without a drafter model" not in document["reason"]


def test_emulator_is_compared_and_marked(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that were the fastest would not be chosen either."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    probes = {name: DeviceProbe(bytes_per_s=1e8, node_s=0.0, start_s=0.0) for name in ("cpu", "webgpu")}
    pace_s = {("fp32", "webgpu"): 0.001, ("fp32", "cpu"): 0.005}
    command = [f"{tiny_gguf}:fp32", "--drafter", "none", "--json"]
    with Machine(pace_s, probes, [CPU, EMULATOR]).in_use() as machine:
        document = json.loads(run(capsys, *command)[1])
        assert (document["target_device"], machine.opened) == ("cpu", [("fp32", "cpu")])
        (there,) = document["refused"]
        assert there["reason"].startswith("webgpu is emulated in software, and auto never")
        assert there["basis"] == "foreseen"
        assert (
            there["tokens_per_second"] > document["tokens_per_second"]
            or "faster than webgpu (about" in (document["reason"])
        )
        assert document["reason"].endswith("webgpu is emulated in software, and auto never chooses an emulator")
        ModelHome(tmp_path).resolve(f"{tiny_gguf}:fp32", "gpu")
        document = json.loads(run(capsys, *command)[1])
        assert document["target_device"] == "cpu"
        assert [each["basis"] for each in document["options"]] == ["measured", "measured"]


def test_plan_is_printed_as_text_and_measured_once(
    capsys: pytest.CaptureFixture[str], target: Path, tiny_drafter: Path
) -> None:
    lines = [run(capsys, target, "--drafter", tiny_drafter)[1:] for _ in range(2)]
    assert "measuring" in lines[0][1]
    assert lines[1][1] == ""
    for part in ("tiny: ", "expected", "to run it  edgespec chat", "refused", "measured here", "ms a pass"):
        assert part in lines[1][0]
    texts = [line for line in lines[1][0].splitlines() if "edgespec " not in line]  # but the commands
    assert max(map(len, texts)) < 80


def test_model_without_a_drafter_is_planned_alone(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    code, out, _ = run(capsys, target, "--json")
    document = json.loads(out)
    assert (code, document["schedule"], document["refused"]) == (0, "plain", [])
    assert document["drafters"][0] == "suffix"
    assert document["tokens_per_second"] == document["plain_tokens_per_second"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{target}", "--threads", "0"], 2),
        (["{target}", "--threads", "512000"], 2),
        (["{target}", "--drafter", "{target},suffix"], 2),
        (["{target}", "--drafter", "{target},{target}"], 2),
        (["{target}", "--drafter", "{target}+{target}"], 2),
        (["{target}", "--drafter", "none,suffix"], 2),
        (["{target}", "--memory", "much"], 2),
        (["nothing-known"], 3),
        (["{target}", "--drafter", "nothing-known"], 3),
        (["{target}", "--device", "toaster"], 2),
        (["{target}", "--drafter-device", "toaster"], 2),
    ],
)
def test_what_cannot_be_planned_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], target: Path, arguments: list[str], expected: int
) -> None:
    code, out, err = run(capsys, *(argument.format(target=target) for argument in arguments))
    assert (code, out) == (expected, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("named", "drafters"), [("none", []), ("ngram", ["ngram"]), ("ngram+suffix", ["ngram", "suffix"])]
)
def test_plan_names_what_is_asked_to_draft_and_nothing_else(
    capsys: pytest.CaptureFixture[str], target: Path, named: str, drafters: list[str]
) -> None:
    code, out, _ = run(capsys, target, "--drafter", named, "--json")
    assert (code, json.loads(out)["drafters"]) == (0, drafters)


def test_command_of_a_plan_does_what_it_says(
    capsys: pytest.CaptureFixture[str], target: Path, tiny_drafter: Path
) -> None:
    document = json.loads(run(capsys, target, "--drafter", f"suffix+{tiny_drafter}", "--threads", 2, "--json")[1])
    place = document["drafter_threads"]
    chosen = f"suffix+{tiny_drafter}" if document["drafter"] else "suffix"
    lane = f" --drafter-threads {place} --schedule {document['schedule']}" if document["drafter"] else ""
    assert document["command"] == f"edgespec chat {target} --drafter {chosen} --threads 2{lane}"
    assert main([*document["command"].split()[1:], "--prompt", "the", "--max-tokens", "3"]) == 0


def test_drafter_of_a_pair_is_planned_without_its_name(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    for name, model in (("target", tiny_model), ("drafter", tiny_drafter)):
        shutil.copytree(model, tmp_path / name, ignore=shutil.ignore_patterns(FILE_NAME))
    gains = {"greedy_acceptance": 0.9, "sampled_acceptance": 0.9, "draft_cost": 0.1, "expected_gain": 2.0}
    verdict = {"target": "tiny", "drafter": "tiny-int4", "verdict": "it pays", "reason": ""}
    alike = {"same_special_tokens": True, "same_chat_template": True, "num_draft": 2, "pays": True}
    check = PairCheck(**gains, **verdict, **alike)
    record_check(tmp_path, check, ("cpu", "cpu"), (tmp_path / "target", tmp_path / "drafter"))
    code, out, _ = run(capsys, tmp_path, "--json")
    document = json.loads(out)
    assert (code, list(document["chances"])) == (0, ["tiny-int4"])
    named = "auto" if document["drafter"] else "+".join(document["drafters"])
    assert f"edgespec chat {tmp_path} --drafter {named} --threads" in document["command"]


def test_lack_of_memory_is_a_downgrade_of_the_plan_and_load_agrees(
    capsys: pytest.CaptureFixture[str], tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a context of 2048 of 4096 tokens, and for no drafter."""
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), override={"llama.context_length": 4096})
    target = tmp_path / "long"
    export_model(tmp_path / "tiny.gguf", target, precision="fp32")
    manifest, size = read_manifest(target), (target / "model.onnx.data").stat().st_size
    least = estimate_full_context(manifest, size, 2048).host_bytes(FreeMemory(0, "a test"))
    room = FreeMemory(least + RESERVE_BYTES, "a test")
    run(capsys, target, "--drafter", tiny_drafter)
    for module in ("setup.measured_placements", "setup.wish"):
        monkeypatch.setattr(f"edgespec.{module}.free_memory", lambda *limit: room)
    code, out, _ = run(capsys, target, "--drafter", tiny_drafter, "--json")
    document = json.loads(out)
    assert (code, document["schedule"], document["context_length"]) == (0, "plain", 2048)
    assert document["memory_bytes"] == least
    assert [line.partition(":")[0] for line in document["downgrades"]] == [
        "a context of 2048 tokens, not 4096",
        "no tiny-int4 beside long",
    ]
    text = run(capsys, target, "--drafter", tiny_drafter)[1]
    assert text.count("for lack of memory") == 2
    with load(target, drafter="none", offline=True) as engine:
        assert engine.context_length == document["context_length"]


def test_drafter_for_which_there_is_no_room_is_not_opened_to_be_measured(
    capsys: pytest.CaptureFixture[str], target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, size = read_manifest(target), (target / "model.onnx.data").stat().st_size
    room = FreeMemory(
        estimate_memory(manifest, size, 700).host_bytes(FreeMemory(0, "a test")) + RESERVE_BYTES, "a test"
    )
    monkeypatch.setattr("edgespec.setup.measured_placements.free_memory", lambda *limit: room)
    code, out, err = run(capsys, target, "--drafter", tiny_drafter, "--json")
    document = json.loads(out)
    assert (code, document["schedule"], document["refused"]) == (0, "plain", [])
    assert "tiny-int4 is not measured beside tiny: a context of 2048 tokens needs" in err
    assert "how long drafts take" not in err


def test_cascade_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    code, _, err = run(capsys, target, "--drafter", "small,suffix")
    assert code == 2
    assert "'small,suffix' is a cascade" in err
    assert "'small+suffix'" in err


def test_drafter_with_too_few_tokens_of_the_target_is_refused_before_it_is_measured(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    tiny.write_gguf(tmp_path / "foreign.gguf", tiny.random_weights(), override=tiny.FOREIGN)
    export_model(tmp_path / "foreign.gguf", tmp_path / "foreign", precision="fp32")
    code, out, err = run(capsys, target, "--drafter", tmp_path / "foreign")
    assert (code, out) == (3, "")
    assert "measuring" not in err


def test_memory_that_holds_no_model_is_an_error_and_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    code, out, err = run(capsys, target, "--memory", "1M")
    assert (code, out) == (5, "")
    assert "measuring" not in err


def test_damaged_statistics_are_measured_again(
    capsys: pytest.CaptureFixture[str], target: Path, tiny_drafter: Path
) -> None:
    (target / FILE_NAME).write_text(
        '{"version": 1, "ratios": {}, "chances": [], "profiles": {"m": {"passes_s": 1}}}'
    )
    code, _, err = run(capsys, target, "--drafter", tiny_drafter)
    assert code == 0
    assert "cannot be used" in err
    assert "profiles" in json.loads((target / FILE_NAME).read_text())
