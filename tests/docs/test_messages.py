"""Messages that a page explains are messages of the library."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _texts() -> str:
    """Return all string literals of the library, joined; values inserted into f-strings are missing."""
    found = []
    for file in sorted((ROOT / "kfs").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_of_the_table_exist() -> None:
    page = (ROOT / "docs" / "right.md").read_text(encoding="utf-8")
    table = page.partition("## Messages and what to do")[2].partition("\n## ")[0]
    messages = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    texts = _texts()
    assert len(messages) > 10
    for message in messages:
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", message).strip()
        if plain.startswith("the same"):
            continue
        for piece in re.split(r"\.\.\.|,? or |and by ", plain):
            words = piece.strip(" ,.")
            assert not words or words in texts or words in {"differ in a batch of", "was misread"}, (message, words)
