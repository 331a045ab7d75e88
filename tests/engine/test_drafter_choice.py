"""What could draft for a model, ranked: from tables, from folders, and from what was measured of tiny models."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import SERIAL_BRANCHES

from edgespec.cli.main import main
from edgespec.config.presets import Preset
from edgespec.draft.costs import PassCosts
from edgespec.engine.plan import rank_for_model
from edgespec.errors import ModelError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming
from edgespec.manifest import FILE_NAME as MANIFEST_FILE
from edgespec.manifest import read_manifest
from edgespec.memory.estimate import estimate_memory
from edgespec.memory.free_memory import FreeMemory
from edgespec.setup.drafter_ranking import PossibleDrafter, Ranking
from edgespec.setup.drafting_target import rate_of
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, weights_bytes
from edgespec.setup.pair import DRAFTER, TARGET, PairCheck, read_pair, record_check
from edgespec.setup.planner import Layout, plan_on
from edgespec.setup.profile import FILE_NAME, DrafterProfile, LearnedStats, Profile, write_learned_stats
from edgespec.setup.resolve import find_known_devices
from edgespec.setup.row_proof import settle_mode

NO_ROOM = FreeMemory(0, "a test")
STEP_S = 0.02
PASSES_S = {64: {width: STEP_S * (1 + 0.03 * (width - 1)) for width in (1, 2, 32)}}


@pytest.fixture
def home(tiny_model: Path, tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHome:
    """With a target called big and a drafter called small, of both of which nothing is known."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    home = ModelHome(tmp_path, offline=True)
    for name, model in (("big", tiny_model), ("small", tiny_drafter)):
        shutil.copytree(model, home.models / name, ignore=shutil.ignore_patterns(FILE_NAME))
    return home


def ranking(home: ModelHome, model: str = "big") -> Ranking:
    return rank_for_model(home, model, device="auto", drafter_device="auto")


def found(ranked: Ranking, name: str) -> PossibleDrafter:
    return next(each for each in ranked.drafters if each.name == name)


def learn(home: ModelHome, chances: Mapping[tuple[str, int], tuple[float, float]], folder: str = "big") -> Layout:
    """Store costs of the target and of its drafter, and acceptance, as if they had been measured here."""
    target = ModelFolder(home.models / folder, read_manifest(home.models / folder))
    _, placement = find_known_devices(home, "big", "auto", "auto")
    placement = settle_mode(target, placement)
    drafter = DrafterProfile(step_s=0.2 * STEP_S, row_s=0.0, branches=SERIAL_BRANCHES)
    key = placement.drafter_key("tiny-int4")
    profile = Profile(passes_s=PASSES_S, prefill_s=0.001, drafters={key: drafter})
    write_learned_stats(target.folder, LearnedStats(profiles={placement.machine: profile}, chances=chances))
    return Layout(placement.target_place, profile, "tiny-int4", placement.drafter_place)


def accepted(share: float, num_judged: float) -> dict[tuple[str, int], tuple[float, float]]:
    return {("tiny-int4", bucket): (share * num_judged, num_judged) for bucket in range(-1, 16)}


def test_of_a_model_that_is_not_here_the_tables_tell_what_can_be_had(home: ModelHome) -> None:
    ranked = ranking(home, "qwen3-4b")
    assert (ranked.target, ranked.has_costs) == ("qwen3-4b", False)
    assert {each.basis for each in ranked.drafters} == {"unknown"}
    names = [each.name for each in ranked.drafters]
    assert names[0] == "suffix"
    assert {"qwen3-0.6b", "AngelSlim/Qwen3-4B_eagle3", "amd/PARD-Qwen3-0.6B", "24 of its 36 layers"} <= {*names}
    head = found(ranked, "AngelSlim/Qwen3-4B_eagle3")
    assert (head.kind, head.was_run, head.download_bytes) == ("head", "", 436_000_000)
    assert "2.08 tokens a pass" in head.reported
    assert "main branch" in head.note
    assert "--precision int4 --drafter AngelSlim/Qwen3-4B_eagle3 --output pair-qwen3-4b_eagle3" in head.get
    assert head.use == "edgespec chat pair-qwen3-4b_eagle3"
    assert found(ranked, "qwen3-0.6b").get == "edgespec models pull qwen3-0.6b --no-drafter"


@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-4b:int8", "unsloth/Qwen3-4B-GGUF:Q4_K_M", "big", "{gguf}"])
def test_drafters_of_a_preset_are_those_of_its_model(home: ModelHome, tiny_gguf: Path, model: str) -> None:
    model = model.format(gguf=tiny_gguf)
    home.presets.write(Preset(name="poet", model=model))
    for named, other in zip(ranking(home, "poet").drafters, ranking(home, model).drafters, strict=True):
        words = {"use": named.use.replace("chat poet ", f"chat {model} ")}
        words["get"] = named.get.replace("train poet ", f"train {model} ")
        assert replace(named, **words) == other


