"""Links of pages to files that the site does not have, such as sources and records.

On a page in the repository such a link opens the file. On the site it becomes the file's name. A
link to a file that does not exist fails the build.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """MkDocs's event: the text of a page before it is parsed."""
    docs = Path(config.docs_dir)
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(link: re.Match) -> str:
        text, target, _ = link.groups()
        path = normpath(folder / target)
        if not path.startswith("../"):
            return link[0]
        if not (docs / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        name = path.removeprefix("../")
        return text if name in text else f"{text} (`{name}`)"

    return LINK.sub(replaced, markdown)
