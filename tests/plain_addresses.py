"""A plugin that spares each process of pytest the grammar of international addresses: ``-p tests.plain_addresses``.

nbval reads notebooks by nbformat, and that by jsonschema, which compiles the grammar when it is imported: 0.9 s of each
process of pytest, four of which are in a run. No notebook's schema has such an address. jsonschema does without where
the package is not installed, so that is what it is told.
"""

import contextlib
import sys

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # an import of it raises ImportError
with contextlib.suppress(ImportError):
    import jsonschema  # noqa: F401
del sys.modules["rfc3987_syntax"]
