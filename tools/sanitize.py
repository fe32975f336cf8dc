"""Runs the kernel tests on builds with AddressSanitizer and UndefinedBehaviorSanitizer, and cross-compiles for Arm.

    python tools/sanitize.py            three sanitized builds, then the Arm check where its compiler is installed
    python tools/sanitize.py --fast     one sanitized build of this CPU only

Knows: how to load a sanitized library into an interpreter that is not sanitized (the runtime is preloaded). Does not
know: what the tests check. Leaks are not looked for: the interpreter itself would be all that is reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from hotset.kernels import build  # noqa: E402

sys.path.insert(0, str(ROOT / "src"))

SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"
BUILDS = {
    "this CPU": SANITIZE,
    "AVX2": f"{SANITIZE} -march=x86-64-v3",
    # what the source is where no instruction set is named in it
    "plain vectors": f"{SANITIZE} -DHOTSET_GENERIC -march=x86-64-v3",
}
ARM = "aarch64-linux-gnu-g++"
ARM_FLAGS = ("-march=armv8-a", "-march=armv8.2-a+dotprod+i8mm+bf16")


def main() -> int:
    """Returns 0 where everything passed."""
    compiler = os.environ.get("HOTSET_CXX") or next(filter(shutil.which, ("g++", "c++")), None)
    if compiler is None:
        print("sanitize: no g++ here", file=sys.stderr)
        return 1
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    builds = dict(list(BUILDS.items())[:1]) if "--fast" in sys.argv[1:] else BUILDS
    for name, flags in builds.items():
        print(f"== kernel tests with AddressSanitizer and UBSan: {name}", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            environment = {
                **os.environ,
                "HOTSET_CXX": compiler,
                "HOTSET_CACHE": cache,
                "HOTSET_KERNELS": "compiled",
                "HOTSET_KERNEL_FLAGS": flags,
                "LD_PRELOAD": " ".join(runtimes),
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "PYTHONPATH": str(ROOT / "src"),
                "PYTHONMALLOC": "malloc",  # so that reads past a NumPy buffer are seen
            }
            # the torch implementations have nothing to sanitize, and torch under a preloaded runtime is slow
            command = [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not Torch and not torch"),
                str(ROOT / "tests" / "test_kernels.py"),
            ]
            code = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
            if code:
                print(f"sanitize: failed on {name}", file=sys.stderr)
                return code
    return _arm()


def _runtime(compiler: str, name: str) -> str:
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return str(Path(found).resolve())


def _arm() -> int:
    if shutil.which(ARM) is None:
        print(f"== {ARM} is not installed: the Arm check is skipped")
        return 0
    for flags in ARM_FLAGS:
        print(f"== cross-compiles for Arm: {flags}", flush=True)
        command = [ARM, *(flag for flag in build.FLAGS if flag != "-march=native"), flags]
        source = ROOT / "src" / "hotset" / "kernels" / "csrc" / "moe.cpp"
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, str(source), "-o", str(Path(folder) / "arm.so")], check=False)
        if done.returncode:
            print(f"sanitize: does not compile for Arm with {flags}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
