#!/usr/bin/env python3
"""Writes a checkpoint that can be made to write tool calls.

    python3 tests/clients/tool_checkpoint.py DIR

It is the shipped one with the tokens of tool_tokens.json in place of the last merges of its
tokenizer. A request makes it write them by `logit_bias`, as tests/clients/openai_client.py does and
crates/burn-ds4/tests/programs/cli_serve/tools.rs, which makes the same checkpoint.
"""

import argparse
import json
import shutil
from pathlib import Path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    clients = Path(__file__).resolve().parent
    asset = clients.parent.parent / "assets" / "ds4-tiny"
    directory.mkdir(parents=True, exist_ok=True)
    for name in ["config.json", "model.safetensors"]:
        shutil.copy(asset / name, directory / name)
    tokens = json.loads((clients / "tool_tokens.json").read_text(encoding="utf-8"))
    file = json.loads((asset / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = file["model"], file["added_tokens"]
    ids = {id for _, id in tokens}
    model["vocab"] = {text: id for text, id in model["vocab"].items() if id not in ids}
    model["vocab"] |= dict(tokens)
    del model["merges"][-len(tokens) :]
    added.extend(added[0] | {"id": id, "content": text} for text, id in tokens)
    (directory / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")


if __name__ == "__main__":
    main()
