#!/usr/bin/env python3
"""Writes a checkpoint of the first layers of V4-Flash with weights that are drawn, so that programs
can be timed on its sizes. What it says is noise.

    python3 tools/random-checkpoint.py DIR [--layers 8] [--experts 256] [--shrink 1]

Formats, names and shapes are those of a release: experts in FP4, linear maps in FP8. A few MiB are
drawn for each format and repeated. 8 layers of 256 experts take 30 GB.
"""

import argparse
import json
import random
import struct
from pathlib import Path

TINY = Path(__file__).resolve().parent.parent / "assets/ds4-tiny"
PATTERN = 16 << 20
BYTES = {"F32": 4, "BF16": 2, "I64": 8}


def ceil(size, block):
    return -(-size // block)


def config(options):
    """The configuration of ds4-tiny with the sizes of V4-Flash."""
    config = json.loads((TINY / "config.json").read_text())
    layers, shrink = options.layers, options.shrink
    ratios = [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, layers))][:layers]
    names = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
    return config | {
        "hidden_size": 4096 // shrink,
        "num_attention_heads": 64 // shrink,
        "q_lora_rank": 1024 // shrink,
        "o_lora_rank": 1024 // shrink,
        "index_n_heads": 64 // shrink,
        "moe_intermediate_size": 2048 // shrink,
        "vocab_size": options.vocabulary,
        "n_routed_experts": options.experts,
        "num_hidden_layers": layers,
        "num_hash_layers": min(3, layers),
        "num_nextn_predict_layers": 0,
        "compress_ratios": ratios,
        "layer_types": [f"{names[ratio]}_attention" for ratio in ratios],
        "compress_rate_hca": 128,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "o_groups": 8,
        "sliding_window": 128,
        "index_head_dim": 128,
        "index_topk": 512,
        "compress_rope_theta": 160000,
        "max_position_embeddings": 1 << 20,
        "rope_scaling": config["rope_scaling"]
        | {"factor": 16, "original_max_position_embeddings": 65536},
    }


def linear(name, out, inp):
    yield f"{name}.weight", "F8_E4M3", [out, inp]
    yield f"{name}.scale", "F8_E8M0", [ceil(out, 128), ceil(inp, 128)]


