//! Shows what a checkpoint holds and how much memory it takes, from `config.json` and the headers
//! of the weight files alone. A checkpoint whose headers are not those of a model is refused, as it
//! is when it is loaded.
//!
//! * **Parameters** are weights: an FP4 byte counts as two, scales and token-id tables count as
//!   none.
//! * **Memory** is what the model's tensors take on a device that has their dtypes, with packed
//!   weights or with every weight decoded. The device's allocator and the intermediate tensors of a
//!   forward call come on top.
//! * **Cache** is that of one sequence that can be rolled back by one draft, trunk and MTP layer
//!   together.
//! * **Packed weights** are counted by format, with what becomes of those that no kernel reads:
//!   NVFP4 is folded to FP4 where that is exact, and else decoded to the dtype of the activations.
//! * **Not loaded** is what a model has no use for: what is for images, copies, biases of routers
//!   that have a table of experts, scales of activations, and tensors without elements.
//! * **Plan**, with `--devices`: the layers that each device would have, or has parts of with
//!   `--parallel tensor`, as they are loaded packed with bf16 activations, and the bytes of their
//!   weights and of the caches of `--ctx` positions. With `--memory`, whether that fits, and up to
//!   how many positions.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use burn::tensor::FloatDType;
use burn_ds4_ops::device::DeviceSpec;
use clap::Args;
use ds4_model::cache::{CacheConfig, CacheError, CacheLayout, Rollback};
use ds4_model::checkpoint::{Checkpoint, CheckpointTensor, Dtype, LoadOptions};
use ds4_model::config::{AttentionKind, ModelConfig};
use ds4_model::parallel::Parallel;
use ds4_model::placement::{DEFAULT_CONTEXT, ModelBytes, PlacementError, Plan};

use crate::shared::devices::SharingArgs;
use crate::shared::shipped_checkpoint;

/// Dtype of the activations of a model that is divided among devices.
const DIVIDED_DTYPE: FloatDType = FloatDType::BF16;

/// Shows configuration, tensors and memory of a checkpoint without loading it.
#[derive(Debug, Args)]
pub struct Options {
    /// Directory of the checkpoint: config.json, model.safetensors or its shards.
    #[arg(short, long, default_value_os_t = shipped_checkpoint())]
    model: PathBuf,
    /// Lists every tensor.
    #[arg(long)]
    tensors: bool,
    /// Shows how the model would be divided among so many devices.
    #[arg(id = "device", long = "devices", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    devices: Option<u32>,
    /// Positions of all texts together, whose caches count for that.
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_CONTEXT, requires = "device")]
    ctx: usize,
    #[command(flatten)]
    sharing: SharingArgs,
    /// Memory of a device, in GB.
    #[arg(long, value_name = "GB", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(requires = "device")]
    memory: Option<u32>,
}

/// Runs the program.
///
/// # Errors
///
/// If the checkpoint cannot be read, or an option cannot be used.
pub fn run(args: &Options) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(&args.model)?;
    let memory = memory(&checkpoint)?;
    let division = args
        .devices
        .map(|count| Division::new(&checkpoint, count, args));
    let division = division.transpose()?;
    let config = checkpoint.config();
    let mut out = BufWriter::new(io::stdout().lock());
    writeln!(out, "{}", args.model.display())?;
    print_config(config, &mut out)?;
    writeln!(out, "  {:<22}{}", "tensor names", checkpoint.dialect())?;
    let formats = checkpoint.packed_formats();
    writeln!(out, "  {:<22}{}", "variant", variant(&checkpoint, &formats))?;
    let packed = formats.iter();
    let packed = packed.map(|(format, weights)| format!("{weights} in {format}"));
    let packed = packed.reduce(|one, other| format!("{one}; {other}"));
    let packed = packed.unwrap_or("none".to_owned());
    writeln!(out, "  {:<22}{packed}", "packed weights")?;
    if args.tensors {
        writeln!(out, "\n{:<14}  {:<20}  tensor", "dtype", "shape")?;
        for tensor in checkpoint.tensors() {
            let (dtype, shape) = (format!("{:?}", tensor.dtype), format!("{:?}", tensor.shape));
            writeln!(out, "{dtype:<14}  {shape:<20}  {}", tensor.name)?;
        }
    }
    let by_dtype = |tensor: &CheckpointTensor<'_>| format!("{:?}", tensor.dtype);
    let by_part = |tensor: &CheckpointTensor<'_>| match checkpoint.skipped(tensor.name) {
        Some(why) => format!("{why}, not loaded"),
        None => part(tensor.name).to_owned(),
    };
    print_totals("dtype", &checkpoint, by_dtype, &mut out)?;
    print_totals("part", &checkpoint, by_part, &mut out)?;

    writeln!(out, "\nmemory on a device, drafter included")?;
    for (name, bytes) in memory {
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
    if let Some(division) = division {
        division.print(config, &mut out)?;
    }
    out.flush()?;
    Ok(())
}

