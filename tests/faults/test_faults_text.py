"""Faults of texts: characters cut in two, what no terminal or tokenizer likes, broken files of sessions."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
from double import Double
from faulty import SCHEDULES, drafted_engine
from hypothesis import given
from hypothesis import strategies as st

from edgespec import ContextOverflow, Engine, Message, load
from edgespec.chat.input import HistoryFile
from edgespec.chat.saved_chats import SUFFIX
from edgespec.cli.main import main
from edgespec.engine.transcript import Transcript
from edgespec.manifest import Manifest
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds

pytestmark = pytest.mark.slow  # a module of many models or processes

CUT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model, drafter="none", deterministic=True)


# F31: characters of several tokens


@dataclass
class Reciter(Double):
    """Says a text behind a prompt, and at some places another token."""

    num_prompt: int
    script: TokenIds
    wrong: frozenset[int] = frozenset()
    vocab_size: int = tiny.VOCAB
    context_length: int = 400
    num_fed: int = 0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = np.zeros((num_last, self.vocab_size), np.float32)
        for row, length in zip(rows, range(len(tokens) - num_last + 1, len(tokens) + 1), strict=True):
            at = length - self.num_prompt
            row[(self.script[at] + (at in self.wrong)) % self.vocab_size if 0 <= at < len(self.script) else 2] = 9
        return rows


@given(
    text=st.text("é中😀a👨‍👩‍👧 \n", min_size=1, max_size=12),
    wrong=st.frozensets(st.integers(0, 40), max_size=6),
    length=st.integers(1, 9),
    schedule=st.sampled_from(SCHEDULES),
    max_tokens=st.integers(1, 60),
)
def test_no_character_is_shown_in_part_or_taken_back(
    manifest: Manifest,
    tokenizer: Tokenizer,
    text: str,
    wrong: frozenset[int],
    length: int,
    schedule: str,
    max_tokens: int,
) -> None:
    prompt, script = tokenizer.encode("the"), tokenizer.encode(text)
    said = replace(manifest, eos_token_ids=(2,))
    target, drafter = Reciter(len(prompt), script), Reciter(len(prompt), script, wrong)
    with drafted_engine(said, tokenizer, target, drafter, length=length, schedule=schedule) as engine:
        chunks = list(engine.stream("the", max_tokens=max_tokens))
    shown = "".join(chunk.text for chunk in chunks)
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == script.tolist()[:max_tokens]
    assert shown == tokenizer.decode(token_ids)
    assert not any(CUT in chunk.text for chunk in chunks[:-1])
    if max_tokens > len(script):
        assert (shown, chunks[-1].finish_reason) == (tokenizer.decode(script), "stop")
    else:
        assert tokenizer.decode(script).startswith(shown.rstrip(CUT))


# F36: odd text


ODD = {
    "a lone surrogate": "the \ud800 in",
    "bytes that were no UTF-8": os.fsdecode(b"caf\xe9 the"),
    "NUL": "the\0in",
    "reordering": "\u202ethe\u2066in",
    "escapes": "\x1b]52;c;aGk=\x07the",
    "not a character": "\ufffe\uffff\U0010ffff",
    "marks upon marks": "e" + "\u0301" * 300,
    "every line break": "\r\n\v\f\x1c\u0085\u2028",
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_text_is_read_as_it_is_and_answered(engine: Engine, kind: str) -> None:
    wanted = ODD[kind].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert engine.tokenizer.decode(engine.tokenize(ODD[kind])) == wanted
    answer = engine.generate(ODD[kind], max_tokens=3)
    assert answer.prompt_tokens == engine.count(ODD[kind]) > 3
    assert len(answer.token_ids) == 3
    assert wanted in engine.tokenizer.decode(engine.encode(ODD[kind]))


@given(text=st.text(st.characters(), max_size=60))
def test_any_text_is_counted_as_it_is_sent(engine: Engine, text: str) -> None:
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert engine.tokenize(text) == engine.tokenize(mended)
    assert engine.tokenizer.decode(engine.tokenize(text)) == mended


@pytest.mark.parametrize("kind", ["one word", "characters of four bytes"])
def test_ten_megabytes_are_refused_at_once_and_the_next_answer_is_right(engine: Engine, kind: str) -> None:
    piece = {"one word": "a", "characters of four bytes": "😀"}[kind]
    text = piece * (10_000_000 // len(piece.encode()))
    wanted = engine.generate("the in", max_tokens=5).token_ids
    before, started = psutil.Process().memory_info().rss, time.process_time()
    with pytest.raises(ContextOverflow, match="or more tokens do not fit the context of 700") as refused:
        engine.generate(text)
    assert refused.value.exit_code == 7
    assert time.process_time() - started < 2.0
    assert psutil.Process().memory_info().rss - before < 256 << 20
    assert engine.context_length < engine.count(text) < len(text)
    assert engine.generate("the in", max_tokens=5).token_ids == wanted


def test_count_of_a_long_text_is_never_more_than_it_has(tokenizer: Tokenizer) -> None:
    for piece in ("the in", "a"):
        text = piece * (70_000 // len(piece))
        assert tokenizer.least_tokens(text, 1 << 30) <= len(tokenizer.encode(text))
        assert tokenizer.least_tokens(text, 1 << 30) > 0.9 * len(tokenizer.encode(text))
        assert 50 < tokenizer.least_tokens(text, 50) <= len(tokenizer.encode(text[: 1 << 16]))


@pytest.mark.parametrize("overflow", ["error", "drop-oldest"])
def test_message_of_megabytes_is_not_said_and_the_conversation_goes_on(engine: Engine, overflow: str) -> None:
    conversation = engine.chat(overflow=overflow, max_tokens=4)
    first = conversation.say("the in")
    with pytest.raises(ContextOverflow):
        conversation.say("the in " * 500_000)
    assert [message.content for message in conversation.messages] == ["the in", first.text]
    assert conversation.say("an on").finish_reason == "length"


def test_argument_that_is_no_utf8_is_read_with_replacements(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--max-tokens", "3", "--json", "--prompt", os.fsdecode(b"caf\xe9")]
    assert main(["chat", str(tiny_model), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["token_ids"]) == 3


# F37: files of sessions


BROKEN_HISTORY = b'"first"\n"cut o\n[1, 2]\n' + b"[" * 100_000 + b'\n\xff\xfe\n\n{"a": 1}\n"\\ud800"\n"last"\n'


def test_broken_history_gives_what_is_whole_of_it(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "history"
    path.write_bytes(BROKEN_HISTORY)
    history = HistoryFile(path, said.append)
    assert list(history.load_history_strings()) == ["last", "\ud800", "first"]
    history.store_string("new\nlines \ud800")
    assert next(iter(HistoryFile(path, said.append).load_history_strings())) == "new\nlines \ud800"
    assert said == []


@pytest.mark.slow
def test_command_answers_where_there_is_no_home(tiny_model: Path) -> None:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("EDGESPEC_", "XDG_"))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "edgespec",
            "chat",
            str(tiny_model),
            "--prompt",
            "the",
            "--max-tokens",
            "3",
            "--json",
        ],
        env={**settings, "HOME": "/dev/null/home"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(json.loads(done.stdout)["token_ids"])) == (0, 3)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", ["cut", "not ours", "a folder", "a pipe"])
def test_conversation_that_is_damaged_is_not_gone_on_with_and_stays_as_it_is(
    tiny_model: Path,
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    path = tmp_path / "chats" / f"broken{SUFFIX}"
    path.parent.mkdir()
    Transcript(messages=(Message("user", "the"), Message("assistant", "in"))).save(path)
    whole = path.read_bytes()
    if damage in ("a folder", "a pipe"):
        path.unlink()
        (path.mkdir if damage == "a folder" else partial(os.mkfifo, path))()
    else:
        path.write_bytes(whole[:-5] if damage == "cut" else b"hello")
    before = path.stat()
    assert main(["chat", str(tiny_model), "--continue", "--prompt", "the", "--max-tokens", "2"]) == 2
    assert path.name in capsys.readouterr().err or damage in ("a folder", "a pipe")
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    assert main(["chat", str(tiny_model), "--prompt", "the", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out
