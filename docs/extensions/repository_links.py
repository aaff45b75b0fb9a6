"""Pages whose text is at the root of the repository, and links that lead to files there but to pages on the site."""

import re
from pathlib import Path

from public_names import importable, links_by_name
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
AT_ROOT = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "security": "SECURITY.md"}
LINKS = [
    (re.compile(r"\]\((?:\.\./)+README\.md"), "](/index.md"),
    *((re.compile(rf"\]\((?:\.\./)+{re.escape(file)}"), f"](/{page}.md") for page, file in AT_ROOT.items()),
    (re.compile(r"\]\((?:\.\./)+examples/(\d_\w+)\.py\)(?!\.)"), r"](/tutorials/\1.md)"),
    (re.compile(r"\[([^\]]*)\]\((?:\.\./)+examples/(\w+)/?\)"), r"`\1`"),  # a folder
]
SOURCE = re.compile(r"\[(`[\w.]+`|Command line|command line)\]\((?:\.\./)+src/fullshard/[\w/]+\.py\)")
LINK_FROM_ROOT = re.compile(r"\]\((?!\w+:|#|/)")


def rewrite(app: Sphinx, page: str, content: list[str]) -> None:
    """Change the source of a page before it is parsed."""
    text = content[0]
    if page in AT_ROOT:
        path = ROOT / AT_ROOT[page]
        app.env.note_dependency(path)
        text = LINK_FROM_ROOT.sub("](../", path.read_text()).replace("](../docs/", "](")
    if not page.startswith("tutorials/"):  # these link to their script
        for pattern, replacement in LINKS:
            text = pattern.sub(replacement, text)
    content[0] = SOURCE.sub(page_of_name, text)


def page_of_name(link: re.Match[str]) -> str:
    """Return a link to the page of a public name, for a link to its source."""
    name = link[1].strip("`")
    page = "command_line" if "`" not in link[1] else name if name in importable() else links_by_name()[name]
    return f"[{link[1]}](/api/{page}.rst)"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
