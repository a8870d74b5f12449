"""Run in a clean environment: import the packages, report what that did as one JSON line.

It runs outside this checkout, so it uses the standard library and torch only.
"""

import json
import os
import sys
import time

import torch

written: list[str] = []
loaded: list[str] = []


def watch(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        written.append(str(args[0]))
    if event == "ctypes.dlopen":
        loaded.append(str(args[0]))


sys.addaudithook(watch)
before = set(sys.modules)
start = time.process_time()
for name in sys.argv[1:]:
    __import__(name)
spent = time.process_time() - start
imported = sorted(set(sys.modules) - before)
wrote, dlopened = list(written), list(loaded)

child = os.fork()
if child == 0:
    # A forked worker must be able to start CUDA, which it cannot when the parent already did.
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    ok = torch.equal(torch.nn.functional.linear(x, x), x @ x.T) and not torch.cuda._is_in_bad_fork()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)

with open("/proc/self/maps") as file:
    maps = file.readlines()
print(
    json.dumps(
        {
            "seconds": spent,
            "imported": imported,
            "written": wrote,
            "dlopened": dlopened,
            "cuda_initialized": torch.cuda.is_initialized(),
            "fork_status": os.waitstatus_to_exitcode(status),
            "maps": sorted({line.split()[-1] for line in maps if "libcuda.so" in line}),
        }
    )
)