def test_a_precision_may_be_named_and_a_damaged_drafter_is_one_to_get(home: ModelHome, tiny_gguf: Path) -> None:
    sizes = []
    for precision in ("int4", "int8", "source", "fp32"):
        disk_bytes = found(ranking(home, f"qwen3-4b:{precision}"), "24 of its 36 layers").disk_bytes
        assert disk_bytes is not None
        sizes.append(disk_bytes)
    assert sizes == sorted(sizes)
    (home.models / "qwen3-0.6b").mkdir()
    (home.models / "qwen3-0.6b" / MANIFEST_FILE).write_text("{")
    assert found(ranking(home, "qwen3-4b"), "qwen3-0.6b").get
    assert found(ranking(home, str(tiny_gguf)), "suffix").memory_bytes


def test_of_a_hub_id_nothing_but_its_name_is_known_and_nothing_is_fetched(home: ModelHome) -> None:
    ranked = ranking(home, "unsloth/Qwen3-4B-GGUF:Q4_K_M")
    head = found(ranked, "deepseek-ai/dspark_qwen3_4b_block7")
    assert (head.memory_bytes, head.disk_bytes) == (None, None)
    assert head.get.startswith("edgespec export unsloth/Qwen3-4B-GGUF:Q4_K_M --drafter deepseek-ai/dspark")
    mimo = found(ranking(home, "XiaomiMiMo/MiMo-7B-RL"), "its layers for multi-token prediction")
    assert "--drafter mtp" in mimo.get
    blocked = found(ranking(home, "org/MiMo-7B-RL-GGUF:q4.gguf"), "its layers for multi-token prediction")
    assert "GGUF" in blocked.obstacle


def test_a_drafter_that_was_never_used_has_no_gain_but_the_acceptance_from_which_it_pays(home: ModelHome) -> None:
    ranked = ranking(home)
    drafter = found(ranked, "tiny-int4")
    assert (drafter.basis, drafter.gain, drafter.get) == ("unknown", None, "")
    assert drafter.use == "edgespec chat big --drafter auto+small"
    assert "it pays here" not in drafter.evidence
    learn(home, {})
    ranked = ranking(home)
    assert ranked.has_costs
    assert found(ranked, "tiny-int4").gain is None
    assert "it pays here if more than" in found(ranked, "tiny-int4").evidence


@pytest.mark.parametrize(("num_judged", "basis"), [(400.0, "measured"), (20.0, "estimated")])
def test_a_drafter_that_was_used_has_the_gain_of_its_plan(home: ModelHome, num_judged: float, basis: str) -> None:
    past = accepted(0.8, num_judged)
    layout = learn(home, past)
    ranked = ranking(home)
    first = ranked.drafters[0]
    assert (first.name, first.basis, first.was_run) == ("tiny-int4", basis, "here")
    models = (read_manifest(home.models / name) for name in ("big", "small"))
    plan = plan_on([layout], *models, past)
    drafting = [each for each in plan.options if each.drafter and each.can_be_chosen]
    assert first.gain == pytest.approx(max(each.tokens_per_second for each in drafting) * STEP_S, rel=0.02)
    assert first.pays
    assert f"80% of the last {num_judged:.0f} drafted tokens accepted" in first.evidence


def test_a_drafter_of_another_vocabulary_is_named_once_it_was_used(home: ModelHome) -> None:
    manifest = home.models / "small" / MANIFEST_FILE
    manifest.write_text(manifest.read_text().replace(read_manifest(manifest.parent).vocab_sha256, "0" * 64))
    assert "tiny-int4" not in [each.name for each in ranking(home).drafters]
    learn(home, {})
    assert "tiny-int4" in [each.name for each in ranking(home).drafters]


def make_pair(home: ModelHome, folder: Path, gain: float) -> None:
    """A pair whose check on the CPU says what it gains."""
    for part, name in ((TARGET, "big"), (DRAFTER, "small")):
        shutil.copytree(home.models / name, folder / part)
    alike = {"same_special_tokens": True, "same_chat_template": True, "num_draft": 2, "pays": gain >= 1.05}
    shares = {"greedy_acceptance": 0.9, "sampled_acceptance": 0.9, "draft_cost": 0.1, "expected_gain": gain}
    check = PairCheck(target="tiny", drafter="tiny-int4", verdict="", reason="", **alike, **shares)
    record_check(folder, check, ("cpu", "cpu"), (folder / TARGET, folder / DRAFTER))


