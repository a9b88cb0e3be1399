"""Settings of Sphinx. The source folder is the repository, so that a page of the book *is* a module.

No network is needed: MathJax comes from a Python package, and `torch.inv.txt` has the addresses of PyTorch's names.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs.api import source_address  # noqa: E402 (the repository is on the path only now)
from kfs.version import __version__  # noqa: E402

project = "kfs"
author = "the authors of kfs"
version = release = __version__
html_title = f"kfs {__version__}"
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "kfs/**.py",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "docs/site", "tests", "benchmarks", "kfs/__main__.py", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "docs.bridge",
    "docs.book",  # last, since it handles events of the others
]

# Markdown
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
# A prompt and its output are shown together; buttons copy only the commands.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
# Blocks of output have no button.
copybutton_selector = "div:not(.output) > div.highlight > pre"

# The reference
autosummary_generate = False  # docs/api.py writes a page for every public name
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_custom_sections = [("Advanced", "params_style")]
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable", "docs/torch.inv.txt")}
linkcode_resolve = source_address

# Formulas: one script that contains its fonts.
_mathjax = find_spec("sphinx-mathjax-offline")
if _mathjax is None or _mathjax.origin is None:
    raise ImportError("sphinx-mathjax-offline is missing, which MathJax comes from. Install kfs[docs].")
mathjax_path = "tex-svg.js"
mathjax3_config = {
    "options": {"enableMenu": False},
    "svg": {"fontCache": "local", "mtextInheritFont": True, "scale": 0.95},
}

# HTML
html_theme = "furo"
html_static_path = [
    "static",
    "../kfs/tour/assets/play.js",
    "../kfs/tour/assets/play.css",
    str(Path(_mathjax.origin).parent / "static" / "mathjax" / mathjax_path),
]
html_css_files = ["book.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for local files
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "default"
pygments_dark_style = "github-dark"
