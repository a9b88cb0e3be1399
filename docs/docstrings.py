"""Google-style docstrings to Markdown: sections become lists and code blocks."""

import re
import textwrap

LISTS = ("Args", "Advanced", "Attributes", "Raises", "Yields")
TEXTS = ("Returns",)
CODE = ("Example", "Examples")
_SECTION = re.compile(rf"^({'|'.join((*LISTS, *TEXTS, *CODE))}):\s*$")


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown.

    Args:
        docstring: As `inspect.cleandoc` or `ast.get_docstring` returns it.
    """
    title, parts = "", []
    lines: list[str] = []
    for line in [*docstring.splitlines(), None]:
        section = _SECTION.match(line) if line is not None else None
        if line is None or section or (title and line and not line.startswith(" ")):
            parts.append(_section(title, "\n".join(lines)))
            title, lines = (section[1] if section else ""), []
        if line is not None and not section:
            lines.append(line)
    return "\n\n".join(part for part in parts if part)


def _section(title: str, text: str) -> str:
    body = textwrap.dedent(text).strip("\n")
    if not title:
        return body.strip()
    if title in CODE:
        return f"**{title}**\n\n```pycon\n{body}\n```" if ">>>" in body else f"**{title}**\n\n```python\n{body}\n```"
    return f"**{title}**\n\n{body if title in TEXTS else _items(body)}"


def _items(body: str) -> str:
    """Turn `name: what it is` with indented continuations into a list."""
    items: list[str] = []
    for line in body.splitlines():
        if line and not line.startswith(" "):
            name, _, text = line.partition(": ")
            items.append(f"- `{name.strip()}`: {text.strip()}" if text else f"- {line.strip()}")
        elif items and line.strip():
            items[-1] += f" {line.strip()}"
    return "\n".join(items)
