"""`python -m supply_chain`: write the SBOM and the list of licences anew."""

from __future__ import annotations

from supply_chain.documents import documents

for path, text in documents().items():
    path.write_text(text, encoding="utf-8")
