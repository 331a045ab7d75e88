"""The text of a PDF, by pypdf."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from edgespec.errors import EdgeSpecError, UsageError


def read_pdf(data: bytes, shown: str, most_bytes: int) -> str:
    """The text of all pages, with an empty line between two; shown is what messages call the file.

    Raises UsageError: the file is damaged or encrypted, has no text, or more than most_bytes of it; EdgeSpecError:
    pypdf is missing.
    """
    try:
        from pypdf import PdfReader
    except ImportError:
        raise EdgeSpecError(
            f'{shown} is a PDF, whose text pypdf reads, which is missing; pip install "edgespec[pdf]"'
        ) from None
    pages, num_bytes = [], 0
    with _explain(shown):
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UsageError(f"{shown} is encrypted; save it without a password and attach that")
        num_pages = len(reader.pages)
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            num_bytes += len(pages[-1].encode(errors="replace"))
            if num_bytes > most_bytes:
                raise UsageError(
                    f"{shown} has more than {most_bytes >> 20} MiB of text up to page {len(pages)} of {num_pages}"
                    "; attach a part of it"
                )
    text = "\n\n".join(filter(None, pages))
    if not text:
        raise UsageError(f"{shown} has no text on {num_pages} pages; pictures of text cannot be read")
    return text.encode(errors="replace").decode()  # lone surrogates are no text


@contextmanager
def _explain(shown: str) -> Iterator[None]:
    # It warns of each fault that it can repair, by loggers below this one, whose records pass here.
    log, nowhere = logging.getLogger("pypdf"), logging.NullHandler()
    before, log.propagate = log.propagate, False
    log.addHandler(nowhere)
    try:
        yield
    except EdgeSpecError:
        raise
    except Exception as error:  # of a damaged file anything may come
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{shown} is a PDF that cannot be read ({reason}); save it again, or as text") from None
    finally:
        log.removeHandler(nowhere)
        log.propagate = before
