"""`python -m asyncllm` is the command line, installed or from a checkout."""

from asyncllm.cli import main

if __name__ == "__main__":
    main()
