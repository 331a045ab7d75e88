"""Under a real limit of the address space: drafting steps down within an answer, and comes back, with one text.

In processes of their own, since a limit is the process's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited on Linux")

PROMPT = "Write the numbers from 1 to 300 in words, each on a line of its own."
# Another part of the program takes memory in the middle of an answer, and gives it back.
ANSWER = """
import json, resource, sys, time, weakref
import numpy as np, psutil
from edgespec import SamplingParams, load

model, drafter, schedule, prompt, temperature = sys.argv[1:6]
num_tokens, growth, free_mib = map(int, sys.argv[6:])
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
    found, sizes, held = [], {}, None
    open_at_first = dict(engine._pool.decoders)
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
        if held is not None and len(held) and len(found) > num_tokens // 2:
            sizes["after"] = process.memory_info().rss
            sizes["alive"] = sum(each() is not None for each in sessions)
            held = np.empty(0, np.uint8)
        if "after" in sizes:
            time.sleep(0.05)  # a slow reader: there must be room for two seconds before the ladder is climbed
        num_open.append(len(engine._pool.decoders))
    print(json.dumps({
        "same": tuple(found) == wanted, "num_tokens": len(found), "downgrades": chunk.stats.downgrades,
        "said": said, "sizes": sizes, "num_open": num_open,
    }))
"""


def run(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-c", ANSWER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
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
    found = run(tiny_model, tiny_drafter, schedule, "in the an", temperature, 600, 400, 20)
    assert found["same"]
    assert found["num_open"][0] == 1
    assert 0 in found["num_open"]
    assert found["sizes"]["alive"] == 0, "the session is freed"
    assert "down from" in found["downgrades"][0]
    assert "ulimit -v" in found["downgrades"][0]
    assert [line for line in found["said"] if "drafting steps" in line] == found["downgrades"]


@linux
@pytest.mark.model
@pytest.mark.parametrize(("schedule", "temperature"), [("pipelined", 0.0), ("serial", 0.8)])
def test_a_real_model_is_let_go_and_comes_back_under_a_limit(
    smollm2: Path, smollm2_int8: Path, schedule: str, temperature: float
) -> None:
    found = run(smollm2, smollm2_int8, schedule, PROMPT, temperature, 400, 800, 30)
    assert found["same"]
    assert found["num_tokens"] > 300
    assert found["sizes"]["alive"] == 0
    assert found["sizes"]["before"] - found["sizes"]["after"] > 100 << 20, "its memory is the system's again"
    assert "down from" in found["downgrades"][0]
    assert changes(found["num_open"]) == [1, 0, 1], found["downgrades"]
    assert "up from" in found["downgrades"][-1]


@linux
@pytest.mark.slow
def test_what_fits_no_more_ends_with_its_code(tiny_model: Path) -> None:
    """The limit is set from without, as a shell does it."""
    command = f"ulimit -v 420000; exec {sys.executable} -m edgespec chat {tiny_model} --prompt the --max-tokens 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 5, (done.returncode, done.stderr)
    assert "of memory for plain decoding" in done.stderr
    assert "ulimit -v" in done.stderr
