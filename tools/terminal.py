#!/usr/bin/env python3
"""Draws what commands print as an SVG of a terminal. It needs nothing but Python. The picture of
the README, where a folder has a checkpoint of V4-Flash (that of `tools/sparse-checkpoint.py` will
do, since only its headers are read) and `burn-ds4` is in the PATH:

    tools/terminal.py docs/terminal.svg \\
      "burn-ds4 generate -p 'And it came to pass' -n 48" \\
      "burn-ds4 inspect --model DeepSeek-V4-Flash --devices 2 --ctx 131072 --memory 141 | tail -5"

What commands write to standard error is left out, and a command that fails ends the script.
"""

import html
import subprocess
import sys
import textwrap

COLUMNS, WIDTH, HEIGHT, MARGIN = 96, 8.4, 20, 20
STYLE = """
  rect { fill: #1e2430; }
  text { font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d5dae3; }
  .command { fill: #8fd0a0; }
"""


def lines_of(command):
    shell = ["bash", "-o", "pipefail", "-c", command]
    printed = subprocess.run(shell, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    text = [f"$ {command}", *printed.stdout.decode().splitlines(), ""]
    for number, line in enumerate(text):
        parts = textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]
        yield from ((part, "command" if number == 0 else "printed") for part in parts)


def main():
    path, *commands = sys.argv[1:]
    lines = [line for command in commands for line in lines_of(command)][:-1]
    width, height = COLUMNS * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN
    drawn = [
        f'<text x="{MARGIN}" y="{MARGIN + HEIGHT * number + 15}" class="{kind}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
        for number, (text, kind) in enumerate(lines)
    ]
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}">\n'
            f"<style>{STYLE}</style>\n"
            f'<rect width="100%" height="100%" rx="8"/>\n' + "\n".join(drawn) + "\n</svg>\n"
        )


if __name__ == "__main__":
    main()
