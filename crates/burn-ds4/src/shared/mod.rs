//! What the commands have in common: where the shipped files are, how errors are shown, how a
//! checkpoint is loaded.

pub mod answer_text;
pub mod devices;
pub mod drafts;
pub mod flash;
pub mod kernels;
pub mod load_bar;
pub mod log;
pub mod place;
pub mod warm_up;

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::FloatDType;
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::quant::Activations;
use clap::{Args, ValueEnum};
use ds4_model::checkpoint::LoadOptions;
use ds4_model::printable::Printable;

/// What some editors write before a text.
pub const BYTE_ORDER_MARK: char = '\u{feff}';

/// An output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Head {
    /// The output matrix.
    Dense,
    /// The clustered head.
    Flash,
}

/// Dtype of a model's activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, 8 of them exponent.
    Bf16,
    /// 16 bits, 5 of them exponent.
    F16,
}

impl From<Dtype> for FloatDType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

/// What products by FP8 and FP4 weights do to their other operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum ActivationsArg {
    /// Nothing.
    #[default]
    Exact,
    /// Round it to FP8, as the released model does.
    Released,
}

impl From<ActivationsArg> for Activations {
    fn from(activations: ActivationsArg) -> Self {
        match activations {
            ActivationsArg::Exact => Self::Exact,
            ActivationsArg::Released => Self::Released,
        }
    }
}

/// What is rounded as in the released model.
#[derive(Args, Clone, Copy, Debug, Hash)]
pub struct RoundingArgs {
    /// Rounds cached rows to FP8 and FP4 and back, as the released model was trained with.
    #[arg(long)]
    pub quantized_cache: bool,
    /// What products by FP8 and FP4 weights do to their other operand.
    #[arg(long, value_enum, default_value_t)]
    pub activations: ActivationsArg,
}

impl RoundingArgs {
    /// The options with this rounding.
    pub fn apply(self, options: LoadOptions) -> LoadOptions {
        LoadOptions {
            quantized_cache: self.quantized_cache,
            activations: self.activations.into(),
            ..options
        }
    }
}

/// How a checkpoint is loaded onto a device of that kind.
pub fn load_options(device: DeviceSpec, dtype: Dtype, drafter: bool) -> LoadOptions {
    LoadOptions {
        dtype: dtype.into(),
        // Decoding again and again is slow on a CPU, and memory is cheap there.
        expand: device == DeviceSpec::Flex,
        drafter,
        ..LoadOptions::default()
    }
}

/// A file or directory of the repository's `assets`: of the checkout that cargo runs the program
/// in, of the one it was built in, or under the current directory.
pub fn asset(name: &str) -> PathBuf {
    let running = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let crates = running.into_iter().chain([built]);
    let mut roots = crates.filter_map(|path| path.ancestors().nth(2).map(Path::to_path_buf));
    let root = roots.find(|root| root.join("assets").is_dir());
    root.unwrap_or_default().join("assets").join(name)
}

/// The checkpoint that comes with the repository.
pub fn shipped_checkpoint() -> PathBuf {
    asset("ds4-tiny")
}

/// The checkpoint that comes with the repository and has the drafter of the current releases.
pub fn drafting_checkpoint() -> PathBuf {
    asset("ds4-tiny-dspark")
}

/// Writes a line to standard error. That it is full or closed is no reason to end.
pub fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Ends the program: an error is printed, with its causes, and becomes exit code 1.
pub fn finish(result: Result<(), Box<dyn Error>>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    let kind = error.downcast_ref().map(io::Error::kind);
    if kind == Some(io::ErrorKind::BrokenPipe) {
        // The reader of the output has closed it.
        return ExitCode::SUCCESS;
    }
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = Printable(error).to_string();
        // Many messages already end with their cause.
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
        source = error.source();
    }
    note(format_args!("error: {message}"));
    ExitCode::FAILURE
}
