"""Settings of the documentation site. `make docs` builds it into `build/site`, without network access."""

import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "extensions"), str(DOCS.parent / "src")]
warnings.filterwarnings("ignore", module=r"(torch|transformers|lightning|ray)\b")

import fullshard  # noqa: E402

project = "fullshard"
author = "the authors of fullshard"
copyright = "the authors of fullshard, Apache-2.0"
version = release = fullshard.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstring_text",
    "reference_pages",
    "repository_links",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
exclude_patterns = ["extensions"]
nitpicky = True
# Objects of other libraries. Their inventories are on the network, so these names are not links.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fullshard\b).*"),
    (r"py:obj", r"fullshard\.[\w.]*T"),  # type variables
    (r"py:class", r"fullshard\.\w+\.[\w.]+"),  # types in signatures that are not public; mypy checks them
]
suppress_warnings = ["config.cache"]
smartquotes_action = "qe"  # options keep their two dashes

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autoclass_content = "class"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fullshard {release}"
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which browsers refuse for pages of the file system
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
