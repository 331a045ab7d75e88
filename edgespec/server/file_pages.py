"""POST /v1/files/text: the text of a PDF, for pages and programs that put it into a message."""

import base64
import binascii

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec import EdgeSpecError, UsageError, read_pdf
from edgespec.server.answers import Services
from edgespec.server.client import run_for_client, run_until_closing
from edgespec.server.errors import ApiError, wrong
from edgespec.server.model_host import in_daemon
from edgespec.server.protocol import FileRequest
from edgespec.system.printable import one_line


async def read_text(services: Services, request: Request) -> Response:
    """Read a file that the request has whole; nothing of it is stored."""
    asked, limits = await services.bodies.read(FileRequest, request), services.limits
    shown = one_line(asked.filename, 100)
    try:
        data = base64.b64decode(asked.file_data.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong("file_data", f"is no base64 ({error}); send the bytes of the file in base64") from None
    if not data.startswith(b"%PDF-"):
        raise wrong("file_data", f"of {shown} is no PDF; send PDFs here, and text in the message itself")

    def read() -> str:
        try:
            return read_pdf(data, shown, limits.file_text_bytes)
        except UsageError as error:
            raise ApiError(400, str(error), param="file_data") from None
        except EdgeSpecError as error:  # pypdf is missing
            raise ApiError(501, str(error)) from None

    async def answer() -> Response:
        with services.admission.place(1):
            return JSONResponse({"filename": asked.filename, "text": await in_daemon(read)})

    return await run_for_client(request.receive, run_until_closing(services.drain.is_closing, answer()))
