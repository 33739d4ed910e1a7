"""CI runs the commands of README as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_command_of_the_first_page_is_run():
    commands = re.findall(r"^pip install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = re.findall(r"^ *run_readme (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(commands) == len(words) == 3
    for word in words:
        # CI's `run_readme` finds its command by this pattern.
        (command,) = (each for each in commands if re.match(f"pip install .*{word}", each))
        commands.remove(command)
    assert not commands
