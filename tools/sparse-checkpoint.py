#!/usr/bin/env python3
"""Writes a checkpoint of V4-Flash as sparse files: names, shapes, dtypes and shards of the release,
and holes in place of the data. They read as zeros, which are valid weights, so that loading the
whole size can be tried where the disk is smaller. It needs nothing but Python.

    tools/sparse-checkpoint.py DIR
    tools/sparse-checkpoint.py DIR --layers 4 --experts 8 --fill 'layers\\.0\\.attn\\.' --seed 1

--fill gives the tensors whose names match small random numbers, by the seed. Only these are on the
disk. An existing file is not overwritten.
"""

import argparse
import json
import math
import pathlib
import random
import re
import shutil
import struct
import sys

HIDDEN, HEADS, HEAD, QUERY_RANK, GROUPS, OUTPUT_RANK = 4096, 64, 512, 1024, 8, 1024
INDEX_HEADS, INDEX_HEAD, WIDTH, PER_TOKEN, STREAMS = 64, 128, 2048, 6, 4
HASH_LAYERS, ALL_LAYERS, ALL_EXPERTS, VOCABULARY = 3, 43, 256, 129280
RATIOS = [0, 0] + [4, 128] * 20 + [4]
BYTES = {"BF16": 2, "F32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def fp8(name, rows, columns):
    yield f"{name}.weight", "F8_E4M3", [rows, columns]
    yield f"{name}.scale", "F8_E8M0", [math.ceil(rows / 128), math.ceil(columns / 128)]


def fp4(name, rows, columns):
    yield f"{name}.weight", "I8", [rows, columns // 2]
    yield f"{name}.scale", "F8_E8M0", [rows, columns // 32]


def compressor(name, ratio, width):
    series = 2 if ratio == 4 else 1
    for part in ("wkv", "wgate"):
        yield f"{name}.{part}.weight", "BF16", [series * width, HIDDEN]
    yield f"{name}.ape", "F32", [ratio, series * width]
    yield f"{name}.norm.weight", "BF16", [width]


def block(prefix, ratio, hashed, options):
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{norm}.weight", "BF16", [HIDDEN]
    attention = f"{prefix}attn."
    yield f"{attention}q_norm.weight", "BF16", [QUERY_RANK]
    yield f"{attention}kv_norm.weight", "BF16", [HEAD]
    yield f"{attention}attn_sink", "F32", [HEADS]
    yield from fp8(f"{attention}wq_a", QUERY_RANK, HIDDEN)
    yield from fp8(f"{attention}wq_b", HEADS * HEAD, QUERY_RANK)
    yield from fp8(f"{attention}wkv", HEAD, HIDDEN)
    yield from fp8(f"{attention}wo_a", GROUPS * OUTPUT_RANK, HEADS * HEAD // GROUPS)
    yield from fp8(f"{attention}wo_b", HIDDEN, GROUPS * OUTPUT_RANK)
    if ratio:
        yield from compressor(f"{attention}compressor", ratio, HEAD)
    if ratio == 4:
        indexer = f"{attention}indexer."
        yield from fp8(f"{indexer}wq_b", INDEX_HEADS * INDEX_HEAD, QUERY_RANK)
        yield f"{indexer}weights_proj.weight", "BF16", [INDEX_HEADS, HIDDEN]
        yield from compressor(f"{indexer}compressor", ratio, INDEX_HEAD)
    for part in ("attn", "ffn"):
        coefficients = (2 + STREAMS) * STREAMS
        yield f"{prefix}hc_{part}_fn", "F32", [coefficients, STREAMS * HIDDEN]
        yield f"{prefix}hc_{part}_base", "F32", [coefficients]
        yield f"{prefix}hc_{part}_scale", "F32", [3]
    experts = f"{prefix}ffn."
    yield f"{experts}gate.weight", "BF16", [options.experts, HIDDEN]
    if hashed:
        yield f"{experts}gate.tid2eid", "I64", [options.vocabulary, PER_TOKEN]
    else:
        yield f"{experts}gate.bias", "F32", [options.experts]
    for expert in range(options.experts):
        for part in ("w1", "w3"):
            yield from fp4(f"{experts}experts.{expert}.{part}", WIDTH, HIDDEN)
        yield from fp4(f"{experts}experts.{expert}.w2", HIDDEN, WIDTH)
    for part in ("w1", "w3"):
        yield from fp8(f"{experts}shared_experts.{part}", WIDTH, HIDDEN)
    yield from fp8(f"{experts}shared_experts.w2", HIDDEN, WIDTH)


def head(prefix):
    yield f"{prefix}norm.weight", "BF16", [HIDDEN]
    yield f"{prefix}hc_head_fn", "F32", [STREAMS, STREAMS * HIDDEN]
    yield f"{prefix}hc_head_base", "F32", [STREAMS]
    yield f"{prefix}hc_head_scale", "F32", [1]


def mtp(options):
    yield from block("mtp.0.", 0, False, options)
    for part in ("e_proj", "h_proj"):
        yield from fp8(f"mtp.0.{part}", HIDDEN, HIDDEN)
    for part in ("enorm", "hnorm"):
        yield f"mtp.0.{part}.weight", "BF16", [HIDDEN]
    yield from head("mtp.0.")


def shards(options):
    matrix = [options.vocabulary, HIDDEN]
    yield [("embed.weight", "BF16", matrix)]
    for layer in range(options.layers):
        hashed = layer < HASH_LAYERS
        yield list(block(f"layers.{layer}.", RATIOS[layer], hashed, options))
    yield [*head(""), ("head.weight", "BF16", matrix)]
    yield list(mtp(options))


def config(options):
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "index_head_dim": INDEX_HEAD,
        "index_n_heads": INDEX_HEADS,
        "index_topk": 512,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": options.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": PER_TOKEN,
        "num_hash_layers": min(HASH_LAYERS, options.layers),
        "num_hidden_layers": options.layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": GROUPS,
        "o_lora_rank": OUTPUT_RANK,
        "q_lora_rank": QUERY_RANK,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "compress_ratios": RATIOS[: options.layers] + [0],
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": options.vocabulary,
    }


def data(name, dtype, count, options):
    """Random data of a tensor, by its name and the seed alone."""
    draw = random.Random(f"{options.seed} {name}")
    if dtype == "F32":
        return struct.pack(f"<{count}f", *(draw.gauss(0, 0.02) for _ in range(count)))
    if dtype == "I64":
        ids = (draw.randrange(options.experts) for _ in range(count))
        return struct.pack(f"<{count}q", *ids)
    if dtype == "BF16":
        values = (struct.pack("<f", draw.gauss(0, 0.02))[2:] for _ in range(count))
        return b"".join(values)
    if dtype == "F8_E8M0":
        return bytes(draw.randrange(117, 121) for _ in range(count))
    # Codes of E4M3 that are no NaN, and any of E2M1.
    mask = 0xF7 if dtype == "F8_E4M3" else 0xFF
    return bytes(byte & mask for byte in draw.randbytes(count))


def write(path, tensors, options):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        size = BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + end)
        for name, dtype, shape in tensors:
            if options.fill and options.fill.search(name):
                file.seek(start + header[name]["data_offsets"][0])
                file.write(data(name, dtype, math.prod(shape), options))
    return end


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=ALL_LAYERS)
    parser.add_argument("--experts", type=int, default=ALL_EXPERTS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--fill", type=re.compile, help="names of tensors that get data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json to copy")
    options = parser.parse_args()
    for name, most in [("layers", ALL_LAYERS), ("experts", None), ("vocabulary", None)]:
        value, least = getattr(options, name), PER_TOKEN if name == "experts" else 1
        if value < least or (most and value > most):
            parser.error(f"--{name} is {value}, expected {least} to {most or 'any number'}")
    return options


def main():
    options = arguments()
    options.dir.mkdir(parents=True, exist_ok=True)
    files = list(shards(options))
    weight_map, total = {}, 0
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        total += write(options.dir / name, tensors, options)
        weight_map.update((tensor, name) for tensor, _, _ in tensors)
    texts = {
        "config.json": config(options),
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": weight_map,
        },
    }
    for name, value in texts.items():
        with open(options.dir / name, "x", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
    if options.tokenizer:
        shutil.copy(options.tokenizer, options.dir / "tokenizer.json")
    print(f"{len(weight_map)} tensors of {total} bytes in {len(files)} files")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"error: {error}")
