"""Texts that models have read, kept on the disk by the server: answers stay the same, and less is read."""

import logging
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from os import utime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tiny
from scripted import scripted_engine
from served import Served, home_with, serving

from edgespec import EdgeSpecError, Engine, UsageError, load
from edgespec.export.convert import export_model
from edgespec.server.kept_prefixes import KeptPrefixes
from edgespec.server.model_names import ModelNames

TEXTS = ["in the an re on " * 12, "re re the on an " * 12, "an on on the in re " * 10]
OpenEngine = Callable[[Path], Engine]


@pytest.fixture(autouse=True)
def log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec.server")


def open_tiny(model: Path, max_parallel: int = 3) -> Engine:
    return load(model, drafter="suffix", deterministic=True, max_parallel=max_parallel, offline=True)


@contextmanager
def keeping(prefixes: KeptPrefixes | None, open_model: OpenEngine = open_tiny, **models: Path) -> Iterator[Served]:
    """A server of some models, which keeps what they read."""
    with TemporaryDirectory() as home:
        names = ModelNames(home_with(Path(home), **models))
        with serving(names, lambda name: open_model(models[name]), prefixes=prefixes) as found:
            yield found


def ask(served: Served, text: str, model: str = "tiny") -> dict[str, Any]:
    return served.chat(text, model=model)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_server_that_starts_again_does_not_read_a_prompt_again(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    for prefixes in (None, KeptPrefixes(tmp_path / "kept"), KeptPrefixes(tmp_path / "kept")):
        with keeping(prefixes, tiny=tiny_model) as served:
            answers.append(ask(served, TEXTS[0]))
    assert len({text_of(answer) for answer in answers}) == 1
    num_prompt = answers[0]["usage"]["prompt_tokens"]
    assert all(num_cached(answer) < 8 for answer in answers[:2])  # a probe may have left a token
    assert num_cached(answers[2]) == num_prompt - 1
    assert "saved the KV cache of " in caplog.text
    assert "loaded the KV cache: " in caplog.text
    (file,) = files_of(tmp_path / "kept")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_beginning_is_shared_by_other_prompts(tiny_model: Path, tmp_path: Path) -> None:
    prefixes = KeptPrefixes(tmp_path / "kept")
    with keeping(prefixes, tiny=tiny_model) as served:
        ask(served, TEXTS[0])
        wanted = ask(served, TEXTS[0] + "other")
    with keeping(prefixes, tiny=tiny_model) as served:
        found = ask(served, TEXTS[0] + "other")
    assert text_of(found) == text_of(wanted)
    assert num_cached(found) >= len(TEXTS[0]) // 4


def test_the_model_of_the_command_line_has_its_texts_too(tiny_model: Path, tmp_path: Path) -> None:
    prefixes, counts = KeptPrefixes(tmp_path / "kept"), []
    names = ModelNames(home_with(tmp_path / "home"), own=str(tiny_model))
    for _ in range(2):
        first = (str(names.own_name), open_tiny(tiny_model))
        with serving(names, lambda name: pytest.fail(name), first=first, prefixes=prefixes) as served:
            counts.append(num_cached(ask(served, TEXTS[0], first[0])))
    assert counts[0] < 8 < counts[1]


def test_texts_of_several_requests_at_once_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    prefixes, answers = KeptPrefixes(tmp_path / "kept"), []
    with keeping(prefixes, tiny=tiny_model) as served:
        lone = [text_of(ask(served, text)) for text in TEXTS]
    for _ in range(2):
        with keeping(prefixes, tiny=tiny_model) as served, ThreadPoolExecutor(3) as pool:
            answers.append(list(pool.map(partial(ask, served), TEXTS)))
    for made in answers:
        assert [text_of(each) for each in made] == lone
        assert all(num_cached(each) >= each["usage"]["prompt_tokens"] - 1 for each in made)
    assert len(files_of(tmp_path / "kept")) == 3


def test_each_model_has_its_own(tiny_model: Path, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "other.gguf", tiny.random_weights(seed=77))
    export_model(tmp_path / "other.gguf", tmp_path / "other", precision="fp32")
    models = {"tiny": tiny_model, "other": tmp_path / "other"}
    with keeping(None, **models) as served:
        wanted = {name: text_of(ask(served, TEXTS[0], name)) for name in models}
    with keeping(KeptPrefixes(tmp_path / "kept"), **models) as served:
        for name in models:
            ask(served, TEXTS[0], name)
        for name in models:  # which takes the place of the other one
            answer = ask(served, TEXTS[0], name)
            assert text_of(answer) == wanted[name]
            assert num_cached(answer) == answer["usage"]["prompt_tokens"] - 1
    assert len({file.parent for file in files_of(tmp_path / "kept")}) == 2


def test_a_text_that_is_there_is_not_written_again(tiny_model: Path, tmp_path: Path) -> None:
    prefixes = KeptPrefixes(tmp_path / "kept")
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXTS[0], max_tokens=4)
        prefixes.keep("tiny", engine)
        (file,) = files_of(tmp_path / "kept")
        before = file.stat()
        prefixes.keep("tiny", engine)
        assert files_of(tmp_path / "kept") == [file]
    assert file.stat().st_ino == before.st_ino
    assert file.stat().st_mtime_ns > before.st_mtime_ns


