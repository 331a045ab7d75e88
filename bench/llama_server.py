"""llama.cpp's own server on a GGUF file, from the package xllamacpp, as a peer of `edgespec serve`.

    python3 -m venv llama && llama/bin/pip install xllamacpp
    llama/bin/python bench/llama_server.py FILE.gguf [--parallel 4] [--threads N] [--context 8192]

Prints its URL once it answers, and ends with Ctrl-C. It needs nothing of edgespec, so that it runs in an
environment of its own.
"""

import argparse
import os
from threading import Event


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--parallel", type=int, default=4, help="requests that are answered at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the processor")
    parser.add_argument("--context", type=int, default=8192, help="tokens of all requests together")
    asked = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = os.path.abspath(asked.file)
    params.n_parallel, params.n_ctx = asked.parallel, asked.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    try:
        Event().wait()
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
