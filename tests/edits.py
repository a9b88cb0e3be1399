"""Edits of self-verifying programs: a copy with one changed line must notice the mistake.

`failure` runs such a copy in this process. The edits are listed by the tests of the edited files.
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch.random import fork_rng

from kfs.errors import VerificationError
from kfs.verification import recording

MAIN = '\nif __name__ == "__main__":\n'


class Edit(NamedTuple):
    """A mistake in one line of a program.

    Attributes:
        module: The program, as a module.
        right: A part of one line that occurs once, above the verification code.
        wrong: Its replacement.
        claim: A part of the first claim that becomes false; any claim if it is empty.
    """

    module: ModuleType
    right: str
    wrong: str
    claim: str = ""

    @property
    def name(self) -> str:
        """A name for a test."""
        return f"{self.module.__name__.rpartition('.')[2]}: {self.right} -> {self.wrong}"


def failure(module: ModuleType, right: str = "", wrong: str = "") -> str | None:
    """Run an edited copy of a program, in this process, and return the claim that its own check found to be false.

    Args:
        module: The program, as a module. It is neither changed nor imported again.
        right: The text to replace: a part of one line that occurs once, above `if __name__ == "__main__"`. If it is
            empty, the program runs as it is.
        wrong: Its replacement.

    Returns:
        The message of the failed check, `None` if the edit was not noticed. Other errors of the program are raised: a
        copy that crashes did not notice anything.
    """
    file = Path(str(module.__file__))
    source = file.read_text(encoding="utf-8")
    if right:
        definition, main, check = source.partition(MAIN)
        assert main, f"{file} is not a program."
        assert "\n" not in right + wrong, "An edit changes one line."
        assert definition.count(right) == 1, f"{right!r} occurs {definition.count(right)} times in {file}."
        source = definition.replace(right, wrong) + main + check
    program = {"__name__": "__main__", "__file__": str(file)}
    with recording() as checks, redirect_stdout(StringIO()), fork_rng(devices=[]):
        try:
            exec(compile(source, str(file), "exec"), program)
        except VerificationError as error:
            return str(error)
    assert checks, f"{file} verified nothing."
    return None


def check_edit(edit: Edit) -> None:
    """Assert that a program notices an edit, by the claim that the edit makes false."""
    found = failure(edit.module, edit.right, edit.wrong)
    assert found is not None, f"{edit.name} was not noticed."
    assert found.startswith("False: "), found
    assert edit.claim in found, f"{edit.name} was noticed by another claim: {found}"
