"""Answers beside plain ones: speed, text, the widths of their passes and what lies between these."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

from compare_with_cpu import compare_texts

from device_figures.models import Checked, LeftOut
from device_figures.page import Figure, name_mode
from device_figures.peak_memory import record_peak_memory
from edgespec import SamplingParams, load
from edgespec.decoding.decoder import EVEN_WIDTHS
from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.passes import Passes
from edgespec.setup.open_model import weights_size
from edgespec.setup.row_proof import MOST_COST

_DRAFT_LENGTH = 3
_PROMPT = "The rain in the hall had stopped by the time that anyone thought of the roof."
_DRAFTERS = ("auto", "suffix", "lookahead")
_SCHEDULES: Final = ("serial", "pipelined", "hedged")
# Random weights repeat themselves where the likeliest token is taken, and hardly otherwise.
_SAMPLED = {"repeating": SamplingParams(), "without repeats": SamplingParams(temperature=1.0, seed=7)}
_ROUNDS = 3
_LOSES = 0.98
_GAP_S = 0.0001
_MEMORY = 1.25  # times what was foreseen
_MEMORY_BYTES = 512 << 20  # contexts and libraries of a driver


class RunPass(NamedTuple):
    width: int
    started_s: float
    ended_s: float


@contextmanager
def record_passes() -> Iterator[list[RunPass]]:
    """All passes of this process within the block."""
    run, passes = Passes._run_alone, list[RunPass]()

    def recorded(self: Passes, asked: Any) -> Any:
        started_s = perf_counter()
        made = run(self, asked)
        passes.append(RunPass(asked.width, started_s, perf_counter()))
        return made

    Passes._run_alone = recorded  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        Passes._run_alone = run  # type: ignore[method-assign]


def answer_plainly(checked: Checked, precision: str) -> Iterator[Figure]:
    """Plain decoding: passes, what lies between them, their widths and the memory taken."""
    target, device, found = checked.form(precision), checked.device, dict[str, Any]()
    with (
        record_peak_memory(device, found),
        record_passes() as passes,
        load(target.folder, device=device.name, drafter="none") as engine,
    ):
        opened = {each.width for each in passes}
        passes.clear()
        engine.generate(_PROMPT, max_tokens=16, temperature=0.0)
        yield _find_new_widths(f"{precision}, plain", engine, opened, passes)
        passes.clear()
        speed = _speed(engine.generate(_PROMPT, max_tokens=checked.num_tokens, temperature=0.0))
        mode = name_mode(is_deterministic=engine.is_deterministic)
    pass_s, gap_s = _pass_and_gap_s(passes[-checked.num_tokens + 1 :])
    yield Figure(
        f"{precision}, {mode}: plain {speed:.1f} tokens/s, "
        f"{1e3 * pass_s:.2f} ms a pass and {1e3 * gap_s:.2f} between two",
        {"form": precision, "tokens_per_second": speed, "pass_s": pass_s, "gap_s": gap_s},
        f"{1e3 * gap_s:.2f} ms of the host's work lie between two passes in {precision}, and 0.1 are wanted: "
        "profile decoding/scheduler.py on this machine (bench/overhead.py)"
        if gap_s > _GAP_S
        else None,
    )
    foreseen = weights_size(target).device_bytes
    own, host = found["peak_bytes"]["device"], found["peak_bytes"]["host"] or 0
    yield Figure(
        f"{precision}: peak memory {'not reported' if own is None else f'{own / 1e9:.2f} GB'} on the device, "
        f"where weights take {foreseen / 1e9:.2f}, and {host / 1e9:.2f} GB of the host",
        {"form": precision, "device_bytes": own, "weights_bytes": foreseen, "host_bytes": host},
        f"{precision} took {own / 1e9:.2f} GB, more than foreseen: set --memory until memory/estimate.py knows it"
        if own is not None and own > _MEMORY * foreseen + _MEMORY_BYTES
        else None,
    )


def _pass_and_gap_s(steps: list[RunPass]) -> tuple[float, float]:
    """Seconds of a pass and between two, at the median."""
    return (
        median(each.ended_s - each.started_s for each in steps),
        median(after.started_s - before.ended_s for before, after in pairwise(steps)),
    )


def answer_with_recordings(checked: Checked, precision: str) -> Iterator[Figure]:
    """Plain decoding with each pass started anew, and with passes replayed, in both modes."""
    if not checked.device.records_passes:
        raise LeftOut("only CUDA records passes")
    speeds = dict[bool, float]()
    for deterministic in (True, False):
        mode = name_mode(is_deterministic=deterministic)
        try:
            for figure in _answer_with_recordings(checked, precision, deterministic):
                yield figure
                if "tokens_per_second" in figure.values:
                    speeds[deterministic] = figure.values["tokens_per_second"]
        except DeviceUnavailable as error:
            yield Figure(f"{precision}, {mode}: refused: {error}", {"form": precision, "mode": mode})
    if len(speeds) == 2:
        ratio = speeds[True] / max(speeds[False], 1e-9)
        yield Figure(
            f"{precision}: plain decoding in deterministic mode is {ratio:.2f} of that without it",
            {"form": precision, "ratio": ratio},
            f"deterministic mode costs much here ({precision}: {ratio:.2f}): --no-deterministic gives one text up"
            if ratio < 1 / MOST_COST
            else None,
        )


def _answer_with_recordings(checked: Checked, precision: str, deterministic: bool) -> Iterator[Figure]:
    target, device, mode = checked.form(precision), checked.device, name_mode(is_deterministic=deterministic)
    speeds, texts, is_recording = [], [], False
    for cuda_graph in (False, True):
        with (
            record_passes() as passes,
            load(
                target.folder,
                device=device.name,
                cuda_graph=cuda_graph,
                drafter="none",
                deterministic=deterministic,
            ) as engine,
        ):
            engine.generate(_PROMPT, max_tokens=16, temperature=0.0)
            passes.clear()
            answer = engine.generate(_PROMPT, max_tokens=checked.num_tokens, temperature=0.0)
            opened: Any = engine.target
            is_recording = getattr(opened, "_chain", opened)._passes.is_recording
        pass_s, gap_s = _pass_and_gap_s(passes[-checked.num_tokens + 1 :])
        speeds.append(_speed(answer))
        texts.append(answer.token_ids)
        yield Figure(
            f"{precision}, {mode}, {'replayed' if is_recording else 'not recorded'}: {speeds[-1]:.1f} tokens/s, "
            f"{1e3 * pass_s:.2f} ms a pass and {1e3 * gap_s:.2f} between two",
            {
                "form": precision,
                "mode": mode,
                "is_recording": is_recording,
                "tokens_per_second": speeds[-1],
                "pass_s": pass_s,
                "gap_s": gap_s,
            },
        )
    ratio, text = speeds[1] / max(speeds[0], 1e-9), "same" if texts[0] == texts[1] else "another"
    yield Figure(
        f"{precision}, {mode}: CUDA graphs give {ratio:.2f} times the speed, and {text} text",
        {"form": precision, "mode": mode, "ratio": ratio, "text": text},
        f"passes in {precision} ({mode}) are not replayed; what edgespec says as it opens the model is the reason"
        if not is_recording
        else f"CUDA graphs lose here ({precision}, {mode}: {ratio:.2f}): --no-cuda-graph"
        if ratio < _LOSES
        else None,
        is_wrong=deterministic and texts[0] != texts[1],
    )


def _find_new_widths(name: str, engine: Any, opened: set[int], passes: list[RunPass]) -> Figure:
    """The widths that passes are padded to, and those of an answer that had not run as the model was opened."""
    ran = Counter(each.width for each in passes)
    new = {width: num for width, num in sorted(ran.items()) if width not in opened}
    listed = ", ".join(f"{width} ({num} times)" for width, num in new.items()) or "none"
    widths = () if engine.target.can.widths == EVEN_WIDTHS else engine.target.can.widths
    return Figure(
        f"{name}: passes are padded to {', '.join(map(str, widths)) or 'no width'}; widths of answers that had "
        f"not run before them: {listed}",
        {"name": name, "widths": widths, "ran": dict(ran), "new": new},
        f"answers ({name}) ran widths for the first time: {listed}; runtimes/pass_shapes.py misses them"
        if new and widths
        else None,
    )


def answer_with_text_drafters(checked: Checked, precision: str) -> Iterator[Figure]:
    """Answers with drafters that read the text, each beside plain ones in turn in one session.

    In the mode of users, and those of auto in the other one too.
    """
    target = checked.form(precision)
    for drafter, deterministic in [*((each, None) for each in _DRAFTERS), (_DRAFTERS[0], False)]:
        with (
            record_passes() as passes,
            load(
                target.folder, device=checked.device_name, drafter=drafter, deterministic=deterministic
            ) as engine,
        ):
            opened = {each.width for each in passes}
            passes.clear()
            for text, sampling in _SAMPLED.items():
                yield _compare(engine, checked.num_tokens, f"{precision}, {drafter}, {text}", sampling)
            yield _find_new_widths(f"{precision}, {drafter}", engine, opened, passes)


def _compare(engine: Any, num_tokens: int, name: str, sampling: SamplingParams) -> Figure:
    """Speed and text of an engine beside its plain one's; the first round warms both."""
    engines = (engine.plain(), engine)
    rounds = [
        [each.generate(_PROMPT, max_tokens=num_tokens, sampling=sampling) for each in engines]
        for _ in range(_ROUNDS)
    ]
    plain, fast = (max(answers[1:], key=_speed) for answers in zip(*rounds, strict=True))
    first, first_fast = (answers[0].stats.decode_tokens_per_second or 0.0 for answers in zip(*rounds, strict=True))
    ratio = _speed(fast) / max(_speed(plain), 1e-9)
    text = "same" if plain.token_ids == fast.token_ids else "another draw"
    if sampling == SamplingParams():
        prompt = engine.encode(_PROMPT)
        text = compare_texts(prompt, plain.token_ids, fast.token_ids, engine.target, _DRAFT_LENGTH + 1)
    stats, mode = fast.stats, name_mode(is_deterministic=engine.is_deterministic)
    accepted = "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}"
    return Figure(
        f"{name}, {mode}: {_speed(fast):.1f} tokens/s, plain {_speed(plain):.1f} ({ratio:.2f}; first answers "
        f"{first_fast:.1f} and {first:.1f}); {accepted} accepted, {stats.tokens_per_pass:.2f} a pass, both at "
        f"work {stats.overlap:.0%}; text {text}",
        {
            "name": name,
            "mode": mode,
            "tokens_per_second": _speed(fast),
            "plain_tokens_per_second": _speed(plain),
            "acceptance_rate": stats.acceptance_rate,
            "overlap": stats.overlap,
            "text": text,
            "downgrades": list(stats.downgrades),
        },
        f"drafting loses ({name}: {ratio:.2f} of plain): --drafter none until draft/costs.py knows why"
        if ratio < _LOSES
        else None,
        is_wrong=text.startswith("different"),
    )


def answer_in_schedules(checked: Checked, precision: str) -> Iterator[Figure]:
    """Answers with a drafter on the CPU, in three schedules."""
    target, speeds = checked.form(precision), dict[str, float]()
    how: dict[str, Any] = {"drafter": str(checked.drafter), "drafter_device": "cpu"}
    for schedule in _SCHEDULES:
        with load(
            target.folder, device=checked.device_name, draft_length=_DRAFT_LENGTH, schedule=schedule, **how
        ) as engine:
            found = _compare(engine, checked.num_tokens, f"{precision}, {schedule}", SamplingParams())
        speeds[schedule] = found.values["tokens_per_second"]
        yield found
    for schedule, than in (("pipelined", "serial"), ("hedged", "pipelined")):
        if (ratio := speeds[schedule] / max(speeds[than], 1e-9)) < _LOSES:
            yield Figure(
                f"{precision}: {schedule} is {ratio:.2f} of {than}",
                {"schedule": schedule, "than": than, "ratio": ratio},
                f"{schedule} loses to {than} here ({ratio:.2f}): use --schedule {than}",
            )


def _speed(answer: Any) -> float:
    return float(answer.stats.decode_tokens_per_second or 0.0)