def test_pairs_of_the_home_and_of_this_folder_have_the_gain_of_their_checks(home: ModelHome) -> None:
    make_pair(home, home.models / "both", 1.5)
    make_pair(home, Path("own-pair").absolute(), 0.9)
    ranked = ranking(home)
    assert [each.gain for each in ranked.drafters[:2]] == [1.5, 0.9]
    assert [each.pays for each in ranked.drafters[:2]] == [True, False]
    assert ranked.drafters[0].use == f"edgespec chat {home.models / 'both'}"
    assert ranked.drafters[1].use == "edgespec chat own-pair"
    manifest = home.models / "both" / DRAFTER / MANIFEST_FILE
    manifest.write_text(manifest.read_text() + "\n")
    pair = read_pair(home.models / "both")
    assert pair is not None
    assert pair.check_on(("cpu", "cpu"), (pair.folder / TARGET, pair.folder / DRAFTER)) is None
    assert [each.gain for each in ranking(home).drafters[:2]] == [0.9, None], "other models were checked"
    (home.models / "both" / "pair.json").write_text("{")
    assert [each.gain for each in ranking(home).drafters if each.gain] == [0.9], "a damaged pair is left out"


def test_what_was_learned_in_a_pair_comes_before_its_check(home: ModelHome) -> None:
    make_pair(home, home.models / "both", 1.5)
    learn(home, accepted(0.8, 20.0), "both/target")
    assert ranking(home).drafters[0].gain == 1.5
    learn(home, accepted(0.8, 400.0), "both/target")
    first = ranking(home).drafters[0]
    assert first.basis == "measured"
    assert first.gain != 1.5


