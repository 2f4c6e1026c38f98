"""``python -m dflash2`` is the ``dflash2`` command."""

from dflash2.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
