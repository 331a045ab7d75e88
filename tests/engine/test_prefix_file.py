"""What a model has read of a text, kept in a file: answers stay the same, and nothing foreign is used."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from calls import decoder
from scripted import scripted_engine

from edgespec import EdgeSpecError, Engine, MemoryExhausted, ModelError, UsageError, load
from edgespec.chat.files import AutosaveFile
from edgespec.chat.saved_chats import delete_chat, keep_prefix, kept_path, list_chats, take_prefix
from edgespec.chat.session import ChatSession
from edgespec.export.convert import export_model
from edgespec.runtimes import kv_caches
from edgespec.runtimes.kv_caches import SharedCache

TEXT = "the in the an the in the an " * 8


def open_tiny(model: Path, **options: bool) -> Engine:
    return load(model, drafter="suffix", **{"deterministic": True, **options})


def test_a_text_goes_on_without_being_read_again(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with open_tiny(tiny_model) as engine:
        conversation = engine.chat(max_tokens=20)
        conversation.say(TEXT)
        num_tokens = engine.save_prefix(path)
        saved = conversation.transcript()
        plain = conversation.say("the in", logprobs=3)
    assert num_tokens > 50
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size > num_tokens * engine.manifest.kv_cache.bytes_per_token
    with open_tiny(tiny_model) as engine:
        assert engine.load_prefix(path) == num_tokens
        conversation = engine.chat(max_tokens=20)
        conversation.restore(saved)
        fed = engine.target.num_fed
        again = conversation.say("the in", logprobs=3)
        num_read = engine.target.num_fed - fed
    assert (again.text, again.token_ids, again.logprobs) == (plain.text, plain.token_ids, plain.logprobs)
    assert num_read < num_tokens


def test_rows_behind_it_have_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    tokens = np.random.default_rng(5).integers(0, tiny.VOCAB, 90).astype(np.int32)
    with open_tiny(tiny_model) as engine:
        engine.target.logits(tokens[:80], 1)
        engine.save_prefix(tmp_path / "kept")
        wanted = engine.target.logits(tokens, 5).copy()
    with open_tiny(tiny_model) as engine:
        engine.load_prefix(tmp_path / "kept")
        fed = engine.target.num_fed
        assert np.array_equal(engine.target.logits(tokens, 5), wanted)
        assert engine.target.num_fed - fed == 10


def test_a_cache_that_could_not_grow_is_kept_whole(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, restored = decoder(tiny_model), decoder(tiny_model)
    tokens, length = np.arange(600, dtype=np.int32) % tiny.VOCAB, 514 + kv_caches._SPARE

    def scarce(self: SharedCache, past: str, shape: tuple[int, ...], num_past: int, memory: str = "") -> Any:
        if shape[2] > length:
            raise MemoryError
        return allocate(self, past, shape, num_past, memory)

    allocate = SharedCache._allocate
    with monkeypatch.context() as patch:
        patch.setattr(SharedCache, "_allocate", scarce)
        for num_tokens in (512, 514, length):
            used.logits(tokens[:num_tokens], 1)
        with pytest.raises(MemoryExhausted):
            used.logits(tokens[: length + 1], 1)
        kept = used.read_prefix()
    restored.fill_prefix(*kept)
    assert len(restored.held_tokens) == length
    wanted = decoder(tiny_model).logits(tokens, 1).copy()
    assert np.array_equal(used.logits(tokens, 1), wanted)
    assert np.array_equal(restored.logits(tokens, 1), wanted)


def test_another_text_is_read_whole(tiny_model: Path, tmp_path: Path) -> None:
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXT, max_tokens=4)
        engine.save_prefix(tmp_path / "kept")
        wanted = engine.generate("an the an", max_tokens=12).token_ids
    with open_tiny(tiny_model) as engine:
        engine.load_prefix(tmp_path / "kept")
        assert engine.generate("an the an", max_tokens=12).token_ids == wanted


def test_it_serves_its_own_model_and_mode_alone(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXT, max_tokens=4)
        engine.save_prefix(path)
    tiny.write_gguf(tmp_path / "other.gguf", tiny.random_weights(seed=77))
    export_model(tmp_path / "other.gguf", tmp_path / "other", precision="fp32")
    for model, is_deterministic in ((tmp_path / "other", True), (tiny_model, False)):
        with (
            open_tiny(model, deterministic=is_deterministic) as engine,
            pytest.raises(UsageError, match="was saved with another model, device, processor or version"),
        ):
            engine.load_prefix(path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _change(path: Path, **changes: object) -> None:
    with np.load(path) as found:
        arrays = {name: found[name] for name in found}
    with path.open("wb") as file:
        np.savez(file, **{**arrays, **changes})  # type: ignore[arg-type]


def _change_directory(offset: int, bit: int) -> Callable[[Path], None]:
    """Flips one bit of the last entry of the archive's directory."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[data.rindex(b"PK\x01\x02") + offset] ^= bit
        path.write_bytes(data)

    return change


