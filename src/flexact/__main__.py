"""`python -m flexact`."""

from flexact.cli import main

if __name__ == "__main__":
    main()