def expert(name, out, inp):
    yield f"{name}.weight", "I8", [out, inp // 2]
    yield f"{name}.scale", "F8_E8M0", [out, inp // 32]


def compressor(name, ratio, hidden, width):
    rows = 2 * width if ratio == 4 else width
    yield f"{name}.ape", "F32", [ratio, rows]
    yield f"{name}.norm.weight", "BF16", [width]
    yield f"{name}.wgate.weight", "BF16", [rows, hidden]
    yield f"{name}.wkv.weight", "BF16", [rows, hidden]


def hyper_connection(name, streams, hidden, mixes, scales):
    yield f"{name}_base", "F32", [mixes]
    yield f"{name}_fn", "F32", [mixes, streams * hidden]
    yield f"{name}_scale", "F32", [scales]


def layer(number, sizes):
    """The tensors of a layer: name, dtype and shape."""
    name, hidden, width = f"layers.{number}", sizes["hidden_size"], sizes["head_dim"]
    heads, rank, groups = (sizes[key] for key in ("num_attention_heads", "q_lora_rank", "o_groups"))
    attention, ratio = f"{name}.attn", sizes["compress_ratios"][number]
    output = groups * sizes["o_lora_rank"]
    yield f"{attention}.attn_sink", "F32", [heads]
    yield f"{attention}.q_norm.weight", "BF16", [rank]
    yield f"{attention}.kv_norm.weight", "BF16", [width]
    yield from linear(f"{attention}.wq_a", rank, hidden)
    yield from linear(f"{attention}.wq_b", heads * width, rank)
    yield from linear(f"{attention}.wkv", width, hidden)
    yield from linear(f"{attention}.wo_a", output, heads * width // groups)
    yield from linear(f"{attention}.wo_b", hidden, output)
    if ratio:
        yield from compressor(f"{attention}.compressor", ratio, hidden, width)
    if ratio == 4:
        indexer, heads = f"{attention}.indexer", sizes["index_n_heads"]
        width = sizes["index_head_dim"]
        yield from compressor(f"{indexer}.compressor", ratio, hidden, width)
        yield from linear(f"{indexer}.wq_b", heads * width, rank)
        yield f"{indexer}.weights_proj.weight", "BF16", [heads, hidden]
    for part in ("attn", "ffn"):
        yield f"{name}.{part}_norm.weight", "BF16", [hidden]
        yield from hyper_connection(f"{name}.hc_{part}", 4, hidden, 24, 3)
    experts, inner = sizes["n_routed_experts"], sizes["moe_intermediate_size"]
    yield f"{name}.ffn.gate.weight", "BF16", [experts, hidden]
    if number < sizes["num_hash_layers"]:
        yield f"{name}.ffn.gate.tid2eid", "I64", [sizes["vocab_size"], sizes["num_experts_per_tok"]]
    else:
        yield f"{name}.ffn.gate.bias", "F32", [experts]
    for part, out, inp in [("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)]:
        yield from linear(f"{name}.ffn.shared_experts.{part}", out, inp)
        for index in range(experts):
            yield from expert(f"{name}.ffn.experts.{index}.{part}", out, inp)


def tensors(sizes):
    """All tensors."""
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    yield "embed.weight", "BF16", [vocabulary, hidden]
    yield "head.weight", "BF16", [vocabulary, hidden]
    yield "norm.weight", "BF16", [hidden]
    yield from hyper_connection("hc_head", 4, hidden, 4, 1)
    for number in range(sizes["num_hidden_layers"]):
        yield from layer(number, sizes)


def patterns(experts):
    """Bytes for each kind of tensor: what is drawn, or has to be what it is."""
    draw = random.Random(0)
    any_byte = draw.randbytes(PATTERN)
    signs = bytes(0xBC if byte & 1 else 0x3C for byte in range(256))
    ids = bytes(byte % experts for byte in range(256))
    # The two codes that are NaN become zeros.
    numbers = bytes(0 if byte & 0x7F == 0x7F else byte for byte in range(256))

    def floats(size):
        values = bytearray(any_byte)
        # A sign, and an exponent for values from 2^-7 to 2^-5.
        values[size - 1 :: size] = values[size - 1 :: size].translate(signs)
        return bytes(values)

    table = bytearray(PATTERN)
    table[::8] = any_byte[::8].translate(ids)
    return {
        "I8": any_byte,
        "F8_E4M3": any_byte.translate(numbers),
        "F32": floats(4),
        "BF16": floats(2),
        "I64": bytes(table),
        "norm": struct.pack("<H", 0x3F80) * (PATTERN // 2),
        # Products of normalised inputs have the size of inputs.
        "scale of I8": bytes([118]) * PATTERN,
        "scale of F8_E4M3": bytes([112]) * PATTERN,
    }


def write(path, sizes):
    header, offset, kinds = {}, 0, []
    weight = None
    for name, dtype, shape in tensors(sizes):
        length = BYTES.get(dtype, 1)
        for size in shape:
            length *= size
        kind = dtype
        if name.endswith("norm.weight"):
            kind = "norm"
        elif dtype == "F8_E8M0":
            kind = f"scale of {weight}"
        weight = dtype
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
        kinds.append((kind, length))
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    known = patterns(sizes["n_routed_experts"])
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for kind, length in kinds:
            for begin in range(0, length, PATTERN):
                file.write(memoryview(known[kind])[: min(PATTERN, length - begin)])
    return offset


def tokenizer(vocabulary):
    """That of ds4-tiny, with a word for each further token."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    first = 1 + max([*known.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    known.update({f"w{token}": token for token in range(first, vocabulary)})
    return tokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--shrink", type=int, default=1, help="divides widths and heads")
    options = parser.parse_args()
    sizes = config(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, content in [
        ("config.json", sizes),
        ("tokenizer.json", tokenizer(options.vocabulary)),
    ]:
        (options.directory / name).write_text(json.dumps(content))
    size = write(options.directory / "model.safetensors", sizes)
    print(f"{options.directory}: {size} bytes of weights")


if __name__ == "__main__":
    main()