def _compress(path: Path) -> None:
    with np.load(path) as found:
        np.savez_compressed(path.with_suffix(".npz"), **{name: found[name] for name in found})
    path.with_suffix(".npz").replace(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "flipped": _flip,
    "empty": lambda path: path.write_bytes(b"") and None,
    "text": lambda path: path.write_text("hello") and None,
    "foreign tokens": lambda path: _change(path, tokens=np.full(40, tiny.VOCAB, np.int32)),
    "too many tokens": lambda path: _change(path, tokens=np.zeros(4, np.int32)),
    "other shape": lambda path: _change(path, values=np.zeros((1, 2, 3), np.float32)),
    "of a newer version": _change_directory(6, 0x80),
    "encrypted": _change_directory(8, 1),
    "patched": _change_directory(8, 0x20),
    "packed in an unknown way": _change_directory(10, 0x40),
    "packed": _compress,
    "objects": lambda path: _change(path, tokens=np.array([{}], object)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_changes_nothing(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "kept"
    with open_tiny(tiny_model) as engine:
        wanted = engine.generate(TEXT, max_tokens=4).token_ids
        engine.save_prefix(path)
        DAMAGES[damage](path)
        with pytest.raises(UsageError, match="is damaged"):
            engine.load_prefix(path)
        assert engine.generate(TEXT, max_tokens=4).token_ids == wanted


def test_a_text_that_is_longer_than_the_context_is_not_used(tiny_model: Path, tmp_path: Path) -> None:
    with open_tiny(tiny_model) as engine:
        engine.generate(TEXT, max_tokens=4)
        engine.save_prefix(tmp_path / "kept")
    with load(tiny_model, drafter="none", context=32) as engine, pytest.raises(UsageError, match="context of 32"):
        engine.load_prefix(tmp_path / "kept")


def test_what_cannot_be_kept_or_is_not_there_is_said(tiny_model: Path, tmp_path: Path) -> None:
    engine = scripted_engine(tiny_model, tmp_path / "scripted", lambda prompt: "Hi")
    with engine, pytest.raises(ModelError, match=r"a model without recurrent layers .* with device='cpu'"):
        engine.save_prefix(tmp_path / "kept")
    with open_tiny(tiny_model) as engine:
        with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
            engine.load_prefix(tmp_path / "kept")
        with pytest.raises(UsageError, match="has read nothing yet that could be saved"):
            engine.save_prefix(tmp_path / "kept")
        engine.generate(TEXT, max_tokens=4)
        with pytest.raises(EdgeSpecError, match=r"cannot write .*: No such file"):
            engine.save_prefix(tmp_path / "nowhere" / "kept")
        if Path("/proc/self").exists():
            with pytest.raises(EdgeSpecError, match="no file can be written in /proc, which lies on no disk"):
                engine.save_prefix("/proc/kept")
    with load(tiny_model, drafter="none") as engine, engine.stream(TEXT, max_tokens=500) as answer:
        next(answer)
        with pytest.raises(EdgeSpecError, match="an answer is being made"):
            engine.save_prefix(tmp_path / "kept")
    assert [each.name for each in tmp_path.iterdir()] == ["scripted"]


def test_what_the_first_load_measures_is_not_kept(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    for known in ("experience.json", "row_proofs.json"):
        (model / known).unlink(missing_ok=True)
    with open_tiny(model) as engine:
        assert (model / "experience.json").exists(), "passes were measured"
        assert engine.held_texts() == {}
        with pytest.raises(UsageError, match="has read nothing yet that could be saved"):
            engine.save_prefix(tmp_path / "kept")


def test_a_chat_that_goes_on_is_not_read_again(tiny_model: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def open_chat(engine: Engine, file: Path | None = None) -> ChatSession:
        return ChatSession(
            conversation=engine.chat(max_tokens=12),
            model=str(tiny_model),
            drafter="suffix",
            open_engine=lambda model, drafter: engine,
            describe_plan=lambda model, drafter: "",
            info=lines.append,
            autosave=AutosaveFile(tmp_path / "chats", pytest.fail, file),
            keeps_prefix=True,
        )

    with open_tiny(tiny_model) as engine:
        session = open_chat(engine)
        keep_prefix(session)
        assert lines == []
        session.record(tuple(session.send(TEXT)))
        keep_prefix(session)
        saved, file = session.transcript(), session.file
    assert file is not None
    assert "; to read them again takes about" in lines[-1]
    assert "kB) at " in lines[-1]
    assert len(list_chats(tmp_path / "chats")) == 1
    with open_tiny(tiny_model) as engine:
        session = open_chat(engine, file)
        session.conversation.restore(saved)
        take_prefix(session)
        assert lines[-1].endswith("tokens need not be read again")
        kept_path(file).write_bytes(b"damaged")
        take_prefix(session)
        assert lines[-1].startswith("the model reads the conversation again: ")
        delete_chat(list_chats(tmp_path / "chats")[0])
    assert [*(tmp_path / "chats").iterdir()] == []


def test_what_has_no_end_is_not_read(tiny_model: Path) -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero, a device without an end, which Windows lacks")
    with open_tiny(tiny_model) as engine, pytest.raises(UsageError, match="/dev/zero is not a file"):
        engine.load_prefix("/dev/zero")