def test_only_texts_are_kept_for_which_there_is_a_cache(tiny_model: Path, tmp_path: Path) -> None:
    prefixes = KeptPrefixes(tmp_path / "kept")
    with open_tiny(tiny_model, max_parallel=1) as engine:
        engine.generate("the", max_tokens=1)
        prefixes.keep("tiny", engine)
        assert files_of(tmp_path / "kept") == []
        for text in TEXTS:
            engine.generate(text, max_tokens=4)
            prefixes.keep("tiny", engine)
            assert len(files_of(tmp_path / "kept")) == 1
        held = engine.target.held_tokens  # type: ignore[attr-defined]
    with open_tiny(tiny_model, max_parallel=1) as engine:
        prefixes.take("tiny", engine)
        assert np.array_equal(engine.held_texts()[0], held)


def test_a_damaged_file_is_told_deleted_and_made_again(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes, answers = KeptPrefixes(tmp_path / "kept"), []
    for _ in range(3):
        with keeping(prefixes, tiny=tiny_model) as served:
            answers.append(ask(served, TEXTS[0]))
        if len(answers) == 1:
            (file,) = files_of(tmp_path / "kept")
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    assert [num_cached(answer) > 8 for answer in answers] == [False, False, True]
    assert len({text_of(answer) for answer in answers}) == 1
    assert caplog.text.count("deleted a saved KV cache") == 1


def test_what_is_kept_has_a_bound(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXTS[0], max_tokens=4)
        KeptPrefixes(tmp_path / "kept").keep("tiny", engine)
        (first,) = files_of(tmp_path / "kept")
        bounded = KeptPrefixes(tmp_path / "kept", 2 * first.stat().st_size + 8000)
        engine.generate(TEXTS[1], max_tokens=4)
        bounded.keep("tiny", engine)
        assert len(files_of(tmp_path / "kept")) == 2
        (first.parent / ".left.prefix.0a").write_bytes(bytes(100))  # of a server that was killed
        engine.generate(TEXTS[2], max_tokens=4)
        bounded.keep("tiny", engine)
        kept = files_of(tmp_path / "kept")
        assert first not in kept
        assert sum(file.stat().st_size for file in kept) <= bounded.max_bytes
        KeptPrefixes(tmp_path / "few", 10_000).keep("tiny", engine)
        assert files_of(tmp_path / "few") == []
        assert "the limit is 10 kB" in caplog.text


def test_files_of_others_are_not_deleted_for_room(tiny_model: Path, tmp_path: Path) -> None:
    kept, others = tmp_path / "kept", [tmp_path / "documents", tmp_path / "kept" / "mine"]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_bytes(bytes(50_000))
        utime(folder / "notes.txt", (1, 1))  # longest ago
    (kept / "linked").symlink_to(others[0], target_is_directory=True)
    (kept / ("0" * 32)).symlink_to(others[0], target_is_directory=True)
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXTS[0], max_tokens=4)
        KeptPrefixes(kept).keep("tiny", engine)
        (first,) = kept.glob("*/*.prefix")
        (first.parent / "notes.txt").write_bytes(bytes(50_000))
        engine.generate(TEXTS[1], max_tokens=4)
        engine.generate(TEXTS[2], max_tokens=4)
        KeptPrefixes(kept, first.stat().st_size + 8000).keep("tiny", engine)
    assert not first.exists()
    assert [(folder / "notes.txt").stat().st_size for folder in (*others, first.parent)] == [50_000] * 3


def test_a_folder_that_cannot_be_used_is_told_and_the_server_goes_on(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("a file")
    with keeping(KeptPrefixes(tmp_path / "kept"), tiny=tiny_model) as served:
        assert text_of(ask(served, TEXTS[0]))
    assert "its KV cache was not saved: " in caplog.text
    assert "unloading tiny" in caplog.text


def test_a_model_whose_texts_cannot_be_kept_says_so_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def open_scripted(model: Path) -> Engine:
        return scripted_engine(model, tmp_path / "scripted", lambda prompt: "Hi")

    with keeping(KeptPrefixes(tmp_path / "kept"), open_scripted, tiny=tiny_model) as served:
        assert text_of(ask(served, "hello")) == "Hi"
    assert caplog.text.count("its KV cache cannot be saved: ") == 1
    assert not (tmp_path / "kept").exists()


def test_a_cache_that_is_in_use_or_not_there_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with open_tiny(tiny_model) as engine, engine.stream(TEXTS[0], max_tokens=500) as answer:
        next(answer)
        assert 0 not in engine.held_texts()
        KeptPrefixes(tmp_path / "kept").keep("tiny", engine)
        assert files_of(tmp_path / "kept") == []
        with pytest.raises(UsageError, match="wanted 0 to 2"):
            engine.save_prefix(tmp_path / "one", 3)


def test_a_model_that_cannot_take_its_texts_is_closed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Engine] = []

    def fail(self: KeptPrefixes, name: str, engine: Engine) -> None:
        opened.append(engine)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(KeptPrefixes, "take", fail)
    with keeping(KeptPrefixes(tmp_path / "kept"), tiny=tiny_model) as served:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert served.post("/v1/chat/completions", asked).status_code == 500
        with pytest.raises(EdgeSpecError, match="this engine is closed"):
            opened[0].generate("the")