/// What the checkpoint has of what releases differ by.
fn variant(checkpoint: &Checkpoint, formats: &BTreeMap<String, usize>) -> String {
    let config = checkpoint.config();
    let drafter = match (&config.dspark, config.num_mtp_layers) {
        (Some(_), _) if config.has_v41_parts() => "DSpark drafter (V4.1)",
        (Some(_), _) => "DSpark drafter (0731, 0813)",
        (None, 0) => "no drafter",
        (None, _) => "MTP layer (first release)",
    };
    let expert = checkpoint.tensor("layers.0.ffn.experts.0.w1.weight");
    let experts = match expert.map(|expert| expert.dtype) {
        _ if formats.keys().any(|format| format.starts_with("NVFP4")) => "NVFP4",
        Some(Dtype::F8_E4M3) => "FP8 (-Base)",
        Some(Dtype::BF16 | Dtype::F16 | Dtype::F32) => "dense",
        None => "no",
        _ => "FP4",
    };
    let mut tensors = checkpoint.tensors();
    let has_images = tensors.any(|tensor| checkpoint.skipped(tensor.name) == Some("images"));
    let images = ["", ", images (Vision-Exp)"][usize::from(has_images)];
    format!("{experts} experts, {drafter}{images}")
}

/// How the model is divided among devices.
struct Division<'a> {
    args: &'a Options,
    names: Vec<String>,
    bytes: ModelBytes,
    positions: usize,
    plan: Plan,
}

impl<'a> Division<'a> {
    fn new(checkpoint: &Checkpoint, count: u32, args: &'a Options) -> Result<Self, Box<dyn Error>> {
        let options = LoadOptions {
            dtype: DIVIDED_DTYPE,
            ..LoadOptions::default()
        };
        let positions = args.ctx.min(checkpoint.config().max_position_embeddings);
        let device = DeviceSpec::Flex.init()?;
        let bytes = checkpoint.model_bytes(&options, &device, positions)?;
        let names = (0..count).map(|index| format!("device {index}"));
        let names: Vec<String> = names.collect();
        Ok(Self {
            plan: plan(checkpoint.config(), &bytes, &names, args)?,
            args,
            names,
            bytes,
            positions,
        })
    }

    fn print(&self, config: &ModelConfig, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
        writeln!(
            out,
            "\nplan for {} devices, packed, bf16 activations, caches of {} positions{}",
            self.names.len(),
            grouped(self.positions),
            match self.args.sharing.parallel.into() {
                Parallel::Layers | Parallel::Auto => "",
                Parallel::Tensor => ", a part of every layer on each",
            }
        )?;
        let heads = ["layers", "weights", "caches", "together"];
        let [layers, weights, cache, all] = heads;
        writeln!(
            out,
            "  {:<12}{layers:>10}{weights:>20}{cache:>20}{all:>20}",
            ""
        )?;
        let Plan { runs, bytes } = &self.plan;
        for ((name, run), bytes) in self.names.iter().zip(runs).zip(bytes) {
            let layers = format!("{}-{}", run.start, run.end - 1);
            let [weights, cache, all] = [bytes.weights, bytes.cache, bytes.total()].map(grouped);
            writeln!(
                out,
                "  {name:<12}{layers:>10}{weights:>20}{cache:>20}{all:>20}{:>12}",
                human(bytes.total())
            )?;
        }
        let Some(memory) = self.args.memory else {
            return Ok(());
        };
        let memory = [Some(memory as usize * 1_000_000_000)].repeat(self.names.len());
        // The plan comes before an error.
        out.flush()?;
        self.plan.check(&self.names, &memory)?;
        let fits = |positions: usize| {
            let bytes = self.bytes.clone();
            let bytes = bytes.with_caches(config, DIVIDED_DTYPE, positions);
            let plan = plan(config, &bytes, &self.names, self.args);
            plan.is_ok_and(|plan| plan.check(&self.names, &memory).is_ok())
        };
        let longest = config.max_position_embeddings;
        let (mut known, mut most) = (self.positions, longest);
        while known < most {
            let middle = known + (most - known).div_ceil(2);
            match fits(middle) {
                true => known = middle,
                false => most = middle - 1,
            }
        }
        writeln!(
            out,
            "  fits, with {} of {} positions at most; intermediate tensors come on top",
            grouped(known),
            grouped(longest)
        )?;
        Ok(())
    }
}

fn plan(
    config: &ModelConfig,
    bytes: &ModelBytes,
    names: &[String],
    args: &Options,
) -> Result<Plan, PlacementError> {
    let SharingArgs { split, parallel } = &args.sharing;
    Plan::new(config, bytes, names, (*parallel).into(), split.as_deref())
}

