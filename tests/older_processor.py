"""Copies the package, with its compiled core as it is on an older processor.

    python tests/older_processor.py default|arch_x86_64_v3 FOLDER

Functions marked PYCOLLECTIVE_CLONES are there once for each instruction set, and when the core is
loaded each one's resolver says which of them this processor gets. In the copy, FOLDER/pycollective,
the resolvers say the one that is asked for, so that tests run it: the same machine code that an
older processor runs. The core must have been built with its symbols (-DCMAKE_STRIP=true).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    spec = importlib.util.find_spec("pycollective")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "pycollective")
    (core,) = (folder / "pycollective").glob("_core*.so")
    code = bytearray(core.read_bytes())
    section = re.search(r" \.text +PROGBITS +(\w+) (\w+)", output("readelf", "-SW", core))
    assert section is not None
    shift = int(section[1], 16) - int(section[2], 16)
    symbols = {}
    for line in output("nm", core).splitlines():
        if found := re.match(r"(\w+) [tT] (\S+?)(\.lto_priv\.\d+)?$", line):
            symbols[found[2]] = int(found[1], 16)
    resolvers = [name for name in symbols if name.endswith(".resolver")]
    if not resolvers:
        sys.exit(f"{core.name} has no symbols of resolvers: build it with -DCMAKE_STRIP=true")
    for name in resolvers:
        begin, chosen = symbols[name], symbols[name.removesuffix("resolver") + kind]
        # lea rax, [rip + distance]; ret
        answer = b"\x48\x8d\x05" + struct.pack("<i", chosen - (begin + 7)) + b"\xc3"
        code[begin - shift : begin - shift + len(answer)] = answer
    core.write_bytes(code)
    print(f"{len(resolvers)} functions of {core} are {kind}")


if __name__ == "__main__":
    main()
