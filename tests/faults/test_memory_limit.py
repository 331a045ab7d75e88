"""Under a real limit of the address space: drafting steps down within an answer, and comes back, with one text.

In processes of their own, since a limit is the process's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit of the address space")

PROMPT = "Write the numbers from 1 to 300 in words, each on a line of its own."
# Another part of the program takes memory in the middle of an answer, and gives it back. Its reader then waits for
# the drafter to come back: there must be room for two seconds before the ladder is climbed.
ANSWER = """
import json, resource, sys, time, weakref
import numpy as np, psutil
from edgespec import SamplingParams, load
from edgespec.engine import run_ahead

run_ahead.MAX_AHEAD = 0  # memory changes between two chunks
model, drafter, schedule, prompt, temperature = sys.argv[1:6]
num_tokens, growth, free_mib, most_waits = map(int, sys.argv[6:])
process = psutil.Process()
said = []
named = dict(drafter=drafter, schedule=schedule)
with load(model, **named, draft_length=3, deterministic=True, report=said.append) as engine:
    sampling = SamplingParams(temperature=float(temperature), seed=7)
    ask = dict(sampling=sampling, max_tokens=num_tokens)
    wanted = engine.plain().generate(prompt, **ask).token_ids
    engine.generate(prompt, sampling=sampling, max_tokens=4)
    limit = process.memory_info().vms + (growth << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    found, sizes, held, num_waits = [], {}, None, 0
    open_at_first = dict(engine._drafting.pool.decoders)
    sessions = [weakref.ref(decoder) for decoder in open_at_first.values()]
    num_open = [len(open_at_first)]
    del open_at_first
    for chunk in engine.stream(prompt, **ask):
        found += chunk.token_ids
        if len(found) > num_tokens // 4 and held is None:
            sizes["before"] = process.memory_info().rss
            free = limit - process.memory_info().vms
            held = np.empty(max(1, free - (free_mib << 20)), np.uint8)
            step = len(found)
        if held is not None and len(held):
            time.sleep(0.002)  # memory is looked at ten times a second
        if held is not None and len(held) and len(found) > num_tokens // 2:
            sizes["after"] = process.memory_info().rss
            sizes["alive"] = sum(each() is not None for each in sessions)
            held = np.empty(0, np.uint8)
        num_open.append(len(engine._drafting.pool.decoders))
        if "after" in sizes and not num_open[-1] and num_waits < most_waits:
            num_waits += 1
            time.sleep(0.5)
    print(json.dumps({
        "same": tuple(found) == wanted, "num_tokens": len(found), "downgrades": chunk.stats.downgrades,
        "said": said, "sizes": sizes, "num_open": num_open,
    }))
"""
# Another part of the program takes memory while no answer is made, and gives it back.
BETWEEN = """
import json, resource, sys, time, weakref
import numpy as np, psutil
from edgespec import SamplingParams, load
from edgespec.draft.pool import DrafterPool

watch = DrafterPool.watch_while_idle
DrafterPool.watch_while_idle = lambda pool: watch(pool, 0.2)  # for what it finds, and not for how often it looks
model, drafter, prompt, num_tokens, growth = *sys.argv[1:4], *map(int, sys.argv[4:])
process = psutil.Process()
said, sizes, num_open = [], {}, []

def wait_until(is_open):
    end = time.monotonic() + 200
    while bool(engine._drafting.pool.decoders) != is_open:
        assert time.monotonic() < end, said
        time.sleep(0.02)
    num_open.append(len(engine._drafting.pool.decoders))

named = dict(drafter=drafter, schedule="serial", draft_length=3, deterministic=True)
with load(model, **named, report=said.append) as engine:
    ask = dict(sampling=SamplingParams(temperature=0.8, seed=7), max_tokens=num_tokens)
    wanted = engine.plain().generate(prompt, **ask).token_ids
    num_said = [len(said)]
    wait_until(True)
    limit = process.memory_info().vms + (growth << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    sizes["before"] = process.memory_info().rss
    held = np.empty(limit - process.memory_info().vms - (20 << 20), np.uint8)
    wait_until(False)
    time.sleep(2)  # the pool forgets a model before the system has its memory
    sizes["after"] = process.memory_info().rss
    small = engine.generate(prompt, **ask)
    num_said.append(len(said))
    held = np.empty(0, np.uint8)
    wait_until(True)
    num_said.append(len(said))
    large = engine.generate(prompt, **ask)
    num_said.append(len(said))
    print(json.dumps({
        "same": small.token_ids == large.token_ids == wanted, "num_open": num_open, "said": said, "sizes": sizes,
        "num_said": num_said, "downgrades": [*small.stats.downgrades, *large.stats.downgrades],
    }))
"""


def run(*arguments: object, program: str = ANSWER) -> dict[str, Any]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def changes(values: list[int]) -> list[int]:
    return [value for i, value in enumerate(values) if not i or value != values[i - 1]]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "temperature"), [("serial", 0.0), ("serial", 0.8), ("pipelined", 0.0), ("pipelined", 0.8)]
)
def test_the_ladder_steps_down_under_a_limit_within_one_answer(
    tiny_model: Path, tiny_drafter: Path, schedule: str, temperature: float
) -> None:
    found = run(tiny_model, tiny_drafter, schedule, "in the an", temperature, 600, 400, 20, 0)
    assert found["same"]
    assert found["num_open"][0] == 1
    assert 0 in found["num_open"]
    assert found["sizes"]["alive"] == 0, "the session is freed"
    assert "down from" in found["downgrades"][0]
    assert "ulimit -v" in found["downgrades"][0]
    assert [line for line in found["said"] if "drafting steps" in line] == found["downgrades"]


@linux
@pytest.mark.model
def test_a_real_model_is_let_go_and_comes_back_under_a_limit(smollm2: Path, smollm2_int8: Path) -> None:
    found = run(smollm2, smollm2_int8, "pipelined", PROMPT, 0.8, 240, 800, 30, 60)
    assert found["same"]
    assert found["num_tokens"] > 180
    assert found["sizes"]["alive"] == 0
    assert found["sizes"]["before"] - found["sizes"]["after"] > 100 << 20, "its memory is the system's again"
    assert "down from" in found["downgrades"][0]
    assert changes(found["num_open"]) == [1, 0, 1], found["downgrades"]
    assert "up from" in found["downgrades"][-1]


def assert_moves_between_answers(found: dict[str, Any]) -> None:
    assert found["same"]
    assert found["num_open"] == [1, 0, 1]
    ways = [line.split(":")[0].split()[2] for line in found["downgrades"]]
    assert set(ways) == {"down", "up"}
    assert ways == sorted(ways), "first down, then up"
    assert [line for line in found["said"] if "drafting steps" in line] == found["downgrades"]
    first, small, idle, large = found["num_said"]
    assert small > first
    assert idle == small, "it is reported with answers and not between them"
    assert large > idle


@linux
@pytest.mark.slow
def test_a_drafter_is_closed_and_opened_again_between_answers(tiny_model: Path, tiny_drafter: Path) -> None:
    assert_moves_between_answers(run(tiny_model, tiny_drafter, "in the an", 60, 400, program=BETWEEN))


@linux
@pytest.mark.model
def test_a_real_drafter_gives_its_memory_to_others_between_answers(smollm2: Path, smollm2_int8: Path) -> None:
    found = run(smollm2, smollm2_int8, PROMPT, 60, 800, program=BETWEEN)
    assert_moves_between_answers(found)
    assert found["sizes"]["before"] - found["sizes"]["after"] > 100 << 20, "its memory is the system's again"


@linux
@pytest.mark.slow
def test_what_fits_no_more_ends_with_its_code(tiny_model: Path) -> None:
    """The limit is set from without, as a shell does it."""
    command = f"ulimit -v 420000; exec {sys.executable} -m edgespec chat {tiny_model} --prompt the --max-tokens 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 5, (done.returncode, done.stderr)
    assert "of memory for plain decoding" in done.stderr
    assert "ulimit -v" in done.stderr
