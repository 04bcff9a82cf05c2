"""`python -m tba`: the same as the command `tba`."""

from tba.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
