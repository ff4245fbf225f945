"""What all pages share: templates, thumbnails and links."""

import base64
import io
import os
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image

from cdgp.report.overlay import score_text

THUMBNAIL_BYTES = 30_000
"""Quality falls until a thumbnail fits: a page of six full galleries stays below 4 MB."""


def template(name: str) -> Template:
    """A page's template; every value that it shows is escaped."""
    environment = Environment(
        loader=PackageLoader("cdgp.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["p"] = score_text
    return environment.get_template(name)


def jpeg(image: Image.Image) -> str:
    """The best JPEG of at most ``THUMBNAIL_BYTES``, as data URI."""
    for quality in (88, 75, 60, 40, 20):
        data = io.BytesIO()
        image.save(data, "JPEG", quality=quality)
        if data.tell() <= THUMBNAIL_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def link(path: Path, folder: Path) -> str:
    """URL from a page in the folder to the path; relative, so that both can move together."""
    try:
        relative = Path(os.path.relpath(path.absolute(), folder))
    except ValueError:  # another drive
        return path.absolute().as_uri()
    return quote(os.fsencode(relative.as_posix()))
