"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def ended(
    *words: str, timeout: float = 120, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A new interpreter with these words on its command line and these variables, once it has ended."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def ended_well(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same where it must exit with 0."""
    done = ended(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
