"""Copies the package, with its compiled modules as they are on an older processor.

    python tests/older_processor.py default|arch_x86_64_v3 FOLDER

Each function marked PYCOLLECTIVE_CLONES is compiled once for each instruction set. When a module is
loaded, the function's resolver chooses the one for this processor. In the copy, FOLDER/pycollective,
the resolvers choose the one that is asked for. So tests run the same machine code as an older
processor. The modules must have been built with their symbols (-DCMAKE_STRIP=true).
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
    for name in ("_core", "_nn"):
        (module,) = (folder / "pycollective").glob(f"{name}.*.so")
        choose(kind, module)


def choose(kind: str, module: Path) -> None:
    """Make the resolvers of a compiled module choose the code for ``kind``."""
    code = bytearray(module.read_bytes())
    section = re.search(r" \.text +PROGBITS +(\w+) (\w+)", output("readelf", "-SW", module))
    assert section is not None
    shift = int(section[1], 16) - int(section[2], 16)
    symbols = {}
    for line in output("nm", module).splitlines():
        if found := re.match(r"(\w+) [tTW] (\S+)$", line):
            symbols[found[2]] = int(found[1], 16)
    resolvers = [name for name in symbols if name.endswith(".resolver")]
    if not resolvers:
        sys.exit(f"{module.name} has no symbols of resolvers: build it with -DCMAKE_STRIP=true")
    for name in resolvers:
        begin, chosen = symbols[name], symbols[name.removesuffix("resolver") + kind]
        # lea rax, [rip + distance]; ret
        answer = b"\x48\x8d\x05" + struct.pack("<i", chosen - (begin + 7)) + b"\xc3"
        code[begin - shift : begin - shift + len(answer)] = answer
    module.write_bytes(code)
    print(f"{len(resolvers)} functions of {module} are {kind}")


if __name__ == "__main__":
    main()
