# `python -m servanda` is `servanda`.

from servanda.cli import main

if __name__ == "__main__":
    main()
