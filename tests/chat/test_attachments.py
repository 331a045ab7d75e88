"""Files for the model: read, refused, written into a message, found in it again, attached and dropped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdfs import make_pdf

from edgespec import ContextOverflow, EdgeSpecError, UsageError, load
from edgespec.chat import attachments
from edgespec.chat.attachments import (
    Attachment,
    find_paths,
    join_message,
    read_attachment,
    split_message,
)
from edgespec.chat.command import block_text, is_open_block
from edgespec.chat.commands import run_command
from edgespec.chat.files import AutosaveFile
from edgespec.chat.past_rounds import describe_resumed
from edgespec.chat.saved_chats import find_latest
from edgespec.chat.session import ChatSession
from edgespec.cli.main import main
from edgespec.engine.transcript import Transcript
from edgespec.text import pdf

_LINES = st.text(alphabet=st.sampled_from("ab` \n:#File"), max_size=30).map(lambda text: text.strip("\n"))


@pytest.fixture
def session(tiny_model: Path, tmp_path: Path) -> Iterator[ChatSession]:
    with load(str(tiny_model), drafter="none", deterministic=True, home=tmp_path) as engine:
        yield ChatSession(
            conversation=engine.chat(max_tokens=4),
            model=str(tiny_model),
            drafter="none",
            open_engine=lambda model, drafter: engine,
            describe_plan=lambda model, drafter: "",
            info=lambda line: None,
            autosave=AutosaveFile(tmp_path / "chats", pytest.fail),
        )


def output(session: ChatSession, command: str) -> str:
    lines: list[str] = []
    session.info = lines.append
    run_command(session, command)
    return "\n".join(lines)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_message_has_the_name_and_text_of_a_file_in_a_fence() -> None:
    files = [Attachment("a.py", "print(1)"), Attachment("notes", "x")]
    assert join_message(files, "What is it?") == (
        "File: a.py\n```python\nprint(1)\n```\n\nFile: notes\n```text\nx\n```\n\nWhat is it?"
    )


def test_no_text_ends_its_fence() -> None:
    message = join_message([Attachment("a.md", "```py\nx\n```\n````")], "?")
    assert message == "File: a.md\n`````markdown\n```py\nx\n```\n````\n`````\n\n?"


@given(st.lists(st.builds(Attachment, st.sampled_from(["a.py", "b.x y", "c"]), _LINES), max_size=3), _LINES)
def test_the_files_of_a_message_are_found_in_it_again(files: list[Attachment], text: str) -> None:
    if not split_message(text)[0]:
        assert split_message(join_message(files, text)) == (tuple(files), text)


@pytest.mark.parametrize("text", ["File: a\n```\nno end", "File: a", "hello\nFile: a\n```\nx\n```\n\n"])
def test_other_messages_have_no_files(text: str) -> None:
    assert split_message(text) == ((), text)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\r\nb\n", "a\nb"),
        (b"\xef\xbb\xbf# T\xc3\xbcr", "# Tür"),
        ("name,age\nÄnn,3\n".encode("utf-16"), "name,age\nÄnn,3"),
    ],
)
def test_text_is_read_in_usual_encodings(tmp_path: Path, content: str | bytes, text: str) -> None:
    assert read_attachment(written(tmp_path, "t.csv", content)) == Attachment("t.csv", text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x7fELF\0\0\1", "is binary, not text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "is a pointer of Git LFS"),
        ("Tür".encode("cp1252"), "not text in UTF-8 .the byte 0xfc at 1 is not.; save it as UTF-8"),
        (b"\xff\xfea", "ends within a character of UTF-16, so it was cut short"),
        (b"a\0b\0", "UTF-16 without a byte order mark"),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read_attachment(written(tmp_path, "t.txt", content))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read_attachment(tmp_path)
    with pytest.raises(UsageError, match=r"there is no file .*missing"):
        read_attachment(tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot read"):
        read_attachment(tmp_path / ("x" * 5000))
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="is a pipe or a device, not a file"):
            read_attachment(tmp_path / "pipe")


def test_a_huge_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no disk holds it
    with pytest.raises(UsageError, match=r"has 1099\.5 GB; at most 1 MB can be attached"):
        read_attachment(path)


def test_the_text_of_a_pdf_is_read_page_by_page(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    path = written(tmp_path, "two.pdf", make_pdf(["The first page.", "", "The last page."]))
    assert read_attachment(path) == Attachment("two.pdf", "The first page.\n\nThe last page.")


def test_what_the_library_warns_of_is_not_written_into_the_chat(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    program = f"""
from pathlib import Path
from edgespec.chat.attachments import read_attachment
from edgespec.errors import UsageError
try:
    read_attachment(Path({str(written(tmp_path, "fake.pdf", b"%PDF-1.4 nothing"))!r}))
