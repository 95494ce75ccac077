"""The command line: `paceline up|generate|chat|serve|quantize|doctor`."""


def main() -> None:
    """Entry point of the `paceline` program; imports commands only now, so that parts of this package stay light."""
    from paceline.cli.app import app

    app()
