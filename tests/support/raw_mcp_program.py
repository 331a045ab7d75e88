"""A program that is told nothing of MCP: it answers with whatever its argument says."""

import os
import sys
import time

if sys.argv[1] == "flood":  # a line without an end
    while True:
        os.write(1, b"y" * (1 << 20))
if sys.argv[1] == "noise":
    os.write(1, b"not JSON\n{}\n[1]\n\xff\xfe\n" * 100)
if sys.argv[1] == "broken":
    sys.exit("no such folder: /nowhere")
time.sleep(600)
