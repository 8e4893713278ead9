"""The book: README, lessons, notebooks and manual as one site, which needs no network. Sources stay where they are.

    pip install -r requirements-book.txt && sphinx-build -c book . build/book
"""

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.parsers import Parser
from sphinx.util.logging import getLogger

HOUSE = Path(__file__).parents[1]


def linked_code() -> set[str]:
    """Files of code that a page links to: they are pages, too."""
    pages = HOUSE / "README.md", *HOUSE.glob("lessons/**/*.md"), *HOUSE.glob("notebooks/*.ipynb")
    files = {(page.parent / link).resolve() for page in pages
             for link in re.findall(r"\]\(([^)\s]+\.py)\)", page.read_text())}
    return {str(file.relative_to(HOUSE)) for file in files if file.exists()}


project = html_title = "ZeRO, minimal"
root_doc = "README"
include_patterns = ["README.md", "lessons/**.md", "notebooks/*.ipynb", *linked_code()]
suppress_warnings = ["toc.not_included"]  # code is where it is linked
smartquotes = False
pygments_dark_style = "monokai"

extensions = ["myst_nb"]
myst_heading_anchors = 4  # headings have the names that GitHub gives them
myst_enable_extensions = ["dollarmath"]  # $formula$
myst_fence_as_directive = ["math"]  # ```math
nb_execution_mode = "off"  # outputs are the stored ones
nb_ipywidgets_js = {}  # sliders need a kernel
nb_render_error_lexer = "none"  # messages are no code

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_copy_source = html_use_index = html_show_copyright = False

CONTENTS = {  # page: what stands below it at the left, by caption
    "README": {
        "Lessons": ["lessons/README", "lessons/*_*/README", "lessons/bug-hunts/README", "lessons/glossary"],
        "Notebooks": ["notebooks/*"],
        "Manual": [f"lessons/{page}" for page in (
            "manual/stages", "manual/own-model", "fine-tune", "manual/checkpoints", "manual/zero-r", "manual/offload",
            "manual/calculator", "manual/several-nodes", "manual/on-a-gpu", "manual/deepspeed", "manual/*")],
        "For teachers and authors": ["lessons/how-to-write-a-lesson", "lessons/*/teacher"],
    },
    "lessons/bug-hunts/README": {"Hunts": ["[01]*"]},
    "lessons/10_whole_system/README": {"Further": ["budget"]},
    "lessons/11_reading_critically/README": {"Further": ["cards", "replication"]},
}


def with_contents(app, page, source):
    for caption, pages in CONTENTS.get(page, {}).items():
        below = "\n".join(pages)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{below}\n```\n"


class Code(Parser):
    """A file of code as a page."""

    supported = ("code",)

    def parse(self, inputstring, document):
        name = str(Path(document["source"]).relative_to(HOUSE))
        code = nodes.literal_block(inputstring, inputstring, language="python")
        document += nodes.section("", nodes.title(name, name), code, ids=["code"])


def formula(translator, node):
    """As MathML, which browsers draw without a script or a font."""
    try:
        translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
    raise nodes.SkipNode


def front_page(app, error):
    """A folder's address opens index.html."""
    (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">')


def setup(app):
    app.add_source_suffix(".py", "code")
    app.add_source_parser(Code)
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.connect("source-read", with_contents)
    app.connect("build-finished", front_page)
