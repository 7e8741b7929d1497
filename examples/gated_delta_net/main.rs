//! Decoding with a custom linear-attention layer, made of the gated delta rule and the products and
//! norms around it.
//!
//!     cargo run --release -p ds4-model --example gated_delta_net
//!     cargo run --release --features wgpu -p ds4-model --example gated_delta_net -- \
//!         --device wgpu --tokens 8
//!
//! `layer/` is a Burn module, [`GatedDeltaNet`]: the layer that Qwen3-Next and Qwen3.5 have in
//! place of most of their attention. The weights are random. The program runs some sequences of a
//! batch, all tokens at once and one by one, then lets the layer verify a draft and accepts a part
//! of it. Each time it shows how far the two ways are apart.

mod layer;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use clap::{Parser, ValueEnum};
use layer::{GatedDeltaNetConfig, GatedDeltaNetState};

const D_MODEL: usize = 256;
const SLOTS: usize = 4;
/// The slots of the sequences; the one in the middle is padding.
const BATCH: [i64; 3] = [2, -1, 0];

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

/// Runs a gated delta net on several tokens at once and one by one, and shows that both give the
/// same.
#[derive(Debug, Parser)]
struct Args {
    /// Tokens of each sequence.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    tokens: u16,
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX. Without, the first of cuda, wgpu and flex that
    /// is there.
    #[arg(long)]
    device: Option<DeviceSpec>,
    /// Of weights and activations; what the recurrence remembers is in f32.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
}

impl Dtype {
    fn float(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
        }
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let (name, device) = device(args.device)?;
    let (tokens, dtype) = (usize::from(args.tokens), args.dtype.float());
    if !device.supports_dtype(dtype) {
        return Err(format!("device `{name}` has no {dtype:?}").into());
    }
    device.seed(0);
    let config = GatedDeltaNetConfig::new(D_MODEL, 4, 8)
        .with_width(64)
        .with_channels(64);
    let layer = config.init(&device).cast(dtype);
    let state = GatedDeltaNetState::zeros(&config, SLOTS, dtype, FloatDType::F32, &device);
    let mut out = io::stdout().lock();
    writeln!(out, "{} parameters on {name}", layer.num_params())?;
    writeln!(
        out,
        "states {:?} (convolution) and {:?} (recurrent)",
        state.convolution.dims(),
        state.recurrent.dims()
    )?;

    let normal = Distribution::Normal(0.0, 1.0);
    let random = |tokens: usize| {
        Tensor::<3>::random([BATCH.len(), tokens, D_MODEL], normal, &device).cast(dtype)
    };
    let x = random(tokens);
    let slots = || integers(&BATCH, &device);
    let (together, state) = layer.forward(x.clone(), state, slots());
    writeln!(
        out,
        "outputs {:?}, checksum {:.4}",
        together.dims(),
        checksum(together.clone())
    )?;

    // The sequences start again, in the same slots.
    let mut plain = state.reset(2).reset(0);
    let mut steps = Vec::new();
    // The draft has all tokens, of which half are right. `halfway` is the state that must result.
    let accepted = tokens.div_ceil(2);
    let begun = plain.clone();
    let mut halfway = plain.clone();
    for token in 0..tokens {
        let step = x.clone().slice_dim(1, token..token + 1);
        let output;
        (output, plain) = layer.forward(step, plain, slots());
        steps.push(output);
        if token + 1 == accepted {
            halfway = plain.clone();
        }
    }
    let difference = largest_difference(together.clone(), Tensor::cat(steps, 1));
    writeln!(
        out,
        "{tokens} tokens at once and one by one: outputs differ by {difference:e} at most"
    )?;

    let (verified, draft) = layer.verify(x, &begun, slots());
    let difference = largest_difference(verified, together);
    writeln!(
        out,
        "a draft of {tokens}, verified: outputs differ by {difference:e} at most"
    )?;
    let count = vec![accepted as i64; BATCH.len()];
    let state = begun.accept(draft, integers(&count, &device));
    let next = random(1);
    let (after_draft, _) = layer.forward(next.clone(), state, slots());
    let (after_steps, _) = layer.forward(next, halfway, slots());
    let difference = largest_difference(after_draft, after_steps);
    writeln!(
        out,
        "{accepted} of it accepted, and one token more: outputs differ by {difference:e} at most"
    )?;
    Ok(())
}

/// The device asked for or, without one, the fastest kind that is there.
fn device(asked: Option<DeviceSpec>) -> Result<(DeviceSpec, Device), Box<dyn Error>> {
    if let Some(spec) = asked {
        return Ok((spec, spec.init()?));
    }
    let preferred = [DeviceSpec::Cuda(0), DeviceSpec::Wgpu, DeviceSpec::Flex];
    let present = |spec: DeviceSpec| Some((spec, spec.init().ok()?));
    let found = preferred.into_iter().find_map(present);
    found.ok_or_else(|| "no device: build with one of the features flex, wgpu and cuda".into())
}

fn integers(values: &[i64], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

/// The sum of all absolute values.
fn checksum(outputs: Tensor<3>) -> f32 {
    let outputs = outputs.cast(FloatDType::F32);
    outputs.abs().sum().into_scalar()
}

fn largest_difference(a: Tensor<3>, b: Tensor<3>) -> f32 {
    let [a, b] = [a, b].map(|outputs| outputs.cast(FloatDType::F32));
    (a - b).abs().max().into_scalar()
}
