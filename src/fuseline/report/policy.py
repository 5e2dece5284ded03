"""The page's Content-Security-Policy: nothing is loaded from anywhere, and only the page's own styles and
scripts apply, each known by its hash. What a record might smuggle in is neither."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def content_policy(styles: Iterable[str], scripts: Iterable[str] = ()) -> str:
    """The policy of a page with exactly these texts in its `<style>` and `<script>` elements."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hashes(styles)}",
            f"script-src {_hashes(scripts)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hashes(texts: Iterable[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
