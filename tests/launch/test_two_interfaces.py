"""Hosts with two interfaces, as network namespaces: the streams of two ranks go over both."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from namespaces import hosts
from processes import SECRET, surroundings, write

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces"),
    pytest.mark.slow,
]

BODY = """
import json

def sent():
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = {name.strip(): rest.split() for name, _, rest in (l.partition(":") for l in lines)}
    return [int(fields[name][8]) for name in ("eth0", "eth1")]

x = np.ones(64 << 18, "float32")
comm.barrier()
before = sent()
comm.all_reduce(x, out=x, algorithm="ring")
assert x[0] == x[-1] == comm.size
comm.barrier()
print(json.dumps([(now - then) / x.nbytes for now, then in zip(sent(), before)]))
comm.close()
"""


def run(tmp_path, names, rate="2gbit", **more):
    """Run a rank in each namespace; return for each its exit code, output and errors."""
    script = write(tmp_path, BODY)
    for name in names:
        for inner in ("eth0", "eth1"):
            qdisc = ["tc", "-n", name, "qdisc", "add", "dev", inner, "root", "tbf"]
            shape = ["rate", rate, "burst", "256k", "latency", "20ms"]
            if subprocess.run([*qdisc, *shape], capture_output=True, check=False).returncode:
                pytest.skip("this machine has no token buckets (tc)")
    with contextlib.ExitStack() as cleanup:
        processes = []
        for rank, name in enumerate(names):
            env = {
                "PYCOLLECTIVE_RANK": str(rank),
                "PYCOLLECTIVE_SIZE": str(len(names)),
                "PYCOLLECTIVE_ADDRESS": "10.213.7.1:29511",
                "PYCOLLECTIVE_SECRET": SECRET,
                "PYCOLLECTIVE_TRANSPORT": "tcp",
                "PYCOLLECTIVE_SOCKET_STREAMS": "2",
                **{f"PYCOLLECTIVE_{key}": value for key, value in more.items()},
            }
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, str(script)],
                env=surroundings(**env),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            processes.append(process)
        said = [process.communicate(timeout=60) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


@pytest.mark.parametrize(
    ("pattern", "used"), [("eth", (1, 1)), ("=eth1", (0, 1)), ("^eth1", (1, 0)), ("", (1, 0))]
)
def test_all_reduce_moves_its_bytes_over_the_interfaces_that_are_named(tmp_path, pattern, used):
    more = {"SOCKET_IFNAME": pattern} if pattern else {}
    with hosts(2, interfaces=2) as names:
        ended = run(tmp_path, names, **more)
    for code, output, errors in ended:
        assert (code, errors) == (0, "")
        shares = json.loads(output)  # bytes of the array, each sent once
        if sum(used) == 2:
            assert min(shares) > 0.25
        else:
            assert shares[used.index(1)] > 0.95
            assert shares[used.index(0)] < 0.02
        assert 1.0 < sum(shares) < 1.3
