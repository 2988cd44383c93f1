"""Load on any OpenAI-compatible server, one JSON line a run: `asyncllm bench` as a script.

    python bench/serve.py http://127.0.0.1:8000 --rate 1,2,4,8,inf --plot rate.png

The generator is asyncllm/client/load.py; it runs in processes of its own.
"""

import sys

from asyncllm.cli import main

if __name__ == "__main__":  # its processes import this file again
    main(["bench", *sys.argv[1:]])
