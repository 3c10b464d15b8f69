"""``RESULTS.md`` and what a rehearsal's own tests hold, as ``data/rehearse_peers.csv``, which chapter 10 reads."""

import csv
import io
import re

from tests.notebook_rules import ROOT
from tests.rehearse.fits.parts import script, scripts
from tests.rehearse.fits.test_rehearse import FAULTS

TARGET = ROOT / "data" / "rehearse_peers.csv"
NO_ANSWER = {"–": "", "hangs": "", "": "no"}


def as_csv() -> str:
    text = (ROOT / "tests" / "rehearse" / "fits" / "peers" / "RESULTS.md").read_text(encoding="utf-8")
    tables = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in tables]
    [tools] = (row[1:] for row in rows if row[0] == "fault")
    alarms = {row[0]: row[3] for row in rows if row[0] in tools and len(row) == 4}
    date = re.search(r"Results of (\S+)", text)[1]
    versions = re.search(r"^torchtest2 .*$", text, re.MULTILINE)[0]
    out = io.StringIO()
    out.write(f"# recorded: {date}\n# versions: {versions}\n")
    out.write(f"# right twins complained of: {', '.join(f'{tool} {number}' for tool, number in alarms.items())}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["fault", "check", *tools, "rehearse"])
    for name, *cells in rows:
        if name in scripts("faults"):  # some have gone since
            found = [NO_ANSWER.get(cell, "yes") for cell in cells]
            writer.writerow([name, script("faults", name).CHECK, *found, "yes" if name in FAULTS else "no"])
    return out.getvalue()


if __name__ == "__main__":
    TARGET.write_text(as_csv(), encoding="utf-8", newline="\n")
