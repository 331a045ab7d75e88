"""What load() decides, from tables to a value: no model is there, and no file is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import manifest

from edgespec.config.drafter_names import parse
from edgespec.errors import DeviceUnavailable, MemoryExhausted, UsageError
from edgespec.manifest.caches import KVCache
from edgespec.memory.estimate import WeightsSize
from edgespec.memory.free_memory import HOST, FreeMemory
from edgespec.runtimes.devices import Device, find_device
from edgespec.setup.device_choice import DeviceChoice, Placement
from edgespec.setup.home import ModelHome
from edgespec.setup.memory_fit import MemoryReading
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.profile import DrafterProfile, LearnedStats, Profile
from edgespec.setup.resolve import Chain, Resolved
from edgespec.setup.setup import Setup, Tables, decide
from edgespec.setup.wish import Wish

CPU = find_device("cpu")
NPU = Device("qnn", "QNNExecutionProvider", kind="npu")
MANIFEST = replace(manifest("big"), kv_cache=KVCache(num_layers=20, num_kv_heads=8, head_dim=64), vocab_size=1000)
TARGET = ModelFolder(Path("/nowhere/big"), MANIFEST)
SMALL = ModelFolder(Path("/nowhere/small"), replace(MANIFEST, name="small"))
PLACEMENT = Placement(device=CPU, drafter_device=CPU, num_threads=2, deterministic=True)
MIB = 1 << 20


def found(drafter: str = "none", placement: Placement = PLACEMENT, **more: Any) -> Resolved:
    drafters = [Chain((SMALL,))] if parse(drafter).cascades else []
    stated: dict[str, Any] = {
        "auto": {},
        "drafters": drafters,
    }
    stated["devices"] = DeviceChoice("cpu", "cpu", print)
    return Resolved(
        home=ModelHome(Path("/nowhere")),
        target=TARGET,
        names=parse(drafter),
        placement=placement,
        **(stated | more),
    )


def tables(free_mib: int = 1 << 16, known: LearnedStats | None = None) -> Tables:
    free = {HOST: FreeMemory(free_mib * MIB, "a test")}
    reading = MemoryReading(lambda: free, free, HOST, HOST, ["the free memory of cuda is not checked: no driver"])
    return Tables(known=known or LearnedStats(), size=WeightsSize(100 * MIB, 100 * MIB), memory=reading)


def decided(wish: dict[str, Any], **more: Any) -> Setup:
    asked = Wish(model="big", **{"drafter": "none"} | wish)
    return decide(asked, found(asked.drafter, **more), tables())


def profile(slowed: tuple[float, float]) -> LearnedStats:
    lane = PLACEMENT.drafter_key("small")
    drafter = DrafterProfile(step_s=0.006, row_s=0.0, slowed=slowed)
    measured = Profile(passes_s={64: {1: 0.02, 2: 0.0205, 32: 0.03}}, prefill_s=0.001, drafters={lane: drafter})
    chances = {("small", evidence): (8e5, 1e6) for evidence in range(-1, 16)}
    return LearnedStats(chances=chances, profiles={PLACEMENT.machine: measured})


def test_plain_decoding_has_room_for_the_whole_context_and_four_answers() -> None:
    setup = decided({})
    assert (setup.memory.target, setup.drafters, setup.texts, setup.num_parallel) == (TARGET, (), frozenset(), 4)
    assert setup.downgrades == ()
    assert setup.notes == ("the free memory of cuda is not checked: no driver",)
    assert "big" in repr(setup)


def test_what_does_not_fit_is_given_up_with_the_reason() -> None:
    wish = Wish(model="big", drafter="none", max_parallel=4)
    setup = decide(wish, found(), tables(free_mib=620))
    assert setup.target.manifest.context_length == 8192
    length = setup.memory.target.manifest.context_length
    assert 1024 <= length < 8192
    assert setup.downgrades == (
        f"the context is {length} of 8192 tokens: 650 MB are free within a test",
        f"{setup.num_parallel} instead of 4 answers are made at once: there is no memory for more KV caches",
    )
    with pytest.raises(MemoryExhausted, match="105 MB are free within a test"):
        decide(wish, found(), tables(free_mib=100))


def test_answers_that_have_to_repeat_what_rejection_accepted_are_made_one_at_a_time() -> None:
    asked = {"drafter": "small", "acceptance": "rejection", "max_parallel": 3}
    assert decided(asked).num_parallel == 3
    fixed = decided({**asked, "draft_length": 4})
    assert fixed.num_parallel == 1
    assert fixed.downgrades[-1].endswith("a fixed --draft-length could not repeat the texts of several")


@pytest.mark.parametrize(
    ("asked", "slowed", "schedule"),
    [
        ("auto", (2.5, 2.5), "serial"),
        ("auto", (1.0, 1.0), "pipelined"),
        ("serial", (1.0, 1.0), "serial"),
        ("pipelined", (2.5, 2.5), "pipelined"),
    ],
)
def test_the_schedule_is_the_one_asked_for_or_else_what_was_measured_to_be_best(
    asked: str, slowed: tuple[float, float], schedule: str
) -> None:
    wish = Wish(model="big", drafter="small", schedule=asked)  # type: ignore[arg-type]
    setup = decide(wish, found("small"), tables(known=profile(slowed)))
    assert [chain.schedule for chain in setup.drafters] == [schedule]
    assert (setup.wish, setup.placement) == (wish, PLACEMENT)


def test_a_schedule_without_a_drafter_model_is_noted() -> None:
    assert decided({"schedule": "pipelined"}).notes[0].startswith("--schedule pipelined has no effect")
    assert len(decided({"schedule": "pipelined", "drafter": "small"}).notes) == 1


@pytest.mark.parametrize(
    ("wish", "more", "error", "why"),
    [
        ({"context": 9000}, {}, UsageError, "has a context of 8192 tokens"),
        ({}, {"placement": replace(PLACEMENT, device=NPU)}, DeviceUnavailable, "only graphs of fixed shapes"),
        (
            {"drafter": "lookahead"},
            {"placement": replace(PLACEMENT, deterministic=False, exact=True)},
            UsageError,
            "exact=True cannot go with it",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(
    wish: dict[str, Any], more: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        decided(wish, **more)


def test_a_refusal_is_found_again_and_decided_again() -> None:
    differing = found(placement=replace(PLACEMENT, deterministic=False))
    assert not decide(Wish(model="big", drafter="none"), differing, tables()).placement.deterministic
    gpu = Device("webgpu", "WebGpuExecutionProvider", "webgpu", kind="gpu")
    choice = DeviceChoice("webgpu", "cpu", print, allow_fallback=True)
    refused = found(placement=replace(PLACEMENT, device=gpu), devices=choice)
    wish = Wish(model="big", drafter="none", device="webgpu", allow_fallback=True)
    setup = decide(wish, refused.on_cpu(DeviceUnavailable("no kernel", device="webgpu"), wish), tables())
    assert setup.placement.device == CPU
    assert setup.placement.deterministic
    assert setup.downgrades[0].startswith("the CPU is used instead of 'webgpu': no kernel")
