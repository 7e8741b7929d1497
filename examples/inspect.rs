//! Shows what a checkpoint holds and how much memory it takes, from `config.json` and the headers of the weight files alone.
//!
//! * **Parameters** are weights: an FP4 byte counts as two, scales and token-id tables count as none.
//! * **Memory** is what the model's tensors take on a device, by the rules of `LoadOptions`: packed weights with FP8 scales
//!   widened to `f32` and matrices that are read in `f32` as they are stored, or every packed weight decoded and those matrices
//!   widened. The device has the stored dtypes; its allocator and the intermediate tensors of a forward call come on top.
//! * **Cache** is that of one sequence with room to roll back one draft, trunk and MTP layer together.

mod shared;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::FloatDType;
use burn_ds4_ops::device::DeviceSpec;
use clap::Parser;
use ds4_model::cache::{Cache, CacheConfig, CacheLayout, Rollback};
use ds4_model::checkpoint::{Checkpoint, CheckpointTensor, Dtype};
use ds4_model::config::{AttentionKind, ModelConfig};

/// Shows configuration, tensors and memory of a checkpoint without loading it.
#[derive(Debug, Parser)]
struct Args {
    /// Directory of the checkpoint: config.json, model.safetensors or its shards.
    #[arg(long, default_value_os_t = shared::shipped_checkpoint())]
    model: PathBuf,
    /// Lists every tensor.
    #[arg(long)]
    tensors: bool,
}

fn main() -> ExitCode {
    shared::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(&args.model)?;
    let config = checkpoint.config();
    let mut out = BufWriter::new(io::stdout().lock());
    writeln!(out, "{}", args.model.display())?;
    print_config(config, &mut out)?;
    if args.tensors {
        writeln!(out, "\n{:<14}  {:<20}  tensor", "dtype", "shape")?;
        for tensor in checkpoint.tensors() {
            let (dtype, shape) = (format!("{:?}", tensor.dtype), format!("{:?}", tensor.shape));
            writeln!(out, "{dtype:<14}  {shape:<20}  {}", tensor.name)?;
        }
    }
    let by_dtype = |tensor: &CheckpointTensor<'_>| format!("{:?}", tensor.dtype);
    let by_part = |tensor: &CheckpointTensor<'_>| part(tensor.name).to_string();
    print_totals("dtype", &checkpoint, by_dtype, &mut out)?;
    print_totals("part", &checkpoint, by_part, &mut out)?;

    writeln!(out, "\nmemory on a device, MTP layer included")?;
    for (name, expand, dtype) in [
        ("packed, f32 activations", false, FloatDType::F32),
        ("packed, bf16 activations", false, FloatDType::BF16),
        ("expanded to f32", true, FloatDType::F32),
        ("expanded to bf16", true, FloatDType::BF16),
    ] {
        let bytes: usize = checkpoint
            .tensors()
            .map(|tensor| device_bytes(&tensor, &checkpoint, expand, dtype))
            .sum();
        writeln!(
            out,
            "  {name:<26}{:>22} bytes{:>12}",
            grouped(bytes),
            human(bytes)
        )?;
    }
    writeln!(out, "\ncache of one sequence")?;
    for (name, dtype) in [("f32", FloatDType::F32), ("bf16", FloatDType::BF16)] {
        let (fixed, per_token) = cache_bytes(config, dtype)?;
        writeln!(
            out,
            "  {name:<5}{} bytes + {per_token} bytes per token",
            grouped(fixed)
        )?;
    }
    out.flush()?;
    Ok(())
}

