"""``python -m bayesify``, the command line, as ``torchrun -m bayesify`` starts it."""

from bayesify.app.cli import main

if __name__ == "__main__":
    main()
