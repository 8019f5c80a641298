"""README.md as the package's long description, for scikit-build-core.

PyPI shows the text without the repository. So links to files become links to the repository's address,
which is in ``[project.urls]``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)(\[[^]]*\]\()(?!\w+:|#)")


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the field ``readme`` of the package's metadata."""
    assert field == "readme" and not settings
    (address,) = re.findall(
        r'^Repository = "(.*)"$', Path("pyproject.toml").read_text("utf-8"), re.M
    )

    def absolute(link: re.Match[str]) -> str:
        way = "raw" if link[1] else "blob"  # a picture itself, or the page of a file
        return f"{link[0]}{address}/{way}/HEAD/"

    text = LINK.sub(absolute, Path("README.md").read_text(encoding="utf-8"))
    return {"content-type": "text/markdown", "text": text}
