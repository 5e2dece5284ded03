"""`python -m fuseline`, and `torchrun -m fuseline train gpt ...`."""

from fuseline.cli.main import main

if __name__ == "__main__":
    main()