fn print_config(config: &ModelConfig, out: &mut impl Write) -> io::Result<()> {
    let layers = |wanted: fn(&AttentionKind) -> bool| {
        config.layers.iter().filter(|kind| wanted(kind)).count()
    };
    let window = layers(|kind| matches!(kind, AttentionKind::Window));
    let sparse = layers(|kind| matches!(kind, AttentionKind::CompressedSparse { .. }));
    let heavy = layers(|kind| matches!(kind, AttentionKind::HeavilyCompressed { .. }));
    let mut line = |name: &str, value: &dyn Display| writeln!(out, "  {name:<22}{value}");
    let kinds = format!(
        "{} ({window} window, {sparse} compressed sparse, {heavy} heavily compressed), {} MTP",
        config.layers.len(),
        config.num_mtp_layers
    );
    let experts = format!(
        "{} routed of width {}, {} per token, {} shared; the first {} layers by token id",
        config.n_routed_experts,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        config.n_shared_experts,
        config.num_hash_layers
    );
    line("layers", &kinds)?;
    line("hidden size", &config.hidden_size)?;
    line("residual streams", &config.hc_mult)?;
    line(
        "heads",
        &format!(
            "{} of width {}",
            config.num_attention_heads, config.head_dim
        ),
    )?;
    line("experts", &experts)?;
    line("sliding window", &config.sliding_window)?;
    line("indexer picks", &config.index_topk)?;
    line("vocabulary", &config.vocab_size)?;
    line("longest context", &config.max_position_embeddings)
}

fn print_totals(
    heading: &str,
    checkpoint: &Checkpoint,
    key: impl Fn(&CheckpointTensor<'_>) -> String,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut totals: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    let mut all = [0; 3];
    for tensor in checkpoint.tensors() {
        let total = totals.entry(key(&tensor)).or_default();
        for sum in [total, &mut all] {
            sum[0] += 1;
            sum[1] += parameters(&tensor);
            sum[2] += tensor.bytes.len();
        }
    }
    writeln!(
        out,
        "\n{heading:<20}{:>9}{:>20}{:>22}",
        "tensors", "parameters", "bytes"
    )?;
    for (name, total) in totals.iter().chain([(&"total".to_string(), &all)]) {
        let [tensors, parameters, bytes] = total.map(grouped);
        writeln!(
            out,
            "{name:<20}{tensors:>9}{parameters:>20}{bytes:>22}{:>12}",
            human(total[2])
        )?;
    }
    Ok(())
}

/// Copies of the trunk's tensors that some converted checkpoints carry, and that are not loaded.
fn is_copy(name: &str) -> bool {
    ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"].contains(&name)
}

/// The part of the model that a tensor belongs to.
fn part(name: &str) -> &'static str {
    const PARTS: [(&str, &str); 9] = [
        (".attn.indexer.", "indexers"),
        (".attn.compressor.", "compressors"),
        (".attn.", "attention"),
        (".ffn.experts.", "routed experts"),
        (".ffn.shared_experts.", "shared experts"),
        (".ffn.gate.", "routers"),
        ("hc_", "hyper-connections"),
        ("embed.", "embedding"),
        ("head.", "output matrix"),
    ];
    if is_copy(name) {
        return "copies, not loaded";
    }
    if name.starts_with("mtp.") {
        return "MTP layer";
    }
    let part = PARTS.iter().find(|(pattern, _)| name.contains(pattern));
    part.map_or("norms", |(_, part)| part)
}

fn parameters(tensor: &CheckpointTensor<'_>) -> usize {
    let elements = tensor.shape.iter().product();
    match tensor.dtype {
        Dtype::I8 => 2 * elements,
        _ if tensor.name.ends_with(".scale") || tensor.name.ends_with(".tid2eid") => 0,
        _ => elements,
    }
}

/// Bytes on the device of what becomes of a tensor.
fn device_bytes(
    tensor: &CheckpointTensor<'_>,
    checkpoint: &Checkpoint,
    expand: bool,
    dtype: FloatDType,
) -> usize {
    let name = tensor.name;
    let elements: usize = tensor.shape.iter().product();
    let rows = tensor.shape.first().copied().unwrap_or(1);
    let columns = elements.checked_div(rows).unwrap_or(0);
    let float = match dtype {
        FloatDType::F32 => 4,
        _ => 2,
    };
    if is_copy(name) {
        return 0;
    }
    let groups = name
        .contains(".wo_a.")
        .then(|| GroupBlocks::of(checkpoint.config()));
    let fp8 =
        tensor.dtype == Dtype::F8_E4M3 || name.ends_with(".scale") && !scales_fp4(name, checkpoint);
    let expand = expand || fp8 && groups == Some(GroupBlocks::Decoded);
    match tensor.dtype {
        Dtype::I8 if expand => 2 * elements * float,
        Dtype::F8_E4M3 if expand => elements * float,
        // Packed rows end at a word.
        Dtype::I8 | Dtype::F8_E4M3 => rows * columns.next_multiple_of(4),
        _ if name.ends_with(".scale") => match (expand, scales_fp4(name, checkpoint)) {
            (true, _) => 0,
            (false, true) => elements.next_multiple_of(4),
            (false, false) if groups == Some(GroupBlocks::Repeated) => {
                4 * columns * checkpoint.config().o_groups
            }
            (false, false) => 4 * elements,
        },
        Dtype::I64 | Dtype::I32 => 4 * elements,
        _ if is_read_in_f32(name) => match expand {
            true => 4 * elements,
            false => tensor.bytes.len(),
        },
        _ if is_f32(name) => 4 * f32_elements(name, elements, checkpoint.config().hc_mult),
        _ => float * elements,
    }
}

