"""``python -m vola`` is the command ``vola``."""

from vola.cli import main

if __name__ == "__main__":
    main()
