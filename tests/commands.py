"""The command line `gqsgd`, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from lightning_gqsgd.cli.app import app


def output_of(*words: str) -> str:
    """What a command that ends well prints on standard output."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*words: str) -> str:
    """The one line on standard error with which a command is refused, with exit code 2."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert "Traceback" not in result.output
    return line