fn scales_fp4(name: &str, checkpoint: &Checkpoint) -> bool {
    let weight = format!("{}.weight", name.trim_end_matches(".scale"));
    checkpoint
        .tensor(&weight)
        .is_some_and(|weight| weight.dtype == Dtype::I8)
}

/// What becomes of the FP8 scales of the output projection, whose groups are matrices of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GroupBlocks {
    /// Every group has whole blocks.
    Kept,
    /// Groups that share a row of blocks get one each.
    Repeated,
    /// Blocks reach from one group into the next: the projection is not packed.
    Decoded,
}

impl GroupBlocks {
    fn of(config: &ModelConfig) -> Self {
        let rank = config.o_lora_rank;
        if config.o_groups == 1 || rank.is_multiple_of(128) {
            Self::Kept
        } else if 128_usize.is_multiple_of(rank) {
            Self::Repeated
        } else {
            Self::Decoded
        }
    }
}

/// Whether this is a matrix that products read in f32, whatever its dtype.
fn is_read_in_f32(name: &str) -> bool {
    // By name, since the MTP layer has these too.
    let patterns = [
        ".compressor.wkv.",
        ".compressor.wgate.",
        ".ffn.gate.weight",
        ".indexer.weights_proj.",
    ];
    part(name) == "output matrix" || patterns.iter().any(|pattern| name.contains(pattern))
}

/// Whether this is f32 on every device.
fn is_f32(name: &str) -> bool {
    let patterns = [
        ".compressor.",
        ".ffn.gate.",
        "hc_",
        ".attn_sink",
        "norm.weight",
    ];
    patterns.iter().any(|pattern| name.contains(pattern))
}

/// Elements on the device of a tensor that is kept in f32.
fn f32_elements(name: &str, elements: usize, streams: usize) -> usize {
    if name.ends_with(".ape") {
        // Zeros for the values, then the bias for the scores.
        2 * elements
    } else if name.ends_with("hc_attn_scale") || name.ends_with("hc_ffn_scale") {
        // One scale per coefficient instead of three.
        (2 + streams) * streams
    } else {
        elements
    }
}

/// Bytes that a cache takes whatever its length, and bytes per token.
fn cache_bytes(config: &ModelConfig, dtype: FloatDType) -> Result<(usize, usize), Box<dyn Error>> {
    let device = DeviceSpec::Flex.init()?;
    let room = |layout: CacheLayout, capacity: usize| {
        let options = CacheConfig {
            capacity,
            rollback: Rollback::Bounded(1),
            dtype,
            ..CacheConfig::default()
        };
        Cache::new(layout, options, &device).map(|cache| cache.bytes())
    };
    let both = |capacity: usize| -> Result<usize, Box<dyn Error>> {
        let trunk = room(CacheLayout::trunk(config), capacity)?;
        Ok(match config.num_mtp_layers {
            0 => trunk,
            _ => trunk + room(CacheLayout::mtp(config), capacity)?,
        })
    };
    // Two lengths that are whole numbers of compressed rows.
    let most = config.max_position_embeddings.min(2048);
    let (short, long) = (both(most / 2)?, both(most)?);
    let per_token = (long - short).div_ceil(most - most / 2);
    Ok((long.saturating_sub(per_token * most), per_token))
}

/// Digits in groups of three.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

fn human(bytes: usize) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 1000.0 {
            return format!("{value:.1} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.2} TB")
}
