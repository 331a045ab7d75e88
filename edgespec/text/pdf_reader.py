"""Read the text of a PDF, which may be hostile: pdf.py runs this file as a process of its own, and bounds it.

It reads one line of JSON, {"data": base64, "most_bytes": …}, and writes one: {"text": …}, or {"fault": …} with
what is wrong with the file. It imports nothing of edgespec.
"""

import base64
import json
import sys
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pypdf import PdfReader


def read(data: bytes, most_bytes: int) -> dict[str, str]:
    """The reply for a file; it can raise anything."""
    from pypdf import PasswordType, PdfReader

    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not _opens(reader, PasswordType.NOT_DECRYPTED):
        return {"fault": "is encrypted; save it without a password and attach that"}
    pages, num_bytes, num_pages = [], 0, len(reader.pages)
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        num_bytes += len(pages[-1].encode(errors="replace"))
        if num_bytes > most_bytes:
            most = f"{most_bytes / 1e6:.3g} MB"
            fault = f"has more than {most} of text up to page {len(pages)} of {num_pages}; attach a part of it"
            return {"fault": fault}
    if not (text := "\n\n".join(filter(None, pages))):
        return {"fault": f"has no text on {num_pages} pages; pictures of text cannot be read"}
    return {"text": text.encode(errors="replace").decode()}  # lone surrogates are no text


def _opens(reader: "PdfReader", refused: int) -> bool:
    """Whether a file opens without a password; one whose cipher needs a further package does not."""
    with suppress(Exception):
        return reader.decrypt("") != refused
    return False


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        reply = read(base64.b64decode(asked["data"]), asked["most_bytes"])
    except Exception as error:  # of a damaged file anything may come
        reason = str(error).partition("\n")[0] or type(error).__name__
        reply = {"fault": f"is a PDF that cannot be read ({reason}); save it again, or as text"}
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
