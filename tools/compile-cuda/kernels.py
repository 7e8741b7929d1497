"""Compares the operators' kernels in CUDA C++, and how they are launched, with a list of hashes.

    kernels.py LIST FOLDER... [--accept]

Each folder has the sources that one operator's benchmark cases launch, as `SOURCES=1 run.sh` keeps
them, and is named after the operator. The list has a line for each kernel: operator, kernel, hash
of the source, hash of the launches; a kernel that is compiled in several ways has as many lines.
Kernels of Burn and CubeCL are left out. What differs from the list is printed and makes the program
fail, or with --accept becomes the list.

The launches are all grids, blocks and bytes of shared memory of the cases. The source is hashed
without what may differ from run to run: variables are numbered in the order of their first use,
declarations of types are sorted, and the entry has no hash in its name.

That hash in the name is the end of the key by which a store on disk finds a kernel. Two sources of
one name, also those of Burn and CubeCL, would be one kernel there, and make the program fail.
"""

import glob
import hashlib
import os
import re
import sys
from collections import Counter, defaultdict

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(HERE, "../../crates/burn-ds4-ops/src/**/*.rs")
ENTRY = re.compile(r"__global__ void .*?(\w+)_([0-9a-f]{8})\s*\(")
# `.v4` is a part of inline assembly.
VARIABLE = re.compile(r"(?<![A-Za-z0-9.])v\d+|(?<=_v)\d+")
LAUNCHED = re.compile(
    r"#\[cube\(\s*launch[^]]*\]\s*(?:(?:#\[[^]]*\]|//[^\n]*)\s*)*(?:pub(?:\([^)]*\))? )?fn (\w+)"
)


def own_kernels():
    """Names of the functions that are launched."""
    names = set()
    for path in glob.glob(SOURCES, recursive=True):
        with open(path) as file:
            text = file.read()
        names.update(LAUNCHED.findall(text))
    return names


def normalised(source, entry):
    head, begin, body = source.partition('extern "C"')
    body = body.replace(entry, "entry")
    numbers = {}


    def rename(found):
        return numbers.setdefault(found.group(0).lstrip("v"), f"v{len(numbers)}")

    return "".join(sorted(head.splitlines(True))) + begin + VARIABLE.sub(rename, body)


def short(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def launches(folder):
    """Of each key, its distinct launches."""
    found = defaultdict(set)
    for path in glob.glob(os.path.join(folder, "sm_*", "launches")):
        with open(path) as file:
            for line in file:
                key, _, size = line.partition(" ")
                found[key].add(size)
    return found


def kernels(folder, own, keys):
    operator = os.path.basename(folder.rstrip("/"))
    sizes = launches(folder)
    for path in glob.glob(os.path.join(folder, "sm_*", "*.ptx")):
        with open(path, errors="replace") as file:
            source = file.read().rstrip("\0")
        entry = ENTRY.search(source)
        if not entry:
            sys.exit(f"{path}: no kernel")
        kernel = entry.group(1)
        key = f"{kernel}_{entry.group(2)}"
        sha = short(normalised(source, key))
        keys[key].add(sha)
        if any(kernel.startswith(name) for name in own):
            yield f"{operator} {kernel} {sha} {short(''.join(sorted(sizes[key])))}"


def main():
    accept = "--accept" in sys.argv
    path, *folders = [word for word in sys.argv[1:] if word != "--accept"]
    own = own_kernels()
    now, keys = Counter(), defaultdict(set)
    for folder in folders:
        found = Counter(kernels(folder, own, keys))
        if not found:
            sys.exit(f"{folder}: no kernel")
        now += found
    for key, sources in sorted(keys.items()):
        if len(sources) > 1:
            print(f"{key}: {len(sources)} sources have this key")
    if any(len(sources) > 1 for sources in keys.values()):
        sys.exit("a store on disk would take one of these kernels for another")
    print(f"{len(keys)} keys, each of one source")
    if accept:
        with open(path, "w") as file:
            file.writelines(f"{line}\n" for line in sorted(now.elements()))
        print(f"{sum(now.values())} kernels")
        return
    with open(path) as file:
        known = Counter(file.read().splitlines())
    changed = defaultdict(lambda: [Counter(), Counter()])
    for side, lines in enumerate((known - now, now - known)):
        for line in lines.elements():
            name, source, _ = line.rsplit(" ", 2)
            changed[name][side][source] += 1
    for name, (gone, new) in sorted(changed.items()):
        otherwise = (gone & new).total()
        gone, new = gone.total() - otherwise, new.total() - otherwise
        print(f"{name}: {gone} gone, {new} new, {otherwise} launched otherwise")
    operators = sorted({name.split()[0] for name in changed})
    if operators:
        sys.exit(f"kernels that are not those of the list: {', '.join(operators)}")
    print(f"{sum(now.values())} kernels are those of the list")


main()
