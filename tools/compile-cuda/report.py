"""Assembles the PTX that fake_cuda.c kept, and prints a table of what ptxas says of it.

    report.py PTXAS FOLDER...

Each folder is named after the architecture. The table has a row for each kernel, whatever it was
compiled for, and a column for each architecture: how many variants there are, and the most
registers of a thread, bytes of static shared memory and bytes of spills of any of them. A module
that ptxas refuses makes the program fail.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor


def assemble(ptxas, path):
    with open(path) as file:
        ptx = file.read()
    entry = re.search(r"\.entry (\w+)", ptx).group(1)
    # CubeCL appends the types of its parameters and a hash.
    kernel = entry.split("_kernel")[0] + "_kernel" if "_kernel" in entry else entry.split("_")[0]
    target = re.search(r"\.target (\w+)", ptx).group(1)
    command = [ptxas, f"-arch={target}", "-v", path, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"{path}: {entry}: {said}")

    def number(pattern):
        found = re.search(pattern, said)
        return int(found.group(1)) if found else 0

    spills = number(r"(\d+) bytes spill stores")
    return kernel, (number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spills)


def main():
    ptxas, *folders = sys.argv[1:]
    table = defaultdict(dict)
    for folder in folders:
        names = (name for name in os.listdir(folder) if name.endswith(".ptx"))
        paths = sorted(os.path.join(folder, name) for name in names)
        if not paths:
            sys.exit(f"{folder}: no kernel was compiled")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            of_kernel = defaultdict(list)
            for kernel, sizes in pool.map(lambda path: assemble(ptxas, path), paths):
                of_kernel[kernel].append(sizes)
        for kernel, sizes in of_kernel.items():
            most = [max(column) for column in zip(*sizes)]
            table[kernel][folder] = f"{len(sizes)}: {most[0]}, {most[1]}, {most[2]}"
    names = [os.path.basename(folder.rstrip("/")) for folder in folders]
    print("| kernel | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for kernel in sorted(table):
        cells = [table[kernel].get(folder, "") for folder in folders]
        print(f"| `{kernel}` | " + " | ".join(cells) + " |")


main()