/// Bytes of the model's tensors, by how it is loaded.
fn memory(checkpoint: &Checkpoint) -> Result<Vec<(&'static str, usize)>, Box<dyn Error>> {
    let device = DeviceSpec::Flex.init()?;
    let kinds = [
        ("packed, f32 activations", false, FloatDType::F32),
        ("packed, bf16 activations", false, FloatDType::BF16),
        ("expanded to f32", true, FloatDType::F32),
        ("expanded to bf16", true, FloatDType::BF16),
    ];
    let bytes = kinds.map(|(name, expand, dtype)| {
        let options = LoadOptions {
            dtype,
            expand,
            ..LoadOptions::default()
        };
        Ok((name, checkpoint.weight_bytes(&options, &device)?))
    });
    bytes.into_iter().collect()
}

fn print_config(config: &ModelConfig, out: &mut impl Write) -> io::Result<()> {
    let layers = |wanted: fn(&AttentionKind) -> bool| {
        config.layers.iter().filter(|kind| wanted(kind)).count()
    };
    let window = layers(|kind| matches!(kind, AttentionKind::Window));
    let sparse = layers(|kind| matches!(kind, AttentionKind::CompressedSparse { .. }));
    let heavy = layers(|kind| matches!(kind, AttentionKind::HeavilyCompressed { .. }));
    let makers = layers(|kind| matches!(kind, AttentionKind::Shared(own) if own.makes_rows()));
    let pickers = layers(|kind| matches!(kind, AttentionKind::Shared(own) if own.picks()));
    let shared = layers(|kind| matches!(kind, AttentionKind::Shared(_)));
    let mut line = |name: &str, value: &dyn Display| writeln!(out, "  {name:<22}{value}");
    let kinds = match shared {
        0 => format!("{sparse} compressed sparse, {heavy} heavily compressed"),
        _ => format!("{shared} sharing the rows of {makers} and the picks of {pickers}"),
    };
    let kinds = format!(
        "{} ({window} window, {kinds}), {}",
        config.layers.len(),
        drafter(config)
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
    if let Some(candidates) = config.candidates {
        let (blocks, size, layer) = (candidates.blocks, candidates.block_size, candidates.layer);
        let text = format!("{blocks} blocks of {size} rows, by layer {layer}");
        line("candidates", &text)?;
    }
    if let Some(engram) = &config.engram {
        let (rows, layers) = (&engram.rows, &engram.layers);
        let text = format!("tables of {rows:?} rows before layers {layers:?}, on the host");
        line("engrams", &text)?;
    }
    line("vocabulary", &config.vocab_size)?;
    line("longest context", &config.max_position_embeddings)
}

/// What drafts.
fn drafter(config: &ModelConfig) -> String {
    match &config.dspark {
        None => format!("{} MTP", config.num_mtp_layers),
        Some(dspark) => format!(
            "DSpark with {} layers, blocks of {} tokens, taps of layers {:?}",
            dspark.layers, dspark.block_size, dspark.target_layers
        ),
    }
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

/// The part of the model that a tensor belongs to.
fn part(name: &str) -> &'static str {
    const PARTS: [(&str, &str); 10] = [
        (".engram.", "engrams"),
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
    if name.starts_with("mtp.") {
        return "what drafts";
    }
    let part = PARTS.iter().find(|(pattern, _)| name.contains(pattern));
    part.map_or("norms", |(_, part)| part)
}

fn parameters(tensor: &CheckpointTensor<'_>) -> usize {
    let elements = tensor.shape.iter().product();
    match tensor.dtype {
        _ if tensor.name.ends_with("scale") || tensor.name.ends_with("scale_2") => 0,
        _ if tensor.name.ends_with(".tid2eid") => 0,
        Dtype::I8 | Dtype::U8 => 2 * elements,
        _ => elements,
    }
}

/// Bytes that a cache takes whatever its length, and bytes per token.
fn cache_bytes(config: &ModelConfig, dtype: FloatDType) -> Result<(usize, usize), CacheError> {
    let bytes_of = |layout: CacheLayout, capacity: usize| {
        let options = CacheConfig {
            capacity,
            rollback: Rollback::Bounded(1),
            dtype,
            ..CacheConfig::default()
        };
        layout.bytes(options)
    };
    let both = |capacity: usize| -> Result<usize, CacheError> {
        let trunk = bytes_of(CacheLayout::trunk(config), capacity)?;
        Ok(match (&config.dspark, config.num_mtp_layers) {
            (Some(_), _) => trunk + bytes_of(CacheLayout::dspark(config), capacity)?,
            (None, 0) => trunk,
            (None, _) => trunk + bytes_of(CacheLayout::mtp(config), capacity)?,
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