def test_a_drafter_without_room_is_last_and_says_why(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(home, accepted(0.8, 400.0))
    models = (ModelFolder(folder, read_manifest(folder)) for folder in home.models.iterdir())
    needed = sum(estimate_memory(each.manifest, weights_bytes(each)).host_bytes(NO_ROOM) for each in models)

    def rank_with(num_bytes: int) -> Ranking:
        room = NO_ROOM._replace(free_bytes=num_bytes + NO_ROOM.reserve.opening_bytes)
        monkeypatch.setattr("edgespec.engine.plan.free_memory", lambda limit=None: room)
        return ranking(home)

    assert rank_with(needed).drafters[0].name == "tiny-int4"
    ranked = rank_with(needed - 1)
    assert [each.name for each in ranked.drafters if each.obstacle] == ["tiny-int4"]
    assert ranked.drafters[-1].basis == "measured"
    assert "of host memory, and" in ranked.drafters[-1].obstacle


def publish(home: ModelHome, folder: str = "big", **source: str) -> None:
    """Say that a model was exported from another place."""
    path = home.models / folder / MANIFEST_FILE
    document = json.loads(path.read_text())
    document["source"] |= source
    path.write_text(json.dumps(document))


def test_a_reported_acceptance_and_costs_that_were_measured_give_an_estimate(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(home, repository="Qwen/Qwen3-4B", revision="0" * 40, format="safetensors", name="Qwen3-4B")
    head = found(ranking(home), "AngelSlim/Qwen3-4B_eagle3")
    assert (head.basis, head.gain) == ("unknown", None)
    learn(home, {})
    monkeypatch.setattr(
        "edgespec.setup.drafting_target.weights_bytes", lambda folder: int(1.125 * 199_000_000 / 0.1)
    )
    ranked = ranking(home)
    head = found(ranked, "AngelSlim/Qwen3-4B_eagle3")
    costs = PassCosts({width: s / STEP_S for width, s in PASSES_S[64].items()})
    rate = rate_of(2.08, 4)
    gain = max(
        (1 - rate ** (length + 1)) / (1 - rate) / (costs.ratio(length + 1) + 0.1 * length) for length in range(17)
    )
    assert head.basis == "estimated"
    assert head.gain == pytest.approx(gain, rel=0.01)
    assert f"if {rate:.0%} of its tokens are accepted" in head.evidence
    assert f"edgespec export Qwen/Qwen3-4B --revision {'0' * 40} --precision fp32 --drafter Angel" in head.get
    unreported = found(ranked, "z-lab/Qwen3-4B-DFlash-b16")
    assert unreported.gain is None
    assert "it pays here if more than" in unreported.evidence
    estimated = [each.gain for each in ranked.drafters if each.basis == "estimated"]
    assert estimated == sorted(estimated, reverse=True, key=lambda gain: gain or 0)


def test_a_published_head_that_was_imported_is_that_of_its_pair(home: ModelHome) -> None:
    publish(home, name="Qwen3-4B")
    publish(home, "small", repository="AngelSlim/Qwen3-4B_eagle3")
    assert "AngelSlim/Qwen3-4B_eagle3" in [each.name for each in ranking(home).drafters]
    make_pair(home, home.models / "both", 1.5)
    ranked = ranking(home)
    assert "AngelSlim/Qwen3-4B_eagle3" not in [each.name for each in ranked.drafters]
    assert ranked.drafters[0].use.endswith("both")


def test_text_has_the_share_that_was_accepted_here(home: ModelHome) -> None:
    learn(home, {("suffix", -1): (40.0, 100.0)})
    text = found(ranking(home), "suffix")
    assert "here 40% of the last 100 drafted tokens accepted" in text.evidence
    assert (text.get, text.use) == ("", "edgespec chat big --drafter suffix")


def test_layers_of_the_target_are_ready_where_it_was_exported_with_them(home: ModelHome, tiny_gguf: Path) -> None:
    export_model(tiny_gguf, home.models / "layered", precision="fp32", trimming=Trimming(keep=frozenset({0})))
    own = found(ranking(home, "layered"), "1 layers of layered")
    assert (own.kind, own.get, own.use) == ("self", "", "edgespec chat layered --drafter auto+self")
    listed = found(ranking(home, "llama-3.1-8b"), "21 of its 32 layers")
    assert "--keep-layers 0-20 --output llama-3.1-8b-instruct-layers" in listed.get
    assert "accept its terms" in found(ranking(home, "llama-3.1-8b"), "llama-3.2-1b").note
    for name, num_kept, num_layers in (("qwen3.5-4b", 21, 32), ("gemma-4-e2b", 23, 35), ("lfm2.5-1.2b", 10, 16)):
        mixed = found(ranked := ranking(home, name), f"{num_kept} of its {num_layers} layers")
        assert all(each.memory_bytes is None or each.memory_bytes > 0 for each in ranked.drafters)
        assert f"--keep-layers 0-{num_kept - 1} " in mixed.get


def test_the_command_ranks_a_model_and_still_measures_a_pair(
    home: ModelHome, capsys: pytest.CaptureFixture[str]
) -> None:
    learn(home, accepted(0.8, 400.0))
    assert main(["pair", "check", "big", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["model", "target", "device", "drafter_device", "has_costs", "drafters"]
    assert [each["name"] for each in document["drafters"]] == [each.name for each in ranking(home).drafters]
    assert main(["pair", "check", "big"]) == 0
    text = capsys.readouterr().out
    advice, command, _, title, *_ = text.splitlines()
    assert re.fullmatch(r"use tiny-int4: \d\.\d\d times the speed of plain decoding here, measured", advice)
    assert command.strip() == "edgespec chat big --drafter auto+small"
    assert title == "what could draft for tiny, on cpu, with a drafter on cpu"
    assert "tiny-int4 (model), measured, " in text
    assert "use:   edgespec chat big --drafter auto+small" in text
    assert "run by edgespec: never" not in text
    assert main(["pair", "check", "qwen3-4b", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "keep drafting from the text, as --drafter auto does: no model is known to make it faster"
    )
    assert "run by edgespec: never" in text
    assert "edgespec plan qwen3-4b measures it" in text
    assert "--output pair-qwen3-4b_eagle3 --device cpu" in text
    # PowerShell 5 knows no &&.
    assert re.search(
        r"^ +get:   edgespec train qwen3-4b --output qwen3-4b-head\n +edgespec export ", text, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["nothing-known"], 3), ([""], 3), (["big", "--device", "toaster"], 2), (["big/\0"], 3), (["a" * 5000], 3)],
)
def test_what_cannot_be_ranked_has_its_exit_code(
    home: ModelHome, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: int
) -> None:
    assert main(["pair", "check", *arguments]) == expected
    assert capsys.readouterr().out == ""


def test_errors_are_those_of_loading(home: ModelHome) -> None:
    with pytest.raises(UsageError):
        rank_for_model(home, "big", device="toaster", drafter_device="auto")
    path = home.models / "big" / MANIFEST_FILE
    document: dict[str, Any] = json.loads(path.read_text())
    document["vocab_subset"] = document["tokenizer"]
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="head was trimmed"):
        ranking(home)


def test_a_plan_has_the_ranking_and_its_own_drafter_in_it(
    home: ModelHome, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn(home, {})
    assert main(["plan", "big", "--drafter", "small", "--offline", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    named = [each["name"] for each in document["ranked_drafters"]]
    assert named.count("tiny-int4") == 1
    assert main(["pair", "check", "big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafters"] == document["ranked_drafters"]
    assert main(["plan", "big", "--drafter", "none", "--offline"]) == 0
    text = capsys.readouterr().out
    assert "what could draft for it" in text
    assert "the commands for it:\n  edgespec pair check big\n" in text
    assert max(map(len, text.splitlines())) < 80
