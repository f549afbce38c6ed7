"""Run all tests, the slow ones included, as two pytest processes side by side.

The options, such as --durations=10, go to both. One process runs the tests on separate hosts, which
mostly wait; its output comes at the end.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ON_HOSTS = [TESTS / f"slow/test_{name}.py" for name in ("slurm", "docker", "hosts")]


def main():
    pytest = [sys.executable, "-m", "pytest", "-rs", "-m", "slow or not slow", *sys.argv[1:]]
    others = [TESTS, *(f"--ignore={path}" for path in ON_HOSTS)]
    with tempfile.TemporaryFile("w+") as output:
        on_hosts = subprocess.Popen([*pytest, *ON_HOSTS], stdout=output, stderr=output)
        code = subprocess.run([*pytest, *others]).returncode
        code = on_hosts.wait() or code
        output.seek(0)
        print(output.read())
    sys.exit(code)


if __name__ == "__main__":
    main()
