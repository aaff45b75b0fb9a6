"""The stored pictures of the documentation equal those that the code draws."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_stored_pictures_match_generated_pictures(tmp_path):
    """If an intended change of the engine changes the pictures, run `make pictures`."""
    subprocess.run([sys.executable, "-W", "ignore", str(DOCS / "pictures.py"), str(tmp_path)], check=True)
    stored, drawn = (
        {path.name: path.read_text() for path in folder.glob("*.svg")} for folder in (DOCS / "pictures", tmp_path)
    )
    assert len(drawn) == 4
    assert stored == drawn
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in drawn if f"](pictures/{name})" not in pages] == []