except UsageError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_a_pdf_that_has_no_text_or_is_damaged_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    with pytest.raises(UsageError, match="has no text on 2 pages; pictures of text"):
        read_attachment(written(tmp_path, "scan.pdf", make_pdf(["", ""])))
    for broken in (b"%PDF-1.4\nrubbish", make_pdf(["Words."])[:60]):
        with pytest.raises(UsageError, match="is a PDF that cannot be read"):
            read_attachment(written(tmp_path, "broken.pdf", broken))


def test_a_pdf_with_too_much_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    monkeypatch.setattr(attachments, "MAX_TEXT_BYTES", 20)
    with pytest.raises(UsageError, match="of text up to page 2 of 3"):
        read_attachment(written(tmp_path, "long.pdf", make_pdf(["Fifteen letters"] * 3)))


def test_a_pdf_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    monkeypatch.setattr(pdf, "_MOST_S", 0.01)
    monkeypatch.setattr(pdf, "_READER", written(tmp_path, "endless.py", b"while True: pass"))
    with pytest.raises(UsageError, match=r"bomb\.pdf is a PDF that cannot be read \(it does not finish within"):
        read_attachment(written(tmp_path, "bomb.pdf", make_pdf(["Words."])))


def test_an_encrypted_pdf_is_refused(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf", reason="needs pypdf: pip install edgespec[pdf]")
    writer = pypdf.PdfWriter(clone_from=written(tmp_path, "plain.pdf", make_pdf(["Secret."])))
    writer.encrypt("word", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with pytest.raises(UsageError, match="is encrypted; save it without a password"):
        read_attachment(tmp_path / "locked.pdf")


def test_without_pypdf_a_pdf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(EdgeSpecError, match=r'pip install "edgespec\[pdf\]"'):
        read_attachment(written(tmp_path, "a.pdf", make_pdf(["Words."])))


def test_names_may_have_spaces_and_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my notes.md", "a.txt"):
        written(tmp_path, name, name)
    assert find_paths("my notes.md") == [Path("my notes.md")]
    assert find_paths("'my notes.md' a.txt") == [Path("my notes.md"), Path("a.txt")]
    written(tmp_path, "b [1].txt", "x")
    (tmp_path / "folder.txt").mkdir()
    assert find_paths("*.txt") == [Path("a.txt"), Path("b [1].txt")]
    assert find_paths(f"{tmp_path}/*.md a.txt") == [tmp_path / "my notes.md", Path("a.txt")]
    assert find_paths("b [1].txt") == [Path("b [1].txt")]
    for missing in ("my notes", "'my", "a.txt b.txt", "x" * 5000, "*.nothing"):
        with pytest.raises(UsageError, match=r"there is no file .*; nothing was attached"):
            find_paths(missing)


def test_the_model_is_told_no_folders_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    path = written(tmp_path, "sub/a.txt", "x")
    monkeypatch.chdir(tmp_path)
    assert read_attachment(path).name == "a.txt"
    assert read_attachment(Path("sub/a.txt")).name == "sub/a.txt"
    assert read_attachment(Path("sub/../sub/a.txt")).name == "a.txt"


def test_files_are_attached_listed_replaced_and_dropped(session: ChatSession, tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "the in an")
    num = len(session.engine.tokenize(join_message([Attachment("a.txt", "the in an")], "")))
    shown = output(session, f"/attach {path}")
    assert f"attached a.txt: {num} tokens\n" in shown
    assert "tokens are left for your message and the answer" in shown
    assert session.status().hint == "1 file attached"
    path.write_text("the")
    output(session, f"/attach {path} {written(tmp_path, 'b.txt', 'on')}")
    assert [file.text for file in session.attachments] == ["the", "on"]
    assert "2  b.txt: " in output(session, "/attach")
    assert output(session, "/detach 2") == "no longer attached: b.txt"
    with pytest.raises(UsageError, match=r"no attached file is called 'b.txt'"):
        run_command(session, "/detach b.txt")
    assert output(session, "/detach a.txt") == "no longer attached: a.txt"
    assert "no file is attached" in output(session, "/attach")
    with pytest.raises(UsageError, match="no file is attached"):
        run_command(session, "/detach")


def past(session: ChatSession, capfd: pytest.CaptureFixture[str]) -> str:
    """What /history shows."""
    capfd.readouterr()
    run_command(session, "/history")
    return capfd.readouterr().err


def test_a_file_goes_with_one_message_and_stays_in_the_conversation(
    session: ChatSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output(session, f"/attach {written(tmp_path, 'a.txt', 'the in')}")
    session.send("an on").completion()
    session.save()
    session.send("the").completion()
    message = join_message([Attachment("a.txt", "the in")], "an on")
    assert [each.user for each in session.conversation.rounds] == [message, "the"]
    saved = find_latest(tmp_path / "chats")
    assert saved is not None
    assert Transcript.read(saved).messages[0].content == message
    assert "> [a.txt, 1 line] an on" in past(session, capfd)
    run_command(session, "/undo")
    assert "your last message: '[a.txt, 1 line] an on'" in describe_resumed(session)
    assert run_command(session, "/edit").edit == "an on"
    assert session.attachments == [Attachment("a.txt", "the in")]
    session.attachments = [Attachment("b.txt", "on")]
    assert run_command(session, "/edit").attached == (Attachment("b.txt", "on"),)
    assert session.attachments == [Attachment("a.txt", "the in"), Attachment("b.txt", "on")]


@pytest.mark.parametrize("overflow", ["error", "drop-oldest"])
def test_what_does_not_fit_is_said_with_both_counts_and_not_attached(
    session: ChatSession, tmp_path: Path, overflow: str
) -> None:
    session.conversation.overflow = overflow
    context = session.engine.context_length
    written(tmp_path, "long.txt", "the in " * context)
    lines: list[str] = []
    session.info = lines.append
    with pytest.raises(ContextOverflow, match=f"do not fit the context of {context}"):
        run_command(session, f"/attach {tmp_path / 'long.txt'}")
    num = len(session.engine.tokenize(join_message([Attachment("long.txt", ("the in " * context))], "")))
    room = session.conversation.count_room()
    assert lines == [
        f"too long: {num} tokens (long.txt {num}), and there is room for {room}; nothing was attached"
    ]
    assert (session.attachments, session.conversation.messages) == ([], ())


def test_room_is_what_may_still_be_sent(session: ChatSession) -> None:
    conversation = session.conversation
    conversation.say("the in")
    left = conversation.count_room("an on")
    assert left == session.engine.context_length - session.engine.count(
        [*conversation.messages, type(conversation.messages[0])("user", "an on")]
    )
    conversation.overflow = "drop-oldest"
    assert conversation.count_room("an on") > left


def test_one_answer_is_given_files(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, name, "the in") for name in ("a.txt", "b.md")]
    flags = [part for file in files for part in ("--attach", str(file))]
    command = ["chat", str(tiny_model), "--prompt", "an", "--max-tokens", "3", "--drafter", "none", "--json"]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert main([*command, *flags]) == 0
    shown = capsys.readouterr()
    assert "attached a.txt: " in shown.err
    assert "attached b.md: " in shown.err
    prompts = [int(text.partition('"prompt_tokens": ')[2].partition(",")[0]) for text in (plain.out, shown.out)]
    assert prompts[1] > prompts[0] + 10


@pytest.mark.parametrize(("name", "code"), [("missing", 2), ("long.txt", 7)])
def test_one_answer_is_refused_a_file_before_anything_is_sent(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    written(tmp_path, "long.txt", "the in " * 20_000)
    command = ["chat", str(tiny_model), "--prompt", "an", "--drafter", "none", "--attach", str(tmp_path / name)]
    assert main(command) == code
    shown = capsys.readouterr()
    assert (shown.out, ": the in" in shown.err) == ("", False)


@pytest.mark.parametrize(
    ("text", "is_open", "inner"),
    [
        ('"""', True, None),
        ('"""a\nb', True, None),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\n/save a\n"""', False, "/save a"),
        ('""""""', False, ""),
        ('"""Doc."""\nimport os', False, None),
        ('"""Doc."""\nx = """a"""', False, None),
        ("hello", False, None),
        ('say """', False, None),
    ],
)
def test_three_quotes_hold_several_lines(text: str, is_open: bool, inner: str | None) -> None:
    assert is_open_block(text) == is_open
    assert block_text(text) == inner
